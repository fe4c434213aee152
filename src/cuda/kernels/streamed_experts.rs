//! FP8 GEMMs with few rows per expert on Hopper, bound by streaming the weights; they take most of a decode step.
//!
//! T tokens, E experts on this rank, k choices per token, D hidden, I an expert's width on this rank.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::boxes::{lies_well, pairs_boxes, step};
use super::expert_tile::{ExpertTile, FEW};
use super::experts::sure_experts;
use super::fp8::ScaledRows;
use super::launch::{Argument, address, address_or_null, invalid, is_aligned, ordinal, queue, strided};
use super::route::RoutedTokens;
use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::STREAMED_EXPERTS;
pub(super) const NAMES: &[&str] = &["streamed_experts_gate_up", "streamed_experts_down"];

const GATE_UP: &str = NAMES[0];
const DOWN: &str = NAMES[1];
const GROUPS: usize = 2;
const FEATURES: usize = 64;
const ROWS: usize = 32;
const THREADS: u32 = 128 * GROUPS as u32 + 32;
/// Bytes of a row that are copied at once; bytes of a pipeline stage; bytes of a block's rows and stages together; alignment.
const STEP_BYTES: usize = 128;
const STAGE_BYTES: usize = GROUPS * FEATURES * STEP_BYTES;
const SHARED_BYTES: usize = 225 << 10;
const ALIGNMENT: usize = 1 << 10;
/// Number of pipeline stages. Fewer do not keep memory busy. For short rows more are slower, because the next kernel's blocks then do not fit beside
/// them (docs/benchmarks/fp8.md).
const LEAST_STAGES: usize = 4;
const MOST_STAGES: usize = 10;
const SHORT: usize = 1024;
const STAGES_OF_SHORT: usize = 6;
/// Longest rows that `down` quantizes, and the number of 8-element packs per lane for these.
const MOST_PACKS: usize = 8;
const MOST_ROUNDED: usize = 8 * 32 * MOST_PACKS;

/// Whether [`streamed_experts_gate_up`] supports rows in such tiles and these matrices [E 2 I, D] on their GPU.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn streamed_gate_up_serves(tile: ExpertTile, w: &ScaledRows, routed: &RoutedTokens) -> Result<bool> {
    serves(GATE_UP, tile, w, routed)
}

/// Whether [`streamed_experts_down`] supports rows in such tiles and these matrices [E D, I] on their GPU.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn streamed_down_serves(tile: ExpertTile, w: &ScaledRows, routed: &RoutedTokens) -> Result<bool> {
    Ok(w.values.size()[1] as usize <= MOST_ROUNDED && serves(DOWN, tile, w, routed)?)
}

fn serves(op: &'static str, tile: ExpertTile, w: &ScaledRows, routed: &RoutedTokens) -> Result<bool> {
    let (values, experts) = (&w.values, routed.own.len() as i64);
    let fits = tile == FEW
        && experts > 0
        && values.size()[0] % (16 * experts) == 0
        && values.device().is_cuda()
        && lies_well(values)
        && stages(values.size()[1] as usize) >= LEAST_STAGES;
    Ok(fits && Context::retain(ordinal(op, values)?)?.compute_capability()? == Capability::HOPPER)
}

/// Number of copy steps for rows with `columns` columns.
fn steps(columns: usize) -> usize {
    columns.div_ceil(step(Kind::Float8e4m3fn))
}

/// Number of pipeline stages that fit in shared memory beside a tile's rows.
fn stages(columns: usize) -> usize {
    let rows = steps(columns) * ROWS * STEP_BYTES + ALIGNMENT;
    let most = if columns <= SHORT { STAGES_OF_SHORT } else { MOST_STAGES };
    most.min(SHARED_BYTES.saturating_sub(rows) / STAGE_BYTES)
}

/// Computes [`experts_gate_up_fp8`](super::experts_gate_up_fp8) for few rows per expert, with the same bits. The kernel reads w while the preceding
/// operation still runs, which must not write it. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn streamed_experts_gate_up(
    x: &ScaledRows, // [T, D]
    w: &ScaledRows, // [E 2 I, D]
    routed: &RoutedTokens,
    act: &Tensor, // [T k, I] bf16
) -> Result<()> {
    let rows = routed.experts.size()[0];
    let scales = address(GATE_UP, &x.scales, Kind::Float, rows as usize, ordinal(GATE_UP, act)?)?;
    product(GATE_UP, (&x.values, Kind::Float8e4m3fn, rows, scales), w, routed, (act, 2))
}

