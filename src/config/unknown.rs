//! Unknown keys, each with advice: the key that was probably meant, or its equivalent here.

use serde_json::Map;
use strsim::levenshtein;

use super::raw::{Entry, RawConfig};
use super::{Config, SftConfig};
use crate::error::{MAX_LISTED, OF_ANOTHER_TRAINER, UnknownKey};
use crate::migration;

/// Maximum length in bytes of a key for which similar keys are searched.
const MAX_MISTYPED_BYTES: usize = 128;

/// Common short names and the keys that they mean.
const SPOKEN: &[(&str, &[&str])] = &[
    ("learning_rate", &["lr"]),
    ("per_device_train_batch_size", &["bs", "batch", "batch_size", "micro_batch_size", "train_batch_size"]),
    ("gradient_accumulation_steps", &["grad_accum", "grad_accum_steps", "gradient_accumulation", "accumulation_steps"]),
    ("num_train_epochs", &["epoch", "epochs", "num_epochs"]),
    ("max_steps", &["steps", "num_steps", "total_steps", "iterations"]),
    ("warmup_steps", &["warmup", "num_warmup_steps"]),
    ("lr_scheduler_type", &["schedule", "scheduler", "lr_scheduler", "lr_schedule"]),
    ("weight_decay", &["wd", "decay"]),
    ("max_grad_norm", &["grad_clip", "clip_grad", "grad_norm", "gradient_clipping"]),
    ("optim", &["optimizer", "opt"]),
    ("model_name_or_path", &["model", "model_name", "model_path", "model_id"]),
    ("train_file", &["data", "data_file", "data_path", "train", "train_data", "train_path", "train_dataset"]),
    ("eval_file", &["eval_data", "eval_path", "val_file", "val_data", "eval_dataset", "test_file"]),
    ("dataset_name", &["dataset", "dataset_id", "dataset_path"]),
    ("max_completion_length", &["max_tokens", "max_new_tokens", "max_response_length", "response_length"]),
    ("max_model_length", &["context_length", "max_context_length", "max_seq_len", "max_model_len"]),
    ("num_generations", &["n", "G", "group_size", "num_samples", "num_rollouts", "rollouts", "samples_per_prompt"]),
    ("beta", &["kl", "kl_coef", "kl_coeff", "kl_beta", "kl_weight", "kl_loss_coef"]),
    ("epsilon", &["clip", "clip_eps", "clip_epsilon", "clip_range", "cliprange"]),
    ("temperature", &["temp"]),
    ("tensor_parallel_size", &["tp", "tp_size", "tensor_parallel"]),
    ("pipeline_parallel_size", &["pp", "pp_size", "pipeline_parallel"]),
    ("lora.r", &["rank", "lora_rank"]),
    ("reward_funcs", &["reward_func", "reward_function", "reward_functions", "reward_fn", "reward_fns"]),
    ("output_dir", &["out", "out_dir", "output", "save_dir", "save_path", "checkpoint_dir", "log_dir"]),
    ("save_steps", &["save_every", "save_interval", "save_freq"]),
    ("eval_steps", &["eval_every", "eval_interval", "eval_freq"]),
    ("logging_steps", &["log_every", "log_interval", "log_steps"]),
    ("report_to", &["wandb", "use_wandb", "logger", "loggers"]),
    ("gradient_checkpointing", &["recompute", "activation_checkpointing"]),
    ("system_prompt", &["system", "system_message"]),
];
/// Names for the number of processes, which is not a configuration key.
const PROCESSES: &[&str] =
    &["nproc", "gpus", "num_gpus", "n_gpus", "ngpus", "world_size", "num_processes", "dp", "dp_size"];

impl RawConfig {
    /// The keys that are not in `known`; as many as a message lists have advice.
    pub fn unknown_keys(&self, known: &[String]) -> Vec<UnknownKey> {
        let unknown = self.entries.iter().filter(|entry| entry.is_unknown(known));
        let bare = |entry: &Entry| UnknownKey { origin: entry.origin.clone(), key: entry.key.clone(), advice: None };
        let told =
            |(index, entry): (usize, &Entry)| if index < MAX_LISTED { entry.unknown(known) } else { bare(entry) };
        unknown.enumerate().map(told).collect()
    }
}

impl Entry {
    /// Whether the key matches no key of `known`.
    fn is_unknown(&self, known: &[String]) -> bool {
        let pattern = pattern(&self.key, known);
        let start = format!("{pattern}.");
        let is_table = || known.iter().any(|name| name.starts_with(&start));
        let is_empty_table = self.value.as_object().is_some_and(Map::is_empty) && is_table();
        !known.contains(&pattern) && !is_empty_table
    }

