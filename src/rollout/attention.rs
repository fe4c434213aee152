//! Attention of the engine's steps: keys and values go through the paged cache.

use tch::Tensor;

use super::batch::StepBatch;
use super::kv_cache::KvCache;
use crate::error::Result;
use crate::model::{Attention, ModelSpec, attention_scale};
use crate::ops::attention::{
    PackedLayout, PagedLayout, kv_rows, packed_forward, paged_decode, paged_prefill, write_kv,
};
use crate::torch;

/// The attention context of one step, for all layers.
#[derive(Debug)]
pub(super) struct PagedAttention<'a> {
    kv_cache: &'a KvCache,
    batch: &'a StepBatch,
    kv_rows: Tensor,
    scale: f64,
    sliding_window: Option<usize>,
    layout: Layout,
}

#[derive(Debug)]
enum Layout {
    /// One query a sequence, all its keys in the cache.
    Decode(PagedLayout),
    /// Whole prompts: their keys are at hand, as in training.
    Packed(PackedLayout),
    /// Prompts, part of whose keys is in the cache.
    Prefill,
}

impl<'a> PagedAttention<'a> {
    /// For one step of a rank that has `num_kv_heads` of the model's.
    pub(super) fn new(
        kv_cache: &'a KvCache,
        batch: &'a StepBatch,
        spec: &ModelSpec,
        num_kv_heads: usize,
    ) -> Result<Self> {
        let window = spec.sliding_window;
        let tables = &batch.block_tables;
        let layout = if batch.is_decode {
            let context_lens = torch::tensor_on(&batch.context_lens, tables.device())?;
            Layout::Decode(PagedLayout::new(tables, &context_lens, kv_cache.block_size(), num_kv_heads, window)?)
        } else if batch.is_uncached {
            Layout::Packed(PackedLayout::new(&batch.cu_seqlens, num_kv_heads, window, tables.device()))
        } else {
            Layout::Prefill
        };
        let kv_rows = kv_rows(&batch.slot_mapping, kv_cache.block_size(), num_kv_heads)?;
        Ok(Self { kv_cache, batch, kv_rows, scale: attention_scale(spec), sliding_window: window, layout })
    }
}

impl Attention for PagedAttention<'_> {
    fn forward(
        &self,
        layer: usize,
        q: &Tensor, // [T, H, hd]
        k: &Tensor, // [T, Hkv, hd]
        v: &Tensor, // [T, Hkv, hd]
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (k_cache, v_cache) = self.kv_cache.layer(layer);
        let batch = self.batch;
        write_kv(&k_cache, &v_cache, k, v, &self.kv_rows)?;
        let o = match &self.layout {
            Layout::Decode(layout) => paged_decode(q, &k_cache, &v_cache, layout, self.scale)?,
            Layout::Packed(layout) => packed_forward(q, k, v, layout, self.scale)?.0,
            Layout::Prefill => paged_prefill(
                q,
                &k_cache,
                &v_cache,
                &batch.block_tables,
                &batch.cu_seqlens,
                &batch.context_lens,
                self.scale,
                self.sliding_window,
            )?,
        };
        Ok((o, None))
    }
}
