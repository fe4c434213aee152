//! Built-in rewards that are pure functions of a completion's text and its row.

use regex::Regex;
use serde_json::{Map, Value};

use super::marked::last_marked;
use super::number::Rational;
use crate::error::{Error, Result};

/// The reward `format`: 1 if `pattern` matches, else 0. Anchor the pattern (`\A(?:..)\z`) to match the whole completion.
///
/// ```
/// use colo_grpo::reward::format;
///
/// let pattern = regex::Regex::new(r"\A(?:the answer is [0-9]+)\z").unwrap();
/// assert_eq!((format("the answer is 5", &pattern), format("the answer is 5.", &pattern)), (1.0, 0.0));
/// ```
pub fn format(completion: &str, pattern: &Regex) -> f32 {
    f32::from(u8::from(pattern.is_match(completion)))
}

/// The reward `numeric_answer`: 1 if the last marked answer is the same number as `columns[column]`, else 0. Numbers are compared as exact
/// fractions. Without a pattern an answer is in `<answer>..</answer>`, `\boxed{..}` or `\fbox{..}` (with matched braces), or after `####`. With a
/// pattern it is the first group that took part in the last match. If the last mark cannot be parsed, the answer is wrong.
///
/// ```
/// use colo_grpo::reward::numeric_answer;
///
/// let columns = serde_json::Map::from_iter([("answer".to_owned(), "5".into())]);
/// assert_eq!(numeric_answer("that is \\boxed{5.0}", None, &columns, "answer")?, 1.0);
/// assert_eq!(numeric_answer("\\boxed{5}, or rather \\boxed{6}", None, &columns, "answer")?, 0.0);
/// # Ok::<(), colo_grpo::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`] if the column is missing or is not a number.
pub fn numeric_answer<'a>(
    completion: &str,
    pattern: impl Into<Option<&'a Regex>>,
    columns: &Map<String, Value>,
    column: &str,
) -> Result<f32> {
    let pattern: Option<&Regex> = pattern.into();
    let reference = reference(columns, column)?;
    let number = Rational::parse(&reference).or_else(|| Rational::parse(last_answer(&reference, pattern)?));
    let number = number.ok_or_else(|| Error::InvalidArgument {
        op: "numeric_answer",
        expected: format!("a number in column '{column}'"),
        got: reference.clone(),
    })?;
    let answer = last_answer(completion, pattern).and_then(Rational::parse);
    Ok(f32::from(u8::from(answer == Some(number))))
}

/// The reward `exact_answer`: 1 if the last marked answer ([`numeric_answer`]) equals the text of `columns[column]`, else 0. Case and white space
/// are ignored.
///
/// ```
/// use colo_grpo::reward::exact_answer;
///
/// let columns = serde_json::Map::from_iter([("city".to_owned(), "New York".into())]);
/// assert_eq!(exact_answer("<answer>new  york</answer>", None, &columns, "city")?, 1.0);
/// # Ok::<(), colo_grpo::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`] if the column is missing or is neither text nor a number.
pub fn exact_answer<'a>(
    completion: &str,
    pattern: impl Into<Option<&'a Regex>>,
    columns: &Map<String, Value>,
    column: &str,
) -> Result<f32> {
    let pattern: Option<&Regex> = pattern.into();
    let reference = reference(columns, column)?;
    let expected = normalized(last_answer(&reference, pattern).unwrap_or(&reference));
    let answer = last_answer(completion, pattern).map(normalized);
    Ok(f32::from(u8::from(answer == Some(expected))))
}

/// The normalized answer by which majority voting counts a completion: the number in lowest terms (except for `exact_answer`), or else the
/// text as [`exact_answer`] compares it (except for `numeric_answer`). `None` if the completion marks no answer.
pub(super) fn vote(completion: &str, pattern: Option<&Regex>, reward: &str) -> Option<String> {
    let answer = last_answer(completion, pattern)?;
    let number = || Rational::parse(answer).map(|number| number.to_string());
    match reward {
        "numeric_answer" => number(),
        "exact_answer" => Some(normalized(answer)),
        _ => number().or_else(|| Some(normalized(answer))),
    }
}

/// The last marked answer in the text.
fn last_answer<'a>(text: &'a str, pattern: Option<&Regex>) -> Option<&'a str> {
    let Some(pattern) = pattern else { return last_marked(text) };
    let last = pattern.captures_iter(text).last()?;
    last.iter().skip(1).flatten().next().map(|group| group.as_str())
}

