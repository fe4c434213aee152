//! Decides which tokens the next step computes. The scheduler is a pure function of the requests, of the times of their submission and of the sampled
//! tokens. So every rank of a tensor-parallel group makes the same decisions without communication.
//!
//! Requests may be submitted between any two steps. Sequences wait in order. A group is admitted as a whole: its prompt is prefilled once, in chunks
//! if it is long; the completions share its full blocks, and each gets a copy of its last partial block. A step either prefills or decodes. Prefill
//! has priority, but between the chunks of a long prompt the other sequences are decoded for a few steps. If blocks run out, the sequence admitted
//! last is preempted: it releases its blocks, keeps its tokens, waits at the front of the queue and is computed again.
//!
//! A rollout may leave sequences unfinished; their blocks can stay in the cache ([`Scheduler::into_kept`]). Sequences that the next rollout continues
//! then run at once, without being computed again, and the blocks of the others are freed. A rollout that continues none leaves them in place, but
//! takes their blocks before its own sequences' if blocks run short.
//!
//! With tools, a sequence that ends a turn leaves its blocks to its next turn ([`Scheduler::keep_turns`]), as long as no other sequence needs them.
//!
//! Steps may be scheduled before the results of earlier ones are known. A token that a step under way samples already counts as part of the sequence;
//! only the device knows its value. If the sequence turns out to have ended, the surplus token is dropped. Steps with draft tokens are scheduled only
//! with nothing under way, and nothing is scheduled before their results.

mod admission;
mod drafting;
mod removal;
mod results;
mod states;
mod step;
mod steps;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::block_manager::BlockManager;
use super::kept::{KeptPlace, KeptSequences};
use super::limits::StepLimits;
use super::request::{Event, Request, RequestId};
use super::sampler::{Draw, sampling_key};
use super::sequence::{EngineSequence, QueuePriority};
use super::speculation::Speculator;
use super::stats::EngineStats;
use super::stop::CompletionLimit;
use crate::data::Grammar;
use crate::error::Result;
use states::StateSlots;
pub(super) use step::{Step, TokenRun};

/// The sequences of one request and the first words of their random keys.
#[derive(Debug)]
struct Group {
    members: Range<usize>,
    prompt_id: u64,
    step: u64,
    first_sample: usize,
    is_removed: bool,
}

#[derive(Debug)]
pub(super) struct Scheduler {
    pub(super) limits: StepLimits,
    completion_limit: Option<CompletionLimit>,
    groups: Vec<Group>, // by request number, starting at `num_dropped`
    num_dropped: usize, // number of requests deleted from the front
    pub(super) sequences: Vec<EngineSequence>,
    waiting: VecDeque<usize>,           // by priority
    prefilling: VecDeque<Range<usize>>, // sequences that share one prefill, which is computed through the first of them
    running: Vec<usize>,                // in order of admission, including those that prefill
    num_decodes_due: usize,             // decode steps before the next chunk of a prompt
    blocks: BlockManager,
    states: StateSlots,
    kept: KeptSequences, // from an earlier rollout; not among `sequences`
    has_unclaimed: bool, // whether the rollout that may continue `kept` has begun
    keeps_turns: bool,
    between_turns: KeptSequences, // of sequences that ended a turn, for their next turn
    pub(super) speculator: Option<Speculator>,
    events: Vec<Event>,
    pub(super) stats: EngineStats,
}

impl Scheduler {
    /// Creates a scheduler that holds the sequences `kept` by an earlier rollout; counters continue from `stats`.
    pub(super) fn new(limits: StepLimits, kept: KeptSequences, stats: EngineStats) -> Self {
        let mut blocks = BlockManager::new(limits.num_blocks, limits.block_size);
        blocks.adopt(kept.tables());
        let mut states = StateSlots::new(if limits.has_states { limits.max_num_seqs } else { 0 });
        states.adopt(kept.state_pages());
        Self {
            limits,
            completion_limit: None,
            groups: Vec::new(),
            num_dropped: 0,
            sequences: Vec::new(),
            waiting: VecDeque::new(),
            prefilling: VecDeque::new(),
            running: Vec::new(),
            num_decodes_due: 0,
            blocks,
            states,
            kept,
            has_unclaimed: false,
            keeps_turns: false,
            between_turns: KeptSequences::default(),
            speculator: None,
            events: Vec::new(),
            stats,
        }
    }

