//! Sums over rows and columns in a fixed order.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, blocks, invalid, is_aligned, kind_name, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::SUMS;
pub(super) const NAMES: &[&str] = &[
    "add_rows_f32_f32_x1",
    "add_rows_f32_f32_x4",
    "add_rows_f32_bf16_x1",
    "add_rows_f32_bf16_x4",
    "add_rows_bf16_f32_x1",
    "add_rows_bf16_f32_x4",
    "add_rows_bf16_bf16_x1",
    "add_rows_bf16_bf16_x4",
    "add_columns_f32",
    "add_columns_bf16",
];

/// Computes `to[index[r]] += from[r]`. Rows with the same index are added in order, in float32.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`]. Indexes beyond `to` are undefined behaviour.
pub fn add_rows(
    from: &Tensor,   // [R, D] f32 or bf16
    index: &Tensor,  // [R] i64
    to: &mut Tensor, // [.., D] f32 or bf16
) -> Result<()> {
    const OP: &str = "add_rows";
    let [rows, dim] = from.size()[..] else { return Err(invalid(OP, "rows [R, D]", from.size())) };
    if to.size().last() != Some(&dim) {
        return Err(invalid(OP, format!("an output with rows of {dim} elements"), to.size()));
    }
    let (gpu, dim) = (ordinal(OP, from)?, dim as usize);
    let (ascending, order) = index.f_sort_stable(true, 0, false)?;
    let width = if dim.is_multiple_of(4) && is_aligned(from) && is_aligned(to) { 4 } else { 1 };
    let name = format!("{OP}_{}_{}_x{width}", kind_name(OP, from)?, kind_name(OP, to)?);
    let arguments = [
        address(OP, from, from.kind(), rows as usize * dim, gpu)?,
        address(OP, &ascending, Kind::Int64, rows as usize, gpu)?,
        address(OP, &order, Kind::Int64, rows as usize, gpu)?,
        address(OP, to, to.kind(), to.numel(), gpu)?,
        Argument::Count(rows),
        Argument::Count(dim as i64),
    ];
    let threads = (dim / width).next_multiple_of(32).clamp(32, 256) as u32;
    // SAFETY: the kernel's parameters in order; one block for every row of `from`.
    unsafe { launch(SOURCE, &name, gpu, (rows as u32, threads, 0), &arguments) }
}

/// Adds the sum over the rows of `from` to `to`.
///
/// # Errors
/// The errors of [`add_rows`].
pub fn add_columns(
    from: &Tensor,   // [R, D] f32
    to: &mut Tensor, // [D] f32 or bf16
) -> Result<()> {
    const OP: &str = "add_columns";
    let [rows, dim] = from.size()[..] else { return Err(invalid(OP, "rows [R, D]", from.size())) };
    let gpu = ordinal(OP, from)?;
    let arguments = [
        address(OP, from, Kind::Float, (rows * dim) as usize, gpu)?,
        address(OP, to, to.kind(), dim as usize, gpu)?,
        Argument::Count(rows),
        Argument::Count(dim),
    ];
    let grid = blocks(dim as usize, 32, usize::MAX);
    // SAFETY: the kernel's parameters in order; 32 columns a block.
    unsafe { launch(SOURCE, &format!("{OP}_{}", kind_name(OP, to)?), gpu, (grid, 256, 0), &arguments) }
}
