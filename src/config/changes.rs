//! The snapshot of a run's configuration, and what differs from one to the next.

use std::fmt::{self, Write};
use std::path::Path;

use serde_json::Value;

use super::field::Field;
use super::raw::{RawConfig, pattern};
use super::{Config, LrSchedulerType, SftConfig};
use crate::error::Result;

/// Keys that say where, how fast or how often, but not what is computed. Layout keys are among them: sums may be
/// rounded differently, the samples and the algorithm are the same. So are the keys that spread a batch over ranks:
/// what they come to together is in [`super::BatchPlan`]. Where groups are carried, keys of the engine's size and of evaluations
/// also decide which are complete first and, with `carried_kv = keep`, which lose their keys and values and have them of newer
/// weights; so does every resume, which begins with an empty cache.
const SAFE_KEYS: &[&str] = &[
    "eval_file",
    "dataset_test_split",
    "max_eval_samples",
    "output_dir",
    "resume_from_checkpoint",
    "force_resume",
    "mode",
    "split.rollout_gpus",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "max_tokens_per_micro_batch",
    "share_prompts",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_bytes",
    "kv_block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "strict",
    "reward.num_threads",
    "reward.timeout_s",
    "reward.math_workers",
    "reward.max_worker_failures",
    "reward.code.workers",
    "reward.code.may_lack",
    "rewards.*.url",
    "rewards.*.api_key_env",
    "rewards.*.timeout_s",
    "rewards.*.workers",
    "rewards.*.concurrency",
    "gradient_checkpointing",
    "zero.stage",
    "zero.shard_group_size",
    "residency.optimizer",
    "residency.reference",
    "logging_steps",
    "save_steps",
    "save_async",
    "save_total_limit",
    "eval_steps",
    "eval_num_generations",
    "eval_solved_by",
    "log_completions",
    "trace",
    "full_determinism",
    "collective_timeout_s",
    "max_restarts",
    "fault",
];

/// Tables all of whose keys are safe.
const SAFE_TABLES: &[&str] = &["heartbeat."];

/// Keys that only move the end of the run, unless the learning rate falls towards that end.
const LENGTH_KEYS: &[&str] = &["max_steps", "num_train_epochs"];

/// A key that differs between two configurations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyChange {
    /// The key.
    pub key: String,
    /// The value before, as written in a file.
    pub old: String,
    /// The value now.
    pub new: String,
    /// Whether training would go on otherwise than before: refused on resume unless forced.
    pub changes_result: bool,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was {}, is {}", self.key, self.old, self.new)?;
        let moves_the_end = self.changes_result && LENGTH_KEYS.contains(&self.key.as_str());
        let why = " (the learning rate falls towards that end; with lr_scheduler_type = \"constant\" it may change)";
        f.write_str(if moves_the_end { why } else { "" })
    }
}

impl Config {
    /// Every key with its value, one a line; [`Config::load`] reads it back to an equal configuration.
    pub fn to_toml(&self) -> String {
        text(self.entries())
    }

    /// Every key with its value, in declaration order.
    pub(crate) fn entries(&self) -> Vec<(String, Value)> {
        entries(self)
    }

    /// The inverse of [`Config::entries`].
    ///
    /// # Errors
    /// As [`Config::load`].
    pub(crate) fn from_entries(entries: impl IntoIterator<Item = (String, Value)>) -> Result<Self> {
        Self::from_toml(&text(entries))
    }

    /// What changed from `old` to `self`, in declaration order; what only `old` has comes last.
    pub fn diff(&self, old: &Config) -> Vec<KeyChange> {
        let schedules = [self, old].map(|config| config.optimizer.lr_scheduler_type);
        differences(entries(self), entries(old), Self::keys(), schedules)
    }
}

/// The same of a supervised run.
impl SftConfig {
    pub(crate) fn entries(&self) -> Vec<(String, Value)> {
        entries(self)
    }

    pub(crate) fn from_entries(entries: impl IntoIterator<Item = (String, Value)>) -> Result<Self> {
        Self::validate(&RawConfig::read_text(&text(entries), Path::new("saved configuration"))?)
    }

