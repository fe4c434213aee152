//! Trains the draft head beside the model. It learns to predict the tokens that the model has sampled, from the model's hidden states. These are
//! detached, so the head follows the model without changing it.
//!
//! Its loss is the mean of -ln p(token) over an update's scored tokens, at the sampling temperature of draft tokens. Shapes: T tokens of a
//! micro-batch, R rows of the head (all tokens but the first of each sequence), C scored tokens, D hidden.

use tch::Tensor;

use super::gradients::Gradients;
use super::micro_batch::MicroBatch;
use super::network::Network;
use super::upcoming::upcoming;
use crate::config::GradientCheckpointing;
use crate::error::Result;
use crate::model::{
    BlockContext, BlockParams, ByRope, EmbeddingParams, HeadParams, HeadSums, ModelSpec, PackedMixer, ParamName,
    Scoring, Unit, block_backward, block_forward, draft_input, draft_input_backward, head_backward, head_forward,
};
use crate::ops::attention::{Bounds, SharedBounds};
use crate::ops::embedding;
use crate::ops::head::TopTokens;
use crate::ops::linear::Onto;
use crate::ops::rope::RopeRows;
use crate::torch;

/// The tokens of a micro-batch that are rows of the draft head.
#[derive(Debug)]
struct DraftTargets {
    /// Indexes of the rows among the tokens.
    rows: Tensor, // [R] i64
    /// Indexes of the tokens before the rows.
    before: Tensor, // [R] i64
    bounds: Bounds,
    /// Rows whose next token is scored.
    scored: Tensor, // [C] i64
    /// Token ids of these next tokens.
    targets: Tensor, // [C] i64
}

/// Weights that the draft head computes with.
struct HeadWeights<'a> {
    /// The head's own weights.
    own: &'a BlockParams,
    /// Weight of the model's final norm.
    final_norm: &'a Tensor, // [D]
    /// The model's embedding.
    embedding: &'a Tensor, // [V, D]
    /// The model's output embedding, which gives the logits.
    table: &'a Tensor, // [V, D]
}

impl Network {
    /// Trains the draft head on a micro-batch, if the model has one.
    pub(super) fn train_draft_head(
        &mut self,
        micro_batch: &MicroBatch,
        temperature: f64,
        hidden: &Tensor, // [T, D]
        gradients: &mut Gradients,
    ) -> Result<()> {
        if self.spec().draft_head.is_none() {
            return Ok(());
        }
        let head = self.head(&[Unit::DraftHead])?;
        let words = self.weights.unit(Unit::Embedding, &[Unit::DraftHead])?;
        let words = EmbeddingParams::view(self.layout(Unit::Embedding), &words).table;
        let upcoming = upcoming(self.spec(), Unit::Head, true);
        let flat = self.weights.unit(Unit::DraftHead, &upcoming)?;
        let sum = gradients.begin(Unit::DraftHead)?;
        let (spec, layout) = (self.spec(), self.layout(Unit::DraftHead));
        match DraftTargets::new(micro_batch)? {
            Some(rows) => {
                let mut own = match sum.is_new {
                    true => BlockParams::begin_gradients(spec, layout, &sum.flat)?,
                    false => BlockParams::view(spec, layout, &sum.flat),
                };
                let weights = HeadWeights {
                    own: &BlockParams::view(spec, layout, &flat),
                    final_norm: &head.params.final_norm,
                    embedding: &words,
                    table: &head.table,
                };
                let ropes = self.ropes.rows(&rows.positions(micro_batch)?, self.options.kind)?;
                let by = (&ropes, temperature, self.draft_weight);
                rows.train(spec, &weights, (micro_batch, hidden), by, &mut own)?;
            }
            None => _ = sum.zero_others(layout, &|_| false)?,
        }
        gradients.end(Unit::DraftHead, sum.flat)
    }
}

