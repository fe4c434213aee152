//! The unit of a reward pool's work.

use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;

use crate::types::RolloutGroup;

/// Completions of a pending group that are scored together.
#[derive(Debug, Clone)]
pub(super) struct ScoringJob {
    pub ticket: u64,
    pub completions: Range<usize>,
    /// Where the run was when the group was submitted.
    pub progress: RunProgress,
}

/// How far the run is, as Python rewards are told.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct RunProgress {
    /// Optimizer updates before the one that these completions are trained on in.
    pub global_step: u64,
    /// Updates in all.
    pub max_steps: u64,
}

/// A job with its group.
#[derive(Debug, Clone)]
pub(super) struct GroupJob {
    pub job: ScoringJob,
    pub group: Arc<RolloutGroup>,
}
