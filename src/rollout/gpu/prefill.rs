//! Attention of prompts on a GPU. If all runs begin their sequences, it reads the step's own keys, else the cache. In strict mode it gives the bits
//! of decode steps, in tiles of rows or row by row, so a token's bits do not depend on the kind of step that computed it.

use tch::{Device, Kind, Tensor};

use super::inputs::{Packing, PrefillInputs, bounds};
use super::network::StepHeads;
use super::plans::AttentionPlans;
use crate::cuda::kernels;
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, ByWindow, ModelSpec};
use crate::ops::attention::{Attended, KvEntries, PrefillContext, kv_rows, paged_prefill, sinks};
use crate::ops::exact::CachedTiles;
use crate::rollout::batch::block_tables;
use crate::rollout::kv_cache::{KvCache, LayerCache};
use crate::rollout::scheduler::{Step, TokenRun};
use crate::rollout::sequence::EngineSequence;
use crate::torch::{self, Varlen, flash_forward};

/// The attention of one prefill step, for all layers.
#[derive(Debug)]
pub(super) struct PrefillAttention<'a> {
    kv_cache: &'a KvCache,
    keys: Keys<'a>,
}

#[derive(Debug)]
enum Keys<'a> {
    /// Keys and values of this step, as they are in the output of the QKV projection.
    AtHand(Varlen),
    /// Rows of the cache: [context tokens of all runs * Hkv].
    Cached(Varlen, Tensor),
    /// For dtypes without flash attention: the arguments of [`paged_prefill`].
    Explicit { block_tables: Tensor, bounds: Vec<i64>, context_lens: Vec<i64>, num_hidden: i64 },
    /// The strict mode, with the bits of decode steps.
    Strict(StrictRows<'a>),
}

/// Rows of the strict mode: in tiles, by the layers' window, where tiles are faster; else in slices of as many rows as the plans hold.
#[derive(Debug)]
struct StrictRows<'a> {
    plans: &'a AttentionPlans,
    tiles: ByWindow<Option<CachedTiles>>,
    block_tables: Tensor, // [B, blocks], one per run
    slices: Vec<Slice>,
}

/// Neighbouring rows, each with its own context length.
#[derive(Debug)]
struct Slice {
    first: i64,
    block_tables: Tensor, // [n, blocks]
    context_lens: Tensor, // [n] i32
}

impl<'a> PrefillAttention<'a> {
    /// Chooses how the step's attention is computed. `strict` has the plans of decode steps with a fixed split, for prompts that must have the bits
    /// of decode steps.
    pub(super) fn new(
        packing: &Packing,
        inputs: &PrefillInputs,
        spec: &ModelSpec,
        kv_cache: &'a KvCache,
        strict: Option<&'a AttentionPlans>,
    ) -> Result<Self> {
        let keys = match strict {
            Some(plans) => Keys::Strict(StrictRows::new(packing.step, inputs, spec, kv_cache, plans)?),
            None => Keys::of(packing, &inputs.bounds, kv_cache, 0)?,
        };
        Ok(Self { kv_cache, keys })
    }

    /// Attention of the rows of a draft head, which has none of a sequence's first token.
    pub(super) fn of_head(packing: &Packing, kv_cache: &'a KvCache, device: Device) -> Result<Self> {
        let bounds = torch::tensor_on(&bounds(new_rows(packing.step, 1)), device)?;
        Ok(Self { kv_cache, keys: Keys::of(packing, &bounds, kv_cache, 1)? })
    }

    /// [T, H hd]
    pub(super) fn attend(
        &self,
        layer: usize,
        attention: AttentionSpec,
        StepHeads { q, qkv, sinks }: StepHeads<'_>,
    ) -> Result<Tensor> {
        let AttentionSpec { window, scale, .. } = attention;
        let cache = self.kv_cache.layer(layer);
        let within = |varlen: &Varlen| varlen.within(window.map(|window| window as i64));
        // The kernel's log-sum-exp is [H, T].
        let joined = |Attended { o, lse }: Attended| match sinks {
            Some(sinks) => Ok(sinks::join(Attended { o, lse: lse.f_transpose(0, 1)? }, sinks)?.o),
            None => Ok::<_, Error>(o),
        };
        let o = match &self.keys {
            Keys::AtHand(varlen) => joined(flash_forward(q, &qkv.k, &qkv.v, &within(varlen), scale)?)?,
            Keys::Cached(varlen, rows) => {
                let gather = |cache: &dyn KvEntries| {
                    let size = cache.size(); // [blocks, Hkv, block_size, hd]
                    Ok::<_, Error>(cache.rows(rows, q.kind())?.view([-1, size[1], size[3]]))
                };
                let [k_cache, v_cache] = cache.entries();
                joined(flash_forward(q, &gather(k_cache)?, &gather(v_cache)?, &within(varlen), scale)?)?
            }
            Keys::Strict(rows) => rows.attend(&cache, attention, q, sinks)?,
            Keys::Explicit { block_tables, bounds, context_lens, num_hidden } => {
                let (cu_seqlens_q, num_hidden) = (bounds.as_slice(), *num_hidden);
                let context = PrefillContext { block_tables, cu_seqlens_q, context_lens, num_hidden };
                match paged_prefill(q, cache.entries(), context, scale, window, sinks.is_some())? {
                    (o, Some(lse)) => joined(Attended { o, lse })?,
                    (o, None) => o,
                }
            }
        };
        Ok(o.f_flatten(1, 2)?)
    }
}

