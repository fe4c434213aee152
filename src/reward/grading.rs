//! Converts the scores of a reward's worker processes to rewards.

use super::failures::{RewardFailure, Score};
use super::job::{RowLayout, ScoringJob};
use super::protocol::{ScoreRequest, ScoreResults, TextRequest, frame};
use super::verdict::Verdict;
use crate::types::{RolloutGroup, Trajectory};

/// Share of passed tests above which open-r1's `binary_code` is 1.
const PASSED: f32 = 0.99;

/// How the scores of a service's processes become rewards.
#[derive(Debug)]
pub(super) enum Grading {
    /// The score is the reward.
    Scores,
    /// The reward is 1 if (almost) all tests passed, else 0.
    Passed,
    /// The score says whether the answer is right; the verdict maps this to the reward.
    Verdict(Box<Verdict>),
}

impl Grading {
    /// The scores of a job that can be computed without a worker process; `None` for other jobs.
    pub fn at_once(&self, job: &ScoringJob, group: &RolloutGroup) -> Option<Result<ScoreResults, RewardFailure>> {
        let Self::Verdict(verdict) = self else { return None };
        let scores: Result<Option<ScoreResults>, RewardFailure> =
            job.completions.clone().map(|index| Ok(verdict.at_once(group, index)?.map(Ok))).collect();
        scores.transpose()
    }

    /// The request for a job, as a frame. `layout` is given for Python functions.
    pub fn frame(&self, id: u64, job: &ScoringJob, group: &RolloutGroup, layout: Option<&RowLayout>) -> Vec<u8> {
        let Self::Verdict(verdict) = self else { return frame(&ScoreRequest::new(id, group, job, layout)) };
        let reference = verdict.reference(&group.prompt.columns).unwrap_or_default(); // `at_once` refuses a row without
        let completions = &group.completions[job.completions.clone()];
        frame(&TextRequest::new(id, completions.iter().map(Trajectory::newest_text).collect(), &reference))
    }

    /// Converts the scores that a process returned for a job to rewards.
    pub fn finish(&self, job: &ScoringJob, group: &RolloutGroup, said: ScoreResults) -> ScoreResults {
        let finish = |(index, said): (usize, Result<Score, RewardFailure>)| match self {
            Self::Scores => said,
            Self::Passed => said.map(|score| match score {
                Score::Value(share) => Score::Value(f32::from(u8::from(share > PASSED))),
                other => other,
            }),
            Self::Verdict(verdict) => verdict.finish(said?, group, index),
        };
        job.completions.clone().zip(said).map(finish).collect()
    }
}
