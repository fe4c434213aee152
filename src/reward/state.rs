//! State that a reward pool and its threads share: jobs that wait, groups that are being scored, failures so far.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::RewardFunction;
use super::endpoint::ServiceEndpoint;
use super::failures::{FailureKind, RewardFailure, RewardFailures, Score};
use super::job::{GroupJob, RunProgress, ScoringJob};
use super::protocol::ScoreResults;
use super::service::RewardService;
use crate::config::RewardBatch;
use crate::error::Error;
use crate::types::{RolloutGroup, Trajectory};

/// State that the pool and its threads share.
pub(super) struct PoolShared {
    /// Names of the rewards in configured order.
    pub names: Vec<String>,
    /// Rewards that are functions of this process, with their place in that order.
    pub functions: Vec<(usize, RewardFunction)>,
    /// Longest time that all functions may take for one completion.
    pub timeout: Duration,
    /// Rewards that classes of environments give by themselves, with their place in that order.
    pub environments: Vec<(usize, String)>,
    /// Rewards in processes of their own.
    pub services: Vec<RewardService>,
    /// Rewards of services over HTTP.
    pub endpoints: Vec<ServiceEndpoint>,
    pub state: Mutex<PoolState>,
    /// Signalled when work arrives, is done, or the pool closes.
    pub changed: Condvar,
}

#[derive(Default)]
pub(super) struct PoolState {
    /// Jobs for the functions of this process, one a completion.
    pub queue: VecDeque<ScoringJob>,
    /// Jobs for each service.
    pub service_queues: Vec<VecDeque<ScoringJob>>,
    /// Jobs for each service over HTTP, one a completion.
    pub endpoint_queues: Vec<VecDeque<ScoringJob>>,
    /// Jobs that functions of this process are at, by their number.
    pub running: HashMap<u64, Running>,
    /// Groups whose scores were not taken yet, by ticket.
    pub pending: HashMap<u64, PendingGroup>,
    /// Threads of functions that have not been given up.
    pub num_workers: usize,
    /// Whether the threads of services were started.
    pub has_services: bool,
    /// Threads of services, each with a process, and those of services over HTTP.
    pub num_servants: usize,
    /// Services whose first process is at work.
    pub num_ready: usize,
    /// Rewards, by their place, and columns without which their functions cannot be called.
    pub needed_columns: BTreeSet<(usize, String)>,
    /// Why a service cannot go on.
    pub broken: Option<Error>,
    pub closed: bool,
    pub progress: RunProgress,
    /// By reward.
    pub failures: Vec<RewardFailures>,
    /// The first failure that nobody has asked for yet.
    pub first_cause: Option<String>,
    /// Kinds of failure by reward that the log has had: it takes each once in a run.
    pub told: Vec<(usize, FailureKind)>,
    /// The number of the newest job or ticket.
    pub num_numbered: u64,
}

pub(super) struct Running {
    job: ScoringJob,
    deadline: Instant,
    /// Functions that have answered; the one after them is at work.
    num_answers: usize,
}

/// A submitted group and its scores so far.
pub(super) struct PendingGroup {
    pub group: Arc<RolloutGroup>,
    /// `[completion][reward]`
    pub scores: Vec<Vec<Score>>,
    /// Jobs neither done nor given up.
    pub num_open: usize,
}

impl PoolShared {
    /// The state; a thread never panics while it holds the lock.
    pub fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, but no longer than `limit`.
    pub fn wait<'a>(&self, state: MutexGuard<'a, PoolState>, limit: Duration) -> MutexGuard<'a, PoolState> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits; false if the pool closes meanwhile.
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

    /// The next job that `queue` selects, with its group; `None` once the pool closes.
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

    /// A job that `queue` has now, with its group.
    pub fn job_at_hand(&self, queue: impl Fn(&mut PoolState) -> &mut VecDeque<ScoringJob>) -> Option<GroupJob> {
        let mut state = self.lock();
        while let Some(job) = queue(&mut state).pop_front() {
            if let Some(group) = state.pending.get(&job.ticket).map(|pending| Arc::clone(&pending.group)) {
                return Some(GroupJob { job, group });
            }
        }
        None
    }

    /// Whether no job is to be begun any more.
    pub fn is_over(&self) -> bool {
        let state = self.lock();
        state.closed || state.broken.is_some()
    }

    /// Books what a service said of a job's completions, which is then done.
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

    /// Masks the completions of a job that was answered before, unless somebody has taken its scores.
    pub fn take_back(&self, service: &RewardService, job: &ScoringJob, failure: RewardFailure) {
        self.lock().book(service, job, Err(failure));
    }

    /// Queues every completion of `group` with every reward; its scores are known by the ticket.
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

/// The reward that a completion's environment gave, if it is of `class`; none if the environment was lost.
fn of_environment(completion: &Trajectory, class: &str) -> Option<Result<Score, RewardFailure>> {
    let end = completion.environment.as_ref()?;
    if end.class != class {
        return Some(Ok(Score::NotApplicable));
    }
    let reward = end.reward.clone().unwrap_or_else(|| Err("get_reward returned no reward".to_owned()));
    Some(reward.map_err(|cause| RewardFailure::new(FailureKind::Error, cause)).and_then(Score::finite))
}

impl PoolState {
    /// The failure that ends the pool; it is closed then, and refuses later requests.
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

    /// Refuses another number of tickets than of groups, and tickets that are not open or stand twice.
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

    /// Whether every reward has answered.
    pub fn is_scored(&self, ticket: u64) -> bool {
        self.pending[&ticket].num_open == 0
    }

    /// Books a job as being run by functions of this process.
    pub fn begin(&mut self, job: ScoringJob, deadline: Instant) -> u64 {
        let number = self.number();
        self.running.insert(number, Running { job, deadline, num_answers: 0 });
        number
    }

    /// Files what the function at work said of a job's completion; false if the job was given up before.
    pub(super) fn answer(&mut self, number: u64, reward: (usize, &str), outcome: Result<Score, RewardFailure>) -> bool {
        let Some(running) = self.running.get_mut(&number) else { return false };
        running.num_answers += 1;
        let ScoringJob { ticket, completions, .. } = running.job.clone();
        self.file(ticket, completions.start, reward, outcome);
        true
    }

    /// Files what a reward said of one completion of a job; a failure is counted.
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

    /// Closes a job of this process's functions; false if it was given up before.
    pub fn finish(&mut self, number: u64) -> bool {
        let Some(running) = self.running.remove(&number) else { return false };
        self.close(&running.job);
        true
    }

    /// One job less to wait for.
    pub fn close(&mut self, job: &ScoringJob) {
        if let Some(pending) = self.pending.get_mut(&job.ticket) {
            pending.num_open -= 1;
        }
    }

    /// Gives up jobs past their deadline: their threads no longer count. The function at work is blamed.
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
