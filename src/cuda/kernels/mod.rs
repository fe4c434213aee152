//! One safe function for each kernel of `src/kernels`, over tensors on a GPU. It checks devices, types and lengths, and queues the kernel on
//! libtorch's current stream, in order with libtorch's own operations.

mod adamw;
mod adamw8bit;
mod adapt;
mod add_rms_norm;
mod all_reduce;
mod boxes;
mod delta_drafts;
mod delta_mix;
mod delta_rule;
mod delta_step;
mod draft_rows;
mod embed;
mod exact_product;
mod expert_biases;
mod expert_sums;
mod expert_tile;
mod experts;
mod experts_low;
mod filter;
mod fp8;
mod fp8_columns;
mod gate;
mod gate_up;
mod grouped_weight;
mod head;
mod heads;
mod int8;
mod kv_blocks;
mod launch;
mod mask;
mod merge_attention;
mod mxfp4;
mod next_tokens;
mod nf4;
mod norm;
mod normal;
mod paged_attention;
mod product;
mod qk_norm;
mod rms_norm;
mod rope_write_kv;
mod rotation;
mod route;
mod sample;
mod seen;
mod served;
mod streamed_experts;
mod sums;
mod swiglu;
mod tiled_attention;
mod wide_product;

pub use adamw::{AdamWScalars, adamw};
pub use adamw8bit::{MomentCodes, adamw8bit};
pub use adapt::{adapt, adapt_pays, adapt_serves, adapt_silu_mul};
pub use add_rms_norm::{NormOptions, add_rms_norm};
pub use all_reduce::{AllReduceMethod, NormedRows, RowSums};
pub use delta_drafts::{DeltaDrafts, delta_drafts, delta_slots};
pub use delta_mix::{
    DeltaLayout, DeltaSizes, delta_fits, delta_mix, delta_mix_backward, delta_norm, delta_norm_backward, delta_serves,
};
pub use delta_rule::{
    DeltaGradients, DeltaKept, DeltaPrepared, DeltaSaved, DeltaScan, delta_backward, delta_prepare, delta_scan,
};
pub use delta_step::{
    DeltaHeads, DeltaOptions, DeltaPages, DeltaRows, DeltaRuns, DeltaWeights, delta_step, delta_step_serves,
    served_delta_sizes,
};
pub use draft_rows::{DraftInputs, draft_input, keep_drafts, keep_rows};
pub use embed::embed;
pub use exact_product::{exact_product, exact_reference, exact_sum};
pub use expert_biases::{experts_down_biased, experts_gate_up_clamped};
pub use expert_sums::{SharedExpertRows, experts_combine, experts_gather};
pub use expert_tile::ExpertTile;
pub use experts::{ExpertAdapter, experts_down, experts_down_fp8, experts_gate_up, experts_gate_up_fp8};
pub use experts_low::{LowRows, experts_low};
pub use filter::{FILTER_HEAD_WORDS, Filters, filter, filter_parts, most_filter_parts};
pub use fp8::{
    ScaledRows, add_rms_norm_8bit, fp8_norm_serves, fp8_serves, fp8_swiglu_serves, fp8_trains, quantize_rows,
    quantize_rows_of_step, rms_norm_8bit, silu_mul_8bit, swiglu_backward_fp8,
};
pub use fp8_columns::fp8_columns;
pub use gate::gate;
pub(super) use gate_up::gate_up_key;
pub use gate_up::{gate_up, gate_up_8bit, gate_up_serves};
pub use grouped_weight::{grouped_weight, grouped_weight_serves};
pub use head::{HeadRows, head_backward, head_forward};
pub use heads::{HeadNormWeights, HeadsGradient, heads_backward, heads_forward};
pub use int8::{int8_product, int8_silu_mul};
pub use kv_blocks::KvBlocks;
pub use launch::serve;
pub use mask::{mask_logits, mask_low};
pub use merge_attention::merge_attention;
pub use mxfp4::{MXFP4_UNIT, MXFP4_UNIT_BYTES, mxfp4_bytes, mxfp4_experts_down, mxfp4_experts_gate_up, mxfp4_quantize};
pub use next_tokens::next_tokens;
pub use nf4::{Nf4Codes, nf4_dequantize};
pub use norm::sums_of_squares;
pub use normal::{dropout, fill_normal};
pub use paged_attention::{AttentionBlocks, AttentionPlan, AttentionShape, SharedPrefixes, paged_attention};
pub(super) use product::product_key;
pub use product::{
    MOST_ROWS as FEW_ROWS, product, product_8bit, product_serves, product_silu_mul, product_silu_mul_8bit,
    product_takes,
};
pub use qk_norm::{qk_scale, qk_squares};
pub use rms_norm::{rms_norm_backward, rms_norm_forward};
pub use rope_write_kv::{HeadTransform, QkvViews, hadamard_block, rope_write_kv, rope_write_kv_scaled};
pub use rotation::int8_row_block;
pub use route::{
    MOST_EXPERT_GROUPS, MOST_EXPERTS, MOST_EXPERTS_PER_TOKEN, RouteOptions, RouteScores, RouteSizes, RoutedTokens,
    route,
};
pub use sample::{CANDIDATE_WORDS, Draws, combine, sample, sample_parts};
pub use seen::{mark_seen, note_tokens};
pub use served::{DecoderSizes, Unserved, unserved};
pub use streamed_experts::{
    streamed_down_serves, streamed_experts_down, streamed_experts_gate_up, streamed_gate_up_serves,
};
pub use sums::{add_columns, add_rows};
pub use swiglu::{
    Activation, SWISH_LIMIT, SWISH_SLOPE, silu_mul, swiglu_backward, swiglu_forward, swiglu_weighted_backward,
};
pub use tiled_attention::{RowTile, tiled_attention, tiled_attention_cached, tiled_attention_serves};
pub(super) use wide_product::wide_product_key;
pub use wide_product::{
    wide_product_8bit, wide_product_serves, wide_product_silu_mul_8bit, wide_product_silu_mul_serves,
};

