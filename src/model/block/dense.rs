//! The dense MLP: D(a(G x) * (U x)) with an activation a.
//!
//! T tokens, D hidden, F width of the MLP; in a tensor-parallel slice F is this rank's share.

use tch::Tensor;

use super::context::BlockContext;
use super::expanded::Expanded;
use super::linear::Linear;
use super::params::BlockParams;
use crate::cuda::kernels::ScaledRows;
use crate::error::Result;
use crate::model::format::{ActivationGradient, Rows};
use crate::model::spec::{DenseSpec, MLP_NORMS as NORMS, Matrix};
use crate::ops::swiglu::GateUp;

impl DenseSpec {
    /// Returns the block's output [T, D], and the activations that a backward may keep.
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

    /// Returns dh, the gradient of the residual stream before the MLP, given that of the block's output. Activations that were not kept are
    /// recomputed.
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
            // An adapter adds to the activation's gradient, and needs the activation to do so.
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

/// Computes gate and up for x, including the adapter's part.
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

/// Returns dx of [`project`] and adds the gradient of the weight, or of A and B, to `grads`. `rounded` is d's quantized copy, if one was made.
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
