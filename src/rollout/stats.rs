//! An engine's counts.

use std::time::Duration;

/// Counts since the engine woke, over the whole tensor-parallel group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Blocks of the KV cache.
    pub num_blocks: usize,
    /// Most blocks in use at once.
    pub peak_blocks: usize,
    /// Forward passes.
    pub num_steps: usize,
    /// Tokens sampled.
    pub num_generated_tokens: usize,
    /// Tokens computed in prefill steps, those of preempted sequences again.
    pub num_prefilled_tokens: usize,
    /// Prefilled tokens of sequences that had been computed before: carried ones, prompts included, preempted ones, and
    /// earlier turns whose blocks were needed by others.
    pub num_recomputed_tokens: usize,
    /// Tokens of carried sequences, prompts once a group, whose keys and values were still in the cache.
    pub num_kept_tokens: usize,
    /// Tokens of earlier turns whose keys and values were still in the cache when the next turn of their trajectory began.
    pub num_turn_tokens: usize,
    /// Tokens of earlier turns that were computed again when the next turn began, as others needed their blocks.
    pub num_lost_turn_tokens: usize,
    /// Tokens that did not have to be prefilled, because another completion of the group had been through them.
    pub num_shared_tokens: usize,
    /// Sequences that had to give their blocks back.
    pub num_preemptions: usize,
    /// Draft tokens that were computed.
    pub num_draft_tokens: usize,
    /// Of those, the ones that were drawn, and so did not need a step of their own.
    pub num_accepted_tokens: usize,
    /// Times that a sequence had drafts in a step.
    pub num_drafted_sequences: usize,
    /// Steps that waited for the tokens before them, to have drafts.
    pub num_waited_steps: usize,
    /// Completions finished.
    pub num_finished: usize,
    /// This rank's time in steps, of an engine in stages.
    pub stage: StageTimes,
}

/// How long one rank of an engine in stages computed, and how long it met the other stages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Time in the rank's own layers, embedding, head and sampler among them.
    pub computing: Duration,
    /// Time in exchanges with other stages, which begin when the slowest one comes.
    pub waiting: Duration,
}

/// What became of an engine's draft tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Draft tokens that were computed.
    pub computed: usize,
    /// Of those, the ones that were drawn.
    pub accepted: usize,
    /// Times that a sequence had drafts in a step.
    pub drafted: usize,
}

impl DraftCounts {
    pub(super) fn of(stats: &EngineStats) -> Self {
        let EngineStats { num_draft_tokens, num_accepted_tokens, num_drafted_sequences, .. } = *stats;
        Self { computed: num_draft_tokens, accepted: num_accepted_tokens, drafted: num_drafted_sequences }
    }
}

impl std::ops::AddAssign for DraftCounts {
    fn add_assign(&mut self, other: Self) {
        self.computed += other.computed;
        self.accepted += other.accepted;
        self.drafted += other.drafted;
    }
}

impl std::ops::AddAssign for StageTimes {
    fn add_assign(&mut self, other: Self) {
        self.computing += other.computing;
        self.waiting += other.waiting;
    }
}
