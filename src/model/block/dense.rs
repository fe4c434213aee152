//! The dense MLP: D(a(G x) * (U x)) with an activation a.
//!
//! T tokens, D hidden, F its width; in a tensor-parallel slice this rank's share.

use tch::Tensor;

use super::linear::Projection::Module;
use super::linear::{Linear, LinearSpec, Matrix, TpSplit};
use super::{BlockContext, BlockParams, ElementBytes, Expanded, MLP_NORMS as NORMS};
use crate::config::TargetModule::{DownProj, GateProj, UpProj};
use crate::cuda::kernels::ScaledRows;
use crate::error::Result;
use crate::model::format::{ActivationGradient, Rows};
use crate::ops::swiglu::{Activation, GateUp};

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
    pub(super) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        2 * bytes.narrow * self.intermediate
    }

    /// Bytes a token of the fullest moment of forward: gate and up, and the activation.
    pub(super) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        (2 * bytes.narrow + bytes.read) * self.intermediate
    }

    /// Bytes a token of the fullest moment of backward: the gradient that comes in and the normalised rows; gate and up, which become
    /// their gradients in place, unless they were kept; the gradients' rounded copy, of a format that rounds; the activation and its gradient. An
    /// adapter with dropout drops a copy of the activation, and its own part of the gradient comes in two tensors more.
    pub(super) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool, drops: bool) -> usize {
        let row = bytes.narrow * self.intermediate;
        let gate_up = if keeps_gate_up { 0 } else { 2 * row };
        let dropped = if drops { 3 * row } else { 0 };
        let rounded = 2 * bytes.rounded * self.intermediate;
        2 * bytes.narrow * self.hidden + gate_up + rounded + 2 * row + dropped
    }

    /// Bytes a token of the moment at which backward makes the gradient of the normalised rows, in a format that rounds: that gradient, the
    /// normalised rows and the gradient that came in; the gradients of gate and up, in whose place these were unless they were kept; the
    /// gradients' rounded copy.
    pub(super) fn input_gradient_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        let gate_up = if keeps_gate_up { 0 } else { 2 * bytes.narrow * self.intermediate };
        3 * bytes.narrow * self.hidden + gate_up + 2 * bytes.rounded * self.intermediate
    }
}

impl DenseSpec {
    /// The block's output [T, D], and what a backward may keep.
    pub(super) fn forward(
        self,
        ctx: &BlockContext<'_>,
        w: &BlockParams,
        h: &Tensor,
    ) -> Result<(Tensor, Expanded<GateUp>)> {
        let gate_up = project(w, &ctx.enter_rows(w, NORMS, h, &[Matrix::GateUp])?)?;
        let down = w.linear(Matrix::Down);
        let activate = |gate_up: &GateUp| down.format.activate(self.activation, gate_up, down.reads_plain());
        let (y, output) = ctx.leave(w, NORMS, down, &activate(&gate_up)?, h)?;
        Ok((y, Expanded { wide: Some(gate_up), output }))
    }

    /// dh, the gradient of the residual stream before it, from that of the block's output. What is not kept is computed again.
    pub(super) fn backward(
        self,
        ctx: &BlockContext<'_>,
        w: &BlockParams,
        (h, dy): (&Tensor, &Tensor), // [T, D]
        kept: Expanded<GateUp>,
        grads: &mut BlockParams,
    ) -> Result<Tensor> {
        let (normed, rstd) = ctx.enter(w, NORMS, h)?;
        let normed = Rows::from(normed);
        let gate_up = kept.wide.map_or_else(|| project(w, &normed), Ok)?;
        let down = w.linear(Matrix::Down);
        let output = match kept.output {
            None if w.norm(NORMS.post).is_some() => {
                Some(down.forward(&down.format.activate(self.activation, &gate_up, down.reads_plain())?)?)
            }
            kept => kept,
        };
        let d_output = ctx.leave_backward(w, NORMS, dy, output.as_ref(), grads)?;
        drop(output);
        let (d_down, format) = (grads.linear_mut(Matrix::Down), w.linear(Matrix::GateUp).format);
        let d = if d_down.pieces.is_empty() {
            // An adapter adds to the activation's gradient, and needs the activation for that.
            let d_act = down.backward(&d_output, &gate_up.activate(self.activation)?, d_down)?;
            format.activate_backward(self.activation, gate_up, &d_act)?
        } else {
            let d = format.activate_backward(self.activation, gate_up, &down.backward_input(&d_output)?)?;
            down.weight_gradient(&d_output, &d.act, d_down)?;
            d
        };
        let ActivationGradient { d_gate_up, act, rounded } = d;
        drop(act);
        let d = (&d_gate_up, rounded.as_ref());
        let d_normed = project_backward(w, d, normed.plain(), grads.linear_mut(Matrix::GateUp))?;
        ctx.enter_backward(w, NORMS, &d_normed, (h, dy), rstd.as_ref(), grads)
    }
}

/// Gate and up of x, with the adapter's part.
fn project(w: &BlockParams, x: &Rows /* [T, D] */) -> Result<GateUp> {
    let w = w.linear(Matrix::GateUp);
    Ok(match (w.format.gate_up(x, w.piece())?, &w.lora) {
        (gate_up, None) => gate_up,
        (gate_up, Some(lora)) if w.format.is_exact() => GateUp::of_pairs(w.format.adapt(x, lora, gate_up.pairs()?)?)?,
        (GateUp::Interleaved(pairs), Some(lora)) => GateUp::Interleaved(lora.add(x.plain(), pairs)?),
        (GateUp::Split { gate, up }, Some(lora)) => {
            let [lora_gate, lora_up] = lora.every_second_row();
            GateUp::Split { gate: lora_gate.add(x.plain(), gate)?, up: lora_up.add(x.plain(), up)? }
        }
    })
}

/// dx of [`project`]; the gradient of the weight, or of A and B, is added to `grads`. d may have been rounded on its way.
fn project_backward(
    w: &BlockParams,
    (d, rounded): (&GateUp, Option<&ScaledRows>),
    x: &Tensor, // [T, D]
    grads: &mut Linear,
) -> Result<Tensor> {
    let w = w.linear(Matrix::GateUp);
    let mut dx = w.format.gate_up_backward(d, rounded, w.piece())?;
    w.gate_up_weight_gradient(d, x, grads)?;
    match (&w.lora, &mut grads.lora, d) {
        (Some(lora), Some(gradient), GateUp::Interleaved(d)) => lora.backward(d, x, &mut dx, gradient)?,
        (Some(lora), Some(gradient), GateUp::Split { gate, up }) => {
            let (loras, gradients) = (lora.every_second_row(), gradient.every_second_row());
            for ((d, lora), mut gradient) in [gate, up].into_iter().zip(&loras).zip(gradients) {
                lora.backward(d, x, &mut dx, &mut gradient)?;
            }
        }
        _ => {}
    }
    Ok(dx) // [T, D]
}
