//! FP8 GEMMs: matrices in e4m3 (4 bits of exponent, 3 of mantissa, largest value 448) with one float32 scale per row.
//!
//! A row is divided by its largest absolute value / 448 and rounded to nearest, ties to even. Products are summed in float32 and multiplied by both
//! rows' scales. On a GPU kernels quantize and cuBLASLt multiplies (Hopper only). The CPU operations are the reference: they multiply the quantized
//! values in float32. Training quantizes both operands of a GEMM on the fly, along the dimension that is summed over. Engines have their own GEMMs.

mod weight;

use tch::{Device, Kind, Tensor};

pub use crate::cuda::kernels::ScaledRows;
use crate::cuda::{OpCost, Products, Tuning, kernels, timed};
use crate::error::Result;
use crate::torch::scalar;
pub use weight::weight_gradient;

/// The largest value of e4m3.
pub const MOST: f32 = 448.0;
/// Rows and columns of a block with one scale, in published checkpoints.
pub const BLOCK: i64 = 128;
/// Time of an FP8 operation on tensor cores, relative to bfloat16.
const SHARE_OF_BF16: f64 = 0.5;

/// Allocates memory for a quantized matrix.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn empty(size: [i64; 2], device: Device) -> Result<ScaledRows> {
    empty_codes(size, (Kind::Float8e4m3fn, device))
}

/// Allocates memory for a matrix quantized to this type.
pub(super) fn empty_codes([rows, columns]: [i64; 2], (kind, device): (Kind, Device)) -> Result<ScaledRows> {
    let values = Tensor::f_empty([rows, columns], (kind, device))?;
    Ok(ScaledRows { values, scales: Tensor::f_empty([rows], (Kind::Float, device))? })
}

/// Quantizes the rows of a matrix into existing memory. Rows of zeros have the scale 0; rows with a non-finite value have a non-finite scale.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for a matrix that the GPU kernel does not support; [`crate::Error::OutOfMemory`].
pub fn round_rows(
    x: &Tensor,      // [R, K]
    to: &ScaledRows, // [R, K]
) -> Result<()> {
    if x.device().is_cuda() {
        return timed("rounding to FP8", || rounding_work(x, 1.0), || kernels::quantize_rows(x, to));
    }
    let scaled = scale_rows(x, MOST, to)?.f_clamp(-f64::from(MOST), f64::from(MOST))?;
    to.values.shallow_clone().f_copy_(&scaled.f_to_kind(Kind::Float8e4m3fn)?)?;
    Ok(())
}

/// Scales rows in float32 so that their largest absolute value is `most`, without rounding, and writes their scales. [R, K]
pub(super) fn scale_rows(x: &Tensor /* [R, K] */, most: f32, to: &ScaledRows) -> Result<Tensor> {
    let x = x.f_to_kind(Kind::Float)?;
    let peak = x.f_abs()?.f_amax([1], true)?; // [R, 1]
    let factor = scalar(most).f_div(&peak)?.f_clamp_max(f64::from(f32::MAX))?;
    let factor = factor.f_where_self(&peak.f_gt(0.0)?, &peak.f_zeros_like()?)?;
    to.scales.shallow_clone().f_copy_(&peak.f_view([-1])?.f_div(&scalar(most))?)?;
    Ok(x.f_mul(&factor)?)
}

/// Number of blocks along a side of a matrix.
pub fn blocks(side: i64) -> i64 {
    (side + BLOCK - 1) / BLOCK
}

/// Quantizes a matrix by blocks of [`BLOCK`] rows and columns; the last ones may be smaller. Returns e4m3 values [N, K] and a scale per block [N /
/// 128, K / 128] (rounded up). CPU only.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn rounded_blocks(w: &Tensor /* [N, K] */) -> Result<[Tensor; 2]> {
    let size = w.size();
    let blocks = [size[0], size[1]].map(blocks);
    let padding = [0, blocks[1] * BLOCK - size[1], 0, blocks[0] * BLOCK - size[0]];
    let padded = w.f_to_kind(Kind::Float)?.f_constant_pad_nd(padding)?;
    let split = padded.f_view([blocks[0], BLOCK, blocks[1], BLOCK])?.f_transpose(1, 2)?.f_contiguous()?;
    let rows = rounded(&split.f_view([blocks[0] * blocks[1], BLOCK * BLOCK])?)?;
    let values = rows.values.f_view([blocks[0], blocks[1], BLOCK, BLOCK])?.f_transpose(1, 2)?.f_contiguous()?;
    let values = values.f_view([blocks[0] * BLOCK, blocks[1] * BLOCK])?;
    let values = values.f_narrow(0, 0, size[0])?.f_narrow(1, 0, size[1])?.f_contiguous()?;
    Ok([values, rows.scales.f_view(blocks)?])
}

