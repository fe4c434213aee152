//! Registry of the built-in rewards: names, required columns, and the functions of those that run in this process.

use std::sync::Arc;

use regex::Regex;
use serde_json::{Map, Value};

use super::style;
use super::{RewardFunction, RewardInput, answer};
use crate::config::{RewardConfig, nearest};
use crate::error::{Error, Result};

/// The columns that a built-in reward requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequiredColumns {
    /// The reward requires no column.
    Nothing,
    /// The reward requires the column with the reference answer.
    Answer,
    /// The reward requires the column with a program's tests.
    Tests,
}

/// Compares a completion's answer, extracted with a pattern, with a column of the row.
type AnswerComparison = fn(&str, Option<&Regex>, &Map<String, Value>, &str) -> Result<f32>;

/// How a built-in reward is computed.
enum Scorer {
    /// The reward is computed by a function in this process, created from the settings.
    Function(fn(&RewardConfig) -> Result<RewardFunction>),
    /// The reward is computed in another process: with math-verify, or in the sandbox.
    Process,
}

/// A built-in reward.
struct Builtin {
    name: &'static str,
    needs: RequiredColumns,
    /// Whether the reward says if a completion is right, and not only if its form is.
    is_judge: bool,
    scorer: Scorer,
}

const fn row(name: &'static str, needs: RequiredColumns, is_judge: bool, scorer: Scorer) -> Builtin {
    Builtin { name, needs, is_judge, scorer }
}

/// All built-in rewards.
const BUILTIN: &[Builtin] = {
    use RequiredColumns::{Answer, Nothing, Tests};
    use Scorer::{Function, Process};
    &[
        row("format", Nothing, false, Function(format_reward)),
        row(
            "numeric_answer",
            Answer,
            true,
            Function(|settings| comparison(|a, b, c, d| answer::numeric_answer(a, b, c, d), settings)),
        ),
        row(
            "exact_answer",
            Answer,
            true,
            Function(|settings| comparison(|a, b, c, d| answer::exact_answer(a, b, c, d), settings)),
        ),
        row("math", Answer, true, Process),
        row("accuracy", Answer, true, Process),
        row("accuracy_reward", Answer, true, Process),
        row("reasoning_accuracy_reward", Answer, true, Process),
        row("cosine", Answer, false, Process),
        row("get_cosine_scaled_reward", Answer, false, Process),
        row("length", Answer, false, Process),
        row("code", Tests, true, Process),
        row("binary_code", Tests, true, Process),
        row("tag_count", Nothing, false, Function(|_| of(|input| style::tag_count(input.completion)))),
        row("reasoning_steps", Nothing, false, Function(reasoning_steps)),
        row("repetition_penalty", Nothing, false, Function(repetition_of_words)),
        row("code_format", Nothing, false, Function(code_format)),
        row("soft_overlong_punishment", Nothing, false, Function(soft_overlong_punishment)),
        row("think_format_reward", Nothing, false, Function(|_| of(|input| style::think_format(input.completion)))),
        row("get_repetition_penalty_reward", Nothing, false, Function(repetition_of_tokens)),
        row("get_soft_overlong_punishment", Nothing, false, Function(soft_overlong_punishment)),
    ]
};

/// Names of the built-in rewards.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILTIN.iter().map(|row| row.name)
}

/// The column that a built-in reward requires; `None` for other names.
pub(super) fn required_column<'a>(name: &str, settings: &'a RewardConfig) -> Option<&'a str> {
    match needs(name) {
        RequiredColumns::Nothing => None,
        RequiredColumns::Answer => Some(&settings.answer_column),
        RequiredColumns::Tests => Some(&settings.code.tests_column),
    }
}

/// Whether `name` is a built-in reward that says if a completion is right.
pub(super) fn is_judge(name: &str) -> bool {
    find(name).is_some_and(|row| row.is_judge)
}

/// Whether `name` is a built-in reward that never returns 1, for example one of length only.
pub(super) fn is_capped(name: &str) -> bool {
    let words = ["repetition_penalty", "soft_overlong_punishment", "cosine"];
    find(name).is_some() && (name == "length" || words.iter().any(|word| name.contains(word)))
}

/// Whether `name` is a built-in reward that compares answers.
pub(super) fn compares_answers(name: &str) -> bool {
    is_judge(name) && needs(name) == RequiredColumns::Answer
}

fn needs(name: &str) -> RequiredColumns {
    find(name).map_or(RequiredColumns::Nothing, |row| row.needs)
}

fn find(name: &str) -> Option<&'static Builtin> {
    BUILTIN.iter().find(|row| row.name == name)
}

/// The function of the built-in reward `name`, which the configuration key `key` names.
///
/// # Errors
/// [`Error::InvalidValue`] for an unknown name or a pattern that does not compile.
pub fn function(key: &str, name: &str, settings: &RewardConfig) -> Result<RewardFunction> {
    match find(name) {
        Some(Builtin { scorer: Scorer::Function(of_settings), .. }) => of_settings(settings),
        _ => {
            let names = names().collect::<Vec<_>>().join(", ");
            let expected = format!(
                "built-in rewards ({names}), names of tables rewards.NAME, or Python functions as file.py:function{}",
                advice(name)
            );
            Err(Error::invalid_value(key, name, expected))
        }
    }
}

