//! Bit-exact GEMMs, norms and SwiGLU.

use tch::{Kind, Tensor};

use super::{LANES, dot, gpu};
use crate::cuda::kernels::{SWISH_LIMIT, SWISH_SLOPE};
use crate::error::Result;
use crate::ops::rms_norm::NormOptions;
use crate::ops::swiglu::{Activation, GateUp};
use crate::ops::try_map;
use crate::phase;
use crate::torch::{f32_vec, tensor_on};

/// Elementwise products that are in memory at once.
const MOST_TERMS: i64 = 1 << 22;

/// Computes x w^T + bias, rounded once to the type of x. [T, N]
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; on a GPU [`crate::Error::Unequal`] if no GEMM algorithm matches the reference's bits.
pub fn product(
    x: &Tensor,            // [T, K]
    w: &Tensor,            // [N, K]
    bias: Option<&Tensor>, // [N]
) -> Result<Tensor> {
    if x.device().is_cuda() { gpu::product(x, w, bias, x.kind()) } else { Ok(sums(x, w, bias)?.f_to_kind(x.kind())?) }
}

/// Computes x w^T in float32, unrounded. [T, N]
///
/// # Errors
/// The errors of [`product`].
pub fn product_wide(
    x: &Tensor, // [T, K]
    w: &Tensor, // [N, K]
) -> Result<Tensor> {
    if x.device().is_cuda() { gpu::product(x, w, None, Kind::Float) } else { sums(x, w, None) }
}

/// Computes x w^T + bias in float32 on a CPU. Every [`LANES`]-th term of K is added to the same lane, in order, and then the lanes are added in
/// order. It uses elementwise multiplications and additions, which libtorch rounds independently of position.
fn sums(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let lanes = LANES as i64;
    let (rows, columns, k) = (x.size()[0], w.size()[0], w.size()[1]);
    let wide = |factor: &Tensor| -> Result<Tensor> {
        let missing = (k as u64).next_multiple_of(LANES as u64) as i64 - k;
        Ok(factor.f_to_kind(Kind::Float)?.f_constant_pad_nd([0, missing])?)
    };
    let [mut x, mut w] = try_map([x, w], wide)?;
    if phase::fires_unequal() {
        (x, w) = (x.f_flip([1])?, w.f_flip([1])?);
    }
    let out = Tensor::f_empty([rows, columns], (Kind::Float, x.device()))?;
    let at_once = (MOST_TERMS / (columns * lanes)).max(1);
    for first in (0..rows).step_by(at_once as usize) {
        let len = at_once.min(rows - first);
        let x = x.narrow(0, first, len).unsqueeze(1); // [t, 1, K]
        let mut sums = Tensor::f_zeros([len, columns, lanes], (Kind::Float, x.device()))?;
        for at in (0..x.size()[2]).step_by(LANES) {
            sums = sums.f_add_(&x.narrow(2, at, lanes).f_mul(&w.narrow(1, at, lanes).unsqueeze(0))?)?;
        }
        let mut sum = sums.select(2, 0);
        for lane in 1..lanes {
            sum = sum.f_add(&sums.select(2, lane))?;
        }
        out.narrow(0, first, len).f_copy_(&sum)?;
    }
    match bias {
        Some(bias) => Ok(out.f_add(&bias.f_to_kind(Kind::Float)?)?),
        None => Ok(out),
    }
}

/// Computes y += (x A^T) B^T, where each GEMM is rounded to the type of x.
///
/// # Errors
/// The errors of [`product`].
pub fn adapt(
    x: &Tensor, // [T, K]
    a: &Tensor, // [k, K]
    b: &Tensor, // [N, k]
    y: &Tensor, // [T, N]
) -> Result<()> {
    if x.device().is_cuda() {
        return gpu::adapt(x, a, b, y);
    }
    let _ = y.shallow_clone().f_add_(&product(&product(x, a, None)?, b, None)?)?;
    Ok(())
}

/// Computes x / sqrt(mean(x^2) + eps), multiplied by the columns' weights, in the weight's type. [.., D]
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; on a GPU the errors of its kernel.
pub fn rms_norm(
    x: &Tensor,      // [.., D]
    weight: &Tensor, // [D]
    norm: NormOptions,
) -> Result<Tensor> {
    if x.device().is_cuda() {
        return gpu::rms_norm(x, weight, norm);
    }
    let centre = if norm.zero_centred { 1.0 } else { 0.0 };
    let factors: Vec<f32> = f32_vec(weight)?.into_iter().map(|factor| centre + factor).collect();
    let mut host = f32_vec(x)?;
    host.chunks_exact_mut(factors.len()).for_each(|row| normalise(row, &factors, norm.eps));
    Ok(tensor_on(&host, x.device())?.view(x.size().as_slice()).f_to_kind(weight.kind())?)
}

/// Normalizes one row as in [`rms_norm`], in place.
pub(super) fn normalise(row: &mut [f32], factors: &[f32], eps: f64) {
    let rstd = 1.0 / (dot(row, row) / row.len() as f32 + eps as f32).sqrt();
    row.iter_mut().zip(factors).for_each(|(x, factor)| *x = *x * rstd * factor);
}

/// sqrt(2 / pi), used in GELU's tanh approximation.
const GELU_FACTOR: f32 = 0.797_884_6;

/// Computes activation(gate) * up, rounded once. [T, F]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn activate(activation: Activation, gate_up: &GateUp) -> Result<Tensor> {
    let GateUp::Split { gate, up } = gate_up else { return gate_up.activate(activation) }; // on a GPU, by the engine's kernel
    let (mut act, up) = (f32_vec(gate)?, f32_vec(up)?);
    let of: fn(f32, f32) -> f32 = match activation {
        Activation::Silu => |x, up| x / (1.0 + (-x).exp()) * up,
        Activation::GeluTanh => |x, up| 0.5 * x * (1.0 + (GELU_FACTOR * (x + 0.044_715 * x * x * x)).tanh()) * up,
        Activation::ClampedSwiglu => |x, up| {
            let (slope, limit) = (SWISH_SLOPE as f32, SWISH_LIMIT as f32);
            let (x, up) = (if x > limit { limit } else { x }, up.clamp(-limit, limit));
            x / (1.0 + (-slope * x).exp()) * (up + 1.0)
        },
    };
    act.iter_mut().zip(up).for_each(|(gate, up)| *gate = of(*gate, up));
    Ok(tensor_on(&act, gate.device())?.view(gate.size().as_slice()).f_to_kind(gate.kind())?)
}
