//! A pool of threads and processes that compute rewards while generation continues.

use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::failures::{FailureCount, FailureKind, RewardFailures, Score, weighted_sum};
use super::job::{RowLayout, RunProgress};
use super::servants::{serve_endpoint, serve_service};
use super::service::RewardService;
use super::source::{RewardSource, RewardSources};
use super::state::{PendingGroup, PoolShared, PoolState};
use super::worker::Origin;
use super::{RewardFunction, builtin};
use crate::config::{Config, ProcessRewards, RewardConfig, environment_class, reward_name};
use crate::console::Progress;
use crate::error::{Error, Result};
use crate::phase;
use crate::process::detach;
use crate::types::RolloutGroup;

/// Time for which dropping a pool waits for threads that are still scoring.
const FAREWELL: Duration = Duration::from_secs(1);
/// Interval at which deadlines are checked and heartbeats sent.
const LOOK: Duration = Duration::from_millis(200);

/// Scores completions with every reward: functions of this process on threads; Python functions, commands and model-written
/// code in other processes. Results do not depend on timing, unless a reward exceeds its deadline. If a reward fails for a
/// completion (error, panic, NaN, deadline, a worker that ends or writes a malformed reply), its score is `None`. The completion is then
/// masked if that reward has a weight; it is never scored 0.
pub struct RewardPool {
    weights: Vec<f64>,
    judges: Vec<usize>,
    /// Indexes of built-in rewards that never return 1.
    capped: Vec<usize>,
    required_columns: Vec<String>,
    /// The column with the tests of model-written programs, if a reward runs such programs.
    tests_column: Option<String>,
    num_threads: usize,
    /// Kinds of failure that occurred so far, by reward. Each stays among the metrics.
    seen: Vec<Vec<FailureKind>>,
    shared: Arc<PoolShared>,
}

/// Identifies a group submitted to a [`RewardPool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RewardTicket(u64);

impl RewardPool {
    /// Creates a pool for the rewards in `config`. Threads and processes start with [`start`](Self::start) or the first submission.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an unknown name or a wrong number of weights.
    pub fn new(config: &Config) -> Result<Self> {
        Self::with_functions(config, &[])
    }

    /// Creates a pool for the rewards in `config`, in which `reward_funcs` may also name `functions`. These take precedence over other rewards of the
    /// same name.
    ///
    /// # Errors
    /// The errors of [`RewardPool::new`].
    pub fn with_functions(config: &Config, functions: &[(&str, RewardFunction)]) -> Result<Self> {
        let sources = RewardSources {
            key: "reward_funcs",
            settings: &config.reward,
            processes: &config.rewards,
            prompt_column: config.data.dataset_prompt_column.as_deref(),
            environment: config.environment_settings(),
            functions,
        };
        Self::build(&sources, &config.reward_funcs, &config.reward_weights)
    }

    /// Creates a pool for evaluation with the reward `name` at weight 1. Errors name `option`, the command line option that gave it.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] of `option` for an unknown name.
    pub fn single(option: &str, name: &str, settings: &RewardConfig) -> Result<Self> {
        let sources = RewardSources {
            key: option,
            settings,
            processes: &ProcessRewards::default(),
            prompt_column: None,
            environment: None,
            functions: &[],
        };
        Self::build(&sources, &[name.to_owned()], &[])
    }

    fn build(sources: &RewardSources<'_>, entries: &[String], weights: &[f64]) -> Result<Self> {
        let (mut functions, mut services, mut endpoints) = (Vec::new(), Vec::new(), Vec::new());
        let (mut judges, mut capped, mut required_columns) = (Vec::new(), Vec::new(), Vec::new());
        let mut environments = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            if let Some(class) = environment_class(entry) {
                environments.push((index, class.to_owned()));
                continue;
            }
            match sources.find(entry, index)? {
                RewardSource::Function(function) => functions.push((index, function)),
                RewardSource::Service(service) => services.push(service),
                RewardSource::Endpoint(endpoint) => endpoints.push(*endpoint),
            }
            let is_builtin =
                sources.functions.iter().all(|(name, _)| name != entry) && sources.processes.get(entry).is_none();
            if is_builtin {
                judges.extend(builtin::is_judge(entry).then_some(index));
                capped.extend(builtin::is_capped(entry).then_some(index));
                required_columns.extend(builtin::required_column(entry, sources.settings).map(str::to_owned));
            }
        }
        required_columns.sort();
        required_columns.dedup();
        if !weights.is_empty() && weights.len() != entries.len() {
            let expected = format!("one weight for each of the {} reward_funcs, or none", entries.len());
            return Err(Error::invalid_value("reward_weights", format!("{weights:?}"), expected));
        }
        let weights = if weights.is_empty() { vec![1.0; entries.len()] } else { weights.to_vec() };
        let state = PoolState {
            service_queues: services.iter().map(|_| Default::default()).collect(),
            endpoint_queues: endpoints.iter().map(|_| Default::default()).collect(),
            failures: vec![RewardFailures::default(); entries.len()],
            layout: Arc::new(RowLayout {
                prompt_column: sources.prompt_column.map(str::to_owned),
                ..Default::default()
            }),
            ..PoolState::default()
        };
        let runs_programs = |service: &RewardService| matches!(service.program.origin, Origin::Sandbox);
        let tests_column = services.iter().any(runs_programs).then(|| sources.settings.code.tests_column.clone());
        let shared = PoolShared {
            names: entries.iter().map(|entry| reward_name(entry).to_owned()).collect(),
            functions,
            environments,
            timeout: Duration::from_secs_f64(sources.settings.timeout_s),
            services,
            endpoints,
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        Ok(Self {
            weights,
            judges,
            capped,
            required_columns,
            tests_column,
            num_threads: sources.settings.num_threads,
            seen: vec![Vec::new(); entries.len()],
            shared: Arc::new(shared),
        })
    }

