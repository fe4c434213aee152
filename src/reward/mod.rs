//! Verifiers that score completions, and the threads and processes they run in. Know nothing of tensors. What a model wrote
//! is read, compared and matched against regular expressions of linear time; it is run in the sandbox alone, and
//! graded outside of it.
//!
//! | file | what it is |
//! |---|---|
//! | `answer`, `number` | the built-in rewards that are functions |
//! | `pool`, `state`, `failures` | what is to be scored, by whom, and what went wrong |
//! | `function` | threads that call functions of this process |
//! | `service`, `conversation`, `worker`, `worker.py`, `protocol` | rewards in processes of their own |
//! | `reaper`, `reaper.sh` | ends what a worker started, wherever it went |
//! | `source` | which of these an entry of `reward_funcs` means |
//! | `code` | model-written programs, run against tests in the sandbox |

mod answer;
pub mod code;
mod conversation;
mod failures;
mod function;
mod number;
mod pool;
mod protocol;
mod reaper;
mod service;
mod source;
mod state;
mod worker;

use std::sync::Arc;

pub use answer::{exact_answer, format, numeric_answer};
pub use failures::FailureKind;
pub use pool::RewardPool;
use regex::Regex;
use serde_json::{Map, Value};

use crate::config::RewardConfig;
use crate::error::{Error, Result};
use crate::types::FinishReason;

/// Names of the built-in rewards.
pub const BUILTIN: [&str; 4] = ["format", "numeric_answer", "exact_answer", code::NAME];

/// What a reward function sees of one completion.
#[derive(Debug, Clone, Copy)]
pub struct RewardInput<'a> {
    /// The rendered prompt.
    pub prompt: &'a str,
    /// The completion, special tokens left out.
    pub completion: &'a str,
    /// The completion's ids, the end-of-sequence token included.
    pub token_ids: &'a [u32],
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Every column of the prompt's row.
    pub columns: &'a Map<String, Value>,
}

/// A reward: a finite number, or an error that masks the sample.
pub type RewardFunction = Arc<dyn Fn(&RewardInput<'_>) -> Result<f32> + Send + Sync>;

/// The built-in reward of this name, which `key` gives, that is a function.
///
/// # Errors
/// [`Error::InvalidValue`] for an unknown name or a pattern that does not compile.
pub fn builtin(key: &str, name: &str, config: &RewardConfig) -> Result<RewardFunction> {
    let answer = || compiled("reward.answer_pattern", &config.answer_pattern);
    let column = config.answer_column.clone();
    Ok(match name {
        "format" => {
            let whole = format!(r"\A(?:{})\z", config.format_pattern);
            let pattern = compiled("reward.format_pattern", &whole)?;
            Arc::new(move |input| Ok(format(input.completion, &pattern)))
        }
        "numeric_answer" => {
            let pattern = answer()?;
            Arc::new(move |input| numeric_answer(input.completion, &pattern, input.columns, &column))
        }
        "exact_answer" => {
            let pattern = answer()?;
            Arc::new(move |input| exact_answer(input.completion, &pattern, input.columns, &column))
        }
        _ => {
            let names = BUILTIN.join(", ");
            let expected = format!(
                "names among {names}, a configuration's tables rewards.NAME, or Python functions as file.py:function{}",
                advice(name)
            );
            return Err(Error::invalid_value(key, name, expected));
        }
    })
}

/// What is written here for a reward that users of TRL, open-r1 and verl bring along, or that lacks its function.
fn advice(name: &str) -> String {
    if name.ends_with(".py") {
        return format!("; which function of the file, as {name}:FUNCTION?");
    }
    let ours = match name {
        "accuracy" | "accuracy_reward" | "reasoning_accuracy_reward" | "gsm8k" | "math" => {
            "numeric_answer, exact_answer"
        }
        "format_reward" | "think_format_reward" => "format (reward.format_pattern)",
        "code_reward" | "binary_code_reward" => "code",
        _ => return String::new(),
    };
    format!("; here: {ours}")
}

/// What a built-in reward takes for a completion's answer, such that equal answers are equal texts; none for one that
/// compares no answers.
///
/// # Errors
/// As [`builtin`].
pub fn answer_reader(name: &str, config: &RewardConfig) -> Result<Option<impl Fn(&str) -> Option<String> + use<>>> {
    let pattern = compiled("reward.answer_pattern", &config.answer_pattern)?;
    let is_number = name == "numeric_answer";
    Ok(reads_answer(name).then_some(move |completion: &str| answer::vote(completion, &pattern, is_number)))
}

/// Whether a built-in reward compares with a column of the row.
fn reads_answer(name: &str) -> bool {
    matches!(name, "numeric_answer" | "exact_answer")
}

/// Holds what a reward's process answered, a frame without its length, to the protocol: one score for each completion, or an
/// error of the reward's own.
///
/// # Errors
/// What is wrong with it, or the reward's error.
pub fn check_reply(frame: &[u8], num_completions: usize) -> std::result::Result<(), String> {
    let scores = protocol::Reply::parse(frame).and_then(|reply| reply.scores(num_completions));
    scores.map(drop).map_err(|failure| failure.cause)
}

fn compiled(key: &str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| Error::invalid_value(key, pattern, format!("a regular expression: {error}")))
}
