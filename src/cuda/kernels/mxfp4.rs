//! GEMMs of tokens with experts' weights in MXFP4, for rows that [`route`](super::route()) has sorted, and their quantization.
//!
//! T tokens, E experts on this rank, k choices per token, D hidden, I an expert's width on this rank.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::expert_tile::ExpertTile;
use super::experts::sure_experts;
use super::fp8::ScaledRows;
use super::launch::{Argument, address, invalid, is_aligned, launch, launch_early, ordinal, strided};
use super::route::RoutedTokens;
use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::MXFP4;
pub(super) const NAMES: &[&str] =
    &["mxfp4_quantize", "mxfp4_gate_up_any", "mxfp4_down_any", "mxfp4_gate_up_clamped_any", "mxfp4_down_biased_any"];
pub(super) const HOPPER: &KernelSource = &nvrtc::MXFP4_EXPERTS;
pub(super) const HOPPER_NAMES: &[&str] = &[
    "mxfp4_gate_up_few",
    "mxfp4_down_few",
    "mxfp4_gate_up_clamped_few",
    "mxfp4_down_biased_few",
    "mxfp4_gate_up_many",
    "mxfp4_down_many",
    "mxfp4_gate_up_clamped_many",
    "mxfp4_down_biased_many",
];

/// Rows and columns of a unit of weights.
pub const MXFP4_UNIT: usize = 64;
/// Bytes of a unit: 4 bits a weight, and an exponent for 32.
pub const MXFP4_UNIT_BYTES: usize = MXFP4_UNIT * MXFP4_UNIT / 2 + MXFP4_UNIT * MXFP4_UNIT / 32;
const GROUPS: usize = 4;
const THREADS_OF_UNIT: u32 = 128;
/// Bytes of the columns of a row that are multiplied at once, and alignment of stages in shared memory.
const STEP_BYTES: usize = 2 * MXFP4_UNIT;
const ALIGNMENT: usize = 1 << 10;
/// Most rows of a tile, steps of a pipeline stage, and stages, for few rows per expert and for many.
const FEW: [usize; 3] = [64, 3, 4];
const MANY: [usize; 3] = [128, 2, 4];
/// Most rows of a tile, and stages of one step, on other chips.
const ANY: [usize; 2] = [64, 4];
const ANY_PER_PROCESSOR: usize = 2;
/// Average rows per expert up to which tiles have few rows: nearly all experts then have one tile.
const FEW_ROWS: usize = 56;

impl ExpertTile {
    /// The configuration for `tokens` tokens with `choices` of `experts` experts each, for weights in MXFP4.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn of_mxfp4(tokens: usize, choices: usize, experts: usize, gpu: usize) -> Result<Self> {
        if Context::retain(gpu)?.compute_capability()? != Capability::HOPPER {
            return Ok(Self::MXFP4_ANY);
        }
        let is_few = tokens * choices / experts <= FEW_ROWS;
        Ok(if is_few { Self::MXFP4_FEW } else { Self::MXFP4_MANY })
    }

    /// Few rows per expert, on Hopper.
    pub const MXFP4_FEW: Self = streamed("few", FEW);
    /// Many rows per expert, on Hopper.
    pub const MXFP4_MANY: Self = streamed("many", MANY);
    /// Any chip.
    pub const MXFP4_ANY: Self = Self {
        name: "any",
        rows: ANY[0],
        threads: THREADS_OF_UNIT,
        shared_bytes: (ANY[1] * (MXFP4_UNIT_BYTES + ANY[0] * STEP_BYTES) + ALIGNMENT) as u32,
        per_processor: ANY_PER_PROCESSOR,
    };
}

/// A configuration in which [`GROUPS`] warpgroups multiply a unit each, and another copies.
const fn streamed(name: &'static str, [rows, steps, stages]: [usize; 3]) -> ExpertTile {
    let shared_bytes = (stages * steps * (GROUPS * MXFP4_UNIT_BYTES + rows * STEP_BYTES) + ALIGNMENT) as u32;
    ExpertTile { name, rows, threads: (GROUPS as u32 + 1) * 128, shared_bytes, per_processor: 1 }
}

/// Bytes of matrices [E, N, K] in MXFP4.
pub fn mxfp4_bytes([experts, rows, columns]: [i64; 3]) -> i64 {
    let units = |size: i64| (size as u64).div_ceil(MXFP4_UNIT as u64) as i64;
    experts * units(rows) * units(columns) * MXFP4_UNIT_BYTES as i64
}

/// Quantizes experts' matrices as [`ops::mxfp4`](crate::ops::mxfp4) does, with the same bits.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn mxfp4_quantize(
    w: &Tensor,  // [E, N, K] bf16; strides between rows and experts
    to: &Tensor, // [bytes] u8
) -> Result<()> {
    const OP: &str = "mxfp4_quantize";
    let (gpu, size, strides) = (ordinal(OP, w)?, w.size(), w.stride());
    let (&[experts, rows, columns], &[of_expert, of_row, 1]) = (&size[..], &strides[..]) else {
        return Err(invalid(OP, "matrices of experts with contiguous rows", (size, strides)));
    };
    let all = mxfp4_bytes([experts, rows, columns]) as usize;
    let arguments = [
        strided(OP, w, Kind::BFloat16, &size, gpu)?,
        address(OP, to, Kind::Uint8, all, gpu)?,
        Argument::Count(of_expert),
        Argument::Count(of_row),
        Argument::Count(rows),
        Argument::Count(columns),
    ];
    // SAFETY: the kernel's parameters in order; a block writes one unit, and reads no element outside of w.
    unsafe { launch(SOURCE, OP, gpu, ((all / MXFP4_UNIT_BYTES) as u32, THREADS_OF_UNIT, 0), &arguments) }
}

