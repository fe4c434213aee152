//! The trainer's state in a checkpoint: everything a resumed run needs besides weights and optimizer state.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::digits::hexadecimal;
use crate::console::redact_json;
use crate::data::SamplerState;
use crate::error::{Error, Result};
use crate::grpo::EntropyControl;
use crate::metrics::LogHistory;
use crate::types::Trajectory;
use crate::untrusted::{self, MAX_LOG_BYTES};

pub(super) const FILE: &str = "trainer_state.json";
/// Upper bound for counts of steps and tokens, so that sums of them do not overflow.
const MAX_COUNT: u64 = 1 << 53;

/// The contents of `trainer_state.json`; names are those of transformers' `TrainerState` where one exists.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Id of the run, which is kept when the run is resumed. Empty in old checkpoints, whose shards have no mark.
    #[serde(default)]
    pub run_id: String,
    /// Optimizer updates, including skipped ones.
    pub global_step: u64,
    /// Updates that changed the weights: the exponent of Adam's bias corrections.
    pub num_updates: u64,
    /// Number of sampled batches, which is the step in every random key; for a supervised run, number of drawn batches.
    pub generation_step: u64,
    /// Passes over the training rows.
    pub epoch: f64,
    /// Total updates of the run.
    pub max_steps: u64,
    /// Tokens trained on, over all ranks.
    pub num_input_tokens_seen: u64,
    /// Number of ranks in the run.
    pub world_size: usize,
    /// Number of training rows, after filtering.
    pub num_rows: usize,
    /// SHA-256 of these rows and their order. `None` in old checkpoints, and for rows that are made instead of read.
    #[serde(default)]
    pub rows_digest: Option<String>,
    /// Identities of the weights that the run does not train but reads again at every start, by the key that names their folder. Empty in old
    /// checkpoints.
    #[serde(default)]
    pub frozen_weights: BTreeMap<String, String>,
    /// Position in the training rows.
    pub sampler: SamplerState,
    /// Unfinished groups of all ranks that the next step continues.
    #[serde(default)]
    pub carried: Vec<CarriedGroup>,
    /// Batches sampled ahead of the steps that train on them, the next one first.
    #[serde(default)]
    pub ahead: Vec<SavedBatch>,
    /// Coefficient of the entropy bonus, which changes if it is adaptive.
    #[serde(default)]
    pub entropy_control: Option<EntropyControl>,
    /// Step of the best evaluation, if the run is to end with its weights.
    #[serde(default)]
    pub best_global_step: Option<u64>,
    /// The run's configuration.
    pub config: SavedConfig,
    /// The lines of metrics.jsonl, as saved by rank 0.
    pub log_history: LogHistory,
    /// Metrics of the steps since the newest line, which the next line also averages. Stored as bit patterns, which are exact, also for NaN.
    #[serde(default)]
    pub unlogged: Vec<BTreeMap<String, u64>>,
}

/// A group that was unfinished when its step ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CarriedGroup {
    /// Training row of the group's prompt.
    pub row: usize,
    /// The step in which it was first scheduled; it is in the random keys of all its tokens.
    pub first_step: u64,
    /// The completions in sample order; empty if nothing has been sampled yet.
    pub completions: Vec<Trajectory>,
}

/// A batch that was sampled before the step that trains on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SavedBatch {
    /// Number of optimizer updates before the one that trains on this batch.
    pub global_step: u64,
    /// Position in the training rows before it was drawn.
    pub before: SamplerState,
    /// The groups of all ranks in the order of the data, complete or not.
    pub groups: Vec<CarriedGroup>,
}

impl CarriedGroup {
    /// A new group of a row, without samples.
    pub fn new(row: usize) -> Self {
        Self { row, first_step: 0, completions: Vec::new() }
    }

    /// Number of tokens sampled so far.
    pub fn num_tokens(&self) -> usize {
        self.completions.iter().map(|completion| completion.token_ids.len()).sum()
    }

    /// Whether a run with `num_generations` completions per prompt can continue the group: it is new or has that many.
    pub fn suits(&self, num_generations: usize) -> bool {
        [0, num_generations].contains(&self.completions.len())
    }

    /// Whether all of its completions have ended.
    pub fn is_complete(&self) -> bool {
        !self.completions.is_empty() && self.completions.iter().all(|completion| completion.finish_reason.is_some())
    }

    /// The newest weight version of its tokens, or the step in which it was first scheduled.
    fn newest_step(&self) -> u64 {
        let versions = self.completions.iter().flat_map(|completion| completion.weight_versions.iter().copied());
        versions.fold(self.first_step, u64::max)
    }
}