    pub(crate) fn diff(&self, old: &Self) -> Vec<KeyChange> {
        let schedules = [self, old].map(|config| config.optimizer.lr_scheduler_type);
        differences(entries(self), entries(old), &Self::keys(), schedules)
    }
}

type Entries = Vec<(String, Value)>;

fn entries(config: &impl Field) -> Entries {
    let mut entries = Vec::new();
    config.write("", &mut entries);
    entries
}

fn text(entries: impl IntoIterator<Item = (String, Value)>) -> String {
    entries.into_iter().fold(String::new(), |mut text, (key, value)| {
        let _ = writeln!(text, "{key} = {}", toml(&value));
        text
    })
}

fn differences(new: Entries, old: Entries, known: &[String], schedules: [LrSchedulerType; 2]) -> Vec<KeyChange> {
    let length_is_safe = schedules == [LrSchedulerType::Constant; 2];
    let is_safe = |key: &str| {
        SAFE_KEYS.contains(&pattern(key, known).as_str())
            || SAFE_TABLES.iter().any(|table| key.starts_with(table))
            || (length_is_safe && LENGTH_KEYS.contains(&key))
    };
    let value = |entries: &Entries, key: &str| {
        let found = entries.iter().find(|(known, _)| known == key);
        found.map_or_else(|| "nothing".to_owned(), |(_, value)| toml(value))
    };
    let gone = old.iter().filter(|(key, _)| new.iter().all(|(known, _)| known != key));
    let keys = new.iter().chain(gone).map(|(key, _)| key);
    keys.map(|key| (key, value(&old, key), value(&new, key)))
        .filter(|(_, old, new)| old != new)
        .map(|(key, old, new)| KeyChange { key: key.clone(), old, new, changes_result: !is_safe(key) })
        .collect()
}

/// JSON's numbers, strings and lists are TOML's, but for DEL, which TOML wants escaped.
fn toml(value: &Value) -> String {
    value.to_string().replace('\u{7f}', "\\u007f")
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;
    use super::*;

    #[test]
    fn a_snapshot_reloads_to_an_equal_configuration() {
        let overrides = [
            "save_steps=none",
            "min_p=0.05",
            "temperature=0.9",
            "system_prompt=say \"it\"\tin \u{7f} tabs\nand lines \\",
            "stop=[\"a\", \"\\n\"]",
            "reward_weights=[0.5]",
            "zero.shard_group_size=2",
            "fault=0:1:wake:kill",
        ];
        let original = config(&overrides);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::write(&file, original.to_toml()).unwrap();
        assert_eq!(Config::load(Some(&file), &[]).unwrap(), original);
        assert!(original.to_toml().contains("temperature = 0.9\n"));
    }

    #[test]
    fn changes_are_told_apart_by_whether_they_change_the_result() {
        let old = config(&["max_steps=10"]);
        let new = config(&["max_steps=20", "learning_rate=2e-6", "output_dir=elsewhere"]);
        let changes: Vec<_> = new.diff(&old).into_iter().map(|change| (change.key, change.changes_result)).collect();
        let expected = [("output_dir", false), ("learning_rate", true), ("max_steps", true)];
        assert_eq!(changes, expected.map(|(key, changes_result)| (key.to_owned(), changes_result)));
        let said = new.diff(&old)[2].to_string();
        assert!(
            said.starts_with("max_steps was 10, is 20 (the learning rate falls") && said.contains("constant"),
            "{said}"
        );

        let old = config(&["max_steps=10", "lr_scheduler_type=constant"]);
        let new = config(&["max_steps=20", "lr_scheduler_type=constant"]);
        let change = &new.diff(&old)[0];
        assert_eq!((change.old.as_str(), change.new.as_str(), change.changes_result), ("10", "20", false));
        assert_eq!(new.diff(&new), []);
    }

    #[test]
    fn every_safe_key_exists() {
        for key in SAFE_KEYS.iter().chain(LENGTH_KEYS) {
            assert!(Config::keys().iter().any(|known| known == key), "{key}");
        }
    }
}