/// Computes [`experts_down_fp8`](super::experts_down_fp8) for few rows per expert, and quantizes these rows itself. The conditions of
/// [`streamed_experts_gate_up`] apply.
///
/// # Errors
/// The errors of [`streamed_experts_gate_up`].
pub fn streamed_experts_down(
    act: &Tensor,   // [T k, I] bf16
    w: &ScaledRows, // [E D, I]
    routed: &RoutedTokens,
    out: &Tensor, // [T k, D] bf16
) -> Result<()> {
    let rows = routed.order.numel() as i64;
    let scales = address_or_null(DOWN, None, Kind::Float, 0, ordinal(DOWN, act)?)?;
    product(DOWN, (act, Kind::BFloat16, rows, scales), w, routed, (out, 1))
}

fn product(
    op: &'static str,
    (x, kind, x_rows, x_scales): (&Tensor, Kind, i64, Argument),
    w: &ScaledRows,
    routed: &RoutedTokens,
    (out, columns_of_one): (&Tensor, i64),
) -> Result<()> {
    let (&[all, k], gpu, experts) = (&w.values.size()[..], ordinal(op, x)?, routed.own.len()) else {
        return Err(invalid(op, "matrices [E N, K]", w.values.size()));
    };
    let fits = serves(op, FEW, w, routed)?
        && (op == GATE_UP || k as usize <= MOST_ROUNDED)
        && routed.tile_rows == ROWS
        && k % 16 == 0
        && [x, out].into_iter().all(|rows| rows.is_contiguous() && is_aligned(rows));
    if !fits {
        let expected = "few rows per expert, each of a multiple of 16 elements, sorted into tiles of this size";
        return Err(invalid(op, expected, (x.size(), w.values.size(), routed.tile_rows)));
    }
    let (features, rows) = (all / experts as i64, routed.order.numel());
    let arguments = [
        pairs_boxes(&w.values, FEATURES)?,
        strided(op, x, kind, &[x_rows, k], gpu)?,
        x_scales,
        address(op, &w.scales, Kind::Float, all as usize, gpu)?,
        strided(op, out, Kind::BFloat16, &[rows as i64, features / columns_of_one], gpu)?,
        address(op, &routed.order, Kind::Int, rows, gpu)?,
        address(op, &routed.tiles, Kind::Int, routed.tiles.numel(), gpu)?,
        Argument::Count(k),
        Argument::Count(features),
        Argument::Count(routed.experts.size()[1]),
        Argument::Count(sure_experts(routed) as i64),
        Argument::Count(stages(k as usize) as i64),
    ];
    let shared_bytes = steps(k as usize) * ROWS * STEP_BYTES + stages(k as usize) * STAGE_BYTES + ALIGNMENT;
    let blocks = Context::retain(gpu)?.num_processors()?;
    let shape = (blocks as u32, THREADS, shared_bytes as u32);
    // SAFETY: the kernel's parameters in order; tiles, which `route` has made, name rows of x and out and experts of w, whose boxes read as
    // zeros beyond it. Of what it reads, w and nothing else is read before the work before has ended, which does not write it: the caller's
    // promise.
    unsafe { queue(SOURCE, op, gpu, shape, (1, true), &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        let constants = [("GROUPS", GROUPS), ("FEATURES", FEATURES), ("ROWS", ROWS), ("MOST_STAGES", MOST_STAGES)];
        assert_declared(SOURCE, &constants);
        assert_declared(SOURCE, &[("MOST_PACKS", MOST_PACKS)]);
        assert_eq!(FEW.rows, ROWS, "tiles of the router");
    }

    #[test]
    fn rows_and_stages_fit_into_shared_memory() {
        for (columns, expected) in [(768, 6), (2048, 10), (4096, 6), (5120, 4)] {
            let bytes = steps(columns) * ROWS * STEP_BYTES + stages(columns) * STAGE_BYTES + ALIGNMENT;
            assert_eq!(stages(columns), expected, "{columns}");
            assert!(bytes <= SHARED_BYTES, "{columns}");
        }
        assert!(stages(6144) < LEAST_STAGES);
    }
}
