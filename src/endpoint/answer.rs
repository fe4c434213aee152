//! Responses with completions in OpenAI's format, complete or in chunks.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::ask::ApiRequest;
use super::calls::MessageStream;
use super::client::{RequestHandle, RequestUpdate};
use super::episodes::TurnRecorder;
use super::logprobs::{ScoredToken, of_chat, of_text};
use super::prompt::ServedModel;
use super::refusal::Refusal;
use super::text::TextStream;
use crate::data::{Tokenizer, open_thought};
use crate::error::{Error, Result};
use crate::rollout::Request;
use crate::types::{FinishReason, TokenLogprob};

/// A response that is being generated.
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
    /// Records the response if it is a turn of an episode.
    recorder: Option<TurnRecorder>,
}

/// One completion (choice) of a response, with the part that is not sent yet.
#[derive(Debug)]
struct Choice {
    text: TextStream,
    /// Parses tool calls, if the response may contain them.
    message: Option<MessageStream>,
    /// Number of characters of the tokens so far.
    offset: usize,
    num_tokens: usize,
    has_role: bool,
    /// The whole text so far.
    said: String,
    new: New,
}

/// The part of a choice that is not sent yet.
#[derive(Debug, Default)]
struct New {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<ScoredToken>,
    calls: Vec<Value>,
    reason: Option<FinishReason>,
}

impl Answer {
    pub fn new(ask: &ApiRequest, requests: &[Request], model: &ServedModel, number: u64) -> Result<Self, Refusal> {
        let tokenizer = &model.tokenizer;
        let parser = model.tool_calls.filter(|_| !ask.tools().is_null());
        // Calls and thoughts of some models begin with special tokens.
        let has_special = parser.is_some_and(|parser| parser.marks().any(|mark| tokenizer.is_special(mark)));
        let text = || {
            let text = TextStream::new(tokenizer.clone(), ask.params.stop.clone());
            if has_special { text.with_special_tokens(model.eos_token_ids.clone()) } else { text }
        };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let num_generations = ask.params.num_generations;
        let prompts: Vec<Vec<u32>> = requests.iter().map(Request::context).collect();
        let thought = |prompt: &Vec<u32>| parser.map_or(Ok(None), |_| open_thought(tokenizer, prompt));
        let thoughts = prompts.iter().map(thought).collect::<Result<Vec<_>>>();
        let thoughts = thoughts.map_err(|error| Refusal::new(500, error.to_string()))?;
        let choice = |index| Choice {
            text: text(),
            message: parser
                .map(|parser| MessageStream::new(parser, ask.tools().clone(), thoughts[index / num_generations])),
            offset: 0,
            num_tokens: 0,
            has_role: false,
            said: String::new(),
            new: New::default(),
        };
        let num_open = requests.len() * num_generations;
        Ok(Self {
            id: format!("{}-{created:x}-{number:x}", if ask.is_chat { "chatcmpl" } else { "cmpl" }),
            created,
            model: ask.model.clone().unwrap_or_else(|| model.name.clone()),
            is_chat: ask.is_chat,
            logprobs: ask.logprobs,
            return_token_ids: ask.return_token_ids,
            include_usage: ask.include_usage,
            tokenizer: tokenizer.clone(),
            prompts,
            num_generations,
            choices: (0..num_open).map(choice).collect(),
            num_open,
            recorder: None,
        })
    }

    /// Records the response with `recorder` before its end is sent.
    pub fn recorded_by(self, recorder: Option<TurnRecorder>) -> Self {
        Self { recorder, ..self }
    }

    /// Waits for all completions and returns the complete response.
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

