//! Messages of a completion with several turns, for the file of completions.

use serde_json::{Value, json};

use crate::data::Tokenizer;
use crate::error::Result;
use crate::types::Trajectory;

/// The messages of a trajectory as passed to rewards. Those of the policy also have the text of their sampled tokens, with special tokens, and their
/// number. If an environment was lost, that is the last message.
///
/// # Errors
/// The errors of the tokenizer.
pub(super) fn logged_messages(trajectory: &Trajectory, tokenizer: &Tokenizer) -> Result<Vec<Value>> {
    let mut messages = trajectory.messages.clone();
    let of_policy = |message: &&mut Value| message["role"] == "assistant";
    for (message, turn) in messages.iter_mut().filter(of_policy).zip(trajectory.turns()) {
        message["num_tokens"] = turn.len().into();
        message["sampled"] = tokenizer.decode_all(&trajectory.token_ids[turn])?.into();
    }
    if let Some(failure) = &trajectory.failure {
        messages.push(json!({"role": "environment", "content": format!("lost: {failure}")}));
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::data::fixtures::{Dice, bytes};

    #[test]
    fn logged_messages_show_the_sampled_text_and_lost_environments() {
        let tokenizer = Arc::new(bytes(&mut Dice(5), ""));
        let (mut trajectory, eos) = (Trajectory::default(), tokenizer.eos_token_id().unwrap());
        let say = |trajectory: &mut Trajectory, text: &str| {
            let ids = tokenizer.encode(text, false).unwrap();
            ids.iter().chain([&eos]).for_each(|id| trajectory.push_sampled(*id, -1.0, 1));
            ids.len() + 1
        };
        let first = say(&mut trajectory, "<call>add</call>");
        trajectory.push_context(&tokenizer.encode("4", false).unwrap(), 1);
        let second = say(&mut trajectory, "4!");
        trajectory.failure = Some("timeout".to_owned());
        let call = json!([{"type": "function", "function": {"name": "add", "arguments": {}}}]);
        trajectory.messages = vec![
            json!({"role": "assistant", "content": "", "tool_calls": call}),
            json!({"role": "tool", "name": "add", "content": "4"}),
            json!({"role": "assistant", "content": "4!"}),
        ];
        let messages = logged_messages(&trajectory, &tokenizer).unwrap();
        let end = tokenizer.token(eos).unwrap();
        assert_eq!(messages[0]["sampled"], format!("<call>add</call>{end}"));
        assert_eq!((&messages[0]["num_tokens"], &messages[2]["num_tokens"]), (&json!(first), &json!(second)));
        assert_eq!((&messages[0]["tool_calls"], messages[1].get("sampled")), (&call, None));
        assert_eq!(messages[3], json!({"role": "environment", "content": "lost: timeout"}));
    }
}