/// Quantizes the rows of a matrix.
///
/// # Errors
/// The errors of [`round_rows`].
pub fn rounded(x: &Tensor /* [R, K] */) -> Result<ScaledRows> {
    let to = empty([x.size()[0], x.size()[1]], x.device())?;
    round_rows(x, &to)?;
    Ok(to)
}

/// Quantizes the columns of a matrix, as rows of its transpose; on a GPU these are padded with zeros to a multiple of 16.
///
/// # Errors
/// The errors of [`round_rows`].
pub fn rounded_columns(w: &Tensor /* [N, K] */) -> Result<ScaledRows> {
    if !w.device().is_cuda() {
        return rounded(&w.tr());
    }
    let padded = (w.size()[0] as u64).next_multiple_of(16) as i64;
    let to = empty([w.size()[1], padded], w.device())?; // [K, N]
    timed("rounding to FP8", || rounding_work(w, 2.0), || kernels::fp8_columns(w, &to))?;
    Ok(to)
}

/// The cost of quantizing a bfloat16 matrix that is read `times_read` times.
fn rounding_work(x: &Tensor, times_read: f64) -> OpCost {
    let OpCost { bytes, .. } = OpCost::pass(&[x]);
    OpCost { bytes: (times_read + 0.5) * bytes, flop: 0.0 }
}

/// Computes y = x w^T + bias from quantized rows, in the type `kind`; on a GPU this is bfloat16.
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; on a GPU the errors of [`Products::run_fp8`].
pub fn forward(
    x: &ScaledRows,        // [T, K]
    w: &ScaledRows,        // [N, K]
    bias: Option<&Tensor>, // [N]
    kind: Kind,
) -> Result<Tensor> {
    timed("product in FP8", || work(x, w), || product(x, w, bias, kind)) // [T, N]
}

/// Computes y = residual + x w^T from quantized rows, in the residual's type. On a GPU the unrounded float32 sum is added; on a CPU the GEMM is first
/// rounded to `kind`.
///
/// # Errors
/// The errors of [`forward`].
pub fn forward_onto(
    residual: &Tensor, // [T, N]
    x: &ScaledRows,    // [T, K]
    w: &ScaledRows,    // [N, K]
    kind: Kind,
) -> Result<Tensor> {
    let Device::Cuda(gpu) = residual.device() else { return Ok(residual.f_add(&forward(x, w, None, kind)?)?) };
    let run = || {
        let y = residual.f_empty_like()?; // [T, N]
        Products::of_current_stream(gpu)?.run_fp8_onto(residual, x, w, &y)?;
        Ok(y)
    };
    timed("product in FP8", || work(x, w), run)
}

/// Computes dx = dy w, in the type `kind`, from the quantized rows of dy; quantizes the columns of w on the fly.
///
/// # Errors
/// The errors of [`round_rows`] and of [`forward`].
pub fn backward_input(
    dy: &ScaledRows, // [T, N]
    w: &Tensor,      // [N, K]
    kind: Kind,
) -> Result<Tensor> {
    let w = rounded_columns(w)?;
    timed("product in FP8, gradient of its input", || work(dy, &w), || product(dy, &w, None, kind)) // [T, K]
}

/// The cost of an FP8 GEMM of two quantized matrices.
fn work(a: &ScaledRows /* [M, K] */, b: &ScaledRows /* [N, K] */) -> OpCost {
    cost([a.values.size()[0], b.values.size()[0], a.values.size()[1]])
}

/// The cost of an FP8 GEMM [m, k] x [k, n].
pub(super) fn cost([m, n, k]: [i64; 3]) -> OpCost {
    let OpCost { flop, bytes } = OpCost::product(m, n, k);
    OpCost { flop: SHARE_OF_BF16 * flop, bytes }
}

