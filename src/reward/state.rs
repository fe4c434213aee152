//! State shared by a reward pool and its threads: queued jobs, groups that are being scored, failures so far.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::RewardFunction;
use super::endpoint::ServiceEndpoint;
use super::failures::{FailureKind, RewardFailure, RewardFailures, Score};
use super::job::{GroupJob, RowLayout, RunProgress, ScoringJob};
use super::protocol::ScoreResults;
use super::service::RewardService;
use crate::config::RewardBatch;
use crate::error::Error;
use crate::types::{RolloutGroup, Trajectory};

/// Settings and state shared by the pool and its threads.
pub(super) struct PoolShared {
    /// Names of the rewards in configured order.
    pub names: Vec<String>,
    /// Rewards that are functions of this process, with their index in `names`.
    pub functions: Vec<(usize, RewardFunction)>,
    /// Time limit for all functions together, per completion.
    pub timeout: Duration,
    /// Rewards that environments return themselves, as index in `names` and name of the environment class.
    pub environments: Vec<(usize, String)>,
    /// Rewards computed by worker processes.
    pub services: Vec<RewardService>,
    /// Rewards computed by HTTP services.
    pub endpoints: Vec<ServiceEndpoint>,
    pub state: Mutex<PoolState>,
    /// Notified when a job arrives or is done, or the pool closes.
    pub changed: Condvar,
}

#[derive(Default)]
pub(super) struct PoolState {
    /// Jobs for the functions of this process, one per completion.
    pub queue: VecDeque<ScoringJob>,
    /// Queued jobs of each process service.
    pub service_queues: Vec<VecDeque<ScoringJob>>,
    /// Queued jobs of each HTTP service, one per completion.
    pub endpoint_queues: Vec<VecDeque<ScoringJob>>,
    /// Jobs that functions of this process are running, by job number.
    pub running: HashMap<u64, Running>,
    /// Groups whose scores were not returned yet, by ticket.
    pub pending: HashMap<u64, PendingGroup>,
    /// Number of threads for functions, without those whose job exceeded its deadline.
    pub num_workers: usize,
    /// Whether the threads of services were started.
    pub has_services: bool,
    /// Number of threads for services: one per worker process, and one per concurrent request to HTTP services.
    pub num_servants: usize,
    /// Number of threads for process services whose first process is ready.
    pub num_ready: usize,
    /// Index of each reward, and a column that its function requires.
    pub needed_columns: BTreeSet<(usize, String)>,
    /// The prompt column and all columns of the training and held-out rows.
    pub layout: Arc<RowLayout>,
    /// The error because of which the pool cannot continue.
    pub broken: Option<Error>,
    pub closed: bool,
    pub progress: RunProgress,
    /// Numbers of failures by reward.
    pub failures: Vec<RewardFailures>,
    /// Message of the first failure since this was last read.
    pub first_cause: Option<String>,
    /// Index of the reward and kind of each failure that was logged. Each kind is logged once per run.
    pub told: Vec<(usize, FailureKind)>,
    /// Number of the most recent job or ticket.
    pub num_numbered: u64,
}

pub(super) struct Running {
    job: ScoringJob,
    deadline: Instant,
    /// Number of functions that have returned. The next one is running.
    num_answers: usize,
}

/// A submitted group and its scores so far.
pub(super) struct PendingGroup {
    pub group: Arc<RolloutGroup>,
    /// Scores, indexed `[completion][reward]`.
    pub scores: Vec<Vec<Score>>,
    /// Number of unfinished jobs.
    pub num_open: usize,
}

