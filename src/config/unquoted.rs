//! Lists of names and paths on the command line without quotes, which the shell removes: `report_to=["wandb"]` arrives as `report_to=[wandb]`.

use serde_json::{Value, json};

/// Keys that are lists of names or paths. Values of other keys, such as stop strings, may themselves begin and end with brackets.
const KEYS: &[&str] = &[
    "train_file",
    "eval_file",
    "reward_funcs",
    "reward.code.readable",
    "reward.code.may_lack",
    "eval_solved_by",
    "report_to",
    "lora.target_modules",
    "tools",
];

/// The list, if `key` is such a list and `text` contains only names.
pub(super) fn names(key: &str, text: &str) -> Option<Value> {
    let inner = text.strip_prefix('[')?.strip_suffix(']')?;
    let names: Vec<&str> = inner.split(',').map(str::trim).collect();
    let is_name = |name: &&str| !name.is_empty() && !name.contains(['[', ']', '"', '\'']);
    (KEYS.contains(&key) && names.iter().all(is_name)).then(|| json!(names))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};

    #[test]
    fn lists_of_names_on_the_command_line_need_no_quotes() {
        let loaded = config(&[
            "reward_funcs=[format, code]",
            "report_to=[wandb]",
            "lora.r=4",
            "lora.target_modules=[q_proj,v_proj]",
            "train_file=[rows/a.jsonl, more/*.csv]",
        ]);
        let quoted = config(&[
            "reward_funcs=[\"format\", \"code\"]",
            "report_to=[\"wandb\"]",
            "lora.r=4",
            "lora.target_modules=[\"q_proj\", \"v_proj\"]",
            "train_file=[\"rows/a.jsonl\", \"more/*.csv\"]",
        ]);
        assert_eq!(loaded, quoted);
        assert_eq!(config(&["stop=[END]"]).stop, ["[END]"], "a text of its own");
        assert_eq!(config(&["reward.format_pattern=[a-z]"]).reward.format_pattern.as_str(), "[a-z]");
        for torn in ["report_to=[wandb", "report_to=[wandb,]", "report_to=[[wandb]]", "report_to=[\"wandb]"] {
            assert!(message(&[torn]).contains("report_to = "), "{torn}");
        }
    }
}
