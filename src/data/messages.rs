//! Converts messages of clients and files to the form that chat templates read. As in transformers 5, null fields are dropped, and
//! reasoning is passed under the field names that templates use. A field that the template does not read is an error.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::numbers::check_numbers;

/// Field names for a message's reasoning. Chat templates read the first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Fields that any message may have, even if the chat template ignores some of them because it has no tools or names.
const KNOWN: [&str; 5] = ["role", "content", "tool_calls", "tool_call_id", "name"];
/// Fields that repeat other fields or do not affect the text.
const REPEATED: [&str; 3] = ["parsed", "parsed_arguments", "cache_control"];

/// Converts a message to the form that chat templates read: its content becomes one string, and tool call arguments given as a string of JSON
/// become objects.
///
/// # Errors
/// A message with the field and what was expected of it.
pub(crate) fn read_message(message: &Value) -> Result<Map<String, Value>, String> {
    let mut fields = without_nulls(message).ok_or("expected an object with a role and a text as content")?;
    if !fields.get("role").is_some_and(Value::is_string) {
        return Err("role: expected a text".to_owned());
    }
    if let Some(content) = fields.get_mut("content") {
        *content = content_text(content)?.into_owned().into();
    }
    for name in ["name", "tool_call_id"].iter().chain(&REASONING) {
        if fields.get(*name).is_some_and(|value| !value.is_string()) {
            return Err(format!("{name}: expected a text"));
        }
    }
    if let Some(calls) = fields.get_mut("tool_calls") {
        let calls = calls.as_array_mut().ok_or("tool_calls: expected a list")?;
        for (index, call) in calls.iter_mut().enumerate() {
            *call = read_call(call).map_err(|error| format!("tool_calls[{index}]{error}"))?;
        }
    }
    if fields.contains_key("function_call") {
        return Err("function_call is not supported: use tool_calls instead".to_owned());
    }
    fields.retain(|name, _| !REPEATED.contains(&name.as_str()));
    Ok(fields)
}

/// Reads a tool call: a function's name and arguments, in OpenAI's form or without the wrapper.
fn read_call(call: &Value) -> Result<Value, String> {
    let mut call = without_nulls(call).ok_or(": expected an object with a function")?;
    let path = if call.contains_key("function") { ".function" } else { "" };
    if let Some(function) = call.get_mut("function") {
        let fields = without_nulls(function).ok_or(".function: expected an object with a name and arguments")?;
        *function = fields.into();
    }
    let function = match call.get_mut("function") {
        Some(function) => function.as_object_mut().expect("made above"),
        None => &mut call,
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return Err(format!("{path}.name: expected a text"));
    }
    if let Some(text) = function.get("arguments").and_then(Value::as_str) {
        let text = if text.trim().is_empty() { "{}" } else { text }.to_owned();
        if let Ok(parsed) = serde_json::from_str::<Value>(&text) {
            check_numbers(&parsed, &text).map_err(|error| format!("{path}.arguments: {error}"))?;
            function.insert("arguments".to_owned(), parsed);
        }
    }
    function.retain(|name, _| !REPEATED.contains(&name.as_str()));
    Ok(call.into())
}

/// Copies reasoning to the field names that templates read, as transformers does when it renders messages.
pub(super) fn alias_reasoning(message: &mut Value) {
    let Some(reasoning) = given_reasoning(message).map(|name| message[name].clone()) else { return };
    if message["thinking"].is_null() {
        message["thinking"] = reasoning.clone();
    }
    message[REASONING[0]] = reasoning;
}

/// The field name under which a message gives its reasoning.
fn given_reasoning(message: &Value) -> Option<&'static str> {
    REASONING.into_iter().find(|name| message.get(name).is_some_and(|value| !value.is_null()))
}

/// A message's reasoning under any of its field names; null if it has none.
pub(crate) fn reasoning(message: &Value) -> &Value {
    given_reasoning(message).map_or(&Value::Null, |name| &message[name])
}

/// The text of a message's content, given as a string or as a list of OpenAI's text parts.
fn content_text(content: &Value) -> Result<Cow<'_, str>, String> {
    let parts = match content {
        Value::String(text) => return Ok(text.into()),
        Value::Array(parts) => parts,
        _ => return Err("content: expected a text or a list of parts".to_owned()),
    };
    let text = |(index, part): (usize, &Value)| {
        let part = without_nulls(part).filter(|part| part.get("type").is_some_and(|kind| kind == "text"));
        let wrong = |expected: String| format!("content[{index}]: expected {expected}");
        let part = part.ok_or_else(|| wrong("{\"type\": \"text\", \"text\": ..}".to_owned()))?;
        let is_known = |(name, value): &(&String, &Value)| {
            ["type", "text"].contains(&name.as_str()) || REPEATED.contains(&name.as_str()) || says_nothing(value)
        };
        if let Some((name, _)) = part.iter().find(|field| !is_known(field)) {
            return Err(wrong(format!("only the fields type and text, found '{name}'")));
        }
        let text = part.get("text").and_then(Value::as_str);
        text.map(str::to_owned).ok_or_else(|| wrong("a string in its field text".to_owned()))
    };
    parts.iter().enumerate().map(text).collect::<Result<String, _>>().map(Cow::Owned)
}