    pub fn take(&mut self, update: RequestUpdate) -> Result<(), Refusal> {
        let failed = |error: Error| Refusal::new(500, error.to_string());
        match update {
            RequestUpdate::Token { choice, token_id, logprob, top_logprobs } => {
                let choice = &mut self.choices[choice];
                if self.logprobs {
                    let token = TokenLogprob { token_id, logprob };
                    let scored = ScoredToken::new(&token, &top_logprobs, &self.tokenizer, &mut choice.offset);
                    choice.new.logprobs.push(scored.map_err(failed)?);
                }
                choice.num_tokens += 1;
                let text = choice.text.push(token_id).map_err(failed)?;
                let text = choice.message.as_mut().map_or(text.clone(), |message| message.push(&text));
                choice.said += &text;
                choice.new.text += &text;
                choice.new.token_ids.push(token_id);
            }
            RequestUpdate::Finished { choice, reason, trajectory } => {
                let choice = &mut self.choices[choice];
                let mut text = choice.text.finish().map_err(failed)?;
                if let Some(message) = &mut choice.message {
                    text = message.push(&text);
                    let (rest, calls) = message.finish();
                    text += &rest;
                    choice.new.calls = calls;
                }
                choice.said += &text;
                choice.new.text += &text;
                choice.new.reason = Some(reason);
                if let Some(recorder) = self.recorder.take() {
                    recorder.record(*trajectory, message(choice.said.clone(), choice.new.calls.clone()));
                }
                self.num_open -= 1;
            }
            RequestUpdate::Refused(refusal) => return Err(refusal),
        }
        Ok(())
    }

    /// Whether all completions have ended.
    pub fn is_over(&self) -> bool {
        self.num_open == 0
    }

