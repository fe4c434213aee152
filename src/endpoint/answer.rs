//! Completions in OpenAI's form, whole or as a stream of server-sent events.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use futures_core::Stream;
use serde_json::{Map, Value, json};

use super::ask::ApiRequest;
use super::client::{RequestHandle, RequestUpdate};
use super::refusal::Refusal;
use super::text::TextStream;
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::rollout::Request;
use crate::types::{FinishReason, TokenLogprob};

/// Most updates that become one chunk.
const MAX_UPDATES: usize = 256;

/// A request's answer in the making.
#[derive(Debug)]
pub(super) struct Answer {
    id: String,
    created: u64,
    model: String,
    is_chat: bool,
    logprobs: bool,
    return_token_ids: bool,
    include_usage: bool,
    tokenizer: Arc<Tokenizer>,
    prompts: Vec<Vec<u32>>,
    num_generations: usize,
    choices: Vec<Choice>,
    num_open: usize,
}

/// The part of one completion that is not sent yet.
#[derive(Debug)]
struct Choice {
    text: TextStream,
    /// Characters of the tokens so far.
    offset: usize,
    num_tokens: usize,
    has_role: bool,
    new: New,
}

/// Not sent yet.
#[derive(Debug, Default)]
struct New {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<ScoredToken>,
    reason: Option<FinishReason>,
}

#[derive(Debug)]
struct ScoredToken {
    token: String,
    logprob: f32,
    offset: usize,
    /// Most probable first.
    top: Vec<(String, f32)>,
}

impl Answer {
    pub fn new(ask: &ApiRequest, requests: &[Request], model: &str, tokenizer: &Arc<Tokenizer>, number: u64) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let num_generations = ask.params.num_generations;
        let choice = |_| Choice {
            text: TextStream::new(tokenizer.clone(), ask.params.stop.clone()),
            offset: 0,
            num_tokens: 0,
            has_role: false,
            new: New::default(),
        };
        let num_open = requests.len() * num_generations;
        Self {
            id: format!("{}-{created:x}-{number:x}", if ask.is_chat { "chatcmpl" } else { "cmpl" }),
            created,
            model: model.to_owned(),
            is_chat: ask.is_chat,
            logprobs: ask.logprobs,
            return_token_ids: ask.return_token_ids,
            include_usage: ask.include_usage,
            tokenizer: tokenizer.clone(),
            prompts: requests.iter().map(|request| request.token_ids.clone()).collect(),
            num_generations,
            choices: (0..num_open).map(choice).collect(),
            num_open,
        }
    }

    /// Waits for all completions and returns the whole answer.
    pub async fn whole(mut self, mut ticket: RequestHandle) -> Result<Value, Refusal> {
        while self.num_open > 0 {
            let update = ticket.next().await.ok_or_else(gone)?;
            self.take(update)?;
        }
        let choices = (0..self.choices.len()).map(|index| self.choice(index, false)).collect::<Vec<_>>();
        let mut whole = self.envelope(choices, if self.is_chat { "chat.completion" } else { "text_completion" });
        whole["usage"] = self.usage();
        if self.is_chat && self.return_token_ids {
            whole["prompt_token_ids"] = json!(self.prompts[0]);
        }
        Ok(whole)
    }

    fn take(&mut self, update: RequestUpdate) -> Result<(), Refusal> {
        let failed = |error: Error| Refusal::new(500, error.to_string());
        match update {
            RequestUpdate::Token { choice, token_id, logprob, top_logprobs } => {
                let scored = self.logprobs.then(|| self.scored(token_id, logprob, &top_logprobs));
                let scored = scored.transpose().map_err(failed)?;
                let choice = &mut self.choices[choice];
                choice.num_tokens += 1;
                choice.new.text += &choice.text.push(token_id).map_err(failed)?;
                choice.new.token_ids.push(token_id);
                if let Some(scored) = scored {
                    let offset = choice.offset;
                    choice.offset += scored.token.chars().count();
                    choice.new.logprobs.push(ScoredToken { offset, ..scored });
                }
            }
            RequestUpdate::Finished { choice, reason } => {
                let choice = &mut self.choices[choice];
                choice.new.text += &choice.text.finish().map_err(failed)?;
                choice.new.reason = Some(reason);
                self.num_open -= 1;
            }
            RequestUpdate::Refused(refusal) => return Err(refusal),
        }
        Ok(())
    }

    fn scored(&self, token_id: u32, logprob: f32, top: &[TokenLogprob]) -> Result<ScoredToken> {
        let other = |other: &TokenLogprob| Ok((self.token_text(other.token_id)?, other.logprob));
        let top = top.iter().map(other).collect::<Result<_>>()?;
        Ok(ScoredToken { token: self.token_text(token_id)?, logprob, offset: 0, top })
    }

    /// A token alone; a special one by its name.
    fn token_text(&self, id: u32) -> Result<String> {
        let text = self.tokenizer.decode(&[id])?;
        Ok(if text.is_empty() { self.tokenizer.token(id).unwrap_or_default() } else { text })
    }

    /// The events of all that is new.
    fn chunks(&mut self) -> String {
        let kind = if self.is_chat { "chat.completion.chunk" } else { "text_completion" };
        let mut events = String::new();
        for index in 0..self.choices.len() {
            let New { text, token_ids, reason, .. } = &self.choices[index].new;
            let is_shown = !text.is_empty() || reason.is_some();
            if !is_shown && (token_ids.is_empty() || !(self.logprobs || self.return_token_ids)) {
                continue;
            }
            let is_first = !self.choices[index].has_role;
            let choice = self.choice(index, true);
            let mut chunk = self.envelope(vec![choice], kind);
            if self.include_usage {
                chunk["usage"] = Value::Null;
            }
            if self.is_chat && self.return_token_ids && is_first && index == 0 {
                chunk["prompt_token_ids"] = json!(self.prompts[0]);
            }
            events += &event(&chunk);
        }
        if self.num_open == 0 {
            if self.include_usage {
                let mut last = self.envelope(Vec::new(), kind);
                last["usage"] = self.usage();
                events += &event(&last);
            }
            events += "data: [DONE]\n\n";
        }
        events
    }

    fn envelope(&self, choices: Vec<Value>, kind: &str) -> Value {
        json!({"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices})
    }

    fn usage(&self) -> Value {
        let prompt_tokens: usize = self.prompts.iter().map(Vec::len).sum();
        let completion_tokens: usize = self.choices.iter().map(|choice| choice.num_tokens).sum();
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        })
    }

    /// The new part of a choice, which counts as sent.
    fn choice(&mut self, index: usize, is_chunk: bool) -> Value {
        let choice = &mut self.choices[index];
        let is_first = !std::mem::replace(&mut choice.has_role, true);
        let New { text, token_ids, logprobs, reason } = std::mem::take(&mut choice.new);
        let reason = reason.map(|reason| if reason == FinishReason::Length { "length" } else { "stop" });
        let logprobs = self.logprobs.then(|| self.logprobs_json(&logprobs));
        let mut json = json!({"index": index, "logprobs": logprobs, "finish_reason": reason});
        match (self.is_chat, is_chunk) {
            (false, _) => json["text"] = text.into(),
            (true, false) => json["message"] = json!({"role": "assistant", "content": text}),
            (true, true) => {
                let mut delta = Map::from_iter([("content".to_owned(), Value::from(text))]);
                if is_first {
                    delta.insert("role".to_owned(), "assistant".into());
                }
                json["delta"] = delta.into();
            }
        }
        if self.return_token_ids {
            json["token_ids"] = token_ids.into();
            if !self.is_chat && is_first {
                json["prompt_token_ids"] = json!(self.prompts[index / self.num_generations]);
            }
        }
        json
    }

    fn logprobs_json(&self, logprobs: &[ScoredToken]) -> Value {
        if !self.is_chat {
            let of = |value: &dyn Fn(&ScoredToken) -> Value| logprobs.iter().map(value).collect::<Vec<_>>();
            let top = |token: &ScoredToken| {
                let sampled = std::iter::once((&token.token, token.logprob)); // is among them, however improbable
                let all = token.top.iter().map(|(text, logprob)| (text, *logprob)).rev();
                Value::from(
                    sampled.chain(all).map(|(text, logprob)| (text.clone(), json!(logprob))).collect::<Map<_, _>>(),
                )
            };
            let has_top = logprobs.iter().any(|token| !token.top.is_empty());
            return json!({
                "tokens": of(&|token| json!(token.token)),
                "token_logprobs": of(&|token| json!(token.logprob)),
                "text_offset": of(&|token| json!(token.offset)),
                "top_logprobs": has_top.then(|| of(&top)),
            });
        }
        let alone = |token: &str, logprob: f32| {
            let bytes = (!token.contains('\u{FFFD}')).then_some(token.as_bytes());
            json!({"token": token, "logprob": logprob, "bytes": bytes})
        };
        let token = |scored: &ScoredToken| {
            let mut json = alone(&scored.token, scored.logprob);
            json["top_logprobs"] = scored.top.iter().map(|(token, logprob)| alone(token, *logprob)).collect();
            json
        };
        json!({"content": logprobs.iter().map(token).collect::<Vec<_>>()})
    }
}

