//! Exchange of requests and replies with a worker process. Requests have ids; replies come in any order. Decides which request failed when
//! the worker is lost. A worker with an asynchronous function has several open requests, any other has one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::failures::{FailureKind, RewardFailure};
use super::job::{GroupJob, ScoringJob};
use super::protocol::{RewardReply, ScoreResults, excerpt};
use super::service::RewardService;
use super::state::PoolShared;
use super::worker::RewardWorker;

/// Interval at which the thread checks for new jobs and for the end of the pool while requests are open.
const LOOK: Duration = Duration::from_millis(10);
/// Time that an asynchronous function has to end after it was cancelled, before its worker is killed.
const GRACE: Duration = Duration::from_secs(1);
/// Number of answered requests that are remembered. A second reply to one of them revokes its score.
const NUM_REMEMBERED: usize = 256;

/// Why a conversation needs another worker.
pub(super) enum WorkerLoss {
    /// The worker failed.
    Failed(RewardFailure),
    /// The worker ended by itself, as it does after each request if its replies have no ids.
    Spent,
}

/// A worker process and the state of its requests.
pub(super) struct WorkerConversation<'a> {
    service: &'a RewardService,
    shared: &'a PoolShared,
    /// Index of the reward's service in the pool.
    own: usize,
    /// The worker; `None` once it is lost.
    worker: Option<RewardWorker>,
    /// Requests without a reply.
    open: Vec<UnansweredRequest>,
    /// Requests that this worker has answered, in order of the replies.
    answered: VecDeque<(u64, ScoringJob)>,
    /// Jobs that were open when a worker was lost for a cause that none of them could be blamed for. They are sent again, one at a time.
    again: VecDeque<GroupJob>,
    /// Whether the open request is one that was sent again.
    asks_again: bool,
    next_id: u64,
}

/// A request without a reply.
struct UnansweredRequest {
    id: u64,
    work: GroupJob,
    deadline: Instant,
}

/// A request with its reply.
struct AnsweredRequest {
    open: UnansweredRequest,
    outcome: Result<ScoreResults, RewardFailure>,
}

impl<'a> WorkerConversation<'a> {
    /// Begins an exchange with a worker that is ready.
    pub fn new(service: &'a RewardService, shared: &'a PoolShared, own: usize, worker: RewardWorker) -> Self {
        Self {
            service,
            shared,
            own,
            worker: Some(worker),
            open: Vec::new(),
            answered: VecDeque::new(),
            again: VecDeque::new(),
            asks_again: false,
            next_id: 1,
        }
    }

    /// Continues with a new worker that replaces the lost one.
    pub fn go_on_with(&mut self, worker: RewardWorker) {
        self.answered.clear();
        self.worker = Some(worker);
    }

    /// Sends as many requests as the worker may have open; waits for a job if none is open. Returns false once the pool closes.
    pub fn take_on(&mut self) -> bool {
        while self.open.len() < self.room() {
            let own = self.own;
            let work = match self.again.pop_front() {
                Some(work) => {
                    self.asks_again = true;
                    Some(work)
                }
                None if self.open.is_empty() => {
                    self.asks_again = false;
                    match self.shared.next_job(|state| &mut state.service_queues[own]) {
                        Some(work) => Some(work),
                        None => return false,
                    }
                }
                None => self.shared.job_at_hand(|state| &mut state.service_queues[own]),
            };
            let Some(work) = work else { break };
            self.ask(work);
        }
        !self.shared.is_over()
    }

    fn room(&self) -> usize {
        let is_async = self.worker.as_ref().is_some_and(|worker| worker.is_async);
        let is_alone = !self.again.is_empty() || (self.asks_again && !self.open.is_empty());
        if is_async && !is_alone { self.service.concurrency } else { 1 }
    }

    fn ask(&mut self, work: GroupJob) {
        if let Some(outcome) = self.service.grading.at_once(&work.job, &work.group) {
            return self.shared.file(self.service, &work.job, outcome);
        }
        let id = self.next_id;
        self.next_id += 1;
        if let Some(worker) = &mut self.worker {
            let layout = self.service.is_python_function().then(|| Arc::clone(&self.shared.lock().layout));
            worker.send(&self.service.grading.frame(id, &work.job, &work.group, layout.as_deref()));
        }
        self.open.push(UnansweredRequest { id, work, deadline: Instant::now() + self.service.timeout });
    }

    /// Waits briefly for replies and records their scores. Returns the reason if the worker is lost.
    pub fn hear(&mut self) -> Option<WorkerLoss> {
        let mut answers = Vec::new();
        let outcome = self.listen(&mut answers);
        for AnsweredRequest { open, outcome } in answers {
            self.shared.file(self.service, &open.work.job, outcome);
            self.answered.push_back((open.id, open.work.job));
        }
        let surplus = self.answered.len().saturating_sub(NUM_REMEMBERED);
        self.answered.drain(..surplus);
        let (lost, is_blamed) = match outcome {
            Ok(()) => return None,
            Err(lost) => lost,
        };
        self.worker = None; // it is gone, with all that it started, before another starts
        let mut open: VecDeque<_> = self.open.drain(..).collect();
        if let (WorkerLoss::Failed(failure), false, 1) = (&lost, is_blamed || self.may_be_of_another(&lost), open.len())
        {
            let alone = open.pop_front().expect("there is one");
            self.shared.file(self.service, &alone.work.job, Err(failure.clone()));
        }
        self.again.extend(open.into_iter().map(|open| open.work));
        Some(lost)
    }

