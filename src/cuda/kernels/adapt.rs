//! Kernels that add a LoRA adapter's part to a GEMM's output.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, invalid, is_aligned, launch_early, ordinal, strided};
use crate::cuda::abilities::gpu_has_clusters;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::ADAPT;
pub(super) const NAMES: &[&str] = &[
    "adapt_down_16x16",
    "adapt_down_16x32",
    "adapt_down_16x48",
    "adapt_down_32x16",
    "adapt_down_32x32",
    "adapt_down_32x48",
    "adapt_up_16x1",
    "adapt_up_16x2",
    "adapt_up_16x4",
    "adapt_up_32x1",
    "adapt_up_32x2",
    "adapt_up_32x4",
    "adapt_silu_mul_16x1",
    "adapt_silu_mul_16x2",
    "adapt_silu_mul_16x4",
    "adapt_silu_mul_32x1",
    "adapt_silu_mul_32x2",
    "adapt_silu_mul_32x4",
];

// These must equal the constants in the .cu file; a test checks that.
const SPLITS: usize = 8;
const DOWN_WARPS: usize = 8;
const UP_WARPS: usize = 4;
const UP_COLUMNS: usize = 32;
const UP_DEPTH: usize = 16;
/// Numbers of rows from which the first and the second kernel use larger tiles, measured on an H200 (docs/benchmarks/adapters.md).
const MANY_DOWN: usize = 512;
const MANY_UP: usize = 1024;
/// Elements per memory access.
const PACK: i64 = 8;
/// Sizes up to which these kernels are faster than a library's GEMMs: rows, columns of low (if rows are few), columns of x, and elements of low and
/// of out.
const MOST_ROWS: i64 = 512;
const MOST_INNER: i64 = 48;
const MOST_COLUMNS: i64 = 8192;
const MOST_LOW: i64 = 8192;
const MOST_LOW_NARROW: i64 = 2 * MOST_LOW;
const MOST_OUTPUTS: usize = 4 << 20;
/// Most elements of A, B and low, since the kernels use 32-bit offsets.
const MOST_ELEMENTS: i64 = i32::MAX as i64;

/// Whether [`adapt`] is faster than two GEMMs of a library, as measured on an H200 (docs/benchmarks/adapters.md).
pub fn adapt_pays(x: &Tensor, a: &Tensor, out: &Tensor) -> bool {
    let [rows, columns, inner] = [x.size()[0], x.size()[1], a.size()[0]];
    let low = rows * inner;
    let is_narrow = || low <= MOST_LOW_NARROW && out.numel() <= MOST_OUTPUTS;
    low <= MOST_LOW || columns <= MOST_COLUMNS && (rows <= MOST_ROWS && inner <= MOST_INNER || is_narrow())
}

/// Whether [`adapt`] supports these tensors on their GPU.
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

/// Computes low = x A^T, rounded, and out += low B^T, rounded once. Sums are in float32, in an order that depends only on K and k, so a row's bits do
/// not depend on the number of rows.
///
/// A is read while the preceding operation still runs; B and `out` are read while the first of the two kernels runs. The preceding operation must not
/// write A, and must itself have waited for any operation that does. It may write `out`. Allocates nothing.
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
    let adapted = Adapted::queue_down("adapt", x, [a, b], low, out)?;
    adapted.queue_up("adapt_up", &[adapted.low, adapted.b, adapted.out])
}

/// Computes act = silu(gate) * up of gate and up after [`adapt`], with the same bits as [`super::silu_mul`] would give; `gate_up` itself is not
/// changed.
///
/// # Errors
/// The errors of [`adapt`].
pub fn adapt_silu_mul(
    x: &Tensor,       // [T, K] bf16
    a: &Tensor,       // [k, K], like x, of any row stride
    b: &Tensor,       // [2 F, k], like x
    low: &Tensor,     // [T, k], like x
    gate_up: &Tensor, // [T, 2 F], like x: g0 u0 g1 u1 ..
    act: &Tensor,     // [T, F], like x
) -> Result<()> {
    const OP: &str = "adapt_silu_mul";
    let adapted = Adapted::queue_down(OP, x, [a, b], low, gate_up)?;
    let act = address(OP, act, Kind::BFloat16, (adapted.rows * adapted.outer / 2) as usize, adapted.gpu)?;
    adapted.queue_up(OP, &[adapted.low, adapted.b, adapted.out, act])
}

/// The arguments of the second kernel; the first kernel is already queued.
struct Adapted {
    gpu: usize,
    rows: i64,
    inner: i64,
    outer: i64,
    low: Argument,
    b: Argument,
    out: Argument,
}

