//! Parses the messages of gpt-oss. Each message has a channel. A message addressed to a function is a call with JSON arguments. The recipient
//! is named after the role or after the channel.

use serde_json::Value;

use super::{CallBlock, ToolCall, Unreadable};
use crate::data::numbers::check_numbers;

/// The marker before a message's channel; every message of the harmony format has one.
pub(super) const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
const MESSAGE: &str = "<|message|>";
/// Markers that end a message; the end of the text does, too.
const ENDS: [&str; 3] = ["<|call|>", "<|end|>", "<|return|>"];
const RECIPIENT: &str = "to=functions.";

/// Parses the message whose channel marker is at byte `at`: one call, or none.
pub(super) fn message(text: &str, at: usize) -> Result<CallBlock, Unreadable> {
    let role = text[..at].rfind(START).map_or(&text[..at], |start| &text[start + START.len()..at]);
    let role = if role.contains(MESSAGE) { "" } else { role }; // of the message before, which has no end
    let open = || Unreadable::open(format!("no {MESSAGE} after a channel"));
    let (header, body) = text[at + CHANNEL.len()..].split_once(MESSAGE).ok_or_else(open)?;
    if header.contains(START) {
        return Err(open());
    }
    let len = ENDS.iter().filter_map(|end| body.find(end)).min().unwrap_or(body.len());
    let end = text.len() - body.len() + len;
    let recipient = [role, header].iter().find_map(|part| part.split_once(RECIPIENT));
    let Some((_, name)) = recipient else { return Ok(CallBlock { calls: Vec::new(), end }) };
    let name = name.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default();
    if name.is_empty() {
        return Err(Unreadable::call("a message to a function without a name".to_owned()));
    }
    let body = body[..len].trim();
    let wrong = |error: String| Unreadable::call(format!("the arguments of '{name}': {error}"));
    let arguments: Value = serde_json::from_str(body).map_err(|error| wrong(error.to_string()))?;
    if !arguments.is_object() {
        return Err(wrong("expected an object".to_owned()));
    }
    check_numbers(&arguments, body).map_err(wrong)?;
    Ok(CallBlock { calls: vec![ToolCall { name: name.to_owned(), arguments }], end })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::data::tool_calls::{ParsedMessage, ToolCallParser};

    #[test]
    fn harmony_tool_calls_are_parsed() {
        let parse = |text: &str| ToolCallParser::OpenAi.parse(text, &Value::Null, None);
        let thought = "<|channel|>analysis<|message|>I need a {tool}.<|end|>";
        let call = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\": 1}";
        for (text, end) in
            [("<|call|>", ""), ("", "<|call|>")].map(|(end, rest)| (format!("{thought}{call}{end}"), rest))
        {
            let parsed = parse(&text);
            assert_eq!(parsed.tool_calls, [ToolCall { name: "add".into(), arguments: json!({"a": 1}) }], "{text}{end}");
            assert!(parsed.content.starts_with(thought) && parsed.error.is_none());
        }
        // The recipient behind the role, as templates write calls of the past; and where the prompt has begun the header.
        let earlier = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>";
        assert_eq!(parse(earlier).tool_calls, [ToolCall { name: "f".into(), arguments: json!({}) }]);
        let two = format!("{thought}{call}<|call|><|start|>assistant{earlier}");
        assert_eq!(parse(&two).tool_calls.len(), 2);
        // What is said to the user, and calls of built-in tools, are text.
        for text in [
            format!("{thought}<|start|>assistant<|channel|>final<|message|>Two."),
            "<|channel|>commentary<|message|>I look it up: to=functions.f.<|end|>".to_owned(),
            "<|channel|>commentary to=python<|message|>1 + 1<|call|>".to_owned(),
        ] {
            assert_eq!(parse(&text), ParsedMessage { content: text.clone(), ..ParsedMessage::default() });
        }
        for (text, error) in [
            ("<|channel|>commentary to=functions.f<|message|>{\"a\": }<|call|>", "the arguments of 'f': "),
            ("<|channel|>commentary to=functions.f<|message|>[1]", "the arguments of 'f': expected an object"),
            ("<|channel|>commentary to=functions. <|message|>{}", "without a name"),
            ("<|channel|>commentary to=functions.f {}", "no <|message|>"),
        ] {
            let parsed = parse(text);
            assert!(parsed.tool_calls.is_empty() && parsed.content == text, "{text}");
            assert!(parsed.error.unwrap().contains(error), "{text}");
        }
    }
}
