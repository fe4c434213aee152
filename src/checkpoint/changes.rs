//! Differences between a saved configuration and a run's, and which of them change the result.

use std::fmt;

use serde_json::Value;

use crate::config::{Config, LrSchedulerType, OptimizerConfig, SftConfig, Speculation, key_pattern, toml_value};

/// Keys that affect placement, speed or frequency, but not what is computed. They include layout keys: sums may be rounded differently, but samples
/// and algorithm are the same. They also include the keys that distribute a batch over ranks, whose combined effect is checked as
/// [`BatchPlan`](crate::config::BatchPlan). If groups are carried, keys of the engine's size and of evaluations also affect which groups are complete
/// first and, with `carried_kv = keep`, which are computed again with newer weights; so does every resume, because it starts with an empty cache.
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
    "sequence_parallel_size",
    "share_prompts",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "pipeline_partition",
    "enable_expert_parallel",
    "gpu_memory_utilization",
    "kv_cache_bytes",
    "kv_block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "strict",
    "exact",
    "speculation",
    "num_speculative_tokens",
    "tool_workers",
    "agent_workers",
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
    "activation_offload",
    "zero.stage",
    "zero.shard_group_size",
    "residency.optimizer",
    "residency.reference",
    "logging_steps",
    "save_steps",
    "save_async",
    "save_on_each_node",
    "save_total_limit",
    "eval_steps",
    "eval_num_generations",
    "eval_temperature",
    "eval_solved_by",
    "report_to",
    "run_name",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "early_stopping_patience",
    "early_stopping_threshold",
    "log_completions",
    "trace",
    "full_determinism",
    "collective_timeout_s",
    "node_timeout_s",
    "max_restarts",
    "fault",
];

/// Tables in which every key is safe.
const SAFE_TABLES: &[&str] = &["heartbeat."];

/// Keys that only move the end of the run. They are safe unless the learning rate decays towards that end.
const LENGTH_KEYS: &[&str] = &["max_steps", "num_train_epochs"];

/// A key that differs between two configurations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyChange {
    /// The key.
    pub key: String,
    /// The old value, as written in a file.
    pub old: String,
    /// The new value.
    pub new: String,
    /// Whether the change would affect training. If so, a resume is refused unless forced.
    pub changes_result: bool,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was {}, is {}", self.key, self.old, self.new)?;
        let moves_the_end = self.changes_result && LENGTH_KEYS.contains(&self.key.as_str());
        let why = " (the learning rate schedule depends on this length. It may change with lr_scheduler_type = \
                   \"constant\"; with force_resume = true the schedule uses the new length from here on)";
        f.write_str(if moves_the_end { why } else { "" })
    }
}

/// The keys that changed from `old` to `new`, in declaration order; keys that only `old` has come last.
pub fn changes(new: &Config, old: &Config) -> Vec<KeyChange> {
    let schedules = [&new.optimizer, &old.optimizer];
    differences(new.entries(), old.entries(), Config::keys(), schedules)
}

/// The keys of a supervised run that changed from `old` to `new`.
pub fn sft_changes(new: &SftConfig, old: &SftConfig) -> Vec<KeyChange> {
    let schedules = [&new.optimizer, &old.optimizer];
    differences(new.entries(), old.entries(), &SftConfig::keys(), schedules)
}

type ConfigEntries = Vec<(String, Value)>;