    /// Returns a scheduler that also limits the length of completions by `limit`.
    pub(super) fn with_completion_limit(self, limit: Option<CompletionLimit>) -> Self {
        Self { completion_limit: limit, ..self }
    }

    /// Returns a scheduler that uses the draft tokens of `speculator`, if given.
    pub(super) fn with_speculator(self, speculator: Option<Speculator>) -> Self {
        Self { speculator, ..self }
    }

    /// Queues a sequence for each completion of a checked `request`, behind waiting sequences of the same priority. `grammar` is compiled from the
    /// request's structured output. A sequence whose KV cache blocks an earlier rollout kept does not wait: it starts running if a slot is free.
    pub(super) fn submit(&mut self, request: Request, grammar: Option<&Arc<Grammar>>) -> RequestId {
        let Request { prompt_id, token_ids, first_step, first_sample, params, begun, adapter } = request;
        let (group, first) = (self.num_dropped + self.groups.len(), self.sequences.len());
        for sample in 0..params.num_generations {
            let key = sampling_key(params.seed, first_step, prompt_id, first_sample + sample);
            let limit = self.completion_limit.as_ref().map_or(usize::MAX, |limit| limit.of(key));
            let max_len = (token_ids.len() + limit.min(params.max_completion_length)).min(self.limits.max_model_length);
            let mut sequence = EngineSequence::new(group, Arc::clone(&params), &token_ids, max_len);
            sequence.adapter = adapter;
            grammar.into_iter().for_each(|grammar| sequence.follow(grammar));
            self.sequences.push(sequence);
        }
        let members = first..self.sequences.len();
        self.groups.push(Group {
            members: members.clone(),
            prompt_id,
            step: first_step,
            first_sample,
            is_removed: false,
        });
        if let Some(speculator) = &mut self.speculator {
            speculator.begin(group, &token_ids);
        }
        self.queue(group, begun);
        members.for_each(|index| self.observe(index));
        RequestId(group)
    }

    /// The sequences that a later rollout may continue: unfinished ones, computed up to their last token, and those kept from earlier rollouts.
    pub(super) fn into_kept(mut self) -> KeptSequences {
        self.drop_unclaimed();
        let mut kept = self.kept;
        kept.extend(self.between_turns);
        for sequence in self.sequences {
            let is_computed = !sequence.is_fresh() && sequence.num_computed + 1 == sequence.len();
            let is_base = sequence.adapter.is_none(); // sequences are found by their tokens only
            if sequence.finish_reason.is_none() && is_computed && is_base && !sequence.block_table.is_empty() {
                let EngineSequence { block_table, state_page, num_computed, .. } = sequence;
                let place = KeptPlace { block_table, state_page, num_computed };
                kept.insert(sequence.token_ids, place);
            }
        }
        kept
    }

