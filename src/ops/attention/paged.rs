//! Attention over keys and values in blocks of a cache, as the engine keeps them.
//!
//! Caches are [num_blocks, Hkv, block_size, hd] (a block of one head is contiguous) and hold finite numbers everywhere (fresh ones
//! are zero): entries beyond a context are read and masked.

use crate::torch::accumulation_kind;
use tch::{Kind, Tensor};

/// Where the contexts of a decode batch lie; made once per engine step, shared by all layers.
#[derive(Debug)]
pub struct PagedLayout {
    /// Row of [num_blocks * Hkv * block_size, hd] behind each of [B, Hkv, L], L = max_blocks * block_size.
    rows: Tensor,
    /// 0 where the new token sees the entry, else -inf. [B * Hkv, 1, L], Float
    mask: Tensor,
    num_kv_heads: i64,
}

impl PagedLayout {
    /// Every entry of `block_tables` names a block of the cache, those beyond the context included. A row whose context is
    /// 0 is padding: it attends to the first entry of its first block, so that it stays finite.
    pub fn new(
        block_tables: &Tensor, // [B, max_blocks] i64
        context_lens: &Tensor, // [B] i64, the new token included
        block_size: usize,
        num_kv_heads: usize,
        sliding_window: Option<usize>,
    ) -> Self {
        let (device, heads) = (block_tables.device(), num_kv_heads as i64);
        let range = |n: i64| Tensor::arange(n, (Kind::Int64, device));
        let size = block_size as i64;
        let blocks = (block_tables * heads).unsqueeze(1) + range(heads).unsqueeze(-1); // [B, Hkv, max_blocks]
        let rows = ((blocks * size).unsqueeze(-1) + range(size)).flatten(0, -1); // [B * Hkv * L]
        let lens = context_lens.clamp_min(1).view([-1, 1, 1]); // [B, 1, 1]
        let entries = range(block_tables.size()[1] * size); // [L]
        let mut hidden = entries.ge_tensor(&lens); // [B, 1, L]
        if let Some(window) = sliding_window {
            hidden = hidden.logical_or(&entries.lt_tensor(&(lens - window as i64)));
        }
        let mask = Tensor::zeros(hidden.size(), (Kind::Float, device)).masked_fill_(&hidden, f64::NEG_INFINITY);
        Self { rows, mask: mask.repeat_interleave_self_int(heads, 0, None), num_kv_heads: heads }
    }

    /// The contexts' entries of a cache, [B * Hkv, L, hd], in `kind`.
    fn gather(&self, cache: &Tensor, kind: Kind) -> Tensor {
        let (size, hd) = (self.mask.size(), cache.size()[3]);
        cache.view([-1, hd]).index_select(0, &self.rows).view([size[0], size[2], hd]).to_kind(kind)
    }
}

/// Attention of one new token per sequence over its context, whose last entry is the token itself.
pub fn paged_decode(
    q: &Tensor,       // [B, H, hd]
    k_cache: &Tensor, // [num_blocks, Hkv, block_size, hd]
    v_cache: &Tensor, // like k_cache
    layout: &PagedLayout,
    scale: f64,
) -> Tensor {
    let (kind, size) = (accumulation_kind(q.kind()), q.size());
    let grouped = q.reshape([size[0] * layout.num_kv_heads, -1, size[2]]).to_kind(kind); // [B * Hkv, G, hd]
    let keys = layout.gather(k_cache, kind).transpose(1, 2);
    let scores = layout.mask.to_kind(kind).baddbmm(&grouped, &keys, 1.0, scale); // [B * Hkv, G, L]
    let o = scores.softmax(-1, None::<Kind>).bmm(&layout.gather(v_cache, kind));
    o.view(size.as_slice()).to_kind(q.kind()) // [B, H, hd]
}

