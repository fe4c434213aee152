//! A job of a reward pool.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;

use crate::types::RolloutGroup;

/// Completions of a pending group that are scored together.
#[derive(Debug, Clone)]
pub(super) struct ScoringJob {
    pub ticket: u64,
    pub completions: Range<usize>,
    /// The run's progress when the group was submitted.
    pub progress: RunProgress,
}

/// Progress of the run, which is passed to Python rewards.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct RunProgress {
    /// Number of optimizer updates before the one that trains on these completions.
    pub global_step: u64,
    /// Total number of updates in the run.
    pub max_steps: u64,
}

/// The prompt column and all columns of the training and held-out rows, by which a row becomes the arguments of a Python reward function.
#[derive(Debug, Clone, Default)]
pub(super) struct RowLayout {
    /// The column with the prompt; `None` means the first of the default names that a row has.
    pub prompt_column: Option<String>,
    /// The columns of all rows. A row that lacks one of them has null there, as in a data set of `datasets`.
    pub columns: BTreeSet<String>,
}

/// A job with its group of completions.
#[derive(Debug, Clone)]
pub(super) struct GroupJob {
    pub job: ScoringJob,
    pub group: Arc<RolloutGroup>,
}