fn normalized(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

/// The reference answer from `columns[column]` as text.
pub(super) fn reference(columns: &Map<String, Value>, column: &str) -> Result<String> {
    match columns.get(column) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Number(number)) => Ok(number.to_string()),
        other => Err(Error::InvalidArgument {
            op: "reward",
            expected: format!("text or a number in column '{column}'"),
            got: other.map_or("no such column".into(), Value::to_string),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(answer: impl Into<Value>) -> Map<String, Value> {
        Map::from_iter([("answer".to_owned(), answer.into())])
    }

    #[test]
    fn the_last_marked_answer_counts_whatever_its_marking() {
        let score = |completion: &str, answer: Value| numeric_answer(completion, None, &row(answer), "answer").unwrap();
        assert_eq!(score("<answer>1</answer> no, <answer>\n 1,200 </answer>", 1200.into()), 1.0);
        assert_eq!(score("so \\boxed{\\frac{1}{2}}", "0.5".into()), 1.0);
        assert_eq!(score("<answer>\\boxed{7}</answer>", "7.0".into()), 1.0);
        assert_eq!(score("#### 18 dollars", "long reasoning\n#### 18".into()), 1.0);
        assert_eq!(score("#### 17", 18.into()), 0.0);
        assert_eq!(score("18", 18.into()), 0.0);
        assert_eq!(score("<answer>2; import os</answer>", 2.into()), 0.0);
        assert_eq!(score("\\boxed{3} then \\boxed{\\frac{\\frac{1}{2}}{3}}", 3.into()), 0.0);
        assert_eq!(score("\\boxed{3} then \\boxed{\\frac{\\frac{1}{2}}{3}}", "1/6".into()), 1.0);
        assert_eq!(score("\\boxed{3} then \\boxed{\\frac{1}{2}", 3.into()), 0.0);
        assert_eq!(score("\\boxed{3} then \\boxed{x}", 3.into()), 0.0);
    }

    /// Each case is a reference, a completion, and the results of TRL's `accuracy_reward` and verl's answer checks from scripts/golden_answers.py.
    #[test]
    fn answers_accepted_by_trl_or_verl_are_accepted() {
        let golden: Value = serde_json::from_str(include_str!("../../tests/golden/answers.json")).unwrap();
        let cases = golden["cases"].as_array().unwrap();
        let (mut accepted, mut rejected) = (0, 0);
        for case in cases {
            let (gold, completion) = (case[0].as_str().unwrap(), case[1].as_str().unwrap());
            let theirs = [&case[2], &case[3]].map(|verdict| verdict == 1.0);
            let ours = numeric_answer(completion, None, &row(gold), "answer").unwrap() == 1.0;
            assert!(ours || !theirs.contains(&true), "{completion} is {gold} for TRL, verl: {theirs:?}");
            assert_eq!(ours, case[4] == true, "{completion} and {gold}");
            *(if ours { &mut accepted } else { &mut rejected }) += 1;
        }
        assert!(accepted > 350 && rejected > 100, "{accepted} of {}", cases.len());
    }

    #[test]
    fn a_non_numeric_reference_answer_is_an_error() {
        let error = numeric_answer("#### 1", None, &row("seven"), "answer").unwrap_err().to_string();
        assert!(error.contains("a number in column 'answer', got seven"), "{error}");
        let error = numeric_answer("#### 1", None, &row(1), "solution").unwrap_err().to_string();
        assert!(error.contains("no such column"), "{error}");
        assert!(exact_answer("#### 1", None, &row(Value::Null), "answer").is_err());
    }

    #[test]
    fn exact_answers_ignore_case_and_white_space_only() {
        let pattern = Regex::new(r"is (.*?) \.").unwrap();
        let score = |completion: &str| exact_answer(completion, &pattern, &row("Forty  two"), "answer").unwrap();
        assert_eq!(score("it is forty two . "), 1.0);
        assert_eq!(score("it is forty  TWO ."), 1.0);
        assert_eq!(score("it is fortytwo ."), 0.0);
        assert_eq!(score("forty two"), 0.0);
    }

    #[test]
    fn the_format_reward_is_0_or_1() {
        let pattern = Regex::new(r"\A(?:a+|b)\z").unwrap();
        assert_eq!((format("aaa", &pattern), format("ab", &pattern), format("b\n", &pattern)), (1.0, 0.0, 0.0));
    }
}
