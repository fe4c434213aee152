//! Rewards that depend on whether an answer is right. Only equality of plain numbers is decided in this process. For all other answers,
//! `verdict.py` compares them with the Python package math-verify.

use serde_json::Value;

use super::answer;
use super::failures::{FailureKind, RewardFailure, Score};
use super::number::Rational;
use crate::config::{RewardArguments, RewardConfig};
use crate::types::RolloutGroup;

const VERDICT: &str = include_str!("verdict.py");

/// A reward that maps whether an answer is right to a score.
#[derive(Debug, Clone)]
pub(super) struct Verdict {
    name: &'static str,
    settings: RewardConfig,
}

impl Verdict {
    /// Names of these rewards. `verdict.py` has a function for each.
    pub const NAMES: [&'static str; 7] = [
        "math",
        "accuracy",
        "cosine",
        "length",
        "accuracy_reward",
        "reasoning_accuracy_reward",
        "get_cosine_scaled_reward",
    ];

    /// The verdict reward `name`; `None` for other rewards.
    pub fn of(name: &str, settings: &RewardConfig) -> Option<Self> {
        let name = Self::NAMES.into_iter().find(|known| *known == name)?;
        Some(Self { name, settings: settings.clone() })
    }

    /// Settings of all rewards.
    pub fn settings(&self) -> &RewardConfig {
        &self.settings
    }

    /// The source of the Python module that compares answers, with the name of the function to call.
    pub fn function(&self) -> String {
        self.module() + self.name
    }

    /// The source of the Python module, with the name of the function that checks whether a reference answer can be parsed.
    pub fn readable(&self) -> String {
        self.module() + "readable"
    }

    fn module(&self) -> String {
        let delimiters = serde_json::to_string(&self.settings.arguments.reasoning_delimiters).expect("texts are JSON");
        format!("{VERDICT}\nREASONING_DELIMITERS = {delimiters}\n:")
    }

    /// The row's reference answer. For open-r1's and TRL's rewards it may also be in column `solution`, as in their data.
    pub fn reference(&self, columns: &serde_json::Map<String, Value>) -> Result<String, RewardFailure> {
        let configured = self.settings.answer_column.as_str();
        let is_theirs =
            self.name != "math" && configured == "answer" && columns.get("solution").is_some_and(Value::is_string);
        Ok(answer::reference(columns, if is_theirs { "solution" } else { configured })?)
    }

    /// Whether a reference answer is a plain number, which is parsed without Python.
    pub fn is_plain(reference: &str) -> bool {
        bare(reference).or_else(|| wrapped(reference)).is_some()
    }

    /// The score of a completion whose number equals the reference answer; `None` if Python has to compare. An error if the row has no
    /// reference answer.
    pub fn at_once(&self, group: &RolloutGroup, index: usize) -> Result<Option<Score>, RewardFailure> {
        let reference = self.reference(&group.prompt.columns)?;
        let is_equal =
            self.given(group.completions[index].newest_text()).is_some_and(|text| self.are_equal(&reference, text));
        is_equal.then(|| self.score(true, group, index)).transpose()
    }

