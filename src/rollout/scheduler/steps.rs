//! Chooses the tokens of the next step: parts of prompts, or one token of every running sequence.

use std::ops::Range;

use super::{Scheduler, Step, TokenRun};
use crate::rollout::sequence::EngineSequence;

/// Number of decode steps between two chunks of a prompt that is longer than `max_num_batched_tokens`. For a 7B model at 100,000 tokens these decode
/// steps take a tenth of a chunk's time.
const DECODES_BETWEEN_CHUNKS: usize = 4;

impl Scheduler {
    /// Schedules the next parts of admitted prompts, up to `max_num_batched_tokens`.
    pub(super) fn schedule_prefill(&mut self) -> Step {
        let mut step = Step::new(false, Vec::new());
        let mut budget = self.limits.max_num_batched_tokens;
        self.num_decodes_due = 0;
        let share = self.prefill_share();
        let alternates = self.limits.num_stages == 1 && self.speculator.is_none(); // steps with draft tokens must run without others under way
        while let Some(members) = self.prefilling.front().filter(|_| budget > 0).cloned() {
            if self.limits.max_num_batched_tokens - budget >= share {
                break; // leave the rest for the next stage's step
            }
            let sequence = &mut self.sequences[members.start];
            let (start, num_tokens) = (sequence.num_computed, sequence.len());
            let tokens = start..num_tokens.min(start + budget);
            budget -= tokens.len();
            self.stats.num_prefilled_tokens += tokens.len();
            self.stats.num_recomputed_tokens += sequence.num_known.min(tokens.end).saturating_sub(start);
            sequence.num_computed = tokens.end;
            sequence.num_in_state = tokens.end;
            let is_done = tokens.end == num_tokens;
            if num_tokens - start > self.limits.max_num_batched_tokens && alternates {
                self.num_decodes_due = DECODES_BETWEEN_CHUNKS;
            }
            let samples = if is_done { members.clone() } else { members.start..members.start };
            step.runs.push(TokenRun::new(members.start, tokens, samples));
            if is_done {
                self.fork(members, &mut step);
                self.prefilling.pop_front();
            }
        }
        step
    }

    /// Lets the other members of a prefilled group share its computed tokens; partial last blocks are copied after the forward pass.
    fn fork(&mut self, members: Range<usize>, step: &mut Step) {
        let (first, num_tokens) = (members.start, self.sequences[members.start].num_computed);
        let EngineSequence { ref block_table, state_page, .. } = self.sequences[first];
        let from = block_table.last().copied();
        for index in first + 1..members.end {
            let sequence = &mut self.sequences[index];
            sequence.num_computed = num_tokens;
            sequence.num_in_state = num_tokens;
            let to = sequence.block_table.last().copied();
            step.copies.extend(from.zip(to).filter(|(from, to)| from != to));
            step.state_copies.extend(state_page.zip(sequence.state_page));
        }
    }

    /// Number of tokens after which a step takes no further prompt. With several pipeline stages, all tokens to prefill are divided equally among the
    /// stages' steps, but a step takes at least a minimum.
    fn prefill_share(&self) -> usize {
        let left = |members: &Range<usize>| {
            let sequence = &self.sequences[members.start];
            sequence.len() - sequence.num_computed
        };
        match self.limits.num_stages {
            1 => usize::MAX,
            num_stages => {
                let few = self.limits.max_num_batched_tokens / (4 * num_stages);
                self.prefilling.iter().map(left).sum::<usize>().div_ceil(num_stages).max(few)
            }
        }
    }

    /// Schedules the last token of every running sequence that is not at its length limit. With several pipeline stages, a step has an equal share of
    /// these sequences, and no sequence that is in a step under way. If blocks run short, the sequences admitted last are preempted.
    pub(super) fn schedule_decode(&mut self) -> Step {
        self.decode_step(&|_| false)
    }

    /// Schedules a decode step of the sequences whose prompts are computed, if one is due between the chunks of a long prompt. It preempts no
    /// sequence.
    pub(super) fn schedule_between_chunks(&mut self) -> Option<Step> {
        self.num_decodes_due = self.num_decodes_due.checked_sub(1)?;
        let prefilling = self.prefilling.clone();
        let step = self.decode_step(&|index| prefilling.iter().any(|members| members.contains(&index)));
        (!step.runs.is_empty()).then_some(step)
    }

    fn decode_step(&mut self, is_prefilling: &dyn Fn(usize) -> bool) -> Step {
        let most = self.running.len().div_ceil(self.limits.num_stages);
        let (mut next, mut taken) = (0, Vec::new());
        while next < self.running.len() && taken.len() < most {
            let index = self.running[next];
            let sequence = &mut self.sequences[index];
            let num_tokens = sequence.num_tokens();
            let is_near = self.stats.num_steps - sequence.last_step < self.limits.num_stages;
            let is_on_its_way = sequence.num_pending > 0 && (is_near || !self.limits.runs_ahead);
            let is_under_way = self.limits.num_stages > 1 && is_on_its_way;
            if sequence.is_full() || is_under_way || is_prefilling(index) {
                next += 1;
            } else if self.blocks.grow(&mut sequence.block_table, num_tokens) {
                sequence.num_computed = num_tokens;
                taken.push(index);
                next += 1;
            } else if self.drop_kept() {
                // Try again with the blocks that were freed.
            } else if self.prefilling.is_empty() {
                self.preempt_last();
            } else {
                next += 1;
            }
        }
        let last_token = |index: usize| {
            let sequence = &mut self.sequences[index];
            let tokens = sequence.num_tokens() - 1..sequence.num_tokens();
            let num_stored = tokens.start - std::mem::replace(&mut sequence.num_in_state, tokens.end);
            let num_stored = if self.limits.has_states { num_stored } else { 0 };
            TokenRun { num_stored, ..TokenRun::new(index, tokens, index..index + 1) }
        };
        let runs = taken.into_iter().map(last_token).collect();
        Step::new(true, runs)
    }
}
