//! Rows by path or by name, prompts, tokenizer, chat template. Knows nothing of tensors.

mod chat;
mod csv;
mod dataset;
mod date;
mod grammar;
pub mod hub;
mod messages;
mod numbers;
mod parquet;
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

pub use chat::{ChatTemplate, Conversation, Message};
pub use dataset::{Dataset, DatasetOptions};
pub use grammar::{Grammar, GrammarCompiler, GrammarState, TokenMask};
pub use hub::{Hub, HubOptions, Repo};
pub(crate) use messages::{read_message, reasoning};
pub(crate) use numbers::check_numbers;
pub(crate) use parquet::check_schema;
pub use sampler::{Curriculum, PromptSampler, SamplerState};
pub use schemas::ToolSchemas;
pub use sft::{SftDataset, SftExample};
pub use sources::RowSources;
#[cfg(test)]
pub(crate) use tokenizer::ENCODED_BYTES;
pub(crate) use tokenizer::TEMPLATES_FOLDER;
pub use tokenizer::Tokenizer;
pub(crate) use tool_calls::{ContentScan, open_thought};
pub use tool_calls::{ToolCall, ToolCallParser};
pub use turns::{Reply, TurnContext, TurnModel};

#[cfg(test)]
pub(crate) mod fixtures;
