//! Finds thoughts (reasoning) in a model's message. Only calls outside of thoughts are made.
//!
//! A thought is between two markers. If the prompt has opened it already, the text begins inside it; the same holds for a text whose
//! first marker ends a thought. A thought that begins at the start of a line and has no end extends to the end of the text. An opening marker
//! within a line that has no end is ordinary text.

use super::ToolCallParser;
use crate::data::Tokenizer;
use crate::error::Result;

/// Markers around thoughts: the usual ones, and those of Mistral.
pub(super) const THOUGHTS: [(&str, &str); 2] = [("<think>", "</think>"), ("[THINK]", "[/THINK]")];
/// First characters of all markers of thoughts and calls.
const FIRST_CHARS: [char; 3] = ['<', '[', '{'];

/// Number of tokens at the end of a prompt in which an opening marker and white space after it fit.
const MARK_TOKENS: usize = 16;

/// If a prompt ends with a marker that opens a thought, returns the marker that ends this thought.
///
/// # Errors
/// The errors of the tokenizer.
pub(crate) fn open_thought(tokenizer: &Tokenizer, prompt: &[u32]) -> Result<Option<&'static str>> {
    let end = tokenizer.decode_all(&prompt[prompt.len().saturating_sub(MARK_TOKENS)..])?;
    let end = end.trim_end();
    Ok(THOUGHTS.iter().find(|(open, _)| end.ends_with(open)).map(|(_, close)| *close))
}

/// Whether the text after `before` starts at the beginning of a line.
fn ends_line(before: &str) -> bool {
    let before = before.trim_end_matches([' ', '\t']);
    before.is_empty() || before.ends_with('\n') || THOUGHTS.iter().any(|(_, end)| before.ends_with(end))
}

/// A marker outside of thoughts.
pub(super) enum TextMark {
    /// A call may begin at this byte offset.
    Call(usize),
    /// The end of a thought: all text before it was part of the thought.
    EndOfThought,
}

/// Iterates over the markers of a complete text that are outside of thoughts.
pub(super) struct Outside<'t> {
    text: &'t str,
    /// Byte offset of the next byte to scan.
    pub at: usize,
    /// Byte offset of the end of the last thought.
    pub thoughts_end: usize,
    /// End markers that do not occur at or after `at`.
    missing: Vec<&'static str>,
}

impl<'t> Outside<'t> {
    /// Scans a text. If `thought` is given, the text begins inside a thought that this marker ends.
    pub fn new(text: &'t str, thought: Option<&'static str>) -> Self {
        let begun = thought.map_or(0, |end| text.find(end).map_or(text.len(), |at| at + end.len()));
        Self { text, at: begun, thoughts_end: begun, missing: Vec::new() }
    }

    /// The next marker outside of thoughts. `markers` are those with which calls begin.
    pub fn next(&mut self, markers: &[&str]) -> Option<TextMark> {
        loop {
            let at = self.at + self.text[self.at..].find(FIRST_CHARS)?;
            let rest = &self.text[at..];
            if let Some((open, end)) = THOUGHTS.iter().find(|(open, _)| rest.starts_with(open)) {
                match self.end_of(end, at + open.len()) {
                    Some(behind) => (self.at, self.thoughts_end) = (behind, behind),
                    None if ends_line(&self.text[..at]) => {
                        (self.at, self.thoughts_end) = (self.text.len(), self.text.len());
                    }
                    None => self.at = at + open.len(),
                }
            } else if let Some((_, end)) = THOUGHTS.iter().find(|(_, end)| rest.starts_with(end)) {
                self.at = at + end.len();
                if self.thoughts_end == 0 {
                    self.thoughts_end = self.at;
                    return Some(TextMark::EndOfThought);
                }
            } else if let Some(marker) = markers.iter().find(|marker| rest.starts_with(**marker)) {
                self.at = at + marker.len();
                return Some(TextMark::Call(at));
            } else {
                self.at = at + 1;
            }
        }
    }

