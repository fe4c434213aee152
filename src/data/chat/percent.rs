//! Python's `'..' % ..`, which minijinja reads as a remainder: the source is rewritten so that a string literal on the left
//! calls a filter. A format in a variable stays a remainder, and is refused as one.

use minijinja::value::ValueKind;
use minijinja::{Error, FormatStyle, Value, format_filter};

use super::python;

/// The filter's name, which no template has.
pub(super) const FILTER: &str = "__percent";
/// Most formats within one another: more than minijinja parses.
const MAX_DEPTH: usize = 150;

/// `format % operand`; a tuple gives several values.
pub(super) fn format(format: &str, is_tuple: bool, operand: Value) -> Result<String, Error> {
    let operands: Vec<Value> = if is_tuple { operand.try_iter()?.collect() } else { vec![operand] };
    let mut conversions = conversions(format);
    let written = operands.into_iter().map(|value| match conversions.next() {
        Some('s') if value.kind() != ValueKind::Map => python::text(&value).map(Value::from),
        _ => Ok(value),
    });
    format_filter(FormatStyle::Printf, format, &written.collect::<Result<Vec<_>, _>>()?)
}

/// The letters behind `%` and its flags, in order.
fn conversions(format: &str) -> impl Iterator<Item = char> {
    let mut rest = format.chars();
    std::iter::from_fn(move || {
        loop {
            rest.by_ref().find(|&character| character == '%')?;
            let letter = rest.by_ref().find(|&character| character == '%' || character.is_ascii_alphabetic())?;
            if letter != '%' {
                return Some(letter);
            }
        }
    })
}

/// The source with `'..' % operand` as `'..'|__percent(is_tuple, operand)` in its tags.
pub(super) fn with_calls(source: &str) -> String {
    let (mut text, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(start) = rest.find('{') {
        if !rest[start + 1..].starts_with(['{', '%', '#']) {
            text.push_str(&rest[..=start]);
            rest = &rest[start + 1..];
            continue;
        }
        text.push_str(&rest[..start]);
        let tag = &rest[start..];
        let end = match &tag[..2] {
            "{#" => tag.find("#}").map_or(tag.len(), |end| end + 2),
            open => {
                let end = code_end(tag, if open == "{{" { "}}" } else { "%}" });
                let name = tag[2..end].trim_start_matches(['-', '+']).trim_start();
                if open == "{%" && name.starts_with("raw") { end_of_raw(tag, end) } else { end }
            }
        };
        let is_code = !tag.starts_with("{#") && !tag[2..end].contains("endraw");
        text.push_str(&if is_code { in_code(&tag[..end], 0) } else { tag[..end].to_owned() });
        rest = &tag[end..];
    }
    text + rest
}

/// Behind the tag's end, which is no end within a string or, of `}}`, within braces.
fn code_end(tag: &str, close: &str) -> usize {
    let (mut at, mut depth) = (2, 0_usize);
    while at < tag.len() {
        match tag.as_bytes()[at] {
            b'\'' | b'"' => {
                at = string_end(tag, at);
                continue;
            }
            b'{' => depth += 1,
            _ if depth == 0 && tag[at..].starts_with(close) => return at + 2,
            b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += char_len(tag, at);
    }
    tag.len()
}

/// Behind the `endraw` of a raw block whose first tag ends at `start`.
fn end_of_raw(tag: &str, start: usize) -> usize {
    let end = tag[start..].find("endraw").map_or(tag.len(), |end| start + end);
    tag[end..].find("%}").map_or(tag.len(), |close| end + close + 2)
}

/// A tag, or a part of one, with its formats as calls.
fn in_code(code: &str, depth: usize) -> String {
    if depth > MAX_DEPTH {
        return code.to_owned(); // minijinja refuses it
    }
    let (mut text, mut at) = (String::new(), 0);
    while at < code.len() {
        let next = match code.as_bytes()[at] {
            b'\'' | b'"' => string_end(code, at),
            _ => at + char_len(code, at),
        };
        text.push_str(&code[at..next]);
        let sign = skip_blanks(code, next);
        let is_format = next > at + 1 && code[sign..].starts_with('%') && !code[sign..].starts_with("%}");
        at = next;
        if is_format {
            let start = skip_blanks(code, sign + 1);
            at = operand_end(code, start);
            let operand = &code[start..at];
            let is_tuple = operand.starts_with('(') && group_end(operand, 0) == operand.len() && has_comma(operand);
            text.push_str(&format!("|{FILTER}({is_tuple}, {})", in_code(operand, depth + 1)));
        }
    }
    text
}

/// Behind an operand: signs, a literal, name or group, then attributes, items, calls and filters.
fn operand_end(code: &str, start: usize) -> usize {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80;
    let word_end = |at: usize| at + code.as_bytes()[at..].iter().take_while(|byte| is_word(**byte)).count();
    let mut at = start + code[start..].len() - code[start..].trim_start_matches(['-', '+', ' ']).len();
    at = match code.as_bytes().get(at) {
        Some(b'\'' | b'"') => string_end(code, at),
        Some(b'(' | b'[' | b'{') => group_end(code, at),
        _ => word_end(at),
    };
    loop {
        let next = skip_blanks(code, at);
        at = match code.as_bytes().get(next) {
            Some(b'(' | b'[') => group_end(code, next),
            Some(b'.' | b'|') => word_end(skip_blanks(code, next + 1)),
            _ => return at,
        };
    }
}

/// Behind the bracket that closes the one at `start`.
fn group_end(code: &str, start: usize) -> usize {
    let (mut at, mut depth) = (start, 0_usize);
    while at < code.len() {
        match code.as_bytes()[at] {
            b'\'' | b'"' => {
                at = string_end(code, at);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' if depth <= 1 => return at + 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        at += char_len(code, at);
    }
    code.len()
}

/// Whether a group has a comma of its own.
fn has_comma(group: &str) -> bool {
    let mut at = 1;
    while at < group.len() {
        at = match group.as_bytes()[at] {
            b',' => return true,
            b'\'' | b'"' => string_end(group, at),
            b'(' | b'[' | b'{' => group_end(group, at),
            _ => at + char_len(group, at),
        };
    }
    false
}

/// Behind the quote that ends the string at `start`.
fn string_end(code: &str, start: usize) -> usize {
    let (quote, mut at) = (code.as_bytes()[start], start + 1);
    while at < code.len() {
        match code.as_bytes()[at] {
            b'\\' => at += 1,
            byte if byte == quote => return at + 1,
            _ => {}
        }
        at += if at < code.len() { char_len(code, at) } else { 0 };
    }
    code.len()
}

fn skip_blanks(code: &str, at: usize) -> usize {
    at + code[at..].len() - code[at..].trim_start().len()
}

/// Bytes of the character at `at`.
fn char_len(code: &str, at: usize) -> usize {
    code[at..].chars().next().map_or(1, char::len_utf8)
}
