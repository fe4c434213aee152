//! Token mixing in the engine's steps: attention reads keys and values from the paged cache, and gated delta nets read their states from pages.

use tch::{Kind, Tensor};

use super::batch::StepBatch;
use super::kv_cache::KvCache;
use super::state_pages::{SequenceMemory, StatePages};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, ByWindow, ModelSpec, SequenceMixer};
use crate::ops::attention::{
    Attended, KvEntries, PackedLayout, PagedLayout, PrefillContext, kv_rows, packed_forward, paged_decode,
    paged_prefill, write_kv,
};
use crate::ops::delta_net::{self, DeltaOptions, DeltaRows, DeltaWeights, DraftedRows, PackedChunks, Sequences};
use crate::ops::exact::{self, VisibleKeys};
use crate::ops::{int8, try_map};
use crate::torch;

/// Token mixing of one step, for all layers.
#[derive(Debug)]
pub(super) struct PagedMixer<'a> {
    kv_cache: &'a KvCache,
    batch: &'a StepBatch,
    kv_rows: Tensor,
    layout: Layout,
    states: Option<States<'a>>,
}

/// The states of gated delta nets that a step reads and writes.
#[derive(Debug)]
struct States<'a> {
    pages: &'a StatePages,
    own: Tensor, // [B] i64, pages of the step's runs
    tokens: StateTokens,
}

/// The tokens that a step adds to the states.
#[derive(Debug)]
enum StateTokens {
    /// One new token of every sequence.
    Newest,
    /// For every sequence, accepted draft tokens that are stored in its page, then the newest token. Draft tokens behind it are stored for later.
    Drafted(DraftedRows),
    /// Prompts or parts of them. The mask marks the beginnings, whose pages still hold another sequence's states.
    Prompts(Sequences, Tensor /* [B] bool */),
}

#[derive(Debug)]
enum Layout {
    /// One query per sequence, with all its keys in the cache; by the layers' windows.
    Decode(ByWindow<PagedLayout>),
    /// Whole prompts, whose keys are in this step, as in training.
    Packed(ByWindow<PackedLayout>),
    /// Prompts, some of whose keys are in the cache.
    Prefill,
    /// Token by token, with the bits of training: the cache blocks of all runs and, by the layers' windows, the visible keys of every token among
    /// their rows.
    Exact(Tensor, ByWindow<Vec<VisibleKeys>>),
}

impl<'a> PagedMixer<'a> {
    /// Prepares the mixing of one step on a rank with `num_kv_heads` of the model's heads.
    pub(super) fn new(
        SequenceMemory { kv_cache, states: pages }: SequenceMemory<'a>,
        batch: &'a StepBatch,
        (spec, exact): (&ModelSpec, bool),
        num_kv_heads: usize,
    ) -> Result<Self> {
        let tables = &batch.block_tables;
        let layout = if exact {
            exact_layout(batch, spec, kv_cache.block_size())?
        } else if batch.is_decode {
            let context_lens = torch::tensor_on(&batch.context_lens, tables.device())?;
            let block_size = kv_cache.block_size();
            let layout = |window| PagedLayout::new(tables, &context_lens, block_size, num_kv_heads, window);
            Layout::Decode(ByWindow::try_new(spec.windows(), layout)?)
        } else if batch.is_uncached {
            let layout = |window| PackedLayout::new(&batch.cu_seqlens, num_kv_heads, window, tables.device());
            Layout::Packed(ByWindow::new(spec.windows(), layout))
        } else {
            Layout::Prefill
        };
        let kv_rows = kv_rows(&batch.slot_mapping, kv_cache.block_size(), num_kv_heads)?;
        let states = match (pages, spec.delta_net()) {
            (Some(pages), Some(delta_net)) => {
                let (width, device) = (delta_net.heads.conv_width as i64, tables.device());
                let fresh = batch.context_lens.iter().zip(batch.cu_seqlens.windows(2));
                let fresh = || fresh.map(|(&len, bounds)| len == bounds[1] - bounds[0]).collect::<Vec<bool>>();
                let tokens = match &batch.drafted {
                    Some(drafted) => StateTokens::Drafted(DraftedRows::new(drafted, device)?),
                    None if batch.is_decode => StateTokens::Newest,
                    None => {
                        let sequences = Sequences::new(&batch.cu_seqlens, width, device);
                        StateTokens::Prompts(sequences, torch::tensor_on(&fresh(), device)?)
                    }
                };
                Some(States { pages, own: batch.state_pages.shallow_clone(), tokens })
            }
            _ => None,
        };
        Ok(Self { kv_cache, batch, kv_rows, layout, states })
    }
}

