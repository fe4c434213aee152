//! The exchange between a thread and its worker: requests with ids, replies in any order, and whose failure it is when the worker
//! is lost. The worker of an asynchronous function has several requests open, all others one.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::failures::{FailureKind, RewardFailure};
use super::job::{GroupJob, ScoringJob};
use super::protocol::{RewardReply, ScoreResults, excerpt};
use super::service::RewardService;
use super::state::PoolShared;
use super::worker::RewardWorker;

/// Longest time between two looks for further jobs while some are open, and whether the pool has closed.
const LOOK: Duration = Duration::from_millis(10);
/// Time that an asynchronous function has to end after it was cancelled, before its worker is killed.
const GRACE: Duration = Duration::from_secs(1);
/// Answered requests that are remembered, so that a second answer takes the score back.
const NUM_REMEMBERED: usize = 256;

/// Why a conversation needs another worker.
pub(super) enum WorkerLoss {
    /// The worker failed.
    Failed(RewardFailure),
    /// The worker ended by itself, as one that gives no ids does after every request.
    Spent,
}

/// One worker and what it was asked.
pub(super) struct WorkerConversation<'a> {
    service: &'a RewardService,
    shared: &'a PoolShared,
    /// The service's place in the pool.
    own: usize,
    /// The worker; `None` once it is lost.
    worker: Option<RewardWorker>,
    /// Requests without an answer.
    open: Vec<UnansweredRequest>,
    /// Requests that this worker has answered, the newest last.
    answered: VecDeque<(u64, ScoringJob)>,
    /// Work that was open when a worker was lost to something else, or to nobody knows what. It is asked again, one by one.
    again: VecDeque<GroupJob>,
    /// Whether the open request is asked again.
    asks_again: bool,
    next_id: u64,
}

/// A request without an answer.
struct UnansweredRequest {
    id: u64,
    work: GroupJob,
    deadline: Instant,
}

/// A request with its answer.
struct AnsweredRequest {
    open: UnansweredRequest,
    outcome: Result<ScoreResults, RewardFailure>,
}

impl<'a> WorkerConversation<'a> {
    /// With a worker that is ready.
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

    /// Continues with another worker in the place of the one that was lost.
    pub fn go_on_with(&mut self, worker: RewardWorker) {
        self.answered.clear();
        self.worker = Some(worker);
    }

    /// Asks as much as the worker may have open, and waits for work if there is none; false once the pool closes.
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
            worker.send(&self.service.grading.frame(id, &work.job, &work.group));
        }
        self.open.push(UnansweredRequest { id, work, deadline: Instant::now() + self.service.timeout });
    }

    /// Waits for answers for a moment and books them; says if the worker is lost.
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

    /// Whether what the worker wrote may have been meant for a request before: a worker that has had none tells.
    fn may_be_of_another(&self, lost: &WorkerLoss) -> bool {
        matches!(lost, WorkerLoss::Failed(failure) if failure.kind == FailureKind::Output) && !self.answered.is_empty()
    }

    /// Reads replies into `answers`. An error says why the worker is lost, and whether some request has been blamed for it; where
    /// none has, it is that of one of those still open.
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

    /// Finds the request that a reply answers.
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

    /// Books a reply that does not say which request it answers: it is that to the open one if the worker writes nothing more.
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

/// Blames output that follows an answer at once and is no reply on the request that was answered; with no answer before it,
/// nobody knows
/// which request it belongs to.
fn blame_last(answers: &mut [AnsweredRequest], failure: RewardFailure) -> (WorkerLoss, bool) {
    let is_blamed = !answers.is_empty();
    if let Some(last) = answers.last_mut() {
        last.outcome = Err(failure.clone());
    }
    (WorkerLoss::Failed(failure), is_blamed)
}
