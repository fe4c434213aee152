//! Where training was: everything a resumed run needs beside weights and optimizer state.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::data::SamplerState;
use crate::error::{Error, Result};

const FILE: &str = "trainer_state.json";

/// `trainer_state.json`; names are those of transformers' `TrainerState` where one exists.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Optimizer updates made or skipped.
    pub global_step: u64,
    /// Updates that changed the weights: the exponent of Adam's bias corrections.
    pub num_updates: u64,
    /// Generation batches sampled: the step in every random key.
    pub generation_step: u64,
    /// Passes over the training rows.
    pub epoch: f64,
    /// Updates in all.
    pub max_steps: u64,
    /// Tokens trained on, over all ranks.
    pub num_input_tokens_seen: u64,
    /// Ranks that trained.
    pub world_size: usize,
    /// Training rows, after filtering.
    pub num_rows: usize,
    /// Position in the training rows.
    pub sampler: SamplerState,
    /// The run's configuration, as TOML.
    pub config: String,
    /// What was written to metrics.jsonl.
    pub log_history: Vec<serde_json::Value>,
}

impl TrainerState {
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let bad =
            |message: String| Error::Checkpoint { path: folder.to_owned(), message: format!("{FILE}: {message}") };
        let text = std::fs::read_to_string(folder.join(FILE)).map_err(|error| bad(error.to_string()))?;
        serde_json::from_str(&text).map_err(|error| bad(error.to_string()))
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE);
        let text = serde_json::to_string_pretty(self).expect("the state is plain data");
        std::fs::write(&path, text + "\n").map_err(Error::io(path))
    }
}
