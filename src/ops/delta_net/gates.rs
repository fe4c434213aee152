//! Per-head operations around the delta rule: normalization of queries and keys, decay and write strength, and the gated norm. All in the
//! accumulation type.
//!
//! T tokens, H value heads, d the width of a head.

use tch::Tensor;

use crate::error::Result;
use crate::ops::rms_norm;

/// Epsilon added to the squared length of queries and keys.
const LENGTH_EPS: f64 = 1e-6;

/// Computes sigmoid(x) with operations whose result for an element does not depend on its position. libtorch's own sigmoid, SiLU and softplus round
/// the last elements of a tensor differently, but packed sequences must equal single ones.
pub(super) fn sigmoid(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_neg()?.f_exp_()?.f_add_scalar_(1.0)?.f_reciprocal_()?)
}

/// Computes x sigmoid(x).
pub(super) fn silu(x: &Tensor) -> Result<Tensor> {
    Ok(sigmoid(x)?.f_mul_(x)?)
}

/// Computes the derivative of [`silu`], sigmoid(x) (1 + x (1 - sigmoid(x))), from x and its sigmoid.
pub(super) fn silu_slope(x: &Tensor, sigmoid: &Tensor) -> Result<Tensor> {
    Ok(sigmoid.f_rsub_scalar(1.0)?.f_mul_(x)?.f_add_scalar_(1.0)?.f_mul_(sigmoid)?)
}

/// Computes ln(1 + exp(x)) = max(x, 0) + ln(1 + exp(-|x|)).
fn softplus(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_abs()?.f_neg_()?.f_exp_()?.f_log1p_()?.f_add_(&x.f_clamp_min(0.0)?)?)
}

/// Returns x / sqrt(|x|^2 + 1e-6) over the last dimension, and the multiplier, which the backward needs.
pub(super) fn unit_length(x: &Tensor /* [.., d] */) -> Result<(Tensor, Tensor)> {
    let mut squares = x.f_mul(x)?.f_sum_dim_intlist(-1, true, x.kind())?;
    let factor = squares.f_add_scalar_(LENGTH_EPS)?.f_rsqrt_()?; // [.., 1]
    Ok((x.f_mul(&factor)?, factor))
}

/// Returns dx = (dy - y (y . dy)) factor, where y has length 1.
pub(super) fn unit_length_backward(
    dy: &Tensor,     // [.., d]
    y: &Tensor,      // [.., d]
    factor: &Tensor, // [.., 1]
) -> Result<Tensor> {
    let along = dy.f_mul(y)?.f_sum_dim_intlist(-1, true, y.kind())?;
    Ok(dy.f_sub(&along.f_mul(y)?)?.f_mul_(factor)?)
}

/// Computes the logarithm of a token's decay, g = -exp(A_log) softplus(a + dt_bias). [T, H]
pub(super) fn decay(
    a: &Tensor,       // [T, H]
    a_log: &Tensor,   // [H]
    dt_bias: &Tensor, // [H]
) -> Result<Tensor> {
    Ok(softplus(&a.f_add(dt_bias)?)?.f_mul_(&a_log.f_exp()?.f_neg()?)?)
}

/// Returns the gradients of a [T, H], A_log [H] and dt_bias [H].
pub(super) fn decay_backward(
    dg: &Tensor,      // [T, H]
    a: &Tensor,       // [T, H]
    a_log: &Tensor,   // [H]
    dt_bias: &Tensor, // [H]
) -> Result<[Tensor; 3]> {
    let d_log = decay(a, a_log, dt_bias)?.f_mul_(dg)?;
    let da = sigmoid(&a.f_add(dt_bias)?)?.f_mul_(&a_log.f_exp()?.f_neg()?)?.f_mul_(dg)?;
    let of_head = |t: &Tensor| t.f_sum_dim_intlist(0, false, t.kind());
    let (d_log, d_bias) = (of_head(&d_log)?, of_head(&da)?);
    Ok([da, d_log, d_bias])
}

/// Computes rms_norm(x) weight silu(z), in the weight's type.
pub(super) fn gated_norm(
    x: &Tensor,      // [T, H, d]
    z: &Tensor,      // [T, H, d]
    weight: &Tensor, // [d]
    eps: f64,
) -> Result<Tensor> {
    let wide = weight.f_to_kind(x.kind())?;
    let (normed, _) = rms_norm::forward(x, &wide, eps)?;
    Ok(silu(z)?.f_mul_(&normed)?.f_to_kind(weight.kind())?)
}

/// Returns dx and dz; adds the weight's gradient in place.
pub(super) fn gated_norm_backward(
    dy: &Tensor,                // [T, H, d]
    (x, z): (&Tensor, &Tensor), // [T, H, d]
    weight: &Tensor,            // [d]
    eps: f64,
    d_weight: &mut Tensor, // [d]
) -> Result<(Tensor, Tensor)> {
    let wide = weight.f_to_kind(x.kind())?;
    let (normed, rstd) = rms_norm::forward(x, &wide, eps)?;
    let gate = sigmoid(z)?;
    let d_normed = z.f_mul(&gate)?.f_mul_(dy)?;
    let dz = silu_slope(z, &gate)?.f_mul_(&normed)?.f_mul_(dy)?;
    Ok((rms_norm::backward(&d_normed, x, &wide, &rstd, None, d_weight)?, dz))
}
