//! Which tokens the next step computes. A pure function of the requests and of what was sampled, so that every rank of a
//! tensor-parallel group takes the same decisions without talking.
//!
//! Sequences wait in order. A group is admitted whole: its prompt is prefilled once, in chunks if it is long, its full
//! blocks are shared by the completions and its last partial block is copied for each. A step either prefills or decodes;
//! prefill comes first. When blocks run out the sequence admitted last gives its own back, keeps its tokens, waits at
//! the front and is computed again.
//!
//! Steps may be scheduled before the results of earlier ones are known. A token that a step under way samples counts as the
//! sequence's own; what it is, the device knows. A sequence that turns out to have ended has then run for nothing: that
//! surplus token is dropped.

use std::collections::VecDeque;
use std::ops::Range;

use super::block_manager::BlockManager;
use super::sampler::Sampled;
use super::sequence::Sequence;
use super::stats::EngineStats;
use super::stop::StopRules;
use crate::error::{Error, Result};

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
            check_fits(&limits, &blocks, prompt.len())?;
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
            stats,
        })
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

    /// free + used == total, at any time; with no work left, all blocks are free.
    pub(super) fn check_integrity(&self) -> Result<()> {
        self.blocks.check_integrity(self.sequences.iter().map(|sequence| sequence.block_table.as_slice()))
    }

    /// Admits the front of the queue if slots and blocks are there. While others run, a group waits until all of it fits
    /// and every running sequence keeps a block to grow into; alone, it is cut to what fits.
    fn admit(&mut self) -> bool {
        let Some(members) = self.front() else { return false };
        let slots = self.limits.max_num_seqs - self.running.len();
        let alone = self.running.is_empty();
        let headroom = self.blocks.num_free().saturating_sub(self.running.len());
        let shared = self.shared_prefix(members.start);
        let total = self.blocks.blocks_for(self.sequences[members.start].len()) - shared.len();
        let (own, tail) = (total, self.tail_blocks(members.start));
        let fits = if total > headroom { 0 } else { (headroom - own).checked_div(tail).map_or(usize::MAX, |n| n + 1) };
        let count = members.len().min(slots).min(fits);
        if count == 0 || (count < members.len() && !alone) {
            return false;
        }
        self.allocate(members.start..members.start + count, &shared);
        true
    }

    /// The sequences at the front of the queue that need the same computation: one group's, if nothing is sampled yet. None
    /// while a token that it begins with is under way.
    fn front(&self) -> Option<Range<usize>> {
        let &first = self.waiting.front().filter(|&&first| self.sequences[first].num_pending == 0)?;
        let sequence = &self.sequences[first];
        let same = |&&index: &&usize| self.sequences[index].group == sequence.group && sequence.is_fresh();
        let count = self.waiting.iter().take_while(same).count().max(1);
        Some(first..first + count)
    }

    /// Full blocks of the prompt that a running completion of the same group has computed. At least one token is left to
    /// compute, for its logits.
    fn shared_prefix(&self, index: usize) -> Vec<u32> {
        let sequence = &self.sequences[index];
        let num_blocks = sequence.prompt_len.min(sequence.len() - 1) / self.limits.block_size;
        let holds = |&member: &usize| {
            let other = &self.sequences[member];
            !other.block_table.is_empty() && other.num_computed >= num_blocks * self.limits.block_size
        };
        let holder = self.members(sequence.group).find(holds);
        holder.map_or(Vec::new(), |holder| self.sequences[holder].block_table[..num_blocks].to_vec())
    }

    /// Blocks that each further member of a group needs: a copy of the prompt's last block, unless it is full.
    fn tail_blocks(&self, index: usize) -> usize {
        usize::from(!self.sequences[index].len().is_multiple_of(self.limits.block_size))
    }

    fn allocate(&mut self, members: Range<usize>, shared: &[u32]) {
        let (first, num_tokens) = (members.start, self.sequences[members.start].len());
        let num_full = num_tokens / self.limits.block_size;
        let mut table = self.blocks.share(shared);
        let mut granted = self.blocks.grow(&mut table, num_tokens);
        for index in first + 1..members.end {
            let mut copy = self.blocks.share(&table[..num_full]);
            granted &= self.blocks.grow(&mut copy, num_tokens);
            self.sequences[index].block_table = copy;
        }
        assert!(granted, "admission counted {} free blocks wrongly", self.blocks.num_free());
        self.sequences[first].block_table = table;
        self.sequences[first].num_computed = shared.len() * self.limits.block_size;
        self.stats.num_shared_tokens += self.sequences[first].num_computed + (members.len() - 1) * num_tokens;
        self.waiting.drain(..members.len());
        self.running.extend(members.clone());
        self.prefilling.push_back(members);
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
            } else {
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

    fn preempt_last(&mut self) {
        let Some(index) = self.running.pop() else { return };
        let sequence = &mut self.sequences[index];
        self.blocks.release(&mut sequence.block_table);
        sequence.num_computed = 0;
        self.waiting.push_front(index);
        self.stats.num_preemptions += 1;
    }
}