impl DraftTargets {
    /// Finds the rows of a micro-batch; `None` if nothing is scored. The token after a sequence's first has no row that predicts it.
    fn new(micro_batch: &MicroBatch) -> Result<Option<Self>> {
        let device = micro_batch.token_ids.device();
        let (mut rows, mut before) = (Vec::new(), Vec::new());
        let mut num_removed = vec![0; micro_batch.num_tokens()]; // number of tokens without a row before each token
        let mut first_of = |start: i64, end: i64, rows: &mut Vec<i64>, before: &mut Vec<i64>| {
            rows.extend(start + 1..end);
            before.extend(start..end - 1);
            num_removed[start as usize] = 1;
        };
        let bounds = match &micro_batch.bounds {
            _ if micro_batch.is_empty() => return Ok(None),
            Bounds::Separate(bounds) => {
                bounds.windows(2).for_each(|pair| first_of(pair[0], pair[1], &mut rows, &mut before));
                Bounds::Separate(bounds.iter().enumerate().map(|(index, bound)| bound - index as i64).collect())
            }
            Bounds::Shared(SharedBounds { prompts, groups, completions }) => {
                prompts.windows(2).for_each(|pair| first_of(pair[0], pair[1], &mut rows, &mut before));
                for pair in completions.windows(2).filter(|pair| pair[0] < pair[1]) {
                    let group = groups.partition_point(|group| group <= &pair[0]) - 1;
                    rows.extend(pair[0]..pair[1]);
                    before.push(prompts[group + 1] - 1);
                    before.extend(pair[0]..pair[1] - 1);
                }
                let num_prompts = prompts.len() as i64 - 1;
                let behind = |bounds: &[i64]| bounds.iter().map(|bound| bound - num_prompts).collect();
                Bounds::Shared(SharedBounds {
                    prompts: prompts.iter().enumerate().map(|(index, bound)| bound - index as i64).collect(),
                    groups: behind(groups),
                    completions: behind(completions),
                })
            }
        };
        let scored = Vec::<i64>::try_from(&micro_batch.scored_rows)?.into_iter().enumerate();
        let scored: Vec<(usize, i64)> = scored.filter(|&(_, row)| num_removed[row as usize] == 0).collect();
        let removed = num_removed.iter().scan(0, |sum, removed| {
            *sum += removed;
            Some(*sum)
        });
        let removed: Vec<i64> = removed.collect();
        let kept: Vec<i64> = scored.iter().map(|&(at, _)| at as i64).collect();
        let scored: Vec<i64> = scored.iter().map(|&(_, row)| row - removed[row as usize]).collect();
        let tensor = |places: &[i64]| torch::tensor_on(places, device);
        let targets = micro_batch.targets.f_index_select(0, &tensor(&kept)?)?;
        Ok(Some(Self { rows: tensor(&rows)?, before: tensor(&before)?, bounds, scored: tensor(&scored)?, targets }))
    }

    /// Positions of the rows.
    fn positions(&self, micro_batch: &MicroBatch) -> Result<Tensor> {
        Ok(micro_batch.positions.f_index_select(0, &self.rows)?)
    }

    /// Runs the head's forward, loss and backward. Each token's gradient is added to `grads` with `weight`.
    fn train(
        &self,
        spec: &ModelSpec,
        weights: &HeadWeights<'_>,
        (micro_batch, hidden): (&MicroBatch, &Tensor /* [T, D] */),
        (ropes, temperature, weight): (&ByRope<RopeRows>, f64, f64),
        grads: &mut BlockParams,
    ) -> Result<()> {
        let (draft, w) = (spec.draft_spec().expect("a model with a draft head"), weights.own);
        let token_ids = micro_batch.token_ids.f_index_select(0, &self.rows)?;
        let embedded =
            spec.scale_embedding(embedding::forward(&token_ids, weights.embedding)?, weights.embedding.kind())?;
        let (hidden_states, _) = spec.norm().forward(&hidden.f_index_select(0, &self.before)?, weights.final_norm)?;
        let (x, input) = draft_input(&draft, w, &embedded, &hidden_states)?;
        let mixer = PackedMixer::of(&draft, &self.bounds, x.device());
        let context = BlockContext::new(&draft, ropes, None, None);
        let keep = Some(GradientCheckpointing::Selective);
        let (y, saved) = block_forward(&context, 0, w, &x.f_to_kind(hidden.kind())?, &mixer, keep)?;
        let norm = |params: &BlockParams| params.norm(ParamName::FinalNorm).expect("the head's norm").shallow_clone();
        let head = HeadParams { final_norm: norm(w), lm_head: None };
        let scoring =
            Scoring { targets: &self.targets, top: TopTokens::Nothing, temperature, norm: spec.norm(), exact: None };
        let scored = head_forward(&head, weights.table, &y.f_index_select(0, &self.scored)?, &scoring, true)?;
        let d_logprobs = scored.logprobs.f_full_like(-weight)?;
        let mut d_norm = norm(grads);
        let into = HeadSums { final_norm: &mut d_norm, table: None, onto: Onto::Sum };
        let d_rows = head_backward(&head, weights.table, &scoring, scored.saved, &d_logprobs, None, None, Some(into))?;
        let d_y = embedding::select_backward(&d_rows, &self.scored, y.size()[0])?;
        drop(d_rows);
        let saved = saved.expect("asked for");
        let dx = block_backward(&context, w, &d_y, saved, &mixer, grads)?;
        draft_input_backward(&draft, w, &dx, input, grads)
    }
}