    /// Whether any sequence is unfinished.
    pub(super) fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty()
    }

    /// Whether a running sequence with structured output would be scheduled before its last token is known. The next token cannot be sampled without
    /// the last one.
    pub(super) fn runs_ahead_of_structure(&self) -> bool {
        (self.limits.num_stages == 1 || self.limits.runs_ahead)
            && self.running.iter().any(|&index| self.sequences[index].allowed().is_some())
    }

    /// The sequences of a request.
    pub(super) fn members(&self, group: usize) -> Range<usize> {
        self.group(group).members.clone()
    }

    fn group(&self, group: usize) -> &Group {
        &self.groups[group - self.num_dropped]
    }

    /// Whether there are events that have not been taken.
    pub(super) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// The events since the last call, in order.
    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Admits what fits, then picks the next step's tokens; `None` if all remaining work waits for results of steps under way. Call it only with work
    /// left.
    pub(super) fn schedule(&mut self) -> Option<Step> {
        self.admit_all();
        let mut step = match self.prefilling.is_empty() {
            true => self.schedule_decode(),
            false => self.schedule_between_chunks().unwrap_or_else(|| self.schedule_prefill()),
        };
        if self.prefilling.is_empty() {
            self.add_drafts(&mut step);
        }
        for index in step.runs.iter().flat_map(|run| run.samples.clone()) {
            self.sequences[index].num_pending += 1;
            self.sequences[index].last_step = self.stats.num_steps;
        }
        self.stats.peak_blocks = self.stats.peak_blocks.max(self.blocks.num_used());
        self.stats.num_steps += usize::from(!step.runs.is_empty());
        self.stats.num_waited_steps += usize::from(!step.runs.is_empty() && step.waited);
        (!step.runs.is_empty()).then_some(step)
    }

    fn admit_all(&mut self) {
        self.drop_unclaimed();
        while self.admit() {}
    }

    /// The draws of `step` in order: one for each sampling sequence and one for each draft token.
    pub(super) fn draws<'a>(&'a self, step: &'a Step) -> Vec<Draw<'a>> {
        let mut next_row = 0;
        let draws = step.runs.iter().flat_map(|run| {
            let first_row = next_row;
            next_row += run.num_sampled_rows();
            let rows = 0..run.num_sampled_rows();
            rows.flat_map(move |row| {
                run.samples.clone().map(move |index| (first_row + row, &run.drafts.token_ids[..row], index))
            })
        });
        let draws = draws.map(|(row, drafts, index)| {
            let sequence = &self.sequences[index];
            let Group { members, prompt_id, step, first_sample, .. } = self.group(sequence.group);
            let (sample, token_ids) = (first_sample + index - members.start, &sequence.token_ids);
            let (params, allowed) = (&*sequence.params, sequence.allowed());
            Draw { row, params, step: *step, prompt_id: *prompt_id, sample, token_ids, drafts, allowed }
        });
        draws.collect()
    }

    /// Checks that free + used == total, at any time; with no work left and nothing kept, all blocks must be free.
    pub(super) fn check_integrity(&self) -> Result<()> {
        let tables = self.sequences.iter().map(|sequence| sequence.block_table.as_slice());
        let pages = self.sequences.iter().filter_map(|sequence| sequence.state_page);
        self.states.check_integrity(pages.chain(self.kept.state_pages()).chain(self.between_turns.state_pages()))?;
        self.blocks.check_integrity(tables.chain(self.kept.tables()).chain(self.between_turns.tables()))
    }

    /// Frees the blocks and the state page of a sequence.
    fn release(&mut self, index: usize) {
        let EngineSequence { block_table, state_page, .. } = &mut self.sequences[index];
        self.blocks.release(block_table);
        self.states.give_back(state_page);
    }

    /// Frees the sequences kept from an earlier rollout that the current one did not claim: no one will claim them any more. Such sequences remain if
    /// a training step was undone, or if there are more of them than can run at once.
    pub(super) fn drop_unclaimed(&mut self) {
        if std::mem::take(&mut self.has_unclaimed) {
            while let Some(place) = self.kept.take_any() {
                self.free(place);
            }
        }
    }

    fn free(&mut self, KeptPlace { mut block_table, mut state_page, .. }: KeptPlace) {
        self.blocks.release(&mut block_table);
        self.states.give_back(&mut state_page);
    }

    /// Frees one sequence that is kept for a later rollout or for a next turn. Returns whether there was one.
    fn drop_kept(&mut self) -> bool {
        let kept = self.kept.take_any().or_else(|| self.between_turns.take_any());
        kept.map(|place| self.free(place)).is_some()
    }

    fn preempt_last(&mut self) {
        let Some(index) = self.running.pop() else { return };
        let (request, sample) = self.place(index);
        self.release(index);
        let sequence = &mut self.sequences[index];
        (sequence.num_computed, sequence.num_in_state) = (0, 0);
        sequence.num_known = if sequence.is_fresh() { 0 } else { usize::MAX };
        sequence.turn = QueuePriority::First;
        self.waiting.push_front(index);
        self.stats.num_preemptions += 1;
        self.events.push(Event::Preempted { request, sample });
    }
}
