//! Draft tokens from the model's own draft head (multi-token prediction), computed with libtorch operations. Each draft token is sampled with the
//! random noise of the position that it would take.
//!
//! The head processes a row for every token of a sequence but the first. A row's input is the token and the model's final hidden state at the token
//! before it. The rows' keys and values are in the KV cache, in one more layer after the model's. A sequence's state page holds the hidden states of
//! the rows of its newest step. Before a decode step the head first computes the rows of the tokens that the previous step sampled, from the model's
//! hidden states. Then it computes the rows of its own draft tokens one after another, from its own hidden states.

use tch::{Kind, Tensor, no_grad};

use super::draft_rows::{DraftHeadRows, HeadDrafts, HeadWork};
use super::kv_cache::LayerCache;
use super::runner::HostRunner;
use super::sampler::{Draw, Sampled, Sampler};
use super::scheduler::Step;
use super::sequence::EngineSequence;
use super::state_pages::StatePages;
use crate::error::Result;
use crate::model::{AttentionSpec, BlockContext, ParamName, SequenceMixer, block_forward, draft_input};
use crate::ops::attention::{KvEntries, kv_rows, write_kv};
use crate::ops::exact::{self, VisibleKeys};
use crate::ops::linear;
use crate::torch;

impl HostRunner<'_> {
    /// Runs the draft head on the tokens of a step, so that its KV cache follows the model's. `x` is the output of the last layer, before the final
    /// norm.
    pub(super) fn follow(&self, work: &HeadWork, x: &Tensor /* [T, D] */, states: &StatePages) -> Result<()> {
        let (own, _) = self.spec.norm().forward(x, &self.weights.final_norm)?;
        let of_pages = states.hidden_rows();
        if !work.before.is_empty() {
            let before = Tensor::f_cat(&[&own, &of_pages.f_to_kind(own.kind())?], 0)?;
            let before = before.f_index_select(0, &torch::tensor_on(&work.before, x.device())?)?;
            let _ = self.head_rows(&work.rows, &before)?; // only for the keys and values that it writes
        }
        let (rows, places): (Vec<_>, Vec<_>) = work.kept.iter().copied().unzip();
        let rows = own.f_index_select(0, &torch::tensor_on(&rows, x.device())?)?;
        let places = torch::tensor_on(&places, x.device())?;
        let _ = of_pages.shallow_clone().f_index_copy_(0, &places, &rows)?;
        Ok(())
    }

    /// Samples the draft tokens at index `depth` of a decode step, one for each entry of `draws`. Only runs with more than `depth` draft tokens are
    /// computed; at depth 0 all runs are, because the keys and values of their tokens stay in the cache. Collective over the tensor-parallel group.
    pub(super) fn draft_at(
        &mut self,
        step: &Step,
        depth: usize,
        draws: &[Draw],
        sequences: &[EngineSequence],
    ) -> Result<Vec<Sampled>> {
        let states = self.memory.states.expect("a model with a draft head has states");
        let block_size = self.memory.kv_cache.block_size();
        let mut rows = DraftHeadRows::default();
        let has_draft = |run: &usize| step.runs[*run].drafts.token_ids.len() > depth;
        let (runs, before, last) = match self.head_drafts.take().filter(|_| depth > 0) {
            None => {
                let (mut before, mut last) = (Vec::new(), Vec::new());
                for run in &step.runs {
                    let (sequence, first) = (&sequences[run.sequence], run.tokens.start - run.num_stored);
                    let tokens = &sequence.token_ids[first..=run.tokens.start];
                    rows.add(sequence, first, tokens, block_size);
                    let page = sequence.state_page.expect("a sequence that runs has a page");
                    let of_page = i64::from(page) * states.num_kept_rows() as i64;
                    before.extend((0..tokens.len() as i64).map(|row| of_page + row));
                    last.push(before.len() as i64 - 1);
                }
                let before = torch::tensor_on(&before, self.weights.embedding.device())?;
                ((0..step.runs.len()).collect(), states.hidden_rows().f_index_select(0, &before)?, last)
            }
            Some(HeadDrafts { runs, hidden }) => {
                let kept: Vec<usize> = (0..runs.len()).filter(|&at| has_draft(&runs[at])).collect();
                let places: Vec<i64> = kept.iter().map(|&at| at as i64).collect();
                let runs: Vec<usize> = kept.into_iter().map(|at| runs[at]).collect();
                for run in runs.iter().map(|&run| &step.runs[run]) {
                    let newest = run.drafts.token_ids[depth - 1];
                    rows.add(&sequences[run.sequence], run.tokens.start + depth, &[newest], block_size);
                }
                let last = (0..runs.len() as i64).collect();
                (runs, hidden.f_index_select(0, &torch::tensor_on(&places, hidden.device())?)?, last)
            }
        };
        let hidden = no_grad(|| self.head_rows(&rows, &before))?;
        let (runs, last): (Vec<usize>, Vec<i64>) = runs.into_iter().zip(last).filter(|(run, _)| has_draft(run)).unzip();
        if runs.is_empty() {
            return Ok(Vec::new());
        }
        let hidden = hidden.f_index_select(0, &torch::tensor_on(&last, hidden.device())?)?;
        let logits = linear::forward(&hidden, &self.weights.lm_head, None)?.f_to_kind(Kind::Float)?;
        let vocab = self.spec.vocab_range(self.tp.rank(), self.tp.size());
        let drafts =
            Sampler { vocab, tp: self.tp }.sample(&torch::f32_vec(&self.spec.scale_logits(logits)?)?, draws)?;
        self.head_drafts = Some(HeadDrafts { runs, hidden });
        Ok(drafts)
    }

    /// Hidden states of the head's rows, from the hidden states at the tokens before them. Keys and values are written to the cache. [R, D]
    fn head_rows(&self, rows: &DraftHeadRows, before: &Tensor /* [R, D] */) -> Result<Tensor> {
        let w = self.weights.draft_head.as_ref().expect("weights of the draft head");
        let spec = self.draft_spec.as_ref().expect("a model with a draft head");
        let (device, kind) = (self.weights.embedding.device(), self.weights.embedding.kind());
        let kv_cache = self.memory.kv_cache;
        let embedded = self.scaled(self.embed(&torch::tensor_on(&rows.token_ids, device)?)?)?;
        let (x, _) = draft_input(spec, w, &embedded, before)?;
        let ropes = self.ropes.rows(&torch::tensor_on(&rows.positions, device)?, kind)?;
        let slots = torch::tensor_on(&rows.slots, device)?;
        let num_kv_heads = spec.attention().tp_slice(self.tp.size()).num_kv_heads;
        let mixer = HeadMixer {
            cache: kv_cache.layer(self.spec.num_layers()),
            kv_rows: kv_rows(&slots, kv_cache.block_size(), num_kv_heads)?,
            blocks: torch::tensor_on(&rows.blocks, device)?,
            contexts: &rows.contexts,
        };
        let context = BlockContext::new(spec, &ropes, Some(self.tp), None);
        let (x, _) = block_forward(&context, 0, w, &x.f_to_kind(self.residual)?, &mixer, None)?;
        let weight = w.norm(ParamName::FinalNorm).expect("the norm of the draft head");
        Ok(spec.norm().forward(&x, weight)?.0)
    }
}

/// Attention of the head's rows to the keys and values of earlier tokens in the cache.
#[derive(Debug)]
struct HeadMixer<'a> {
    cache: LayerCache,
    kv_rows: Tensor,
    blocks: Tensor, // [blocks of all rows' sequences] i64
    contexts: &'a [VisibleKeys],
}

impl SequenceMixer for HeadMixer<'_> {
    fn attention(
        &self,
        _layer: usize,
        attention: AttentionSpec,
        [q, k, v]: [&Tensor; 3],
    ) -> Result<(Tensor, Option<Tensor>)> {
        let [k_cache, v_cache] = self.cache.entries();
        write_kv(k_cache, v_cache, k, v, &self.kv_rows)?;
        let rows = |cache: &dyn KvEntries| -> Result<Tensor> {
            Ok(cache.blocks(&self.blocks, q.kind())?.transpose(1, 2).f_flatten(0, 1)?) // [tokens of all blocks, Hkv, hd]
        };
        Ok((exact::attend(q, &rows(k_cache)?, &rows(v_cache)?, self.contexts, attention.scale)?.o, None))
    }
}
