//! A reward in processes of its own: each thread has one worker, gives it one job at a time and replaces it when it hangs,
//! dies or writes what is no reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::failures::{Failure, FailureKind, Score};
use super::protocol::{Reply, Request, frame};
use super::state::{Job, Shared};
use super::worker::{Program, Worker};
use crate::config::RewardBatch;
use crate::error::Error;
use crate::types::RolloutGroup;

/// Pause before a worker that died is replaced; it doubles with every failure in a row up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A reward that is served by processes.
#[derive(Debug)]
pub(super) struct Service {
    /// Its place among the rewards.
    pub index: usize,
    pub name: String,
    pub program: Program,
    /// What one request holds.
    pub batch: RewardBatch,
    /// Longest time of a request.
    pub timeout: Duration,
    pub num_workers: usize,
    /// Workers that may fail in a row.
    pub max_failures: usize,
    /// Workers that failed since the last score.
    pub num_failures: AtomicUsize,
}

impl Service {
    /// A thread's life: keep a worker and give it jobs until the pool closes. `own` is the service's place in the pool.
    pub fn serve(shared: &Arc<Shared>, own: usize) {
        let service = &shared.services[own];
        if let Err(error) = service.serve_until_closed(shared, own) {
            let mut state = shared.lock();
            state.broken.get_or_insert(error);
        }
        shared.lock().num_servants -= 1;
        shared.changed.notify_all();
    }

    fn serve_until_closed(&self, shared: &Shared, own: usize) -> Result<(), Error> {
        let mut worker = Worker::start(&self.program).map_err(|failure| self.program.refusal(&failure.cause))?;
        shared.lock().num_ready += 1;
        shared.changed.notify_all();
        while let Some((job, group)) = shared.next_job(|state| &mut state.service_queues[own]) {
            let outcome = self.ask(&mut worker, &group, &job);
            let lost = outcome.as_ref().err().filter(|failure| failure.kind != FailureKind::Error).cloned();
            if outcome.iter().flatten().any(Result::is_ok) {
                self.num_failures.store(0, Ordering::Relaxed);
            }
            self.file(shared, &job, outcome);
            match lost {
                None => {} // the worker goes on
                Some(failure) => match self.replace(shared, worker, failure)? {
                    Some(fresh) => worker = fresh,
                    None => return Ok(()),
                },
            }
        }
        Ok(())
    }

    fn ask(
        &self,
        worker: &mut Worker,
        group: &RolloutGroup,
        job: &Job,
    ) -> Result<Vec<Result<Score, Failure>>, Failure> {
        let request = frame(&Request::new(group, job));
        let reply = worker.exchange(&request, Instant::now() + self.timeout)?;
        Reply::read(&reply, job.completions.len())
    }

    fn file(&self, shared: &Shared, job: &Job, outcome: Result<Vec<Result<Score, Failure>>, Failure>) {
        let outcomes = outcome.unwrap_or_else(|failure| vec![Err(failure); job.completions.len()]);
        let mut state = shared.lock();
        for (completion, outcome) in job.completions.clone().zip(outcomes) {
            state.file(job.ticket, completion, (self.index, &self.name), outcome);
        }
        state.close(job);
        drop(state);
        shared.changed.notify_all();
    }

    /// Another worker in the place of one that failed; `None` if the pool closed meanwhile.
    ///
    /// # Errors
    /// [`Error::RewardService`] where too many failed in a row.
    fn replace(&self, shared: &Shared, old: Worker, mut failure: Failure) -> Result<Option<Worker>, Error> {
        drop(old); // its process group is gone before another starts
        loop {
            let num_failures = self.num_failures.fetch_add(1, Ordering::Relaxed) + 1;
            if num_failures >= self.max_failures {
                let (name, message) = (self.name.clone(), failure.cause);
                return Err(Error::RewardService { name, num_failures, message });
            }
            let pause = FIRST_PAUSE.saturating_mul(1 << (num_failures - 1).min(16)).min(LONGEST_PAUSE);
            let end = Instant::now() + pause;
            let mut state = shared.lock();
            while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                if state.closed || state.broken.is_some() {
                    return Ok(None);
                }
                state = shared.wait(state, left);
            }
            drop(state);
            match Worker::start(&self.program) {
                Ok(worker) => return Ok(Some(worker)),
                Err(again) => failure = again,
            }
        }
    }
}