/// A copy of an object without its null fields.
fn without_nulls(value: &Value) -> Option<Map<String, Value>> {
    let fields = value.as_object()?.iter().filter(|(_, value)| !value.is_null());
    Some(fields.map(|(name, value)| (name.clone(), value.clone())).collect())
}

/// Whether dropping a field with this value loses no information.
fn says_nothing(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.trim().is_empty(),
        Value::Bool(flag) => !flag,
        Value::Null => true,
        Value::Number(_) => false,
    }
}

/// Finds a field of a message or its tool calls that the chat template `source` does not read, so that it would be lost.
pub(super) fn unread_field(messages: &[Value], source: &str) -> Option<String> {
    let dense: String = source.split_whitespace().collect();
    if ["message|tojson", "messages|tojson", "message.items()"].iter().any(|all| dense.contains(all)) {
        return None;
    }
    let of_call = ["id", "type", "function", "index", "name", "arguments"];
    messages.iter().find_map(|message| {
        let reasoning = [REASONING[0], REASONING[1], given_reasoning(message).unwrap_or_default()];
        let is_shown = reasoning.iter().any(|name| reads(source, name));
        let is_known = |name: &str| KNOWN.contains(&name) || (is_shown && REASONING.contains(&name));
        let mut calls = message["tool_calls"].as_array().into_iter().flatten().enumerate();
        unread_of(message, source, &is_known).or_else(|| {
            calls.find_map(|(place, call)| {
                let unread = |fields: &Value| unread_of(fields, source, &|name| of_call.contains(&name));
                let name = unread(call).or_else(|| Some(format!("function.{}", unread(&call["function"])?)))?;
                Some(format!("tool_calls[{place}].{name}"))
            })
        })
    })
}

fn unread_of(fields: &Value, source: &str, is_known: &dyn Fn(&str) -> bool) -> Option<String> {
    let mut fields = fields.as_object()?.iter();
    let unread = fields.find(|(name, value)| !is_known(name) && !says_nothing(value) && !reads(source, name));
    unread.map(|(name, _)| name.clone())
}

/// Whether a template's source mentions a field, as an attribute or as a string.
fn reads(source: &str, name: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    !name.is_empty()
        && source
            .match_indices(name)
            .any(|(at, _)| source[..at].ends_with(['.', '\'', '"']) && !source[at + name.len()..].starts_with(is_word))
}

/// The path of the first null inside a value.
pub(super) fn null_path(value: &Value) -> Option<String> {
    let mut items = value.as_array().into_iter().flatten().enumerate();
    let mut fields = value.as_object().into_iter().flatten();
    match value {
        Value::Null => Some(String::new()),
        Value::Array(_) => items.find_map(|(index, item)| Some(format!("[{index}]{}", null_path(item)?))),
        _ => fields.find_map(|(name, item)| Some(format!(".{name}{}", null_path(item)?))),
    }
}

