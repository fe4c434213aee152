//! AdamW with decoupled weight decay (arXiv 1711.05101) over flat shards, in place.

use std::ops::Range;
use tch::{Kind, Tensor};

use crate::cuda::kernels::{self, AdamWScalars};
use crate::cuda::{OpCost, timed};
use crate::error::Result;
use crate::torch::scalar;

/// Elements processed at once, so that the temporaries stay in the CPU's cache.
const PIECE: i64 = 1 << 16;

/// Hyperparameters of one AdamW step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Epsilon added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay: the given ranges of master are multiplied by 1 - lr * weight_decay.
    pub weight_decay: f64,
}

/// Runs one step, number `step` (counted from 1), with g = grad * grad_scale: m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; master -=
/// lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps), after weight decay of the `decayed` ranges.
///
/// The new master is copied to `weight` in its own type. Every operation is elementwise, so the result does not depend on how a model is sharded. On
/// a GPU, float32 shards take one pass of one kernel.
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; the errors of the kernel.
#[allow(clippy::too_many_arguments)]
pub fn step(
    master: &mut Tensor, // [n] f32 (f64 in tests)
    m: &mut Tensor,      // [n], like master
    v: &mut Tensor,      // [n], like master
    grad: &Tensor,       // [n], any floating type
    weight: &mut Tensor, // [n], any floating type
    hyper: &AdamW,
    step: u64,
    grad_scale: f64,
    decayed: &[Range<i64>],
) -> Result<()> {
    if master.device().is_cuda() && master.kind() == Kind::Float {
        let passes = OpCost::pass(&[master, master, m, m, v, v, grad, weight]);
        let run = || kernels::adamw(master, m, v, grad, Some(weight), &scalars(hyper, step, grad_scale), decayed);
        return timed("optimizer", || passes, run);
    }
    decay(master, hyper, decayed)?;
    let total = master.size()[0];
    for start in (0..total).step_by(PIECE as usize) {
        let cut = |t: &Tensor| t.narrow(0, start, PIECE.min(total - start));
        update(&mut cut(master), &mut cut(m), &mut cut(v), &cut(grad), hyper, step, grad_scale)?;
        cut(weight).f_copy_(&cut(master))?;
    }
    Ok(())
}

/// Applies decoupled weight decay to some ranges.
pub(super) fn decay(master: &Tensor, hyper: &AdamW, decayed: &[Range<i64>]) -> Result<()> {
    let keep = 1.0 - hyper.lr * hyper.weight_decay;
    if keep != 1.0 {
        for range in decayed {
            let _ = master.narrow(0, range.start, range.end - range.start).f_mul_scalar_(keep)?;
        }
    }
    Ok(())
}

/// The coefficients that the kernel needs.
pub(super) fn scalars(hyper: &AdamW, step: u64, grad_scale: f64) -> AdamWScalars {
    let &AdamW { lr, beta1, beta2, eps, weight_decay } = hyper;
    let (correction1, correction2) = (1.0 - beta1.powf(step as f64), 1.0 - beta2.powf(step as f64));
    AdamWScalars {
        keep: (1.0 - lr * weight_decay) as f32,
        beta1: beta1 as f32,
        gain1: (grad_scale * (1.0 - beta1)) as f32,
        beta2: beta2 as f32,
        gain2: (grad_scale * (1.0 - beta2).sqrt()) as f32,
        root_scale: (1.0 / correction2.sqrt()) as f32,
        eps: eps as f32,
        rate: (-lr / correction1) as f32,
    }
}

