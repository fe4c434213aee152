//! The work of a service beside asking a process.

use super::failures::{RewardFailure, Score};
use super::job::ScoringJob;
use super::protocol::{ScoreRequest, ScoreResults, TextRequest, frame};
use super::verdict::Verdict;
use crate::types::{RolloutGroup, Trajectory};

/// Share of tests from which on open-r1's `binary_code` takes a program for right.
const PASSED: f32 = 0.99;

/// How the scores of a service's processes become rewards.
#[derive(Debug)]
pub(super) enum Grading {
    /// The reward.
    Scores,
    /// 1 where all tests were passed, else 0.
    Passed,
    /// The scores tell whether an answer is right, and this is what it is worth.
    Verdict(Box<Verdict>),
}

impl Grading {
    /// The outcome of a job that needs no process.
    pub fn at_once(&self, job: &ScoringJob, group: &RolloutGroup) -> Option<Result<ScoreResults, RewardFailure>> {
        let Self::Verdict(verdict) = self else { return None };
        let scores: Result<Option<ScoreResults>, RewardFailure> =
            job.completions.clone().map(|index| Ok(verdict.at_once(group, index)?.map(Ok))).collect();
        scores.transpose()
    }

    /// The request for a job.
    pub fn frame(&self, id: u64, job: &ScoringJob, group: &RolloutGroup) -> Vec<u8> {
        let Self::Verdict(verdict) = self else { return frame(&ScoreRequest::new(id, group, job)) };
        let reference = verdict.reference(&group.prompt.columns).unwrap_or_default(); // `at_once` refuses a row without
        let completions = &group.completions[job.completions.clone()];
        frame(&TextRequest::new(id, completions.iter().map(Trajectory::newest_text).collect(), &reference))
    }

    /// The scores of a job for what a process answered.
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