impl Keys<'_> {
    /// For rows with such bounds, which see all tokens of their sequences from the one at `first` on, and are those of this step's tokens from there
    /// on.
    fn of(
        Packing { step, sequences, block_size, .. }: &Packing,
        rows: &Tensor, // [B + 1] i32
        kv_cache: &KvCache,
        first: usize,
    ) -> Result<Self> {
        let device = rows.device();
        let seen = |run: &TokenRun| run.tokens.end.saturating_sub(first);
        if kv_cache.kind() == Kind::Float {
            let context_lens = step.runs.iter().map(|run| run.tokens.end as i64).collect();
            let parts: Vec<_> = step.parts().collect();
            let block_tables = block_tables(&parts, sequences, *block_size, device)?;
            let bounds = bounds(new_rows(step, first)).into_iter().map(i64::from).collect();
            return Ok(Self::Explicit { block_tables, bounds, context_lens, num_hidden: first as i64 });
        }
        let longest = |lens: &mut dyn Iterator<Item = usize>| lens.max().unwrap_or(0) as i64;
        let is_at_hand = step.runs.iter().all(|run| run.tokens.start == 0);
        let cu_seqlens_k = match is_at_hand {
            true => rows.shallow_clone(),
            false => torch::tensor_on(&bounds(step.runs.iter().map(seen)), device)?,
        };
        let varlen = Varlen {
            cu_seqlens_q: rows.shallow_clone(),
            cu_seqlens_k,
            max_len_q: longest(&mut new_rows(step, first)),
            max_len_k: longest(&mut step.runs.iter().map(seen)),
            causal: true,
            window: None,
        };
        if is_at_hand {
            return Ok(Self::AtHand(varlen));
        }
        let slots = torch::tensor_on(&context_slots(step, sequences, *block_size, first), device)?;
        Ok(Self::Cached(varlen, kv_rows(&slots, *block_size, kv_cache.num_kv_heads())?))
    }
}

/// Tokens of each run from the one at `first` of its sequence on.
fn new_rows(step: &Step, first: usize) -> impl Iterator<Item = usize> + '_ {
    step.runs.iter().map(move |run| run.tokens.end.saturating_sub(run.tokens.start.max(first)))
}

impl<'a> StrictRows<'a> {
    fn new(
        step: &Step,
        inputs: &PrefillInputs,
        spec: &ModelSpec,
        kv_cache: &KvCache,
        plans: &'a AttentionPlans,
    ) -> Result<Self> {
        let runs: Vec<_> = step.runs.iter().map(|run| (run.tokens.start, run.tokens.len())).collect();
        let head_dim = spec.attention().head_dim as i64;
        let is_served = kernels::tiled_attention_serves(kv_cache.kind(), head_dim)
            && kv_cache.block_size().is_power_of_two()
            && spec.attention_specs().all(|attention| !attention.sinks);
        let tiles = |window| match plans.blocks().filter(|_| is_served) {
            Some(blocks) => CachedTiles::new(&runs, window, blocks, inputs.positions.device()),
            None => Ok(None),
        };
        let tiles = ByWindow::try_new(spec.windows(), tiles)?;
        let slices = match tiles.iter().all(Option::is_some) {
            true => Vec::new(),
            false => slices(step, inputs, plans.max_rows() as i64)?,
        };
        Ok(Self { plans, tiles, block_tables: inputs.block_tables.shallow_clone(), slices })
    }

    fn attend(
        &self,
        cache: &LayerCache,
        attention: AttentionSpec,
        q: &Tensor,             // [T, H, hd]
        sinks: Option<&Tensor>, // [H]
    ) -> Result<Tensor> {
        let mut o = q.f_empty_like()?;
        if let (Some(tiles), LayerCache::Plain(entries)) = (self.tiles.of(attention.window), cache) {
            tiles.attend(q, entries.each_ref(), &self.block_tables, attention.scale, &mut o)?;
            return Ok(o);
        }
        let plan = self.plans.of(attention);
        for Slice { first, block_tables, context_lens: lens } in &self.slices {
            let of_slice = |tensor: &Tensor| tensor.narrow(0, *first, lens.size()[0]);
            plan.update(lens, None)?;
            cache.attend(plan, &of_slice(q), block_tables, lens, sinks, &mut of_slice(&o))?;
        }
        Ok(o)
    }
}

/// Splits all tokens into slices of at most `most` rows.
fn slices(step: &Step, inputs: &PrefillInputs, most: i64) -> Result<Vec<Slice>> {
    let (rows, device) = (inputs.positions.size()[0], inputs.positions.device());
    let runs = step.runs.iter().enumerate();
    let runs: Vec<i32> = runs.flat_map(|(index, run)| std::iter::repeat_n(index as i32, run.tokens.len())).collect();
    let runs = torch::tensor_on(&runs, device)?;
    let slice = |first: i64| {
        let len = most.min(rows - first);
        let block_tables = inputs.block_tables.f_index_select(0, &runs.narrow(0, first, len))?;
        Ok(Slice {
            first,
            block_tables,
            context_lens: inputs.positions.narrow(0, first, len).f_add(&torch::scalar(1i32))?,
        })
    };
    (0..rows).step_by(most as usize).map(slice).collect()
}

/// Slots of all tokens that the runs see, from the one at `first` of each sequence on, in order. [context tokens] i64
fn context_slots(step: &Step, sequences: &[EngineSequence], block_size: usize, first: usize) -> Vec<i64> {
    let slots = step.runs.iter().flat_map(|run| {
        let sequence = &sequences[run.sequence];
        (first..run.tokens.end).map(move |at| sequence.slot(at, block_size) as i64)
    });
    slots.collect()
}