/// The path of the first null in the tool call arguments of a list of messages.
pub(super) fn null_argument(messages: &Value) -> Option<String> {
    messages.as_array()?.iter().enumerate().find_map(|(index, message)| {
        let mut calls = message.get("tool_calls")?.as_array()?.iter().enumerate();
        calls.find_map(|(place, call)| {
            let (function, path) = call.get("function").map_or((call, ""), |function| (function, ".function"));
            let arguments = null_path(function.get("arguments").filter(|arguments| !arguments.is_null())?)?;
            Some(format!("[{index}].tool_calls[{place}]{path}.arguments{arguments}"))
        })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(message: Value) -> Result<Value, String> {
        read_message(&message).map(Value::from)
    }

    /// Answers in the form in which the openai client sends them back.
    #[test]
    fn null_fields_of_a_message_are_ignored() {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": null}}});
        let answer = json!({"role": "assistant", "content": "a", "tool_calls": [call]});
        let mut replayed = answer.clone();
        for name in ["refusal", "audio", "function_call", "name", "reasoning", "reasoning_content", "more"] {
            replayed[name] = Value::Null;
        }
        replayed["parsed"] = json!({"a": 1});
        replayed["tool_calls"][0]["index"] = Value::Null;
        replayed["tool_calls"][0]["function"]["parsed_arguments"] = json!({"x": null});
        replayed["tool_calls"][0]["function"]["description"] = Value::Null;
        replayed["tool_calls"][0]["function"]["arguments"] = json!("{\"x\": null}");
        assert_eq!(read(replayed).unwrap(), answer);
        let silent = json!({"role": "assistant", "content": null, "tool_calls": null});
        assert_eq!(read(silent).unwrap(), json!({"role": "assistant"}));
        let part = json!({"type": "text", "text": "a", "image_url": null, "annotations": [], "cache_control": {"type": "ephemeral"}});
        assert_eq!(read(json!({"role": "user", "content": [part]})).unwrap()["content"], "a");
        let bare = json!({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "", "id": null}]});
        assert_eq!(read(bare).unwrap()["tool_calls"], json!([{"name": "f", "arguments": {}}]));
    }

    /// Expected values are from `_alias_reasoning_fields` of transformers 5.24.
    #[test]
    fn reasoning_fields_are_aliased_as_in_transformers() {
        for (given, expected) in [
            (json!({"reasoning": "r"}), json!({"reasoning": "r", "thinking": "r", "reasoning_content": "r"})),
            (json!({"thinking": "r"}), json!({"thinking": "r", "reasoning_content": "r"})),
            (json!({"reasoning_content": "r", "reasoning": null}), json!({"thinking": "r", "reasoning_content": "r"})),
            (
                json!({"reasoning_content": "a", "thinking": "b", "reasoning": "c"}),
                json!({"reasoning_content": "a", "thinking": "b", "reasoning": "c"}),
            ),
        ] {
            let mut message = json!({"role": "assistant", "content": ""});
            message.as_object_mut().unwrap().extend(given.as_object().unwrap().clone());
            let mut read = read(message).unwrap();
            alias_reasoning(&mut read);
            read.as_object_mut().unwrap().retain(|name, _| REASONING.contains(&name.as_str()));
            assert_eq!(read, expected, "{given}");
        }
    }

    #[test]
    fn malformed_messages_are_refused_with_the_field() {
        let call = |call: Value| json!({"role": "assistant", "tool_calls": [call]});
        for (message, field) in [
            (json!("a"), "expected an object"),
            (json!({"content": "a"}), "role: "),
            (json!({"role": "user", "content": 3}), "content: "),
            (json!({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}), "content[0]: expected {"),
            (
                json!({"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]}),
                "content[0]: expected only the fields type and text, found 'more'",
            ),
            (json!({"role": "user", "content": [{"type": "text"}]}), "content[0]: "),
            (json!({"role": "user", "content": "a", "name": 3}), "name: "),
            (json!({"role": "assistant", "reasoning": ["a"]}), "reasoning: "),
            (
                json!({"role": "assistant", "function_call": {"name": "f"}}),
                "function_call is not supported: use tool_calls",
            ),
            (json!({"role": "assistant", "tool_calls": {}}), "tool_calls: expected a list"),
            (call(json!(3)), "tool_calls[0]: "),
            (call(json!({"type": "custom", "custom": {}})), "tool_calls[0].name: "),
            (call(json!({"function": {"arguments": {}}})), "tool_calls[0].function.name: "),
            (
                call(json!({"function": {"name": "f", "arguments": "{\"x\": [123456789012345678901]}"}})),
                "tool_calls[0].function.arguments: x[0]: the integer 123456789012345678901 has",
            ),
        ] {
            let error = read(message.clone()).unwrap_err();
            assert!(error.starts_with(field), "{message}: {error}");
        }
    }

    #[test]
    fn message_fields_that_the_template_ignores_are_found() {
        let source = "{{ m.content }}{{ m.channel }}{{ m['call_note'] }}";
        let unread = |message: Value, source: &str| unread_field(&[json!({"role": "user"}), message], source);
        let call =
            |more: &str| json!({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}, more: 1}}]});
        for (message, field) in [
            (json!({"role": "tool", "content": "a", "name": "f", "tool_call_id": "1", "channel": "b"}), None),
            (json!({"weight": 1}), Some("weight")),
            (json!({"chan": 1}), Some("chan")),
            (json!({"note": 1}), Some("note")),
            (json!({"reasoning_content": "a", "thinking": "a"}), Some("reasoning_content")),
            (json!({"reasoning_content": " \n", "thinking": "", "annotations": [], "more": null}), None),
            (call("call_note"), None),
            (call("more"), Some("tool_calls[0].function.more")),
        ] {
            assert_eq!(unread(message.clone(), source).as_deref(), field, "{message}");
        }
        for (source, named) in [
            ("{{ m.reasoning_content }}", None),
            ("{{ m['thinking'] }}", None),
            ("{{ m.get(\"reasoning\") }}", None),
            ("{{ message | tojson }}", None),
            ("{% if enable_thinking %}thinking, reasoning: {{ m.content }}{% endif %}", Some("reasoning")),
        ] {
            assert_eq!(unread(json!({"reasoning": "a"}), source).as_deref(), named, "{source}");
        }
        assert_eq!(
            unread(json!({"thinking": "a"}), "{{ m.reasoning }}").as_deref(),
            Some("thinking"),
            "as transformers"
        );
    }
}
