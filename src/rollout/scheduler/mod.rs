//! Which tokens the next step computes. A pure function of the requests and of what was sampled, so that every rank of a
//! tensor-parallel group takes the same decisions without talking.
//!
//! Sequences wait in order. A group is admitted whole: its prompt is prefilled once, in chunks if it is long, its full
//! blocks are shared by the completions and its last partial block is copied for each. A step either prefills or decodes;
//! prefill comes first. When blocks run out the sequence admitted last gives its own back, keeps its tokens, waits at
//! the front and is computed again.
//!
//! A rollout may leave sequences unfinished, whose blocks then stay where they are ([`Scheduler::into_kept`]). Those that the next
//! one goes on with run at once, without being computed again, and the others' blocks are free; one that goes on with none holds
//! them all, and takes them before any of its own when blocks run out.
//!
//! Steps may be scheduled before the results of earlier ones are known. A token that a step under way samples counts as the
//! sequence's own; what it is, the device knows. A sequence that turns out to have ended has then run for nothing: that
//! surplus token is dropped.

mod admission;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;

use super::block_manager::BlockManager;
use super::kept::KeptSequences;
use super::requests::Request;
use super::sampler::{Draw, Sampled};
use super::sequence::Sequence;
use super::stats::EngineStats;
use super::stop::StopRules;
use crate::error::Result;

/// Bounds on one step and on one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) num_blocks: usize,
    pub(super) block_size: usize,
    pub(super) max_num_seqs: usize,
    pub(super) max_num_batched_tokens: usize,
    /// Longest completion that may be asked of a sequence.
    pub(super) max_completion_length: usize,
    /// Longest prompt and completion together.
    pub(super) max_model_length: usize,
}

/// What one step computes.
#[derive(Debug, PartialEq)]
pub(super) struct Step {
    /// One token of every running sequence, rather than parts of prompts.
    pub(super) is_decode: bool,
    pub(super) runs: Vec<Run>,
    /// Blocks (from, to) to copy after the forward: a prompt's last partial block, for each completion but the first.
    pub(super) copies: Vec<(u32, u32)>,
}

/// Consecutive tokens of one sequence.
#[derive(Debug, PartialEq)]
pub(super) struct Run {
    pub(super) sequence: usize,
    pub(super) tokens: Range<usize>,
    /// Sequences that sample from the last row; none while a prompt is unfinished.
    pub(super) samples: Range<usize>,
}

#[derive(Debug)]
pub(super) struct Scheduler {
    limits: Limits,
    num_generations: usize,
    pub(super) sequences: Vec<Sequence>,
    waiting: VecDeque<usize>,
    prefilling: VecDeque<Range<usize>>, // sequences that share one computation, done through the first
    running: Vec<usize>,                // in order of admission, those prefilling included
    blocks: BlockManager,
    kept: KeptSequences, // of an earlier rollout, none of `sequences`
    pub(super) stats: EngineStats,
}

