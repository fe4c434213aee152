//! Incremental detokenization: the text of a completion while it is sampled.

use crate::error::Result;

/// Decodes a growing completion token by token at constant cost. Only the last tokens are decoded again, because a token's text may depend on the
/// tokens before it (spaces) and after it (bytes of one character).
#[derive(Debug, Default)]
pub(super) struct Detokenizer {
    /// Start of the tokens that are decoded again for context. The text of all tokens before `read` is known.
    prefix: usize,
    read: usize,
    /// End of the known text, long enough to hold the beginning of a stop string.
    tail: String,
}

impl Detokenizer {
    /// Skips the first `len` tokens of a completion: those before its newest turn.
    pub(super) fn after(len: usize) -> Self {
        Self { prefix: len, read: len, tail: String::new() }
    }

    /// Decodes the tokens that were added to `completion`. Returns whether a stop string has appeared.
    pub(super) fn push(
        &mut self,
        completion: &[u32],
        stop: &[String],
        decode: &dyn Fn(&[u32]) -> Result<String>,
    ) -> Result<bool> {
        let known = decode(&completion[self.prefix..self.read])?;
        let text = decode(&completion[self.prefix..])?;
        let Some(new) = text.get(known.len()..).filter(|new| !new.is_empty() && !new.ends_with('\u{FFFD}')) else {
            return Ok(false);
        };
        self.tail.push_str(new);
        (self.prefix, self.read) = (self.read, completion.len());
        let found = stop.iter().any(|stop| self.tail.contains(stop.as_str()));
        let longest = stop.iter().map(String::len).max().unwrap_or(0);
        let cut = self.tail.len().saturating_sub(longest);
        let cut = (0..=cut).rev().find(|&at| self.tail.is_char_boundary(at)).unwrap_or(0);
        self.tail.drain(..cut);
        Ok(found)
    }
}