    /// Starts the worker processes of rewards and returns when all are ready to score. Best called before this process has
    /// a GPU context, because fork copies its memory maps. The processes do not use this context in any case: each is
    /// started by fork and exec with no file descriptors but its pipes.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a function that does not exist or a command that cannot be run; [`Error::Environment`] if
    /// a layer of the sandbox is missing.
    pub fn start(&self) -> Result<()> {
        let num_workers: usize = self.shared.services.iter().map(|service| service.num_workers).sum();
        let mut state = self.shared.lock();
        self.start_services(&mut state)?;
        while state.num_ready < num_workers {
            state.check()?;
            phase::beat();
            state = self.shared.wait(state, LOOK);
        }
        state.check()
    }

    /// Names of the rewards, in the order of [`Trajectory::rewards`](crate::types::Trajectory::rewards).
    pub fn names(&self) -> &[String] {
        &self.shared.names
    }

    /// The rewards that worker processes compute.
    pub(super) fn services(&self) -> &[RewardService] {
        &self.shared.services
    }

    /// Sets the run's progress, which is passed with later submissions: `global_step` of `max_steps` updates.
    pub(crate) fn set_progress(&self, global_step: u64, max_steps: u64) {
        self.shared.lock().progress = RunProgress { global_step, max_steps };
    }

    /// Submits a finished group for scoring and returns immediately. Pass the ticket to [`wait`](Self::wait) to get the scores; `wait` also reports
    /// an error if no thread could be started.
    pub fn submit(&self, group: &RolloutGroup) -> RewardTicket {
        let mut state = self.shared.lock();
        let ticket = self.shared.submit(&mut state, Arc::new(group.clone()));
        let _ = self.start_services(&mut state).and_then(|()| self.keep_threads(&mut state));
        self.shared.changed.notify_all();
        RewardTicket(ticket)
    }

    /// Submits groups and waits for their scores.
    ///
    /// # Errors
    /// The errors of [`RewardPool::wait`].
    pub fn score(&mut self, groups: &mut [RolloutGroup]) -> Result<()> {
        let tickets: Vec<RewardTicket> = groups.iter().map(|group| self.submit(group)).collect();
        self.wait(groups, &tickets)
    }

    /// Waits for the scores of `groups`, each with the ticket of its submission, and sets `rewards` and `reward` of each completion.
    ///
    /// # Errors
    /// [`Error::Environment`] if no thread can be started; [`Error::RewardService`] if a reward's workers fail repeatedly; the errors
    /// of [`start`](Self::start) if it was not called; [`Error::InvalidArgument`] if the numbers of groups and tickets differ, or
    /// the scores of a ticket were already returned.
    pub fn wait(&mut self, groups: &mut [RolloutGroup], tickets: &[RewardTicket]) -> Result<()> {
        self.shared.lock().check_open(groups.len(), tickets.iter().map(|ticket| ticket.0))?;
        let (progress, num_scored) = (Progress::new("reward", "groups").when_slow(), Cell::new(0));
        let are_scored = |state: &PoolState| {
            num_scored.set(tickets.iter().filter(|ticket| state.is_scored(ticket.0)).count());
            num_scored.get() == tickets.len()
        };
        let show = || progress.tell(num_scored.get() as u64, tickets.len() as u64);
        let mut state = self.await_until(are_scored, show)?;
        groups.iter_mut().zip(tickets).for_each(|(group, ticket)| self.fill(&mut state, group, *ticket));
        Ok(())
    }

    /// Sets the scores of those of `groups` that are complete, and returns for each group whether it is. If none is complete
    /// and `waits` is set, waits for the first.
    ///
    /// # Errors
    /// The errors of [`RewardPool::wait`].
    pub(crate) fn poll(
        &mut self,
        groups: &mut [RolloutGroup],
        tickets: &[RewardTicket],
        waits: bool,
    ) -> Result<Vec<bool>> {
        self.shared.lock().check_open(groups.len(), tickets.iter().map(|ticket| ticket.0))?;
        let waits = waits && !tickets.is_empty();
        let is_due = |state: &PoolState| !waits || tickets.iter().any(|ticket| state.is_scored(ticket.0));
        let mut state = self.await_until(is_due, || ())?;
        let scored: Vec<bool> = tickets.iter().map(|ticket| state.is_scored(ticket.0)).collect();
        for ((group, ticket), _) in groups.iter_mut().zip(tickets).zip(&scored).filter(|(_, is_scored)| **is_scored) {
            self.fill(&mut state, group, *ticket);
        }
        Ok(scored)
    }

