//! Parses calls that have one tag per argument, with values as plain text. The tool's schema determines the types of values.

use serde_json::{Map, Number, Value};

use super::{CallBlock, ToolCall, Unreadable};
use crate::data::numbers::{self, check_numbers};

const TOOL_CALL: &str = "<tool_call>";
const TOOL_CALL_END: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// Parses a function up to its closing tag; the surrounding `<tool_call>` is optional.
pub(super) fn call(text: &str, at: usize, tools: &Value) -> Result<CallBlock, Unreadable> {
    let open = |message: &str| Unreadable::open(message.to_owned());
    let rest = text[at..].strip_prefix(TOOL_CALL).unwrap_or(&text[at..]).trim_start();
    let function = rest.strip_prefix(FUNCTION).ok_or_else(|| open("a <tool_call> without <function=NAME>"))?;
    let (name, mut rest) = function.split_once('>').ok_or_else(|| open("a <function= without its end '>'"))?;
    let name = name.trim();
    if name.is_empty() || name.contains(['<', '\n']) {
        return Err(open("a <function=> without a name"));
    }
    let mut arguments = Map::new();
    loop {
        let (at, tag) = first_of(rest, &[PARAMETER, FUNCTION_END, FUNCTION, TOOL_CALL])
            .filter(|(_, tag)| [PARAMETER, FUNCTION_END].contains(tag))
            .ok_or_else(|| Unreadable::open(format!("no {FUNCTION_END} of '{name}'")))?;
        rest = &rest[at + tag.len()..];
        if tag == FUNCTION_END {
            break;
        }
        let (key, behind) = rest.split_once('>').ok_or_else(|| open("a <parameter= without its end '>'"))?;
        let (value, behind) = value(behind);
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let typed = typed(value, schema_type(name, key.trim(), tools));
        let typed = typed.map_err(|error| Unreadable::call(format!("the argument '{}': {error}", key.trim())))?;
        arguments.insert(key.trim().to_owned(), typed);
        rest = behind;
    }
    let end = rest.trim_start().strip_prefix(TOOL_CALL_END).unwrap_or(rest);
    let call = ToolCall::new(name, arguments);
    Ok(CallBlock { calls: vec![call], end: text.len() - end.len() })
}

/// The first occurrence of one of the tags in a text.
fn first_of<'a>(text: &str, tags: &[&'a str]) -> Option<(usize, &'a str)> {
    let begins = |(at, _): (usize, _)| Some((at, *tags.iter().find(|tag| text[at..].starts_with(**tag))?));
    text.match_indices('<').find_map(begins)
}

/// Splits text into the value at its start and the text after it. A value ends at the closing tag before the next tag, so it may contain other tags.
fn value(text: &str) -> (&str, &str) {
    let next = text.find(PARAMETER).unwrap_or(text.len());
    for (at, _) in text[..next].match_indices(PARAMETER_END) {
        let behind = &text[at + PARAMETER_END.len()..];
        if [PARAMETER, FUNCTION_END].iter().any(|tag| behind.trim_start().starts_with(tag)) {
            return (&text[..at], behind);
        }
    }
    let end = text[..next].find(FUNCTION_END).unwrap_or(next);
    let value = &text[..end];
    (value.rsplit_once(PARAMETER_END).map_or(value.trim_end(), |(value, _)| value), &text[end..])
}

/// The type of a parameter in the tool's schema.
pub(super) fn schema_type<'a>(function: &str, parameter: &str, tools: &'a Value) -> Option<&'a str> {
    let functions = tools.as_array()?.iter().map(|tool| tool.get("function").unwrap_or(tool));
    let schema = functions.filter(|tool| tool["name"] == function).find_map(|tool| {
        let properties = tool["parameters"].get("properties").unwrap_or(&tool["parameters"]);
        properties.get(parameter)
    })?;
    let first = |types: &'a Vec<Value>| types.iter().filter_map(Value::as_str).find(|kind| *kind != "null");
    schema["type"].as_str().or_else(|| schema["type"].as_array().and_then(first))
}

/// Converts a value to the type `kind`; if it does not parse as this type it stays a string, as in vLLM.
pub(super) fn typed(text: &str, kind: Option<&str>) -> Result<Value, String> {
    let word = text.trim();
    if word.eq_ignore_ascii_case("null") {
        return Ok(Value::Null);
    }
    let value = match kind.unwrap_or("string") {
        "integer" | "int" => numbers::integer(word)?.map(Value::Number),
        "number" | "float" => {
            let float = || word.parse().ok().and_then(Number::from_f64);
            numbers::integer(word)?.or_else(float).map(Value::Number)
        }
        "boolean" | "bool" => match word.to_ascii_lowercase().as_str() {
            "true" => Some(true.into()),
            "false" => Some(false.into()),
            _ => None,
        },
        "object" | "array" => match serde_json::from_str(text) {
            Ok(value) => {
                check_numbers(&value, text)?;
                Some(value)
            }
            Err(_) => None,
        },
        _ => None,
    };
    Ok(value.unwrap_or_else(|| text.into()))
}
