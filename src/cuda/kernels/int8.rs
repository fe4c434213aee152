//! GEMMs of rotated rows in int8 with one scale each, by Hopper kernels alone: integer sums are exact, so all of them give a row the same bits,
//! whatever the number of rows.

use tch::Tensor;

use super::fp8::ScaledRows;
use super::{gate_up, product, wide_product};
use crate::error::Result;

/// Most rows for which `gate_up` is faster than `wide_product`, as measured on an H200.
const MOST_ROWS_OF_GATE_UP: usize = 1024;

/// Computes out = x w^T + bias for any number of rows with int8 operands. Each sum is multiplied by the scales of its rows; the bias is added, and the
/// result rounded once. The kernel reads w while the preceding operation still runs: that operation must not write w, and must itself have waited for
/// any that does.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn int8_product(
    x: &ScaledRows,        // [R, K]
    w: &ScaledRows,        // [N, K]
    bias: Option<&Tensor>, // [N] bf16
    out: &Tensor,          // [R, N] bf16
) -> Result<()> {
    let rows = x.values.size()[0] as usize;
    if product::product_serves(rows, &w.values, bias)? {
        product::product_8bit(x, w, bias, out)
    } else {
        wide_product::wide_product_8bit(x, w, bias, out)
    }
}

/// Computes y = silu(gate) * up from x w^T with columns g0 u0 g1 u1 .., like [`int8_product`]. Gate and up are rounded as if they were stored.
///
/// # Errors
/// The errors of [`int8_product`].
pub fn int8_silu_mul(
    x: &ScaledRows, // [R, K]
    w: &ScaledRows, // [2 F, K]
    y: &Tensor,     // [R, F] bf16
) -> Result<()> {
    let rows = x.values.size()[0] as usize;
    if product::product_serves(rows, &w.values, None)? {
        product::product_silu_mul_8bit(x, w, y)
    } else if rows <= MOST_ROWS_OF_GATE_UP && gate_up::gate_up_serves(rows, &w.values)? {
        gate_up::gate_up_8bit(x, w, y)
    } else {
        wide_product::wide_product_silu_mul_8bit(x, w, y)
    }
}
