//! An interactive conversation with the engine.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::ask::{ApiRequest, PromptSource};
use super::client::{EngineClient, RequestUpdate};
use super::prompt::ServedModel;
use super::refusal::Refusal;
use super::text::TextStream;
use crate::data::{Conversation, Message, Reply, Tokenizer, TurnContext};
use crate::error::Error;
use crate::rollout::RolloutEngine;
use crate::types::{SamplingParams, Trajectory};

/// An interactive conversation: its messages, and the sampling parameters of the next answer.
#[derive(Debug)]
pub struct Dialogue {
    client: EngineClient,
    model: ServedModel,
    params: SamplingParams,
    /// Messages at the start of a new conversation.
    system: Vec<Message>,
    messages: Vec<Message>,
    /// Computes the tokens between an answer and the next one; `None` if the chat template rewrites earlier turns.
    turns: Option<TurnContext>,
    tokens: Option<DialogueTokens>,
    num_answers: u64,
    /// Index of the adapter that answers; `None` is the base model.
    adapter: Option<usize>,
}

/// Token ids of a conversation: its first prompt, and all tokens after it.
#[derive(Debug, Clone)]
struct DialogueTokens {
    prompt: Vec<u32>,
    trajectory: Trajectory,
}

impl Dialogue {
    /// A conversation that begins with the messages in `system`, answered by the first of the available adapters.
    pub fn new(
        client: EngineClient,
        tokenizer: Arc<Tokenizer>,
        engine: &RolloutEngine<'_>,
        params: SamplingParams,
        system: Vec<Message>,
        adapters: Vec<String>,
    ) -> Self {
        let eos_token_ids = engine.eos_token_ids();
        let turns = TurnContext::probe(tokenizer.clone(), eos_token_ids, &Value::Null, &Map::new(), Reply::User).ok();
        let model = ServedModel {
            name: String::new(),
            adapters,
            tokenizer,
            max_sequence_length: engine.max_sequence_length(),
            grammars: engine.grammars(),
            tool_calls: None,
            eos_token_ids: eos_token_ids.to_vec(),
            sampling: SamplingParams::default(),
        };
        let adapter = (!model.adapters.is_empty()).then_some(0);
        Self { client, model, params, messages: system.clone(), system, turns, tokens: None, num_answers: 0, adapter }
    }

    /// Selects the adapter with this name, or the base model, for further answers of the same conversation.
    ///
    /// # Errors
    /// The available names.
    pub fn choose(&mut self, name: Option<&str>) -> Result<(), String> {
        let adapters = &self.model.adapters;
        self.adapter = match name {
            None => None,
            Some(name) => Some(adapters.iter().position(|adapter| adapter == name).ok_or_else(|| adapters.join(", "))?),
        };
        Ok(())
    }

    /// Begins a new conversation.
    pub fn reset(&mut self) {
        self.messages = self.system.clone();
        self.tokens = None;
    }

    /// Sends a user message; `on_text` receives the answer piece by piece. A rejected message is not added to the conversation.
    ///
    /// # Errors
    /// A [`Refusal`] if the conversation cannot be continued, for example because it is too long.
    pub fn say(&mut self, message: &str, mut on_text: impl FnMut(&str)) -> Result<(), Refusal> {
        self.messages.push(Message::user(message));
        let answer = self.answer(&mut on_text).inspect_err(|_| drop(self.messages.pop()))?;
        self.messages.push(Message::new("assistant", answer));
        self.num_answers += 1;
        Ok(())
    }

    fn answer(&mut self, on_text: &mut dyn FnMut(&str)) -> Result<String, Refusal> {
        let failed = |error: Error| Refusal::new(500, error.to_string());
        let tokens = self.tokens()?;
        let source = match &tokens {
            Some(tokens) => PromptSource::Ids([&tokens.prompt[..], &tokens.trajectory.token_ids].concat()),
            None => PromptSource::Conversation(Conversation::of(&self.messages, true)),
        };
        let mut ask = ApiRequest::of_source(source, self.params.clone());
        let [mut request] = <[_; 1]>::try_from(self.model.requests(&ask)?).expect("one prompt");
        let room = self.model.max_sequence_length - request.token_ids.len();
        ask.params.max_completion_length = self.params.max_completion_length.min(room);
        request.params = Arc::new(ask.params);
        request.adapter = self.adapter;
        request.prompt_id = self.num_answers; // another random key for every answer
        let first = || DialogueTokens { prompt: request.token_ids.clone(), trajectory: Trajectory::default() };
        let mut tokens = tokens.unwrap_or_else(first);
        let mut ticket = self.client.submit(&[request])?;
        let mut text = TextStream::new(self.model.tokenizer.clone(), self.params.stop.clone());
        let mut answer = String::new();
        loop {
            let (new, is_last) = match ticket.wait() {
                Some(RequestUpdate::Token { token_id, logprob, .. }) => {
                    tokens.trajectory.push_sampled(token_id, logprob, self.num_answers);
                    (text.push(token_id).map_err(failed)?, false)
                }
                Some(RequestUpdate::Finished { .. }) => (text.finish().map_err(failed)?, true),
                Some(RequestUpdate::Refused(refusal)) => return Err(refusal),
                None => return Err(Refusal::new(500, "the engine failed")),
            };
            if !new.is_empty() {
                on_text(&new);
            }
            answer += &new;
            if is_last {
                self.tokens = Some(tokens);
                return Ok(answer);
            }
        }
    }

    /// The tokens of the conversation so far, including those that the template writes after the last answer. `None` before the first answer, or if
    /// the
    /// template rewrites earlier turns.
    fn tokens(&self) -> Result<Option<DialogueTokens>, Refusal> {
        let (Some(turns), Some(tokens), Some(message)) = (&self.turns, &self.tokens, self.messages.last()) else {
            return Ok(None);
        };
        let mut tokens = tokens.clone();
        let message = json!({"role": message.role, "content": message.content});
        let refused = |error: Error| Refusal::of("messages", error.to_string());
        turns.append(&mut tokens.trajectory, &[message], self.num_answers, usize::MAX).map_err(refused)?;
        Ok(Some(tokens))
    }
}