    /// Describes an unknown key, with advice.
    fn unknown(&self, known: &[String]) -> UnknownKey {
        let Self { key, origin, .. } = self;
        let pattern = pattern(key, known);
        let start = format!("{pattern}.");
        let inner: Vec<&str> = known.iter().filter_map(|name| name.strip_prefix(&start)).collect();
        let table = (!inner.is_empty()).then(|| format!("it is a table of {}", inner.join(", ")));
        let other = || migration::advice(key).map(|advice| format!("{OF_ANOTHER_TRAINER}{advice}"));
        let of_other_runs = || {
            let has = |keys: &[String]| keys.contains(&self::pattern(key, keys));
            match (has(Config::keys()), has(&SftConfig::keys())) {
                (true, false) => Some("this key is for GRPO runs, not for supervised ones (sft)".to_owned()),
                (false, true) => Some("this key is for supervised runs (sft), not for GRPO runs".to_owned()),
                _ => None,
            }
        };
        let (outer, name) = pattern.rsplit_once('.').unwrap_or(("", &pattern));
        let start = format!("{outer}.");
        let beside: Vec<String> =
            known.iter().filter_map(|name| name.strip_prefix(&start)).map(str::to_owned).collect();
        let close = || {
            let in_table = nearest(name, &beside).map(|name| format!("{start}{name}"));
            let meant = spoken(name, known).filter(|key| outer.is_empty() || key.starts_with(&start));
            let close = meant.map(str::to_owned).or(in_table);
            let close = close.or_else(|| nearest(&pattern, known).map(str::to_owned));
            close.map(|name| format!("did you mean '{name}'?"))
        };
        let processes = || PROCESSES.contains(&&*pattern).then(|| "--nproc N starts N processes".to_owned());
        let all = || (!beside.is_empty()).then(|| format!("{outer} has the keys {}", beside.join(", ")));
        let advice = table.or_else(other).or_else(of_other_runs).or_else(processes).or_else(close).or_else(all);
        UnknownKey { origin: origin.clone(), key: key.clone(), advice }
    }
}

/// The pattern of a key below a table with names of the user's choice: `rewards.brevity.timeout_s` → `rewards.*.timeout_s`,
/// `environment_args.taskset.game` → `environment_args.**`.
pub(crate) fn pattern(key: &str, known: &[String]) -> String {
    let Some((table, rest)) = key.split_once('.') else { return key.to_owned() };
    let (any, any_depth) = (format!("{table}.*"), format!("{table}.**"));
    if known.contains(&any_depth) {
        return any_depth;
    }
    if !known.iter().any(|name| name.starts_with(&any)) {
        return key.to_owned();
    }
    rest.split_once('.').map_or_else(|| any.clone(), |(_, field)| format!("{any}.{field}"))
}

/// The known key that a common short name means.
fn spoken<'a>(name: &str, known: &'a [String]) -> Option<&'a str> {
    let (key, _) = SPOKEN.iter().find(|(_, names)| names.contains(&name))?;
    known.iter().find(|known| known == key).map(String::as_str)
}

/// The known name that was probably meant: it differs by a few letters, or one name contains the other.
pub(crate) fn nearest<'a, S: AsRef<str>>(key: &str, known: &'a [S]) -> Option<&'a str> {
    if key.len() > MAX_MISTYPED_BYTES {
        return None;
    }
    let known = || known.iter().map(AsRef::as_ref);
    let closest = known().min_by_key(|name| levenshtein(key, name))?;
    let distance = levenshtein(key, closest);
    if distance <= (key.len() / 4).max(2) && 2 * distance <= key.len() {
        return Some(closest);
    }
    // One that holds less than half of the other has another meaning: `stop` is not `early_stopping_patience`.
    let related = |name: &&str| {
        let (short, long) = (name.len().min(key.len()), name.len().max(key.len()));
        short >= 4 && 2 * short >= long && (key.contains(name) || name.contains(key))
    };
    known().filter(related).max_by_key(|name| name.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggestions_cover_typos_prefixes_and_keys_without_their_table() {
        let known: Vec<String> =
            ["learning_rate", "importance_sampling_mode", "zero.stage", "beta"].map(String::from).into();
        assert_eq!(nearest("learnign_rate", &known), Some("learning_rate"));
        assert_eq!(nearest("vllm_importance_sampling_mode", &known), Some("importance_sampling_mode"));
        assert_eq!(nearest("stage", &known), Some("zero.stage"));
        for far in ["completely_else", "early_beta_stopping", "load_best_zero.stage_at_end", "learning_something", "bt"]
        {
            assert_eq!(nearest(far, &known), None, "{far}");
        }
    }

    /// No short name is a key itself; each leads to a known key and is listed once.
    #[test]
    fn suggestions_resolve_short_names() {
        let keys = Config::keys();
        let told = |name: &str| {
            let raw = RawConfig::of_entries([(name.to_owned(), 1.into())]).unwrap();
            raw.unknown_keys(keys).into_iter().next().and_then(|unknown| unknown.advice).unwrap_or_default()
        };
        for (key, names) in SPOKEN {
            assert!(keys.iter().any(|known| known == key), "{key}");
            for name in *names {
                assert!(told(name).contains(key), "{name}: {}", told(name));
                assert_eq!(SPOKEN.iter().filter(|(_, names)| names.contains(name)).count(), 1, "{name}");
            }
        }
        assert_eq!(told("lr"), "did you mean 'learning_rate'?");
        assert_eq!(told("gpus"), "--nproc N starts N processes");
    }
}
