//! Configuration and state of a reward that worker processes compute.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use super::grading::Grading;
use super::worker::{Origin, Program};
use crate::config::RewardBatch;

/// A reward that worker processes compute.
#[derive(Debug)]
pub(super) struct RewardService {
    /// Index of this reward among all rewards.
    pub index: usize,
    pub name: String,
    pub program: Program,
    /// How the scores of its processes become rewards.
    pub grading: Grading,
    /// Which completions are sent in one request.
    pub batch: RewardBatch,
    /// Time limit of a request.
    pub timeout: Duration,
    pub num_workers: usize,
    /// Number of requests that a worker with an asynchronous function may have open.
    pub concurrency: usize,
    /// Number of worker failures in a row after which the run ends.
    pub max_failures: usize,
    /// Number of worker failures since the last score.
    pub num_failures: AtomicUsize,
    /// Whether the log already mentions that replies have no ids.
    pub has_no_ids: AtomicBool,
}

impl RewardService {
    /// Whether its processes call a Python function with the columns of rows.
    pub fn is_python_function(&self) -> bool {
        self.program.is_ours && matches!(self.program.origin, Origin::Key(..))
    }
}
