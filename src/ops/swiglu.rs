//! Gated activations of the MLP: y = activation(gate) * up (for the clamped SwiGLU, up is clamped and 1 is added). Gate and up come from one weight
//! with interleaved rows, g0 u0 g1 u1 ..
//!
//! On a GPU one GEMM computes interleaved pairs, and the kernels read these. On a CPU two GEMMs read the weight's rows as strided views at no cost,
//! because interleaved activations could not be vectorized.

use tch::Tensor;

use super::linear::Onto;
use super::{linear, try_map};
pub use crate::cuda::kernels::Activation;
use crate::cuda::kernels::{SWISH_LIMIT, SWISH_SLOPE};
use crate::cuda::{OpCost, kernels, timed};
use crate::error::Result;

/// Gate and up, or the gradients of both.
#[derive(Debug)]
pub enum GateUp {
    /// Pairs g0 u0 g1 u1 .. in one tensor.
    Interleaved(Tensor), // [T, 2 F]
    /// Two separate tensors.
    Split {
        /// The gate, before its activation.
        gate: Tensor, // [T, F]
        /// The up projection.
        up: Tensor, // [T, F]
    },
}

/// Results of [`GateUp::backward`].
#[derive(Debug)]
pub struct SwigluGradient {
    /// The gradients of gate and up.
    pub d_gate_up: GateUp, // [T, F] each
    /// The activation, recomputed.
    pub act: Tensor, // [T, F]
}

/// Results of [`GateUp::weighted_backward`].
#[derive(Debug)]
pub struct WeightedGradient {
    /// The gradients of gate and up.
    pub d_gate_up: GateUp, // [T, F] each
    /// The activation, recomputed and multiplied by the weights.
    pub act: Tensor, // [T, F]
    /// The gradient of the weights, in the accumulation kind.
    pub d_weights: Tensor, // [T]
}

