//! Rows in int8: each row is divided by its largest absolute value / 127 and rounded to nearest, ties to even.
//!
//! int8 has equal steps, so a column far larger than the others would cost them their precision. Keys have such columns, and so have the inputs of
//! GEMMs. So keys and queries, and both operands of a GEMM, are first multiplied by a Hadamard matrix, block by block: this leaves their dot products
//! unchanged and spreads a column's values over its block (as in QuaRot, arXiv 2404.00456). On a GPU the kernels that compute such rows do both.

use tch::{Device, Kind, Tensor};

use super::fp8::{ScaledRows, empty_codes, scale_rows, scaled_sums};
pub use crate::cuda::kernels::hadamard_block;
use crate::cuda::kernels::{self, int8_row_block};
use crate::cuda::{OpCost, timed};
use crate::error::Result;
use crate::torch::scalar;

/// The largest value.
pub const MOST: f32 = 127.0;

/// Multiplies every block of consecutive columns by a Hadamard matrix, in the type of `x`.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
///
/// # Panics
/// If `block` is not a power of two that divides hd.
pub fn turned_by_hadamard(x: &Tensor /* [.., hd] */, block: usize) -> Result<Tensor> {
    assert!(block.is_power_of_two(), "a block of {block} columns");
    let sign = |row: usize, column: usize| if (row & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0f32 };
    let signs: Vec<f32> = (0..block * block).map(|at| sign(at / block, at % block)).collect();
    let matrix = Tensor::f_from_slice(&signs)?.f_to_device(x.device())?.view([block as i64; 2]);
    let y = x.f_to_kind(Kind::Float)?.f_reshape([-1, block as i64])?.f_mm(&matrix)?;
    Ok(y.f_mul(&scalar((block as f64).sqrt().recip()))?.view_as(x).f_to_kind(x.kind())?)
}

/// Quantizes rows to [`Kind::Int8`] in existing memory. Rows of zeros have the scale 0; rows with a non-finite value have a non-finite scale.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn round_rows(
    x: &Tensor,      // [R, K]
    to: &ScaledRows, // [R, K]
) -> Result<()> {
    let numbers = scale_rows(x, MOST, to)?.f_nan_to_num(0.0, None::<f64>, None::<f64>)?.f_round()?;
    to.values.shallow_clone().f_copy_(&numbers.f_clamp(-f64::from(MOST), f64::from(MOST))?)?;
    Ok(())
}

/// Multiplies blocks of columns by Hadamard matrices of ones and minus ones in float32, in the order of the kernels' sums, so with the same bits.
fn hadamard_sums(x: &Tensor /* [R, K] */, block: i64) -> Result<Tensor> {
    let size = x.size();
    let mut y = x.f_to_kind(Kind::Float)?;
    let mut step = 1;
    while step < block {
        let pairs = y.f_reshape([size[0], size[1] / (2 * step), 2, step])?;
        let [low, high] = [0, 1].map(|side| pairs.select(2, side));
        y = Tensor::f_stack(&[low.f_add(&high)?, low.f_sub(&high)?], 2)?;
        step *= 2;
    }
    Ok(y.f_reshape(size)?)
}

/// Rotates rows of a GEMM's operand by Hadamard matrices of [`int8_row_block`] columns, and quantizes them into existing memory like [`round_rows`].
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for a matrix that the GPU kernel does not support; [`crate::Error::OutOfMemory`].
pub fn rotate_rows(
    x: &Tensor,      // [R, K]
    to: &ScaledRows, // [R, K]
) -> Result<()> {
    if x.device().is_cuda() {
        let work = || OpCost { bytes: 1.5 * OpCost::pass(&[x]).bytes, flop: 0.0 };
        return timed("rounding to int8", work, || kernels::quantize_rows(x, to));
    }
    let block = int8_row_block(x.size()[1] as usize);
    round_rows(&hadamard_sums(x, block as i64)?, to)?;
    // The matrix would have to be divided by the root of its size: the scale is, instead of the values.
    let _ = to.scales.shallow_clone().f_mul_(&scalar((block as f64).sqrt().recip() as f32))?;
    Ok(())
}

/// Rotates and quantizes rows like [`rotate_rows`].
///
/// # Errors
/// The errors of [`rotate_rows`].
pub fn rotated_rows(x: &Tensor /* [R, K] */) -> Result<ScaledRows> {
    let to = empty_codes([x.size()[0], x.size()[1]], (Kind::Int8, x.device()))?;
    rotate_rows(x, &to)?;
    Ok(to)
}

