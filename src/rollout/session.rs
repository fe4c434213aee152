//! An engine that is stepped: requests come at any time, each step computes for all of them.

use std::collections::VecDeque;

use super::engine::{Engine, ProgressCallback, RolloutEngine};
use super::gpu::GpuRunner;
use super::kept::KeptSequences;
use super::limits::StepLimits;
use super::pipeline::PipelineRunner;
use super::request::{Event, ModelIds, Request, RequestId};
use super::runner::{HostRunner, Runner};
use super::scheduler::{Scheduler, Step, TokenRun};
use super::sequence::EngineSequence;
use super::speculation::Speculator;
use super::state_pages::SequenceMemory;
use super::stats::EngineStats;
use super::step_clock::StepClock;
use super::stop::StopRules;
use crate::data::{GrammarCompiler, Tokenizer};
use crate::error::{Error, Result};
use crate::phase::{self, Phase};
use crate::ranks::Collective;
use crate::types::Trajectory;

/// Removed requests that are worth waiting for the steps under way to take them off the scheduler's list.
const MANY_REMOVED: usize = 256;

/// How busy a session is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SessionLoad {
    /// Completions that have KV blocks.
    pub num_running: usize,
    /// Completions that wait for blocks or a slot.
    pub num_waiting: usize,
    /// KV blocks that no sequence reads.
    pub num_free_blocks: usize,
    /// KV blocks in all.
    pub num_blocks: usize,
    /// Times that a completion gave its blocks to others.
    pub num_preemptions: usize,
    /// Draft tokens that were computed.
    pub num_draft_tokens: usize,
    /// Of those, the ones that were drawn.
    pub num_accepted_tokens: usize,
}

/// Requests under way on an engine that is awake. Every rank of the engine makes the same calls in the same order.
///
/// ```no_run
/// # use colo_grpo::{Result, RolloutEngine, Trajectory, engine::{Event, Request}};
/// fn serve(engine: &mut RolloutEngine<'_>, requests: Vec<Request>) -> Result<Vec<Trajectory>> {
///     let mut session = engine.session()?;
///     for request in requests {
///         session.submit(request)?;
///     }
///     let mut completions = Vec::new();
///     while session.has_work() {
///         for event in session.step()? {
///             if let Event::Complete { request } = event {
///                 completions.extend(session.completions(request)?);
///             }
///         }
///     }
///     session.close()?;
///     Ok(completions)
/// }
/// ```
pub struct Session<'r> {
    scheduler: Scheduler,
    runner: Box<dyn Runner + 'r>,
    under_way: VecDeque<Step>, // launched, the oldest first
    ids: ModelIds,
    num_adapters: usize,
    tokenizer: &'r Tokenizer,
    grammars: &'r GrammarCompiler,
    eos_token_ids: &'r [u32],
    stats: &'r mut EngineStats,
    progress: Option<&'r mut (dyn FnMut(&EngineStats) + 'r)>,
    kept: Option<&'r mut KeptSequences>,
    speculator: Option<&'r mut Option<Speculator>>, // what the engine keeps of it
    all: &'r dyn Collective,
    clock: StepClock,
    has_draft_head: bool,
}

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("scheduler", &self.scheduler).finish_non_exhaustive()
    }
}