impl Scheduler {
    /// Queues `num_generations` sequences for each prompt; counting goes on from `stats`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a prompt that could not be finished even alone.
    pub(super) fn new<'a>(
        limits: Limits,
        prompts: impl Iterator<Item = &'a [u32]>,
        num_generations: usize,
        stats: EngineStats,
    ) -> Result<Self> {
        let blocks = BlockManager::new(limits.num_blocks, limits.block_size);
        let mut sequences = Vec::new();
        for (group, prompt) in prompts.enumerate() {
            admission::check_fits(&limits, &blocks, prompt.len())?;
            let max_len = (prompt.len() + limits.max_completion_length).min(limits.max_model_length);
            sequences.extend((0..num_generations).map(|_| Sequence::new(group, prompt, max_len)));
        }
        Ok(Self {
            limits,
            num_generations,
            waiting: (0..sequences.len()).collect(),
            sequences,
            prefilling: VecDeque::new(),
            running: Vec::new(),
            blocks,
            kept: KeptSequences::default(),
            stats,
        })
    }

    /// Holds what an earlier rollout kept; before the first step.
    pub(super) fn adopt(mut self, kept: KeptSequences) -> Self {
        self.blocks.adopt(kept.tables());
        self.kept = kept;
        self
    }

    /// What a later rollout may go on with: unfinished sequences, computed up to their last token, and what was held for others.
    pub(super) fn into_kept(self) -> KeptSequences {
        let mut kept = self.kept;
        for sequence in self.sequences {
            let is_computed = !sequence.is_fresh() && sequence.num_computed + 1 == sequence.len();
            if sequence.finish_reason.is_none() && is_computed && !sequence.block_table.is_empty() {
                kept.insert(sequence.token_ids, sequence.block_table);
            }
        }
        kept
    }

    /// Whether any sequence is unfinished.
    pub(super) fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty()
    }

    /// The sequences of a group.
    pub(super) fn members(&self, group: usize) -> Range<usize> {
        group * self.num_generations..(group + 1) * self.num_generations
    }

    /// Admits what fits, then picks the next step's tokens; `None` if everything left waits for the results of steps under
    /// way. Call only with work left.
    pub(super) fn schedule(&mut self) -> Option<Step> {
        while self.admit() {}
        let step = if self.prefilling.is_empty() { self.schedule_decode() } else { self.schedule_prefill() };
        for index in step.runs.iter().flat_map(|run| run.samples.clone()) {
            self.sequences[index].num_pending += 1;
        }
        self.stats.peak_blocks = self.stats.peak_blocks.max(self.blocks.num_used());
        self.stats.num_steps += usize::from(!step.runs.is_empty());
        (!step.runs.is_empty()).then_some(step)
    }

    /// One draw for each sequence that samples in `step`, in order.
    pub(super) fn draws<'a>(&'a self, step: &Step, requests: &[Request]) -> Vec<Draw<'a>> {
        let sampling = step.runs.iter().filter(|run| !run.samples.is_empty());
        let draws = sampling.enumerate().flat_map(|(row, run)| {
            run.samples.clone().map(move |index| {
                let sequence = &self.sequences[index];
                let sample = index - self.members(sequence.group).start;
                let Request { step, prompt_id, .. } = requests[sequence.group];
                Draw { row, step, prompt_id, sample, token_ids: &sequence.token_ids }
            })
        });
        draws.collect()
    }

    /// Appends what the oldest step under way sampled, in the order of its `samples`; returns the groups that are now
    /// complete.
    pub(super) fn postprocess(&mut self, step: &Step, sampled: &[Sampled], rules: &StopRules) -> Result<Vec<usize>> {
        let samplers = step.runs.iter().flat_map(|run| run.samples.clone());
        let mut complete = Vec::new();
        for (index, sampled) in samplers.zip(sampled) {
            let sequence = &mut self.sequences[index];
            sequence.num_pending -= 1;
            if sequence.finish_reason.is_some() {
                continue;
            }
            sequence.token_ids.push(sampled.token_id);
            sequence.rollout_logprobs.push(sampled.logprob);
            sequence.finish_reason = rules.finish_reason(sequence)?;
            self.stats.num_generated_tokens += 1;
            if sequence.finish_reason.is_some() {
                self.stats.num_finished += 1;
                self.blocks.release(&mut sequence.block_table);
                let group = sequence.group;
                let is_finished = |member: usize| self.sequences[member].finish_reason.is_some();
                complete.extend(self.members(group).all(is_finished).then_some(group));
            }
        }
        let is_unfinished = |&index: &usize| self.sequences[index].finish_reason.is_none();
        self.running.retain(is_unfinished);
        self.waiting.retain(is_unfinished); // preempted with its last token under way
        Ok(complete)
    }

    /// free + used == total, at any time; with no work left and nothing kept, all blocks are free.
    pub(super) fn check_integrity(&self) -> Result<()> {
        let tables = self.sequences.iter().map(|sequence| sequence.block_table.as_slice());
        self.blocks.check_integrity(tables.chain(self.kept.tables()))
    }

    /// The next parts of admitted prompts, up to `max_num_batched_tokens`.
    fn schedule_prefill(&mut self) -> Step {
        let mut step = Step { is_decode: false, runs: Vec::new(), copies: Vec::new() };
        let mut budget = self.limits.max_num_batched_tokens;
        while let Some(members) = self.prefilling.front().filter(|_| budget > 0).cloned() {
            let sequence = &mut self.sequences[members.start];
            let (start, num_tokens) = (sequence.num_computed, sequence.len());
            let tokens = start..num_tokens.min(start + budget);
            budget -= tokens.len();
            self.stats.num_prefilled_tokens += tokens.len();
            self.stats.num_recomputed_tokens += if sequence.is_fresh() { 0 } else { tokens.len() };
            sequence.num_computed = tokens.end;
            let is_done = tokens.end == num_tokens;
            let samples = if is_done { members.clone() } else { members.start..members.start };
            step.runs.push(Run { sequence: members.start, tokens, samples });
            if is_done {
                self.fork(members, &mut step.copies);
                self.prefilling.pop_front();
            }
        }
        step
    }

    /// The other members of a prefilled group take over its computed tokens; their tails are copied after the forward.
    fn fork(&mut self, members: Range<usize>, copies: &mut Vec<(u32, u32)>) {
        let (first, num_tokens) = (members.start, self.sequences[members.start].num_computed);
        let from = self.sequences[first].block_table.last().copied();
        for index in first + 1..members.end {
            let sequence = &mut self.sequences[index];
            sequence.num_computed = num_tokens;
            let to = sequence.block_table.last().copied();
            copies.extend(from.zip(to).filter(|(from, to)| from != to));
        }
    }

    /// The last token of every running sequence that is not at its length limit. Those admitted last make room.
    fn schedule_decode(&mut self) -> Step {
        let mut next = 0;
        while next < self.running.len() {
            let sequence = &mut self.sequences[self.running[next]];
            let num_tokens = sequence.num_tokens();
            if sequence.is_full() {
                next += 1;
            } else if self.blocks.grow(&mut sequence.block_table, num_tokens) {
                sequence.num_computed = num_tokens;
                next += 1;
            } else if !self.drop_kept() {
                self.preempt_last();
            }
        }
        let last_token = |&index: &usize| {
            let num_tokens = self.sequences[index].num_tokens();
            Run { sequence: index, tokens: num_tokens - 1..num_tokens, samples: index..index + 1 }
        };
        let growing = self.running.iter().filter(|&&index| !self.sequences[index].is_full());
        Step { is_decode: true, runs: growing.map(last_token).collect(), copies: Vec::new() }
    }

    /// Frees the blocks of one sequence that is kept for a later rollout, if there is one.
    fn drop_kept(&mut self) -> bool {
        let table = self.kept.take_any();
        table.map(|mut table| self.blocks.release(&mut table)).is_some()
    }

    fn preempt_last(&mut self) {
        let Some(index) = self.running.pop() else { return };
        let sequence = &mut self.sequences[index];
        self.blocks.release(&mut sequence.block_table);
        sequence.num_computed = 0;
        self.waiting.push_front(index);
        self.stats.num_preemptions += 1;
    }
}
