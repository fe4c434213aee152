//! The head that drafts tokens, on a GPU: what `rollout::draft_head` does there on the host. Its rows are recorded as decode steps are. Of the
//! drafts of a step one depth is launched behind the other: they stay on the device, where the step's rows find them, and come to the host with
//! what the step has sampled.

use std::marker::PhantomData;

use tch::{Kind, Tensor};

use super::graphs::{GraphKey, Recorded};
use super::inputs::{Packing, Sampling, Words};
use super::network::{Attend, DecoderNetwork, StepHeads, StepTokens};
use super::op::DecoderOp;
use super::prefill::PrefillAttention;
use super::processing::Processing;
use super::runner::GpuRunner;
use super::sampling::DrawOutputs;
use crate::cuda::Tuning;
use crate::cuda::kernels::{self, DraftInputs};
use crate::error::{Error, Result};
use crate::model::{DRAFT_NORMS, ModelSpec, ParamName, Stage};
use crate::rollout::draft_rows::HeadWork;
use crate::rollout::limits::step_rows;
use crate::rollout::sampler::Draw;
use crate::rollout::scheduler::Step;
use crate::rollout::sequence::EngineSequence;
use crate::rollout::weights::EngineWeights;
use crate::torch;

/// The head as a model of one layer.
#[derive(Debug)]
pub(super) struct DraftHead<'a> {
    spec: ModelSpec,
    weights: EngineWeights<'a>,
    stage: Stage,
}

/// A row of the head in a decode step.
#[derive(Debug, Clone, Copy)]
struct HeadRow<'d> {
    sequence: usize,
    /// Number of its run in the step.
    run: usize,
    position: usize,
    /// As `kernels::next_tokens` takes it.
    token: i32,
    /// As `kernels::draft_input` takes it.
    before: i32,
    /// The draft that is drawn from it.
    draw: Option<&'d Draw<'d>>,
}

/// Inputs of R rows of the head, padded to a bucket.
#[derive(Debug)]
struct HeadInputs {
    from: Tensor,         // [R], as `kernels::next_tokens` takes them
    positions: Tensor,    // [R]
    context_lens: Tensor, // [R], 0: padding
    slots: Tensor,        // [R], -1: padding
    before: Tensor,       // [R], as `kernels::draft_input` takes them
    block_tables: Tensor, // [R, blocks]
    drawn: Option<DrawnDrafts>,
}

/// How rows are drawn from.
#[derive(Debug)]
struct DrawnDrafts {
    runs: Tensor,   // [R], -1: not drawn from
    places: Tensor, // [R], of drafts among sampled tokens; -1: the same
    lens: Tensor,   // [R], tokens so far; 0: the same
    sampling: Sampling,
}

impl HeadInputs {
    /// Packs rows whose drafts have `depth` others before them. The views are over `inputs`.
    fn pack(
        packing: &Packing,
        rows: &[HeadRow],
        words: &mut Words,
        (bucket, blocks): (usize, usize),
        place: &dyn Fn(usize) -> i32,
        inputs: &Tensor,
    ) -> Result<Self> {
        let slot = |row: &HeadRow| packing.sequences[row.sequence].slot(row.position, packing.block_size) as i32;
        let len = |row: &HeadRow| row.position as i32 + 1;
        let mut put = |of: &dyn Fn(&HeadRow) -> i32, rest: i32| {
            let range = words.put(bucket, rows.iter().map(of), rest)?;
            Ok::<_, Error>(inputs.narrow(0, range.start as i64, range.len() as i64))
        };
        let from = put(&|row| row.token, 0)?;
        let positions = put(&|row| row.position as i32, 0)?;
        let context_lens = put(&len, 0)?;
        let (slots, before) = (put(&slot, -1)?, put(&|row| row.before, 0)?);
        let drawn = match rows.iter().any(|row| row.draw.is_some()) {
            true => {
                let of_drawn = |number: i32, row: &HeadRow, rest: i32| if row.draw.is_some() { number } else { rest };
                let runs = put(&|row| of_drawn(row.run as i32, row, -1), -1)?;
                let places = put(&|row| of_drawn(place(row.run), row, -1), -1)?;
                let lens = put(&|row| of_drawn(len(row), row, 0), 0)?;
                let draws: Vec<Option<&Draw>> = rows.iter().map(|row| row.draw).collect();
                Some(DrawnDrafts { runs, places, lens, sampling: Sampling::pack(&draws, words, bucket, inputs)? })
            }
            false => None,
        };
        let block_tables = packing.tables_of(rows.iter().map(|row| row.sequence), words, (bucket, blocks), inputs)?;
        Ok(Self { from, positions, context_lens, slots, before, block_tables, drawn })
    }
}

