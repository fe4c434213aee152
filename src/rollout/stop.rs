//! When a completion ends: at an end-of-sequence id, a stop string, or a length.

use std::fmt;
use std::sync::Arc;

use super::sequence::EngineSequence;
use crate::error::Result;
use crate::ops::random::RandomKey;
use crate::types::FinishReason;

/// Limits the length of a completion as a function of its random key, so that the limit does not depend on the rank that samples it. Completions from
/// random weights never end by themselves, so benchmarks and tests use such limits.
#[derive(Clone)]
pub struct CompletionLimit(Arc<dyn Fn(RandomKey) -> usize + Send + Sync>);

impl CompletionLimit {
    /// Limits every completion to the number of tokens that `most_tokens` returns for its key, at least 1.
    pub fn new(most_tokens: impl Fn(RandomKey) -> usize + Send + Sync + 'static) -> Self {
        Self(Arc::new(most_tokens))
    }

    /// Maximum number of tokens of the completion with `key`.
    pub(super) fn of(&self, key: RandomKey) -> usize {
        self.0(key)
    }
}

impl fmt::Debug for CompletionLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CompletionLimit(..)")
    }
}

/// Rules that end completions: an end-of-sequence id, then a stop string (its text is kept), then the length limit.
pub(super) struct StopRules<'a> {
    /// Ids that end a completion. The id stays the completion's last token.
    pub(super) eos_token_ids: &'a [u32],
    /// Decodes token ids to text without special tokens.
    pub(super) decode: &'a dyn Fn(&[u32]) -> Result<String>,
}

impl StopRules<'_> {
    /// Checks whether a sequence ends with its newest token.
    pub(super) fn finish_reason(&self, sequence: &mut EngineSequence) -> Result<Option<FinishReason>> {
        if sequence.completion().last().is_some_and(|id| self.eos_token_ids.contains(id)) {
            return Ok(Some(FinishReason::Eos));
        }
        if !sequence.params.stop.is_empty() {
            let completion = &sequence.token_ids[sequence.prompt_len..];
            if sequence.detokenizer.push(completion, &sequence.params.stop, self.decode)? {
                return Ok(Some(FinishReason::Stop));
            }
        }
        Ok((sequence.len() >= sequence.max_len).then_some(FinishReason::Length))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::types::SamplingParams;

    /// Decodes bytes as tokens, so that a character can span several tokens.
    fn decode(ids: &[u32]) -> Result<String> {
        let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The text and reason with which an endless completion ends.
    fn run(text: &str, stop: &[&str], max_completion_length: usize) -> (String, FinishReason) {
        let stop: Vec<String> = stop.iter().map(|&stop| stop.to_owned()).collect();
        let rules = StopRules { eos_token_ids: &[0], decode: &decode };
        let params = Arc::new(SamplingParams { stop, ..SamplingParams::default() });
        let mut sequence = EngineSequence::new(0, params, &[7, 7, 7], 3 + max_completion_length);
        for byte in text.bytes() {
            sequence.token_ids.push(byte.into());
            if let Some(reason) = rules.finish_reason(&mut sequence).unwrap() {
                return (decode(sequence.completion()).unwrap(), reason);
            }
        }
        panic!("'{text}' did not end");
    }

    #[test]
    fn a_completion_ends_with_the_last_token_of_a_stop_string() {
        assert_eq!(run("one</a>two", &["</a>", "zz"], 99), ("one</a>".into(), FinishReason::Stop));
        assert_eq!(run("héllo wörld", &["wö"], 99), ("héllo wö".into(), FinishReason::Stop));
        assert_eq!(run("ééééééé stop", &["é s"], 99), ("ééééééé s".into(), FinishReason::Stop));
    }

    #[test]
    fn an_end_token_takes_precedence_over_the_length_limit() {
        assert_eq!(run("ab\0", &[], 3), ("ab\0".into(), FinishReason::Eos));
        assert_eq!(run("abcd", &["xyz"], 3), ("abc".into(), FinishReason::Length));
    }
}