fn differences(
    new: ConfigEntries,
    old: ConfigEntries,
    known: &[String],
    schedules: [&OptimizerConfig; 2],
) -> Vec<KeyChange> {
    let is_constant =
        |config: &OptimizerConfig| config.lr_scheduler_type == LrSchedulerType::Constant && config.warmup_ratio == 0.0;
    let length_is_safe = schedules.into_iter().all(is_constant);
    let is_safe = |key: &str| {
        SAFE_KEYS.contains(&key_pattern(key, known).as_str())
            || SAFE_TABLES.iter().any(|table| key.starts_with(table))
            || (length_is_safe && LENGTH_KEYS.contains(&key))
    };
    let value = |entries: &ConfigEntries, key: &str| {
        let found = entries.iter().find(|(known, _)| known == key);
        found.map_or_else(|| "nothing".to_owned(), |(_, value)| toml_value(value))
    };
    let gone = old.iter().filter(|(key, _)| new.iter().all(|(known, _)| known != key));
    let keys = new.iter().chain(gone).map(|(key, _)| key);
    let of_draft_head = |key: &str, values: [&String; 2]| {
        key == "speculation" && values.into_iter().any(|value| value.contains(Speculation::Mtp.name()))
    };
    keys.map(|key| (key, value(&old, key), value(&new, key)))
        .filter(|(_, old, new)| old != new)
        .map(|(key, old, new)| {
            let changes_result = !is_safe(key) || of_draft_head(key, [&old, &new]); // whether the draft head trains
            KeyChange { key: key.clone(), old, new, changes_result }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(overrides: &[&str]) -> Config {
        let required = ["model_name_or_path=m", "train_file=t", "reward_funcs=[\"format\"]"];
        let all: Vec<String> = required.iter().chain(overrides).map(|text| text.to_string()).collect();
        Config::load(None, &all).unwrap()
    }

    #[test]
    fn changed_keys_are_classified_by_whether_they_change_the_result() {
        let old = config(&["max_steps=10"]);
        let new = config(&["max_steps=20", "learning_rate=2e-6", "output_dir=elsewhere"]);
        let found: Vec<_> = changes(&new, &old).into_iter().map(|change| (change.key, change.changes_result)).collect();
        let expected = [("output_dir", false), ("learning_rate", true), ("max_steps", true)];
        assert_eq!(found, expected.map(|(key, changes_result)| (key.to_owned(), changes_result)));
        let said = changes(&new, &old)[2].to_string();
        assert!(
            said.starts_with("max_steps was 10, is 20 (the learning rate schedule") && said.contains("constant"),
            "{said}"
        );

        let of_drafts = |old: &str, new: &str| changes(&config(&[new]), &config(&[old]))[0].changes_result;
        assert!(
            !of_drafts("speculation=none", "speculation=auto") && !of_drafts("speculation=ngram", "speculation=none")
        );
        assert!(of_drafts("speculation=mtp", "speculation=auto") && of_drafts("speculation=none", "speculation=mtp"));

        let old = config(&["max_steps=10", "lr_scheduler_type=constant"]);
        let new = config(&["max_steps=20", "lr_scheduler_type=constant"]);
        let change = &changes(&new, &old)[0];
        assert_eq!((change.old.as_str(), change.new.as_str(), change.changes_result), ("10", "20", false));
        assert_eq!(changes(&new, &new), []);
    }

    #[test]
    fn adding_or_removing_a_reward_is_a_change() {
        let (old, new) = (config(&[]), config(&["rewards.a.function=m:f", "rewards.a.timeout_s=3"]));
        let changed = |new: &Config, old: &Config| -> Vec<_> {
            changes(new, old).into_iter().filter(|change| change.changes_result).map(|change| change.key).collect()
        };
        let of_all = changed(&new, &old);
        assert_eq!(of_all[..2], ["rewards.a.function", "rewards.a.command"]);
        assert!(of_all[2..of_all.len() - 1].iter().all(|key| key.starts_with("rewards.a.judge_")), "{of_all:?}");
        assert_eq!(of_all.last().unwrap(), "rewards.a.batch");
        assert_eq!(changed(&old, &new), changed(&new, &old));
    }

    #[test]
    fn every_safe_key_exists() {
        for key in SAFE_KEYS.iter().chain(LENGTH_KEYS) {
            assert!(Config::keys().iter().any(|known| known == key), "{key}");
        }
    }
}