/// A sequence's last token is sampled, never fed, so its keys and values take no room.
fn check_fits(limits: &Limits, blocks: &BlockManager, prompt_len: usize) -> Result<()> {
    let refuse = |expected, got| Err(Error::InvalidArgument { op: "RolloutEngine::generate", expected, got });
    if prompt_len == 0 || prompt_len >= limits.max_model_length {
        let expected = format!("prompts of 1 to {} tokens (max_model_length - 1)", limits.max_model_length - 1);
        return refuse(expected, format!("one of {prompt_len}"));
    }
    let longest = (prompt_len + limits.max_completion_length).min(limits.max_model_length) - 1;
    let needed = blocks.blocks_for(longest);
    if needed > blocks.num_total() {
        let (total, block_size) = (blocks.num_total(), limits.block_size);
        let expected = format!("sequences of at most {total} KV blocks of {block_size} tokens; raise kv_cache_bytes");
        let completion = limits.max_completion_length;
        let got = format!("a prompt of {prompt_len} and a completion of up to {completion} tokens: {needed} blocks");
        return refuse(expected, got);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const ROOMY: Limits = Limits {
        num_blocks: 200,
        block_size: 4,
        max_num_seqs: 64,
        max_num_batched_tokens: 1000,
        max_completion_length: 20,
        max_model_length: 64,
    };
    const END: u32 = 0;

    /// Stands for the whole network: the keys and values of a token are the tokens up to it, and the next token is a
    /// function of them and of the sample.
    struct Model {
        cache: HashMap<(u32, usize), Vec<u32>>, // (block, offset)
        tokens: Vec<Vec<u32>>,                  // of each sequence, those included that the scheduler does not know yet
    }

    impl Model {
        fn run(&mut self, step: &Step, scheduler: &Scheduler, num_generations: usize) -> Vec<Sampled> {
            let block_size = scheduler.limits.block_size;
            let slot = |sequence: usize, position: usize| {
                (scheduler.sequences[sequence].block_table[position / block_size], position % block_size)
            };
            for run in &step.runs {
                let tokens = &self.tokens[run.sequence];
                for position in run.tokens.clone() {
                    self.cache.insert(slot(run.sequence, position), tokens[..=position].to_vec());
                }
                for position in 0..run.tokens.end {
                    let held = &self.cache[&slot(run.sequence, position)];
                    assert_eq!(held, &tokens[..=position], "sequence {} reads foreign keys", run.sequence);
                }
            }
            for &(from, to) in &step.copies {
                for offset in 0..block_size {
                    let held = self.cache.get(&(from, offset)).cloned();
                    held.map(|held| self.cache.insert((to, offset), held));
                }
            }
            let samples = step.runs.iter().flat_map(|run| run.samples.clone());
            let mut sample = |index: usize| {
                let sampled = next_token(&self.tokens[index], index % num_generations);
                self.tokens[index].push(sampled.token_id);
                sampled
            };
            samples.map(&mut sample).collect()
        }
    }

    fn next_token(tokens: &[u32], sample: usize) -> Sampled {
        let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        let hash = tokens.iter().fold(sample as u64 + 1, |hash, &token| mix(hash, token.into()));
        Sampled { token_id: (mix(hash, 1) % 12) as u32, logprob: 0.0 }
    }

    /// Completions of all sequences, and what it took, with `lag` steps under way when the next one is scheduled.
    fn simulate(
        limits: Limits,
        prompts: &[Vec<u32>],
        num_generations: usize,
        lag: usize,
    ) -> (Vec<Vec<u32>>, EngineStats) {
        let token_ids = prompts.iter().map(Vec::as_slice);
        let stats = EngineStats::default();
        let mut scheduler = Scheduler::new(limits, token_ids, num_generations, stats).unwrap();
        let rules = StopRules { eos_token_ids: &[END], stop: &[], decode: &|_| Ok(String::new()) };
        let tokens = scheduler.sequences.iter().map(|sequence| sequence.token_ids.clone()).collect();
        let mut model = Model { cache: HashMap::new(), tokens };
        let (mut complete, mut under_way) = (Vec::new(), VecDeque::new());
        while scheduler.has_work() {
            let step = scheduler.schedule();
            let is_idle = step.is_none();
            if let Some(step) = step {
                let num_tokens: usize = step.runs.iter().map(|run| run.tokens.len()).sum();
                let most = if step.is_decode { limits.max_num_seqs } else { limits.max_num_batched_tokens };
                assert!((1..=most).contains(&num_tokens) && scheduler.running.len() <= limits.max_num_seqs);
                scheduler.check_integrity().unwrap();
                let sampled = model.run(&step, &scheduler, num_generations);
                under_way.push_back((step, sampled));
            }
            if is_idle || under_way.len() > lag {
                let (step, sampled) = under_way.pop_front().expect("idle only while results are awaited");
                complete.extend(scheduler.postprocess(&step, &sampled, &rules).unwrap());
                scheduler.check_integrity().unwrap();
            }
        }
        assert_eq!(scheduler.blocks.num_free(), limits.num_blocks);
        complete.sort_unstable();
        assert_eq!(complete, (0..prompts.len()).collect::<Vec<_>>());
        (scheduler.sequences.iter().map(|sequence| sequence.completion().to_vec()).collect(), scheduler.stats)
    }

    fn prompts() -> Vec<Vec<u32>> {
        (1..12).map(|len| (0..len).map(|token| token % 5 + 1).collect()).collect()
    }

    #[test]
    fn no_limit_changes_what_is_sampled() {
        let prompts = prompts();
        let (expected, stats) = simulate(ROOMY, &prompts, 3, 0);
        assert_eq!(stats.num_preemptions, 0);
        let tight = [
            Limits { max_num_seqs: 1, ..ROOMY },
            Limits { max_num_seqs: 2, ..ROOMY },
            Limits { max_num_seqs: 7, ..ROOMY },
            Limits { max_num_batched_tokens: 3, ..ROOMY },
            Limits { num_blocks: 8, ..ROOMY },
            Limits { num_blocks: 8, max_num_seqs: 3, max_num_batched_tokens: 5, ..ROOMY },
            Limits { block_size: 1, num_blocks: 40, ..ROOMY },
            Limits { num_blocks: 20, ..ROOMY },
        ];
        for lag in 0..3 {
            for limits in [ROOMY].iter().chain(&tight) {
                assert_eq!(simulate(*limits, &prompts, 3, lag).0, expected, "{limits:?}, lag {lag}");
            }
            assert!(simulate(tight[7], &prompts, 3, lag).1.num_preemptions > 0);
        }
    }

    #[test]
    fn a_group_computes_its_prompt_once() {
        let prompt: Vec<u32> = (1..11).collect();
        let (_, stats) = simulate(ROOMY, std::slice::from_ref(&prompt), 8, 1);
        assert_eq!((stats.num_prefilled_tokens, stats.num_shared_tokens), (10, 70));
        let generated = simulate(ROOMY, &[prompt], 8, 0).0.iter().map(Vec::len).sum::<usize>();
        assert_eq!((stats.num_generated_tokens, stats.num_finished), (generated, 8));
    }

    #[test]
    fn what_can_never_fit_is_refused_with_the_numbers() {
        let refusal = |limits, len| {
            let prompt = vec![1; len];
            let stats = EngineStats::default();
            Scheduler::new(limits, [prompt.as_slice()].into_iter(), 1, stats).unwrap_err().to_string()
        };
        let message = refusal(Limits { num_blocks: 7, ..ROOMY }, 10);
        assert!(
            message.contains("at most 7 KV blocks") && message.contains("prompt of 10") && message.contains("8 blocks")
        );
        assert!(refusal(ROOMY, 64).contains("1 to 63 tokens"));
        assert!(refusal(ROOMY, 0).contains("one of 0"));
    }
}
