//! RMSNorm, forward and backward.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, address_or_null, blocks, invalid, is_aligned, kinds_name, launch, ordinal};
use super::sums::add_columns;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::RMS_NORM;
pub(super) const NAMES: &[&str] = &[
    "rms_norm_forward_f32_x1",
    "rms_norm_forward_f32_x4",
    "rms_norm_forward_bf16_x1",
    "rms_norm_forward_bf16_x8",
    "rms_norm_backward_f32_x1",
    "rms_norm_backward_f32_x4",
    "rms_norm_backward_bf16_x1",
    "rms_norm_backward_bf16_x8",
    "rms_norm_forward_f32_bf16_x1",
    "rms_norm_forward_f32_bf16_x8",
    "rms_norm_backward_f32_bf16_x1",
    "rms_norm_backward_f32_bf16_x8",
    "rms_norm_forward_fp8_bf16",
    "rms_norm_forward_fp8_f32_bf16",
];

/// Longest row: the narrow backward keeps a row of sums in a block's 48 KiB of shared memory.
pub(super) const MOST_COLUMNS: usize = 12_000;
/// Number of threads over which partial sums of dweight are spread. It is the same on every GPU, so that the sums have the same bits.
const BACKWARD_THREADS: usize = 132 * 1024;

/// Returns y = x * rstd * (centre + weight), in the weight's type, and rstd = 1 / sqrt(mean(x^2) + eps) for the backward.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn rms_norm_forward(
    x: &Tensor,      // [.., D] f32 or bf16
    weight: &Tensor, // [D], like x; bf16 beside x of f32, too
    eps: f64,
    centre: f64,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "rms_norm_forward";
    let (kind, y) = (weight.kind(), Tensor::f_empty(x.size(), (weight.kind(), x.device()))?); // [.., D]
    let NormLaunch { gpu, rows, dim, suffix, threads } = NormLaunch::of(OP, x, weight, &[&y])?;
    let rstd = statistics(x)?; // [.., 1] f32
    let arguments = [
        address(OP, x, x.kind(), rows * dim, gpu)?,
        address(OP, weight, kind, dim, gpu)?,
        address(OP, &y, kind, rows * dim, gpu)?,
        address(OP, &rstd, Kind::Float, rows, gpu)?,
        Argument::Count(dim as i64),
        Argument::Float(eps as f32),
        Argument::Float(centre as f32),
    ];
    let grid = blocks(rows, 1, rows);
    // SAFETY: the kernel's parameters in order; one block a row, at least one thread for every vector of the wide variant.
    unsafe { launch(SOURCE, &format!("{OP}_{suffix}"), gpu, (grid, threads, 0), &arguments)? };
    Ok((y, rstd))
}

/// Returns dx = residual + rstd * (dy * w) - x * rstd^3 * mean(dy * w * x) with w = centre + weight. Adds to dweight the sum over rows of dy * x *
/// rstd, computed in float32 in a fixed order.
///
/// # Errors
/// The errors of [`rms_norm_forward`].
pub fn rms_norm_backward(
    dy: &Tensor,               // [.., D], like weight
    x: &Tensor,                // [.., D] f32 or bf16
    weight: &Tensor,           // [D], like x; bf16 beside x of f32, too
    rstd: &Tensor,             // [.., 1] f32
    residual: Option<&Tensor>, // [.., D], like weight
    centre: f64,
    dweight: &mut Tensor, // [D] f32 or bf16
) -> Result<Tensor> {
    const OP: &str = "rms_norm_backward";
    let (kind, dx) = (weight.kind(), dy.f_empty_like()?); // [.., D]
    let NormLaunch { gpu, rows, dim, suffix, threads } =
        NormLaunch::of(OP, x, weight, &[dy, &dx, residual.unwrap_or(dy)])?;
    let grid = blocks(rows, 1, (BACKWARD_THREADS / threads.next_power_of_two() as usize).max(132));
    let partial = Tensor::f_empty([i64::from(grid), dim as i64], (Kind::Float, x.device()))?; // [blocks, D]
    let arguments = [
        address(OP, dy, kind, rows * dim, gpu)?,
        address(OP, x, x.kind(), rows * dim, gpu)?,
        address(OP, weight, kind, dim, gpu)?,
        address(OP, rstd, Kind::Float, rows, gpu)?,
        address_or_null(OP, residual, kind, rows * dim, gpu)?,
        address(OP, &dx, kind, rows * dim, gpu)?,
        address(OP, &partial, Kind::Float, grid as usize * dim, gpu)?,
        Argument::Count(rows as i64),
        Argument::Count(dim as i64),
        Argument::Float(centre as f32),
    ];
    let shared_bytes = if suffix.ends_with("_x1") { 4 * dim as u32 } else { 0 };
    // SAFETY: the kernel's parameters in order; one row of partial sums a block, in the narrow variant one in shared memory.
    unsafe { launch(SOURCE, &format!("{OP}_{suffix}"), gpu, (grid, threads, shared_bytes), &arguments)? };
    add_columns(&partial, dweight)?;
    Ok(dx)
}

struct NormLaunch {
    gpu: usize,
    rows: usize,
    dim: usize,
    /// Suffix of the kernel's name: the wide variant if one vector per thread covers a row and everything is aligned to it.
    suffix: String,
    threads: u32,
}

impl NormLaunch {
    fn of(op: &'static str, x: &Tensor, weight: &Tensor, others: &[&Tensor]) -> Result<Self> {
        let dim = x.size().last().map_or(0, |&dim| dim as usize);
        if dim == 0 || dim > MOST_COLUMNS {
            return Err(invalid(op, format!("rows of 1 to {MOST_COLUMNS} elements"), x.size()));
        }
        let vector = 16 / weight.kind().elt_size_in_bytes();
        let are_aligned = [x, weight].iter().chain(others).all(|t| is_aligned(t));
        let is_wide = dim.is_multiple_of(vector) && dim <= 1024 * vector && are_aligned;
        let (width, threads) = if is_wide { (vector, dim / vector) } else { (1, dim.div_ceil(8).min(512)) };
        let suffix = format!("{}_x{width}", kinds_name(op, x, weight)?);
        let threads = threads.next_multiple_of(32) as u32;
        Ok(Self { gpu: ordinal(op, x)?, rows: x.numel() / dim, dim, suffix, threads })
    }
}

/// Allocates one number per row of x: [.., 1].
fn statistics(x: &Tensor) -> Result<Tensor> {
    let mut shape = x.size();
    if let Some(last) = shape.last_mut() {
        *last = 1;
    }
    Ok(Tensor::f_empty(shape, (Kind::Float, x.device()))?)
}
