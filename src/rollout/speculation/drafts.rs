//! Draft tokens of one sequence in one step.

/// Tokens that may follow a sequence. A step computes a row for each and draws there as if it had been sampled; it counts once the row
/// before it has drawn it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::rollout) struct Drafts {
    pub(in crate::rollout) token_ids: Vec<u32>,
    /// Tokens in front of them that occurred before, in front of the same tokens.
    pub(in crate::rollout) matched: usize,
}