impl<'a> DraftHead<'a> {
    /// None of a model without such a head.
    pub(super) fn new(spec: &ModelSpec, weights: &EngineWeights<'a>) -> Result<Option<Self>> {
        let (Some(draft), Some(own)) = (spec.draft_spec(), &weights.draft_head) else { return Ok(None) };
        let head = EngineWeights {
            embedding: weights.embedding.shallow_clone(),
            blocks: vec![own.try_map(&mut |tensor| Ok(tensor.shallow_clone()))?],
            draft_head: None,
            final_norm: own.norm(ParamName::FinalNorm).expect("the norm of the draft head").shallow_clone(),
            lm_head: weights.lm_head.shallow_clone(),
            stored: None,
            num_adapters: 0,
            version: weights.version,
            policy: PhantomData,
        };
        // Its rows begin with more than embeddings, and end with hidden states.
        let stage = Stage { index: 1, num_stages: 2, layers: 0..1 };
        Ok(Some(Self { spec: draft, weights: head, stage }))
    }

    /// The head over the memory of an engine's steps.
    fn network<'r>(&'r self, runner: &'r GpuRunner<'_>, tuning: Tuning, processing: Processing) -> DecoderNetwork<'r> {
        DecoderNetwork {
            spec: &self.spec,
            weights: &self.weights,
            stage: &self.stage,
            first_cache_layer: runner.spec.num_layers(),
            records_experts: false,
            ..runner.network(tuning, processing)
        }
    }

    /// Computes the head's rows of a step's prompts, for their keys and values, and keeps the model's newest hidden states, which the rows of the
    /// next tokens begin with.
    pub(super) fn follow_prompts(
        &self,
        runner: &GpuRunner<'_>,
        packing: &Packing,
        hidden: &Tensor, // [T, D]
    ) -> Result<()> {
        let states = runner.memory.states.expect("a model with a draft head has states");
        let Packing { step, sequences, block_size, .. } = *packing;
        let HeadWork { rows, before, kept } = HeadWork::new(step, sequences, states.num_kept_rows(), block_size);
        let (device, num_tokens) = (hidden.device(), step.num_tokens() as i64);
        let (own, places): (Vec<i64>, Vec<i64>) = kept.into_iter().unzip();
        let newest = hidden.f_index_select(0, &torch::tensor_on(&own, device)?)?;
        if !rows.token_ids.is_empty() {
            let ints = |values: &[i64]| Ok::<_, Error>(torch::tensor_on(values, device)?.f_to_kind(Kind::Int)?);
            let before: Vec<i64> =
                before.iter().map(|&place| if place < num_tokens { !place } else { place - num_tokens }).collect();
            let [ids, positions, slots] = [&rows.token_ids, &rows.positions, &rows.slots].map(|values| ints(values));
            let (ids, positions, slots) = (ids?, positions?, slots?);
            let tokens = head_tokens(&ids, &positions, &slots);
            let attention = PrefillAttention::of_head(packing, runner.memory.kv_cache, device)?;
            let network = self.network(runner, Tuning::First, Processing::default());
            let layer = network.first_cache_layer;
            let _ = network.draft_hidden(&tokens, (&ints(&before)?, hidden), &mut |_, spec, heads| {
                attention.attend(layer, spec, heads)
            })?;
        }
        let places = torch::tensor_on(&places, device)?;
        let _ = states.hidden_rows().f_index_copy_(0, &places, &newest)?;
        Ok(())
    }
}

/// Rows of the head, which has no states.
fn head_tokens<'t>(ids: &'t Tensor, positions: &'t Tensor, slots: &'t Tensor) -> StepTokens<'t> {
    StepTokens { ids, positions, slots, recorded: None, state_pages: slots, bounds: None, drafts: None }
}

