//! Multi-turn conversations as token ids. Sampled tokens are kept as they are. Between two assistant turns, the context is appended:
//! the tokens that the chat template writes there. Sampled text is never tokenized again, because its tokens may differ from those
//! that were sampled.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{Conversation, Tokenizer};
use crate::error::{Error, Result};
use crate::types::Trajectory;

/// Text of an assistant's turn in the probe conversation. No template contains it, so it can be found in the rendered text.
const SAID: &str = "probe said 7081";
/// An argument of the tool call in the assistant's turn of the probe.
const ARGUED: &str = "probe argued 9157";
/// Text of the reply to the assistant's turn of the probe.
const ANSWERED: &str = "probe answered 4463";
/// Reasoning in the assistant's turn of the probe, for templates that support reasoning.
const THOUGHT: &str = "probe thought 3359";
/// Characters shown of a difference between two rendered texts.
const SHOWN_CHARS: usize = 60;

/// The kind of message that follows an assistant's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Results of tools that the assistant called.
    Tool,
    /// A message of the user follows.
    User,
}

/// A model that takes several turns, with tools, an environment or an agent.
#[derive(Debug, Clone)]
pub struct TurnModel {
    /// The model's tokenizer, with its chat template.
    pub tokenizer: Arc<Tokenizer>,
    /// Ids that end a turn of the model.
    pub eos_token_ids: Vec<u32>,
    /// Largest number of tokens of prompt and completion together.
    pub max_model_length: usize,
}

/// Computes the context tokens between two assistant turns with a model's chat template.
pub struct TurnContext {
    tokenizer: Arc<Tokenizer>,
    eos_token_ids: Vec<u32>,
    tools: Value,
    variables: Map<String, Value>,
}

impl fmt::Debug for TurnContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TurnContext").field("eos_token_ids", &self.eos_token_ids).finish_non_exhaustive()
    }
}

