//! The trainer's representation of a prompt with one trajectory.

use crate::types::{RoutedExperts, Trajectory};

/// A prompt with one trajectory, in the trainer's representation.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// Token ids of prompt and completion.
    pub token_ids: Vec<u32>,
    /// Number of prompt tokens; at least 1 and less than `token_ids.len()`.
    pub prompt_len: usize,
    /// Whether each completion token is scored. The others are context: later tokens attend to them, but no loss or metric counts them.
    pub loss_mask: Vec<bool>,
    /// Advantage of every scored token.
    pub advantage: f32,
    /// Whether this sequence is left out of the packed micro-batches. As in TRL, it still counts in means over sequences.
    pub masked: bool,
    /// The sampler's log-probabilities, one per scored token. The next three fields have one per scored token, too.
    pub rollout_logprobs: Option<Vec<f32>>,
    /// The trainer's log-probabilities before the first update on this batch.
    pub old_logprobs: Option<Vec<f32>>,
    /// The reference model's log-probabilities.
    pub ref_logprobs: Option<Vec<f32>>,
    /// A teacher's log-probabilities.
    pub teacher_logprobs: Option<Vec<f32>>,
    /// A teacher's most probable tokens at each scored token. They are computed after sequences are distributed, so they are not sent to other ranks.
    pub teacher_top: Option<TeacherTop>,
    /// The prompt with which the policy, as its own teacher, scores the completion; `None` if this sequence has no teacher.
    pub teacher_prompt: Option<Vec<u32>>,
    /// Number of scored tokens at the beginning of the completion that the policy, as its own teacher, does not score.
    pub teacher_skips: usize,
    /// Divisor of the sequence's tokens for the loss type `bnpo`. It is computed where the order of all sequences is known, and not sent to other
    /// ranks.
    pub bnpo_divisor: Option<f64>,
    /// Age of each scored token: generation steps from its sampling to the step that trains on it, if counted.
    pub token_ages: Option<Vec<u32>>,
    /// The sampler's experts of some or all tokens, for a model with experts.
    pub routed_experts: RoutedExperts,
    /// Sort key of the sequences of all ranks. Sequences of equal `place` are in the order of ranks.
    pub place: u32,
}

/// The `num_top` most probable tokens of a teacher's distribution at each scored token, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TeacherTop {
    /// Number of tokens per distribution.
    pub num_top: usize,
    /// Ids of the teacher's most probable tokens.
    pub ids: Vec<u32>,
    /// Log-probabilities of `ids` in nats.
    pub logprobs: Vec<f32>,
}

impl Sequence {
    /// A sequence without log-probabilities; all completion tokens are scored.
    pub fn of_tokens(token_ids: Vec<u32>, prompt_len: usize) -> Self {
        Self {
            loss_mask: vec![true; token_ids.len().saturating_sub(prompt_len)],
            token_ids,
            prompt_len,
            advantage: 0.0,
            masked: false,
            rollout_logprobs: None,
            old_logprobs: None,
            ref_logprobs: None,
            teacher_logprobs: None,
            teacher_top: None,
            teacher_prompt: None,
            teacher_skips: 0,
            bnpo_divisor: None,
            token_ages: None,
            routed_experts: RoutedExperts::default(),
            place: 0,
        }
    }

    /// A sequence from a prompt and a trajectory.
    pub fn of_trajectory(prompt: &[u32], trajectory: &Trajectory) -> Self {
        let Trajectory { token_ids, loss_mask, rollout_logprobs, routed_experts, .. } = trajectory;
        let scored = rollout_logprobs.iter().zip(loss_mask).filter(|(_, is_scored)| **is_scored);
        Self {
            loss_mask: loss_mask.clone(),
            advantage: trajectory.advantage,
            rollout_logprobs: Some(scored.map(|(logprob, _)| *logprob).collect()),
            routed_experts: routed_experts.clone(),
            ..Self::of_tokens([prompt, token_ids].concat(), prompt.len())
        }
    }

    /// This sequence's completion after its teacher's prompt; masked if there is no such prompt.
    pub fn behind_teacher_prompt(&self) -> Self {
        let prompt = self.teacher_prompt.as_deref().unwrap_or_else(|| self.prompt());
        Self {
            loss_mask: self.loss_mask.clone(),
            masked: self.masked || self.teacher_prompt.is_none(),
            ..Self::of_tokens([prompt, self.completion()].concat(), prompt.len())
        }
    }

    /// Copies the teacher's scores from `taught`, the scored result of [`Sequence::behind_teacher_prompt`]. Missing scores become NaN, with `num_top`
    /// tokens each.
    pub(crate) fn take_teacher_scores(&mut self, taught: Self, num_top: usize) {
        let num_scored = self.num_scored();
        let mut logprobs = taught.teacher_logprobs.unwrap_or_else(|| vec![f32::NAN; num_scored]);
        let num_skipped = self.teacher_skips.min(num_scored);
        logprobs[..num_skipped].fill(f32::NAN);
        self.teacher_logprobs = Some(logprobs);
        if num_top > 0 {
            let nothing = || TeacherTop {
                num_top,
                ids: (0..num_top as u32).cycle().take(num_top * num_scored).collect(),
                logprobs: vec![f32::NAN; num_top * num_scored],
            };
            let mut top = taught.teacher_top.unwrap_or_else(nothing);
            top.logprobs[..num_top * num_skipped].fill(f32::NAN);
            self.teacher_top = Some(top);
        }
    }

    /// Token ids of the prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.token_ids[..self.prompt_len]
    }

    /// Token ids of the completion.
    pub fn completion(&self) -> &[u32] {
        &self.token_ids[self.prompt_len..]
    }

    /// Number of completion tokens, including context.
    pub fn completion_len(&self) -> usize {
        self.token_ids.len() - self.prompt_len
    }

    /// Positions of the scored tokens in the completion.
    pub fn scored(&self) -> impl Iterator<Item = usize> + '_ {
        self.loss_mask.iter().enumerate().filter(|(_, is_scored)| **is_scored).map(|(at, _)| at)
    }

    /// Number of scored tokens.
    pub fn num_scored(&self) -> usize {
        self.scored().count()
    }
}
