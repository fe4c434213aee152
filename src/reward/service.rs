//! A reward in processes of its own: each thread has one worker, and another in its place when it hangs, dies or writes what is
//! no reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::conversation::{WorkerConversation, WorkerLoss};
use super::failures::RewardFailure;
use super::grading::Grading;
use super::protocol::ScoreResults;
use super::state::{PoolShared, PoolState, ScoringJob};
use super::worker::{Program, RewardWorker};
use crate::config::RewardBatch;
use crate::error::Error;

/// Pause before a worker that died is replaced; it doubles with every failure in a row up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A reward that is served by processes.
#[derive(Debug)]
pub(super) struct RewardService {
    /// Place of this reward among all.
    pub index: usize,
    pub name: String,
    pub program: Program,
    /// How the scores of its processes become rewards.
    pub grading: Grading,
    /// The completions of one request.
    pub batch: RewardBatch,
    /// Longest time of a request.
    pub timeout: Duration,
    pub num_workers: usize,
    /// Requests that a worker with an asynchronous function has open at once.
    pub concurrency: usize,
    /// Workers that may fail in a row.
    pub max_failures: usize,
    /// Workers that failed since the last score.
    pub num_failures: AtomicUsize,
    /// Whether the log says that replies come without ids.
    pub has_no_ids: AtomicBool,
}

impl RewardService {
    /// A thread's life: keep a worker and give it jobs until the pool closes. `own` is the service's place in the pool.
    pub fn serve(shared: &Arc<PoolShared>, own: usize) {
        let service = &shared.services[own];
        if let Err(error) = service.serve_until_closed(shared, own) {
            let mut state = shared.lock();
            state.broken.get_or_insert(error);
        }
        shared.lock().num_servants -= 1;
        shared.changed.notify_all();
    }

    fn serve_until_closed(&self, shared: &PoolShared, own: usize) -> Result<(), Error> {
        let worker = RewardWorker::start(&self.program).map_err(|failure| self.program.refusal(&failure.cause))?;
        let mut state = shared.lock();
        state.num_ready += 1;
        state.needed_columns.extend(worker.needed_columns.iter().map(|column| (self.index, column.clone())));
        drop(state);
        shared.changed.notify_all();
        let mut conversation = WorkerConversation::new(self, shared, own, worker);
        while conversation.take_on() {
            let Some(lost) = conversation.hear() else { continue };
            match self.replace(shared, lost)? {
                Some(worker) => conversation.go_on_with(worker),
                None => break,
            }
        }
        Ok(())
    }

    /// Books what was said of a job's completions, which is then done.
    pub fn file(&self, shared: &PoolShared, job: &ScoringJob, outcome: Result<ScoreResults, RewardFailure>) {
        if outcome.iter().flatten().any(Result::is_ok) {
            self.num_failures.store(0, Ordering::Relaxed);
        }
        let mut state = shared.lock();
        self.book(&mut state, job, outcome);
        state.close(job);
        drop(state);
        shared.changed.notify_all();
    }

    /// Masks the completions of a job that was answered before, unless somebody has taken its scores.
    pub fn take_back(&self, shared: &PoolShared, job: &ScoringJob, failure: RewardFailure) {
        self.book(&mut shared.lock(), job, Err(failure));
    }

    fn book(&self, state: &mut PoolState, job: &ScoringJob, outcome: Result<ScoreResults, RewardFailure>) {
        let outcomes = outcome.unwrap_or_else(|failure| vec![Err(failure); job.completions.len()]);
        for (completion, outcome) in job.completions.clone().zip(outcomes) {
            state.file(job.ticket, completion, (self.index, &self.name), outcome);
        }
    }

    /// Another worker in the place of one that is gone with this failure, or by itself; `None` if the pool closed meanwhile.
    ///
    /// # Errors
    /// [`Error::RewardService`] where too many failed in a row.
    fn replace(&self, shared: &PoolShared, lost: WorkerLoss) -> Result<Option<RewardWorker>, Error> {
        let mut failure = match lost {
            WorkerLoss::Failed(failure) => failure,
            WorkerLoss::Spent => match RewardWorker::start(&self.program) {
                Ok(worker) => return Ok(Some(worker)),
                Err(failure) => failure,
            },
        };
        loop {
            let num_failures = self.num_failures.fetch_add(1, Ordering::Relaxed) + 1;
            if num_failures >= self.max_failures {
                let (name, message) = (self.name.clone(), failure.cause);
                return Err(Error::RewardService { name, num_failures, message });
            }
            let pause = FIRST_PAUSE.saturating_mul(1 << (num_failures - 1).min(16)).min(LONGEST_PAUSE);
            if !shared.pause_until(Instant::now() + pause) {
                return Ok(None);
            }
            match RewardWorker::start(&self.program) {
                Ok(worker) => return Ok(Some(worker)),
                Err(again) => failure = again,
            }
        }
    }
}
