//! The shape of a dense MLP: its parameters and how ranks share them, and its bytes.

use super::bytes::ElementBytes;
use super::linear::Projection::Module;
use super::linear::{LinearSpec, Matrix, TpSplit};
use crate::config::TargetModule::{DownProj, GateProj, UpProj};
use crate::ops::swiglu::Activation;

/// The shape of a dense MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width between its products.
    pub intermediate: usize,
    /// The function of its gate.
    pub activation: Activation,
}

impl DenseSpec {
    /// With SiLU.
    pub fn new(hidden: usize, intermediate: usize) -> Self {
        Self { hidden, intermediate, activation: Activation::Silu }
    }

    /// The share of a rank.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        Self { intermediate: self.intermediate / tp_size, ..self }
    }

    /// The matrices of the MLP.
    pub fn linears(self) -> [LinearSpec; 2] {
        let gate_up = LinearSpec {
            matrix: Matrix::GateUp,
            groups: self.intermediate,
            inner: 1,
            columns: self.hidden,
            projections: vec![(Module(GateProj), 1), (Module(UpProj), 1)],
            split: TpSplit::Rows,
            bias: None,
            experts: None,
        };
        let down = LinearSpec {
            matrix: Matrix::Down,
            groups: 1,
            inner: self.hidden,
            columns: self.intermediate,
            projections: vec![(Module(DownProj), 1)],
            split: TpSplit::Columns,
            bias: None,
            experts: None,
        };
        [gate_up, down]
    }

    /// Bytes a token of gate and up, which backward reads.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        2 * bytes.narrow * self.intermediate
    }

    /// Bytes a token of the fullest moment of forward: gate and up, and the activation.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        (2 * bytes.narrow + bytes.read) * self.intermediate
    }

    /// Bytes a token of the fullest moment of backward: the gradient that comes in and the normalised rows; gate and up, which become
    /// their gradients in place, unless they were kept; the gradients' rounded copy, of a format that rounds; the activation and its gradient. An
    /// adapter with dropout drops a copy of the activation, and its own part of the gradient comes in two tensors more.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool, drops: bool) -> usize {
        let row = bytes.narrow * self.intermediate;
        let gate_up = if keeps_gate_up { 0 } else { 2 * row };
        let dropped = if drops { 3 * row } else { 0 };
        let rounded = 2 * bytes.rounded * self.intermediate;
        2 * bytes.narrow * self.hidden + gate_up + rounded + 2 * row + dropped
    }

    /// Bytes a token of the moment at which backward makes the gradient of the normalised rows, in a format that rounds: that gradient, the
    /// normalised rows and the gradient that came in; the gradients of gate and up, in whose place these were unless they were kept; the
    /// gradients' rounded copy.
    pub(in crate::model) fn input_gradient_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        let gate_up = if keeps_gate_up { 0 } else { 2 * bytes.narrow * self.intermediate };
        3 * bytes.narrow * self.hidden + gate_up + 2 * bytes.rounded * self.intermediate
    }
}
