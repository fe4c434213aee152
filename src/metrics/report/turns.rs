//! Shows a completion with several turns: one item per message.

use serde_json::{Value, json};

use super::templates::Excerpt;

/// Maximum number of messages shown of a completion.
pub(super) const MAX_MESSAGES: usize = 100;
/// Minimum number of characters shown of a message, however many messages there are.
const MIN_CHARACTERS: usize = 200;

/// The messages of a completion as values for the template; their texts are limited to `max_characters` in total.
pub(super) fn turns(messages: &[Value], max_characters: usize) -> Vec<Value> {
    let each = (max_characters / messages.len().clamp(1, MAX_MESSAGES)).max(MIN_CHARACTERS);
    messages.iter().take(MAX_MESSAGES).map(|message| turn(message, each)).collect()
}

fn turn(message: &Value, max_characters: usize) -> Value {
    let excerpt = |text: &str| json!(Excerpt::of(text, max_characters));
    let call = |call: &Value| {
        let function = &call["function"];
        excerpt(&format!("calls {}({})", shown(&function["name"]), arguments(&function["arguments"])))
    };
    let (role, content) = (message["role"].as_str().unwrap_or_default(), shown(&message["content"]));
    let mut turn = json!({
        "kind": if role == "assistant" { "policy" } else { "other" },
        "role": role,
        "name": message["name"].as_str(),
        "calls": message["tool_calls"].as_array().into_iter().flatten().map(call).collect::<Vec<_>>(),
        "sampled": message["sampled"].as_str().filter(|sampled| **sampled != *content).map(excerpt),
    });
    if let Some(count) = message["num_tokens"].as_u64() {
        turn["num_tokens"] = count.into();
    }
    if !content.is_empty() {
        turn["content"] = excerpt(&content);
    }
    turn
}

/// A text unchanged; any other value as JSON.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Arguments of a call in Python's notation: `a=3, b="x"`.
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
    use super::super::completions_of_prompt;
    use super::*;
    use crate::metrics::CompletionRow;

    /// Renders a completion with these messages.
    fn html(messages: &[Value], max_characters: usize) -> String {
        let row = CompletionRow { messages: messages.to_vec(), ..CompletionRow::default() };
        completions_of_prompt(&[row], max_characters, 0)
    }

    #[test]
    fn reported_turns_show_calls_and_answers_as_escaped_text() {
        let call = json!({"type": "function", "function": {"name": "<i>", "arguments": {"a": 3, "b": "x"}}});
        let messages = [
            json!({"role": "assistant", "content": "I add", "tool_calls": [call], "sampled": "I add<call>", "num_tokens": 9}),
            json!({"role": "tool", "name": "add", "content": "<img src=x>"}),
            json!({"role": "assistant", "content": "7", "sampled": "7", "num_tokens": 1}),
            json!({"role": "user", "content": [{"type": "text", "text": "parts"}]}),
        ];
        let html = html(&messages, 1000);
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
        let html = html(&messages, 1000);
        assert!(html.contains("20 more messages") && html.contains("700 more bytes"), "{html}");
        assert!(html.len() < 100 * 400);
    }
}
