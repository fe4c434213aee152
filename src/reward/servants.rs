//! Threads that use worker processes or HTTP services for rewards. Each thread of a process reward has one worker, which it replaces if the worker
//! hangs, ends or writes a malformed reply.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::conversation::{WorkerConversation, WorkerLoss};
use super::job::GroupJob;
use super::service::RewardService;
use super::state::PoolShared;
use super::worker::RewardWorker;
use crate::error::Error;

/// Pause before a failed worker is replaced. It doubles with each consecutive failure, up to the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Main loop of a thread for a process reward: keeps a worker running and sends it jobs until the pool closes. `own` is the service's index in the
/// pool.
pub(super) fn serve_service(shared: &Arc<PoolShared>, own: usize) {
    let service = &shared.services[own];
    if let Err(error) = serve_until_closed(service, shared, own) {
        let mut state = shared.lock();
        state.broken.get_or_insert(error);
    }
    shared.lock().num_servants -= 1;
    shared.changed.notify_all();
}

fn serve_until_closed(service: &RewardService, shared: &PoolShared, own: usize) -> Result<(), Error> {
    let worker = RewardWorker::start(&service.program).map_err(|failure| service.program.refusal(&failure.cause))?;
    let mut state = shared.lock();
    state.num_ready += 1;
    state.needed_columns.extend(worker.needed_columns.iter().map(|column| (service.index, column.clone())));
    drop(state);
    shared.changed.notify_all();
    let mut conversation = WorkerConversation::new(service, shared, own, worker);
    while conversation.take_on() {
        let Some(lost) = conversation.hear() else { continue };
        match replace(service, shared, lost)? {
            Some(worker) => conversation.go_on_with(worker),
            None => break,
        }
    }
    Ok(())
}

/// Starts a worker in place of one that failed or ended by itself; `None` if the pool closed meanwhile.
///
/// # Errors
/// [`Error::RewardService`] if too many workers failed in a row.
fn replace(service: &RewardService, shared: &PoolShared, lost: WorkerLoss) -> Result<Option<RewardWorker>, Error> {
    let mut failure = match lost {
        WorkerLoss::Failed(failure) => failure,
        WorkerLoss::Spent => match RewardWorker::start(&service.program) {
            Ok(worker) => return Ok(Some(worker)),
            Err(failure) => failure,
        },
    };
    loop {
        let num_failures = service.num_failures.fetch_add(1, Ordering::Relaxed) + 1;
        if num_failures >= service.max_failures {
            let (name, message) = (service.name.clone(), failure.cause);
            return Err(Error::RewardService { name, num_failures, message });
        }
        let pause = FIRST_PAUSE.saturating_mul(1 << (num_failures - 1).min(16)).min(LONGEST_PAUSE);
        if !shared.pause_until(Instant::now() + pause) {
            return Ok(None);
        }
        match RewardWorker::start(&service.program) {
            Ok(worker) => return Ok(Some(worker)),
            Err(again) => failure = again,
        }
    }
}

/// Main loop of a thread for an HTTP reward: requests scores, one completion at a time, until the pool closes. `own` is the service's index in the
/// pool.
pub(super) fn serve_endpoint(shared: &Arc<PoolShared>, own: usize) {
    let endpoint = &shared.endpoints[own];
    while let Some(GroupJob { job, group }) = shared.next_job(|state| &mut state.endpoint_queues[own]) {
        let (begun, index) = (Instant::now(), job.completions.start);
        let outcome = endpoint.score(&|next| shared.pause_until(next), &group, index);
        let broken = endpoint.count(begun, &outcome);
        let mut state = shared.lock();
        state.file(job.ticket, index, (endpoint.index, &endpoint.name), outcome);
        state.close(&job);
        if let Some(error) = broken {
            state.broken.get_or_insert(error);
        }
        drop(state);
        shared.changed.notify_all();
    }
    shared.lock().num_servants -= 1;
    shared.changed.notify_all();
}