impl GateUp {
    /// Computes gate and up: x w^T.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn project(
        x: &Tensor, // [T, D]
        w: &Tensor, // [2 F, D]
    ) -> Result<Self> {
        if kernels::serve(x) {
            return Ok(GateUp::Interleaved(linear::forward(x, w, None)?));
        }
        let [gate, up] = try_map(halves(w), |w| linear::forward(x, &w, None))?;
        Ok(GateUp::Split { gate, up })
    }

    /// Makes gate and up from the interleaved output of one GEMM.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn of_pairs(pairs: Tensor /* [T, 2 F] */) -> Result<Self> {
        if kernels::serve(&pairs) {
            return Ok(GateUp::Interleaved(pairs));
        }
        let pairs = pairs.view([pairs.size()[0], -1, 2]);
        let [gate, up] = try_map([0, 1], |which| Ok(pairs.select(2, which).f_contiguous()?))?;
        Ok(GateUp::Split { gate, up })
    }

    /// Gate and up, or their gradients, interleaved in one tensor. [T, 2 F]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn pairs(&self) -> Result<Tensor> {
        match self {
            GateUp::Interleaved(pairs) => Ok(pairs.shallow_clone()),
            GateUp::Split { gate, up } => Ok(Tensor::f_stack(&[gate, up], 2)?.view([gate.size()[0], -1])),
        }
    }

    /// Computes activation(gate) * up. [T, F]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn activate(&self, activation: Activation) -> Result<Tensor> {
        match self {
            GateUp::Interleaved(pairs) => {
                let work = || OpCost { bytes: 1.5 * OpCost::pass(&[pairs]).bytes, flop: 0.0 };
                timed("activation", work, || kernels::swiglu_forward(activation, pairs))
            }
            GateUp::Split { gate, up } => Ok(activation.of(gate)?.f_mul_(&activation.factor(up.shallow_clone())?)?),
        }
    }

    /// Returns the gradients of gate and up, in their memory, given that of the activation; also returns the recomputed activation.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`]; [`crate::Error::InvalidArgument`] if `d_act` does not fit.
    pub fn backward(self, activation: Activation, d_act: &Tensor /* [T, F] */) -> Result<SwigluGradient> {
        match self {
            GateUp::Interleaved(pairs) => {
                let work = || OpCost { bytes: 6.0 * OpCost::pass(&[d_act]).bytes, flop: 0.0 };
                let run = || kernels::swiglu_backward(activation, d_act, pairs);
                let [d_pairs, act] = timed("activation, backward", work, run)?;
                Ok(SwigluGradient { d_gate_up: GateUp::Interleaved(d_pairs), act })
            }
            GateUp::Split { gate, up } => {
                let (mut d_up, passes) = (activation.of(&gate)?, activation.passes_up(&up)?);
                let mut factor = activation.factor(up)?;
                let act = d_up.f_mul(&factor)?;
                let d_gate = activation.backward(&gate, factor.f_mul_(d_act)?)?;
                d_up = d_up.f_mul_(d_act)?;
                if let Some(passes) = passes {
                    d_up = d_up.f_mul_(&passes)?;
                }
                Ok(SwigluGradient { d_gate_up: GateUp::Split { gate: d_gate, up: d_up }, act })
            }
        }
    }

    /// Computes [`GateUp::backward`] for an activation that is multiplied by a weight per row; `d_act` is the gradient of the weighted activation.
    /// Returns the gradients of gate and up, the weighted activation, and the gradient of the weights [T] in the accumulation type.
    ///
    /// # Errors
    /// The errors of [`GateUp::backward`].
    pub fn weighted_backward(
        self,
        activation: Activation,
        d_act: &Tensor,   // [T, F]
        weights: &Tensor, // [T, 1], in the accumulation kind
    ) -> Result<WeightedGradient> {
        if let GateUp::Interleaved(pairs) = self {
            let work = || OpCost { bytes: 6.0 * OpCost::pass(&[d_act]).bytes, flop: 0.0 };
            let run = || kernels::swiglu_weighted_backward(activation, d_act, weights, pairs);
            let [d_pairs, act, d_weights] = timed("activation, backward", work, run)?;
            return Ok(WeightedGradient { d_gate_up: GateUp::Interleaved(d_pairs), act, d_weights });
        }
        let weighted = |t: &Tensor| -> Result<Tensor> { Ok(t.f_mul(weights)?.f_to_kind(t.kind())?) };
        let SwigluGradient { d_gate_up, act } = self.backward(activation, &weighted(d_act)?)?;
        let d_weights = act.f_mul(d_act)?.f_sum_dim_intlist(-1, false, weights.kind())?;
        Ok(WeightedGradient { d_gate_up, act: weighted(&act)?, d_weights })
    }

    /// For gradients: computes the weight gradient dw = self^T x or dw += self^T x.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn weight_gradient(
        &self,
        x: &Tensor,      // [T, D]
        dw: &mut Tensor, // [2 F, D]
        onto: Onto,
    ) -> Result<()> {
        match self {
            GateUp::Interleaved(d) => linear::weight_gradient(d, x, dw, onto),
            GateUp::Split { gate, up } => {
                let [mut d_gate, mut d_up] = halves(dw);
                linear::weight_gradient(gate, x, &mut d_gate, onto)?;
                linear::weight_gradient(up, x, &mut d_up, onto)
            }
        }
    }

    /// For gradients: computes the input gradient dx = self w. [T, D]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn backward_input(&self, w: &Tensor /* [2 F, D] */) -> Result<Tensor> {
        match self {
            GateUp::Interleaved(d) => linear::backward_input(d, w),
            GateUp::Split { gate, up } => {
                let [w_gate, w_up] = halves(w);
                let mut dx = linear::backward_input(gate, &w_gate)?;
                linear::accumulate_input(up, &w_up, &mut dx)?;
                Ok(dx)
            }
        }
    }
}

impl Activation {
    /// Computes activation(gate).
    fn of(self, gate: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Silu => gate.f_silu()?,
            Self::GeluTanh => gate.f_gelu(TANH)?,
            Self::ClampedSwiglu => {
                let gate = gate.f_clamp_max(SWISH_LIMIT)?;
                gate.f_mul_scalar(SWISH_SLOPE)?.f_sigmoid_()?.f_mul_(&gate)?
            }
        })
    }

    /// The number by which the activated gate is multiplied: up, or clamped up plus 1.
    fn factor(self, up: Tensor) -> Result<Tensor> {
        match self {
            Self::Silu | Self::GeluTanh => Ok(up),
            Self::ClampedSwiglu => Ok(up.f_clamp(-SWISH_LIMIT, SWISH_LIMIT)?.f_add_scalar_(1.0)?),
        }
    }

    /// 1 where the gradient passes to up, and 0 where up is clamped; `None` if nothing is clamped.
    fn passes_up(self, up: &Tensor) -> Result<Option<Tensor>> {
        match self {
            Self::Silu | Self::GeluTanh => Ok(None),
            Self::ClampedSwiglu => Ok(Some(up.f_abs()?.f_le(SWISH_LIMIT)?.f_to_kind(up.kind())?)),
        }
    }

    /// Computes d activation'(gate), in d's memory.
    fn backward(self, gate: &Tensor, d: Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Silu => gate.f_silu_backward_grad_input(&d, &d)?,
            Self::GeluTanh => gate.f_gelu_backward_grad_input(&d, &d, TANH)?,
            Self::ClampedSwiglu => {
                let (cut, passes) = (gate.f_clamp_max(SWISH_LIMIT)?, gate.f_le(SWISH_LIMIT)?);
                let share = cut.f_mul_scalar(SWISH_SLOPE)?.f_sigmoid_()?;
                let rest = share.f_rsub_scalar(1.0)?.f_mul_(&cut)?.f_mul_scalar_(SWISH_SLOPE)?.f_add_scalar_(1.0)?;
                let mut d = d;
                d.f_mul_(&share)?.f_mul_(&rest)?.f_mul_(&passes)?
            }
        })
    }
}

