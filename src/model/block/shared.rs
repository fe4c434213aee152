//! A shared expert: an MLP that every token goes to, beside those that the router picks, in some families times the sigmoid of a gate of one
//! number a token: sigmoid(x g^T) E(x).
//!
//! T tokens, D hidden, F its width; in a tensor-parallel slice this rank's share. The gate is whole on every rank.

use tch::Tensor;

use super::params::BlockParams;
use crate::error::Result;
use crate::model::spec::{Matrix, ParamName, SharedExpertSpec};
use crate::ops::linear;
use crate::ops::swiglu::{Activation, GateUp, SwigluGradient, WeightedGradient};
use crate::torch::accumulation_kind;

/// Gate and up of a shared expert, and the sigmoid of its gate, in the accumulation kind, where it has one.
#[derive(Debug)]
pub(super) struct SharedRows {
    gate_up: GateUp, // [T, F]
    activation: Activation,
    share: Option<Tensor>, // [T, 1]
}

impl SharedRows {
    /// Up to gate and up.
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

    /// The output in the accumulation kind, of which every rank has a part. [T, D]
    pub(super) fn contract(&self, w: &BlockParams) -> Result<Tensor> {
        let output = w.linear(Matrix::SharedDown).forward(&self.gate_up.activate(self.activation)?.into())?;
        Ok(match &self.share {
            Some(share) => output.f_mul(share)?,
            None => output.f_to_kind(accumulation_kind(output.kind()))?,
        })
    }

    /// Adds to the gradient of what the expert and its gate read, in the accumulation kind, from that of the output.
    ///
    /// The sigmoid multiplies the activation in place of the output, which need not be there.
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
