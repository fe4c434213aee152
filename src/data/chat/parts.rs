//! Templates that loop over the parts of a message's content, as those of models that see do, and pass over a plain text.
//!
//! Whether a text of a role must come as `[{"type": "text", "text": ..}]` is tried once, with a text that no template has: it has to where
//! the template shows it in that form alone. vLLM asks the same of a template's syntax, and wraps texts, too; transformers does not, and
//! renders such a message as nothing.

use serde_json::{Value, json};

use super::Conversation;

/// A text that no template has.
const PROBE: &str = "probe-7f3a";
/// Roles whose texts may be wanted in another form, each the last of a conversation.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// Roles whose texts have to come as parts.
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

/// Gives the texts of these roles as parts.
pub(super) fn wrap(messages: &mut [Value], roles: &[&str]) {
    for message in messages {
        let is_wanted = message["role"].as_str().is_some_and(|role| roles.contains(&role));
        if let Some(text) = message.get_mut("content").filter(|content| is_wanted && content.is_string()) {
            *text = json!([{"type": "text", "text": text.take()}]);
        }
    }
}