impl PoolShared {
    /// Locks the state. A thread never panics while it holds the lock.
    pub fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a notification, but not longer than `limit`.
    pub fn wait<'a>(&self, state: MutexGuard<'a, PoolState>, limit: Duration) -> MutexGuard<'a, PoolState> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until `end`; returns false if the pool closes meanwhile.
    pub fn pause_until(&self, end: Instant) -> bool {
        let mut state = self.lock();
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if state.closed || state.broken.is_some() {
                return false;
            }
            state = self.wait(state, left);
        }
        true
    }

    /// Waits for the next job in the queue that `queue` selects. Returns it with its group; `None` once the pool closes.
    pub fn next_job(&self, queue: impl Fn(&mut PoolState) -> &mut VecDeque<ScoringJob>) -> Option<GroupJob> {
        let mut state = self.lock();
        loop {
            if state.closed || state.broken.is_some() {
                return None;
            }
            let Some(job) = queue(&mut state).pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if let Some(group) = state.pending.get(&job.ticket).map(|pending| Arc::clone(&pending.group)) {
                return Some(GroupJob { job, group });
            }
        }
    }

    /// Takes a job from the queue that `queue` selects, with its group, if there is one; does not wait.
    pub fn job_at_hand(&self, queue: impl Fn(&mut PoolState) -> &mut VecDeque<ScoringJob>) -> Option<GroupJob> {
        let mut state = self.lock();
        while let Some(job) = queue(&mut state).pop_front() {
            if let Some(group) = state.pending.get(&job.ticket).map(|pending| Arc::clone(&pending.group)) {
                return Some(GroupJob { job, group });
            }
        }
        None
    }

    /// Whether the pool has closed, so that no more jobs may begin.
    pub fn is_over(&self) -> bool {
        let state = self.lock();
        state.closed || state.broken.is_some()
    }

    /// Records the scores that a service returned for a job, and finishes the job.
    pub fn file(&self, service: &RewardService, job: &ScoringJob, outcome: Result<ScoreResults, RewardFailure>) {
        if outcome.iter().flatten().any(Result::is_ok) {
            service.num_failures.store(0, Ordering::Relaxed);
        }
        let mut state = self.lock();
        state.book(service, job, outcome);
        state.close(job);
        drop(state);
        self.changed.notify_all();
    }

    /// Revokes the scores of a job that was already answered, so that its completions are masked, unless the scores were returned to the caller.
    pub fn take_back(&self, service: &RewardService, job: &ScoringJob, failure: RewardFailure) {
        self.lock().book(service, job, Err(failure));
    }

    /// Queues every completion of `group` for every reward. Returns the ticket for its scores.
    pub fn submit(&self, state: &mut PoolState, group: Arc<RolloutGroup>) -> u64 {
        let (ticket, progress) = (state.number(), state.progress);
        let num_completions = group.completions.len();
        let job = |completions| ScoringJob { ticket, completions, progress };
        let single = |completion: usize| job(completion..completion + 1);
        let mut num_open = 0;
        if !self.functions.is_empty() {
            state.queue.extend((0..num_completions).map(single));
            num_open += num_completions;
        }
        for (service, queue) in self.services.iter().zip(&mut state.service_queues) {
            let before = queue.len();
            match service.batch {
                RewardBatch::Completion => queue.extend((0..num_completions).map(single)),
                RewardBatch::Group => queue.push_back(job(0..num_completions)),
            }
            num_open += queue.len() - before;
        }
        for queue in &mut state.endpoint_queues {
            queue.extend((0..num_completions).map(single));
            num_open += num_completions;
        }
        let scores = vec![vec![Score::Failed; self.names.len()]; num_completions];
        state.pending.insert(ticket, PendingGroup { group: Arc::clone(&group), scores, num_open });
        for (index, class) in &self.environments {
            for (place, completion) in group.completions.iter().enumerate() {
                let Some(outcome) = of_environment(completion, class) else { continue };
                state.file(ticket, place, (*index, &self.names[*index]), outcome);
            }
        }
        ticket
    }
}

/// The reward that a completion's environment returned, if it is of `class`. A lost environment has none.
fn of_environment(completion: &Trajectory, class: &str) -> Option<Result<Score, RewardFailure>> {
    let end = completion.environment.as_ref()?;
    if end.class != class {
        return Some(Ok(Score::NotApplicable));
    }
    let reward = end.reward.clone().unwrap_or_else(|| Err("get_reward returned no reward".to_owned()));
    Some(reward.map_err(|cause| RewardFailure::new(FailureKind::Error, cause)).and_then(Score::finite))
}