/// Attention of each sequence's new tokens over its context in the cache, the new tokens (already written) included:
/// chunked prefill and prefill behind a cached prefix. Sequences without new tokens are passed over.
#[allow(clippy::too_many_arguments)]
pub fn paged_prefill(
    q: &Tensor,            // [T, H, hd], the new tokens of all sequences
    k_cache: &Tensor,      // [num_blocks, Hkv, block_size, hd]
    v_cache: &Tensor,      // like k_cache
    block_tables: &Tensor, // [B, max_blocks] i64
    cu_seqlens_q: &[i64],  // B + 1
    context_lens: &[i64],  // B, the new tokens included
    scale: f64,
    sliding_window: Option<usize>,
) -> Tensor {
    let o = q.empty_like();
    for (n, &context_len) in context_lens.iter().enumerate() {
        let (start, len) = (cu_seqlens_q[n], cu_seqlens_q[n + 1] - cu_seqlens_q[n]);
        if len == 0 {
            continue;
        }
        let blocks =
            block_tables.get(n as i64).narrow(0, 0, (context_len as u64).div_ceil(k_cache.size()[2] as u64) as i64);
        let context = |cache: &Tensor| {
            let blocks = cache.index_select(0, &blocks).transpose(1, 2); // [.., block_size, Hkv, hd]
            blocks.flatten(0, 1).narrow(0, 0, context_len)
        };
        let (k, v) = (context(k_cache), context(v_cache)); // [context, Hkv, hd]
        let own = attend_behind_prefix(&q.narrow(0, start, len), &k, &v, scale, sliding_window);
        o.narrow(0, start, len).copy_(&own);
    }
    o // [T, H, hd]
}

/// The queries are the last rows of the context.
fn attend_behind_prefix(
    q: &Tensor, // [S, H, hd]
    k: &Tensor, // [context, Hkv, hd]
    v: &Tensor, // [context, Hkv, hd]
    scale: f64,
    sliding_window: Option<usize>,
) -> Tensor {
    let (size, context, heads) = (q.size(), k.size()[0], k.size()[1]);
    let group = size[1] / heads;
    let options = (accumulation_kind(q.kind()), q.device());
    let (new, past) = (size[0], context - size[0]);
    let hidden = Tensor::full([new, context], f64::NEG_INFINITY, options);
    let mask = match sliding_window {
        Some(window) => hidden.triu(past + 1) + hidden.tril(past - window as i64),
        None => hidden.triu(past + 1),
    };
    // The key-value heads are the batch, the group's query heads its heads: nothing is repeated.
    let q = q.view([new, heads, group, size[2]]).permute([1, 2, 0, 3]); // [Hkv, G, S, hd]
    let shared = |t: &Tensor| t.transpose(0, 1).unsqueeze(1).expand([heads, group, context, size[2]], false);
    let (k, v) = (shared(k), shared(v)); // [Hkv, G, context, hd]
    let o = if q.device().is_cuda() {
        let scores = q.to_kind(options.0).matmul(&k.to_kind(options.0).transpose(2, 3)) * scale + mask;
        scores.softmax(-1, None::<Kind>).matmul(&v.to_kind(options.0)).to_kind(q.kind())
    } else {
        let mask = mask.to_kind(q.kind());
        Tensor::internal_scaled_dot_product_flash_attention_for_cpu(&q, &k, &v, 0.0, false, Some(mask), scale).0
    };
    o.permute([2, 0, 1, 3]).reshape(size.as_slice()) // [S, H, hd]
}

/// Row of a cache [num_blocks * Hkv * block_size, hd] behind each of [T, Hkv], for [`write_kv`]; made once per engine step.
/// Slots are block * block_size + offset. Every slot is a valid one: padding rows name a slot that nobody reads.
pub fn kv_rows(slot_mapping: &Tensor /* [T] i64 */, block_size: usize, num_kv_heads: usize) -> Tensor {
    let (size, heads) = (block_size as i64, num_kv_heads as i64);
    let (blocks, offsets) = (slot_mapping.divide_scalar_mode(size, "floor"), slot_mapping.remainder(size));
    let range = Tensor::arange(heads, (Kind::Int64, slot_mapping.device()));
    (((blocks * heads).unsqueeze(1) + range) * size + offsets.unsqueeze(1)).flatten(0, 1) // [T * Hkv]
}

/// Writes each token's key and value into the cache.
pub fn write_kv(
    k_cache: &Tensor, // [num_blocks, Hkv, block_size, hd]
    v_cache: &Tensor, // like k_cache
    k: &Tensor,       // [T, Hkv, hd]
    v: &Tensor,       // [T, Hkv, hd]
    rows: &Tensor,    // [T * Hkv] i64, by `kv_rows`
) {
    for (cache, new) in [(k_cache, k), (v_cache, v)] {
        let _ = cache.flatten(0, 2).index_copy_(0, rows, &new.to_kind(cache.kind()).flatten(0, 1));
    }
}
