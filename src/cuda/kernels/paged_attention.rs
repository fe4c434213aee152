//! Decode attention over the paged KV cache.
#![allow(unsafe_code)]

mod buffers;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};

use tch::{Device, Kind, Tensor};

use self::buffers::{TensorCoreBuffers, partials};
use super::boxes::rows_boxes;
use super::kv_blocks::KvBlocks;
use super::launch::{
    Argument, address, address_or_null, code_name, invalid, is_aligned, kind_name, launch_early, ordinal,
};
use super::tiled_attention::RowTile;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::PAGED_ATTENTION;
pub(super) const NAMES: &[&str] = &[
    "paged_attention_bf16_64",
    "paged_attention_bf16_128",
    "paged_attention_bf16_256",
    "paged_attention_bf16_64_fixed",
    "paged_attention_bf16_128_fixed",
    "paged_attention_bf16_64_fixed_shared",
    "paged_attention_bf16_128_fixed_shared",
    "paged_attention_bf16_64_fp8",
    "paged_attention_bf16_128_fp8",
    "paged_attention_bf16_64_sinks",
    "paged_attention_bf16_128_sinks",
    "paged_attention_bf16_64_fp8_sinks",
    "paged_attention_bf16_128_fp8_sinks",
    "paged_attention_bf16_64_int8",
    "paged_attention_bf16_128_int8",
    "paged_attention_bf16_64_int8_sinks",
    "paged_attention_bf16_128_int8_sinks",
];
pub(super) const RINGED: &KernelSource = &nvrtc::RINGED_ATTENTION;
pub(super) const RINGED_NAMES: &[&str] = &[
    "ringed_attention_bf16_64",
    "ringed_attention_bf16_128",
    "ringed_attention_bf16_64_sinks",
    "ringed_attention_bf16_128_sinks",
];
pub(super) const PLAN: &KernelSource = &nvrtc::PLAN_ATTENTION;
pub(super) const PLAN_NAMES: &[&str] = &["plan_attention"];
pub(super) const ANY: &KernelSource = &nvrtc::PAGED_ATTENTION_ANY;
pub(super) const ANY_NAMES: &[&str] =
    &["paged_attention_any_f32", "paged_attention_any_bf16", "paged_attention_any_fp8", "paged_attention_any_int8"];

/// Threads per block, and the largest head width of the fallback kernel.
const THREADS: usize = 128;
const MOST_COLUMNS: usize = 4 * THREADS;
/// Bytes of shared memory of a block of `ringed_attention`, and the tokens that it copies at once.
const RINGED_BYTES: usize = 81_920;
const UNIT_TOKENS: usize = 16;
/// Threads of the `plan_attention` kernel.
const PLANNERS: u32 = 256;
/// Head widths of the tensor-core kernel. For the last one, shared prefixes are not read jointly, and 8-bit caches and sinks are not supported.
const FAST_DIMS: [usize; 3] = [64, 128, 256];
const WIDE_DIM: usize = 256;
/// Query heads that one work item processes.
const ITEM_HEADS: usize = 8;

/// The shape of one layer's attention on one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads, H.
    pub num_heads: usize,
    /// Number of key/value heads, Hkv; it divides H.
    pub num_kv_heads: usize,
    /// Head width, hd.
    pub head_dim: usize,
    /// Tokens per cache block, a multiple of 16.
    pub block_size: usize,
    /// The largest number of tokens that a token attends to, including itself.
    pub sliding_window: Option<usize>,
    /// Multiplier of attention scores.
    pub scale: f64,
}

/// Rows whose contexts start with the same cache blocks, which are then read once for all of them.
#[derive(Debug, Clone, Copy)]
pub struct SharedPrefixes<'a> {
    /// Rows with the same group number 0 .. S share a prefix; -1 shares none. `[S]` i32
    pub groups: &'a Tensor,
    /// Number of leading block-table entries that are equal in all rows of the group; these blocks must be full. `[S]` i32
    pub num_shared_blocks: &'a Tensor,
}

/// Divides the attention of a step into work items. [`AttentionPlan::update`] creates the plan on the GPU once per step, for all layers.
#[derive(Debug)]
pub struct AttentionPlan {
    shape: AttentionShape,
    /// Number of keys at the beginning of every context that no query sees.
    num_hidden: usize,
    kind: Kind,
    max_rows: usize,
    split_tokens: usize,
    buffers: Option<TensorCoreBuffers>,
    joins: bool,
    is_ringed: bool,
    has_prefixes: AtomicBool, // of the last update; with a fixed split they need a larger kernel
}