impl GpuRunner<'_> {
    /// Has the head follow a decode step's tokens where `depth` is 0, and draw the drafts that have so many others before them.
    pub(super) fn draft_at(
        &mut self,
        head: &DraftHead<'_>,
        (step, draws, sequences): (&Step, &[Draw], &[EngineSequence]),
        depth: usize,
    ) -> Result<()> {
        let mut drafted = std::mem::take(&mut self.drafted);
        if depth == 0 {
            drafted.clear();
        }
        self.pending.resize(sequences.len(), 0);
        let packing = self.packing((step, draws, sequences), &drafted);
        let rows = self.head_rows(&packing, depth);
        for rows in rows.chunks(self.state.shape.seqs) {
            self.compute_head_rows(head, &packing, rows, depth)?;
        }
        let drawn = rows.iter().filter(|row| row.draw.is_some()).map(|row| (row.sequence, row.run));
        for (sequence, run) in drawn.collect::<Vec<_>>() {
            drafted.entry(sequence).or_default().push(self.state.shape.draft_place(depth, run));
        }
        self.drafted = drafted;
        Ok(())
    }

    /// Of the first depth the rows of the tokens that the steps before have given, from hidden states of the model; of others those of drafts.
    fn head_rows<'p>(&self, packing: &Packing<'p>, depth: usize) -> Vec<HeadRow<'p>> {
        let mut draws = packing.draws.iter();
        let mut rows = Vec::new();
        for (number, run) in packing.step.runs.iter().enumerate() {
            let has_draft = run.drafts.token_ids.len() > depth;
            let row = |position, token, before, draw| HeadRow {
                sequence: run.sequence,
                run: number,
                position,
                token,
                before,
                draw,
            };
            let newest = run.tokens.start;
            if depth > 0 {
                if has_draft {
                    let token = !self.state.shape.draft_place(depth - 1, number);
                    rows.push(row(newest + depth, token, !(number as i32), draws.next()));
                }
                continue;
            }
            let page = packing.sequences[run.sequence].state_page.expect("a sequence that runs has a page");
            let first_kept = page as i32 * packing.num_kept as i32;
            for (before, position) in (newest - run.num_stored..=newest).enumerate() {
                let draw = if position == newest && has_draft { draws.next() } else { None };
                let token = packing.token(run, position, &self.pending);
                rows.push(row(position, token, first_kept + before as i32, draw));
            }
        }
        rows
    }

    fn compute_head_rows(
        &mut self,
        head: &DraftHead<'_>,
        packing: &Packing,
        rows: &[HeadRow],
        depth: usize,
    ) -> Result<()> {
        let sizes = (step_rows(rows.len(), self.state.shape.seqs), self.state.shape.blocks);
        let shape = self.state.shape.clone();
        let ranks = self.ranks;
        let inputs = self.state.upload(&*ranks.all, |words, inputs| {
            HeadInputs::pack(packing, rows, words, sizes, &|run| shape.draft_place(depth, run), inputs)
        })?;
        let draws = inputs.drawn.is_some();
        let processing = if draws { Processing::of(packing) } else { Processing::default() };
        let key = GraphKey { rows: sizes.0, processing, of: Recorded::DraftHead { draws } };
        let mut graphs = std::mem::take(&mut self.state.graphs);
        let network = head.network(self, Tuning::Timed, processing);
        let plan = self.state.head_plan.as_ref().expect("a model with a draft head");
        let outcome = graphs.run(key, &self.state.stream, &mut || {
            let buffers = network.buffers;
            let mut ids = buffers.token_ids.narrow(0, 0, sizes.0 as i64);
            kernels::next_tokens(&inputs.from, &buffers.sampled, &mut ids)?;
            DecoderOp::AttentionPlan.run(|| plan.update(&inputs.context_lens, None))?;
            let tokens = head_tokens(&ids, &inputs.positions, &inputs.slots);
            let cache = network.memory.kv_cache.layer(network.first_cache_layer);
            let hidden = network.draft_hidden(
                &tokens,
                (&inputs.before, &buffers.ahead),
                &mut |_, _, StepHeads { q, sinks, .. }| {
                    let attended = buffers.attended([q.size()[0], q.size()[1] * q.size()[2]]); // [R, H hd]
                    let mut o = attended.view_as(q);
                    let (tables, lens) = (&inputs.block_tables, &inputs.context_lens);
                    DecoderOp::Attention.run(|| cache.attend(plan, q, tables, lens, sinks, &mut o))?;
                    Ok(attended)
                },
            )?;
            let Some(DrawnDrafts { runs, places, lens, sampling }) = &inputs.drawn else { return Ok(()) };
            kernels::keep_rows(&hidden, runs, &buffers.ahead)?;
            network.sample(&hidden, &DrawOutputs { lens, block_tables: &inputs.block_tables, sampling })?;
            kernels::keep_drafts(&buffers.sampled().0.narrow(0, 0, sizes.0 as i64), places, &buffers.sampled)
        });
        self.state.graphs = graphs;
        outcome
    }
}

impl DecoderNetwork<'_> {
    /// Hidden states of a draft head's rows: of each the embedding of its token and the hidden state before that, which is one that pages keep, or
    /// one of `own`. [R, D]
    fn draft_hidden(
        &self,
        tokens: &StepTokens,
        (before, own): (&Tensor, &Tensor), // [R] i32, [.., D]
        attend: &mut Attend,
    ) -> Result<Tensor> {
        let (rows, w) = (tokens.ids.size()[0], &self.weights.blocks[0]);
        let first = |buffer: &Tensor| buffer.narrow(0, 0, rows);
        let (mut x, mut joined, out) =
            (first(&self.buffers.x), first(&self.buffers.joined), first(&self.buffers.delta));
        self.embed_scaled(tokens.ids, &mut x)?;
        let states = self.memory.states.expect("a model with a draft head has states");
        let kept = states.hidden_rows();
        let norms = DRAFT_NORMS.map(|name| w.norm(name).expect("a norm of the draft head"));
        DecoderOp::Norm.run(|| {
            let inputs = DraftInputs { embedded: &x, kept: &kept, own, before };
            kernels::draft_input(inputs, norms, self.spec.norm(), &mut joined)
        })?;
        let projection = w.norm(ParamName::DraftProjection).expect("the projection of the draft head");
        self.product(DecoderOp::Qkv, &joined, projection, None, &out)?;
        DecoderOp::Norm.run(|| Ok(x.f_copy_(&out)?))?;
        self.hidden(tokens, attend)
    }

    /// Keeps the hidden states of a decode step's rows for a draft head, if there is one.
    pub(super) fn keep_hidden(
        &self,
        hidden: &Tensor,         /* [S, D] */
        places: Option<&Tensor>, /* [S] */
    ) -> Result<()> {
        let (Some(places), Some(states)) = (places, self.memory.states) else { return Ok(()) };
        kernels::keep_rows(hidden, places, &states.hidden_rows())
    }
}
