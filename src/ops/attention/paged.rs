//! Attention over keys and values in blocks of a paged cache, as the engine stores them.
//!
//! Caches are [num_blocks, Hkv, block_size, hd] (one head's part of a block is contiguous). All their numbers must be finite (new caches are zero),
//! because entries beyond a context are read and masked.

use super::entries::KvEntries;
use crate::error::{Error, Result};
use crate::torch::{accumulation_kind, arange, check_room, full, scalar};
use tch::{Kind, Tensor};

/// Positions of a decode batch's contexts in the cache. It is created once per engine step and used by all layers.
#[derive(Debug)]
pub struct PagedLayout {
    /// For each entry of [B, Hkv, L] with L = max_blocks * block_size, the index of its row in [num_blocks * Hkv * block_size, hd].
    rows: Tensor,
    /// The mask: 0 if the new token attends to the entry, else -inf. [B * Hkv, 1, L], Float
    mask: Tensor,
    num_kv_heads: i64,
}

impl PagedLayout {
    /// Creates the layout. Every entry of `block_tables` must be a valid block, also those beyond the context. A row with context length 0 is
    /// padding: it attends to the first entry of its first block, so that it stays finite.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(
        block_tables: &Tensor, // [B, max_blocks] i64
        context_lens: &Tensor, // [B] i64, the new token included
        block_size: usize,
        num_kv_heads: usize,
        sliding_window: Option<usize>,
    ) -> Result<Self> {
        let (device, heads) = (block_tables.device(), num_kv_heads as i64);
        let range = |n: i64| arange(n, device);
        let size = block_size as i64;
        let blocks = block_tables.f_mul(&scalar(heads))?.unsqueeze(1).f_add(&range(heads)?.unsqueeze(-1))?; // [B, Hkv, max_blocks]
        let rows = blocks.f_mul(&scalar(size))?.unsqueeze(-1).f_add(&range(size)?)?.flatten(0, -1); // [B * Hkv * L]
        let lens = context_lens.f_clamp_min_tensor(&scalar(1i64))?.view([-1, 1, 1]); // [B, 1, 1]
        let entries = range(block_tables.size()[1] * size)?; // [L]
        let mut hidden = entries.f_ge_tensor(&lens)?; // [B, 1, L]
        if let Some(window) = sliding_window {
            hidden = hidden.f_logical_or(&entries.f_lt_tensor(&lens.f_sub(&scalar(window as i64))?)?)?;
        }
        let mask = Tensor::f_zeros(hidden.size(), (Kind::Float, device))?.f_masked_fill_(&hidden, f64::NEG_INFINITY)?;
        Ok(Self { rows, mask: mask.f_repeat_interleave_self_int(heads, 0, None)?, num_kv_heads: heads })
    }

    /// Reads the contexts' entries [B * Hkv, L, hd] from a cache, as `kind`.
    fn gather(&self, cache: &dyn KvEntries, kind: Kind) -> Result<Tensor> {
        let (size, hd) = (self.mask.size(), cache.size()[3]);
        Ok(cache.rows(&self.rows, kind)?.view([size[0], size[2], hd]))
    }
}

/// Computes attention of one new token per sequence over its context, whose last entry is the token itself. Returns o [B, H, hd] and, if requested,
/// the log-sum-exp of the scores [B, H] in the accumulation type.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn paged_decode(
    q: &Tensor,              // [B, H, hd]
    k_cache: &dyn KvEntries, // [num_blocks, Hkv, block_size, hd]
    v_cache: &dyn KvEntries, // like k_cache
    layout: &PagedLayout,
    scale: f64,
    wants_lse: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let scores = scores(q, k_cache, layout, scale)?;
    let lse = || -> Result<Tensor> { Ok(scores.f_logsumexp([-1i64], false)?.f_view(&q.size()[..2])?) };
    let lse = wants_lse.then(lse).transpose()?;
    Ok((outputs(q, v_cache, layout, scores)?, lse))
}

