//! Which tokens the next step computes. A pure function of the requests, of when they were submitted and of what was sampled, so
//! that every rank of a tensor-parallel group takes the same decisions without talking.
//!
//! Requests may be submitted between any two steps. Sequences wait in order. A group is admitted whole: its prompt is prefilled once, in chunks if it is long, its full
//! blocks are shared by the completions and its last partial block is copied for each. A step either prefills or decodes;
//! prefill comes first, but between the chunks of a long prompt the others are decoded for a few steps. When blocks run out the sequence admitted last gives its own back, keeps its tokens, waits at
//! the front and is computed again.
//!
//! A rollout may leave sequences unfinished, whose blocks then stay where they are ([`Scheduler::into_kept`]). Those that the next
//! one goes on with run at once, without being computed again, and the others' blocks are free; one that goes on with none holds
//! them all, and takes them before any of its own when blocks run out.
//!
//! With tools, a sequence that ends a turn leaves its blocks to the next one ([`Scheduler::keep_turns`]), as long as nobody else needs them.
//!
//! Steps may be scheduled before the results of earlier ones are known. A token that a step under way samples counts as the
//! sequence's own; what it is, the device knows. A sequence that turns out to have ended has then run for nothing: that
//! surplus token is dropped. Steps with drafts are scheduled with nothing under way, and nothing is scheduled before their results.

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

/// One request's sequences and the first words of their random keys.
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
    groups: Vec<Group>, // by request, from `num_dropped` on
    num_dropped: usize, // requests that are forgotten
    pub(super) sequences: Vec<EngineSequence>,
    waiting: VecDeque<usize>,           // by turn
    prefilling: VecDeque<Range<usize>>, // sequences that share one computation, done through the first
    running: Vec<usize>,                // in order of admission, those prefilling included
    num_decodes_due: usize,             // before the next chunk of a prompt
    blocks: BlockManager,
    states: StateSlots,
    kept: KeptSequences, // of an earlier rollout, none of `sequences`
    has_unclaimed: bool, // of those: the rollout has come that they were kept for
    keeps_turns: bool,
    between_turns: KeptSequences, // of sequences that ended a turn, for the next one
    pub(super) speculator: Option<Speculator>,
    events: Vec<Event>,
    pub(super) stats: EngineStats,
}

impl Scheduler {
    /// Holds what an earlier rollout `kept`; counting goes on from `stats`.
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

    /// Bounds completions by `limit`, too.
    pub(super) fn with_completion_limit(self, limit: Option<CompletionLimit>) -> Self {
        Self { completion_limit: limit, ..self }
    }

    /// Drafts tokens.
    pub(super) fn with_speculator(self, speculator: Option<Speculator>) -> Self {
        Self { speculator, ..self }
    }

    /// Queues a sequence for each completion of `request`, which has been checked, behind those that wait. `grammar` is that of its
    /// structure. Sequences that are kept run at once.
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

    /// Sequences that a later rollout may continue: unfinished ones, computed up to their last token, and those that were held
    /// for others.
    pub(super) fn into_kept(mut self) -> KeptSequences {
        self.drop_unclaimed();
        let mut kept = self.kept;
        kept.extend(self.between_turns);
        for sequence in self.sequences {
            let is_computed = !sequence.is_fresh() && sequence.num_computed + 1 == sequence.len();
            let is_base = sequence.adapter.is_none(); // sequences are known by their tokens alone
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

    /// Whether a sequence that runs is held to a structure, and would be scheduled before its last token is known, which its next one
    /// cannot be drawn without.
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

    /// Whether anything has happened that was not taken yet.
    pub(super) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// The events since the last call, in order.
    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Admits what fits, then picks the next step's tokens; `None` if everything left waits for the results of steps under
    /// way. Call only with work left.
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

    /// One draw for each sequence that samples in `step`, and one for each draft, in order.
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

    /// free + used == total, at any time; with no work left and nothing kept, all blocks are free.
    pub(super) fn check_integrity(&self) -> Result<()> {
        let tables = self.sequences.iter().map(|sequence| sequence.block_table.as_slice());
        let pages = self.sequences.iter().filter_map(|sequence| sequence.state_page);
        self.states.check_integrity(pages.chain(self.kept.state_pages()).chain(self.between_turns.state_pages()))?;
        self.blocks.check_integrity(tables.chain(self.kept.tables()).chain(self.between_turns.tables()))
    }

    /// Frees the memory of a sequence.
    fn release(&mut self, index: usize) {
        let EngineSequence { block_table, state_page, .. } = &mut self.sequences[index];
        self.blocks.release(block_table);
        self.states.give_back(state_page);
    }

    /// Frees what is kept of an earlier rollout once the one has begun that goes on with it: nobody will ask for what it has not
    /// claimed. A step that was taken back leaves such sequences, or one with more of them than run at once.
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

    /// Frees the memory of one sequence that is kept for a later rollout, or left to a next turn, if there is one.
    fn drop_kept(&mut self) -> bool {
        let kept = self.kept.take_any().or_else(|| self.between_turns.take_any());
        kept.map(|place| self.free(place)).is_some()
    }

    fn preempt_last(&mut self) {
        let Some(index) = self.running.pop() else { return };
        let (request, sample) = self.place(index);
        self.release(index);
        let sequence = &mut self.sequences[index];
        sequence.num_computed = 0;
        sequence.num_known = if sequence.is_fresh() { 0 } else { usize::MAX };
        sequence.turn = QueuePriority::First;
        self.waiting.push_front(index);
        self.stats.num_preemptions += 1;
        self.events.push(Event::Preempted { request, sample });
    }
}