    /// Discards all submitted groups whose scores were not returned yet.
    pub(crate) fn give_up(&self) {
        self.shared.lock().pending.clear();
    }

    /// Waits until `holds`, while deadlines are kept and threads that were given up are replaced. `meanwhile` is called after each wait, without
    /// the lock: it may write to a slow terminal.
    fn await_until(
        &self,
        holds: impl Fn(&PoolState) -> bool,
        meanwhile: impl Fn(),
    ) -> Result<MutexGuard<'_, PoolState>> {
        let mut state = self.shared.lock();
        self.start_services(&mut state)?;
        loop {
            state.give_up_overdue(&self.shared.functions, &self.shared.names);
            self.keep_threads(&mut state)?;
            phase::beat();
            if holds(&state) {
                return Ok(state);
            }
            state.check()?;
            drop(self.shared.wait(state, LOOK));
            meanwhile();
            state = self.shared.lock();
        }
    }

    /// Moves the scores of a ticket into its group.
    fn fill(&self, state: &mut PoolState, group: &mut RolloutGroup, ticket: RewardTicket) {
        let PendingGroup { scores, .. } =
            state.pending.remove(&ticket.0).expect("a ticket whose scores were not taken");
        for (completion, scores) in group.completions.iter_mut().zip(scores) {
            let is_lost = completion.failure.is_some();
            let scores = if is_lost { vec![Score::Failed; scores.len()] } else { scores };
            completion.reward = weighted_sum(&scores, &self.weights);
            completion.rewards = scores.iter().map(Score::value).collect();
        }
    }

    /// Numbers of failures since the last call, by reward and kind. Includes all kinds that occurred so far in the run.
    pub fn take_failures(&mut self) -> Vec<FailureCount> {
        let num_rewards = self.seen.len();
        let failures =
            std::mem::replace(&mut self.shared.lock().failures, vec![RewardFailures::default(); num_rewards]);
        let mut taken = Vec::new();
        for ((name, failures), seen) in self.shared.names.iter().zip(failures).zip(&mut self.seen) {
            seen.extend(FailureKind::ALL.into_iter().filter(|kind| failures.of(*kind) > 0));
            for kind in FailureKind::ALL.into_iter().filter(|kind| seen.contains(kind)) {
                taken.push(FailureCount::new(name, kind, failures.of(kind)));
            }
        }
        taken
    }

    /// Message of the first failure since the last call.
    pub fn take_cause(&mut self) -> Option<String> {
        self.shared.lock().first_cause.take()
    }

    /// Ensures that `num_threads` threads run the functions of this process, if there are any.
    fn keep_threads(&self, state: &mut MutexGuard<'_, PoolState>) -> Result<()> {
        let num_threads = if self.shared.functions.is_empty() { 0 } else { self.num_threads };
        while state.num_workers < num_threads {
            let shared = Arc::clone(&self.shared);
            match spawn(move || shared.work()) {
                Ok(()) => state.num_workers += 1,
                Err(_) if state.num_workers > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Starts, once, a thread per worker process. The thread is the worker's parent; the worker ends with it. Also starts a thread per concurrent
    /// request to HTTP services.
    fn start_services(&self, state: &mut MutexGuard<'_, PoolState>) -> Result<()> {
        if std::mem::replace(&mut state.has_services, true) {
            return Ok(());
        }
        let mut start = |own: usize, count: usize, serve: fn(&Arc<PoolShared>, usize)| -> Result<()> {
            for _ in 0..count {
                let shared = Arc::clone(&self.shared);
                spawn(move || serve(&shared, own))?;
                state.num_servants += 1;
            }
            Ok(())
        };
        let (mut services, mut endpoints) =
            (self.shared.services.iter().enumerate(), self.shared.endpoints.iter().enumerate());
        services.try_for_each(|(own, service)| start(own, service.num_workers, serve_service))?;
        endpoints.try_for_each(|(own, endpoint)| start(own, endpoint.concurrency, serve_endpoint))
    }
}

impl Drop for RewardPool {
    /// Ends threads and processes. A thread that is blocked in a function is left running. A thread that waits for a worker ends at the
    /// worker's deadline.
    fn drop(&mut self) {
        let end = Instant::now() + FAREWELL.min(self.shared.timeout);
        let mut state = self.shared.lock();
        state.closed = true;
        self.shared.changed.notify_all();
        while state.num_workers + state.num_servants > 0 {
            let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else { break };
            state = self.shared.wait(state, left);
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let failed = |error| Error::Environment { message: format!("cannot start a thread for rewards: {error}") };
    detach(std::thread::Builder::new().name("reward".into()), work).map_err(failed)
}

impl fmt::Debug for RewardPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RewardPool").field("names", &self.shared.names).finish_non_exhaustive()
    }
}

mod checks;
#[cfg(test)]
mod tests;