/// How an attention kernel's work is divided among thread blocks.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBlocks {
    /// Thread blocks for the item or tile of one row.
    pub columns: usize,
    /// Thread blocks that the GPU runs at once.
    pub num_blocks: usize,
}

impl AttentionPlan {
    /// Allocates a plan for up to `max_rows` rows with block tables of `max_blocks`. `split_tokens` fixes the number of tokens that are summed in one
    /// piece, so that a row's bits do not depend on other rows; by default it is chosen on the GPU to keep all multiprocessors busy. If the split is
    /// [`RowTile::SPLIT_TOKENS`], whole splits of shared prefixes are read once. With sinks or a cache with scales that would change the bits, so
    /// prefixes must not be given there.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a shape that no kernel supports; [`crate::Error::OutOfMemory`].
    pub fn new(
        shape: AttentionShape,
        (kind, device): (Kind, Device),
        max_rows: usize,
        max_blocks: usize,
        split_tokens: Option<usize>,
    ) -> Result<Self> {
        let fits = shape.num_kv_heads > 0
            && shape.num_heads.is_multiple_of(shape.num_kv_heads)
            && (1..=MOST_COLUMNS).contains(&shape.head_dim)
            && shape.block_size > 0
            && shape.block_size.is_multiple_of(16)
            && split_tokens.is_none_or(|split| split > 0 && split.is_multiple_of(64));
        if !fits {
            let expected = format!(
                "heads in whole groups with at most {MOST_COLUMNS} columns, a block size that is a multiple of 16 \
                 tokens, and a split size that is a multiple of 64"
            );
            return Err(invalid("attention_plan", expected, (shape, split_tokens)));
        }
        let is_fast =
            kind == Kind::BFloat16 && FAST_DIMS.contains(&shape.head_dim) && shape.block_size.is_power_of_two();
        let context = max_blocks * shape.block_size;
        let buffers =
            is_fast.then(|| TensorCoreBuffers::new(&shape, device, max_rows, split_tokens, context)).transpose()?;
        let (split_tokens, has_prefixes) = (split_tokens.unwrap_or(0), AtomicBool::new(false));
        let (num_hidden, joins, is_ringed) = (0, false, false);
        Ok(Self { shape, num_hidden, kind, max_rows, split_tokens, buffers, joins, is_ringed, has_prefixes })
    }

    /// Hides `num_hidden` keys at the beginning of every context. Every context has more keys, and there is no window.
    pub fn hiding(self, num_hidden: usize) -> Self {
        Self { num_hidden, ..self }
    }

    /// Lets a thread block process several pieces of a split of [`RowTile::SPLIT_TOKENS`] one after the other, with the same bits. Such a plan is not for
    /// sinks or a cache with scales.
    pub fn joining(self) -> Self {
        Self { joins: self.has_fixed_kernels(), ..self }
    }

    /// Reads bfloat16 caches through rings in shared memory where a kernel for that exists, with the same bits. This is faster between GEMMs that use
    /// nearly all of a multiprocessor's cache as shared memory, as those of experts do, and slower elsewhere (docs/benchmarks/fp8.md).
    pub fn through_rings(self) -> Self {
        Self { is_ringed: self.buffers.as_ref().is_some_and(|buffers| buffers.can_ring), ..self }
    }

    fn has_fixed_kernels(&self) -> bool {
        self.split_tokens == RowTile::SPLIT_TOKENS && self.shape.head_dim < WIDE_DIM
    }

    /// Number of tokens that a query sees; 0: all; negative: minus the number of hidden keys at the beginning.
    fn window(&self) -> Argument {
        Argument::Count(self.shape.sliding_window.map_or(-(self.num_hidden as i64), |window| window as i64))
    }

    /// Bytes of a plan's partial results, which are nearly all of its memory.
    pub fn partial_bytes(
        shape: &AttentionShape,
        max_rows: usize,
        max_blocks: usize,
        split_tokens: Option<usize>,
    ) -> usize {
        let partials = partials(shape, max_rows, split_tokens, max_blocks.saturating_mul(shape.block_size));
        partials.into_iter().fold(size_of::<f32>(), usize::saturating_mul)
    }

    /// Maximum number of rows in a step.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// How the work is divided among thread blocks; `None` if the fallback kernel is used.
    pub fn blocks(&self) -> Option<AttentionBlocks> {
        self.buffers
            .as_ref()
            .map(|&TensorCoreBuffers { columns, num_blocks, .. }| AttentionBlocks { columns, num_blocks })
    }

