//! Where training was: everything a resumed run needs beside weights and optimizer state.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::manifest::hexadecimal;
use crate::data::SamplerState;
use crate::error::{Error, Result};
use crate::grpo::EntropyControl;
use crate::metrics::{LogHistory, redact_json};
use crate::types::Trajectory;
use crate::untrusted::{self, MAX_LOG_BYTES};

pub(super) const FILE: &str = "trainer_state.json";

/// `trainer_state.json`; names are those of transformers' `TrainerState` where one exists.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Optimizer updates made or skipped.
    pub global_step: u64,
    /// Updates that changed the weights: the exponent of Adam's bias corrections.
    pub num_updates: u64,
    /// Batches sampled, the step in every random key; of a supervised run, those drawn.
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
    /// Groups that the next step goes on with, those of all ranks.
    #[serde(default)]
    pub carried: Vec<CarriedGroup>,
    /// Weight of the entropy bonus, which an adaptive one moves.
    #[serde(default)]
    pub entropy_control: Option<EntropyControl>,
    /// Step of the best evaluation, if the run is to end with its weights.
    #[serde(default)]
    pub best_global_step: Option<u64>,
    /// The run's configuration.
    pub config: SavedConfig,
    /// The lines of metrics.jsonl; the first rank's are the ones that are saved.
    pub log_history: LogHistory,
    /// Metrics of the steps since its newest line, which the next one averages too; bit patterns keep them exact, NaN among them.
    #[serde(default)]
    pub unlogged: Vec<BTreeMap<String, u64>>,
}

/// A group that was not complete when its step ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CarriedGroup {
    /// Training row of the group's prompt.
    pub row: usize,
    /// Step at which it was first scheduled, in the random keys of all its tokens.
    pub first_step: u64,
    /// In sample order; empty if nothing is sampled yet.
    pub completions: Vec<Trajectory>,
}

impl CarriedGroup {
    /// A row that is still to be begun.
    pub fn new(row: usize) -> Self {
        Self { row, first_step: 0, completions: Vec::new() }
    }

    /// Tokens sampled so far.
    pub fn num_tokens(&self) -> usize {
        self.completions.iter().map(|completion| completion.token_ids.len()).sum()
    }
}

/// A configuration without its secrets, which can be told apart nevertheless.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedConfig {
    /// Every key with its value, secrets redacted.
    values: BTreeMap<String, Value>,
    /// SHA-256 of salt, key and value of the keys that were redacted.
    digests: BTreeMap<String, String>,
    salt: u64,
}

impl SavedConfig {
    /// The keys and values of a configuration that may be written.
    pub fn of(entries: impl IntoIterator<Item = (String, Value)>) -> Self {
        let salt = RandomState::new().build_hasher().finish();
        let mut saved = Self { salt, ..Self::default() };
        for (key, value) in entries {
            let mut written = value.clone();
            redact_json(&mut written);
            if written != value {
                saved.digests.insert(key.clone(), digest(salt, &key, &value));
            }
            saved.values.insert(key, written);
        }
        saved
    }

    /// Keys and values again; a redacted one is `current`'s where that is the same.
    pub fn entries(&self, current: impl IntoIterator<Item = (String, Value)>) -> BTreeMap<String, Value> {
        let mut entries = self.values.clone();
        for (key, value) in current {
            if self.digests.get(&key).is_some_and(|saved| *saved == digest(self.salt, &key, &value)) {
                entries.insert(key, value);
            }
        }
        entries
    }
}

fn digest(salt: u64, key: &str, value: &Value) -> String {
    hexadecimal(&Sha256::digest(format!("{salt} {key} {value}")))
}

impl TrainerState {
    /// Where a checkpoint has it.
    pub(super) fn file(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    pub(super) fn read(folder: &Path) -> Result<Self> {
        let bad =
            |message: String| Error::Checkpoint { path: folder.to_owned(), message: format!("{FILE}: {message}") };
        let text = untrusted::read(&Self::file(folder), MAX_LOG_BYTES).map_err(|error| bad(error.to_string()))?;
        serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))
    }

    /// The text of the file.
    pub(super) fn to_text(&self) -> String {
        serde_json::to_string_pretty(self).expect("a state is plain data") + "\n"
    }

    pub(super) fn write_text(folder: &Path, text: &str) -> Result<()> {
        let path = Self::file(folder);
        std::fs::write(&path, text).map_err(Error::io(path))
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let path = Self::file(folder);
        let mut file = BufWriter::new(File::create(&path).map_err(Error::io(&path))?);
        let written = serde_json::to_writer_pretty(&mut file, self).map_err(io::Error::from);
        written.and_then(|()| file.write_all(b"\n")).and_then(|()| file.flush()).map_err(Error::io(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn secrets_are_not_saved_and_a_changed_one_is_seen() {
        let config = |prompt: &str| {
            let keys = ["model_name_or_path=m", "train_file=t", "reward_funcs=[\"format\"]"].map(str::to_owned);
            Config::load(None, &[&keys[..], &[format!("system_prompt={prompt}")]].concat()).unwrap()
        };
        let (mine, other) = (config("my_token: \"a b\" and more"), config("my_token: \"c\" and more"));
        let saved = SavedConfig::of(mine.entries());
        let text = serde_json::to_string(&saved).unwrap();
        assert!(text.contains("redacted") && !text.contains("a b"), "{text}");
        let saved: SavedConfig = serde_json::from_str(&text).unwrap();
        let restored = |current: &Config| Config::from_entries(saved.entries(current.entries())).unwrap();
        assert_eq!(restored(&mine), mine);
        let changes = super::super::changes(&other, &restored(&other));
        assert_eq!(changes.iter().map(|change| change.key.as_str()).collect::<Vec<_>>(), ["system_prompt"]);
    }
}