/// Computes a b^T + bias.
fn product(
    a: &ScaledRows,        // [M, K]
    b: &ScaledRows,        // [N, K]
    bias: Option<&Tensor>, // [N]
    kind: Kind,
) -> Result<Tensor> {
    if let Device::Cuda(gpu) = a.values.device() {
        let sides = [a.values.size()[0], b.values.size()[0]];
        let out = Tensor::f_empty(sides, (Kind::BFloat16, a.values.device()))?; // [M, N]
        Products::of_current_stream(gpu)?.run_fp8(a, b, bias, &out, Tuning::First)?;
        return Ok(out);
    }
    let [a_values, b_values] = [&a.values, &b.values].map(|values| values.f_to_kind(Kind::Float));
    scaled_sums(&a_values?.f_mm(&b_values?.tr())?, [a, b], bias, kind)
}

/// Returns sums [M, N] times the scales of the rows a [M, K] and b [N, K], plus bias, in the type `kind`.
pub(super) fn scaled_sums(
    sums: &Tensor, // [M, N] f32
    [a, b]: [&ScaledRows; 2],
    bias: Option<&Tensor>, // [N]
    kind: Kind,
) -> Result<Tensor> {
    let mut y = sums.f_mul(&a.scales.f_unsqueeze(1)?)?.f_mul(&b.scales)?;
    if let Some(bias) = bias {
        y = y.f_add(bias)?;
    }
    Ok(y.f_to_kind(kind)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::{byte_vec, f32_vec};

    /// All finite e4m3 values of at least 0, by code: 7 bits of exponent and mantissa, exponent bias 7.
    fn values() -> Vec<f32> {
        let value = |code: i32| match (code >> 3, (code & 7) as f32) {
            (0, mantissa) => mantissa / 8.0 * 2f32.powi(-6),
            (exponent, mantissa) => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
        };
        (0..0x7f).map(value).collect()
    }

    /// The code of the nearest value; ties go to the even code, and larger values to the largest code.
    fn nearest(x: f32, values: &[f32]) -> u8 {
        let off = |code: usize| (f64::from(values[code]) - f64::from(x.abs())).abs();
        let best = (0..values.len()).min_by(|&a, &b| off(a).total_cmp(&off(b)).then((a & 1).cmp(&(b & 1)))).unwrap();
        best as u8 | (u8::from(x.is_sign_negative()) << 7)
    }

    /// Scales and codes of rows, computed by plain arithmetic.
    fn reference(rows: &[Vec<f32>]) -> (Vec<u8>, Vec<f32>) {
        let values = values();
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for row in rows {
            let peak = row.iter().fold(0f32, |peak, x| peak.max(x.abs()));
            let factor = if peak > 0.0 { (MOST / peak).min(f32::MAX) } else { 0.0 };
            codes.extend(row.iter().map(|x| nearest(x * factor, &values)));
            scales.push(peak / MOST);
        }
        (codes, scales)
    }

    #[test]
    fn fp8_row_rounding_equals_plain_arithmetic_bit_for_bit() {
        let values = values();
        assert_eq!((values[0x7e], values[1], values[8]), (448.0, 2f32.powi(-9), 2f32.powi(-6)));
        // Every value, the midpoints between neighbours (ties), and the numbers next to these; the first element makes the scale 1.
        let middles = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let beside = middles.flat_map(|x| [x, f32::from_bits(x.to_bits() - 1), f32::from_bits(x.to_bits() + 1)]);
        let ties: Vec<f32> = [MOST].into_iter().chain(values.clone()).chain(beside).flat_map(|x| [x, -x]).collect();
        let len = ties.len();
        let random =
            |size: f32| f32_vec(&(Tensor::randn([len as i64], (Kind::Float, Device::Cpu)) * f64::from(size))).unwrap();
        let mut outlier = random(0.02);
        outlier[7] = -91.5;
        let rows = [ties, random(1.0), random(1e-37), random(1e-41), vec![0.0; len], outlier];
        let x = Tensor::from_slice(&rows.concat()).view([rows.len() as i64, len as i64]);
        let to = empty([rows.len() as i64, len as i64], Device::Cpu).unwrap();
        round_rows(&x, &to).unwrap();
        let (codes, scales) = reference(&rows);
        assert_eq!(f32_vec(&to.scales).unwrap(), scales);
        assert_eq!(byte_vec(&to.values.view_dtype(Kind::Uint8)).unwrap(), codes);
        assert_eq!(scales[0], 1.0);
    }

    #[test]
    fn fp8_rounding_keeps_non_finite_values_in_their_row() {
        let x = Tensor::from_slice(&[1.0, f32::NAN, 1.0, f32::INFINITY, 0.0, 0.0]).view([3, 2]);
        let w = empty([2, 2], Device::Cpu).unwrap();
        round_rows(&Tensor::from_slice(&[1f32, 2.0, -3.0, 4.0]).view([2, 2]), &w).unwrap();
        let y = f32_vec(&forward(&rounded(&x).unwrap(), &w, None, Kind::Float).unwrap()).unwrap();
        assert!(y[..4].iter().all(|y| !y.is_finite()), "{y:?}");
        assert_eq!(y[4..], [0.0, 0.0]);
    }

    /// The input gradient must equal autograd's, for a GEMM with quantized columns and a quantized incoming gradient, where quantization counts as
    /// the identity. Sizes are odd, and one row and one column are zero.
    #[test]
    fn fp8_input_gradient_equals_autograd_through_the_rounding() {
        let rand = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        for [tokens, rows, columns] in [[1, 1, 1], [7, 33, 5], [3, 130, 17]] {
            let (dy, w, x) = (rand([tokens, rows]), rand([rows, columns]), rand([tokens, columns]));
            let _ = (dy.get(tokens - 1).fill_(0.0), w.select(1, columns - 1).fill_(0.0));
            let whole = |x: &Tensor| {
                let ScaledRows { values, scales } = rounded(x).unwrap();
                values.to_kind(Kind::Double) * scales.to_kind(Kind::Double).unsqueeze(1)
            };
            let x = x.to_kind(Kind::Double).set_requires_grad(true);
            let y = x.mm(&whole(&w.tr()));
            let expected = Tensor::run_backward(&[(y * whole(&dy)).sum(None)], &[&x], false, false).remove(0);
            let dx = backward_input(&rounded(&dy).unwrap(), &w, Kind::Float).unwrap();
            let most = f64::try_from(expected.abs().max()).unwrap();
            let off = f64::try_from((dx.to_kind(Kind::Double) - &expected).abs().max()).unwrap();
            assert!(off <= 1e-5 * most, "{off} of {most}");
            assert!(f32_vec(&dx.get(tokens - 1)).unwrap().iter().all(|&dx| dx == 0.0));
            assert!(f32_vec(&dx.select(1, columns - 1)).unwrap().iter().all(|&dx| dx == 0.0));
            for poison in [f64::NAN, f64::INFINITY] {
                let _ = dy.get(0).get(0).fill_(poison);
                let dx = f32_vec(&backward_input(&rounded(&dy).unwrap(), &w, Kind::Float).unwrap()).unwrap();
                let (row, others) = dx.split_at(columns as usize);
                assert!(row.iter().all(|dx| !dx.is_finite()), "{row:?}");
                assert!(others.iter().all(|dx| dx.is_finite()), "{others:?}");
            }
        }
    }

    #[test]
    fn fp8_gemms_equal_gemms_of_the_rounded_rows() {
        let rand = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(Kind::BFloat16);
        let (x, matrix, bias) = (rand([5, 48]), rand([32, 48]), rand([1, 32]).view([32]));
        let [w, rounded] = [&matrix, &x].map(|rows| rounded(rows).unwrap());
        let double =
            |rows: &ScaledRows| rows.values.to_kind(Kind::Double) * rows.scales.to_kind(Kind::Double).unsqueeze(1);
        let exact = double(&rounded).mm(&double(&w).tr()) + bias.to_kind(Kind::Double);
        let y = forward(&rounded, &w, Some(&bias), x.kind()).unwrap();
        assert_eq!(y.kind(), Kind::BFloat16);
        let off = |y: &Tensor, exact: &Tensor| f64::try_from((y - exact).norm() / exact.norm()).unwrap();
        assert!(off(&y.to_kind(Kind::Double), &exact) < 3e-3);
        let unrounded = x.to_kind(Kind::Double).mm(&matrix.to_kind(Kind::Double).tr()) + bias.to_kind(Kind::Double);
        let cost = off(&exact, &unrounded);
        assert!((0.01..0.06).contains(&cost), "3 bits of mantissa cost {cost}");
    }
}
