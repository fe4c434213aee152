//! The shape of a dense MLP: its parameters, how ranks split them, and its bytes.

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
    /// Width of the hidden layer: outputs of gate and up, inputs of down.
    pub intermediate: usize,
    /// The activation of the gate.
    pub activation: Activation,
}

impl DenseSpec {
    /// A dense MLP with SiLU.
    pub fn new(hidden: usize, intermediate: usize) -> Self {
        Self { hidden, intermediate, activation: Activation::Silu }
    }

    /// The shape of one tensor-parallel rank's slice.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        Self { intermediate: self.intermediate / tp_size, ..self }
    }

    /// The weight matrices of the MLP: gate and up, then down.
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

    /// Bytes per token of the gate and up outputs, which backward reads.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        2 * bytes.narrow * self.intermediate
    }

    /// Peak bytes per token during forward: gate and up, and the activation.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        (2 * bytes.narrow + bytes.read) * self.intermediate
    }

    /// Peak bytes per token during backward: the incoming gradient and the normalized rows; gate and up, overwritten by their gradients, unless
    /// forward kept them; the gradients' quantized copy in FP8; the activation and its gradient. A LoRA adapter with dropout adds a dropped-out copy
    /// of the activation, and two tensors for its own part of the gradient.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool, drops: bool) -> usize {
        let row = bytes.narrow * self.intermediate;
        let gate_up = if keeps_gate_up { 0 } else { 2 * row };
        let dropped = if drops { 3 * row } else { 0 };
        let rounded = 2 * bytes.rounded * self.intermediate;
        2 * bytes.narrow * self.hidden + gate_up + rounded + 2 * row + dropped
    }

    /// Bytes per token when an FP8 backward computes the gradient of the normalized rows: that gradient, the normalized rows and the incoming
    /// gradient; the gradients of gate and up, unless they overwrite kept activations; and the gradients' quantized copy.
    pub(in crate::model) fn input_gradient_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        let gate_up = if keeps_gate_up { 0 } else { 2 * bytes.narrow * self.intermediate };
        3 * bytes.narrow * self.hidden + gate_up + 2 * bytes.rounded * self.intermediate
    }
}
