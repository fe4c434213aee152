//! Converts texts and conversations to engine requests.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::ask::{ApiRequest, PromptSource};
use super::refusal::Refusal;
#[cfg(test)]
use crate::data::fixtures::{Dice, bytes};
use crate::data::{Grammar, GrammarCompiler, Tokenizer, ToolCallParser};
use crate::error::Error;
use crate::rollout::Request;
use crate::types::SamplingParams;

/// Tokenizer, limits and defaults of the served model.
#[derive(Debug, Clone)]
pub(super) struct ServedModel {
    /// The name under which clients request the model.
    pub name: String,
    /// Names of adapters that clients may request instead of the model.
    pub adapters: Vec<String>,
    pub tokenizer: Arc<Tokenizer>,
    /// Largest number of tokens of prompt and completion together.
    pub max_sequence_length: usize,
    /// The engine's grammar compiler.
    pub grammars: Arc<GrammarCompiler>,
    /// The format of the model's tool calls; `None` leaves them in the text.
    pub tool_calls: Option<ToolCallParser>,
    /// Ids that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Default sampling parameters of requests.
    pub sampling: SamplingParams,
}

impl ServedModel {
    /// A model with one token per byte.
    #[cfg(test)]
    pub fn of_bytes(name: &str, template: &str) -> Self {
        let tokenizer = Arc::new(bytes(&mut Dice(3), template));
        let eos_token_ids = vec![tokenizer.eos_token_id().unwrap()];
        Self {
            name: name.to_owned(),
            adapters: Vec::new(),
            grammars: Arc::new(GrammarCompiler::new(Arc::clone(&tokenizer), eos_token_ids.clone())),
            tokenizer,
            max_sequence_length: 999,
            tool_calls: None,
            eos_token_ids,
            sampling: SamplingParams::default(),
        }
    }

    /// Compiles the structure that a request requires, before it reaches the engine. The grammar stays in the compiler's cache while the result
    /// exists.
    pub fn grammar(&self, ask: &ApiRequest) -> Result<Option<Arc<Grammar>>, Refusal> {
        let compiled = ask.params.structure.as_ref().map(|structure| self.grammars.compile(structure)).transpose();
        compiled.map_err(|error| Refusal::new(400, error.to_string()))
    }

    /// All names that clients may request.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.name).chain(&self.adapters)
    }

    /// Index of the adapter that a request names; `None` for the base model, also if the request names none.
    pub fn adapter(&self, ask: &ApiRequest) -> Result<Option<usize>, Refusal> {
        let Some(name) = &ask.model else { return Ok(None) };
        self.check_name(name)?;
        Ok(self.adapters.iter().position(|adapter| adapter == name))
    }

    /// Returns an error if no model or adapter has this name.
    pub(super) fn check_name(&self, name: &str) -> Result<(), Refusal> {
        if self.names().any(|served| served == name) {
            return Ok(());
        }
        let served: Vec<_> = self.names().map(|name| format!("'{name}'")).collect();
        let message =
            format!("no model '{name}'; expected one of {} (--served_model_name, --adapter)", served.join(", "));
        Err(Refusal { status: 404, param: Some("model".to_owned()), code: None, message })
    }

    /// Converts a request to one engine request per prompt, in order. A prompt's number is its index in the request, so that with a seed the results
    /// equal those of `colo-grpo generate` for the same prompts.
    pub fn requests(&self, ask: &ApiRequest) -> Result<Vec<Request>, Refusal> {
        let adapter = self.adapter(ask)?;
        let seed = if ask.has_seed { ask.params.seed } else { RandomState::new().hash_one(0) };
        let request = |(index, source): (usize, &PromptSource)| {
            let token_ids = self.token_ids(source)?;
            let params = SamplingParams {
                max_completion_length: self.max_tokens(token_ids.len(), ask.max_tokens)?,
                seed,
                ..ask.params.clone()
            };
            let params = Arc::new(params);
            Ok(Request {
                prompt_id: index as u64,
                token_ids,
                first_step: 0,
                first_sample: 0,
                params,
                begun: Vec::new(),
                adapter,
            })
        };
        ask.prompts.iter().enumerate().map(request).collect()
    }

    pub fn token_ids(&self, source: &PromptSource) -> Result<Vec<u32>, Refusal> {
        let rendered;
        let (text, is_rendered) = match source {
            PromptSource::Ids(ids) => return Ok(ids.clone()),
            PromptSource::Text(text) => (text, false),
            PromptSource::Conversation(conversation) => {
                let messages = conversation.messages.iter();
                let num_bytes: usize = messages.map(|message| message["content"].as_str().map_or(0, str::len)).sum();
                self.check_bytes(num_bytes, "messages")?;
                rendered =
                    self.tokenizer.converse(conversation.clone()).map_err(|error| of_client(&error, "messages"))?;
                (&rendered, true)
            }
        };
        let param = if is_rendered { "messages" } else { "prompt" };
        if self.tokenizer.exceeds(text, self.max_sequence_length).map_err(|error| of_client(&error, param))? {
            return Err(self.too_long(text.len(), param));
        }
        self.tokenizer.encode(text, !is_rendered).map_err(|error| of_client(&error, param))
    }

    /// Rejects a text that is too long by its size in bytes, without tokenizing it.
    fn check_bytes(&self, num_bytes: usize, param: &str) -> Result<(), Refusal> {
        if num_bytes <= self.tokenizer.max_bytes(self.max_sequence_length) {
            return Ok(());
        }
        Err(self.too_long(num_bytes, param))
    }

    fn too_long(&self, num_bytes: usize, param: &str) -> Refusal {
        let max = self.max_sequence_length;
        Refusal::of_length(
            param,
            format!("a prompt of {num_bytes} bytes is longer than the maximum context length of {max} tokens"),
        )
    }

    fn max_tokens(&self, prompt_len: usize, asked: Option<usize>) -> Result<usize, Refusal> {
        let max = self.max_sequence_length;
        let expected = format!("expected 1 to {} tokens, got {prompt_len}", max - 1);
        if prompt_len == 0 {
            return Err(Refusal::of("prompt", expected));
        }
        if prompt_len >= max {
            let message = format!("{expected}: prompt and answer share the maximum context length of {max} tokens");
            return Err(Refusal::of_length("prompt", message));
        }
        match asked.unwrap_or(max - prompt_len) {
            0 => Err(Refusal::of("max_tokens", "expected at least 1")),
            asked if asked > max - prompt_len => {
                let message = format!(
                    "max_tokens = {asked} after a prompt of {prompt_len} tokens exceeds the maximum context length of \
                     {max} tokens; lower max_tokens"
                );
                Err(Refusal::of_length("max_tokens", message))
            }
            asked => Ok(asked),
        }
    }
}

/// Converts an error caused by the client's text (it cannot be rendered or tokenized) to a refusal.
fn of_client(error: &Error, param: &str) -> Refusal {
    Refusal::of(param, error.to_string())
}
