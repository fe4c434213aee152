//! Rows in the type of the network, multiplied so that a row's bits depend on nothing but itself and the weights: the format of
//! `exact`, in which the engine and the trainer give a token the same log-probability. [`crate::ops::exact`] says how. Gradients are those
//! of plain rows: nothing is compared with them.
//!
//! A block's output, with its adapter's part, is rounded before it is added to the residual stream, as in the engine's steps.

use std::collections::BTreeMap;

use tch::Tensor;

use super::{Format, Piece, Plain, Rows, Use};
use crate::cuda::Products;
use crate::cuda::kernels::ScaledRows;
use crate::error::Result;
use crate::model::lora::Lora;
use crate::model::spec::{LinearSpec, ModelSpec};
use crate::ops::exact;
use crate::ops::swiglu::{Activation, GateUp};

/// Matrices that are multiplied as they are, row by row alike in the engine and in training.
#[derive(Debug)]
pub struct Exact;

/// Bytes of a GPU that products of a K in parts hold: matrices with equally many features share them.
pub fn bytes_of_parts(spec: &ModelSpec) -> usize {
    let cut = |linear: &LinearSpec| {
        let (features, k) = (linear.rows(), linear.columns);
        Some((features, Products::bytes_of_parts(features, k))).filter(|(_, bytes)| *bytes > 0)
    };
    let linears = spec.layers.iter().flat_map(|block| block.linears());
    linears.filter_map(|linear| cut(&linear)).collect::<BTreeMap<_, _>>().into_values().sum()
}

/// Bytes of a GPU that a machine's first run takes to find products of up to `rows` rows, and of `scored` rows of the head.
pub fn trial_bytes(spec: &ModelSpec, rows: usize, scored: usize) -> usize {
    let linears = spec.layers.iter().flat_map(|block| block.linears());
    let of_blocks = linears.map(|linear| Products::trial_bytes(rows, [linear.rows(), linear.columns])).max();
    of_blocks.unwrap_or(0).max(Products::trial_bytes(scored, [spec.vocab_size, spec.hidden_size]))
}

impl Format for Exact {
    fn name(&self) -> &'static str {
        "exact"
    }

    fn rounds(&self) -> bool {
        false
    }

    fn is_exact(&self) -> bool {
        true
    }

    fn refusal(&self, _of: Use, _spec: &ModelSpec, _on_gpu: bool) -> Option<String> {
        None
    }

    fn key(&self, _of: Use) -> &'static str {
        "exact"
    }

    fn workspace_bytes(&self, spec: &ModelSpec) -> usize {
        Products::BYTES + bytes_of_parts(spec)
    }

    fn forward(&self, x: &Rows, w: &Piece) -> Result<Tensor> {
        exact::product(x.plain(), &w.weight, w.bias.as_ref())
    }

    fn adapt(&self, x: &Rows, lora: &Lora, y: Tensor) -> Result<Tensor> {
        lora.add_exactly(x.plain(), y)
    }

    fn activate(&self, activation: Activation, gate_up: &GateUp, _is_read: bool) -> Result<Rows> {
        Ok(exact::activate(activation, gate_up)?.into())
    }

    fn backward_input(&self, dy: &Tensor, w: &Piece) -> Result<Tensor> {
        Plain.backward_input(dy, w)
    }

    fn accumulate_input(&self, dy: &Tensor, w: &Piece, dx: &mut Tensor) -> Result<()> {
        Plain.accumulate_input(dy, w, dx)
    }

    fn gate_up_backward(&self, d: &GateUp, rounded: Option<&ScaledRows>, w: &Piece) -> Result<Tensor> {
        Plain.gate_up_backward(d, rounded, w)
    }
}
