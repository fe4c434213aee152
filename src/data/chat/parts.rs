//! Chat templates that loop over the parts of a message's content and ignore a plain string, as those of vision-language models do.
//!
//! Whether the text of a role must be passed as `[{"type": "text", "text": ..}]` is determined once, by rendering a probe text: parts are used
//! if the template shows the text only in that form. vLLM decides this from the template's syntax, and also wraps strings; transformers does
//! not wrap them, and renders such a message as an empty text.

use serde_json::{Value, json};

use super::Conversation;

/// A probe text that no template contains.
const PROBE: &str = "probe-7f3a";
/// Roles that are probed. In each probe the role's message is the last of the conversation.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// Determines, with `render`, the roles whose content has to be passed as a list of parts.
pub(super) fn roles_in_parts(render: impl Fn(&Conversation) -> Option<String>) -> Vec<&'static str> {
    let shows = |role: &str, wrapped: &[&str]| {
        let turn = |role: &str, text: &str| json!({"role": role, "content": text});
        let mut messages = match role {
            "system" => vec![turn("system", PROBE), turn("user", "u")],
            "user" => vec![turn("user", PROBE)],
            "assistant" => vec![turn("user", "u"), turn("assistant", PROBE)],
            _ => vec![turn("user", "u"), turn("assistant", "a"), turn("tool", PROBE)],
        };
        wrap(&mut messages, wrapped);
        let conversation = Conversation { messages, ..Conversation::default() };
        // A list that is printed as such shows it, too.
        render(&conversation).is_some_and(|text| text.contains(PROBE) && !text.contains("'type'"))
    };
    let mut wrapped: Vec<&'static str> = Vec::new();
    for role in ["user", "system", "assistant", "tool"] {
        let with_role = [&wrapped[..], &[role]].concat();
        if !shows(role, &wrapped) && shows(role, &with_role) {
            wrapped = with_role;
        }
    }
    ROLES.into_iter().filter(|role| wrapped.contains(role)).collect()
}

/// Wraps the text content of messages with these roles in a list of one part.
pub(super) fn wrap(messages: &mut [Value], roles: &[&str]) {
    for message in messages {
        let is_wanted = message["role"].as_str().is_some_and(|role| roles.contains(&role));
        if let Some(text) = message.get_mut("content").filter(|content| is_wanted && content.is_string()) {
            *text = json!([{"type": "text", "text": text.take()}]);
        }
    }
}
