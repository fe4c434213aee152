//! A conversation with the engine, message by message.

use std::sync::Arc;

use super::ask::ApiRequest;
use super::client::{EngineClient, RequestUpdate};
use super::prompt::ServedModel;
use super::refusal::Refusal;
use super::text::TextStream;
use crate::data::{Conversation, Message, Tokenizer};
use crate::error::Error;
use crate::rollout::RolloutEngine;
use crate::types::SamplingParams;

/// A conversation: its messages, and the sampling of the next answer.
#[derive(Debug)]
pub struct Dialogue {
    client: EngineClient,
    model: ServedModel,
    params: SamplingParams,
    /// Messages that a new conversation begins with.
    system: Vec<Message>,
    messages: Vec<Message>,
    num_answers: u64,
}

impl Dialogue {
    /// A conversation after the messages in `system`.
    pub fn new(
        client: EngineClient,
        tokenizer: Arc<Tokenizer>,
        engine: &RolloutEngine<'_>,
        params: SamplingParams,
        system: Vec<Message>,
    ) -> Self {
        let (max_sequence_length, grammars) = (engine.max_sequence_length(), engine.grammars());
        let model = ServedModel { name: String::new(), tokenizer, max_sequence_length, grammars };
        Self { client, model, params, messages: system.clone(), system, num_answers: 0 }
    }

    /// Begins a new conversation.
    pub fn reset(&mut self) {
        self.messages = self.system.clone();
    }

    /// Says something as the user; `on_text` gets the answer piece by piece. What is refused is not part of the conversation.
    ///
    /// # Errors
    /// A [`Refusal`] for a conversation that the model cannot take, such as one that is too long.
    pub fn say(&mut self, message: &str, mut on_text: impl FnMut(&str)) -> Result<(), Refusal> {
        self.messages.push(Message::user(message));
        let answer = self.answer(&mut on_text).inspect_err(|_| drop(self.messages.pop()))?;
        self.messages.push(Message { role: "assistant".to_owned(), content: answer });
        self.num_answers += 1;
        Ok(())
    }

    fn answer(&self, on_text: &mut dyn FnMut(&str)) -> Result<String, Refusal> {
        let failed = |error: Error| Refusal::new(500, error.to_string());
        let mut ask = ApiRequest::of_conversation(Conversation::of(&self.messages, true), self.params.clone());
        let [mut request] = <[_; 1]>::try_from(self.model.requests(&ask)?).expect("one prompt");
        let room = self.model.max_sequence_length - request.token_ids.len();
        ask.params.max_completion_length = self.params.max_completion_length.min(room);
        request.params = Arc::new(ask.params);
        request.prompt_id = self.num_answers; // another random key for every answer
        let mut ticket = self.client.submit(&[request])?;
        let mut text = TextStream::new(self.model.tokenizer.clone(), self.params.stop.clone());
        let mut answer = String::new();
        loop {
            let (new, is_last) = match ticket.wait() {
                Some(RequestUpdate::Token { token_id, .. }) => (text.push(token_id).map_err(failed)?, false),
                Some(RequestUpdate::Finished { .. }) => (text.finish().map_err(failed)?, true),
                Some(RequestUpdate::Refused(refusal)) => return Err(refusal),
                None => return Err(Refusal::new(500, "the engine failed")),
            };
            if !new.is_empty() {
                on_text(&new);
            }
            answer += &new;
            if is_last {
                return Ok(answer);
            }
        }
    }
}
