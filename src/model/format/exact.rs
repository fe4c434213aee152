//! The format of `exact = true`: rows are in the network's type, and the bits of a row's result depend only on that row and the weights. So the
//! engine and the trainer compute the same log-probability for a token; [`crate::ops::exact`] explains how. Gradients are computed as in the plain
//! format, as nothing compares them.
//!
//! A block's output, including the adapter's part, is rounded before it is added to the residual stream, as in the engine's steps.

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

/// The bit-exact format: unquantized GEMMs whose rows have the same bits in the engine and in training.
#[derive(Debug)]
pub struct Exact;

/// GPU memory in bytes that GEMMs with a split K need for partial sums. Matrices with the same number of outputs share it.
pub fn bytes_of_parts(spec: &ModelSpec) -> usize {
    let cut = |linear: &LinearSpec| {
        let (features, k) = (linear.rows(), linear.columns);
        Some((features, Products::bytes_of_parts(features, k))).filter(|(_, bytes)| *bytes > 0)
    };
    let linears = spec.layers.iter().flat_map(|block| block.linears());
    linears.filter_map(|linear| cut(&linear)).collect::<BTreeMap<_, _>>().into_values().sum()
}

/// GPU memory in bytes that the first run on a machine needs to choose algorithms for GEMMs of up to `rows` rows, and of `scored` rows of the head.
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