/// Computes the attention scores [B * Hkv, G, L].
fn scores(q: &Tensor, k_cache: &dyn KvEntries, layout: &PagedLayout, scale: f64) -> Result<Tensor> {
    let (kind, size) = (accumulation_kind(q.kind()), q.size());
    let grouped = q.f_reshape([size[0] * layout.num_kv_heads, -1, size[2]])?.f_to_kind(kind)?; // [B * Hkv, G, hd]
    let keys = layout.gather(k_cache, kind)?.transpose(1, 2);
    check_room(&[grouped.size()[0], grouped.size()[1], keys.size()[2]], (kind, keys.device()))?;
    Ok(layout.mask.f_to_kind(kind)?.f_baddbmm(&grouped, &keys, 1.0, scale)?)
}

/// Computes the outputs [B, H, hd] from the scores.
fn outputs(q: &Tensor, v_cache: &dyn KvEntries, layout: &PagedLayout, scores: Tensor) -> Result<Tensor> {
    let o = scores.f_softmax(-1, None::<Kind>)?.f_bmm(&layout.gather(v_cache, scores.kind())?)?;
    Ok(o.view(q.size().as_slice()).f_to_kind(q.kind())?)
}

/// Sequences with new tokens, and their contexts in a cache.
#[derive(Debug, Clone, Copy)]
pub struct PrefillContext<'a> {
    /// The cache blocks of each sequence.
    pub block_tables: &'a Tensor, // [B, max_blocks] i64
    /// Index of each sequence's first new token, followed by the number of new tokens.
    pub cu_seqlens_q: &'a [i64], // B + 1
    /// Number of tokens of each sequence, including the new ones.
    pub context_lens: &'a [i64], // B
    /// Tokens at the beginning of each sequence that nobody sees.
    pub num_hidden: i64,
}

/// Computes attention of each sequence's new tokens over its context in the cache, which already contains the new tokens: chunked prefill, and
/// prefill after a cached prefix. Sequences without new tokens are skipped. Returns o [T, H, hd] and, if requested, the log-sum-exp of the scores [T,
/// H] in the accumulation type.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn paged_prefill(
    q: &Tensor,                              // [T, H, hd], the new tokens of all sequences
    [k_cache, v_cache]: [&dyn KvEntries; 2], // [num_blocks, Hkv, block_size, hd]
    context: PrefillContext<'_>,
    scale: f64,
    sliding_window: Option<usize>,
    wants_lse: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let PrefillContext { block_tables, cu_seqlens_q, context_lens, num_hidden } = context;
    let sight = (scale, sliding_window);
    let o = q.f_empty_like()?;
    let options = (accumulation_kind(q.kind()), q.device());
    let lse = wants_lse.then(|| Tensor::f_empty(&q.size()[..2], options)).transpose()?;
    for (n, &context_len) in context_lens.iter().enumerate() {
        let (start, len) = (cu_seqlens_q[n], cu_seqlens_q[n + 1] - cu_seqlens_q[n]);
        if len == 0 {
            continue;
        }
        let blocks =
            block_tables.get(n as i64).narrow(0, 0, (context_len as u64).div_ceil(k_cache.size()[2] as u64) as i64);
        let context = |cache: &dyn KvEntries| {
            let blocks = cache.blocks(&blocks, q.kind())?.transpose(1, 2); // [.., block_size, Hkv, hd]
            Ok::<_, Error>(blocks.f_flatten(0, 1)?.narrow(0, num_hidden, context_len - num_hidden))
        };
        let (k, v) = (context(k_cache)?, context(v_cache)?); // [context, Hkv, hd]
        let own = attend_behind_prefix(&q.narrow(0, start, len), &k, &v, sight, wants_lse)?;
        o.narrow(0, start, len).f_copy_(&own.0)?;
        if let Some((lse, own)) = lse.as_ref().zip(own.1) {
            lse.narrow(0, start, len).f_copy_(&own)?;
        }
    }
    Ok((o, lse)) // [T, H, hd], [T, H]
}

