//! One completion in the making.

use super::stop::Detokenizer;
use crate::types::FinishReason;

/// A prompt and what has been sampled after it.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Index of its request; a group's sequences are neighbours in sample order.
    pub(super) group: usize,
    /// Prompt, then completion.
    pub(super) token_ids: Vec<u32>,
    pub(super) prompt_len: usize,
    /// One per completion token.
    pub(super) rollout_logprobs: Vec<f32>,
    /// Blocks of its keys and values, in token order; empty while it waits.
    pub(super) block_table: Vec<u32>,
    /// Tokens whose keys and values are in the cache.
    pub(super) num_computed: usize,
    pub(super) finish_reason: Option<FinishReason>,
    pub(super) detokenizer: Detokenizer,
}

impl Sequence {
    pub(super) fn new(group: usize, prompt: &[u32]) -> Self {
        Self {
            group,
            token_ids: prompt.to_vec(),
            prompt_len: prompt.len(),
            rollout_logprobs: Vec::new(),
            block_table: Vec::new(),
            num_computed: 0,
            finish_reason: None,
            detokenizer: Detokenizer::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.token_ids.len()
    }

    pub(super) fn completion(&self) -> &[u32] {
        &self.token_ids[self.prompt_len..]
    }

    /// Nothing has been sampled yet.
    pub(super) fn is_fresh(&self) -> bool {
        self.len() == self.prompt_len
    }
}