    /// Whether the output that caused the loss may belong to an earlier request. It cannot if the worker has answered no request.
    fn may_be_of_another(&self, lost: &WorkerLoss) -> bool {
        matches!(lost, WorkerLoss::Failed(failure) if failure.kind == FailureKind::Output) && !self.answered.is_empty()
    }

    /// Reads replies into `answers`. An error says why the worker is lost, and whether a request was already blamed for it. If not,
    /// one of the open requests caused it.
    fn listen(&mut self, answers: &mut Vec<AnsweredRequest>) -> Result<(), (WorkerLoss, bool)> {
        let Some(mut worker) = self.worker.take() else { return Ok(()) };
        let failed = |failure| (WorkerLoss::Failed(failure), false);
        let grace = if worker.is_async { GRACE } else { Duration::ZERO };
        let last = self.open.iter().map(|open| open.deadline + grace).min().unwrap_or_else(Instant::now);
        let mut reply = worker.receive(last.min(Instant::now() + LOOK)).map_err(failed)?;
        if reply.is_none() && Instant::now() >= last {
            return Err(failed(worker.overdue()));
        }
        // All that has come is read before anything is booked: a second answer may be among it.
        while let Some(frame) = reply {
            let parsed = RewardReply::parse(&frame).map_err(|failure| blame_last(answers, failure))?;
            if parsed.id.is_none() && !self.service.program.is_ours && self.open.len() == 1 {
                return Err((self.hear_last(worker, parsed, answers), true));
            }
            self.sort(parsed, &frame, answers)?;
            reply = worker.reply_at_hand().map_err(|failure| blame_last(answers, failure))?;
        }
        self.worker = Some(worker);
        Ok(())
    }

    /// Assigns a reply to its request by id. A second reply to the same request is a failure of this request.
    fn sort(
        &mut self,
        reply: RewardReply,
        frame: &[u8],
        answers: &mut Vec<AnsweredRequest>,
    ) -> Result<(), (WorkerLoss, bool)> {
        let twice = || RewardFailure::new(FailureKind::Output, "more than one reply to a request");
        if let Some(place) = self.open.iter().position(|open| Some(open.id) == reply.id) {
            let open = self.open.swap_remove(place);
            let GroupJob { job, group } = &open.work;
            let mut outcome = reply.scores(job.completions.len());
            outcome = outcome.map(|scores| self.service.grading.finish(job, group, scores));
            if Instant::now() > open.deadline {
                outcome = Err(RewardFailure::new(FailureKind::Timeout, "no reply before its deadline"));
            }
            let lost = outcome.as_ref().err().filter(|failure| failure.kind == FailureKind::Output).cloned();
            answers.push(AnsweredRequest { open, outcome });
            return lost.map_or(Ok(()), |failure| Err((WorkerLoss::Failed(failure), true)));
        }
        if let Some(answer) = answers.iter_mut().find(|answer| Some(answer.open.id) == reply.id) {
            answer.outcome = Err(twice());
            return Err((WorkerLoss::Failed(twice()), true));
        }
        if let Some((_, job)) = self.answered.iter().find(|(id, _)| Some(*id) == reply.id) {
            self.shared.take_back(self.service, job, twice());
            return Err((WorkerLoss::Failed(twice()), true));
        }
        let what = format!("a reply to a request that was never sent: {}", excerpt(frame));
        Err((WorkerLoss::Failed(RewardFailure::new(FailureKind::Output, what)), false))
    }

    /// Records a reply without an id. It belongs to the only open request, provided that the worker writes nothing more.
    fn hear_last(
        &mut self,
        worker: RewardWorker,
        reply: RewardReply,
        answers: &mut Vec<AnsweredRequest>,
    ) -> WorkerLoss {
        let open = self.open.remove(0);
        if !self.service.has_no_ids.swap(true, Ordering::Relaxed) {
            let reward = &*self.service.name;
            tracing::warn!(
                reward,
                "replies of this reward have no \"id\", so a new process is started for every request (docs/rewards.md)"
            );
        }
        let outcome = worker.finish(open.deadline).and_then(|()| reply.scores(open.work.job.completions.len()));
        let lost = match &outcome {
            Err(failure) if failure.kind != FailureKind::Error => WorkerLoss::Failed(failure.clone()),
            _ => WorkerLoss::Spent,
        };
        answers.push(AnsweredRequest { open, outcome });
        lost
    }
}

/// Handles malformed output: if it directly follows a reply, the request of that reply fails. Otherwise it is unknown which request
/// caused it. Returns whether a request was blamed.
fn blame_last(answers: &mut [AnsweredRequest], failure: RewardFailure) -> (WorkerLoss, bool) {
    let is_blamed = !answers.is_empty();
    if let Some(last) = answers.last_mut() {
        last.outcome = Err(failure.clone());
    }
    (WorkerLoss::Failed(failure), is_blamed)
}
