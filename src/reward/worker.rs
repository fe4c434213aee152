//! The scoring threads' side of a reward pool: what they share, what they do, and who notices a stuck one.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{RewardFunction, RewardInput};
use crate::error::Result;
use crate::types::RolloutGroup;

/// What a function gave, or the panic that it ended in.
type Outcome = Result<Result<f32>, Box<dyn Any + Send>>;

/// Completions that were masked because a reward did not give a finite number, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RewardFailures {
    /// The function returned an error.
    pub errors: usize,
    /// The function panicked.
    pub panics: usize,
    /// The completion was not scored within its time.
    pub timeouts: usize,
    /// The function returned NaN or an infinity.
    pub non_finite: usize,
}

/// What the pool and its threads share.
pub(super) struct Shared {
    pub functions: Vec<(String, RewardFunction)>,
    pub timeout: Duration,
    pub state: Mutex<State>,
    /// Signalled when work arrives, is done, or the pool closes.
    pub changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    pub queue: VecDeque<Job>,
    /// Jobs being scored, by their number.
    pub running: HashMap<u64, Running>,
    /// Groups not yet claimed, by ticket.
    pub pending: HashMap<u64, Pending>,
    /// Threads in [`Shared::work`] that have not been given up.
    pub num_workers: usize,
    pub closed: bool,
    pub failures: RewardFailures,
    next_number: u64,
}

/// One completion of a pending group.
pub(super) struct Job {
    ticket: u64,
    completion: usize,
}

pub(super) struct Running {
    job: Job,
    pub deadline: Instant,
}

/// A submitted group and its scores so far.
pub(super) struct Pending {
    pub group: Arc<RolloutGroup>,
    /// `[completion][function]`
    pub scores: Vec<Vec<Option<f32>>>,
    /// Completions neither scored nor given up.
    pub num_open: usize,
}

impl State {
    /// Queues every completion of `group`; the ticket claims its scores.
    pub fn submit(&mut self, group: Arc<RolloutGroup>, num_functions: usize) -> u64 {
        let ticket = self.number();
        let num_completions = group.completions.len();
        let scores = vec![vec![None; num_functions]; num_completions];
        self.pending.insert(ticket, Pending { group, scores, num_open: num_completions });
        self.queue.extend((0..num_completions).map(|completion| Job { ticket, completion }));
        ticket
    }

    /// Gives up jobs past their deadline: their threads no longer count.
    pub fn give_up_overdue(&mut self) {
        let now = Instant::now();
        let overdue: Vec<u64> =
            self.running.iter().filter(|(_, job)| job.deadline <= now).map(|(number, _)| *number).collect();
        for number in overdue {
            self.finish(number);
            self.num_workers -= 1;
            if self.failures.timeouts == 0 {
                tracing::warn!("a reward did not answer in time; its completion is masked");
            }
            self.failures.timeouts += 1;
        }
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Files the outcome of one function; false if the job was given up.
    fn record(&mut self, number: u64, function: usize, name: &str, outcome: Outcome) -> bool {
        let Some(running) = self.running.get(&number) else { return false };
        let score = finite(name, outcome, &mut self.failures);
        if let Some(pending) = self.pending.get_mut(&running.job.ticket) {
            pending.scores[running.job.completion][function] = score;
        }
        true
    }

    /// Closes a job; false if it was given up before.
    fn finish(&mut self, number: u64) -> bool {
        let Some(running) = self.running.remove(&number) else { return false };
        if let Some(pending) = self.pending.get_mut(&running.job.ticket) {
            pending.num_open -= 1;
        }
        true
    }
}

impl Shared {
    /// The state; a thread never panics while it holds the lock.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's life: score jobs until the pool closes or this thread was given up.
    pub fn work(&self) {
        let mut state = self.lock();
        loop {
            if state.closed {
                state.num_workers -= 1;
                self.changed.notify_all();
                return;
            }
            let Some(job) = state.queue.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let Some(group) = state.pending.get(&job.ticket).map(|pending| Arc::clone(&pending.group)) else {
                continue;
            };
            let (number, completion) = (state.number(), job.completion);
            state.running.insert(number, Running { job, deadline: Instant::now() + self.timeout });
            drop(state);
            if !self.score(number, &group, completion) {
                return;
            }
            state = self.lock();
            if !state.finish(number) {
                return;
            }
            self.changed.notify_all();
        }
    }

    /// Runs every function on one completion; false if the job was given up meanwhile.
    fn score(&self, number: u64, group: &RolloutGroup, completion: usize) -> bool {
        let completion = &group.completions[completion];
        let input = RewardInput {
            prompt: &group.prompt.text,
            completion: &completion.text,
            token_ids: &completion.token_ids,
            finish_reason: completion.finish_reason,
            columns: &group.prompt.columns,
        };
        self.functions.iter().enumerate().all(|(index, (name, function))| {
            let outcome = catch_unwind(AssertUnwindSafe(|| function(&input)));
            self.lock().record(number, index, name, outcome)
        })
    }
}

/// The score, or `None` with its cause counted; the first of each cause is told.
fn finite(name: &str, outcome: Outcome, failures: &mut RewardFailures) -> Option<f32> {
    let (count, cause) = match outcome {
        Ok(Ok(score)) if score.is_finite() => return Some(score),
        Ok(Ok(score)) => (&mut failures.non_finite, score.to_string()),
        Ok(Err(error)) => (&mut failures.errors, error.to_string()),
        Err(_) => (&mut failures.panics, "panic".to_owned()),
    };
    if *count == 0 {
        tracing::warn!(reward = name, cause, "a reward failed; its completion is masked");
    }
    *count += 1;
    None
}
