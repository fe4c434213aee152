//! Defaults of TRL's GRPOConfig by version, and detection of the version that a file was written for.

use std::fmt::{Display, Formatter};
use std::path::Path;

use serde_json::Value;

use super::draft::{Draft, ForeignKeys};
use crate::error::{Error, Result};
use crate::untrusted::{self, MAX_RUN_CONFIG_BYTES};

/// The values of a default as JSON, each with the version from which on it applied.
type DefaultHistory = &'static [((u32, u32), &'static str)];

/// A TRL version, and how it was determined.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TrlVersion {
    number: (u32, u32),
    reason: String,
}

/// The TRL version whose defaults are used here.
const NEWEST: (u32, u32) = (1, 16);
/// The TRL version pinned by open-r1's setup.py.
const OF_OPEN_R1: (u32, u32) = (0, 18);

/// Keys whose default differs in earlier TRL versions, with the value from each version on (GRPOConfig of 0.14 to 1.16; before 0.17, which had no
/// `loss_type`, the trainer's code).
const HISTORY: &[(&str, DefaultHistory)] = &[
    ("beta", &[((0, 14), "0.04"), ((0, 19), "0.0")]),
    ("loss_type", &[((0, 14), "\"grpo\""), ((0, 16), "\"bnpo\""), ((0, 22), "\"dapo\"")]),
    ("use_bias_correction_kl", &[((0, 14), "false"), ((1, 16), "true")]),
    ("importance_sampling_correction", &[((0, 14), "false"), ((0, 23), "true")]),
    ("importance_sampling_mode", &[((0, 23), "\"token_truncate\""), ((0, 26), "\"sequence_mask\"")]),
    ("importance_sampling_clip_max", &[((0, 23), "2.0"), ((0, 26), "3.0")]),
    ("temperature", &[((0, 14), "0.9"), ((0, 18), "1.0")]),
    ("top_k", &[((0, 16), "50"), ((0, 18), "0")]),
    ("max_completion_length", &[((0, 14), "256"), ((1, 16), "512")]),
    ("max_prompt_length", &[((0, 14), "512"), ((0, 26), "\"none\"")]),
    ("per_device_train_batch_size", &[((0, 14), "1"), ((0, 15), "8")]),
    ("gradient_accumulation_steps", &[((0, 14), "8"), ((0, 15), "1")]),
    ("ref_model_mixup_alpha", &[((0, 14), "0.9"), ((0, 16), "0.6")]),
    ("ref_model_sync_steps", &[((0, 14), "64"), ((0, 16), "512")]),
    ("router_aux_loss_coef", &[((0, 14), "0.0"), ((1, 7), "0.001"), ((1, 16), "\"none\"")]),
];
/// Keys that TRL removed, with the last version that has them.
const REMOVED: &[(&str, (u32, u32))] = &[
    ("vllm_device", (0, 17)),
    ("vllm_dtype", (0, 17)),
    ("vllm_max_model_len", (0, 17)),
    ("vllm_enable_prefix_caching", (0, 17)),
    ("wandb_log_unique_prompts", (0, 26)),
    ("max_prompt_length", (0, 27)),
    ("vllm_guided_decoding_regex", (0, 27)),
    ("use_liger_loss", (0, 27)),
];
/// Keys that open-r1 adds to TRL's.
const OPEN_R1: &[&str] = &[
    "benchmarks",
    "callbacks",
    "code_eval_scoring_mode",
    "code_eval_test_batch_size",
    "code_language",
    "code_provider",
    "cosine_max_len",
    "dataset_mixture.datasets",
    "dataset_prompt_column",
    "e2b_router_url",
    "hub_model_revision",
    "ioi_provider",
    "morph_router_url",
    "overwrite_hub_revision",
    "parallel_code_exec_per_proc",
    "push_to_hub_revision",
    "repetition_n_grams",
    "soft_punish_cache",
    "system_prompt",
];

