//! The model card of an exported folder: base model, data, method and metrics.

use std::fmt::Write;
use std::path::Path;

use serde_json::json;

use crate::error::{Error, Result};
use crate::metrics::read_metrics_in;
use crate::metrics::report::{number, read_config};
use crate::untrusted::Folder;

/// Configuration keys about the method that the card lists, if they are set.
const METHOD: [&str; 14] = [
    "loss_type",
    "num_generations",
    "learning_rate",
    "beta",
    "max_completion_length",
    "temperature",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "scale_rewards",
    "reward_funcs",
    "lora.r",
    "quantization",
    "seed",
];
/// Configuration keys about the data that the card lists.
const DATA: [&str; 4] = ["dataset_name", "dataset_config", "dataset_train_split", "train_file"];
/// Metrics of the newest step and evaluation that the card lists.
const METRICS: [&str; 5] = ["reward", "eval_reward", "eval_pass@1", "completions/mean_length", "num_tokens"];

/// Writes `README.md` into `folder`, from the files next to `model` (a run's trained folder, or a checkpoint). `has_adapters` says that the folder
/// contains only adapters.
///
/// # Errors
/// [`Error::Io`], and [`Error::BadFile`] for an invalid run_config.json.
pub(super) fn write(folder: &Path, model: &Path, has_adapters: bool) -> Result<()> {
    let path = folder.join("README.md");
    let run = model.parent().map(Folder::new).filter(|run| run.has("run_config.json"));
    let config = run.as_ref().map_or_else(|| Ok(Vec::new()), read_config)?;
    let metrics = run.map_or_else(Vec::new, |run| newest(&run, step_of(model)));
    Folder::new(folder).write("README.md", card(&config, &metrics, model, has_adapters)).map_err(Error::io(&path))
}

/// The step of a checkpoint folder, from its name.
fn step_of(model: &Path) -> Option<u64> {
    model.file_name()?.to_str()?.strip_prefix("checkpoint-")?.parse().ok()
}

/// The newest value of each listed metric, up to step `last`.
fn newest(run: &Folder, last: Option<u64>) -> Vec<(&'static str, u64, f64)> {
    let lines = read_metrics_in(run).unwrap_or_default(); // a run without metrics has a card, too
    let of = |name: &'static str| {
        let mut lines = lines.iter().rev().filter(|line| last.is_none_or(|last| line.step <= last));
        lines.find_map(|line| Some((name, line.step, *line.values.get(name)?)))
    };
    METRICS.into_iter().filter_map(of).collect()
}

fn card(config: &[(String, String)], metrics: &[(&str, u64, f64)], model: &Path, has_adapters: bool) -> String {
    let get = |key: &str| {
        let value = config.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str());
        value.filter(|value| !["null", "", "[]", "none"].contains(value))
    };
    let base = get("model_name_or_path");
    let library = if has_adapters { "peft" } else { "transformers" };
    let mut text = "---\n".to_owned();
    // The Hub takes names of its own here, and no paths; a JSON string is one of YAML.
    if let Some(base) = base.filter(|base| is_name_on_hub(base)) {
        let _ = writeln!(text, "base_model: {}", json!(base));
    }
    if let Some(data) = get("dataset_name").filter(|data| is_name_on_hub(data)) {
        let _ = writeln!(text, "datasets:\n- {}", json!(data));
    }
    let _ = writeln!(text, "library_name: {library}\npipeline_tag: text-generation\ntags:\n- grpo\n- colo-grpo\n---\n");
    let name = model.parent().and_then(Path::file_name).unwrap_or(model.as_os_str()).to_string_lossy();
    let from = base.map(|base| format!(" from {}", code(base))).unwrap_or_default();
    let what = if has_adapters { "LoRA adapters" } else { "A model" };
    let version = env!("CARGO_PKG_VERSION");
    let _ = writeln!(text, "# {name}\n\n{what} trained{from} with GRPO by colo-grpo {version}.\n");
    if config.is_empty() {
        text += "No run_config.json was found next to the trained folder, so the training configuration is unknown.\n";
        return text;
    }
    let _ = writeln!(text, "## Data\n\n{}", table(&DATA, get));
    if let Some(prompt) = get("system_prompt") {
        let longest = prompt.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(longest.max(2) + 1);
        let _ = writeln!(
            text,
            "## System prompt\n\nThe model was trained with this system message, which the folder does not \
             contain:\n\n{fence}text\n{prompt}\n{fence}\n"
        );
    }
    let _ = writeln!(
        text,
        "## Method\n\nGroup Relative Policy Optimization ([paper](https://arxiv.org/abs/2402.03300)).\n"
    );
    let _ = writeln!(text, "{}", table(&METHOD, get));
    if !metrics.is_empty() {
        text += "## Metrics\n\n| metric | step | value |\n|---|---|---|\n";
        for (name, step, value) in metrics {
            let _ = writeln!(text, "| {} | {step} | {} |", code(name), number(*value));
        }
    }
    text
}

fn table<'a>(keys: &[&str], get: impl Fn(&str) -> Option<&'a str>) -> String {
    let row = |key: &&str| Some(format!("| {} | {} |\n", code(key), code(get(key)?)));
    format!("| key | value |\n|---|---|\n{}", keys.iter().filter_map(row).collect::<String>())
}

/// Text as code within a Markdown table.
fn code(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("`{}`", text.replace('`', "'").replace('|', "\\|"))
}

/// Whether a name has the form `owner/name` and is no folder here.
fn is_name_on_hub(name: &str) -> bool {
    let is_word = |word: &str| {
        !word.is_empty()
            && !word.starts_with('.')
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    name.split('/').count() == 2 && name.split('/').all(is_word) && !Path::new(name).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_card_names_base_data_method_and_metrics() {
        let folder = tempfile::tempdir().unwrap();
        let (run, out) = (folder.path().join("gsm8k"), folder.path().join("out"));
        for folder in [&run, &out] {
            std::fs::create_dir(folder).unwrap();
        }
        write(&out, &run.join("final"), false).unwrap();
        let text = || std::fs::read_to_string(out.join("README.md")).unwrap();
        assert!(text().contains("# gsm8k") && text().contains("the training configuration is unknown"), "{}", text());
        let config = r#"{"model_name_or_path": "Qwen/Qwen2.5-7B", "dataset_name": "x/y", "beta": 0.1, "loss_type": "a|`b\n",
            "lora": {"r": 16}, "train_file": null, "seed": 1, "system_prompt": "Put it in\n```\nfences."}"#;
        std::fs::write(run.join("run_config.json"), config).unwrap();
        let lines = (1..=3).map(|step| format!("{{\"step\":{step},\"time\":1,\"reward\":0.{step}}}\n"));
        std::fs::write(run.join("metrics.jsonl"), lines.collect::<String>()).unwrap();
        write(&out, &run.join("checkpoint-2"), true).unwrap();
        let start = "---\nbase_model: \"Qwen/Qwen2.5-7B\"\ndatasets:\n- \"x/y\"\nlibrary_name: peft\n";
        assert!(text().starts_with(start), "{}", text());
        for part in [
            "| `beta` | `0.1` |",
            "| `lora.r` | `16` |",
            "`a\\|'b `",
            "| `reward` | 2 | 0.2 |",
            "LoRA adapters trained",
            "````text\nPut it in\n```\nfences.\n````\n",
        ] {
            assert!(text().contains(part), "{part} in {}", text());
        }
        assert!(!text().contains("train_file"));
        assert!(["a/b/c", "./a", "a", "../b", "/a/b", "a b/c"].iter().all(|name| !is_name_on_hub(name)));
    }
}
