//! Rewrites template source where minijinja's semantics differ from those of Python's Jinja.
//!
//! minijinja reads `'..' % ..` as a remainder: with a string literal on the left, it is rewritten to a filter; a format string in a variable
//! remains a remainder, which raises an error. Tuples become calls of a function. Divisors become calls of a function that raises an error
//! where Python computes a different result. String escapes are replaced by what Python reads. `safe` and `escape` return a string that escapes
//! what is added to it, so they are rejected next to a `+`. Operands of `~` are converted to text as Python does.

use minijinja::value::ValueKind;
use minijinja::{Error, FormatStyle, Value, format_filter};

use super::python;
use super::scan::{
    char_len, group_end, has_sum, is_tuple, is_word, operand_end, product_end, skip_blanks, string_end, word_end,
};

/// Name of the filter that replaces `'..' % ..`. No template uses this name.
pub(super) const FORMAT: &str = "__percent";
/// Name of the function that creates a tuple.
pub(super) const TUPLE: &str = "__tuple";
/// Name of the function that checks a divisor.
pub(super) const DIVISOR: &str = "__divisor";
/// Deepest nesting of format operators; minijinja parses fewer levels.
const MAX_DEPTH: usize = 150;
/// Keywords after which an expression begins.
const KEYWORDS: [&str; 8] = ["and", "elif", "else", "if", "in", "is", "not", "or"];
/// Tag names after which an expression begins.
const TAGS: [&str; 4] = ["call", "filter", "print", "set"];

/// Computes `format % operand` like Python; if `is_tuple`, the operand holds several values.
pub(super) fn format(format: &str, is_tuple: bool, operand: Value) -> Result<String, Error> {
    let operands: Vec<Value> = if is_tuple { operand.try_iter()?.collect() } else { vec![operand] };
    let mut conversions = conversions(format);
    let written = operands.into_iter().map(|value| match conversions.next() {
        Some('s') if value.kind() != ValueKind::Map => python::text(&value).map(Value::from),
        _ => Ok(value),
    });
    format_filter(FormatStyle::Printf, format, &written.collect::<Result<Vec<_>, _>>()?)
}

/// The conversion letters (`s`, `d` ..) after each `%` and its flags, in order.
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

/// Rewrites template source so that minijinja renders it like Python's Jinja.
pub(super) fn for_minijinja(source: &str) -> String {
    with_calls(&without_generation_tags(&source.replace("\r\n", "\n").replace('\r', "\n")))
}

/// Rewrites the code in all tags, for example `'..' % operand` to `'..'|__percent(is_tuple, operand)`.
fn with_calls(source: &str) -> String {
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
        let is_code = is_code && end >= 4 && tag[..end].ends_with('}');
        text.push_str(&match is_code {
            true => {
                // A sign at either end is about white space.
                let inner = &tag[2..end - 2];
                let start = 2 + usize::from(inner.starts_with(['-', '+']));
                let close = end - 2 - usize::from(inner.len() > 1 && inner.ends_with(['-', '+']));
                format!("{}{}{}", &tag[..start], in_code(&tag[start..close], 0), &tag[close..end])
            }
            false => tag[..end].to_owned(),
        });
        rest = &tag[end..];
    }
    text + rest
}

/// Position after the tag's end. `close` inside a string does not end the tag, nor does `}}` within braces.
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

/// Position after the `endraw` tag of a raw block whose first tag ends at `start`.
fn end_of_raw(tag: &str, start: usize) -> usize {
    let end = tag[start..].find("endraw").map_or(tag.len(), |end| start + end);
    tag[end..].find("%}").map_or(tag.len(), |close| end + close + 2)
}