fn event(json: &Value) -> String {
    format!("data: {json}\n\n")
}

fn gone() -> Refusal {
    Refusal::new(500, "the engine failed; the server's log has the cause")
}

/// An answer that is sent as it comes. Dropping it ends the request.
#[derive(Debug)]
pub(super) struct Events {
    answer: Answer,
    ticket: RequestHandle,
    /// Read before the status was sent.
    first: Option<RequestUpdate>,
    is_over: bool,
}

impl Events {
    /// Waits for the first update, so that a refusal has a status of its own.
    pub async fn open(answer: Answer, mut ticket: RequestHandle) -> Result<Self, Refusal> {
        match ticket.next().await {
            Some(RequestUpdate::Refused(refusal)) => Err(refusal),
            Some(first) => Ok(Self { answer, ticket, first: Some(first), is_over: false }),
            None => Err(gone()),
        }
    }

    fn take_ready(&mut self, first: RequestUpdate) -> Result<(), Refusal> {
        self.answer.take(first)?;
        for _ in 0..MAX_UPDATES {
            match self.ticket.ready() {
                Some(update) => self.answer.take(update)?,
                None => break,
            }
        }
        Ok(())
    }
}

impl Stream for Events {
    type Item = std::result::Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if self.is_over {
                return Poll::Ready(None);
            }
            let update = match self.first.take() {
                Some(first) => Some(first),
                None => ready!(self.ticket.poll(cx)),
            };
            let taken = update.ok_or_else(gone).and_then(|update| self.take_ready(update));
            let chunks = match taken {
                Ok(()) => self.answer.chunks(),
                Err(refusal) => {
                    self.is_over = true;
                    event(&refusal.json())
                }
            };
            self.is_over |= self.answer.num_open == 0;
            if !chunks.is_empty() {
                return Poll::Ready(Some(Ok(Bytes::from(chunks))));
            }
        }
    }
}
