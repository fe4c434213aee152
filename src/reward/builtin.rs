//! The built-in rewards: their names, what they read of a row, and those that are functions of this process.

use std::sync::Arc;

use regex::Regex;
use serde_json::Value;

use super::style;
use super::{RewardFunction, RewardInput, answer};
use crate::config::RewardConfig;
use crate::error::{Error, Result};

/// Columns or settings that a built-in reward requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// No column.
    Nothing,
    /// The reference answer.
    Answer,
    /// A program's tests.
    Tests,
}

/// Every built-in reward: its name, what it needs, and whether it says that a completion is right, not only how it is given.
const BUILTIN: &[(&str, Needs, bool)] = &[
    ("format", Needs::Nothing, false),
    ("numeric_answer", Needs::Answer, true),
    ("exact_answer", Needs::Answer, true),
    ("math", Needs::Answer, true),
    ("accuracy", Needs::Answer, true),
    ("accuracy_reward", Needs::Answer, true),
    ("reasoning_accuracy_reward", Needs::Answer, true),
    ("cosine", Needs::Answer, false),
    ("get_cosine_scaled_reward", Needs::Answer, false),
    ("length", Needs::Answer, false),
    ("code", Needs::Tests, true),
    ("binary_code", Needs::Tests, true),
    ("tag_count", Needs::Nothing, false),
    ("reasoning_steps", Needs::Nothing, false),
    ("repetition_penalty", Needs::Nothing, false),
    ("code_format", Needs::Nothing, false),
    ("soft_overlong_punishment", Needs::Nothing, false),
    ("think_format_reward", Needs::Nothing, false),
    ("get_repetition_penalty_reward", Needs::Nothing, false),
    ("get_soft_overlong_punishment", Needs::Nothing, false),
];

/// Names of the built-in rewards.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILTIN.iter().map(|(name, ..)| *name)
}

/// The column that a built-in reward cannot do without; none for other names.
pub(super) fn required_column<'a>(name: &str, settings: &'a RewardConfig) -> Option<&'a str> {
    match needs(name) {
        Needs::Nothing => None,
        Needs::Answer => Some(&settings.answer_column),
        Needs::Tests => Some(&settings.code.tests_column),
    }
}

/// Whether a built-in reward of this name says that a completion is right.
pub(super) fn is_judge(name: &str) -> bool {
    BUILTIN.iter().any(|(known, _, is_judge)| *known == name && *is_judge)
}

/// Whether a built-in reward of this name compares answers.
pub(super) fn compares_answers(name: &str) -> bool {
    is_judge(name) && needs(name) == Needs::Answer
}

fn needs(name: &str) -> Needs {
    BUILTIN.iter().find(|(known, ..)| *known == name).map_or(Needs::Nothing, |(_, needs, _)| *needs)
}

/// The built-in reward of this name, which `key` gives, that is a function.
///
/// # Errors
/// [`Error::InvalidValue`] for an unknown name or a pattern that does not compile.
pub fn function(key: &str, name: &str, settings: &RewardConfig) -> Result<RewardFunction> {
    let arguments = settings.arguments.clone();
    let (ngram_size, max_penalty) = (arguments.repetition_n_grams, arguments.repetition_max_penalty);
    Ok(match name {
        "format" => {
            let whole = format!(r"\A(?:{})\z", settings.format_pattern);
            let pattern = compiled("reward.format_pattern", &whole)?;
            Arc::new(move |input| Ok(answer::format(input.completion, &pattern)))
        }
        "numeric_answer" | "exact_answer" => {
            let pattern = compiled("reward.answer_pattern", &settings.answer_pattern)?;
            let compare = if name == "numeric_answer" { answer::numeric_answer } else { answer::exact_answer };
            let column = settings.answer_column.clone();
            Arc::new(move |input| compare(input.completion, &pattern, input.columns, &column))
        }
        "tag_count" => of(|input| style::tag_count(input.completion)),
        "reasoning_steps" => {
            let pattern = Regex::new(style::STEP_PATTERN).expect("a pattern of this program");
            of(move |input| style::reasoning_steps(input.completion, &pattern))
        }
        "think_format_reward" => of(|input| style::think_format(input.completion)),
        "code_format" => of(move |input| {
            let of_row = input.columns.get("language").and_then(Value::as_str);
            style::code_format(input.completion, of_row.unwrap_or(&arguments.code_language))
        }),
        "repetition_penalty" => {
            of(move |input| style::repetition_penalty(&style::words(input.completion), ngram_size, max_penalty))
        }
        "get_repetition_penalty_reward" => {
            of(move |input| style::repetition_penalty(input.token_ids, ngram_size, max_penalty))
        }
        "soft_overlong_punishment" | "get_soft_overlong_punishment" => of(move |input| {
            let (longest, cache) = (arguments.max_completion_len, arguments.soft_punish_cache);
            style::soft_overlong_punishment(input.token_ids.len(), longest, cache)
        }),
        _ => {
            let names = names().collect::<Vec<_>>().join(", ");
            let expected = format!(
                "names among {names}, a configuration's tables rewards.NAME, or Python functions as file.py:function{}",
                advice(name)
            );
            return Err(Error::invalid_value(key, name, expected));
        }
    })
}

