//! Parses the messages of gpt-oss. Each message has a channel. A message addressed to a function is a call with JSON arguments. The recipient
//! is named after the role or after the channel. The content of an answer is the text of its messages, since gpt-oss's template refuses a content
//! with channels.

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
    let len = end_of(body, &ENDS);
    let end = text.len() - body.len() + len;
    let recipient = [role, header].iter().find_map(|part| part.split_once(RECIPIENT));
    let Some((_, name)) = recipient else { return Ok(CallBlock { calls: Vec::new(), end }) };
    if [role, header].iter().map(|part| part.matches(RECIPIENT).count()).sum::<usize>() > 1 {
        return Err(Unreadable::call("a message to two functions".to_owned()));
    }
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
    Ok(CallBlock { calls: vec![ToolCall::new(name, arguments)], end })
}

/// Byte offset of the first of these markers, or of the text's end.
fn end_of(text: &str, markers: &[&str]) -> usize {
    let mut tags = text.match_indices("<|").map(|(at, _)| at);
    tags.find(|at| markers.iter().any(|marker| text[*at..].starts_with(marker))).unwrap_or(text.len())
}

/// A message that is no call.
struct PlainMessage<'t> {
    is_thought: bool,
    body: &'t str,
}

/// The text of the messages that are no calls. It includes thoughts if there are calls, since the template writes the content of such a turn as a
/// thought, or if there is nothing else.
pub(super) fn content(text: &str, has_calls: bool) -> String {
    if !text.contains(CHANNEL) {
        return text.to_owned();
    }
    let messages = plain_messages(text);
    let shows_thoughts = has_calls || messages.iter().all(|message| message.is_thought);
    let shown = messages.iter().filter(|message| shows_thoughts || !message.is_thought);
    shown.map(|message| message.body).collect::<Vec<_>>().join("\n")
}

fn plain_messages(text: &str) -> Vec<PlainMessage<'_>> {
    let (mut messages, mut rest) = (Vec::new(), text);
    let boundaries = [&ENDS[..], &[START, CHANNEL]].concat();
    while let Some((role, behind)) = rest.split_once(CHANNEL) {
        let (header, body) = behind.split_once(MESSAGE).unwrap_or((behind, ""));
        // Text of no message: a role follows a marker, or is what a message to a function begins with.
        let stray = role.split(START).next().unwrap_or_default().trim();
        let stray = ENDS.iter().fold(stray, |text, end| text.strip_prefix(end).unwrap_or(text).trim());
        if !stray.is_empty() && !stray.contains(RECIPIENT) {
            messages.push(PlainMessage { is_thought: false, body: stray });
        }
        let len = end_of(body, &boundaries);
        if !role.contains(RECIPIENT) && !header.contains(RECIPIENT) {
            messages.push(PlainMessage { is_thought: header.trim_start().starts_with("analysis"), body: &body[..len] });
        }
        rest = &body[len..];
    }
    messages
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
            assert_eq!(parsed.tool_calls, [ToolCall::new("add", json!({"a": 1}))], "{text}{end}");
            assert_eq!((parsed.content.as_str(), parsed.error), ("I need a {tool}.", None));
        }
        // The recipient behind the role, as templates write calls of the past; and where the prompt has begun the header.
        let earlier = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>";
        let calls = vec![ToolCall::new("f", json!({}))];
        assert_eq!(parse(earlier), ParsedMessage { tool_calls: calls, ..ParsedMessage::default() });
        let two = format!("{thought}{call}<|call|><|start|>assistant{earlier}");
        assert_eq!(parse(&two).tool_calls.len(), 2);
        // What is said to the user, and calls of built-in tools, are text.
        let preamble = "<|channel|>commentary<|message|>I look it up: to=functions.f.<|end|>";
        for (text, content) in [
            (format!("{thought}<|start|>assistant<|channel|>final<|message|>Two.<|return|>"), "Two."),
            (format!("{thought}<|start|>assistant{preamble}"), "I look it up: to=functions.f."),
            (thought.to_owned(), "I need a {tool}."),
            ("<|channel|>commentary to=python<|message|>1 + 1<|call|>".to_owned(), "1 + 1"),
            ("<|channel|>analysis<|message|>So<|channel|>final<|message|>Two.".to_owned(), "Two."),
            ("Two.<|channel|>final<|message|>Three.".to_owned(), "Two.\nThree."),
            ("Two.".to_owned(), "Two."),
        ] {
            assert_eq!(parse(&text), ParsedMessage { content: content.to_owned(), ..ParsedMessage::default() });
        }
        let both = format!("{thought}<|start|>assistant{preamble}<|start|>assistant{earlier}");
        assert_eq!(parse(&both).content, "I need a {tool}.\nI look it up: to=functions.f.");
        for (text, error) in [
            ("<|channel|>commentary to=functions.f<|message|>{\"a\": }<|call|>", "the arguments of 'f': "),
            ("<|channel|>commentary to=functions.f<|message|>[1]", "the arguments of 'f': expected an object"),
            ("<|channel|>commentary to=functions. <|message|>{}", "without a name"),
            ("<|channel|>commentary to=functions.f to=functions.g<|message|>{}<|call|>", "two functions"),
            ("<|channel|>commentary to=functions.f {}", "no <|message|>"),
        ] {
            let parsed = parse(text);
            assert!(parsed.tool_calls.is_empty() && parsed.content == text, "{text}");
            assert!(parsed.error.unwrap().contains(error), "{text}");
        }
    }
}
