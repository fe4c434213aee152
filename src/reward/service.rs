//! A reward in processes of its own, as it is configured.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use super::grading::Grading;
use super::worker::Program;
use crate::config::RewardBatch;

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
