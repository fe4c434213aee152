//! Transposes a matrix and quantizes it to e4m3, with one scale per column of the original.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::fp8::{ScaledRows, fp8_trains};
use super::launch::{Argument, address, invalid, is_aligned, launch, launch_early, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::FP8_COLUMNS;
pub(super) const NAMES: &[&str] = &["fp8_column_peaks", "fp8_columns"];

/// Threads per block. Each has one column when the warps' largest values are compared.
const THREADS: usize = 256;
/// The tile of a matrix that a block transposes.
const TILE_ROWS: usize = 128;
const TILE_COLUMNS: usize = 64;
/// Number of blocks that find the largest values.
const PEAK_BLOCKS: usize = 1056;

/// Quantizes each column of x to e4m3 (round to nearest), scaled by its largest absolute value, and stores it as a row of `to`, padded with zeros to
/// a multiple of 16. Needs sm_89 or later.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit, [`crate::Error::OutOfMemory`]; [`crate::Error::Cuda`].
pub fn fp8_columns(
    x: &Tensor,      // [N, K] bf16
    to: &ScaledRows, // [K, N up to a multiple of 16]
) -> Result<()> {
    const OP: &str = "fp8_columns";
    let (gpu, size) = (ordinal(OP, x)?, x.size());
    let &[rows, columns] = &size[..] else { return Err(invalid(OP, "a matrix", size)) };
    let (shape, padded) = ([rows as usize, columns as usize], (rows as usize).next_multiple_of(16));
    let fits = rows > 0 && fp8_trains([16, shape[1]]) && to.values.size() == [columns, padded as i64];
    if !fits || !is_aligned(x) || !is_aligned(&to.values) {
        return Err(invalid(OP, "rows of a multiple of 16 elements, and their transpose", (size, to.values.size())));
    }
    let (numel, lens) = (x.numel(), shape.map(|len| Argument::Count(len as i64)));
    let from = address(OP, x, Kind::BFloat16, numel, gpu)?;
    let peaks = Tensor::f_zeros([columns], (Kind::Int, x.device()))?; // [K]
    let peaks = address(OP, &peaks, Kind::Int, shape[1], gpu)?;
    let values = address(OP, &to.values, Kind::Float8e4m3fn, shape[1] * padded, gpu)?;
    let scales = address(OP, &to.scales, Kind::Float, shape[1], gpu)?;
    let (groups, strips) = strips(shape);
    let arguments = [from, peaks, lens[0], lens[1], Argument::Count(strips as i64)];
    let (grid, threads) = ((groups * strips) as u32, THREADS as u32);
    // SAFETY: the kernel's parameters in order; `strips` blocks for every group of columns. Peaks are zeros by then, in stream order.
    unsafe { launch(SOURCE, "fp8_column_peaks", gpu, (grid, threads, 0), &arguments)? };
    let tiles = padded.div_ceil(TILE_ROWS) * shape[1].div_ceil(TILE_COLUMNS);
    let arguments = [from, peaks, values, scales, lens[0], lens[1], Argument::Count(padded as i64)];
    // SAFETY: the kernel's parameters in order; a block for every tile. The memory of the peaks is freed in stream order.
    unsafe { launch_early(SOURCE, OP, gpu, (tiles as u32, threads, 0), &arguments) }
}

/// Number of groups of columns, and number of blocks that split the rows of a group; not more than there are rows for.
fn strips([rows, columns]: [usize; 2]) -> (usize, usize) {
    let groups = columns.div_ceil(THREADS);
    (groups, (PEAK_BLOCKS / groups).clamp(1, rows.div_ceil(THREADS / 32)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("THREADS", THREADS), ("TILE_ROWS", TILE_ROWS), ("TILE_COLUMNS", TILE_COLUMNS)]);
    }

    #[test]
    fn column_kernels_split_rows_into_strips() {
        assert_eq!(strips([37_888, 3584]), (14, 75));
        assert_eq!(strips([3584, 18_944]), (74, 14));
        assert_eq!(strips([16, 16]), (1, 2), "a block has eight rows at once");
        assert_eq!(strips([64, 65_536]), (256, 4));
    }
}
