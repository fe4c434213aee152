//! Calls that are JSON.

use serde_json::{Deserializer, Value};

use super::{ParsedMessage, ToolCall, call_of};

/// Calls between `<tool_call>` and `</tool_call>`, or the end of the text.
pub(super) fn hermes(text: &str) -> Result<ParsedMessage, String> {
    const OPEN: &str = "<tool_call>";
    let mut parts = text.split(OPEN);
    let content = parts.next().unwrap_or_default().to_owned();
    let call = |part: &str| {
        let inner = part.split("</tool_call>").next().unwrap_or_default().trim();
        let object = serde_json::from_str(inner).map_err(|error| format!("a <tool_call> is no JSON: {error}"))?;
        call_of(object, &["arguments"])
    };
    Ok(ParsedMessage { content, tool_calls: parts.map(call).collect::<Result<_, _>>()?, error: None })
}

/// Objects anywhere in the text. Text beside them is dropped, and so are objects that are no calls once there is one.
pub(super) fn llama3(text: &str) -> Result<ParsedMessage, String> {
    let (mut parsed, mut at) = (ParsedMessage::default(), 0);
    while let Some(start) = text[at..].find('{').map(|found| at + found) {
        at = match first_value(&text[start..]) {
            Ok((object, len)) => {
                match call_of(object, &["arguments", "parameters"]) {
                    Ok(call) => parsed.tool_calls.push(call),
                    Err(error) => parsed.error = parsed.error.or(Some(error)),
                }
                start + len
            }
            Err(error) => {
                parsed.error = parsed.error.or(Some(format!("an object is no JSON: {error}")));
                start + 1
            }
        };
    }
    if !parsed.tool_calls.is_empty() {
        parsed.error = None; // braces in prose
    }
    Ok(parsed)
}

/// A list of calls behind one `[TOOL_CALLS]`, or a name and its arguments behind each.
pub(super) fn mistral(text: &str) -> Result<ParsedMessage, String> {
    let mut parts = text.split("[TOOL_CALLS]");
    let mut parsed = ParsedMessage { content: parts.next().unwrap_or_default().to_owned(), ..ParsedMessage::default() };
    for part in parts {
        let part = part.trim();
        let named = part.find('{').map(|at| part.split_at(at)).filter(|(name, _)| is_name(name));
        match named {
            Some((name, arguments)) => parsed.tool_calls.push(ToolCall {
                name: name.split('[').next().unwrap_or_default().trim().to_owned(),
                arguments: first_value(arguments).map_err(|error| format!("arguments are no JSON: {error}"))?.0,
            }),
            None => {
                let list = part.find("[{").or_else(|| part.find("[]")).map(|at| &part[at..]);
                let list = list.ok_or("neither a list of calls nor a name with its arguments behind [TOOL_CALLS]")?;
                let (list, _) = first_value(list).map_err(|error| format!("a list of calls is no JSON: {error}"))?;
                let Value::Array(objects) = list else { return Err("expected a list of calls".to_owned()) };
                for object in objects {
                    parsed.tool_calls.push(call_of(object, &["arguments"])?);
                }
            }
        }
    }
    Ok(parsed)
}

/// A function's name, with `[CALL_ID]..` and `[ARGS]` behind it where the tokenizer has them.
fn is_name(text: &str) -> bool {
    let name = text.split('[').next().unwrap_or_default().trim();
    let rest = text[text.find('[').unwrap_or(text.len())..].trim();
    let is_word = |c: char| c.is_alphanumeric() || "_-.".contains(c);
    !name.is_empty() && name.chars().all(is_word) && (rest.is_empty() || rest.ends_with("[ARGS]"))
}

/// The value that a text begins with, and its bytes.
fn first_value(text: &str) -> Result<(Value, usize), serde_json::Error> {
    let mut values = Deserializer::from_str(text).into_iter::<Value>();
    let value = values.next().unwrap_or(Ok(Value::Null))?;
    Ok((value, values.byte_offset()))
}