    /// Bytes of GPU memory.
    pub fn bytes(&self) -> usize {
        let tensors = self.buffers.iter().flat_map(TensorCoreBuffers::tensors);
        tensors.map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
    }

    /// The number of shared prefix tokens, counted once per row that reads them, from which a step of `rows` rows is faster if the plan knows of
    /// them.
    pub fn least_shared_tokens(&self, rows: usize) -> usize {
        let Some(buffers) = self.buffers.as_ref().filter(|_| self.shape.head_dim < WIDE_DIM) else { return usize::MAX };
        least_shared_tokens(rows, self.split_tokens > 0, buffers.columns, buffers.num_blocks)
    }

    /// Plans the attention of a step, for all layers. Allocates nothing.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
    pub fn update(
        &self,
        context_lens: &Tensor, // [S] i32, the new token included; 0: no sequence
        prefixes: Option<SharedPrefixes>,
    ) -> Result<()> {
        const OP: &str = "plan_attention";
        let rows = context_lens.numel();
        if rows > self.max_rows || prefixes.is_some() && !matches!(self.split_tokens, 0 | RowTile::SPLIT_TOKENS) {
            let expected = format!(
                "at most {} rows, and with a fixed split no shared prefixes except at {}",
                self.max_rows,
                RowTile::SPLIT_TOKENS
            );
            return Err(invalid(OP, expected, rows));
        }
        let Some(buffers) = &self.buffers else { return Ok(()) };
        let prefixes = prefixes.filter(|_| self.shape.head_dim < WIDE_DIM);
        self.has_prefixes.store(prefixes.is_some(), Ordering::Relaxed);
        let gpu = ordinal(OP, context_lens)?;
        let [header, items, pieces, scratch, _, _] = buffers.addresses(gpu)?;
        let arguments = [
            address(OP, context_lens, Kind::Int, rows, gpu)?,
            address_or_null(OP, prefixes.map(|prefixes| prefixes.groups), Kind::Int, rows, gpu)?,
            address_or_null(OP, prefixes.map(|prefixes| prefixes.num_shared_blocks), Kind::Int, rows, gpu)?,
            header,
            items,
            pieces,
            scratch,
            Argument::Count(rows as i64),
            Argument::Count(self.shape.block_size as i64),
            self.window(),
            Argument::Count(buffers.columns as i64),
            Argument::Count(buffers.num_blocks as i64),
            Argument::Count(self.split_tokens as i64),
            Argument::Count(self.joins.into()),
            Argument::Count(buffers.capacity as i64),
        ];
        // SAFETY: the kernel's parameters in order; it keeps to the capacity, which holds all pieces of a fixed split.
        unsafe { launch_early(PLAN, OP, gpu, (1, PLANNERS, 0), &arguments) }
    }
}

/// Reading shared keys once for eight rows leaves fewer blocks busy and needs a merge, while the L2 cache serves repeated reads anyway. With a fixed
/// split the kernel that does it is also four times as large, which takes time to load in every layer.
fn least_shared_tokens(rows: usize, is_fixed: bool, columns: usize, num_blocks: usize) -> usize {
    let least_items = if is_fixed { 3 * num_blocks } else { 3 * num_blocks / 4 };
    if rows * columns >= least_items { 640 * num_blocks / columns } else { usize::MAX }
}

