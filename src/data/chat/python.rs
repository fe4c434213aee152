//! Python's semantics for values: divisors, `str`, `repr` and `json.dumps`.

use std::fmt::{self, Write};

use minijinja::value::{DynObject, ValueKind};
use minijinja::{Error, Value};

use super::{invalid, values};

/// Deepest nesting of lists and dictionaries that can be written.
const MAX_DEPTH: usize = 200;
/// Widest indentation of JSON, in blanks per level.
const MAX_INDENT: usize = 64;

/// Checks the divisor of `/`, `//` and `%`: 0 is an error as in Python, and a negative divisor is rejected unless `may_be_negative`.
pub(super) fn divisor(value: Value, may_be_negative: bool) -> Result<Value, Error> {
    match f64::try_from(value.clone()) {
        Ok(0.0) => Err(invalid("division by zero")),
        Ok(number) if number < 0.0 && !may_be_negative => {
            Err(invalid(format!("// and % with a negative divisor ({}) are not supported", text(&value)?)))
        }
        _ => Ok(value),
    }
}

/// The text of `str(value)`, which `{{ value }}` prints.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write(&mut text, value)?;
    Ok(text)
}

/// Writes `str(value)` to `output`.
pub(super) fn write(output: &mut impl Write, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => output.write_str(text).map_err(full),
        None if value.is_undefined() => Ok(()),
        None => repr(output, value, 0),
    }
}

fn repr(output: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(invalid(format!("a value of more than {MAX_DEPTH} levels cannot be written")));
    }
    if let Some(text) = value.as_str() {
        return quoted(output, text).map_err(full);
    }
    if let Some((open, items, close)) = values::parts(value) {
        return list(output, [&open, close], items.into_iter(), |output, item| repr(output, &item, depth + 1));
    }
    match (value.kind(), value.as_object()) {
        (ValueKind::Number, _) => output.write_str(&number(value)).map_err(full),
        (ValueKind::Map, Some(map)) => {
            let item = |output: &mut _, (key, value): (Value, Value)| {
                repr(output, &key, depth + 1)?;
                Write::write_str(output, ": ").map_err(full)?;
                repr(output, &value, depth + 1)
            };
            list(output, ["{", "}"], pairs(map), item)
        }
        (ValueKind::Seq | ValueKind::Iterable, Some(_)) => {
            list(output, ["[", "]"], value.try_iter()?, |output, item| repr(output, &item, depth + 1))
        }
        _ => write!(output, "{value}").map_err(full),
    }
}

fn list<W: Write, T>(
    output: &mut W,
    [open, close]: [&str; 2],
    items: impl Iterator<Item = T>,
    mut item: impl FnMut(&mut W, T) -> Result<(), Error>,
) -> Result<(), Error> {
    output.write_str(open).map_err(full)?;
    for (index, value) in items.enumerate() {
        if index > 0 {
            output.write_str(", ").map_err(full)?;
        }
        item(output, value)?;
    }
    output.write_str(close).map_err(full)
}

/// Writes a string like Python's `repr`: in single quotes, or in double quotes if it contains only single quotes.
fn quoted(output: &mut impl Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    output.write_char(quote)?;
    for character in text.chars() {
        match character {
            '\\' => output.write_str("\\\\")?,
            '\n' => output.write_str("\\n")?,
            '\r' => output.write_str("\\r")?,
            '\t' => output.write_str("\\t")?,
            _ if character == quote => write!(output, "\\{quote}")?,
            _ if is_printable(character) => output.write_char(character)?,
            _ => match u32::from(character) {
                code @ 0..0x100 => write!(output, "\\x{code:02x}")?,
                code @ 0x100..0x1_0000 => write!(output, "\\u{code:04x}")?,
                code => write!(output, "\\U{code:08x}")?,
            },
        }
    }
    output.write_char(quote)
}