/// Updates some elements, without weight decay.
pub(super) fn update(
    p: &mut Tensor,
    m: &mut Tensor,
    v: &mut Tensor,
    grad: &Tensor,
    hyper: &AdamW,
    step: u64,
    grad_scale: f64,
) -> Result<()> {
    let &AdamW { lr, beta1, beta2, eps, .. } = hyper;
    let correction1 = 1.0 - beta1.powf(step as f64);
    let correction2 = 1.0 - beta2.powf(step as f64);
    let g = grad.f_to_kind(p.kind())?;
    let _ = m.f_mul_scalar_(beta1)?.f_add_(&g.f_mul(&scalar(grad_scale * (1.0 - beta1)))?)?;
    let root = g.f_mul(&scalar(grad_scale * (1.0 - beta2).sqrt()))?;
    drop(g);
    let _ = v.f_mul_scalar_(beta2)?.f_addcmul_(&root, &root)?;
    let denominator = v.f_sqrt()?.f_mul_scalar_(1.0 / correction2.sqrt())?.f_add_scalar_(eps)?;
    let _ = p.f_addcdiv_(&m.f_mul(&scalar(-lr / correction1))?, &denominator)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, rand};
    use tch::Kind;

    const HYPER: AdamW = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };

    /// The algorithm as printed in the paper, element by element.
    fn reference(p: &mut [f64], m: &mut [f64], v: &mut [f64], g: &[f64], t: i32, decayed: &Range<i64>) {
        for i in 0..p.len() {
            m[i] = 0.9 * m[i] + 0.1 * g[i];
            v[i] = 0.99 * v[i] + 0.01 * g[i] * g[i];
            let (m_hat, v_hat) = (m[i] / (1.0 - 0.9f64.powi(t)), v[i] / (1.0 - 0.99f64.powi(t)));
            let decay = if decayed.contains(&(i as i64)) { 0.1 * p[i] } else { 0.0 };
            p[i] -= 0.01 * (m_hat / (v_hat.sqrt() + 1e-8) + decay);
        }
    }

    #[test]
    fn adamw_matches_the_papers_formula() {
        let (mut p, mut m, mut v) = (rand(&[50]), Tensor::zeros_like(&rand(&[50])), Tensor::zeros_like(&rand(&[50])));
        let mut weight = p.to_kind(Kind::BFloat16);
        let host = |t: &Tensor| Vec::<f64>::try_from(t).unwrap();
        let (mut rp, mut rm, mut rv) = (host(&p), host(&m), host(&v));
        for t in 1..=5 {
            let g = rand(&[50]);
            step(&mut p, &mut m, &mut v, &g, &mut weight, &HYPER, t, 0.5, &[10..20, 20..30]).unwrap();
            reference(&mut rp, &mut rm, &mut rv, &host(&(g * 0.5)), t as i32, &(10..30));
        }
        assert_close(&p, &Tensor::from_slice(&rp));
        assert!(weight.equal(&p.to_kind(Kind::BFloat16)));
        assert_close(&m, &Tensor::from_slice(&rm));
        assert_close(&v, &Tensor::from_slice(&rv));
    }

    #[test]
    fn sharded_adamw_steps_equal_the_whole_bit_for_bit() {
        let n = 200_064;
        let float = |shape: &[i64]| rand(shape).to_kind(Kind::Float);
        let (p, m, v, g) = (float(&[n]), float(&[n]) * 0.1, float(&[n]).square() * 0.1, float(&[n]));
        let run = |cuts: &[i64]| {
            let (p, m, v, w) = (p.copy(), m.copy(), v.copy(), p.copy());
            for cut in cuts.windows(2) {
                let part = |t: &Tensor| t.narrow(0, cut[0], cut[1] - cut[0]);
                step(&mut part(&p), &mut part(&m), &mut part(&v), &part(&g), &mut part(&w), &HYPER, 3, 0.7, &[])
                    .unwrap();
            }
            p
        };
        assert!(run(&[0, n]).equal(&run(&[0, 64, 64 * 7, 64 * 1001, n])));
    }

    #[test]
    fn adamw_with_zero_learning_rate_keeps_the_weights() {
        let (p, zeros) = (rand(&[8]), Tensor::zeros_like(&rand(&[8])));
        let mut moved = p.copy();
        let hyper = AdamW { lr: 0.0, ..HYPER };
        step(&mut moved, &mut zeros.copy(), &mut zeros.copy(), &zeros, &mut p.copy(), &hyper, 1, 1.0, &[0..4, 4..8])
            .unwrap();
        assert!(moved.equal(&p));
    }
}
