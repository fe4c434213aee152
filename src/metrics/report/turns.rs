//! A completion of several turns as HTML: one item a message.

use std::fmt::Write;

use serde_json::Value;

use super::escape;

/// Most messages shown of a completion.
const MAX_MESSAGES: usize = 100;
/// Fewest characters shown of a message, however many there are.
const MIN_CHARACTERS: usize = 200;

/// The messages of a completion, whose texts have `max_characters` together.
pub(super) fn turns(messages: &[Value], max_characters: usize) -> String {
    let each = (max_characters / messages.len().clamp(1, MAX_MESSAGES)).max(MIN_CHARACTERS);
    let shown: String = messages.iter().take(MAX_MESSAGES).map(|message| item(message, each)).collect();
    let num_more = messages.len().saturating_sub(MAX_MESSAGES);
    let more = if num_more > 0 { format!("<li>{num_more} more messages</li>") } else { String::new() };
    format!("<ol class=\"turns\">{shown}{more}</ol>")
}

/// A text as HTML, cut after `max_characters`.
pub(super) fn excerpt(text: &str, max_characters: usize) -> String {
    let Some((cut, _)) = text.char_indices().nth(max_characters) else { return escape(text) };
    format!("{}<em> … {} more bytes</em>", escape(&text[..cut]), text.len() - cut)
}

fn item(message: &Value, max_characters: usize) -> String {
    let text = |key: &str| message[key].as_str().unwrap_or_default();
    let kind = if text("role") == "assistant" { "policy" } else { "other" };
    let mut html = format!("<li class=\"{kind}\"><h5>{}", escape(text("role")));
    if let Some(name) = message["name"].as_str() {
        let _ = write!(html, " {}", escape(name));
    }
    if let Some(count) = message["num_tokens"].as_u64() {
        let _ = write!(html, " <span>{count} tokens sampled</span>");
    }
    html += "</h5>";
    let content = shown(&message["content"]);
    if !content.is_empty() {
        let _ = write!(html, "<pre>{}</pre>", excerpt(&content, max_characters));
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let call = format!("calls {}({})", shown(&call["function"]["name"]), arguments(&call["function"]["arguments"]));
        let _ = write!(html, "<pre class=\"call\">{}</pre>", excerpt(&call, max_characters));
    }
    if let Some(sampled) = message["sampled"].as_str().filter(|sampled| **sampled != *content) {
        let sampled = excerpt(sampled, max_characters);
        let _ = write!(html, "<details><summary>as sampled</summary><pre>{sampled}</pre></details>");
    }
    html + "</li>"
}

/// A text as it is; anything else as JSON.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Arguments of a call as in Python: `a=3, b="x"`.
fn arguments(arguments: &Value) -> String {
    match arguments {
        Value::Object(named) => {
            named.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(", ")
        }
        other => shown(other),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn turns_show_calls_answers_and_the_sampled_text_and_all_of_it_is_only_text() {
        let call = json!({"type": "function", "function": {"name": "<i>", "arguments": {"a": 3, "b": "x"}}});
        let messages = [
            json!({"role": "assistant", "content": "I add", "tool_calls": [call], "sampled": "I add<call>", "num_tokens": 9}),
            json!({"role": "tool", "name": "add", "content": "<img src=x>"}),
            json!({"role": "assistant", "content": "7", "sampled": "7", "num_tokens": 1}),
            json!({"role": "user", "content": [{"type": "text", "text": "parts"}]}),
        ];
        let html = turns(&messages, 1000);
        for part in [
            "<li class=\"policy\"><h5>assistant <span>9 tokens sampled</span></h5><pre>I add</pre>",
            "<pre class=\"call\">calls &lt;i&gt;(a=3, b=&quot;x&quot;)</pre>",
            "<summary>as sampled</summary><pre>I add&lt;call&gt;</pre>",
            "<li class=\"other\"><h5>tool add</h5><pre>&lt;img src=x&gt;</pre>",
            "<h5>assistant <span>1 tokens sampled</span></h5><pre>7</pre></li>",
            "&quot;text&quot;:&quot;parts&quot;",
        ] {
            assert!(html.contains(part), "{part} in {html}");
        }
        assert!(!html.contains("<img") && !html.contains("<i>"));
    }

    #[test]
    fn long_completions_are_cut_message_by_message() {
        let messages: Vec<Value> = (0..120).map(|_| json!({"role": "tool", "content": "x".repeat(900)})).collect();
        let html = turns(&messages, 1000);
        assert!(html.contains("20 more messages") && html.contains("700 more bytes"), "{html}");
        assert!(html.len() < 100 * 400);
    }
}