    fn end_of(&mut self, end: &'static str, from: usize) -> Option<usize> {
        if self.missing.contains(&end) {
            return None;
        }
        let found = self.text[from..].find(end).map(|at| from + at + end.len());
        if found.is_none() {
            self.missing.push(end);
        }
        found
    }
}

/// Determines how much of a growing message is certainly content, whatever follows. Each byte is scanned once.
#[derive(Debug)]
pub(crate) struct ContentScan {
    markers: &'static [&'static str],
    /// Number of bytes scanned so far.
    at: usize,
    /// The end marker of the thought that contains `at`, and whether the text is a thought even if the marker never comes.
    thought: Option<(&'static str, bool)>,
    /// For formats in which a call is the whole message: the offset at which it must begin, while only white space follows it so far.
    blank: Option<usize>,
    /// Whether a call in this format is the whole message, apart from thoughts.
    is_alone: bool,
    /// Whether later text is not scanned, as nothing further is certain.
    is_done: bool,
    #[cfg(test)]
    pub num_searched: usize,
}

impl ContentScan {
    /// Scans a message. If `thought` is given, the message begins inside a thought that this marker ends.
    pub fn new(parser: ToolCallParser, thought: Option<&'static str>) -> Self {
        let is_alone = parser == ToolCallParser::Pythonic;
        Self {
            markers: parser.markers(),
            at: 0,
            thought: thought.map(|end| (end, true)),
            blank: Some(0).filter(|_| is_alone && thought.is_none()),
            is_alone,
            is_done: parser == ToolCallParser::OpenAi, // which text is content is known at the end
            #[cfg(test)]
            num_searched: 0,
        }
    }

    /// Scans the new part of `text`, which extends the text of the last call. Returns the number of bytes that are content.
    pub fn advance(&mut self, text: &str) -> usize {
        while !self.is_done {
            let found = text[self.at..].find(FIRST_CHARS);
            let at = found.map_or(text.len(), |found| self.at + found);
            #[cfg(test)]
            {
                self.num_searched += at + 1 - self.at;
            }
            self.pass(text, at);
            let rest = &text[at..];
            if rest.is_empty() {
                return self.blank.unwrap_or(at);
            }
            let may_call = !self.is_alone || self.blank.is_some();
            let begun = |mark: &str| mark.len() > rest.len() && mark.starts_with(rest);
            let call = if may_call && self.thought.is_none_or(|(_, is_sure)| !is_sure) { self.markers } else { &[] };
            if let Some((end, _)) = self.thought.filter(|(end, _)| rest.starts_with(end)) {
                self.leave_thought(at + end.len());
            } else if let (None, Some((open, end))) =
                (self.thought, THOUGHTS.iter().find(|(open, _)| rest.starts_with(open)))
            {
                self.thought = Some((end, ends_line(&text[..at])));
                (self.at, self.blank) = (at + open.len(), None);
            } else if let (None, Some((_, end))) =
                (self.thought, THOUGHTS.iter().find(|(_, end)| rest.starts_with(end)))
            {
                self.leave_thought(at + end.len());
            } else if THOUGHTS.iter().any(|(open, end)| begun(open) || begun(end))
                || call.iter().any(|marker| begun(marker))
            {
                let is_call = call.iter().any(|marker| begun(marker) || rest.starts_with(marker));
                return self.blank.unwrap_or(if is_call { at } else { text.len() });
            } else if call.iter().any(|marker| rest.starts_with(marker)) {
                (self.at, self.is_done) = (self.blank.unwrap_or(at), true);
            } else {
                self.pass(text, at + 1);
            }
        }
        self.at
    }

    fn pass(&mut self, text: &str, end: usize) {
        self.blank = self.blank.filter(|_| text[self.at..end].trim().is_empty());
        self.at = end;
    }

    fn leave_thought(&mut self, at: usize) {
        (self.thought, self.at, self.blank) = (None, at, self.is_alone.then_some(at));
    }
}
