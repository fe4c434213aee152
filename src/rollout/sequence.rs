//! One completion in the making.

use std::sync::Arc;

use super::detokenizer::Detokenizer;
use crate::data::{Grammar, GrammarStart, TokenMask};
use crate::types::{FinishReason, RoutedExperts, SamplingParams, Trajectory};

/// Where a sequence waits: in front are those that others wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum QueuePriority {
    /// Preempted, or about to compute the prompt for its begun group.
    First,
    /// A sequence of a group that was begun.
    Begun,
    /// A sequence of a group of which nothing is sampled yet.
    New,
}

/// A prompt and what has been sampled after it.
#[derive(Debug)]
pub(super) struct EngineSequence {
    /// Index of its request; a group's sequences are neighbours in sample order.
    pub(super) group: usize,
    /// How its tokens are drawn.
    pub(super) params: Arc<SamplingParams>,
    /// The adapter that computes it, of those that requests choose among.
    pub(super) adapter: Option<usize>,
    pub(super) turn: QueuePriority,
    /// Prompt, then completion.
    pub(super) token_ids: Vec<u32>,
    pub(super) prompt_len: usize,
    /// Prompt and completion at their longest.
    pub(super) max_len: usize,
    /// One per completion token, as is each of the next two.
    pub(super) rollout_logprobs: Vec<f32>,
    pub(super) loss_mask: Vec<bool>,
    pub(super) weight_versions: Vec<u64>,
    /// Experts of its first tokens, of a model that has some.
    pub(super) routed_experts: RoutedExperts,
    /// Blocks of its keys and values, in token order; empty while it waits.
    pub(super) block_table: Vec<u32>,
    /// Page of its states, while it has blocks; none of a model without states.
    pub(super) state_page: Option<u32>,
    /// Tokens up to the end of its newest turn, where context follows that; 0 otherwise.
    pub(super) turn_end: usize,
    /// Tokens that were computed before: a prefill computes them again.
    pub(super) num_known: usize,
    /// Tokens that steps under way sample: part of the sequence, not known yet.
    pub(super) num_pending: usize,
    /// Number of the newest step that samples for it.
    pub(super) last_step: usize,
    /// Tokens whose keys and values are in the cache, or will be by a step under way.
    pub(super) num_computed: usize,
    /// Of those, the ones that its states have taken in, or will have; the others were drafts.
    pub(super) num_in_state: usize,
    pub(super) finish_reason: Option<FinishReason>,
    pub(super) detokenizer: Detokenizer,
    /// How far it has followed its structure, with the tokens that may come next.
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

    /// Holds it to a structure from its beginning.
    pub(super) fn follow(&mut self, grammar: &Arc<Grammar>) {
        self.grammar = Some(grammar.begin());
    }

    /// The tokens that may come next, if not all may.
    pub(super) fn allowed(&self) -> Option<&TokenMask> {
        self.grammar.as_ref().map(|grammar| &grammar.allowed)
    }

    /// Takes the newest token into its structure.
    ///
    /// # Errors
    /// The reason why the structure cannot be followed further.
    pub(super) fn advance_grammar(&mut self) -> Result<(), String> {
        if let (Some(GrammarStart { state, allowed }), Some(&token_id)) = (&mut self.grammar, self.token_ids.last()) {
            *allowed = state.advance(token_id)?;
        }
        Ok(())
    }

    /// Takes in what an earlier rollout has sampled of it.
    pub(super) fn resume(&mut self, begun: Trajectory) {
        let context_end = begun.loss_mask.iter().rposition(|is_sampled| !is_sampled).map_or(0, |at| at + 1);
        self.detokenizer = Detokenizer::after(context_end);
        let turn_end = begun.loss_mask.iter().rposition(|is_sampled| *is_sampled).map_or(0, |at| at + 1);
        let ends_with_context = turn_end > 0 && turn_end < begun.loss_mask.len();
        self.turn_end = if ends_with_context { self.prompt_len + turn_end } else { 0 };
        self.num_known = match (begun.token_ids.is_empty(), ends_with_context) {
            (true, _) => 0,
            (false, true) => self.turn_end - 1, // what the tools answered is new
            (false, false) => usize::MAX,
        };
        self.token_ids.extend(begun.token_ids);
        self.rollout_logprobs = begun.rollout_logprobs;
        self.loss_mask = begun.loss_mask;
        self.weight_versions = begun.weight_versions;
        self.routed_experts = begun.routed_experts;
        self.finish_reason = begun.finish_reason.or((self.len() >= self.max_len).then_some(FinishReason::Length));
    }

    /// Takes in a token that was sampled.
    pub(super) fn push(&mut self, token_id: u32, logprob: f32) {
        self.token_ids.push(token_id);
        self.rollout_logprobs.push(logprob);
        self.loss_mask.push(true);
        self.weight_versions.push(self.params.step);
    }

    /// Drops its tokens and what is known of them.
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

    /// The number of its adapter, -1 for the base model.
    pub(super) fn adapter_number(&self) -> i32 {
        self.adapter.map_or(-1, |adapter| adapter as i32)
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

    /// Whether nothing has been sampled yet, nor is being sampled.
    pub(super) fn is_fresh(&self) -> bool {
        self.num_tokens() == self.prompt_len
    }
}
