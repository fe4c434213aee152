//! The sources of `src/kernels`, and the headers that they include.

use std::ffi::CStr;

/// A source file of `src/kernels`.
#[derive(Debug)]
pub(in crate::cuda) struct KernelSource {
    pub(in crate::cuda) file: &'static str,
    pub(in crate::cuda) text: &'static str,
}

macro_rules! sources {
    ($($name:ident = $file:literal),* $(,)?) => {
        $(pub(in crate::cuda) static $name: KernelSource = KernelSource { file: $file, text: include_str!(concat!("../../kernels/", $file)) };)*
        /// All kernel sources.
        pub(in crate::cuda) static SOURCES: &[&KernelSource] = &[$(&$name),*];
    };
}

sources! {
    ADAMW = "adamw.cu",
    ADAMW8BIT = "adamw8bit.cu",
    ADAPT = "adapt.cu",
    ADD_RMS_NORM = "add_rms_norm.cu",
    ALL_REDUCE = "all_reduce.cu",
    DELTA_DECODE = "delta_decode.cu",
    DELTA_DRAFTS = "delta_drafts.cu",
    DELTA_GRADIENTS = "delta_gradients.cu",
    DELTA_MIX = "delta_mix.cu",
    DELTA_RULE = "delta_rule.cu",
    DELTA_STEP = "delta_step.cu",
    DRAFT_ROWS = "draft_rows.cu",
    EMBED = "embed.cu",
    EXACT_PRODUCT = "exact_product.cu",
    EXPERTS = "experts.cu",
    EXPERTS_NARROW = "experts_narrow.cu",
    EXPERT_SUMS = "expert_sums.cu",
    FILTER = "filter.cu",
    FP8_COLUMNS = "fp8_columns.cu",
    FP8_ROWS = "fp8_rows.cu",
    GATE = "gate.cu",
    GATE_UP = "gate_up.cu",
    GROUPED_WEIGHT = "grouped_weight.cu",
    HEAD = "head.cu",
    HEADS = "heads.cu",
    MASK = "mask.cu",
    MERGE_ATTENTION = "merge_attention.cu",
    MXFP4 = "mxfp4.cu",
    MXFP4_EXPERTS = "mxfp4_experts.cu",
    NEXT_TOKENS = "next_tokens.cu",
    NF4 = "nf4.cu",
    NORM = "norm.cu",
    NORMAL = "normal.cu",
    PAGED_ATTENTION = "paged_attention.cu",
    PAGED_ATTENTION_ANY = "paged_attention_any.cu",
    PLAN_ATTENTION = "plan_attention.cu",
    PRODUCT = "product.cu",
    PRODUCT_FP8 = "product_fp8.cu",
    PRODUCT_INT8 = "product_int8.cu",
    QK_NORM = "qk_norm.cu",
    RINGED_ATTENTION = "ringed_attention.cu",
    RMS_NORM = "rms_norm.cu",
    ROPE_WRITE_KV = "rope_write_kv.cu",
    ROUTE = "route.cu",
    SAMPLE = "sample.cu",
    SEEN = "seen.cu",
    STREAMED_EXPERTS = "streamed_experts.cu",
    SUMS = "sums.cu",
    SWIGLU = "swiglu.cu",
    TILED_ATTENTION = "tiled_attention.cu",
    WIDE_PRODUCT = "wide_product.cu",
}

/// Headers that the sources include. CUDA's own headers, such as that for bf16, are not part of the compiler's package.
pub(in crate::cuda) const HEADERS: [(&CStr, &str); 28] = [
    (c"adamw.cuh", include_str!("../../kernels/adamw.cuh")),
    (c"async.cuh", include_str!("../../kernels/async.cuh")),
    (c"attention.cuh", include_str!("../../kernels/attention.cuh")),
    (c"attention_column.cuh", include_str!("../../kernels/attention_column.cuh")),
    (c"attention_fp8.cuh", include_str!("../../kernels/attention_fp8.cuh")),
    (c"attention_item.cuh", include_str!("../../kernels/attention_item.cuh")),
    (c"attention_merge.cuh", include_str!("../../kernels/attention_merge.cuh")),
    (c"attention_ring.cuh", include_str!("../../kernels/attention_ring.cuh")),
    (c"attention_warp.cuh", include_str!("../../kernels/attention_warp.cuh")),
    (c"clamped.cuh", include_str!("../../kernels/clamped.cuh")),
    (c"cluster.cuh", include_str!("../../kernels/cluster.cuh")),
    (c"delta.cuh", include_str!("../../kernels/delta.cuh")),
    (c"delta_products.cuh", include_str!("../../kernels/delta_products.cuh")),
    (c"delta_step.cuh", include_str!("../../kernels/delta_step.cuh")),
    (c"few_rows.cuh", include_str!("../../kernels/few_rows.cuh")),
    (c"fp8.cuh", include_str!("../../kernels/fp8.cuh")),
    (c"hopper.cuh", include_str!("../../kernels/hopper.cuh")),
    (c"int8.cuh", include_str!("../../kernels/int8.cuh")),
    (c"mma.cuh", include_str!("../../kernels/mma.cuh")),
    (c"mxfp4.cuh", include_str!("../../kernels/mxfp4.cuh")),
    (c"philox.cuh", include_str!("../../kernels/philox.cuh")),
    (c"product.cuh", include_str!("../../kernels/product.cuh")),
    (c"rounded_rows.cuh", include_str!("../../kernels/rounded_rows.cuh")),
    (c"route.cuh", include_str!("../../kernels/route.cuh")),
    (c"sample.cuh", include_str!("../../kernels/sample.cuh")),
    (c"scalar.cuh", include_str!("../../kernels/scalar.cuh")),
    (c"tile_output.cuh", include_str!("../../kernels/tile_output.cuh")),
    (c"tiles.cuh", include_str!("../../kernels/tiles.cuh")),
];

/// The text of a source, and of every header that it might include.
#[cfg(test)]
pub(in crate::cuda) fn texts(source: &KernelSource) -> impl Iterator<Item = &'static str> {
    HEADERS.into_iter().map(|(_, text)| text).chain([source.text])
}
