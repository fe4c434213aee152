//! One completion in the making.

use std::sync::Arc;

use super::stop::Detokenizer;
use crate::data::Tokenizer;
use crate::error::Result;
use crate::types::{Completion, FinishReason, SamplingParams, UnfinishedCompletion};

/// Where a sequence waits: in front are those that others wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Turn {
    /// Preempted, or about to compute the prompt for its begun group.
    First,
    /// Of a begun group.
    Begun,
    /// Of a group of which nothing is sampled yet.
    New,
}

/// A prompt and what has been sampled after it.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Index of its request; a group's sequences are neighbours in sample order.
    pub(super) group: usize,
    /// How its tokens are drawn.
    pub(super) params: Arc<SamplingParams>,
    pub(super) turn: Turn,
    /// Prompt, then completion.
    pub(super) token_ids: Vec<u32>,
    pub(super) prompt_len: usize,
    /// Prompt and completion at their longest.
    pub(super) max_len: usize,
    /// One per completion token.
    pub(super) rollout_logprobs: Vec<f32>,
    /// Blocks of its keys and values, in token order; empty while it waits.
    pub(super) block_table: Vec<u32>,
    /// Tokens that steps under way sample: part of the sequence, not known yet.
    pub(super) num_pending: usize,
    /// Tokens whose keys and values are in the cache, or will be by a step under way.
    pub(super) num_computed: usize,
    pub(super) finish_reason: Option<FinishReason>,
    pub(super) detokenizer: Detokenizer,
}

impl Sequence {
    pub(super) fn new(group: usize, params: Arc<SamplingParams>, prompt: &[u32], max_len: usize) -> Self {
        Self {
            group,
            params,
            turn: Turn::New,
            token_ids: prompt.to_vec(),
            prompt_len: prompt.len(),
            max_len,
            rollout_logprobs: Vec::new(),
            block_table: Vec::new(),
            num_pending: 0,
            num_computed: 0,
            finish_reason: None,
            detokenizer: Detokenizer::default(),
        }
    }

    /// Takes in what an earlier rollout has sampled of it.
    pub(super) fn resume(&mut self, completion: UnfinishedCompletion) {
        self.token_ids.extend(completion.token_ids);
        self.rollout_logprobs = completion.rollout_logprobs;
        self.finish_reason = completion.finish_reason.or((self.len() >= self.max_len).then_some(FinishReason::Length));
    }

    /// What has been sampled of it, for a later rollout to take in.
    pub(super) fn unfinished(&self) -> UnfinishedCompletion {
        UnfinishedCompletion {
            token_ids: self.completion().to_vec(),
            rollout_logprobs: self.rollout_logprobs.clone(),
            finish_reason: self.finish_reason,
        }
    }

    /// The completion, which has ended, with its text.
    pub(super) fn finished(&self, tokenizer: &Tokenizer) -> Result<Completion> {
        Ok(Completion {
            token_ids: self.completion().to_vec(),
            rollout_logprobs: self.rollout_logprobs.clone(),
            finish_reason: self.finish_reason.expect("a complete request has ended"),
            text: tokenizer.decode(self.completion())?,
            rewards: Vec::new(),
            reward: None,
            advantage: 0.0,
        })
    }

    /// The slot in the cache of the token at `position`, in blocks of `block_size`.
    pub(super) fn slot(&self, position: usize, block_size: usize) -> usize {
        self.block_table[position / block_size] as usize * block_size + position % block_size
    }

    /// Known tokens.
    pub(super) fn len(&self) -> usize {
        self.token_ids.len()
    }

    /// Known and pending tokens.
    pub(super) fn num_tokens(&self) -> usize {
        self.len() + self.num_pending
    }

    /// The token that ends it by its length is known, or pending.
    pub(super) fn is_full(&self) -> bool {
        self.num_tokens() >= self.max_len
    }

    pub(super) fn completion(&self) -> &[u32] {
        &self.token_ids[self.prompt_len..]
    }

    /// Nothing has been sampled yet, nor is being.
    pub(super) fn is_fresh(&self) -> bool {
        self.num_tokens() == self.prompt_len
    }
}