/// Computes attention of queries that are the last rows of the context. o [S, H, hd]; lse [S, H] if requested
fn attend_behind_prefix(
    q: &Tensor, // [S, H, hd]
    k: &Tensor, // [context, Hkv, hd]
    v: &Tensor, // [context, Hkv, hd]
    (scale, sliding_window): (f64, Option<usize>),
    wants_lse: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (size, context, heads) = (q.size(), k.size()[0], k.size()[1]);
    let group = size[1] / heads;
    let options = (accumulation_kind(q.kind()), q.device());
    let (new, past) = (size[0], context - size[0]);
    let hidden = full(&[new, context], f64::NEG_INFINITY, options)?;
    let mask = match sliding_window {
        Some(window) => hidden.f_triu(past + 1)?.f_add(&hidden.f_tril(past - window as i64)?)?,
        None => hidden.f_triu(past + 1)?,
    };
    // Key/value heads are the batch dimension and a group's query heads are the heads, so that nothing is repeated.
    let q = q.view([new, heads, group, size[2]]).permute([1, 2, 0, 3]); // [Hkv, G, S, hd]
    let shared = |t: &Tensor| t.transpose(0, 1).unsqueeze(1).expand([heads, group, context, size[2]], false);
    let (k, v) = (shared(k), shared(v)); // [Hkv, G, context, hd]
    let (o, lse) = if q.device().is_cuda() {
        let scores = q.f_to_kind(options.0)?.f_matmul(&k.f_to_kind(options.0)?.transpose(2, 3))?;
        let scores = scores.f_mul(&scalar(scale))?.f_add(&mask)?;
        let lse = wants_lse.then(|| scores.f_logsumexp([-1i64], false)).transpose()?;
        (scores.f_softmax(-1, None::<Kind>)?.f_matmul(&v.f_to_kind(options.0)?)?.f_to_kind(q.kind())?, lse)
    } else {
        let mask = mask.f_to_kind(q.kind())?;
        let attended =
            Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(&q, &k, &v, 0.0, false, Some(mask), scale)?;
        (attended.0, Some(attended.1).filter(|_| wants_lse))
    };
    let lse = lse.map(|lse| lse.permute([2, 0, 1]).f_reshape(&size[..2])).transpose()?; // of [Hkv, G, S]
    Ok((o.permute([2, 0, 1, 3]).f_reshape(size.as_slice())?, lse))
}

/// For each of [T, Hkv], the index of its row in a cache [num_blocks * Hkv * block_size, hd], for [`write_kv`]; computed once per engine step. Slots
/// are block * block_size + offset. Every slot must be valid: padding rows use a slot that is never read.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn kv_rows(slot_mapping: &Tensor /* [T] i64 */, block_size: usize, num_kv_heads: usize) -> Result<Tensor> {
    let (size, heads) = (scalar(block_size as i64), num_kv_heads as i64);
    let (blocks, offsets) =
        (slot_mapping.f_divide_tensor_mode(&size, "floor")?, slot_mapping.f_remainder_tensor(&size)?);
    let range = arange(heads, slot_mapping.device())?;
    let rows = blocks.f_mul(&scalar(heads))?.unsqueeze(1).f_add(&range)?; // [T, Hkv]
    Ok(rows.f_mul(&size)?.f_add(&offsets.unsqueeze(1))?.flatten(0, 1)) // [T * Hkv]
}

/// Writes each token's key and value into the cache.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn write_kv(
    k_cache: &dyn KvEntries, // [num_blocks, Hkv, block_size, hd]
    v_cache: &dyn KvEntries, // like k_cache
    k: &Tensor,              // [T, Hkv, hd]
    v: &Tensor,              // [T, Hkv, hd]
    rows: &Tensor,           // [T * Hkv] i64, by `kv_rows`
) -> Result<()> {
    k_cache.write(rows, &k.f_flatten(0, 1)?)?;
    v_cache.write(rows, &v.f_flatten(0, 1)?)
}