/// Computes o = softmax(scale q k^T) v for one new token per row over its context, whose last entry is the token itself; zeros for rows without a
/// sequence. Each query head may have a sink: a logit that takes part in the softmax with the value 0. The plan must have been updated with these
/// context lengths. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn paged_attention(
    plan: &AttentionPlan,
    q: &Tensor, // [S, H, hd] f32 or bf16
    cache: KvBlocks<'_>,
    block_tables: &Tensor,  // [S, max_blocks] i32
    context_lens: &Tensor,  // [S] i32
    sinks: Option<&Tensor>, // [H], like q
    o: &mut Tensor,         // like q
) -> Result<()> {
    const OP: &str = "paged_attention";
    let KvBlocks { keys: k_cache, values: v_cache, scales } = cache;
    if scales.is_some() && plan.kind != Kind::BFloat16 {
        return Err(invalid(OP, "queries in bfloat16 with an 8-bit cache", plan.kind));
    }
    if plan.joins && (scales.is_some() || sinks.is_some()) {
        return Err(invalid(OP, "a plan that joins no pieces, for sinks or an 8-bit cache", plan.shape));
    }
    let AttentionShape { num_heads, num_kv_heads, head_dim, block_size, scale, .. } = plan.shape;
    let (gpu, kind, rows) = (ordinal(OP, q)?, plan.kind, context_lens.numel());
    let block_len = num_kv_heads * block_size * head_dim;
    let cache_len = k_cache.numel() / block_len * block_len;
    let max_blocks = block_tables.numel() / rows.max(1);
    let cache_kind = if scales.is_some() { k_cache.kind() } else { kind };
    let code = scales.map(|_| code_name(OP, k_cache)).transpose()?;
    let scale_at = |scales: &Tensor| address(OP, scales, Kind::Float, cache_len / head_dim, gpu);
    let scales_at = scales.into_iter().flatten().map(scale_at).collect::<Result<Vec<_>>>()?;
    let [q_at, k_at, v_at, o_at] = [
        address(OP, q, kind, rows * num_heads * head_dim, gpu)?,
        address(OP, k_cache, cache_kind, cache_len, gpu)?,
        address(OP, v_cache, cache_kind, cache_len, gpu)?,
        address(OP, o, kind, rows * num_heads * head_dim, gpu)?,
    ];
    let (tables, lens) = (
        address(OP, block_tables, Kind::Int, rows * max_blocks, gpu)?,
        address(OP, context_lens, Kind::Int, rows, gpu)?,
    );
    let count = |number: usize| Argument::Count(number as i64);
    let scale = Argument::Float(scale as f32);
    let sinks_at = address_or_null(OP, sinks, kind, num_heads, gpu)?;
    let is_fast = head_dim < WIDE_DIM || (scales.is_none() && sinks.is_none());
    let Some(buffers) = plan.buffers.as_ref().filter(|_| is_fast) else {
        let sizes = [num_heads, num_kv_heads, head_dim, block_size, max_blocks].map(count);
        let at = [q_at, k_at, v_at, tables, lens, o_at];
        let arguments = [&at[..], &sizes, &[plan.window(), scale], &scales_at, &[sinks_at]].concat();
        let name = format!("paged_attention_any_{}", code.map_or_else(|| kind_name(OP, q), Ok)?);
        let grid = ((rows * num_heads) as u32, THREADS as u32, 4 * head_dim as u32);
        // SAFETY: the kernel's parameters in order; one block a query head of a row; blocks of contexts are the caller's.
        return unsafe { launch_early(ANY, &name, gpu, grid, &arguments) };
    };
    if ![q, k_cache, v_cache, o].into_iter().chain(scales.into_iter().flatten()).all(is_aligned) {
        return Err(invalid(OP, "tensors at addresses that are multiples of 16 bytes", "others"));
    }
    let [header, items, pieces, _, arrived, partials] = buffers.addresses(gpu)?;
    let block_shift = block_size.trailing_zeros() as usize;
    let sizes = [num_kv_heads, num_heads / num_kv_heads, block_shift, max_blocks].map(count);
    let step = [q_at, k_at, v_at, tables, o_at, header, items, pieces, arrived, partials];
    let mut arguments = [&step[..], &scales_at, &sizes, &[scale]].concat();
    arguments.extend(sinks.map(|_| sinks_at));
    let blocks = buffers.num_blocks as u32;
    if plan.is_ringed && code.is_none() {
        let boxes = |cache: &Tensor| rows_boxes(&cache.view([-1, head_dim as i64]), UNIT_TOKENS);
        let arguments = [&[boxes(k_cache)?, boxes(v_cache)?][..], &arguments].concat();
        let name = format!("ringed_attention_bf16_{head_dim}{}", if sinks.is_some() { "_sinks" } else { "" });
        let grid = (blocks, THREADS as u32, RINGED_BYTES as u32);
        // SAFETY: as below; the boxes are rows of the caches.
        return unsafe { launch_early(RINGED, &name, gpu, grid, &arguments) };
    }
    let cache = code.map_or_else(String::new, |code| format!("_{code}"));
    let suffix = match sinks {
        Some(_) => "_sinks",
        None if code.is_some() || !plan.has_fixed_kernels() => "",
        None if plan.has_prefixes.load(Ordering::Relaxed) => "_fixed_shared",
        None => "_fixed",
    };
    let (name, grid) = (format!("paged_attention_bf16_{head_dim}{cache}{suffix}"), (blocks, THREADS as u32, 0));
    // SAFETY: the kernel's parameters in order; items of the plan are of these rows; blocks of contexts are the caller's.
    unsafe { launch_early(SOURCE, &name, gpu, grid, &arguments) }
}
