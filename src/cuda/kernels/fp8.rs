//! Rows in e4m3 with a scale for each, made in one pass or beside the operation that gives the rows.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::add_rms_norm::NormOptions;
use super::{
    Argument, add_rms_norm, address, address_or_null, invalid, is_aligned, kinds_name, launch_early, ordinal, row_len,
    strided, swiglu,
};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::FP8_ROWS;
pub(super) const NAMES: &[&str] = &["fp8_rows"];

/// Elements that a thread moves at once, and packs of a row that one thread has.
const PACK: usize = 8;
const MOST: usize = 4;
/// Longest rows of [`fp8_rows`] and [`silu_mul_fp8`], and of [`add_rms_norm_fp8`].
const MOST_COLUMNS: usize = 1024 * MOST * PACK;
/// Multiples that rows' lengths must be for products: 16 bytes.
const COLUMNS: usize = 16;

/// Rows in e4m3: the largest absolute value of a row is 448 times its scale.
#[derive(Debug)]
pub struct Fp8Rows {
    /// [R, K] e4m3, contiguous
    pub values: Tensor,
    /// `[R]` f32
    pub scales: Tensor,
}

impl Fp8Rows {
    /// Another handle on the same memory.
    pub fn shallow_clone(&self) -> Self {
        Self { values: self.values.shallow_clone(), scales: self.scales.shallow_clone() }
    }
}

/// Whether products of e4m3 serve a matrix [N, K] on a GPU.
pub fn fp8_serves([rows, columns]: [usize; 2]) -> bool {
    rows.is_multiple_of(COLUMNS) && columns.is_multiple_of(COLUMNS) && columns <= MOST_COLUMNS
}

/// Rounds each row of x to e4m3, to nearest, by its largest absolute value. Not before sm_89.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn fp8_rows(
    x: &Tensor,   // [R, K] bf16, each row contiguous
    to: &Fp8Rows, // [R, K]
) -> Result<()> {
    round(x, to, false)
}

/// [`fp8_rows`] in a step, none of whose kernels writes weights: the next one may begin, and read these, before this one's inputs are there.
///
/// # Errors
/// The errors of [`fp8_rows`].
pub fn fp8_rows_of_step(
    x: &Tensor,   // [R, K] bf16, each row contiguous
    to: &Fp8Rows, // [R, K]
) -> Result<()> {
    round(x, to, true)
}

fn round(x: &Tensor, to: &Fp8Rows, early: bool) -> Result<()> {
    const OP: &str = "fp8_rows";
    let (gpu, size, strides) = (ordinal(OP, x)?, x.size(), x.stride());
    let (&[rows, columns], &[stride, 1]) = (&size[..], &strides[..]) else {
        return Err(invalid(OP, "a matrix of contiguous rows", (size, strides)));
    };
    let [values, scales] = outputs(OP, to, (rows as usize, columns as usize), gpu)?;
    if stride % PACK as i64 != 0 || !is_aligned(x) {
        return Err(invalid(OP, "rows that begin at multiples of 16 bytes", strides));
    }
    let from = strided(OP, x, Kind::BFloat16, &[rows, columns], gpu)?;
    let arguments =
        [from, values, scales, Argument::Count(columns), Argument::Count(stride), Argument::Count(i64::from(early))];
    // SAFETY: the kernel's parameters in order; one block a row, all of whose packs have a thread.
    unsafe { launch_early(SOURCE, OP, gpu, (rows as u32, threads(columns as usize, MOST), 0), &arguments) }
}