    /// The part of a completion that must contain the answer.
    fn given<'a>(&self, completion: &'a str) -> Option<&'a str> {
        if self.name != "reasoning_accuracy_reward" {
            return Some(completion);
        }
        let delimiters = &self.settings.arguments.reasoning_delimiters;
        let found = delimiters.iter().find(|delimiter| completion.contains(delimiter.as_str()))?;
        completion.rsplit(found.as_str()).next()
    }

    /// Whether both are equal plain numbers, and the completion's number is where math-verify would find it first.
    fn are_equal(&self, reference: &str, completion: &str) -> bool {
        let is_open = matches!(self.name, "cosine" | "length"); // read a formula around the box, too
        let number = if is_open { wrapped(reference) } else { bare(reference).or_else(|| wrapped(reference)) };
        let formula = ["$", "\\(", "\\[", "["];
        let is_hidden = is_open && formula.iter().any(|mark| completion.contains(mark));
        !is_hidden && number.is_some() && number == boxed(completion)
    }

    /// The score of a completion, given whether its answer is right.
    pub fn score(&self, is_right: bool, group: &RolloutGroup, index: usize) -> Result<Score, RewardFailure> {
        let completion = &group.completions[index];
        let num_chars = |text: &str| text.chars().count() as f64;
        let arguments = &self.settings.arguments;
        let score = match self.name {
            "length" => {
                let lengths = group.completions.iter().map(|completion| num_chars(completion.newest_text()));
                length(is_right, num_chars(completion.newest_text()), lengths)
            }
            "cosine" => {
                let share = num_chars(completion.newest_text()) / arguments.cosine_max_len as f64;
                cosine(is_right, share, arguments, arguments.cosine_min_value_wrong.unwrap_or(0.0))
            }
            "get_cosine_scaled_reward" => {
                let share = completion.token_ids.len() as f64 / arguments.cosine_max_len as f64;
                cosine(is_right, share.min(1.0), arguments, arguments.cosine_min_value_wrong.unwrap_or(-1.0))
            }
            _ => f64::from(u8::from(is_right)),
        };
        Score::finite(score as f32)
    }

    /// Converts Python's score of a completion (0 or 1) to the reward.
    pub fn finish(&self, said: Score, group: &RolloutGroup, index: usize) -> Result<Score, RewardFailure> {
        match said {
            Score::Value(1.0) => self.score(true, group, index),
            Score::Value(0.0) => self.score(false, group, index),
            other => Err(RewardFailure::new(FailureKind::Output, format!("expected a score of 0 or 1, got {other:?}"))),
        }
    }
}

/// Section 2.3.3 of Kimi k1.5 (arXiv 2501.12599): from 0.5 for the shortest of a prompt's completions to -0.5 for the longest. A
/// wrong completion gets at most 0. All get 0 if their lengths are equal.
fn length(is_right: bool, own: f64, all: impl Iterator<Item = f64> + Clone) -> f64 {
    let (shortest, longest) = (all.clone().fold(f64::INFINITY, f64::min), all.fold(0.0, f64::max));
    if shortest == longest {
        return 0.0;
    }
    let reward = 0.5 - (own - shortest) / (longest - shortest);
    if is_right { reward } else { reward.min(0.0) }
}

/// Appendix C.1 of arXiv 2502.03373: a cosine from the value for the shortest answer to that for the longest. `share` is the answer's length
/// divided by the longest.
fn cosine(is_right: bool, share: f64, arguments: &RewardArguments, shortest_wrong: f64) -> f64 {
    let (shortest, longest) = match is_right {
        true => (arguments.cosine_max_value_correct, arguments.cosine_min_value_correct),
        false => (shortest_wrong, arguments.cosine_max_value_wrong),
    };
    longest + 0.5 * (shortest - longest) * (1.0 + (share * std::f64::consts::PI).cos())
}

/// Parses a reference answer that is only a number.
fn bare(text: &str) -> Option<Rational> {
    let is_fraction = text.trim_start_matches('-').starts_with("\\frac{");
    match text.strip_suffix('%') {
        _ if text.contains('\\') && !is_fraction => None,
        Some(percent) => Rational::plain(&format!("{percent}\\%")),
        None => Rational::plain(text),
    }
}

/// Parses a reference answer that is a number in math delimiters or in `\boxed{..}`.
fn wrapped(text: &str) -> Option<Rational> {
    [("\\boxed{", "}"), ("\\(", "\\)"), ("$", "$")]
        .iter()
        .find_map(|(open, close)| Rational::plain(text.strip_prefix(open)?.strip_suffix(close)?))
}

/// The number in the only `\boxed{..}` of a completion; `None` if anything else in it could be taken for an answer.
fn boxed(completion: &str) -> Option<Rational> {
    let (before, rest) = completion.split_once("\\boxed{")?;
    let fraction = rest.trim_start().trim_start_matches('-').starts_with('\\');
    let end = match fraction {
        true => rest.match_indices('}').nth(2).map(|(at, _)| at)?,
        false => rest.find('}')?,
    };
    let (number, after) = (&rest[..end], &rest[end + 1..]);
    let has_box = |text: &str| text.contains("\\boxed") || text.contains("\\fbox");
    let lower = |text: &str| text.to_lowercase();
    let is_percent = ["%", "percent", "pct"].iter().any(|word| lower(after).contains(word));
    let has_say = has_box(before) || has_box(after) || lower(completion).contains("final answer") || is_percent;
    if has_say { None } else { Rational::plain(number.trim()) }
}

#[cfg(test)]
mod tests;