fn of(score: impl Fn(&RewardInput<'_>) -> f64 + Send + Sync + 'static) -> RewardFunction {
    Arc::new(move |input| Ok(score(input) as f32))
}

/// Advice for a reward that users of TRL, open-r1 and verl bring along, or that lacks its function.
fn advice(name: &str) -> String {
    if name.ends_with(".py") {
        return format!("; which function of the file, as {name}:FUNCTION?");
    }
    let ours = match name {
        "gsm8k" => "numeric_answer, math",
        "math_verify" | "math_dapo" => "math",
        "cosine_scaled_reward" => "cosine (characters), get_cosine_scaled_reward (tokens)",
        "len_reward" => "length",
        "format_reward" => "format",
        "tag_count_reward" => "tag_count",
        "reasoning_steps_reward" => "reasoning_steps",
        "repetition_penalty_reward" => "repetition_penalty (words), get_repetition_penalty_reward (tokens)",
        "soft_overlong_punishment_reward" => "soft_overlong_punishment",
        "code_format_reward" => "code_format",
        "code_reward" | "ioi_code" | "cf_code" => "code",
        "binary_code_reward" => "binary_code",
        _ => return String::new(),
    };
    format!("; here: {ours}")
}

/// A regular expression of the configuration.
pub(super) fn compiled(key: &str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| Error::invalid_value(key, pattern, format!("a regular expression: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::types::FinishReason;

    /// Scores of open-r1 (commit 1416fa0) and TRL 1.16, by scripts/golden_rewards.py.
    fn golden() -> Value {
        serde_json::from_str(include_str!("../../tests/golden/rewards.json")).unwrap()
    }

    fn score(
        name: &str,
        settings: &RewardConfig,
        completion: &str,
        token_ids: &[u32],
        columns: &Map<String, Value>,
    ) -> f32 {
        let input = RewardInput { prompt: "", completion, token_ids, finish_reason: FinishReason::Eos, columns };
        function("reward_funcs", name, settings).unwrap()(&input).unwrap()
    }

    fn assert_golden(golden: &Value, name: &str, scores: Vec<f32>) {
        let expected =
            golden.as_array().unwrap().iter().map(|score| score.as_f64().unwrap() as f32).collect::<Vec<_>>();
        assert_eq!(scores, expected, "{name}");
    }

    #[test]
    fn scores_of_texts_are_those_of_open_r1_and_trl() {
        let golden = golden();
        for (key, expected) in golden["of_text"].as_object().unwrap() {
            let (name, variant) = key.split_once('/').unwrap_or((key, ""));
            let mut settings = RewardConfig::default();
            if variant == "2" {
                (settings.arguments.repetition_n_grams, settings.arguments.repetition_max_penalty) = (2, -0.5);
            }
            let of = |text: &Value| {
                let text = text.as_str().unwrap();
                let language = if text.contains("cpp") { "cpp" } else { "python" };
                let columns = if variant == "language" { json!({"language": language}) } else { json!({}) };
                score(name, &settings, text, &[], columns.as_object().unwrap())
            };
            assert_golden(expected, key, golden["texts"].as_array().unwrap().iter().map(of).collect());
        }
    }

    #[test]
    fn scores_of_tokens_are_those_of_open_r1_and_trl() {
        let golden = golden();
        let ids: Vec<Vec<u32>> = serde_json::from_value(golden["ids"].clone()).unwrap();
        for (key, expected) in golden["of_ids"].as_object().unwrap() {
            let (name, cache) = key.split_once('/').unwrap_or((key, "30"));
            let mut settings = RewardConfig::default();
            settings.arguments.max_completion_len = 100;
            settings.arguments.soft_punish_cache = cache.parse().unwrap();
            assert_golden(expected, key, ids.iter().map(|ids| score(name, &settings, "", ids, &Map::new())).collect());
        }
    }
}
