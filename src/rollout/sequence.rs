//! The state of one completion while it is sampled.

use std::sync::Arc;

use super::detokenizer::Detokenizer;
use crate::data::{Grammar, GrammarStart, TokenMask};
use crate::types::{FinishReason, RoutedExperts, SamplingParams, Trajectory};

/// Priority of a waiting sequence; first are those that others wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum QueuePriority {
    /// The sequence was preempted, or is about to compute the prompt for its partly sampled group.
    First,
    /// The sequence belongs to a group that is partly sampled.
    Begun,
    /// The sequence belongs to a group with no sampled tokens.
    New,
}

/// A prompt and the tokens that have been sampled after it.
#[derive(Debug)]
pub(super) struct EngineSequence {
    /// Index of the request. The sequences of a group are contiguous, in sample order.
    pub(super) group: usize,
    /// How the tokens are sampled.
    pub(super) params: Arc<SamplingParams>,
    /// Index of the LoRA adapter, if requests choose among several.
    pub(super) adapter: Option<usize>,
    pub(super) turn: QueuePriority,
    /// Token ids of the prompt, then of the completion.
    pub(super) token_ids: Vec<u32>,
    pub(super) prompt_len: usize,
    /// Maximum length of prompt and completion together.
    pub(super) max_len: usize,
    /// Log-probability of each completion token. The next two fields have one entry per completion token, too.
    pub(super) rollout_logprobs: Vec<f32>,
    pub(super) loss_mask: Vec<bool>,
    pub(super) weight_versions: Vec<u64>,
    /// Experts of the first tokens, for a model with experts.
    pub(super) routed_experts: RoutedExperts,
    /// KV blocks in token order; empty while the sequence waits.
    pub(super) block_table: Vec<u32>,
    /// State page while the sequence has blocks; `None` for a model without states.
    pub(super) state_page: Option<u32>,
    /// Number of tokens up to the end of the newest turn if context follows it, else 0.
    pub(super) turn_end: usize,
    /// Number of tokens that were computed before, and that a prefill computes again.
    pub(super) num_known: usize,
    /// Number of tokens that steps under way sample. They count as part of the sequence, but their values are not known yet.
    pub(super) num_pending: usize,
    /// Number of the newest step that samples for this sequence.
    pub(super) last_step: usize,
    /// Number of tokens whose keys and values are in the cache, or will be after the steps under way.
    pub(super) num_computed: usize,
    /// Number of these tokens that the states include, or will include. The others were draft tokens.
    pub(super) num_in_state: usize,
    pub(super) finish_reason: Option<FinishReason>,
    pub(super) detokenizer: Detokenizer,
    /// Position in the grammar of its structured output, with the tokens that are allowed next.
    grammar: Option<GrammarStart>,
}

impl EngineSequence {
    pub(super) fn new(group: usize, params: Arc<SamplingParams>, prompt: &[u32], max_len: usize) -> Self {
        Self {
            group,
            params,
            adapter: None,
            turn: QueuePriority::New,
            token_ids: prompt.to_vec(),
            prompt_len: prompt.len(),
            max_len,
            rollout_logprobs: Vec::new(),
            loss_mask: Vec::new(),
            weight_versions: Vec::new(),
            routed_experts: RoutedExperts::default(),
            block_table: Vec::new(),
            state_page: None,
            turn_end: 0,
            num_known: 0,
            num_pending: 0,
            last_step: 0,
            num_computed: 0,
            num_in_state: 0,
            finish_reason: None,
            detokenizer: Detokenizer::default(),
            grammar: None,
        }
    }

    /// Follows a grammar from its beginning.
    pub(super) fn follow(&mut self, grammar: &Arc<Grammar>) {
        self.grammar = Some(grammar.begin());
    }

    /// The tokens that are allowed next; `None` if all are.
    pub(super) fn allowed(&self) -> Option<&TokenMask> {
        self.grammar.as_ref().map(|grammar| &grammar.allowed)
    }

