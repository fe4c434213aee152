//! Multi-turn conversations as token ids. Sampled tokens are kept as they are. Between two assistant turns, the context is appended:
//! the tokens that the chat template writes there. Sampled text is never tokenized again, because its tokens may differ from those
//! that were sampled.

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
        let [question, said, answer] = [turns.question(), turns.said(reply), reply.probe()];
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
        let reply = Reply::of(replies);
        let mut messages = vec![self.question(), self.said(reply)];
        messages.extend_from_slice(replies);
        let text = self.render(messages, true)?;
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

    /// The assistant's turn of the probe conversation.
    fn said(&self, reply: Reply) -> Value {
        let content = if self.thinks() { format!("<think>\n{THOUGHT}\n</think>\n\n{SAID}") } else { SAID.to_owned() };
        let mut said = json!({"role": "assistant", "content": content});
        if reply == Reply::Tool {
            let call = json!({"name": "probe", "arguments": {"x": ARGUED}});
            said["tool_calls"] = json!([{"id": "probe0000", "type": "function", "function": call}]);
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

#[cfg(test)]
mod tests {
    use super::super::fixtures::{Dice, bytes};
    use super::*;
    use crate::types::FinishReason;

    /// A template in Qwen's form: a tool's result is a user message.
    const CHATML: &str = "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n\
        </tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    /// A template in Llama 3's form: a header followed by two line ends, and no line end after a turn.
    const HEADERS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}<|sep|>\n\n{{ m.content }}<|im_end|>{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant<|sep|>\n\n{% endif %}";
    /// A template in Mistral's form: no generation prompt.
    const BRACKETS: &str = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}[INST] \
        {{ m.content }} [/INST]{% endif %}{% endfor %}";
    /// A template that opens a thought in the generation prompt and keeps thoughts of earlier turns.
    const THINKS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{# </think> #}{% endif %}";

    fn turns(tokenizer: &Arc<Tokenizer>, reply: Reply) -> Result<TurnContext> {
        let eos = tokenizer.eos_token_id().unwrap();
        TurnContext::probe(Arc::clone(tokenizer), &[eos], &Value::Null, &Map::new(), reply)
    }

    #[test]
    fn a_template_that_rewrites_earlier_turns_is_refused_with_the_difference() {
        let drops_thoughts =
            CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content.split('</think>')[-1] }}<|im_end|>");
        let of_last = "{% for m in messages %}<|im_start|>{{ m.role }}{% if loop.last %} last{% endif %}\n{{ m.content }}\
            <|im_end|>\n{% endfor %}";
        let counts = "{{ messages | length }}: {% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}";
        let no_end = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
        let answers_first = "{% for m in messages %}{% if m.role == 'assistant' %}{% if not loop.last %}{{ messages[loop.index].content }}\
            {% endif %}{{ m.content }}<|im_end|>{% elif loop.first %}{{ m.content }}{% endif %}{% endfor %}";
        let mut dice = Dice(1);
        for (template, differences) in [
            (drops_thoughts.as_str(), &["drops the model's earlier output when a", SAID][..]),
            (of_last, &["rewrites earlier turns", " last", "becomes"]),
            (counts, &["rewrites earlier turns", "'1: ", "'3: "]),
            (no_end, &["must end with an end-of-sequence token"]),
            (answers_first, &["does not appear after the turn"]),
        ] {
            let tokenizer = Arc::new(bytes(&mut dice, template));
            for reply in [Reply::Tool, Reply::User] {
                let error = turns(&tokenizer, reply).unwrap_err().to_string();
                assert!(differences.iter().all(|part| error.contains(part)), "{error}");
            }
        }
        for template in [CHATML, HEADERS, BRACKETS, THINKS] {
            let tokenizer = Arc::new(bytes(&mut dice, template));
            turns(&tokenizer, Reply::Tool).unwrap();
            turns(&tokenizer, Reply::User).unwrap();
        }
    }

    #[test]
    fn appended_context_starts_right_after_the_sampled_turn() {
        let tokenizer = Arc::new(bytes(&mut Dice(2), CHATML));
        let (turns, eos) = (turns(&tokenizer, Reply::Tool).unwrap(), tokenizer.eos_token_id().unwrap());
        let answers = [json!({"role": "tool", "content": "4"}), json!({"role": "tool", "content": "<5>"})];
        let expected = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>\n<5>\n\
            </tool_response><|im_end|>\n<|im_start|>assistant\n";
        let expected = tokenizer.encode(expected, false).unwrap();
        let sampled = |ids: &[u32]| Trajectory {
            token_ids: ids.to_vec(),
            loss_mask: vec![true; ids.len()],
            rollout_logprobs: vec![-1.0; ids.len()],
            weight_versions: vec![3; ids.len()],
            finish_reason: Some(FinishReason::Eos),
            ..Trajectory::default()
        };
        for (ids, end) in [(&[65, 66, eos][..], &[][..]), (&[65, 66], &[eos])] {
            let mut trajectory = sampled(ids);
            assert!(turns.append(&mut trajectory, &answers, 4, usize::MAX).unwrap());
            let context = [end, &expected].concat();
            assert_eq!(trajectory.token_ids, [ids, &context].concat(), "a turn that was cut off is ended in context");
            assert_eq!(trajectory.loss_mask, [vec![true; ids.len()], vec![false; context.len()]].concat());
            assert_eq!(trajectory.weight_versions[ids.len()..], vec![4; context.len()]);
            assert_eq!(trajectory.finish_reason, None);
            assert!(turns.append(&mut trajectory, &answers, 5, usize::MAX).is_err(), "no turn was sampled since");
        }
    }

    /// Many long replies would exceed the limits of template rendering.
    #[test]
    fn replies_longer_than_the_limit_are_not_rendered() {
        let refuses = CHATML.replace(
            "{% for m in messages %}",
            "{% for m in messages %}{% if m.content | length > 70000 %}\
            {{ raise_exception('too long for the template') }}{% endif %}",
        );
        let tokenizer = Arc::new(bytes(&mut Dice(4), &refuses));
        let turns = turns(&tokenizer, Reply::Tool).unwrap();
        let reply = |num_bytes: usize| [json!({"role": "tool", "content": "x".repeat(num_bytes)})];
        let mut trajectory = Trajectory::default();
        trajectory.push_sampled(tokenizer.eos_token_id().unwrap(), -1.0, 0);
        let before = trajectory.clone();
        assert!(!turns.append(&mut trajectory, &reply(1 << 20), 0, 100).unwrap());
        assert!(
            turns.append(&mut trajectory, &reply(1 << 20), 0, usize::MAX).is_err(),
            "where it could fit it is rendered"
        );
        assert!(!turns.append(&mut trajectory, &reply(3000), 0, 100).unwrap());
        assert_eq!(trajectory, before);
        assert!(turns.append(&mut trajectory, &reply(30), 0, 1000).unwrap());
    }

    /// Turns of random tokens, most of which are not reproduced by tokenizing their text. The trajectory contains all sampled tokens in place,
    /// and its text equals the template's rendering of the conversation.
    #[test]
    fn sampled_tokens_stay_unchanged_over_many_turns() {
        let num_trajectories: usize =
            std::env::var("COLO_GRPO_TRAJECTORIES").ok().and_then(|count| count.parse().ok()).unwrap_or(60);
        let (mut dice, mut num_other) = (Dice(7), 0);
        for number in 0..num_trajectories {
            let template = [CHATML, HEADERS, BRACKETS, THINKS][number % 4];
            let tokenizer = Arc::new(bytes(&mut dice, template));
            let turns = turns(&tokenizer, Reply::Tool).unwrap();
            let eos = tokenizer.eos_token_id().unwrap();
            let mut messages = vec![json!({"role": "user", "content": "go"})];
            let prompt = turns.render(messages.clone(), true).unwrap();
            let (mut trajectory, mut sampled) = (Trajectory::default(), Vec::new());
            for turn in 0..1 + dice.roll(32) {
                if turn > 0 {
                    let answer = json!({"role": "tool", "name": "f", "content": format!("answer {}", dice.roll(1000))});
                    assert!(turns.append(&mut trajectory, std::slice::from_ref(&answer), turn, usize::MAX).unwrap());
                    messages.push(answer);
                }
                let ids: Vec<u32> = (0..1 + dice.roll(12)).map(|_| dice.ascii_token(&tokenizer)).collect();
                let text = tokenizer.decode(&ids).unwrap();
                num_other += usize::from(tokenizer.encode(&text, false).unwrap() != ids);
                messages.push(json!({"role": "assistant", "content": text}));
                for id in ids.into_iter().chain([eos]) {
                    trajectory.push_sampled(id, -1.0, turn);
                    sampled.push(id);
                }
            }
            let kept = trajectory.token_ids.iter().zip(&trajectory.loss_mask).filter(|(_, is_sampled)| **is_sampled);
            assert!(kept.map(|(id, _)| *id).eq(sampled), "trajectory {number}");
            assert_eq!(trajectory.turns().len(), messages.len() / 2);
            let (whole, text) =
                (turns.render(messages, false).unwrap(), tokenizer.decode_all(&trajectory.token_ids).unwrap());
            assert!(whole.starts_with(&(prompt.clone() + &text)), "{whole}\nis not\n{prompt}{text}");
        }
        assert!(num_other > num_trajectories, "tokens that another rendering would have changed: {num_other}");
    }
}