/// Computes act = silu(gate) * up for each sorted row's token with its expert's weight, or with biases the clamped SwiGLU. The weight's rows are
/// g0 u0 g1 u1 .. Allocates nothing. On Hopper the kernel reads w while the preceding operation still runs, which must not write it.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn mxfp4_experts_gate_up(
    tile: ExpertTile,
    x: &Tensor,            // [T, D] bf16
    w: &ScaledRows,        // [E, 2 I, D]
    bias: Option<&Tensor>, // [E, 2 I] bf16; a stride between experts
    routed: &RoutedTokens,
    act: &Tensor, // [T k, I] bf16
) -> Result<()> {
    product("mxfp4_gate_up", if bias.is_some() { "_clamped" } else { "" }, tile, x, (w, bias), routed, (act, 2))
}

/// Computes out = act w^T, plus biases if there are any, for each sorted row with its expert's weight, and writes it at the position of the token's
/// choice. The conditions of [`mxfp4_experts_gate_up`] apply.
///
/// # Errors
/// The errors of [`mxfp4_experts_gate_up`].
pub fn mxfp4_experts_down(
    tile: ExpertTile,
    act: &Tensor,          // [T k, I] bf16
    w: &ScaledRows,        // [E, D, I]
    bias: Option<&Tensor>, // [E, D] bf16; a stride between experts
    routed: &RoutedTokens,
    out: &Tensor, // [T k, D] bf16
) -> Result<()> {
    product("mxfp4_down", if bias.is_some() { "_biased" } else { "" }, tile, act, (w, bias), routed, (out, 1))
}

fn product(
    op: &'static str,
    of_biases: &str,
    tile: ExpertTile,
    x: &Tensor,
    (w, bias): (&ScaledRows, Option<&Tensor>),
    routed: &RoutedTokens,
    (out, columns_of_one): (&Tensor, i64),
) -> Result<()> {
    let (gpu, experts, rows) = (ordinal(op, x)?, routed.own.len() as i64, routed.order.numel());
    let (k, features) = (x.size()[1], out.size()[1] * columns_of_one);
    let tiles = [ExpertTile::MXFP4_FEW, ExpertTile::MXFP4_MANY, ExpertTile::MXFP4_ANY];
    let x_rows = if columns_of_one == 2 { routed.experts.size()[0] } else { rows as i64 };
    let fits = tiles.contains(&tile)
        && x.size()[0] == x_rows
        && routed.tile_rows == tile.rows
        && features % 2 == 0
        && k % 8 == 0
        && bias.is_none_or(|bias| bias.stride()[1] == 1)
        && [x, out].into_iter().all(|rows| rows.is_contiguous() && is_aligned(rows));
    if !fits {
        let expected = "rows of a multiple of 8 elements, sorted into tiles of this size";
        return Err(invalid(op, expected, (x.size(), out.size(), tile, routed.tile_rows)));
    }
    let (bias_at, bias_expert) = match bias {
        Some(bias) => (strided(op, bias, Kind::BFloat16, &[experts, features], gpu)?, bias.stride()[0]),
        None => (Argument::NULL, 0),
    };
    let arguments = [
        strided(op, x, Kind::BFloat16, &[x_rows, k], gpu)?,
        address(op, &w.values, Kind::Uint8, mxfp4_bytes([experts, features, k]) as usize, gpu)?,
        strided(op, out, Kind::BFloat16, &[rows as i64, out.size()[1]], gpu)?,
        address(op, &routed.order, Kind::Int, rows, gpu)?,
        address(op, &routed.tiles, Kind::Int, routed.tiles.numel(), gpu)?,
        bias_at,
        Argument::Count(bias_expert),
        Argument::Count(k),
        Argument::Count(features),
        Argument::Count(routed.experts.size()[1]),
        Argument::Count(sure_experts(routed) as i64),
    ];
    let source = if tile == ExpertTile::MXFP4_ANY { SOURCE } else { HOPPER };
    let blocks = Context::retain(gpu)?.num_processors()? * tile.per_processor;
    let shape = (blocks as u32, tile.threads, tile.shared_bytes);
    // SAFETY: the kernel's parameters in order; tiles, which `route` has made, name rows of x and out and experts of w. Of what it reads, w and
    // nothing else is read before the work before has ended, which does not write it: the caller's promise.
    unsafe { launch_early(source, &format!("{op}{of_biases}_{}", tile.name), gpu, shape, &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_sources() {
        assert_declared(HOPPER, &[("GROUPS", GROUPS), ("UNIT", MXFP4_UNIT)]);
        for (name, [rows, steps, stages]) in [("few", FEW), ("many", MANY)] {
            let line = format!("PRODUCTS({name}, {rows}, {steps}, {stages})");
            assert!(HOPPER.text.contains(&line), "{line}");
        }
        assert_declared(SOURCE, &[("ROWS", ANY[0]), ("STAGES", ANY[1]), ("PER_PROCESSOR", ANY_PER_PROCESSOR)]);
    }

    #[test]
    fn stages_fit_into_shared_memory() {
        let chips_with_little = 48 << 10;
        let tiles = [ExpertTile::MXFP4_FEW, ExpertTile::MXFP4_MANY, ExpertTile::MXFP4_ANY];
        for (tile, most) in tiles.into_iter().zip([226 << 10, 226 << 10, chips_with_little]) {
            assert!(tile.shared_bytes <= most, "{tile:?}");
        }
    }
}
