//! The plain format: rows and weights are multiplied in the type of the network.

use tch::Tensor;

use super::{Format, Piece, Rows, Use};
use crate::cuda::kernels::ScaledRows;
use crate::error::Result;
use crate::model::spec::ModelSpec;
use crate::ops::linear;
use crate::ops::swiglu::GateUp;

/// GEMMs without quantization.
#[derive(Debug)]
pub struct Plain;

impl Format for Plain {
    fn name(&self) -> &'static str {
        "none"
    }

    fn rounds(&self) -> bool {
        false
    }

    fn refusal(&self, _of: Use, _spec: &ModelSpec, _on_gpu: bool) -> Option<String> {
        None
    }

    fn forward(&self, x: &Rows, w: &Piece) -> Result<Tensor> {
        linear::forward(x.plain(), &w.weight, w.bias.as_ref())
    }

    fn forward_onto(&self, residual: &Tensor, x: &Rows, w: &Piece) -> Result<Tensor> {
        linear::forward_onto(residual, x.plain(), &w.weight)
    }

    fn gate_up(&self, x: &Rows, w: &Piece) -> Result<GateUp> {
        GateUp::project(x.plain(), &w.weight)
    }

    fn backward_input(&self, dy: &Tensor, w: &Piece) -> Result<Tensor> {
        linear::backward_input(dy, &w.weight)
    }

    fn accumulate_input(&self, dy: &Tensor, w: &Piece, dx: &mut Tensor) -> Result<()> {
        linear::accumulate_input(dy, &w.weight, dx)
    }

    fn gate_up_backward(&self, d: &GateUp, _rounded: Option<&ScaledRows>, w: &Piece) -> Result<Tensor> {
        d.backward_input(&w.weight)
    }
}

impl Default for &'static dyn Format {
    fn default() -> Self {
        &Plain
    }
}
