//! Draft tokens of the model's own draft head in decode steps. The head's work is captured in CUDA graphs like the model's. The draft tokens of a
//! step are computed one after the other, without the host: they stay on the device, where the step's rows read them, and are copied to the host with
//! the sampled tokens.

use tch::Tensor;

use super::draft_head::{DraftHead, head_tokens};
use super::graphs::{GraphKey, GraphedStep};
use super::inputs::{Packing, Sampling, Words};
use super::network::StepHeads;
use super::op::DecoderOp;
use super::processing::Processing;
use super::runner::GpuRunner;
use super::sampling::DrawOutputs;
use crate::cuda::Tuning;
use crate::cuda::kernels;
use crate::error::{Error, Result};
use crate::rollout::limits::step_rows;
use crate::rollout::sampler::Draw;
use crate::rollout::scheduler::Step;
use crate::rollout::sequence::EngineSequence;

/// An input row of the draft head in a decode step.
#[derive(Debug, Clone, Copy)]
struct HeadRow<'d> {
    sequence: usize,
    /// Index of the sequence's run in the step.
    run: usize,
    position: usize,
    /// The token's id, or where the token is stored, in the format of `kernels::next_tokens`.
    token: i32,
    /// Where the hidden state at the token before this one is stored, in the format of `kernels::draft_input`.
    before: i32,
    /// How to sample a draft token from the row's logits; `None` if none is sampled.
    draw: Option<&'d Draw<'d>>,
}

/// Inputs of R rows of the draft head, padded to a bucket.
#[derive(Debug)]
struct HeadInputs {
    from: Tensor,         // [R], in the format of `kernels::next_tokens`
    positions: Tensor,    // [R]
    context_lens: Tensor, // [R], 0: padding
    slots: Tensor,        // [R], -1: padding
    before: Tensor,       // [R], in the format of `kernels::draft_input`
    block_tables: Tensor, // [R, blocks]
    drawn: Option<DrawnDrafts>,
}

/// Inputs for sampling draft tokens from the logits of R rows of the draft head.
#[derive(Debug)]
struct DrawnDrafts {
    runs: Tensor,   // [R], index of the row's run; -1: no draft token is sampled from the row
    places: Tensor, // [R], where the draft token is stored in `DecodeBuffers::sampled`; -1: none is sampled
    lens: Tensor,   // [R], number of tokens so far; 0: none is sampled
    sampling: Sampling,
}

impl HeadInputs {
    /// Packs the rows of draft token number `depth`. The tensors are views of `inputs`.
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

impl GpuRunner<'_> {
    /// Runs the draft head once, to sample draft token number `depth` (from 0) of each sequence. At depth 0 its inputs are the tokens that earlier
    /// steps added, with the model's hidden states; at greater depths they are the previous draft tokens.
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

    /// The draft head's rows for draft token number `depth`. At depth 0 they are the tokens that earlier steps added, with the model's hidden states;
    /// at greater depths they are the previous draft tokens, with the draft head's own hidden states.
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
        let key = GraphKey { rows: sizes.0, processing, of: GraphedStep::DraftHead { draws } };
        let mut graphs = std::mem::take(&mut self.state.graphs);
        let network = head.network(self.network(Tuning::Timed, processing));
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
