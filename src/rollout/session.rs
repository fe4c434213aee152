//! Sessions drive an awake engine step by step: requests may be submitted at any time, and each step computes for all of them.

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

/// Compact the list once this many leading requests are removed.
const MANY_REMOVED: usize = 256;

/// How busy a session is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SessionLoad {
    /// Completions that hold KV blocks.
    pub num_running: usize,
    /// Completions that wait for blocks or a slot.
    pub num_waiting: usize,
    /// KV blocks that no sequence reads.
    pub num_free_blocks: usize,
    /// Total KV blocks.
    pub num_blocks: usize,
    /// Number of preemptions: a completion released its blocks to others.
    pub num_preemptions: usize,
    /// Draft tokens that were computed.
    pub num_draft_tokens: usize,
    /// Draft tokens that were accepted.
    pub num_accepted_tokens: usize,
}

/// The requests under way on an awake engine. Every rank of the engine makes the same calls in the same order.
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
    under_way: VecDeque<Step>, // launched steps, the oldest first
    ids: ModelIds,
    num_adapters: usize,
    tokenizer: &'r Tokenizer,
    grammars: &'r GrammarCompiler,
    eos_token_ids: &'r [u32],
    stats: &'r mut EngineStats,
    progress: Option<&'r mut (dyn FnMut(&EngineStats) + 'r)>,
    kept: Option<&'r mut KeptSequences>,
    speculator: Option<&'r mut Option<Speculator>>, // the engine's speculator, returned at the end of the session
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
        // If the session fails, these are lost for good.
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
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for parameters or a prompt that the engine does not support.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        request.check(self.ids, self.num_adapters, &self.scheduler.limits)?;
        let grammar =
            request.params.structure.as_ref().map(|structure| self.grammars.compile(structure)).transpose()?;
        Ok(self.scheduler.submit(request, grammar.as_ref()))
    }

    /// Whether this id is in the model's vocabulary.
    pub(crate) fn knows(&self, token_id: u32) -> bool {
        (token_id as usize) < self.ids.vocab_size
    }

    /// Removes a request, complete or not: its blocks are freed, no more events are reported, and none of its data is kept. A long session should
    /// remove every request once it is complete.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a request that was already removed.
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

    /// Lets completions that end a turn leave their keys and values to their next turn: a request whose `begun` has the same tokens followed by
    /// context. They are freed if blocks run short. Returns the counters so far.
    pub(crate) fn keep_turns(&mut self) -> EngineStats {
        self.scheduler.keep_turns();
        self.stats()
    }

    /// The engine's counters so far.
    pub(crate) fn stats(&self) -> EngineStats {
        self.scheduler.stats
    }

    /// Frees the blocks that a completion left to a next turn, because there will be none.
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

    /// Launches the next step, if there is one. If more steps are under way than the runner needs, it also collects the oldest. Returns the events
    /// since the last call; empty while a step is only launched.
    ///
    /// # Errors
    /// [`Error::NonFinite`](crate::Error::NonFinite) for logits that are NaN or infinite, and errors of the device. The session cannot continue after
    /// an error.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        if self.scheduler.has_events() {
            return Ok(self.scheduler.take_events()); // of requests that were already complete at submission
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

    /// Collects all steps under way without launching another. Returns their events.
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

    /// The completions of a request so far, in sample order, without rewards. They have texts if the request is complete. Empty if nothing has been
    /// sampled yet.
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

    /// One completion of a request so far, without its text.
    pub(crate) fn trajectory(&self, request: RequestId, sample: usize) -> Trajectory {
        self.scheduler.sequences[self.scheduler.members(request.0)][sample].trajectory()
    }

    /// Ends the session after the steps under way. If the engine keeps sequences, unfinished ones stay for the next session to continue.
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

    /// Launches a step, if there is one. Returns false if all remaining work waits for the results of steps under way.
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

    /// Runs the draft head on a decode step's tokens, and samples its draft tokens one after another.
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
        let mut step = self.under_way.pop_front().expect("a scheduler with work waits only for results");
        let decode = |ids: &[u32]| self.tokenizer.decode(ids);
        let rules = StopRules { eos_token_ids: self.eos_token_ids, decode: &decode };
        let sampled = self.runner.collect()?;
        step.take_all_drafts(&self.runner.take_drafts());
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
    /// Opens a session. It continues sequences that an earlier session left unfinished, if the engine keeps them.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn session(&mut self) -> Result<Session<'_>> {
        Session::open(self)
    }

    /// Maximum length of prompt and completion together that the cache holds, in tokens. The last token of a sequence is never processed.
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
