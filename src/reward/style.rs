//! Rewards for a completion's style and length, named as in open-r1 and TRL. Each computes the same as
//! the original (tests/golden/rewards.json); docs/built-in-rewards.md lists the differences.

use std::collections::HashSet;
use std::hash::Hash;

use regex::Regex;

/// open-r1's `tag_count`: a quarter for each of the four tags that occurs exactly once, with its line breaks.
pub(super) fn tag_count(completion: &str) -> f64 {
    let tags = ["<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"];
    0.25 * tags.iter().filter(|tag| completion.matches(**tag).count() == 1).count() as f64
}

/// The pattern that `reasoning_steps` counts: "Step 1:", a numbered first line, lines that begin with - or *, transition
/// words.
pub(super) const STEP_PATTERN: &str = r"Step \d+:|\A\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,";

/// open-r1's `reasoning_steps`: a third for each match of `pattern` ([`STEP_PATTERN`]), at most 1.
pub(super) fn reasoning_steps(completion: &str, pattern: &Regex) -> f64 {
    (pattern.find_iter(completion).count() as f64 / 3.0).min(1.0)
}

/// TRL's `think_format_reward`: 1 if the completion begins with its only `<think>` tag and contains the closing tag.
pub(super) fn think_format(completion: &str) -> f64 {
    let is_formed = |rest: &str| !rest.contains("<think>") && rest.contains("</think>");
    f64::from(u8::from(completion.strip_prefix("<think>").is_some_and(is_formed)))
}

/// open-r1's `code_format`: 1 if reasoning in its tags is followed by an answer in its tags that contains a code block of `language`.
pub(super) fn code_format(completion: &str, language: &str) -> f64 {
    let fence = format!("```{language}");
    let inner = ["\n</think>\n<answer>\n", &fence, "```"];
    let block = completion
        .strip_prefix("<think>\n")
        .and_then(|rest| inner.iter().try_fold(rest, |rest, part| after(rest, part)));
    let is_closed = |rest: &str| rest.match_indices(CLOSE).any(|(at, _)| ends_line(&rest[at + CLOSE.len()..]));
    f64::from(u8::from(block.is_some_and(is_closed)))
}

const CLOSE: &str = "\n</answer>";

/// The text after the first occurrence of `part`.
fn after<'a>(text: &'a str, part: &str) -> Option<&'a str> {
    text.split_once(part).map(|(_, rest)| rest)
}

fn ends_line(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with('\n')
}

/// Words in lower case, split like Python's `str.split`.
pub(super) fn words(completion: &str) -> Vec<String> {
    let is_space = |c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c);
    completion.to_lowercase().split(is_space).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Appendix C.2 of arXiv 2502.03373: `max_penalty` times the share of n-grams that occurred earlier. Items are words in open-r1's
/// `repetition_penalty`, and token ids in TRL's `get_repetition_penalty_reward`.
pub(super) fn repetition_penalty<T: Hash + Eq>(items: &[T], ngram_size: usize, max_penalty: f64) -> f64 {
    let total = items.windows(ngram_size).count();
    if total == 0 {
        return 0.0;
    }
    let unique = items.windows(ngram_size).collect::<HashSet<_>>().len();
    (1.0 - unique as f64 / total as f64) * max_penalty
}

/// Equation 13 of DAPO (arXiv 2503.14476): 0 up to `max_length - cache` tokens, from there falling to -1 at `max_length` and beyond.
pub(super) fn soft_overlong_punishment(length: usize, max_length: usize, cache: usize) -> f64 {
    let (length, max_length, cache) = (length as f64, max_length as f64, cache as f64);
    match length {
        _ if length <= max_length - cache => 0.0,
        _ if length <= max_length => (max_length - cache - length) / cache,
        _ => -1.0,
    }
}