/// [`add_rms_norm`](super::add_rms_norm()), whose result is rounded to bfloat16 and then as by [`fp8_rows`]; y is written where it is given.
/// As after [`fp8_rows_of_step`], the next kernel may begin early. The weight is read while the operation before runs, which must not write it.
///
/// # Errors
/// The errors of [`fp8_rows`].
pub fn add_rms_norm_fp8(
    x: &mut Tensor,         // [T, D] f32 or bf16
    delta: Option<&Tensor>, // [T, D] bf16
    weight: &Tensor,        // [D] bf16
    y: Option<&mut Tensor>, // [T, D] bf16
    to: &Fp8Rows,           // [T, D]
    norm: NormOptions,
) -> Result<()> {
    const OP: &str = "add_rms_norm_fp8";
    let (gpu, numel, dim) = (ordinal(OP, x)?, x.numel(), row_len(OP, x)?);
    let y = y.as_deref();
    let packed = |tensor: &Tensor| is_aligned(tensor);
    if dim > add_rms_norm::most_columns(PACK) || ![Some(&*x), delta, Some(weight), y].into_iter().flatten().all(packed)
    {
        return Err(invalid(OP, "shorter rows, at multiples of 16 bytes", x.size()));
    }
    let [values, scales] = outputs(OP, to, (numel / dim, dim), gpu)?;
    let [eps, centre] = norm.arguments();
    let arguments = [
        address(OP, x, x.kind(), numel, gpu)?,
        address_or_null(OP, delta, Kind::BFloat16, numel, gpu)?,
        address(OP, weight, Kind::BFloat16, dim, gpu)?,
        address_or_null(OP, y, Kind::BFloat16, numel, gpu)?,
        values,
        scales,
        Argument::Count(dim as i64),
        eps,
        centre,
    ];
    let name = format!("{OP}_{}_x{PACK}", kinds_name(OP, x, weight)?);
    let threads = threads(dim, 1).min(1024); // as many as `add_rms_norm` has, so that squares add up to the same bits
    // SAFETY: the kernel's parameters in order; one block a row, all of whose packs have a thread.
    unsafe { launch_early(add_rms_norm::SOURCE, &name, gpu, ((numel / dim) as u32, threads, 0), &arguments) }
}

/// [`silu_mul`](super::silu_mul()), whose result is rounded to bfloat16 and then as by [`fp8_rows`]; y is written where it is given.
///
/// # Errors
/// The errors of [`fp8_rows`].
pub fn silu_mul_fp8(
    gate_up: &Tensor,       // [T, 2 F] bf16: g0 u0 g1 u1 ..
    y: Option<&mut Tensor>, // [T, F] bf16
    to: &Fp8Rows,           // [T, F]
) -> Result<()> {
    const OP: &str = "silu_mul_fp8";
    let (gpu, columns) = (ordinal(OP, gate_up)?, row_len(OP, gate_up)? / 2);
    let (rows, y) = (gate_up.numel() / (2 * columns).max(1), y.as_deref());
    if ![Some(gate_up), y].into_iter().flatten().all(is_aligned) {
        return Err(invalid(OP, "rows that begin at multiples of 16 bytes", gate_up.size()));
    }
    let [values, scales] = outputs(OP, to, (rows, columns), gpu)?;
    let arguments = [
        address(OP, gate_up, Kind::BFloat16, 2 * rows * columns, gpu)?,
        address_or_null(OP, y, Kind::BFloat16, rows * columns, gpu)?,
        values,
        scales,
        Argument::Count(columns as i64),
    ];
    let shape = (rows as u32, threads(columns, MOST), 0);
    // SAFETY: the kernel's parameters in order; one block a row, all of whose packs have a thread.
    unsafe { launch_early(swiglu::SOURCE, "swiglu_forward_fp8", gpu, shape, &arguments) }
}

/// The addresses of values and scales of so many rows of a length that is served.
fn outputs(op: &'static str, to: &Fp8Rows, (rows, columns): (usize, usize), gpu: usize) -> Result<[Argument; 2]> {
    if !fp8_serves([COLUMNS, columns]) || !is_aligned(&to.values) {
        return Err(invalid(op, format!("rows of a multiple of {COLUMNS}, at most {MOST_COLUMNS}"), columns));
    }
    Ok([
        address(op, &to.values, Kind::Float8e4m3fn, rows * columns, gpu)?,
        address(op, &to.scales, Kind::Float, rows, gpu)?,
    ])
}

/// Whole warps that have all packs of a row, at most `most` each.
fn threads(columns: usize, most: usize) -> u32 {
    (columns / PACK).div_ceil(most).next_multiple_of(32) as u32
}

#[cfg(test)]
mod tests {
    use super::super::assert_declared;
    use super::*;

    #[test]
    fn the_source_has_the_same_constants() {
        assert_declared(SOURCE, &[("MOST", MOST)]);
        assert_declared(swiglu::SOURCE, &[("MOST", MOST)]);
    }

    #[test]
    fn matrices_of_known_models_are_served() {
        for matrix in [[4608, 3584], [37_888, 3584], [3584, 18_944], [55_296, 5120], [5120, 27_648], [1152, 896]] {
            assert!(fp8_serves(matrix), "{matrix:?}");
        }
        for matrix in [[8, 64], [64, 72], [64, 32_784]] {
            assert!(!fp8_serves(matrix), "{matrix:?}");
        }
        assert_eq!(
            [threads(3584, MOST), threads(18_944, MOST), threads(32_768, MOST), threads(16, 2)],
            [128, 608, 1024, 32]
        );
    }
}