impl Adapted {
    fn queue_down(op: &'static str, x: &Tensor, [a, b]: [&Tensor; 2], low: &Tensor, out: &Tensor) -> Result<Self> {
        let (gpu, kind) = (ordinal(op, x)?, Kind::BFloat16);
        let [rows, columns, inner, outer] = [x.size()[0], x.size()[1], a.size()[0], b.size()[0]];
        let elements = [inner * a.stride()[0], outer * inner, rows * inner].into_iter().max().unwrap_or(0);
        if !adapt_serves(x, a, b, out) || elements > MOST_ELEMENTS {
            let got = [x, a, b, out].map(|tensor| (tensor.kind(), tensor.size(), tensor.stride()));
            return Err(invalid(
                op,
                "aligned bf16 matrices whose sizes are multiples of 8 and that have fewer than 2^31 elements, as x and \
                 out, on sm_90 or later",
                got,
            ));
        }
        let numel = |rows: i64, columns: i64| (rows * columns) as usize;
        let low = address(op, low, kind, numel(rows, inner), gpu)?;
        let b = address(op, b, kind, numel(outer, inner), gpu)?;
        let out = address(op, out, kind, numel(rows, outer), gpu)?;
        let down = [
            address(op, x, kind, numel(rows, columns), gpu)?,
            strided(op, a, kind, &[inner, columns], gpu)?,
            low,
            Argument::Count(rows),
            Argument::Count(columns),
            Argument::Count(inner),
            Argument::Count(a.stride()[0]),
        ];
        let DownTile { rows: tile, columns: width } = DownTile::of(rows as usize, inner as usize);
        let clusters = (rows as usize).div_ceil(tile) * (inner as usize).div_ceil(width);
        let (name, threads) = (format!("adapt_down_{tile}x{width}"), 32 * DOWN_WARPS);
        // SAFETY: the kernel's parameters in order; a cluster for every tile of low. The work before does not write A, which is read
        // before that has ended: the caller's promise.
        unsafe { launch_early(SOURCE, &name, gpu, ((clusters * SPLITS) as u32, threads as u32, 0), &down)? };
        Ok(Self { gpu, rows, inner, outer, low, b, out })
    }

    /// Queues the second kernel, `kernel`, with the given addresses.
    fn queue_up(&self, kernel: &str, addresses: &[Argument]) -> Result<()> {
        let Self { gpu, rows, inner, outer, .. } = *self;
        let UpTile { rows: tile, steps, stacked } = UpTile::of(rows as usize, inner as usize);
        let across = (outer as usize).div_ceil(UP_COLUMNS * (UP_WARPS / stacked));
        let blocks = (rows as usize).div_ceil(tile * stacked) * across;
        let counts = [rows, outer, inner, stacked as i64].map(Argument::Count);
        let (name, threads) = (format!("{kernel}_{tile}x{steps}"), 32 * UP_WARPS);
        // SAFETY: the kernel's parameters in order; a block for every tile of out. The kernel before writes low alone and begins when
        // the work before it has ended, so B and out may be read before it has.
        unsafe { launch_early(SOURCE, &name, gpu, (blocks as u32, threads as u32, 0), &[addresses, &counts].concat()) }
    }
}

/// The tile of low that a cluster of the first kernel computes.
#[derive(Debug, PartialEq, Eq)]
struct DownTile {
    rows: usize,
    columns: usize,
}

impl DownTile {
    fn of(rows: usize, inner: usize) -> Self {
        let columns = match inner.div_ceil(16) {
            1 => 16,
            count if count % 3 == 0 => 48,
            _ => 32,
        };
        Self { rows: if rows < MANY_DOWN { 16 } else { 32 }, columns }
    }
}

/// The tile of the output that a block of the second kernel computes.
#[derive(Debug, PartialEq, Eq)]
struct UpTile {
    /// Rows per warp.
    rows: usize,
    /// Steps of k that are loaded at once.
    steps: usize,
    /// Number of warps along the rows; the remaining warps are along the columns.
    stacked: usize,
}

impl UpTile {
    fn of(rows: usize, inner: usize) -> Self {
        let steps = [1, 2].into_iter().find(|steps| inner <= steps * UP_DEPTH).unwrap_or(4);
        let (rows, stacked) = match rows {
            ..=16 => (16, 1),
            17..MANY_UP => (16, 2),
            MANY_UP.. => (32, UP_WARPS),
        };
        Self { rows, steps, stacked }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("SPLITS", SPLITS), ("DOWN_WARPS", DOWN_WARPS), ("UP_WARPS", UP_WARPS)]);
        assert_declared(SOURCE, &[("UP_COLUMNS", UP_COLUMNS), ("UP_DEPTH", UP_DEPTH)]);
    }

    #[test]
    fn every_tile_size_has_a_compiled_kernel() {
        for rows in [1, 16, 17, 511, 512, 1023, 1024, 16_384] {
            for inner in [8, 16, 24, 32, 48, 64, 128, 192, 776] {
                let DownTile { rows: tile, columns } = DownTile::of(rows, inner);
                assert!(NAMES.contains(&format!("adapt_down_{tile}x{columns}").as_str()), "{rows} x {inner}");
                let UpTile { rows: tile, steps, stacked } = UpTile::of(rows, inner);
                for kernel in ["adapt_up", "adapt_silu_mul"] {
                    assert!(NAMES.contains(&format!("{kernel}_{tile}x{steps}").as_str()), "{rows} x {inner}");
                }
                assert!(UP_WARPS.is_multiple_of(stacked));
            }
        }
        assert_eq!(DownTile::of(256, 48), DownTile { rows: 16, columns: 48 });
        assert_eq!(UpTile::of(2048, 32), UpTile { rows: 32, steps: 2, stacked: 4 });
    }
}