impl PoolState {
    /// Closes the pool if a fatal failure occurred and returns this error, also for later calls.
    pub fn check(&mut self) -> Result<(), Error> {
        match self.broken.take() {
            Some(error) => {
                self.closed = true;
                Err(error)
            }
            None if self.closed => Err(Error::InvalidArgument {
                op: "RewardPool::wait",
                expected: "a reward pool that still accepts work".to_owned(),
                got: "a pool that was closed after repeated failures".to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// Checks that there is one ticket per group, and that all tickets are pending and distinct.
    pub fn check_open(&self, num_groups: usize, tickets: impl ExactSizeIterator<Item = u64>) -> Result<(), Error> {
        let num_tickets = tickets.len();
        let open: BTreeSet<u64> = tickets.filter(|ticket| self.pending.contains_key(ticket)).collect();
        if open.len() == num_tickets && num_groups == num_tickets {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            op: "RewardPool::wait",
            expected: "one ticket for each group, each used once".to_owned(),
            got: format!("{num_groups} groups and {num_tickets} tickets, {} of them open", open.len()),
        })
    }

    /// Whether all scores of a ticket are known.
    pub fn is_scored(&self, ticket: u64) -> bool {
        self.pending[&ticket].num_open == 0
    }

    /// Records that functions of this process begin a job. Returns the job's number.
    pub fn begin(&mut self, job: ScoringJob, deadline: Instant) -> u64 {
        let number = self.number();
        self.running.insert(number, Running { job, deadline, num_answers: 0 });
        number
    }

    /// Records the result of the running function for a job's completion. Returns false if the job had exceeded its deadline.
    pub(super) fn answer(&mut self, number: u64, reward: (usize, &str), outcome: Result<Score, RewardFailure>) -> bool {
        let Some(running) = self.running.get_mut(&number) else { return false };
        running.num_answers += 1;
        let ScoringJob { ticket, completions, .. } = running.job.clone();
        self.file(ticket, completions.start, reward, outcome);
        true
    }

    /// Records the result of one reward for one completion of a job; a failure is counted.
    pub(super) fn file(
        &mut self,
        ticket: u64,
        completion: usize,
        reward: (usize, &str),
        outcome: Result<Score, RewardFailure>,
    ) {
        let score = outcome.unwrap_or_else(|failure| {
            self.fail(reward, failure);
            Score::Failed
        });
        if let Some(pending) = self.pending.get_mut(&ticket) {
            pending.scores[completion][reward.0] = score;
        }
    }

    fn book(&mut self, service: &RewardService, job: &ScoringJob, outcome: Result<ScoreResults, RewardFailure>) {
        let outcomes = outcome.unwrap_or_else(|failure| vec![Err(failure); job.completions.len()]);
        for (completion, outcome) in job.completions.clone().zip(outcomes) {
            self.file(job.ticket, completion, (service.index, &service.name), outcome);
        }
    }

    /// Finishes a job of this process's functions. Returns false if the job had exceeded its deadline.
    pub fn finish(&mut self, number: u64) -> bool {
        let Some(running) = self.running.remove(&number) else { return false };
        self.close(&running.job);
        true
    }

    /// Decrements the number of unfinished jobs of the job's group.
    pub fn close(&mut self, job: &ScoringJob) {
        if let Some(pending) = self.pending.get_mut(&job.ticket) {
            pending.num_open -= 1;
        }
    }

    /// Ends jobs that exceeded their deadline; their threads no longer count. The function that was running gets the failure.
    pub fn give_up_overdue(&mut self, functions: &[(usize, RewardFunction)], names: &[String]) {
        let now = Instant::now();
        let overdue: Vec<u64> =
            self.running.iter().filter(|(_, job)| job.deadline <= now).map(|(number, _)| *number).collect();
        for number in overdue {
            if let Some((index, _)) = functions.get(self.running[&number].num_answers) {
                let failure = RewardFailure::new(FailureKind::Timeout, "no reply within reward.timeout_s");
                self.fail((*index, &names[*index]), failure);
            }
            self.finish(number);
            self.num_workers -= 1;
        }
    }

    /// Counts a failure of a reward.
    fn fail(&mut self, (index, reward): (usize, &str), failure: RewardFailure) {
        let RewardFailure { kind, cause } = failure;
        self.failures[index].add(kind);
        if !self.told.contains(&(index, kind)) {
            self.told.push((index, kind));
            tracing::debug!(reward, kind = kind.name(), "a reward failed, its samples are masked: {cause}");
        }
        self.first_cause.get_or_insert_with(|| format!("reward '{reward}' ({}): {cause}", kind.name()));
    }

    fn number(&mut self) -> u64 {
        self.num_numbered += 1;
        self.num_numbered
    }
}