    /// Advances the grammar by the newest token.
    ///
    /// # Errors
    /// The reason why the grammar cannot advance.
    pub(super) fn advance_grammar(&mut self) -> Result<(), String> {
        if let (Some(GrammarStart { state, allowed }), Some(&token_id)) = (&mut self.grammar, self.token_ids.last()) {
            *allowed = state.advance(token_id)?;
        }
        Ok(())
    }

    /// Restores the tokens that an earlier rollout sampled.
    pub(super) fn resume(&mut self, begun: Trajectory) {
        let context_end = begun.loss_mask.iter().rposition(|is_sampled| !is_sampled).map_or(0, |at| at + 1);
        self.detokenizer = Detokenizer::after(context_end);
        let turn_end = begun.loss_mask.iter().rposition(|is_sampled| *is_sampled).map_or(0, |at| at + 1);
        let ends_with_context = turn_end > 0 && turn_end < begun.loss_mask.len();
        self.turn_end = if ends_with_context { self.prompt_len + turn_end } else { 0 };
        self.num_known = match (begun.token_ids.is_empty(), ends_with_context) {
            (true, _) => 0,
            (false, true) => self.turn_end - 1, // the tools' answer is new
            (false, false) => usize::MAX,
        };
        self.token_ids.extend(begun.token_ids);
        self.rollout_logprobs = begun.rollout_logprobs;
        self.loss_mask = begun.loss_mask;
        self.weight_versions = begun.weight_versions;
        self.routed_experts = begun.routed_experts;
        self.finish_reason = begun.finish_reason.or((self.len() >= self.max_len).then_some(FinishReason::Length));
    }

    /// Appends a sampled token.
    pub(super) fn push(&mut self, token_id: u32, logprob: f32) {
        self.token_ids.push(token_id);
        self.rollout_logprobs.push(logprob);
        self.loss_mask.push(true);
        self.weight_versions.push(self.params.step);
    }

    /// Drops the tokens and their data.
    pub(super) fn forget_tokens(&mut self) {
        self.token_ids = Vec::new();
        self.prompt_len = 0;
        self.rollout_logprobs = Vec::new();
        self.loss_mask = Vec::new();
        self.weight_versions = Vec::new();
        self.routed_experts = RoutedExperts::default();
        self.grammar = None;
    }

    /// The tokens sampled so far, without their text.
    pub(super) fn trajectory(&self) -> Trajectory {
        Trajectory {
            token_ids: self.completion().to_vec(),
            loss_mask: self.loss_mask.clone(),
            rollout_logprobs: self.rollout_logprobs.clone(),
            weight_versions: self.weight_versions.clone(),
            routed_experts: self.routed_experts.clone(),
            finish_reason: self.finish_reason,
            ..Trajectory::default()
        }
    }

    /// The slot in the cache of the token at `position`, in blocks of `block_size`.
    pub(super) fn slot(&self, position: usize, block_size: usize) -> usize {
        self.block_table[position / block_size] as usize * block_size + position % block_size
    }

    /// The number of its LoRA adapter, -1 for the base model.
    pub(super) fn adapter_number(&self) -> i32 {
        self.adapter.map_or(-1, |adapter| adapter as i32)
    }

    /// Number of known tokens.
    pub(super) fn len(&self) -> usize {
        self.token_ids.len()
    }

    /// Number of known and pending tokens.
    pub(super) fn num_tokens(&self) -> usize {
        self.len() + self.num_pending
    }

    /// Whether the token at the length limit is known or pending.
    pub(super) fn is_full(&self) -> bool {
        self.num_tokens() >= self.max_len
    }

    /// Whether its end is reported: it has no blocks any more.
    pub(super) fn is_finished(&self) -> bool {
        self.finish_reason.is_some() && self.block_table.is_empty()
    }

    pub(super) fn completion(&self) -> &[u32] {
        &self.token_ids[self.prompt_len..]
    }

    /// Whether no token has been sampled yet and none is being sampled.
    pub(super) fn is_fresh(&self) -> bool {
        self.num_tokens() == self.prompt_len
    }
}
