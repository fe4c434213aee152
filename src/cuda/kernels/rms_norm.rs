//! RMSNorm, forward and backward.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::{Argument, address, blocks, invalid, kind_name, launch, ordinal};
use crate::cuda::nvrtc::{self, Source};
use crate::error::Result;

pub(super) const SOURCE: &Source = &nvrtc::RMS_NORM;
pub(super) const NAMES: &[&str] =
    &["rms_norm_forward_f32", "rms_norm_forward_bf16", "rms_norm_backward_f32", "rms_norm_backward_bf16"];

/// Longest row: the backward keeps a row of sums in a block's 48 KiB of shared memory.
const MOST_COLUMNS: usize = 12_000;
/// Partial sums of dweight. The same number on every GPU, so that the sums have the same bits.
const MOST_PARTIALS: usize = 264;

/// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), and rstd for the backward.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn rms_norm_forward(
    x: &Tensor,      // [.., D] f32 or bf16
    weight: &Tensor, // [D], like x
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "rms_norm_forward";
    let Rows { gpu, rows, dim } = Rows::of(OP, x)?;
    let y = x.f_empty_like()?; // [.., D]
    let rstd = statistics(x)?; // [.., 1] f32
    let arguments = [
        address(OP, x, x.kind(), rows * dim, gpu)?,
        address(OP, weight, x.kind(), dim, gpu)?,
        address(OP, &y, x.kind(), rows * dim, gpu)?,
        address(OP, &rstd, Kind::Float, rows, gpu)?,
        Argument::Count(dim as i64),
        Argument::Float(eps as f32),
    ];
    let grid = blocks(rows, 1, rows);
    // SAFETY: the kernel's parameters in order; one block a row.
    unsafe { launch(SOURCE, &format!("{OP}_{}", kind_name(OP, x)?), gpu, (grid, threads(dim), 0), &arguments)? };
    Ok((y, rstd))
}

/// dx = rstd * (dy * w) - x * rstd^3 * mean(dy * w * x); dweight += sum over rows of dy * x * rstd, in float32.
///
/// # Errors
/// As [`rms_norm_forward`].
pub fn rms_norm_backward(
    dy: &Tensor,          // [.., D], like x
    x: &Tensor,           // [.., D] f32 or bf16
    weight: &Tensor,      // [D], like x
    rstd: &Tensor,        // [.., 1] f32
    dweight: &mut Tensor, // [D]
) -> Result<Tensor> {
    const OP: &str = "rms_norm_backward";
    let Rows { gpu, rows, dim } = Rows::of(OP, x)?;
    let dx = x.f_empty_like()?; // [.., D]
    let grid = blocks(rows, 1, MOST_PARTIALS);
    let partial = Tensor::f_empty([i64::from(grid), dim as i64], (Kind::Float, x.device()))?; // [blocks, D]
    let arguments = [
        address(OP, dy, x.kind(), rows * dim, gpu)?,
        address(OP, x, x.kind(), rows * dim, gpu)?,
        address(OP, weight, x.kind(), dim, gpu)?,
        address(OP, rstd, Kind::Float, rows, gpu)?,
        address(OP, &dx, x.kind(), rows * dim, gpu)?,
        address(OP, &partial, Kind::Float, grid as usize * dim, gpu)?,
        Argument::Count(rows as i64),
        Argument::Count(dim as i64),
    ];
    let shape = (grid, threads(dim), 4 * dim as u32);
    // SAFETY: the kernel's parameters in order; one row of partial sums a block, one row in shared memory.
    unsafe { launch(SOURCE, &format!("{OP}_{}", kind_name(OP, x)?), gpu, shape, &arguments)? };
    let sums = partial.f_sum_dim_intlist(0, false, Kind::Float)?; // [D]
    let _ = dweight.f_add_(&sums)?;
    Ok(dx)
}

struct Rows {
    gpu: usize,
    rows: usize,
    dim: usize,
}

impl Rows {
    fn of(op: &'static str, x: &Tensor) -> Result<Self> {
        let dim = x.size().last().map_or(0, |&dim| dim as usize);
        if dim == 0 || dim > MOST_COLUMNS {
            return Err(invalid(op, format!("rows of 1 to {MOST_COLUMNS} elements"), x.size()));
        }
        Ok(Self { gpu: ordinal(op, x)?, rows: x.numel() / dim, dim })
    }
}

/// Room for one number a row of x, [.., 1].
fn statistics(x: &Tensor) -> Result<Tensor> {
    let mut shape = x.size();
    if let Some(last) = shape.last_mut() {
        *last = 1;
    }
    Ok(Tensor::f_empty(shape, (Kind::Float, x.device()))?)
}

/// Whole warps, at most 512 threads, about eight elements each.
fn threads(dim: usize) -> u32 {
    dim.div_ceil(8).next_multiple_of(32).min(512) as u32
}
