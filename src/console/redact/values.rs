//! Finds where a value after the name of a secret ends: a quoted text, a word, a call, a list, a block or the rest of a line.

use regex::{Captures, Regex};

use super::REDACTED;

/// Values that are not secret.
const EMPTY: [&str; 7] = ["none", "null", "true", "false", "undefined", "''", "\"\""];

/// Replaces the values that begin where a match of `names` ends, if `is_secret` accepts the match and the text after it.
pub(super) fn hide_values(text: &str, names: &Regex, is_secret: impl Fn(&Captures, &str) -> bool) -> String {
    let (mut out, mut done, mut at) = (String::with_capacity(text.len()), 0, 0);
    while let Some(found) = names.captures_at(text, at) {
        let whole = found.get(0).expect("a match has a whole");
        let value = &text[whole.end()..];
        at = whole.end();
        let begins_line = text[..whole.start()]
            .rsplit('\n')
            .next()
            .is_some_and(|line| line.trim_matches([' ', '\t', '-']).is_empty());
        let is_yaml = begins_line && (whole.as_str().ends_with(": ") || whole.as_str().ends_with("= "));
        let (len, quote) = extent(value, is_yaml);
        let is_empty = EMPTY.iter().any(|empty| value[..len].eq_ignore_ascii_case(empty));
        if len > 0 && !is_empty && !value.starts_with(REDACTED) && is_secret(&found, value) {
            out += &text[done..whole.end()];
            out += &format!("{quote}{REDACTED}{quote}");
            done = whole.end() + len;
            at = done;
        }
    }
    out + &text[done..]
}

/// Length in bytes of the value at the start of `text`, and the quotation mark to keep. With `takes_line`, an unquoted value extends to the end of
/// its line.
fn extent(text: &str, takes_line: bool) -> (usize, &str) {
    let bare = text.trim_start_matches(['b', 'r', 'u', 'f', 'B', 'R', 'U', 'F']);
    let prefix = text.len() - bare.len();
    let slashes = bare.len() - bare.trim_start_matches('\\').len();
    if prefix <= 2 && bare[slashes..].starts_with(['"', '\'']) {
        let mark = &bare[..slashes + 1];
        let (len, mark) = quoted(bare, mark);
        return (prefix + len, mark);
    }
    match text.chars().next() {
        None | Some('<' | '>' | '{' | '}' | ']' | ')' | ',' | ';' | '&' | '\\' | '|') if !is_block(text) => (0, ""),
        Some('[') => (text.find([']', '\n']).map_or(text.len(), |end| end + 1), ""),
        Some('|' | '>') => (block(text), ""),
        _ if takes_line => (text.find(['\n', '\r']).unwrap_or(text.len()), ""),
        _ => (word(text), ""),
    }
}

/// Length in bytes of a quoted text, up to the end of the text if the quotation mark is never closed.
fn quoted<'a>(text: &'a str, mark: &'a str) -> (usize, &'a str) {
    let triple = mark.repeat(3);
    let mark = if mark.len() == 1 && text.starts_with(&triple) { &text[..3] } else { mark };
    let mut at = mark.len();
    while let Some(end) = text[at..].find(mark) {
        let before = &text[at..at + end];
        at += end + mark.len();
        // A mark behind a backslash of its own is part of the text.
        if (before.len() - before.trim_end_matches('\\').len()).is_multiple_of(2) {
            return (at, mark);
        }
    }
    (text.len(), mark)
}

/// Whether a YAML block scalar begins here.
fn is_block(text: &str) -> bool {
    let line = text.lines().next().unwrap_or("");
    matches!(line.trim_end(), "|" | "|-" | "|+" | ">" | ">-" | ">+") && line.len() < text.len()
}

/// Length in bytes of a YAML block scalar: its first line and the indented lines.
fn block(text: &str) -> usize {
    let lines = text.split_inclusive('\n').enumerate();
    let of_block = lines.take_while(|(index, line)| *index == 0 || line.starts_with([' ', '\t']));
    of_block.map(|(_, line)| line.len()).sum::<usize>().saturating_sub(usize::from(text.contains('\n')))
}

/// Length in bytes of a word. A comma, semicolon or ampersand ends it if another name and value follow; text in parentheses belongs to a call.
fn word(text: &str) -> usize {
    let mut depth = 0;
    for (at, letter) in text.char_indices() {
        match letter {
            '\n' | '\r' => return at,
            _ if letter.is_control() => return at,
            '(' => depth += 1,
            ')' if depth > 0 => depth -= 1,
            _ if depth > 0 => {}
            '"' | '\'' | '<' | '`' => return at,
            ',' | ';' | '&' if ends_word(&text[at + 1..]) => return at,
            _ if letter.is_whitespace() => return at,
            _ => {}
        }
    }
    text.len()
}

/// Whether the text after a separator begins something other than the rest of a word.
fn ends_word(rest: &str) -> bool {
    let name =
        rest.len() - rest.trim_start_matches(|letter: char| letter.is_alphanumeric() || "_.-".contains(letter)).len();
    rest[name..].starts_with(['=', ':'])
        || (name == 0 && rest.chars().next().is_none_or(|next| !next.is_ascii_punctuation() || "\"'<{[".contains(next)))
}