impl TrlVersion {
    /// The version given as `--trl_version`.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an invalid version.
    pub fn named(text: &str) -> Result<Self> {
        let expected = "a version of TRL from 0.14 on, such as 0.18 or 1.16";
        let refuse = || Error::invalid_value("--trl_version", text, expected);
        let mut parts = text.split('.').map(str::parse);
        let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else { return Err(refuse()) };
        if parts.any(|part| part.is_err()) || (major, minor) < (0, 14) {
            return Err(refuse());
        }
        Ok(Self { number: (major, minor), reason: "given by --trl_version".into() })
    }

    /// The version pinned by the project that contains the file: in its folder or above, up to the root of the repository.
    pub fn required_beside(file: &Path) -> Option<Self> {
        let pin = regex::Regex::new(r"\btrl\s*(?:\[[^\]]*\])?\s*==\s*([0-9]+)\.([0-9]+)").expect("a constant pattern");
        let file = std::path::absolute(file).ok()?;
        for folder in file.ancestors().skip(1).take(8) {
            for name in ["requirements.txt", "setup.py", "setup.cfg", "pyproject.toml"] {
                let text = untrusted::read_text(&folder.join(name), MAX_RUN_CONFIG_BYTES).unwrap_or_default();
                let Some(found) = pin.captures(&text) else { continue };
                let number = (found[1].parse().ok()?, found[2].parse().ok()?);
                return Some(Self { number, reason: format!("pinned by {}", folder.join(name).display()) });
            }
            if folder.join(".git").exists() {
                return None;
            }
        }
        None
    }

    /// The newest version that has all keys of the file; for keys of open-r1 the version that it pins.
    pub fn by_keys(theirs: &ForeignKeys) -> Self {
        let is_said = "use --trl_version for another one";
        if let Some(key) = OPEN_R1.iter().find(|key| theirs.has(key)) {
            return Self {
                number: OF_OPEN_R1,
                reason: format!("pinned by open-r1, which has the key {key}; {is_said}"),
            };
        }
        let removed = REMOVED.iter().filter(|(key, _)| theirs.has(key)).min_by_key(|(_, last)| *last);
        match removed {
            Some((key, last)) => Self { number: *last, reason: format!("the last version that has {key}; {is_said}") },
            None => Self { number: NEWEST, reason: format!("because the file names no version; {is_said}") },
        }
    }

    /// The default of a key in this version, if it differs from ours.
    fn default_of(&self, history: DefaultHistory) -> Option<Value> {
        let text = |version| history.iter().rev().find(|(since, _)| *since <= version).map(|(_, text)| *text);
        let (then, now) = (text(self.number)?, text(NEWEST)?);
        (then != now).then(|| serde_json::from_str(then).expect("the table holds JSON"))
    }

    /// Writes out this version's defaults that differ from ours, for keys that the file does not set.
    pub fn write_defaults(&self, theirs: &ForeignKeys, draft: &mut Draft) {
        let (major, minor) = self.number;
        let beta = theirs.number("beta").unwrap_or(if self.number < (0, 19) { 0.04 } else { 0.0 });
        let corrects = self.number >= (0, 23) && !theirs.is_false("vllm_importance_sampling_correction");
        for (key, history) in HISTORY {
            let is_read = match *key {
                "use_bias_correction_kl" => beta > 0.0,
                "ref_model_mixup_alpha" | "ref_model_sync_steps" => theirs.is_true("sync_ref_model"),
                "importance_sampling_mode" | "importance_sampling_clip_max" => corrects,
                "router_aux_loss_coef" => theirs.has_experts("model_name_or_path"),
                _ => true,
            };
            let Some(value) = self.default_of(history).filter(|_| is_read && !theirs.sets(key)) else { continue };
            let more = match *key {
                "max_prompt_length" => ", which truncates longer prompts on the left; here they are left out",
                _ => "",
            };
            draft.fill(key, value, &format!("the default of trl {major}.{minor}{more}"));
        }
        if theirs.has("eval_steps") && !theirs.sets("eval_num_generations") {
            let num = theirs.number("num_generations").unwrap_or(8.0) as u64;
            draft.fill("eval_num_generations", num, "TRL uses num_generations for evaluations, too");
        }
    }
}

impl Display for TrlVersion {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.number;
        write!(out, "defaults of trl {major}.{minor}, {}", self.reason)
    }
}
