//! A shared expert: an MLP that processes every token, in addition to the experts that the router picks. In some families a gate, one number per
//! token, scales its output: sigmoid(x g^T) E(x).
//!
//! T tokens, D hidden, F its width; in a tensor-parallel slice this rank's share. The gate is whole on every rank.

use tch::Tensor;

use super::params::BlockParams;
use crate::error::Result;
use crate::model::spec::{Matrix, ParamName, SharedExpertSpec};
use crate::ops::linear;
use crate::ops::swiglu::{Activation, GateUp, SwigluGradient, WeightedGradient};
use crate::torch::accumulation_kind;

/// Gate and up of a shared expert, and the sigmoid of its output gate in the accumulation type, if it has one.
#[derive(Debug)]
pub(super) struct SharedRows {
    gate_up: GateUp, // [T, F]
    activation: Activation,
    share: Option<Tensor>, // [T, 1]
}

impl SharedRows {
    /// Computes gate and up, and the sigmoid of the output gate.
    pub(super) fn expand(spec: SharedExpertSpec, w: &BlockParams, normed: &Tensor /* [T, D] */) -> Result<Self> {
        let wide = accumulation_kind(normed.kind());
        let share = |gate: &Tensor| -> Result<Tensor> {
            Ok(linear::forward(&normed.f_to_kind(wide)?, &gate.f_to_kind(wide)?, None)?.f_sigmoid()?)
        };
        let share = w.norm(ParamName::SharedGate).map(share).transpose()?;
        let linear = w.linear(Matrix::SharedGateUp);
        let gate_up = linear.format.gate_up(&normed.shallow_clone().into(), linear.piece())?;
        Ok(Self { gate_up, activation: spec.0.activation, share })
    }

    /// This rank's part of the output, in the accumulation type; the ranks' parts must be summed. [T, D]
    pub(super) fn contract(&self, w: &BlockParams) -> Result<Tensor> {
        let output = w.linear(Matrix::SharedDown).forward(&self.gate_up.activate(self.activation)?.into())?;
        Ok(match &self.share {
            Some(share) => output.f_mul(share)?,
            None => output.f_to_kind(accumulation_kind(output.kind()))?,
        })
    }

    /// Given the gradient of the output, adds to the gradient of the rows that the expert and its gate read, in the accumulation type.
    ///
    /// Computes the sigmoid's gradient from the activation, because the output is not kept; the result is equal, as the down projection is linear.
    pub(super) fn backward(
        self,
        w: &BlockParams,
        normed: &Tensor,       // [T, D]
        d_output: &Tensor,     // [T, D]
        d_normed: &mut Tensor, // [T, D]
        grads: &mut BlockParams,
    ) -> Result<()> {
        let Self { gate_up, activation, share } = self;
        let d_act = w.linear(Matrix::SharedDown).backward_input(d_output)?; // [T, F], of a sigmoid of 1
        let (d_gate_up, act, d_share) = match &share {
            Some(share) => {
                let WeightedGradient { d_gate_up, act, d_weights } =
                    gate_up.weighted_backward(activation, &d_act, share)?;
                (d_gate_up, act, Some(d_weights.f_unsqueeze(1)?)) // [T, 1]
            }
            None => {
                let SwigluGradient { d_gate_up, act } = gate_up.backward(activation, &d_act)?;
                (d_gate_up, act, None)
            }
        };
        drop(d_act);
        w.linear(Matrix::SharedDown).weight_gradient(d_output, &act, grads.linear_mut(Matrix::SharedDown))?;
        drop(act);
        let gate_up = w.linear(Matrix::SharedGateUp);
        gate_up.gate_up_weight_gradient(&d_gate_up, normed, grads.linear_mut(Matrix::SharedGateUp))?;
        let _ = d_normed.f_add_(&gate_up.format.gate_up_backward(&d_gate_up, None, gate_up.piece())?)?;
        let Some((share, d_share)) = share.zip(d_share) else { return Ok(()) };
        let d_logits = share.f_rsub_scalar(1.0)?.f_mul_(&share)?.f_mul_(&d_share)?;
        let wide = share.kind();
        linear::accumulate_input(&d_logits, &gate(w).f_to_kind(wide)?, d_normed)?;
        if let Some(gradient) = grads.norm(ParamName::SharedGate) {
            linear::accumulate_weight(&d_logits, &normed.f_to_kind(wide)?, &mut gradient.shallow_clone())?;
        }
        Ok(())
    }
}

fn gate(w: &BlockParams) -> &Tensor {
    w.norm(ParamName::SharedGate).expect("a shared expert has a gate")
}
