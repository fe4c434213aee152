//! The functions of this room held to TRL's own numbers (`scripts/golden_trl.py`) and to libtorch's autograd.

use crate::types::{Completion, FinishReason, Prompt, RolloutGroup};

/// A group with these rewards and nothing else of interest.
pub(super) fn group(rewards: &[Option<f32>]) -> RolloutGroup {
    let completion = |reward: &Option<f32>| Completion {
        token_ids: vec![1],
        rollout_logprobs: vec![0.0],
        finish_reason: FinishReason::Eos,
        text: String::new(),
        rewards: vec![*reward],
        reward: *reward,
        advantage: 0.0,
    };
    let prompt = Prompt { id: 0, text: String::new(), token_ids: vec![1], columns: Default::default() };
    RolloutGroup { prompt, completions: rewards.iter().map(completion).collect() }
}