/// A configuration without secret values, which can still be compared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedConfig {
    /// Every key with its value; secrets are redacted.
    values: BTreeMap<String, Value>,
    /// SHA-256 of salt, key and value for the redacted keys.
    digests: BTreeMap<String, String>,
    salt: u64,
}

impl SavedConfig {
    /// Stores a configuration with secrets redacted.
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

    /// The saved keys and values. A redacted value is replaced by that of `current` if it is the same.
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
    /// The path of the file in a checkpoint.
    pub(super) fn file(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    pub(super) fn read(folder: &Path) -> Result<Self> {
        let bad =
            |message: String| Error::Checkpoint { path: folder.to_owned(), message: format!("{FILE}: {message}") };
        let text = untrusted::read(&Self::file(folder), MAX_LOG_BYTES).map_err(|error| bad(error.to_string()))?;
        let state: Self = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
        state.check_counts().map_err(bad)?;
        Ok(state)
    }

    /// Refuses counts that no run can reach.
    fn check_counts(&self) -> Result<(), String> {
        let counts = [
            ("global_step", self.global_step),
            ("num_updates", self.num_updates),
            ("generation_step", self.generation_step),
            ("num_input_tokens_seen", self.num_input_tokens_seen),
            ("sampler.epoch", self.sampler.epoch),
        ];
        if let Some((name, count)) = counts.into_iter().find(|(_, count)| *count > MAX_COUNT) {
            return Err(format!("{name} is {count}: expected at most {MAX_COUNT}"));
        }
        let newest = self.generation_step + self.ahead.len() as u64; // a batch is drawn with the number of the step that trains on it
        let ahead = self.ahead.iter().flat_map(|batch| &batch.groups).map(|group| (group, newest));
        let mut groups = self.carried.iter().map(|group| (group, self.generation_step)).chain(ahead);
        match groups.find(|(group, newest)| group.newest_step() > *newest) {
            Some((group, newest)) => {
                let (row, step) = (group.row, group.newest_step());
                Err(format!(
                    "unfinished completions of row {row} were sampled at step {step}, after the newest step {newest} \
                     of the checkpoint"
                ))
            }
            None => Ok(()),
        }
    }

    /// All groups that may have samples: carried ones, and those of batches sampled ahead.
    pub(super) fn groups(&self) -> impl Iterator<Item = &CarriedGroup> {
        self.carried.iter().chain(self.ahead.iter().flat_map(|batch| &batch.groups))
    }

    /// The mark of this checkpoint's shard files, with run and step.
    pub(super) fn mark(&self) -> String {
        format!("run {} step {}", self.run_id, self.global_step)
    }

    /// Refuses training rows of another number or with another `digest`, and positions beyond them.
    pub(super) fn check_rows(&self, num_rows: usize, digest: Option<&str>) -> Result<(), String> {
        if self.num_rows != num_rows {
            let own = self.num_rows;
            return Err(format!(
                "the checkpoint was written with {own} training rows, but the data set now has {num_rows}: resume with \
                 the same data"
            ));
        }
        if self.rows_digest.as_deref().zip(digest).is_some_and(|(own, digest)| own != digest) {
            return Err(format!(
                "the checkpoint was written with other training rows: there are {num_rows} of them as before, but \
                 their columns or their order differ. Resume with the same data; to train on the new rows, start a new \
                 run from these weights, with another output_dir, without resume_from_checkpoint, and with \
                 model_name_or_path set to this folder"
            ));
        }
        let positions = || std::iter::once(&self.sampler).chain(self.ahead.iter().map(|batch| &batch.before));
        if let Some(SamplerState { position, .. }) = positions().find(|sampler| sampler.position > num_rows) {
            return Err(format!("{FILE}: sampler.position is {position}: expected at most {num_rows}"));
        }
        let drawn = positions().flat_map(|SamplerState { late, solved, .. }| late.iter().chain(solved.keys()));
        let mut rows = drawn.chain(self.groups().map(|group| &group.row));
        match rows.find(|row| **row >= num_rows) {
            Some(row) => Err(format!("{FILE}: row number {row} is out of range: the data set has {num_rows} rows")),
            None => Ok(()),
        }
    }

    /// Refuses carried groups that are neither new nor have `num_generations` completions of token ids below `vocab_size`.
    pub(super) fn check_carried(&self, num_generations: usize, vocab_size: usize) -> Result<(), String> {
        for group in self.groups() {
            let bad = |expected: String| {
                Err(format!("{FILE}: unfinished completions of row {}: expected {expected}", group.row))
            };
            if !group.suits(num_generations) {
                return bad(format!("0 or {num_generations} completions, found {}", group.completions.len()));
            }
            let mut ids = group.completions.iter().flat_map(|completion| &completion.token_ids);
            if let Some(id) = ids.find(|id| **id as usize >= vocab_size) {
                return bad(format!("token ids below {vocab_size}, found {id}"));
            }
        }
        Ok(())
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
    fn secrets_are_not_saved_but_a_changed_secret_is_detected() {
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

    /// Reads a state over ten rows from a file, with one value changed.
    fn read_with(pointer: &str, value: Value) -> Result<TrainerState> {
        let folder = tempfile::tempdir().unwrap();
        let completion = serde_json::json!({"token_ids": "00000007", "rollout_logprobs": "00000000",
            "finish_reason": null, "weight_versions": [[4, 1]]});
        let mut state = serde_json::json!({"global_step": 4, "num_updates": 4, "generation_step": 4, "epoch": 0.0,
            "max_steps": 9, "num_input_tokens_seen": 40, "world_size": 1, "num_rows": 10,
            "sampler": {"epoch": 1, "position": 10, "late": [9], "solved": {"9": [1, 2]}},
            "carried": [{"row": 9, "first_step": 4, "completions": [completion]}],
            "config": {"values": {}, "digests": {}, "salt": 0}, "log_history": []});
        *state.pointer_mut(pointer).unwrap() = value;
        std::fs::write(folder.path().join(FILE), state.to_string()).unwrap();
        TrainerState::read(folder.path())
    }

    #[test]
    fn impossible_counters_in_the_state_are_refused() {
        assert!(read_with("/num_updates", Value::from(MAX_COUNT)).is_ok());
        for name in ["global_step", "num_updates", "generation_step", "num_input_tokens_seen", "sampler/epoch"] {
            let error = read_with(&format!("/{name}"), Value::from(u64::MAX)).unwrap_err();
            assert_eq!(error.exit_code(), crate::error::ExitCode::Checkpoint);
            let named = format!("{} is {}: expected at most", name.replace('/', "."), u64::MAX);
            assert!(error.to_string().contains(&named), "{error}");
        }
        for pointer in ["/carried/0/first_step", "/carried/0/completions/0/weight_versions/0/0"] {
            let error = read_with(pointer, Value::from(5)).unwrap_err().to_string();
            assert!(
                error.contains("unfinished completions of row 9 were sampled at step 5, after the newest step 4"),
                "{error}"
            );
        }
    }

    #[test]
    fn sampler_positions_beyond_the_data_set_are_refused() {
        let check = |pointer: &str, value: Value| read_with(pointer, value).unwrap().check_rows(10, None);
        assert_eq!(check("/num_rows", Value::from(10)), Ok(()));
        assert!(check("/num_rows", Value::from(11)).unwrap_err().contains("was written with 11 training rows"));
        let position = check("/sampler/position", Value::from(usize::MAX)).unwrap_err();
        assert!(position.contains("sampler.position is 18446744073709551615: expected at most 10"), "{position}");
        for (pointer, value) in [
            ("/sampler/late/0", serde_json::json!(10)),
            ("/sampler/solved", serde_json::json!({"10": [1, 2]})),
            ("/carried/0/row", serde_json::json!(10)),
        ] {
            assert!(
                check(pointer, value).unwrap_err().contains("row number 10 is out of range: the data set has 10 rows"),
                "{pointer}"
            );
        }
    }

    /// Old checkpoints and rows that a program makes have no digest.
    #[test]
    fn other_rows_of_the_same_number_are_refused() {
        let old = read_with("/num_rows", Value::from(10)).unwrap();
        assert_eq!(old.check_rows(10, Some("a")), Ok(()));
        let state = TrainerState { rows_digest: Some("a".to_owned()), ..old };
        assert_eq!(state.check_rows(10, Some("a")), Ok(()));
        assert_eq!(state.check_rows(10, None), Ok(()));
        let refused = state.check_rows(10, Some("b")).unwrap_err();
        assert!(refused.starts_with("the checkpoint was written with other training rows: there are 10"), "{refused}");
        assert!(state.check_rows(9, Some("b")).unwrap_err().contains("was written with 10 training rows"));
    }

    #[test]
    fn unfinished_groups_with_another_group_size_or_vocabulary_are_refused() {
        let state = read_with("/num_rows", Value::from(10)).unwrap();
        assert_eq!(state.check_carried(1, 8), Ok(()));
        let refused = |num_generations, vocab_size| state.check_carried(num_generations, vocab_size).unwrap_err();
        assert!(refused(8, 8).contains("unfinished completions of row 9: expected 0 or 8 completions, found 1"));
        assert!(refused(1, 7).contains("unfinished completions of row 9: expected token ids below 7, found 7"));
    }
}
