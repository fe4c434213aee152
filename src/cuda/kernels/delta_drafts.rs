//! A gated delta net in a decode step in which sequences have drafts.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::delta_step::{
    DeltaHeads, DeltaLayer, DeltaOptions, DeltaPages, DeltaRows, DeltaWeights, LayerArguments, state_bytes, threads,
};
use super::launch::{address, invalid, launch_early};

use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::DELTA_DRAFTS;
pub(super) const NAMES: &[&str] = &[
    "delta_drafts_f32_f32_any",
    "delta_drafts_f32_bf16_any",
    "delta_drafts_bf16_f32_any",
    "delta_drafts_bf16_bf16_any",
    "delta_drafts_bf16_f32_128",
    "delta_drafts_bf16_bf16_128",
];

/// Whose rows a step has, one sequence behind the other: of each its newest token, then drafts.
#[derive(Debug, Clone, Copy)]
pub struct DeltaDrafts<'a> {
    /// Pages of the sequences, -1: none, whose outputs are 0.
    pub pages: &'a Tensor, // [B] i32
    /// Where each one's rows begin, and the last one's end.
    pub bounds: &'a Tensor, // [B + 1] i32
    /// Drafts of the step before that the state takes in first.
    pub stored: &'a Tensor, // [B] i32
    /// Positions of the first rows.
    pub starts: &'a Tensor, // [B] i32
    /// `a` and `b` of the row of position p in slot p % slots.
    pub gates: &'a Tensor, // [pages, slots, 2, H], of the projections' kind
}

/// Slots of a page that hold the rows of a sequence with up to `num_drafts` drafts in a step: those that the convolution reads before the first
/// stored one, as many stored ones, and the step's own.
pub fn delta_slots(heads: DeltaHeads, num_drafts: usize) -> usize {
    heads.conv_width + 2 * num_drafts
}

/// Computes rows as [`delta_step`](super::delta_step()) does, with the bits of steps of one token. A state takes in the stored drafts and the
/// first row, and is read once and written once; of the other rows what the next step needs is stored. A page has [`delta_slots`] of the most
/// drafts. Allocates nothing. Pages, bounds, positions and states are read while the kernel before may still run, which must not write them.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit or unsupported heads; [`crate::Error::Cuda`].
pub fn delta_drafts(
    tokens: &DeltaRows,
    weights: &DeltaWeights,
    options: DeltaOptions,
    pages: DeltaPages,
    drafts: DeltaDrafts,
    out: &mut Tensor, // [T, H dv]
) -> Result<()> {
    const OP: &str = "delta_drafts";
    let (heads, num_runs) = (options.heads, drafts.pages.numel());
    let num_tokens = tokens.qkv.size().first().copied().unwrap_or(0) as usize;
    let layer = DeltaLayer { tokens, weights, options, pages, num_tokens };
    let LayerArguments { gpu, mut arguments, kinds, .. } =
        layer.arguments(OP, drafts.pages, (drafts.starts, num_runs), out)?;
    let slots = pages.rows.size()[..2].iter().product::<i64>() as usize;
    arguments.extend([
        address(OP, drafts.bounds, Kind::Int, num_runs + 1, gpu)?,
        address(OP, drafts.stored, Kind::Int, num_runs, gpu)?,
        address(OP, drafts.gates, tokens.qkv.kind(), 2 * slots * heads.num_value_heads, gpu)?,
    ]);
    let Ok(parts) = u32::try_from(num_runs * heads.num_value_heads) else {
        return Err(invalid(OP, "fewer sequences", num_runs));
    };
    let shape = (parts, threads(heads), state_bytes(heads, pages.states.kind()));
    // SAFETY: the kernel's parameters in order; pages, bounds, counts and positions are the caller's. The kernel before writes none of them and
    // no states, which are read while it may still run.
    unsafe { launch_early(SOURCE, &format!("delta_drafts_{kinds}"), gpu, shape, &arguments) }
}