/// libtorch's name for GELU's tanh approximation.
const TANH: &str = "tanh";

/// Two strided views [.., F, D] of an interleaved weight [.., 2 F, D]: its even and its odd rows.
pub(super) fn halves(w: &Tensor) -> [Tensor; 2] {
    let mut size = w.size();
    let rows = size.len() - 2;
    size.splice(rows..=rows, [size[rows] / 2, 2]);
    let pairs = w.view(size.as_slice());
    [pairs.select(-2, 0), pairs.select(-2, 1)]
}

#[cfg(test)]
mod tests {
    use std::f64::consts::PI;

    use tch::Kind;

    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn swiglu_matches_autograd() {
        let tanh = |gate: &Tensor| {
            let inner: Tensor = (gate + 0.044715 * gate * gate * gate) * (2.0 / PI).sqrt();
            0.5 * gate * (1.0 + inner.tanh())
        };
        of_activation(Activation::Silu, &|gate, up| gate.sigmoid() * gate * up);
        of_activation(Activation::GeluTanh, &|gate, up| tanh(gate) * up);
        of_activation(Activation::ClampedSwiglu, &|gate, up| {
            let (gate, up) = (gate.clamp_max(7.0), up.clamp(-7.0, 7.0));
            (&gate * 1.702).sigmoid() * gate * (up + 1.0)
        });
    }

    /// Weights are large enough that some gates and ups are clamped.
    fn of_activation(activation: Activation, of_pairs: &dyn Fn(&Tensor, &Tensor) -> Tensor) {
        let (x, w, dy) = (leaf(&rand(&[5, 3])), leaf(&(rand(&[12, 3]) * 8.0)), rand(&[5, 6]));
        let pairs = x.linear(&w, None::<&Tensor>).view([5, 6, 2]);
        let is_cut = |which| pairs.select(2, which).gt(7.0).any().int64_value(&[]) == 1;
        assert!(is_cut(0) && is_cut(1));
        let reference = of_pairs(&pairs.select(2, 0), &pairs.select(2, 1));
        let grads = Tensor::run_backward(&[(&reference * &dy).sum(None)], &[&x, &w], false, false);
        let (x, w) = (x.detach(), w.detach());
        let gate_up = GateUp::project(&x, &w).unwrap();
        assert_close(&gate_up.pairs().unwrap(), &x.linear(&w, None::<&Tensor>));
        let of_pairs = GateUp::of_pairs(gate_up.pairs().unwrap()).unwrap();
        assert_close(&of_pairs.activate(activation).unwrap(), &reference);
        assert_close(&gate_up.activate(activation).unwrap(), &reference);
        let SwigluGradient { d_gate_up: d, act } = gate_up.backward(activation, &dy).unwrap();
        assert_close(&act, &reference);
        assert_close(&d.backward_input(&w).unwrap(), &grads[0]);
        let weights = rand(&[5, 1]);
        let of_weights = GateUp::project(&x, &w).unwrap().weighted_backward(activation, &dy, &weights).unwrap();
        assert_close(&of_weights.act, &(&reference * &weights));
        assert_close(&of_weights.d_weights, &(&reference * &dy).sum_dim_intlist(-1, false, Kind::Double));
        let of_dy = GateUp::project(&x, &w).unwrap().backward(activation, &(&dy * &weights)).unwrap().d_gate_up;
        assert_close(&of_weights.d_gate_up.backward_input(&w).unwrap(), &of_dy.backward_input(&w).unwrap());
        let mut dw = rand(&[12, 3]);
        let before = dw.copy();
        d.weight_gradient(&x, &mut dw, Onto::Sum).unwrap();
        assert_close(&dw, &(before + &grads[1]));
    }
}