    /// The server-sent events with everything that is new.
    pub fn chunks(&mut self) -> String {
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

    /// The new part of a choice, which is then considered sent.
    fn choice(&mut self, index: usize, is_chunk: bool) -> Value {
        let choice = &mut self.choices[index];
        let is_first = !std::mem::replace(&mut choice.has_role, true);
        let New { text, token_ids, logprobs, calls, reason } = std::mem::take(&mut choice.new);
        let reason = reason.map(|reason| match reason {
            FinishReason::Length => "length",
            _ if !calls.is_empty() => "tool_calls",
            _ => "stop",
        });
        let logprobs = self.logprobs.then(|| if self.is_chat { of_chat(&logprobs) } else { of_text(&logprobs) });
        let mut json = json!({"index": index, "logprobs": logprobs, "finish_reason": reason});
        if self.is_chat {
            let (name, message) =
                if is_chunk { ("delta", delta(text, calls, is_first)) } else { ("message", message(text, calls)) };
            json[name] = message;
        } else {
            json["text"] = text.into();
        }
        if self.return_token_ids {
            json["token_ids"] = token_ids.into();
            if !self.is_chat && is_first {
                json["prompt_token_ids"] = json!(self.prompts[index / self.num_generations]);
            }
        }
        json
    }
}

/// An assistant's message; its content is null if it consists only of tool calls.
fn message(text: String, calls: Vec<Value>) -> Value {
    match calls.is_empty() {
        true => json!({"role": "assistant", "content": text}),
        false => {
            json!({"role": "assistant", "content": Some(text).filter(|text| !text.is_empty()), "tool_calls": calls})
        }
    }
}

/// The new part of a message, as the `delta` of a chunk.
fn delta(text: String, calls: Vec<Value>, is_first: bool) -> Value {
    let mut delta = Map::from_iter([("content".to_owned(), Value::from(text))]);
    if is_first {
        delta.insert("role".to_owned(), "assistant".into());
    }
    let numbered = calls.into_iter().enumerate().map(|(index, mut call)| {
        call["index"] = index.into();
        call
    });
    let calls: Vec<Value> = numbered.collect();
    if !calls.is_empty() {
        delta.insert("tool_calls".to_owned(), calls.into());
    }
    delta.into()
}

/// A server-sent event.
pub(super) fn event(json: &Value) -> String {
    format!("data: {json}\n\n")
}

/// The error for clients after the engine has ended.
pub(super) fn gone() -> Refusal {
    Refusal::new(500, "the engine failed; the server's log has the cause")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{GrammarCompiler, ToolCallParser};
    use crate::endpoint::text::tests::bytes;

    fn answered(text: &str, reason: FinishReason, tools: &Value, is_chunk: bool) -> Value {
        behind("go", text, reason, tools, is_chunk)
    }

    /// The last choice of a response with one token per byte.
    fn behind(prompt: &str, text: &str, reason: FinishReason, tools: &Value, is_chunk: bool) -> Value {
        let tokenizer = bytes();
        let model = ServedModel {
            name: "model".to_owned(),
            adapters: Vec::new(),
            grammars: Arc::new(GrammarCompiler::new(tokenizer.clone(), vec![0])),
            tokenizer,
            max_sequence_length: 999,
            tool_calls: Some(ToolCallParser::Hermes),
            eos_token_ids: vec![0],
            sampling: crate::types::SamplingParams::default(),
        };
        let body = json!({"messages": [{"role": "user", "content": "a"}], "tools": tools});
        let ask = ApiRequest::read(body.to_string().as_bytes(), true).unwrap();
        let params = Arc::new(ask.params.clone());
        let request = Request {
            prompt_id: 0,
            token_ids: prompt.bytes().map(u32::from).collect(),
            first_step: 0,
            first_sample: 0,
            params,
            begun: Vec::new(),
            adapter: None,
        };
        let mut answer = Answer::new(&ask, &[request], &model, 0).unwrap();
        for byte in text.bytes() {
            let (token_id, top_logprobs) = (byte.into(), Vec::new());
            answer.take(RequestUpdate::Token { choice: 0, token_id, logprob: -1.0, top_logprobs }).unwrap();
        }
        answer.take(RequestUpdate::Finished { choice: 0, reason, trajectory: Box::default() }).unwrap();
        answer.choice(0, is_chunk)
    }

    /// Applies whether the prompt or the model opened the thought.
    #[test]
    fn tool_calls_inside_reasoning_stay_in_the_text() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        for (prompt, open) in [("go <think>\n", ""), ("<think></think>", "<think>"), ("go", "<think>\n")] {
            for is_chunk in [false, true] {
                let key = if is_chunk { "delta" } else { "message" };
                let answered = |text: &str| behind(prompt, text, FinishReason::Eos, &tools, is_chunk);
                let thought = format!("{open}I could {call}");
                let only = answered(&thought);
                assert_eq!((&only[key]["content"], &only["finish_reason"]), (&json!(thought), &json!("stop")));
                let both = answered(&format!("{thought}</think>{call}"));
                assert_eq!(
                    (&both[key]["content"], &both["finish_reason"]),
                    (&json!(thought + "</think>"), &json!("tool_calls"))
                );
                assert_eq!(both[key]["tool_calls"].as_array().unwrap().len(), 1);
            }
        }
    }

    #[test]
    fn tool_calls_are_removed_from_the_answer_text() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let text = "So:<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"é\"}}</tool_call>";
        let whole = answered(text, FinishReason::Eos, &tools, false);
        assert_eq!((&whole["message"]["content"], &whole["finish_reason"]), (&json!("So:"), &json!("tool_calls")));
        let call = &whole["message"]["tool_calls"][0];
        assert_eq!(call["function"], json!({"name": "f", "arguments": "{\"x\":\"é\"}"}));
        assert!(answered(&text[3..], FinishReason::Eos, &tools, false)["message"]["content"].is_null());
        let chunk = answered(text, FinishReason::Eos, &tools, true);
        assert_eq!((&chunk["delta"]["content"], &chunk["delta"]["tool_calls"][0]["index"]), (&json!("So:"), &json!(0)));
        // A call that the length limit cuts off, and a request without tools.
        let cut = answered(&text[..40], FinishReason::Length, &tools, false);
        assert_eq!((&cut["message"]["content"], &cut["finish_reason"]), (&json!(text[..40]), &json!("length")));
        let plain = answered(text, FinishReason::Eos, &Value::Null, false);
        assert_eq!((&plain["message"]["content"], &plain["finish_reason"]), (&json!(text), &json!("stop")));
    }
}