use super::context::Context;
use super::kernel::Kernel;
use super::nvrtc::{KernelSource, compile_all};
use crate::error::Result;
use crate::types::Place;

/// Every .cu file with the names of its kernels. Wrappers that compose a kernel's name must only produce names in this list.
pub(super) const KERNELS: [(&KernelSource, &[&str]); 51] = [
    (adamw::SOURCE, adamw::NAMES),
    (adamw8bit::SOURCE, adamw8bit::NAMES),
    (adapt::SOURCE, adapt::NAMES),
    (add_rms_norm::SOURCE, add_rms_norm::NAMES),
    (all_reduce::SOURCE, all_reduce::NAMES),
    (delta_drafts::SOURCE, delta_drafts::NAMES),
    (delta_mix::SOURCE, delta_mix::NAMES),
    (delta_rule::SOURCE, delta_rule::NAMES),
    (delta_rule::GRADIENTS, delta_rule::GRADIENTS_NAMES),
    (delta_step::SOURCE, delta_step::NAMES),
    (delta_step::DECODE, delta_step::DECODE_NAMES),
    (draft_rows::SOURCE, draft_rows::NAMES),
    (embed::SOURCE, embed::NAMES),
    (exact_product::SOURCE, exact_product::NAMES),
    (expert_sums::SOURCE, expert_sums::NAMES),
    (experts::SOURCE, expert_tile::NAMES),
    (experts_low::SOURCE, experts_low::NAMES),
    (filter::SOURCE, filter::NAMES),
    (fp8::SOURCE, fp8::NAMES),
    (fp8_columns::SOURCE, fp8_columns::NAMES),
    (gate::SOURCE, gate::NAMES),
    (gate_up::SOURCE, gate_up::NAMES),
    (grouped_weight::SOURCE, grouped_weight::NAMES),
    (head::SOURCE, head::NAMES),
    (heads::SOURCE, heads::NAMES),
    (mask::SOURCE, mask::NAMES),
    (merge_attention::SOURCE, merge_attention::NAMES),
    (mxfp4::SOURCE, mxfp4::NAMES),
    (mxfp4::HOPPER, mxfp4::HOPPER_NAMES),
    (nf4::SOURCE, nf4::NAMES),
    (norm::SOURCE, norm::NAMES),
    (normal::SOURCE, normal::NAMES),
    (next_tokens::SOURCE, next_tokens::NAMES),
    (paged_attention::SOURCE, paged_attention::NAMES),
    (paged_attention::ANY, paged_attention::ANY_NAMES),
    (paged_attention::RINGED, paged_attention::RINGED_NAMES),
    (paged_attention::PLAN, paged_attention::PLAN_NAMES),
    (product::SOURCE, product::NAMES),
    (product::FP8, product::FP8_NAMES),
    (product::INT8, product::INT8_NAMES),
    (qk_norm::SOURCE, qk_norm::NAMES),
    (rms_norm::SOURCE, rms_norm::NAMES),
    (rope_write_kv::SOURCE, rope_write_kv::NAMES),
    (route::SOURCE, route::NAMES),
    (sample::SOURCE, sample::NAMES),
    (seen::SOURCE, seen::NAMES),
    (streamed_experts::SOURCE, streamed_experts::NAMES),
    (sums::SOURCE, sums::NAMES),
    (swiglu::SOURCE, swiglu::NAMES),
    (tiled_attention::SOURCE, tiled_attention::NAMES),
    (wide_product::SOURCE, wide_product::NAMES),
];

/// Compiles and loads all kernels for GPU `ordinal`, so that no step waits for a compilation or finds a kernel missing. `num_ranks` ranks of this
/// machine do this at once, each for its own GPU.
///
/// # Errors
/// [`Error::Environment`](crate::Error::Environment) without NVRTC; [`Error::Cuda`](crate::Error::Cuda).
pub fn prepare(ordinal: usize, num_ranks: usize) -> Result<()> {
    let capability = Context::retain(ordinal)?.compute_capability()?;
    compile_all(KERNELS.iter().map(|(source, _)| *source), capability, Place { rank: ordinal, size: num_ranks })?;
    for (source, names) in KERNELS {
        for name in names {
            Kernel::get(source, name, ordinal)?;
        }
    }
    Ok(())
}
