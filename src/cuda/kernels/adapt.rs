//! The kernel that adds an adapter's part to a product of few rows.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, is_aligned, launch_early, ordinal, strided};
use crate::cuda::abilities::gpu_has_clusters;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::ADAPT;
pub(super) const NAMES: &[&str] = &["adapt_down_16", "adapt_down_32", "adapt_down_64", "adapt_up_32", "adapt_up_64"];

// As in the source, to which a test holds them.
const THREADS: u32 = 128;
const SPLITS: u32 = 8;
/// Columns of a cluster of `adapt_down`, and of a block of `adapt_up`.
const DOWN_COLUMNS: usize = 32;
const UP_COLUMNS: usize = 64;
/// Elements that are moved at once.
const PACK: i64 = 8;
/// Blocks that fill a GPU, roughly: rows are divided further as long as there are fewer.
const MANY_BLOCKS: usize = 192;

/// Limits that the kernels are fast within: rows, columns of x and elements of out, at most.
const MOST_ROWS: i64 = 256;
const MOST_COLUMNS: i64 = 8192;
const MOST_OUTPUTS: usize = 4 << 20;

/// Whether [`adapt`] is faster than a library's two products, as measured on H200 (docs/benchmarks/adapters.md).
pub fn adapt_pays(x: &Tensor, out: &Tensor) -> bool {
    x.size()[0] <= MOST_ROWS && x.size()[1] <= MOST_COLUMNS && out.numel() <= MOST_OUTPUTS
}

/// Whether [`adapt`] takes these tensors, on their GPU.
pub fn adapt_serves(x: &Tensor, a: &Tensor, b: &Tensor, out: &Tensor) -> bool {
    let sizes = [x.size()[1], a.size()[0], out.size()[1], a.stride()[0]];
    let are_packs = sizes.iter().all(|size| size % PACK == 0) && a.stride()[1] == 1;
    let served = |tensor: &&Tensor| tensor.kind() == Kind::BFloat16 && is_aligned(tensor);
    are_packs
        && has_clusters(x)
        && [x, a, b, out].iter().all(served)
        && [x, b, out].iter().all(|tensor| tensor.is_contiguous())
}

fn has_clusters(x: &Tensor) -> bool {
    ordinal("adapt", x).is_ok_and(gpu_has_clusters)
}

/// low = x A^T, rounded; out += low B^T, rounded once; sums in float32 in an order that depends on K and k alone, so that a
/// row's bits do not depend on the number of rows. Few rows are what it is fast for. A is read while the operation before still
/// runs, B and `out` while the first of the two kernels does: that operation must not write A, and must itself have waited for any
/// that does. It may write `out`. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn adapt(
    x: &Tensor,   // [T, K] bf16
    a: &Tensor,   // [k, K], like x, of any row stride
    b: &Tensor,   // [N, k], like x
    low: &Tensor, // [T, k], like x
    out: &Tensor, // [T, N], like x
) -> Result<()> {
    const OP: &str = "adapt";
    let (gpu, kind) = (ordinal(OP, x)?, Kind::BFloat16);
    let [rows, columns, inner, outer] = [x.size()[0], x.size()[1], a.size()[0], b.size()[0]];
    if !adapt_serves(x, a, b, out) {
        let got = [x, a, b, out].map(|tensor| (tensor.kind(), tensor.size(), tensor.stride()));
        return Err(super::launch::invalid(
            OP,
            "aligned bf16 matrices with sizes of a multiple of 8, on sm_90 or later",
            got,
        ));
    }
    let counts = [rows, columns, inner, outer].map(Argument::Count);
    let numel = |rows: i64, columns: i64| (rows * columns) as usize;
    let low = address(OP, low, kind, numel(rows, inner), gpu)?;
    let down = [
        address(OP, x, kind, numel(rows, columns), gpu)?,
        strided(OP, a, kind, &[inner, columns], gpu)?,
        low,
        counts[0],
        counts[1],
        counts[2],
        Argument::Count(a.stride()[0]),
    ];
    let up = [
        low,
        address(OP, b, kind, numel(outer, inner), gpu)?,
        address(OP, out, kind, numel(rows, outer), gpu)?,
        counts[0],
        counts[3],
        counts[2],
    ];
    let (tile, clusters) =
        tiles(rows as usize, (inner as usize).div_ceil(DOWN_COLUMNS), SPLITS as usize, &[64, 32, 16]);
    // SAFETY: the kernel's parameters in order; a cluster for every tile of low. The work before does not write A, which is read
    // before that has ended: the caller's promise.
    unsafe { launch_early(SOURCE, &format!("adapt_down_{tile}"), gpu, (clusters * SPLITS, THREADS, 0), &down)? };
    let (tile, blocks) = tiles(rows as usize, (outer as usize).div_ceil(UP_COLUMNS), 1, &[64, 32]);
    // SAFETY: the kernel's parameters in order; a block for every tile of out. The kernel before writes low alone and begins when
    // the work before it has ended, so B and out may be read before it has.
    unsafe { launch_early(SOURCE, &format!("adapt_up_{tile}"), gpu, (blocks, THREADS, 0), &up) }
}

/// (rows of a tile, tiles) for `across` tiles of every row, of `blocks` blocks each: the largest tile that fills the GPU, or
/// the smallest.
fn tiles(rows: usize, across: usize, blocks: usize, sizes: &[usize]) -> (usize, u32) {
    let count = |size: usize| rows.div_ceil(size) * across;
    let fills = |size: &&usize| count(**size) * blocks >= MANY_BLOCKS;
    let size = *sizes.iter().find(fills).or(sizes.last()).expect("sizes");
    (size, count(size) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn the_source_has_the_same_constants() {
        assert_declared(SOURCE, &[("THREADS", THREADS as usize), ("SPLITS", SPLITS as usize)]);
        assert!(SOURCE.text.contains(&format!("adapt_down<M, {DOWN_COLUMNS}>")));
        assert!(SOURCE.text.contains(&format!("adapt_up<M, {UP_COLUMNS}>")));
    }

    #[test]
    fn tiles_are_small_until_they_fill_a_gpu() {
        assert_eq!(tiles(1, 6, 8, &[64, 32, 16]), (16, 6));
        assert_eq!(tiles(128, 6, 8, &[64, 32, 16]), (32, 24));
        assert_eq!(tiles(128, 2, 8, &[64, 32, 16]), (16, 16));
        assert_eq!(tiles(100, 28, 1, &[64, 32]), (32, 112));
    }
}
