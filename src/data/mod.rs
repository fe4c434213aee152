//! Rows by path or by name, prompts, tokenizer, chat template. Knows nothing of tensors.
//!
//! A program sees of them prompts and their completions:
//!
//! ```
//! use std::sync::Arc;
//! use colo_grpo::data::{EnvironmentEnd, FinishReason, Prompt, RolloutGroup, RoutedExperts, Trajectory};
//!
//! let prompt = Prompt { id: 0, text: "2 + 3 =".to_owned(), token_ids: vec![5, 6], columns: Arc::default() };
//! let mut completion = Trajectory { reward: Some(1.0), ..Trajectory::default() };
//! completion.push_sampled(7, -0.5, 0); // token, log-probability, version of the weights
//! completion.finish_reason = Some(FinishReason::Eos);
//! completion.environment = Some(Arc::new(EnvironmentEnd { class: "Calculator".into(), ..EnvironmentEnd::default() }));
//! let experts: &RoutedExperts = &completion.routed_experts;
//! assert_eq!(experts.num_tokens(), 0, "no model with experts");
//!
//! let group = RolloutGroup { completions: vec![completion], ..RolloutGroup::new(prompt) };
//! assert_eq!(group.completions[0].token_ids, [7]);
//! ```

mod answers;
mod chat;
mod csv;
mod dataset;
mod date;
mod digest;
mod grammar;
pub(crate) mod hub;
mod messages;
mod numbers;
mod parquet;
mod prompt_text;
mod rows;
mod sampler;
mod schemas;
mod sft;
mod sources;
mod splits;
mod statics;
mod tokenizer;
mod tool_calls;
mod turns;

pub use crate::types::{EnvironmentEnd, FinishReason, Prompt, RolloutGroup, RoutedExperts, Trajectory};
#[doc(hidden)]
pub use chat::{ChatTemplate, Conversation, Message};
#[doc(hidden)]
pub use dataset::{Dataset, DatasetOptions};
#[doc(hidden)]
pub use grammar::{Grammar, GrammarCompiler, GrammarStart, GrammarState, TokenMask};
#[doc(hidden)]
pub use hub::{Hub, HubOptions, Repo};
pub(crate) use messages::{read_message, reasoning};
pub(crate) use numbers::check_numbers;
pub(crate) use parquet::check_schema;
#[doc(hidden)]
pub(crate) use prompt_text::RenderedPrompt;
#[doc(hidden)]
pub use sampler::{Curriculum, PromptSampler, SamplerState};
#[doc(hidden)]
pub use schemas::ToolSchemas;
#[doc(hidden)]
pub use sft::{SftDataset, SftExample};
#[doc(hidden)]
pub use sources::RowSources;
#[cfg(test)]
pub(crate) use tokenizer::ENCODED_BYTES;
pub(crate) use tokenizer::TEMPLATES_FOLDER;
#[doc(hidden)]
pub use tokenizer::Tokenizer;
pub(crate) use tool_calls::{ContentScan, open_thought};
#[doc(hidden)]
pub use tool_calls::{ToolCall, ToolCallParser};
#[doc(hidden)]
pub use turns::{Reply, TurnContext, TurnModel};

#[cfg(test)]
pub(crate) mod fixtures;
