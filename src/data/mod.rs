//! Prompts, tokenizer, chat template. Knows nothing of tensors.

mod chat;
mod dataset;
mod date;
mod parquet;
mod rows;
mod sampler;
mod sft;
mod tokenizer;

pub use chat::{ChatTemplate, Message};
pub use dataset::{Dataset, DatasetCounts, DatasetOptions};
pub(crate) use parquet::check_schema;
pub use sampler::{PromptSampler, SamplerState};
pub use sft::{SftDataset, SftExample};
pub use tokenizer::Tokenizer;

#[cfg(test)]
mod fixtures;