impl<'r> Session<'r> {
    pub(super) fn open<'a>(rollout: &'r mut RolloutEngine<'a>) -> Result<Self> {
        let limits = rollout.limits();
        let RolloutEngine { engine, weights, stats, progress } = rollout;
        let keeps_sequences = engine.keeps_sequences;
        let Engine {
            spec,
            own,
            tokenizer,
            grammars,
            options,
            ranks,
            ropes,
            eos_token_ids,
            completion_limit,
            gpu,
            kv_cache,
            kept,
            speculator,
            states,
            ..
        } = &mut **engine;
        let memory = SequenceMemory { kv_cache, states: states.as_ref() };
        let runner: Box<dyn Runner + 'r> = match gpu {
            None => {
                let runner = HostRunner::new((&**spec, &**own, &*ranks), ropes, weights, memory, options);
                match ranks.stages.count() {
                    1 => Box::new(runner),
                    _ => Box::new(PipelineRunner::new(runner, &*ranks.pipe)),
                }
            }
            Some(state) => Box::new(GpuRunner::new(state, (own, weights), memory, ranks)?),
        };
        // For good, if the session fails.
        let (own_kept, drafter) =
            (std::mem::take(kept), speculator.take().or_else(|| Speculator::new(options.speculation)));
        let drafter = drafter.map(|drafter| drafter.agree(&*ranks.all)).transpose()?;
        let has_draft_head = weights.draft_head.is_some() && drafter.is_some();
        Ok(Self {
            scheduler: Scheduler::new(limits, own_kept, *stats)
                .with_completion_limit(completion_limit.clone())
                .with_speculator(drafter),
            speculator: options.speculation.is_on().then_some(speculator),
            all: &*ranks.all,
            clock: StepClock::default(),
            has_draft_head,
            runner,
            under_way: VecDeque::new(),
            ids: ModelIds::of(spec),
            num_adapters: weights.num_adapters,
            tokenizer,
            grammars,
            eos_token_ids,
            stats,
            progress: progress
                .as_mut()
                .map(|progress: &mut ProgressCallback<'a>| &mut **progress as &mut (dyn FnMut(&EngineStats) + 'r)),
            kept: keeps_sequences.then_some(kept),
        })
    }

    /// Queues a request behind those that wait. Its prompt is computed once for all completions.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for parameters or a prompt that cannot be served.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        request.check(self.ids, self.num_adapters, &self.scheduler.limits)?;
        let grammar =
            request.params.structure.as_ref().map(|structure| self.grammars.compile(structure)).transpose()?;
        Ok(self.scheduler.submit(request, grammar.as_ref()))
    }

    /// Whether this is one of the model's token ids.
    pub(crate) fn knows(&self, token_id: u32) -> bool {
        (token_id as usize) < self.ids.vocab_size
    }

    /// Ends a request, complete or not: its blocks are free, nothing more is reported of it, and nothing is kept. A session that goes on
    /// for long removes every request once it is complete.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a request that is removed already.
    pub fn remove(&mut self, request: RequestId) -> Result<()> {
        if !self.scheduler.knows(request.0) {
            return Err(Error::InvalidArgument {
                op: "Session::remove",
                expected: "a request that is still in the session".into(),
                got: format!("{request:?}"),
            });
        }
        self.scheduler.remove(request.0);
        Ok(())
    }

    /// Lets completions that end by themselves leave their keys and values to their next turn: a request whose `begun` has the same
    /// tokens with context behind them. They are given up where blocks run short. Returns the counts so far.
    pub(crate) fn keep_turns(&mut self) -> EngineStats {
        self.scheduler.keep_turns();
        self.stats()
    }

    /// The engine's counts so far.
    pub(crate) fn stats(&self) -> EngineStats {
        self.scheduler.stats
    }

    /// Frees what the completion of a prompt has left to a next turn that there will not be.
    pub(crate) fn forget_turn(&mut self, prompt: &[u32], completion: &[u32]) {
        self.scheduler.forget_turn(&[prompt, completion].concat());
    }

    /// Counts of running and waiting completions and of free blocks.
    pub fn load(&self) -> SessionLoad {
        self.scheduler.load()
    }

    /// Whether [`Session::step`] has anything to do or to report.
    pub fn has_work(&self) -> bool {
        self.scheduler.has_work() || !self.under_way.is_empty() || self.scheduler.has_events()
    }

    /// Launches the next step, if there is one, and reads the oldest one under way once more of them are launched than the runner
    /// needs. Returns the events since the last call; none while a step is only launched.
    ///
    /// # Errors
    /// [`Error::NonFinite`](crate::Error::NonFinite) for logits that are not numbers, and the device's errors. The session cannot go on.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        if self.scheduler.has_events() {
            return Ok(self.scheduler.take_events()); // of requests that were complete when they were submitted
        }
        phase::beat();
        if self.scheduler.num_removed() >= MANY_REMOVED {
            while !self.under_way.is_empty() {
                self.collect()?;
            }
            self.scheduler.compact();
            if !self.scheduler.has_work() {
                return Ok(self.scheduler.take_events());
            }
        }
        let is_to_draft = self.scheduler.is_to_draft();
        let has_drafts = is_to_draft || self.under_way.iter().any(Step::has_drafts);
        if has_drafts || self.scheduler.runs_ahead_of_structure() {
            while !self.under_way.is_empty() {
                self.collect()?;
            }
            if !self.scheduler.has_work() {
                return Ok(self.scheduler.take_events());
            }
        }
        let is_launched = self.scheduler.has_work() && self.launch()?;
        if !is_launched || self.under_way.len() > self.runner.lag() {
            self.collect()?;
        }
        Ok(self.scheduler.take_events())
    }

    /// Reads the steps under way and launches no other. Returns their events.
    ///
    /// # Errors
    /// The errors of [`Session::step`].
    pub fn drain(&mut self) -> Result<Vec<Event>> {
        while !self.under_way.is_empty() {
            phase::beat();
            self.collect()?;
        }
        Ok(self.scheduler.take_events())
    }

    /// The completions of a request as they stand, in sample order, without rewards; with their texts if the request is complete.
    /// None if nothing is sampled yet.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    pub fn completions(&self, request: RequestId) -> Result<Vec<Trajectory>> {
        let sequences = &self.scheduler.sequences[self.scheduler.members(request.0)];
        if sequences.iter().all(|sequence| sequence.completion().is_empty()) {
            return Ok(Vec::new());
        }
        let is_complete = sequences.iter().all(|sequence| sequence.finish_reason.is_some());
        let completion = |sequence: &EngineSequence| {
            let text = if is_complete { self.tokenizer.decode(sequence.completion())? } else { String::new() };
            Ok(Trajectory { text, ..sequence.trajectory() })
        };
        sequences.iter().map(completion).collect()
    }

    /// One completion of a request as it stands, without its text.
    pub(crate) fn trajectory(&self, request: RequestId, sample: usize) -> Trajectory {
        self.scheduler.sequences[self.scheduler.members(request.0)][sample].trajectory()
    }

    /// Ends the session after the steps under way. An engine that keeps sequences keeps those that are unfinished, for the next
    /// session to go on with.
    ///
    /// # Errors
    /// The errors of [`Session::step`].
    pub fn close(mut self) -> Result<()> {
        self.drain()?;
        self.scheduler.check_integrity()?;
        if self.kept.is_some() {
            self.runner.settle(&self.scheduler.settle_drafts())?; // the next session may have other weights
        }
        *self.stats = self.scheduler.stats;
        if let (Some(speculator), Some(own)) = (self.speculator, self.scheduler.speculator.take()) {
            *speculator = Some(own.close());
        }
        if let Some(kept) = self.kept {
            *kept = self.scheduler.into_kept();
        }
        Ok(())
    }

    /// Whether there was a step to launch: not while everything left waits for the results of those under way.
    fn launch(&mut self) -> Result<bool> {
        let Some(mut step) = self.scheduler.schedule() else { return Ok(false) };
        if step.is_decode && self.has_draft_head {
            phase::part(Phase::Decode, || self.draft(&mut step))?;
        }
        let part = if step.is_decode { Phase::Decode } else { Phase::Prefill };
        let draws = self.scheduler.draws(&step);
        phase::part(part, || self.runner.launch(&step, &draws, &self.scheduler.sequences))?;
        self.under_way.push_back(step);
        Ok(true)
    }

    /// Has the model's head follow a decode step's tokens, and make its drafts one behind the other.
    fn draft(&mut self, step: &mut Step) -> Result<()> {
        let of_run = |run: &TokenRun| run.drafts.token_ids.len();
        let most = if step.asks_head { step.runs.iter().map(of_run).max().unwrap_or(0) } else { 0 };
        for depth in 0..most.max(1) {
            let draws = if depth < most { self.scheduler.head_draws(step, depth) } else { Vec::new() };
            let drafts = self.runner.draft(step, depth, &draws, &self.scheduler.sequences)?;
            let ids: Vec<u32> = drafts.iter().map(|draft| draft.known_id()).collect();
            step.take_drafts(depth, &ids);
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<()> {
        let step = self.under_way.pop_front().expect("a scheduler with work waits only for results");
        let decode = |ids: &[u32]| self.tokenizer.decode(ids);
        let rules = StopRules { eos_token_ids: self.eos_token_ids, decode: &decode };
        let sampled = self.runner.collect()?;
        if let Some(speculator) = self.scheduler.speculator.as_mut().filter(|speculator| speculator.reads_times()) {
            speculator.note_times(self.clock.tell(&step, self.all)?.into_iter());
        }
        self.scheduler.record_experts(&step, &self.runner.take_experts());
        self.scheduler.postprocess(&step, &sampled, &rules)?;
        self.scheduler.stats.stage += self.runner.take_times();
        *self.stats = self.scheduler.stats;
        if let Some(progress) = &mut self.progress {
            progress(self.stats);
        }
        Ok(())
    }
}

impl RolloutEngine<'_> {
    /// Opens a session. Sequences that an earlier one left unfinished are at hand, if the engine keeps them.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn session(&mut self) -> Result<Session<'_>> {
        Session::open(self)
    }

    /// Longest prompt and completion together that the cache holds, in tokens. A sequence's last token is never fed.
    pub fn max_sequence_length(&self) -> usize {
        let limits = self.limits();
        limits.max_model_length.min(limits.num_blocks * limits.block_size + 1)
    }

    pub(super) fn limits(&self) -> StepLimits {
        let options = &self.engine.options;
        StepLimits {
            num_blocks: self.stats.num_blocks,
            block_size: options.block_size,
            max_num_seqs: options.max_num_seqs,
            max_decode_rows: options.most_decode_rows(),
            max_num_batched_tokens: options.max_num_batched_tokens,
            max_model_length: options.max_model_length,
            has_states: self.engine.spec.delta_net().is_some(),
            num_stages: self.engine.ranks.stages.count(),
            runs_ahead: options.device.is_cuda(),
        }
    }
}
