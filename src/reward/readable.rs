//! Finds, before training, reference answers that math-verify cannot parse. Samples of such rows would be masked.

use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::RewardPool;
use super::failures::Score;
use super::grading::Grading;
use super::protocol::{RewardReply, TextRequest, frame};
use super::source::math_verify;
use super::verdict::Verdict;
use super::worker::{Program, RewardWorker};
use crate::error::Result;
use crate::phase;

/// Number of reference answers in one request. `LIMIT` is the time limit of a request.
const NUM_IN_REQUEST: usize = 256;
const LIMIT: Duration = Duration::from_secs(60);
/// Longest interval between two heartbeats.
const LOOK: Duration = Duration::from_millis(200);

impl RewardPool {
    /// Indexes of the rows whose reference answer math-verify cannot parse, for the first reward that compares with math-verify. `None`
    /// if no reward does. Answers that could not be checked are not included.
    ///
    /// # Errors
    /// [`Error::Environment`](crate::Error::Environment) if math-verify is not installed.
    pub fn unreadable_answers<'a>(
        &self,
        rows: impl Iterator<Item = &'a Map<String, Value>>,
    ) -> Result<Option<Vec<usize>>> {
        let verdicts = self.services().iter().find_map(|service| match &service.grading {
            Grading::Verdict(verdict) => Some((&service.name, verdict)),
            _ => None,
        });
        let Some((reward, verdict)) = verdicts else { return Ok(None) };
        let (mut unreadable, mut open) = (Vec::new(), Vec::new());
        for (place, columns) in rows.enumerate() {
            match verdict.reference(columns) {
                Ok(reference) if Verdict::is_plain(&reference) => {}
                Ok(reference) => open.push((place, reference)),
                Err(_) => unreadable.push(place),
            }
        }
        let mut asked =
            AnswerReader { program: math_verify(reward, &verdict.readable(), verdict.settings()), worker: None };
        for part in open.chunks(NUM_IN_REQUEST) {
            let said = asked.ask(part.iter().map(|(_, reference)| reference.as_str()).collect())?;
            let found = part.iter().zip(said).filter(|(_, is_readable)| !is_readable);
            unreadable.extend(found.map(|((place, _), _)| *place));
        }
        unreadable.sort_unstable();
        Ok(Some(unreadable))
    }
}

/// A worker process that checks whether reference answers can be parsed. It is started at the first use.
struct AnswerReader {
    program: Program,
    worker: Option<RewardWorker>,
}

impl AnswerReader {
    /// Whether each of the reference answers can be parsed. If the worker fails, all are assumed to be.
    fn ask(&mut self, references: Vec<&str>) -> Result<Vec<bool>> {
        let num_references = references.len();
        let mut worker = match self.worker.take() {
            Some(worker) => worker,
            None => RewardWorker::start(&self.program).map_err(|failure| self.program.refusal(&failure.cause))?,
        };
        worker.send(&frame(&TextRequest::new(1, references, "")));
        let end = Instant::now() + LIMIT;
        let mut said = worker.receive(Instant::now() + LOOK);
        while matches!(said, Ok(None)) && Instant::now() < end {
            phase::beat();
            said = worker.receive(Instant::now() + LOOK);
        }
        let frame = said.and_then(|reply| reply.ok_or_else(|| worker.overdue()));
        match frame.and_then(|frame| RewardReply::parse(&frame)?.scores(num_references)) {
            Ok(scores) => {
                self.worker = Some(worker);
                let is_readable = |score: Result<Score, _>| !score.is_ok_and(|score| score.value() == Some(0.0));
                Ok(scores.into_iter().map(is_readable).collect())
            }
            Err(failure) => {
                tracing::warn!("cannot check {num_references} reference answers: {}", failure.cause);
                Ok(vec![true; num_references])
            }
        }
    }
}
