//! The kernel of a gated delta net for decode steps with draft tokens.
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

/// Describes the rows of a decode step with draft tokens. Rows are sorted by sequence; each sequence has its newest token, then its draft tokens.
#[derive(Debug, Clone, Copy)]
pub struct DeltaDrafts<'a> {
    /// The state page of each sequence; -1 for padding, whose outputs are 0.
    pub pages: &'a Tensor, // [B] i32
    /// Index of each sequence's first row, followed by the number of rows.
    pub bounds: &'a Tensor, // [B + 1] i32
    /// For each sequence, the number of accepted draft tokens of the previous step, which the state has to process first.
    pub stored: &'a Tensor, // [B] i32
    /// Position of each sequence's first row in the sequence.
    pub starts: &'a Tensor, // [B] i32
    /// The inputs `a` and `b` of the gates. Those of position p are in slot p % slots.
    pub gates: &'a Tensor, // [pages, slots, 2, H], in the dtype of the projections
}

/// Number of slots that a page needs for a sequence with up to `num_drafts` draft tokens per step. They hold the rows that the convolution reads
/// before the first accepted draft token, the accepted draft tokens of the previous step, and the rows of this step.
pub fn delta_slots(heads: DeltaHeads, num_drafts: usize) -> usize {
    heads.conv_width + 2 * num_drafts
}

/// Computes what [`delta_step`](super::delta_step()) computes, for a step with draft tokens, with the same bits as steps of one token. Each state is
/// read once and written once. The written state has processed the accepted draft tokens of the previous step and the first row of this one. Draft
/// tokens may be rejected, so only their inputs are stored, for the next step. A page needs [`delta_slots`] slots for the maximum number of draft
/// tokens. Allocates nothing. The kernel reads pages, bounds, positions and states while the preceding kernel may still run. That kernel must not
/// write them.
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
    // SAFETY: the arguments are in the order of the kernel's parameters; the caller ensures that pages, bounds, counts and positions are valid, and
    // that the preceding kernel, which may still run, writes none of them and no states.
    unsafe { launch_early(SOURCE, &format!("delta_drafts_{kinds}"), gpu, shape, &arguments) }
}
