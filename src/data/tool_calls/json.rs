//! Parses calls written as JSON. A call ends where its JSON ends; markers within JSON strings are ordinary text.

use serde_json::{Deserializer, Value};

use super::{CallBlock, ToolCall, Unreadable, call_of};
use crate::data::numbers::check_numbers;

/// Parses a call that begins with `<tool_call>` and ends with `</tool_call>`, the end of the text, or the next call.
pub(super) fn hermes(text: &str, at: usize) -> Result<CallBlock, Unreadable> {
    const OPEN: &str = "<tool_call>";
    const CLOSE: &str = "</tool_call>";
    let start = at + OPEN.len();
    let rest = &text[start..];
    let inner = rest.trim_start();
    if !inner.starts_with('{') {
        let message = "a <tool_call> is no JSON: expected an object".to_owned();
        let is_closed = rest[..rest.find(OPEN).unwrap_or(rest.len())].contains(CLOSE);
        return Err(if is_closed { Unreadable::call(message) } else { Unreadable::open(message) });
    }
    let unreadable = |error: String| Unreadable::call(format!("a <tool_call> is no JSON: {error}"));
    let (object, len) = first_value(inner).map_err(unreadable)?;
    let behind = inner[len..].trim_start();
    if !behind.is_empty() && !behind.starts_with(CLOSE) && !behind.starts_with(OPEN) {
        return Err(unreadable(format!("expected {CLOSE} after the JSON object")));
    }
    let call = call_of(object, &["arguments"]).map_err(Unreadable::call)?;
    let end = text.len() - behind.strip_prefix(CLOSE).unwrap_or(behind).len();
    Ok(CallBlock { calls: vec![call], end })
}

/// Parses a call written as a JSON object anywhere in the text.
pub(super) fn llama3(text: &str, at: usize) -> Result<CallBlock, Unreadable> {
    let (object, len) = first_value(&text[at..])
        .map_err(|error| Unreadable::prose(format!("an object is no JSON: {error}"), at + 1))?;
    let call = call_of(object, &["arguments", "parameters"]).map_err(|error| Unreadable::prose(error, at + len))?;
    Ok(CallBlock { calls: vec![call], end: at + len })
}

/// Parses one or more calls after `[TOOL_CALLS]`: a JSON list of calls, or a name and its arguments.
pub(super) fn mistral(text: &str, at: usize) -> Result<CallBlock, Unreadable> {
    const OPEN: &str = "[TOOL_CALLS]";
    const CALL_ID: &str = "[CALL_ID]";
    let start = at + OPEN.len();
    let part = &text[start..];
    let part = &part[..part.find(OPEN).unwrap_or(part.len())];
    let named = part.find('{').filter(|at| is_name(part[..*at].trim()));
    let Some(place) = named.or_else(|| part.find("[{")).or_else(|| part.find("[]")) else {
        return Err(Unreadable::open(
            "expected a list of calls, or a name and its arguments, after [TOOL_CALLS]".into(),
        ));
    };
    let what = if named.is_some() { "arguments are" } else { "a list of calls is" };
    let (value, len) =
        first_value(&text[start + place..]).map_err(|error| Unreadable::call(format!("{what} no JSON: {error}")))?;
    let calls = match (named, value) {
        (Some(_), arguments) => {
            let (name, labels) = part[..place].split_at(part[..place].find('[').unwrap_or(place));
            let id =
                labels.split_once(CALL_ID).map(|(_, id)| id.split('[').next().unwrap_or_default().trim().to_owned());
            Ok(vec![ToolCall { id, ..ToolCall::new(name.trim(), arguments) }])
        }
        (None, Value::Array(objects)) => objects.into_iter().map(|object| call_of(object, &["arguments"])).collect(),
        (None, _) => Err("expected a list of calls".to_owned()),
    };
    Ok(CallBlock { calls: calls.map_err(Unreadable::call)?, end: start + place + len })
}

/// Whether the text is a function's name, optionally followed by `[CALL_ID]..` and `[ARGS]`.
fn is_name(text: &str) -> bool {
    let name = text.split('[').next().unwrap_or_default().trim();
    let rest = text[text.find('[').unwrap_or(text.len())..].trim();
    let is_word = |c: char| c.is_alphanumeric() || "_-.".contains(c);
    !name.is_empty() && name.chars().all(is_word) && (rest.is_empty() || rest.ends_with("[ARGS]"))
}

/// Parses the JSON value at the start of a text and returns it with its size in bytes.
fn first_value(text: &str) -> Result<(Value, usize), String> {
    let mut values = Deserializer::from_str(text).into_iter::<Value>();
    let value = values.next().unwrap_or(Ok(Value::Null)).map_err(|error| error.to_string())?;
    let len = values.byte_offset();
    check_numbers(&value, &text[..len])?;
    Ok((value, len))
}