/// Approximates `str.isprintable`; differs for unassigned Unicode characters and some invisible ones.
fn is_printable(character: char) -> bool {
    let is_invisible = matches!(character, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{feff}');
    character == ' ' || !(character.is_control() || character.is_whitespace() || is_invisible)
}

/// Formats a number like Python's `repr`: the shortest digits that parse to the same value, with an exponent where Python uses one.
fn number(value: &Value) -> String {
    let Some(float) =
        Some(value).filter(|value| !value.is_integer()).and_then(|value| f64::try_from(value.clone()).ok())
    else {
        return value.to_string();
    };
    if !float.is_finite() {
        return if float.is_nan() { "nan".to_owned() } else { format!("{float}") };
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').expect("written by {:e}");
    let exponent: i32 = exponent.parse().expect("written by {:e}");
    if (-4..16).contains(&exponent) {
        return format!("{float:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// The options of `json.dumps`.
#[derive(Debug, Default)]
pub(super) struct JsonLayout {
    /// Blanks per level, with one item per line; `None` writes everything on one line.
    pub indent: Option<usize>,
    /// Separators between items and after keys.
    pub separators: Option<(String, String)>,
    /// Whether keys are sorted.
    pub sort_keys: bool,
    /// Whether non-ASCII characters are escaped.
    pub ensure_ascii: bool,
}

/// The text of `json.dumps(value)`.
pub(super) fn json(value: &Value, layout: &JsonLayout) -> Result<String, Error> {
    if let Some(width) = layout.indent.filter(|&width| width > MAX_INDENT) {
        return Err(invalid(format!("tojson: indent {width} is too large: expected at most {MAX_INDENT}")));
    }
    let mut output = String::new();
    layout.write(&mut output, value, 0)?;
    Ok(output)
}

impl JsonLayout {
    fn write(&self, output: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!("tojson: a value of more than {MAX_DEPTH} levels cannot be written")));
        }
        if let Some(text) = value.as_str() {
            self.string(output, text);
            return Ok(());
        }
        match (value.kind(), value.as_object()) {
            (ValueKind::None, _) => output.push_str("null"),
            (ValueKind::Bool, _) => output.push_str(if value.is_true() { "true" } else { "false" }),
            (ValueKind::Number, _) => output.push_str(&json_number(value)),
            (ValueKind::Map, Some(map)) => {
                let mut members: Vec<(String, Value)> =
                    pairs(map).map(|(key, value)| Ok((json_key(&key)?, value))).collect::<Result<_, Error>>()?;
                if self.sort_keys {
                    members.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.items(output, ["{", "}"], depth, members.into_iter(), |output, (key, value)| {
                    self.string(output, &key);
                    output.push_str(self.separators.as_ref().map_or(": ", |(_, key)| key));
                    self.write(output, &value, depth + 1)
                })?;
            }
            (ValueKind::Seq | ValueKind::Iterable, Some(_)) => {
                let items = value.try_iter()?;
                self.items(output, ["[", "]"], depth, items, |output, item| self.write(output, &item, depth + 1))?;
            }
            (kind, _) => return Err(invalid(format!("tojson: a value of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn items<T>(
        &self,
        output: &mut String,
        [open, close]: [&str; 2],
        depth: usize,
        items: impl Iterator<Item = T>,
        mut item: impl FnMut(&mut String, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |output: &mut String, depth: usize| {
            if let Some(width) = self.indent {
                output.push('\n');
                output.extend(std::iter::repeat_n(' ', width * depth));
            }
        };
        let separator =
            self.separators.as_ref().map_or(if self.indent.is_some() { "," } else { ", " }, |(item, _)| item);
        let mut is_empty = true;
        output.push_str(open);
        for value in items {
            if !std::mem::take(&mut is_empty) {
                output.push_str(separator);
            }
            new_line(output, depth + 1);
            item(output, value)?;
        }
        if !is_empty {
            new_line(output, depth);
        }
        output.push_str(close);
        Ok(())
    }

    fn string(&self, output: &mut String, text: &str) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            return output.push_str(&quoted);
        }
        for character in quoted.chars() {
            if character.is_ascii() {
                output.push(character);
            } else {
                let mut units = [0; 2];
                output.extend(character.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
            }
        }
    }
}

fn json_number(value: &Value) -> String {
    match number(value).as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        digits => digits.to_owned(),
    }
}

/// A dictionary key as JSON text. As in `json.dumps`, keys may also be numbers, booleans and `None`.
fn json_key(key: &Value) -> Result<String, Error> {
    match (key.as_str(), key.kind()) {
        (Some(text), _) => Ok(text.to_owned()),
        (_, ValueKind::None) => Ok("null".to_owned()),
        (_, ValueKind::Bool) => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        (_, ValueKind::Number) => Ok(json_number(key)),
        (_, kind) => Err(invalid(format!("tojson: a key of type {kind}"))),
    }
}

fn pairs(map: &DynObject) -> impl Iterator<Item = (Value, Value)> {
    map.try_iter_pairs().into_iter().flatten()
}

fn full(_: fmt::Error) -> Error {
    invalid("the text cannot be written")
}
