//! Parses calls that have one tag for each argument's name and one for its value. A string value is written as it is, any other as JSON.

use serde_json::{Map, Value};

use super::xml::{schema_type, typed};
use super::{CallBlock, ToolCall, Unreadable};
use crate::data::numbers::check_numbers;

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

/// Parses the function name and arguments at byte `at`, up to the closing tag.
pub(super) fn call(text: &str, at: usize, tools: &Value) -> Result<CallBlock, Unreadable> {
    let open = |message: String| Unreadable::open(message);
    let inner = text[at..].strip_prefix(CALL).unwrap_or_default();
    let end = inner.find(['\n', '<']).unwrap_or(inner.len());
    let (name, mut rest) = (inner[..end].trim(), inner[end..].trim_start());
    if name.is_empty() || name.contains('{') {
        return Err(open("a <tool_call> without the name of a function".to_owned()));
    }
    let mut arguments = Map::new();
    while let Some(behind) = rest.strip_prefix(KEY) {
        let (key, behind) = behind.split_once(KEY_END).ok_or_else(|| open(format!("no {KEY_END} in '{name}'")))?;
        let key = key.trim();
        let behind = behind.trim_start().strip_prefix(VALUE);
        let behind = behind.ok_or_else(|| open(format!("no {VALUE} of the argument '{key}'")))?;
        let (value, behind) = value(behind).ok_or_else(|| open(format!("no {VALUE_END} of the argument '{key}'")))?;
        let read = argument(value, schema_type(name, key, tools));
        let read = read.map_err(|error| Unreadable::call(format!("the argument '{key}': {error}")))?;
        arguments.insert(key.to_owned(), read);
        rest = behind.trim_start();
    }
    let behind = rest.strip_prefix(CALL_END).ok_or_else(|| open(format!("no {CALL_END} of '{name}'")))?;
    let call = ToolCall::new(name, arguments);
    Ok(CallBlock { calls: vec![call], end: text.len() - behind.len() })
}

/// Splits text into the value at its start and the text after it. A value ends at the closing tag before the next tag, so it may contain other tags.
fn value(text: &str) -> Option<(&str, &str)> {
    text.match_indices(VALUE_END).find_map(|(at, _)| {
        let behind = &text[at + VALUE_END.len()..];
        let ends = [KEY, CALL_END].iter().any(|tag| behind.trim_start().starts_with(tag));
        ends.then_some((&text[..at], behind))
    })
}

/// Converts a value by its type in the tool's schema. Without a type it is parsed as JSON, or else is a string, as in vLLM.
fn argument(text: &str, kind: Option<&str>) -> Result<Value, String> {
    match kind {
        Some("string") => Ok(text.into()),
        Some(kind) => typed(text, Some(kind)),
        None => match serde_json::from_str(text.trim()) {
            Ok(value) => check_numbers(&value, text).map(|()| value),
            Err(_) => Ok(text.into()),
        },
    }
}