/// Rewrites the code of a tag or a part of it: formats, tuples and divisors become calls, and strings are unescaped like in Python.
fn in_code(code: &str, depth: usize) -> String {
    if depth > MAX_DEPTH {
        return code.to_owned(); // minijinja refuses it
    }
    let (mut text, mut at) = (String::new(), 0);
    // Of each bracket that is open: where the operand of a `~` would begin in `text`, and whether it is one's outcome.
    let mut operands = vec![(0, false)];
    while at < code.len() {
        let operand = operands.last().copied().unwrap_or_default();
        match code.as_bytes()[at] {
            b'\'' | b'"' => {
                let next = string_end(code, at);
                text.push_str(&literal(&code[at..next]));
                at = next;
                let sign = skip_blanks(code, at);
                if code[sign..].starts_with('%') {
                    let start = skip_blanks(code, sign + 1);
                    at = operand_end(code, start);
                    let operand = &code[start..at];
                    let is_tuple = is_tuple(operand);
                    text.push_str(&format!("|{FORMAT}({is_tuple}, {})", in_code(operand, depth + 1)));
                }
            }
            sign @ (b'/' | b'%') => {
                let is_floor = code[at..].starts_with("//");
                let sign_end = at + 1 + usize::from(is_floor);
                let start = skip_blanks(code, sign_end);
                let end = operand_end(code, start);
                text.push_str(&code[at..start]);
                let (operand, may_be_negative) = (&code[start..end], sign == b'/' && !is_floor);
                let is_plain =
                    operand.bytes().all(|byte| byte.is_ascii_digit()) && operand.bytes().any(|byte| byte != b'0');
                match is_plain {
                    true => text.push_str(operand),
                    false => {
                        let operand = in_code(operand, depth + 1);
                        text.push_str(&format!("{DIVISOR}({operand}, {may_be_negative})"));
                    }
                }
                at = end;
            }
            b'~' => {
                let left = text.split_off(operand.0);
                let start = skip_blanks(code, at + 1);
                at = product_end(code, start);
                let left = if operand.1 { left } else { as_text(&left) };
                text.push_str(&format!("{left}~ {}", as_text(&in_code(&code[start..at], depth + 1))));
                operands.pop();
                operands.push((operand.0, true));
            }
            open @ (b'(' | b'[' | b'{') => {
                if open == b'(' && begins_operand(&text) && is_tuple(&code[at..group_end(code, at)]) {
                    text.push_str(TUPLE);
                }
                text.push(open.into());
                operands.push((text.len(), false));
                at += 1;
            }
            close @ (b')' | b']' | b'}') => {
                text.push(close.into());
                if operands.len() > 1 {
                    operands.pop();
                }
                at += 1;
            }
            sign @ (b',' | b':' | b'=' | b'<' | b'>' | b'!' | b'+' | b'-') => {
                text.push(sign.into());
                let is_sign_of_operand = b"+-".contains(&sign) && text[operand.0..].trim().len() == 1
                    || text[..text.len() - 1].trim_end().ends_with(['*', '/', '%']);
                if !is_sign_of_operand {
                    operands.pop();
                    operands.push((text.len(), false));
                }
                at += 1;
            }
            byte if is_word(byte) => {
                let end = word_end(code, at);
                let (word, before) = (&code[at..end], text.trim_matches(['-', '+', ' ', '\t', '\n']));
                let is_keyword = KEYWORDS.contains(&word) && !before.ends_with('.');
                let is_tag = TAGS.contains(&word) && before.is_empty() && depth == 0;
                text.push_str(word);
                if is_keyword || is_tag {
                    operands.pop();
                    operands.push((text.len(), false));
                }
                at = end;
            }
            b'|' => {
                let name = skip_blanks(code, at + 1);
                let end = name
                    + code[name..].bytes().take_while(|byte| byte.is_ascii_alphanumeric() || *byte == b'_').count();
                text.push_str(&code[at..end]);
                if ["safe", "e", "escape", "forceescape"].contains(&&code[name..end]) && has_sum(code) {
                    text.push_str("_beside_a_plus"); // which is no filter
                }
                at = end;
            }
            _ => {
                let next = at + char_len(code, at);
                text.push_str(&code[at..next]);
                at = next;
            }
        }
    }
    text
}

/// Wraps an operand of `~` in a conversion to text, keeping the blanks before it.
fn as_text(operand: &str) -> String {
    let blanks = operand.len() - operand.trim_start().len();
    format!("{}({})|string ", &operand[..blanks], operand.trim())
}

/// Whether an opening bracket after this code groups an expression, and does not begin the arguments of a call or the targets of a loop.
fn begins_operand(before: &str) -> bool {
    let before = before.trim_end();
    let word =
        before.len() - before.bytes().rev().take_while(|byte| byte.is_ascii_alphanumeric() || *byte == b'_').count();
    match &before[word..] {
        "" => !before.ends_with([')', ']', '}', '\'', '"']),
        word => KEYWORDS.contains(&word) || word == "print",
    }
}

/// A string literal with the text that Python reads, in escapes that minijinja reads the same way. A literal with an escape that Python
/// rejects, or with a `\N{..}` escape, is replaced by code that raises an error.
fn literal(literal: &str) -> String {
    let is_whole = literal.len() > 1 && literal.ends_with(&literal[..1]);
    if !is_whole || !literal.contains('\\') {
        return literal.to_owned();
    }
    let quote = &literal[..1];
    match unescaped(&literal[1..literal.len() - 1]) {
        Some(text) => format!("{quote}{}{quote}", text.replace('\\', "\\\\").replace(quote, &format!("\\{quote}"))),
        None => "raise_exception('this escape in a string is not supported: \\\\N{..}, half of a surrogate pair, or \
                 too few digits')"
            .to_owned(),
    }
}

/// Decodes Python's `unicode-escape` syntax; `None` if it is invalid.
fn unescaped(text: &str) -> Option<String> {
    let (mut read, mut letters) = (String::new(), text.chars());
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            read.push(letter);
            continue;
        }
        let digits = |num_digits: usize, rest: &str| u32::from_str_radix(rest.get(..num_digits)?, 16).ok();
        let escaped = letters.next()?;
        match escaped {
            '\n' => {}
            'a' => read.push('\x07'),
            'b' => read.push('\x08'),
            'f' => read.push('\x0c'),
            'n' => read.push('\n'),
            'r' => read.push('\r'),
            't' => read.push('\t'),
            'v' => read.push('\x0b'),
            '\\' | '\'' | '"' => read.push(escaped),
            'N' => return None,
            'x' | 'u' | 'U' => {
                let num_digits = match escaped {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                read.push(char::from_u32(digits(num_digits, letters.as_str())?)?);
                letters = letters.as_str()[num_digits..].chars();
            }
            '0'..='7' => {
                let more = letters.as_str().bytes().take(2).take_while(|byte| (b'0'..=b'7').contains(byte)).count();
                let octal = format!("{escaped}{}", &letters.as_str()[..more]);
                read.push(char::from_u32(u32::from_str_radix(&octal, 8).ok()?)?);
                letters = letters.as_str()[more..].chars();
            }
            other if other.is_ascii() => read.extend(['\\', other]),
            // Jinja escapes these for Python first, so that the backslash escapes that escape's own.
            other => read.push_str(&match u32::from(other) {
                code @ 0..0x100 => format!("\\x{code:02x}"),
                code @ 0x100..0x1_0000 => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    Some(read)
}

/// Removes `{% generation %}` tags. They mark the assistant's tokens for loss masks in transformers; here their content is always rendered.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        match tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+', ' ', '\t', '\n']) {
            "generation" => text.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => text.push_str(&tag.replace("endgeneration", "endif")),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text + rest
}