/// Computes y = x w^T + bias from rotated rows, in the type `kind`; on a GPU this is bfloat16. Sums are exact.
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; on a GPU the errors of [`kernels::int8_product`].
pub fn forward(
    x: &ScaledRows,        // [T, K]
    w: &ScaledRows,        // [N, K]
    bias: Option<&Tensor>, // [N]
    kind: Kind,
) -> Result<Tensor> {
    if let Device::Cuda(_) = x.values.device() {
        let sides = [x.values.size()[0], w.values.size()[0]];
        let y = Tensor::f_empty(sides, (Kind::BFloat16, x.values.device()))?; // [T, N]
        kernels::int8_product(x, w, bias, &y)?;
        return Ok(y);
    }
    let [x_values, w_values] = [&x.values, &w.values].map(|values| values.f_to_kind(Kind::Double));
    let sums = x_values?.f_mm(&w_values?.tr())?.f_to_kind(Kind::Float)?;
    scaled_sums(&sums, [x, w], bias, kind)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::torch::f32_vec;

    fn rand(shape: &[i64]) -> Tensor {
        Tensor::randn(shape, (Kind::Float, Device::Cpu))
    }

    fn empty(rows: i64, columns: i64) -> ScaledRows {
        let values = Tensor::zeros([rows, columns], (Kind::Int8, Device::Cpu));
        ScaledRows { values, scales: Tensor::zeros([rows], (Kind::Float, Device::Cpu)) }
    }

    fn widened(rows: &ScaledRows) -> Tensor {
        rows.values.to_kind(Kind::Float) * rows.scales.unsqueeze(-1)
    }

    /// Multiplying two rows by the Hadamard matrix must not change their dot product, and applying it twice must restore a row.
    #[test]
    fn hadamard_rotation_keeps_inner_products() {
        for block in [1, 2, 8, 32] {
            let (q, k) = (rand(&[5, 3, 64]), rand(&[5, 3, 64]));
            let [tq, tk] = [&q, &k].map(|x| turned_by_hadamard(x, block).unwrap());
            let off = ((&tq * &tk).sum_dim_intlist(-1, false, None) - (&q * &k).sum_dim_intlist(-1, false, None)).abs();
            assert!(off.max().double_value(&[]) < 1e-4, "{block}");
            assert!(turned_by_hadamard(&tq, block).unwrap().allclose(&q, 1e-5, 1e-5, false), "{block}");
            assert_eq!(tq.allclose(&q, 1e-5, 1e-5, false), block == 1);
        }
    }

    /// The error is at most half a step; rows of zeros and non-finite rows do not affect others.
    #[test]
    fn int8_rounding_error_is_at_most_half_a_step() {
        let x = rand(&[9, 48]) * rand(&[9, 1]).exp();
        let _ = x.get(2).fill_(0.0);
        let to = empty(9, 48);
        round_rows(&x, &to).unwrap();
        let off = ((widened(&to) - &x).abs() / x.abs().amax([1], true).clamp_min(1e-9)).max().double_value(&[]);
        assert!(off > 0.25 / 127.0 && off <= 0.501 / 127.0, "{off}");
        for poison in [f64::NAN, f64::INFINITY] {
            let x = rand(&[3, 8]);
            let _ = x.get(1).get(5).fill_(poison);
            let to = empty(3, 8);
            round_rows(&x, &to).unwrap();
            let finite: Vec<bool> = (0..3).map(|row| to.scales.double_value(&[row]).is_finite()).collect();
            assert_eq!(finite, [true, false, true]);
        }
    }

    /// With columns thirty times as large as the others, rows multiplied by a Hadamard matrix must lose a fifth of what plain int8 loses, and less
    /// than e4m3.
    #[test]
    fn hadamard_rotation_spreads_outlier_columns() {
        let k = rand(&[512, 64]);
        let _ = k.narrow(1, 7, 2).g_mul_scalar_(30.0);
        let q = rand(&[64, 64]);
        let _ = q.narrow(1, 7, 2).g_mul_scalar_(1.0 / 30.0);
        let exact = q.mm(&k.tr());
        let off = |scores: Tensor| (scores - &exact).square().mean(Kind::Float).sqrt().double_value(&[]);
        let kept = |k: &Tensor| {
            let to = empty(512, 64);
            round_rows(k, &to).unwrap();
            widened(&to)
        };
        let plain = off(q.mm(&kept(&k).tr()));
        let [tq, tk] = [&q, &k].map(|x| turned_by_hadamard(x, 32).unwrap());
        let turned = off(tq.mm(&kept(&tk).tr()));
        let e4m3 = crate::ops::fp8::rounded(&k).unwrap();
        let e4m3 = off(q.mm(&(e4m3.values.to_kind(Kind::Float) * e4m3.scales.unsqueeze(-1)).tr()));
        println!("plain {plain:.4}, turned {turned:.4}, e4m3 {e4m3:.4}");
        assert!(turned < 0.6 * plain && turned < e4m3, "{plain} {turned} {e4m3}");
    }

    /// Codes and scales of rotated rows, computed by plain arithmetic.
    fn reference(x: &[f32], block: usize) -> (Vec<i8>, f32) {
        let mut sums = x.to_vec();
        let mut step = 1;
        while step < block {
            for at in (0..sums.len()).filter(|at| at & step == 0) {
                let (low, high) = (sums[at], sums[at + step]);
                (sums[at], sums[at + step]) = (low + high, low - high);
            }
            step *= 2;
        }
        let peak = sums.iter().fold(0f32, |peak, x| peak.max(x.abs()));
        let factor = if peak > 0.0 { (MOST / peak).min(f32::MAX) } else { 0.0 };
        let codes = sums.iter().map(|x| (x * factor).round_ties_even().clamp(-MOST, MOST) as i8).collect();
        (codes, peak / MOST * (block as f64).sqrt().recip() as f32)
    }

    #[test]
    fn rotated_rows_equal_plain_arithmetic_bit_for_bit() {
        for (columns, block) in [(512, 256), (384, 128), (48, 16), (24, 8), (7, 1)] {
            let x = rand(&[5, columns]) * (rand(&[5, 1]) * 6.0).exp();
            let _ = (x.get(2).fill_(0.0), x.select(1, 3).g_mul_scalar_(50.0));
            assert_eq!(int8_row_block(columns as usize), block);
            let ScaledRows { values, scales } = rotated_rows(&x).unwrap();
            for row in 0..5 {
                let (codes, scale) = reference(&f32_vec(&x.get(row)).unwrap(), block);
                assert_eq!(
                    f32_vec(&values.get(row).to_kind(Kind::Float)).unwrap(),
                    codes.iter().map(|&code| f32::from(code)).collect::<Vec<_>>()
                );
                assert_eq!(scales.double_value(&[row]), f64::from(scale));
            }
        }
    }

    /// A GEMM of rotated rows is near the exact one, nearer than in e4m3 where columns have outliers, and a row's bits do not depend on other rows.
    #[test]
    fn int8_gemms_are_near_exact_ones_and_independent_of_the_batch() {
        let off = |y: &Tensor, exact: &Tensor| ((y - exact).norm() / exact.norm()).double_value(&[]);
        let (x, w, bias) = (rand(&[40, 768]), rand(&[96, 768]), rand(&[96]));
        for outliers in [false, true] {
            if outliers {
                let _ = (x.narrow(1, 7, 2).g_mul_scalar_(30.0), w.narrow(1, 7, 2).g_mul_scalar_(1.0 / 30.0));
            }
            let exact = x.mm(&w.tr());
            let [rows, weights] = [&x, &w].map(|x| rotated_rows(x).unwrap());
            let y = forward(&rows, &weights, None, Kind::Float).unwrap();
            let [a, b] = [&x, &w].map(|x| crate::ops::fp8::rounded(x).unwrap());
            let e4m3 = off(&crate::ops::fp8::forward(&a, &b, None, Kind::Float).unwrap(), &exact);
            let int8 = off(&y, &exact);
            println!("outliers {outliers}: int8 {int8:.4}, e4m3 {e4m3:.4}");
            assert!(int8 > 1e-3 && int8 < 0.6 * e4m3, "{int8} {e4m3}");
            let with_bias = forward(&rows, &weights, Some(&bias), Kind::BFloat16).unwrap();
            for count in [1, 7, 39] {
                let some = rotated_rows(&x.narrow(0, 40 - count, count)).unwrap();
                let got = forward(&some, &weights, Some(&bias), Kind::BFloat16).unwrap();
                assert!(got.equal(&with_bias.narrow(0, 40 - count, count)));
            }
        }
    }
}