impl TurnContext {
    /// Checks by a probe conversation whether the chat template only appends text when turns with such a `reply` are added. Returns the context.
    /// `tools` are the functions that the model may call, `variables` the template variables of conversations (`chat_template_kwargs`).
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] with the difference if the template rewrites earlier turns. The model would then be trained on
    /// conversations that it does not see in inference.
    pub fn probe(
        tokenizer: Arc<Tokenizer>,
        eos_token_ids: &[u32],
        tools: &Value,
        variables: &Map<String, Value>,
        reply: Reply,
    ) -> Result<Self> {
        let (eos_token_ids, tools) = (eos_token_ids.to_vec(), tools.clone());
        let turns = Self { tokenizer, eos_token_ids, tools, variables: variables.clone() };
        let answer = reply.probe();
        let [question, said] = [turns.question(), turns.said(std::slice::from_ref(&answer))];
        let kind = reply.name();
        let once = vec![question.clone(), said.clone(), answer.clone()];
        let twice = [&once[..], &[said, answer]].concat();
        turns.check_appends(vec![question], &once, kind)?;
        turns.check_appends(once.clone(), &twice, kind)?;
        let text = turns.render(once, false)?;
        // Some templates write calls in the place of an answer's text.
        let shows_turn = text.contains(SAID) || (reply == Reply::Tool && text.contains(ARGUED));
        if !shows_turn || (turns.thinks() && !text.contains(THOUGHT)) {
            let message = format!(
                "it drops the model's earlier output when {kind} is added: it renders only '{text}'; use another \
                 template, or conversations of one turn"
            );
            return Err(Error::ChatTemplate { message });
        }
        let (context, _) = turns.text_between(&[reply.probe()])?;
        if !context.contains(ANSWERED) {
            let message = format!(
                "{kind} does not appear after the turn that it answers; the template renders only '{}' there",
                head(&context)
            );
            return Err(Error::ChatTemplate { message });
        }
        Ok(turns)
    }

    /// Appends `replies` (messages for the chat template) and the start of the next turn. Returns whether the trajectory then has at most
    /// `limit` tokens; if not, it is left unchanged. The trajectory must end with an assistant turn that ended by itself or at a
    /// stop string.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if rendering the messages fails; [`Error::InvalidArgument`] if the trajectory has no turn to
    /// follow.
    pub fn append(&self, trajectory: &mut Trajectory, replies: &[Value], step: u64, limit: usize) -> Result<bool> {
        let Some((&last, true)) = trajectory.token_ids.last().zip(trajectory.loss_mask.last().copied()) else {
            return Err(Error::InvalidArgument {
                op: "TurnContext::append",
                expected: "a trajectory that ends with a sampled turn".into(),
                got: format!(
                    "a trajectory of {} tokens that ends with tokens the model did not sample",
                    trajectory.token_ids.len()
                ),
            });
        };
        // The first token ends the turn: the model sampled it, unless a stop string cut the turn off before.
        let num_sampled = usize::from(self.eos_token_ids.contains(&last));
        let room = limit.saturating_sub(trajectory.token_ids.len()).saturating_add(num_sampled);
        let Some(context) = self.between(replies, room)?.filter(|context| context.len() <= room) else {
            return Ok(false);
        };
        trajectory.push_context(&context[num_sampled..], step);
        Ok(true)
    }

    /// Tokens from the end token of an assistant's turn to the start of its next turn, with `replies` between them. `None` if there are
    /// far more than `limit` tokens; the text is then not fully tokenized.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if rendering the messages fails, or turns do not end with an end-of-sequence token.
    fn between(&self, replies: &[Value], limit: usize) -> Result<Option<Vec<u32>>> {
        let num_bytes: usize = replies.iter().map(|reply| reply["content"].as_str().map_or(0, str::len)).sum();
        if num_bytes > self.tokenizer.max_bytes(limit) {
            return Ok(None); // nor rendered
        }
        let (text, eos) = self.text_between(replies)?;
        if self.tokenizer.exceeds(&text, limit)? {
            return Ok(None);
        }
        // With the token before it, as a tokenizer may treat the beginning of a text in its own way.
        let ids = self.tokenizer.encode(&text, false)?;
        match ids.first() {
            Some(first) if *first == eos => Ok(Some(ids)),
            _ => {
                let message = format!(
                    "the text after an assistant turn, '{}', does not begin with the end-of-sequence token {eos}",
                    head(&text)
                );
                Err(Error::ChatTemplate { message })
            }
        }
    }

    /// The text whose tokens [`TurnContext::between`] returns, and its first token.
    fn text_between(&self, replies: &[Value]) -> Result<(String, u32)> {
        // A result may be labelled with the name or the id of its call, but some templates allow or show one call in a turn.
        let all = || self.rendered(replies, replies).ok().filter(|text| text.contains(ARGUED));
        let text = if replies.len() > 1 { all() } else { None };
        let first = &replies[..replies.len().min(1)];
        let text = text.map_or_else(|| self.rendered(first, replies), Ok)?;
        let failed = |message: String| Error::ChatTemplate { message };
        let said = [SAID, ARGUED].iter().filter_map(|part| Some(text.find(part)? + part.len())).max();
        let behind = &text[said.ok_or_else(|| failed("it does not render the assistant's turn".to_owned()))?..];
        let ends = self.eos_token_ids.iter().filter_map(|&id| Some((behind.find(&self.tokenizer.token(id)?)?, id)));
        let (at, eos) = ends.min().ok_or_else(|| {
            failed(format!(
                "an assistant's turn must end with an end-of-sequence token, but the template renders '{}'",
                head(behind)
            ))
        })?;
        Ok((behind[at..].to_owned(), eos))
    }

    /// The conversation in which the assistant made the calls that `called` answer, and `replies` follow.
    fn rendered(&self, called: &[Value], replies: &[Value]) -> Result<String> {
        self.render([&[self.question(), self.said(called)], replies].concat(), true)
    }

    fn render(&self, messages: Vec<Value>, add_generation_prompt: bool) -> Result<String> {
        let (tools, variables) = (self.tools.clone(), self.variables.clone());
        self.tokenizer.converse(Conversation { messages, tools, variables, add_generation_prompt })
    }

    /// Returns an error unless the rendered `later` begins with the rendered `earlier`, with or without generation prompt.
    fn check_appends(&self, earlier: Vec<Value>, later: &[Value], kind: &str) -> Result<()> {
        let later = self.render(later.to_vec(), false)?;
        let (closed, open) = (self.render(earlier.clone(), false)?, self.render(earlier, true)?);
        if later.starts_with(&closed) || later.starts_with(&open) {
            return Ok(());
        }
        let common = common_len(&closed, &later);
        let (before, after) = (head(&closed[common..]), head(&later[common..]));
        let message = format!(
            "it rewrites earlier turns when {kind} is added: '{before}' becomes '{after}'; use a template that only \
             appends, or conversations of one turn"
        );
        Err(Error::ChatTemplate { message })
    }

    fn thinks(&self) -> bool {
        self.tokenizer.template_source().is_some_and(|source| source.contains("</think>"))
    }

    fn question(&self) -> Value {
        json!({"role": "user", "content": "probe asked 1"})
    }

    /// The assistant's turn of the probe conversation. It has a call for each of `replies` that is a tool's answer.
    fn said(&self, replies: &[Value]) -> Value {
        let content = if self.thinks() { format!("<think>\n{THOUGHT}\n</think>\n\n{SAID}") } else { SAID.to_owned() };
        let mut said = json!({"role": "assistant", "content": content});
        if Reply::of(replies) == Reply::Tool {
            let call = |(index, reply): (usize, &Value)| {
                let of_reply = |key: &str, probe: &str| reply[key].as_str().unwrap_or(probe).to_owned();
                // Text after the last call is searched for by its argument.
                let argument = if index + 1 == replies.len() { ARGUED } else { "probe" };
                let function = json!({"name": of_reply("name", "probe"), "arguments": {"x": argument}});
                json!({"id": of_reply("tool_call_id", "probe0000"), "type": "function", "function": function})
            };
            said["tool_calls"] = replies.iter().enumerate().map(call).collect();
        }
        said
    }
}

impl Reply {
    /// The kind of the first message in `replies`.
    pub fn of(replies: &[Value]) -> Self {
        if replies.first().is_some_and(|reply| reply["role"] == "tool") { Self::Tool } else { Self::User }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tool => "a tool's answer",
            Self::User => "a user's message",
        }
    }

    fn probe(self) -> Value {
        match self {
            Self::Tool => {
                json!({"role": "tool", "name": "probe", "tool_call_id": "probe0000", "content": ANSWERED})
            }
            Self::User => json!({"role": "user", "content": ANSWERED}),
        }
    }
}

/// Size in bytes of the longest common prefix of two texts, in whole characters.
fn common_len(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

fn head(text: &str) -> String {
    text.chars().take(SHOWN_CHARS).collect()
}