fn of(score: impl Fn(&RewardInput<'_>) -> f64 + Send + Sync + 'static) -> Result<RewardFunction> {
    Ok(Arc::new(move |input| Ok(score(input) as f32)))
}

fn format_reward(settings: &RewardConfig) -> Result<RewardFunction> {
    let pattern = compiled("reward.format_pattern", &format!(r"\A(?:{})\z", settings.format_pattern))?;
    Ok(Arc::new(move |input| Ok(answer::format(input.completion, &pattern))))
}

/// A reward function that compares the completion's answer with the row's, by `compare`.
fn comparison(compare: AnswerComparison, settings: &RewardConfig) -> Result<RewardFunction> {
    let pattern = answer_pattern(settings)?;
    let column = settings.answer_column.clone();
    Ok(Arc::new(move |input| compare(input.completion, pattern.as_ref(), input.columns, &column)))
}

fn reasoning_steps(_: &RewardConfig) -> Result<RewardFunction> {
    let pattern = Regex::new(style::STEP_PATTERN).expect("a pattern of this program");
    of(move |input| style::reasoning_steps(input.completion, &pattern))
}

fn code_format(settings: &RewardConfig) -> Result<RewardFunction> {
    let language = settings.arguments.code_language.clone();
    of(move |input| {
        let of_row = input.columns.get("language").and_then(Value::as_str);
        style::code_format(input.completion, of_row.unwrap_or(&language))
    })
}

fn repetition_of_words(settings: &RewardConfig) -> Result<RewardFunction> {
    let (size, penalty) = (settings.arguments.repetition_n_grams, settings.arguments.repetition_max_penalty);
    of(move |input| style::repetition_penalty(&style::words(input.completion), size, penalty))
}

fn repetition_of_tokens(settings: &RewardConfig) -> Result<RewardFunction> {
    let (size, penalty) = (settings.arguments.repetition_n_grams, settings.arguments.repetition_max_penalty);
    of(move |input| style::repetition_penalty(input.token_ids, size, penalty))
}

fn soft_overlong_punishment(settings: &RewardConfig) -> Result<RewardFunction> {
    let (longest, cache) = (settings.arguments.max_completion_len, settings.arguments.soft_punish_cache);
    of(move |input| style::soft_overlong_punishment(input.token_ids.len(), longest, cache))
}

/// Advice for an unknown reward name: the equivalent of a reward of TRL, open-r1 or verl, or how to give a function.
fn advice(name: &str) -> String {
    if name.ends_with(".py") {
        return format!("; name a function of the file: {name}:FUNCTION");
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
        "exact" | "exact_match" | "em" => "exact_answer",
        "correct" | "correctness" | "answer" => "numeric_answer, exact_answer, math",
        "brevity" => "length",
        "tests" | "unit_tests" => "code",
        _ => {
            let bare = ["_rewards", "_reward", "_func", "_fn"].iter().find_map(|end| name.strip_suffix(end));
            let known: Vec<&str> = names().collect();
            if let Some(known) = bare.filter(|bare| known.contains(bare)) {
                return format!("; did you mean {known}?");
            }
            if let Some(advice) = bare.map(advice).filter(|advice| !advice.is_empty()) {
                return advice;
            }
            return nearest(name, &known).map(|near| format!("; did you mean {near}?")).unwrap_or_default();
        }
    };
    format!("; the equivalent here: {ours}")
}

/// The configured regular expression that marks answers, if there is one.
pub(super) fn answer_pattern(settings: &RewardConfig) -> Result<Option<Regex>> {
    settings.answer_pattern.as_ref().map(|pattern| compiled("reward.answer_pattern", pattern)).transpose()
}

/// Compiles a regular expression from the configuration; errors name `key`.
pub(super) fn compiled(key: &str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| Error::invalid_value(key, pattern, format!("a regular expression: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reward::code;
    use crate::reward::verdict::Verdict;
    use crate::types::FinishReason;

    /// Scores of open-r1 (commit 1416fa0) and TRL 1.16, recorded by scripts/golden_rewards.py.
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
        let input =
            RewardInput { prompt: "", completion, messages: &[], token_ids, finish_reason: FinishReason::Eos, columns };
        function("reward_funcs", name, settings).unwrap()(&input).unwrap()
    }

    fn assert_golden(golden: &Value, name: &str, scores: Vec<f32>) {
        let expected =
            golden.as_array().unwrap().iter().map(|score| score.as_f64().unwrap() as f32).collect::<Vec<_>>();
        assert_eq!(scores, expected, "{name}");
    }

    #[test]
    fn text_rewards_equal_open_r1_and_trl() {
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
    fn every_built_in_reward_has_a_function_or_a_process() {
        let processes = Verdict::NAMES.into_iter().chain([code::NAME, code::BINARY_NAME]);
        let rows = BUILTIN.iter().filter(|row| matches!(row.scorer, Scorer::Process)).map(|row| row.name);
        assert!(processes.clone().all(|name| rows.clone().any(|row| row == name)));
        assert!(rows.clone().all(|row| processes.clone().any(|name| row == name)));
        for row in BUILTIN {
            assert_eq!(
                function("reward_funcs", row.name, &RewardConfig::default()).is_ok(),
                rows.clone().all(|name| name != row.name)
            );
        }
    }

    #[test]
    fn unknown_reward_names_get_a_suggestion() {
        for (name, advice) in [
            ("exact_match", "here: exact_answer"),
            ("numeric", "did you mean numeric_answer?"),
            ("fromat", "did you mean format?"),
            ("length_reward", "did you mean length?"),
            ("correctness_reward", "here: numeric_answer, exact_answer, math"),
            ("mine.py", "name a function of the file: mine.py:FUNCTION"),
        ] {
            let error = function("reward_funcs", name, &RewardConfig::default()).err().unwrap().to_string();
            assert!(error.ends_with(advice), "{error}");
        }
    }

    #[test]
    fn token_rewards_equal_open_r1_and_trl() {
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
