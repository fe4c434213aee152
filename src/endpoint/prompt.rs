//! Texts and conversations to requests of the engine.

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

/// Limits and tokenizer of the served model.
#[derive(Debug, Clone)]
pub(super) struct ServedModel {
    /// The name that clients ask for.
    pub name: String,
    /// Names of the adapters beside it, which clients may ask for instead.
    pub adapters: Vec<String>,
    pub tokenizer: Arc<Tokenizer>,
    /// Longest prompt and completion together.
    pub max_sequence_length: usize,
    /// The engine's.
    pub grammars: Arc<GrammarCompiler>,
    /// The format of the model's tool calls; none leaves them in the text.
    pub tool_calls: Option<ToolCallParser>,
    /// Ids that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// How a request is sampled that does not say.
    pub sampling: SamplingParams,
}

impl ServedModel {
    /// A model whose tokens are bytes.
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

    /// Compiles the structure that a request asks for, so that the engine need not. It stays compiled while the result lives.
    pub fn grammar(&self, ask: &ApiRequest) -> Result<Option<Arc<Grammar>>, Refusal> {
        let compiled = ask.params.structure.as_ref().map(|structure| self.grammars.compile(structure)).transpose();
        compiled.map_err(|error| Refusal::new(400, error.to_string()))
    }

    /// The names that clients may ask for.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.name).chain(&self.adapters)
    }

    /// The adapter that a request names; `None` is the base model, also where it names nothing.
    pub fn adapter(&self, ask: &ApiRequest) -> Result<Option<usize>, Refusal> {
        let Some(name) = &ask.model else { return Ok(None) };
        self.check_name(name)?;
        Ok(self.adapters.iter().position(|adapter| adapter == name))
    }

    /// Refuses a name that nothing is served under.
    pub(super) fn check_name(&self, name: &str) -> Result<(), Refusal> {
        if self.names().any(|served| served == name) {
            return Ok(());
        }
        let served: Vec<_> = self.names().map(|name| format!("'{name}'")).collect();
        let message =
            format!("no model '{name}'; expected one of {} (--served_model_name, --adapter)", served.join(", "));
        Err(Refusal { status: 404, param: Some("model".to_owned()), code: None, message })
    }

    /// One request for each prompt, in their order. A prompt's number is its place in the request, so that with a seed it gets what
    /// `colo-grpo generate` samples for the same prompts.
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

    /// A text that cannot fit need not be tokenized.
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

/// The client's text is to blame: a template that does not render it, a tokenizer that has no token for it.
fn of_client(error: &Error, param: &str) -> Refusal {
    Refusal::of(param, error.to_string())
}
