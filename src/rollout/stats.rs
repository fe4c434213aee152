//! An engine's counters.

use std::time::Duration;

/// Counters since the engine woke, over the whole tensor-parallel group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Blocks of the KV cache.
    pub num_blocks: usize,
    /// Maximum number of KV blocks in use at once.
    pub peak_blocks: usize,
    /// Forward passes.
    pub num_steps: usize,
    /// Sampled tokens.
    pub num_generated_tokens: usize,
    /// Tokens computed in prefill steps; tokens of preempted sequences count again.
    pub num_prefilled_tokens: usize,
    /// Prefilled tokens that had been computed before: those of preempted sequences, of sequences carried over from earlier rollouts (with prompts),
    /// and of earlier turns whose blocks were freed.
    pub num_recomputed_tokens: usize,
    /// Tokens of carried-over sequences whose keys and values were still in the cache; a prompt counts once per group.
    pub num_kept_tokens: usize,
    /// Tokens of earlier turns whose keys and values were still in the cache when the next turn of their trajectory began.
    pub num_turn_tokens: usize,
    /// Tokens of earlier turns that were computed again when the next turn began, because their blocks had been freed.
    pub num_lost_turn_tokens: usize,
    /// Tokens that were not prefilled, because another completion of the group had already computed them.
    pub num_shared_tokens: usize,
    /// Number of preemptions.
    pub num_preemptions: usize,
    /// Draft tokens that were computed.
    pub num_draft_tokens: usize,
    /// Draft tokens that were accepted, and so did not need a step of their own.
    pub num_accepted_tokens: usize,
    /// Number of (sequence, step) pairs with draft tokens.
    pub num_drafted_sequences: usize,
    /// Steps that waited for the tokens of earlier steps, in order to have draft tokens.
    pub num_waited_steps: usize,
    /// Finished completions.
    pub num_finished: usize,
    /// This rank's time in steps, with pipeline stages.
    pub stage: StageTimes,
}

/// How long one rank of an engine with pipeline stages computed, and how long it waited for other stages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Time in the rank's own layers, including embedding, head and sampler.
    pub computing: Duration,
    /// Time in exchanges with other stages, including waiting for the slowest one.
    pub waiting: Duration,
}

/// Counts of an engine's draft tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Draft tokens that were computed.
    pub computed: usize,
    /// Draft tokens that were accepted, because the engine sampled the same token.
    pub accepted: usize,
    /// Number of (sequence, step) pairs with draft tokens.
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