impl PagedMixer<'_> {
    /// Rotates queries and keys as the int8 cache stores them; `None` for a cache of another dtype.
    fn turned(&self, attention: AttentionSpec, both: [&Tensor; 2]) -> Result<Option<[Tensor; 2]>> {
        if self.kv_cache.kind() != Kind::Int8 {
            return Ok(None);
        }
        let head_dim = attention.head_dim;
        let columns = attention.rope.map_or(head_dim, |rope| rope.columns(head_dim));
        let block = int8::hadamard_block(head_dim, columns);
        try_map(both, |x| int8::turned_by_hadamard(x, block)).map(Some)
    }
}

/// Creates [`Layout::Exact`] for a step; the blocks of its runs are concatenated.
fn exact_layout(batch: &StepBatch, spec: &ModelSpec, block_size: usize) -> Result<Layout> {
    let width = batch.block_tables.size()[1] as usize;
    let runs = || batch.context_lens.iter().zip(batch.cu_seqlens.windows(2)).enumerate();
    let contexts = |window| {
        let of_run = |(run, (&len, bounds)): (usize, (&i64, &[i64]))| {
            let (start, len) = (run * width * block_size, len as usize);
            let first = start + len - (bounds[1] - bounds[0]) as usize;
            VisibleKeys::of_tokens(0..0, start..start + len, first, window)
        };
        runs().flat_map(of_run).collect()
    };
    Ok(Layout::Exact(batch.block_tables.f_reshape([-1])?, ByWindow::new(spec.windows(), contexts)))
}

impl SequenceMixer for PagedMixer<'_> {
    fn attention(
        &self,
        layer: usize,
        attention: AttentionSpec,
        [q, k, v]: [&Tensor; 3],
    ) -> Result<(Tensor, Option<Tensor>)> {
        let cache = self.kv_cache.layer(layer);
        let [k_cache, v_cache] = cache.entries();
        let turned = self.turned(attention, [q, k])?;
        let [q, k] = turned.as_ref().map_or([q, k], |[q, k]| [q, k]);
        let (batch, AttentionSpec { window, scale, sinks, .. }) = (self.batch, attention);
        let with_lse = |Attended { o, lse }| (o, Some(lse));
        write_kv(k_cache, v_cache, k, v, &self.kv_rows)?;
        Ok(match &self.layout {
            Layout::Decode(layouts) => paged_decode(q, k_cache, v_cache, layouts.of(window), scale, sinks)?,
            Layout::Packed(layouts) => with_lse(packed_forward(q, k, v, layouts.of(window), scale)?),
            Layout::Exact(blocks, contexts) => {
                let rows = |cache: &dyn KvEntries| {
                    let rows = cache.blocks(blocks, q.kind())?.transpose(1, 2).f_flatten(0, 1)?;
                    Ok::<_, Error>(rows) // [rows of all blocks, Hkv, hd]
                };
                with_lse(exact::attend(q, &rows(k_cache)?, &rows(v_cache)?, contexts.of(window), scale)?)
            }
            Layout::Prefill => {
                let StepBatch { block_tables, cu_seqlens: cu_seqlens_q, context_lens, .. } = batch;
                let context = PrefillContext { block_tables, cu_seqlens_q, context_lens, num_hidden: 0 };
                paged_prefill(q, [k_cache, v_cache], context, scale, window, sinks)?
            }
        })
    }

    fn delta_net(
        &self,
        layer: usize,
        rows: &DeltaRows,
        weights: &DeltaWeights,
        options: DeltaOptions,
        _keeps_chunks: bool,
    ) -> Result<(Tensor, Option<PackedChunks>)> {
        let States { pages, own, tokens } = self.states.as_ref().expect("a model with states has pages");
        let mut all = pages.read_drafted(layer, own)?;
        let o = match tokens {
            StateTokens::Newest => delta_net::step(rows, weights, &mut all.state, options)?,
            StateTokens::Drafted(drafted) => {
                let o = all.step(rows, drafted, weights, options)?;
                pages.write_inputs(layer, own, &all)?;
                o
            }
            StateTokens::Prompts(sequences, fresh) => {
                for state in [&mut all.state.conv, &mut all.state.rule] {
                    let shape: Vec<i64> = std::iter::once(-1).chain(vec![1; state.dim() - 1]).collect();
                    *state = state.f_masked_fill(&fresh.view(shape.as_slice()), 0.0)?;
                }
                let (o, last) = delta_net::forward(rows, weights, Some(&all.state), sequences, options)?;
                all.state = last;
                o
            }
        };
        pages.write(layer, own, &all.state)?;
        Ok((o, None))
    }
}
