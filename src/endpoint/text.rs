//! Converts streamed token ids to text: only whole characters, and without stop strings.

use std::sync::Arc;

use crate::data::Tokenizer;
use crate::error::Result;

/// The character that a decoder writes for an incomplete character.
const INCOMPLETE: char = '\u{FFFD}';

/// The text of one growing completion.
///
/// Only the last tokens are decoded again, because a token's text may depend on the tokens before it (spaces) and after it (bytes of
/// one character). Text that may be part of a stop string is held back until this is decided. A stop string and the text after it are never returned.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    stop: Vec<String>,
    /// Ids whose text is not decided yet, after the ids on which it depends.
    ids: Vec<u32>,
    /// Number of leading `ids` that are kept only as context.
    num_known: usize,
    /// Decoded text that was not returned yet.
    held: String,
    has_ended: bool,
    /// Ids left out of the text if special tokens are included; `None` if special tokens are not.
    left_out: Option<Vec<u32>>,
}

impl TextStream {
    /// The text of a completion that ends at one of the strings `stop`.
    pub fn new(tokenizer: Arc<Tokenizer>, stop: Vec<String>) -> Self {
        Self { tokenizer, stop, ids: Vec::new(), num_known: 0, held: String::new(), has_ended: false, left_out: None }
    }

    /// Includes special tokens by name, except for `left_out`.
    pub fn with_special_tokens(self, left_out: Vec<u32>) -> Self {
        Self { left_out: Some(left_out), ..self }
    }

    /// Appends a token and returns the text that is certain now.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    pub fn push(&mut self, token_id: u32) -> Result<String> {
        if !self.left_out.as_ref().is_some_and(|ids| ids.contains(&token_id)) {
            self.ids.push(token_id);
        }
        self.take_in(false)?;
        Ok(self.certain())
    }

    /// Returns the remaining text after the completion has ended.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    pub fn finish(&mut self) -> Result<String> {
        self.take_in(true)?;
        let rest = self.certain();
        self.has_ended = true;
        Ok(rest + &std::mem::take(&mut self.held))
    }

    fn take_in(&mut self, is_last: bool) -> Result<()> {
        let known = self.decode(&self.ids[..self.num_known])?;
        let text = self.decode(&self.ids)?;
        let rest; // of a decoder that writes bytes before an incomplete character anew
        let new = match text.get(known.len()..) {
            _ if is_last && !text.starts_with(&known) => {
                rest = self.decode(&self.ids[self.num_known..])?;
                &rest
            }
            Some(new) => new,
            None => return Ok(()),
        };
        if new.is_empty() || (new.ends_with(INCOMPLETE) && !is_last) {
            return Ok(());
        }
        if !self.has_ended {
            self.held.push_str(new);
        }
        self.ids.drain(..self.num_known);
        self.num_known = self.ids.len();
        Ok(())
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        if self.left_out.is_some() { self.tokenizer.decode_all(ids) } else { self.tokenizer.decode(ids) }
    }

    /// Removes from the held text, and returns, the part in which no stop string can begin.
    fn certain(&mut self) -> String {
        if let Some(at) = self.stop.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.has_ended = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let may_begin = |at: usize| self.stop.iter().any(|stop| stop.starts_with(&self.held[at..]));
        let longest = self.stop.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let starts = self.held.char_indices().map(|(at, _)| at).filter(|at| *at >= from);
        let cut = starts.into_iter().find(|&at| may_begin(at)).unwrap_or(self.held.len());
        let rest = self.held.split_off(cut);
        std::mem::replace(&mut self.held, rest)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A tokenizer with one token per byte.
    pub fn bytes() -> Arc<Tokenizer> {
        let vocab: serde_json::Map<_, _> = (0..=255u32).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0",
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        });
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        Arc::new(Tokenizer::from_folder(folder.path()).unwrap())
    }

    /// The pieces of text that a stream of one-byte tokens returns.
    fn pieces(text: &[u8], stop: &[&str]) -> Vec<String> {
        let mut stream = TextStream::new(bytes(), stop.iter().map(|&stop| stop.to_owned()).collect());
        let mut pieces: Vec<String> = text.iter().map(|&byte| stream.push(byte.into()).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        pieces.retain(|piece| !piece.is_empty());
        pieces
    }

    #[test]
    fn streamed_text_never_splits_a_character() {
        assert_eq!(pieces("aé€😀b".as_bytes(), &[]), ["a", "é", "€", "😀", "b"]);
        let torn = pieces(&"a€".as_bytes()[..3], &[]).concat();
        assert!(torn.starts_with('a') && torn[1..].chars().all(|c| c == INCOMPLETE) && torn.len() > 1, "{torn:?}");
    }

    #[test]
    fn stop_strings_are_removed_but_their_partial_matches_are_shown() {
        assert_eq!(pieces(b"one</a>two", &["</a>", "zz"]), ["o", "n", "e"]);
        assert_eq!(pieces(b"one</b", &["</a>"]), ["o", "n", "e", "</b"]);
        assert_eq!(pieces(b"one</", &["</a>"]), ["o", "n", "e", "</"]);
        assert_eq!(pieces("xäöüy".as_bytes(), &["öüy", "ö!"]).concat(), "xä");
        assert_eq!(pieces(b"aab", &["aab"]).concat(), "");
        assert_eq!(pieces(b"aaab", &["aab"]).concat(), "a");
    }
}
