//! A prompt with one trajectory, as the trainer has it.

use crate::types::{RoutedExperts, Trajectory};

/// A prompt with one trajectory, as the trainer sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// Prompt and completion ids.
    pub token_ids: Vec<u32>,
    /// Number of prompt ids; at least 1 and less than `token_ids.len()`.
    pub prompt_len: usize,
    /// Whether each completion token is scored. The others are context: their keys and values count, and nothing else of them does.
    pub loss_mask: Vec<bool>,
    /// Advantage of every scored token.
    pub advantage: f32,
    /// Leaves its tokens out: it is not packed. As in TRL it is still one of the sequences that means are over.
    pub masked: bool,
    /// The sampler's log-probabilities, one per scored token, as are the next three.
    pub rollout_logprobs: Option<Vec<f32>>,
    /// The trainer's log-probabilities before the first update on this batch.
    pub old_logprobs: Option<Vec<f32>>,
    /// The reference model's log-probabilities.
    pub ref_logprobs: Option<Vec<f32>>,
    /// A teacher's log-probabilities.
    pub teacher_logprobs: Option<Vec<f32>>,
    /// A teacher's most probable tokens at each scored token. They are found after sequences are shared out, so they are not sent to
    /// other ranks.
    pub teacher_top: Option<TeacherTop>,
    /// The prompt behind which the policy, as its own teacher, scores the completion; `None` is no teacher for this sequence.
    pub teacher_prompt: Option<Vec<u32>>,
    /// Scored tokens at the beginning of the completion that the policy, as its own teacher, does not score.
    pub teacher_skips: usize,
    /// The divisor of the tokens in the loss `bnpo`; set where the order of all sequences is known, so not sent to other ranks.
    pub bnpo_divisor: Option<f64>,
    /// Generation steps between the sampling of each scored token and the step that trains on it, where these are counted.
    pub token_ages: Option<Vec<u32>>,
    /// The sampler's experts of some or all of its tokens, of a model that has some.
    pub routed_experts: RoutedExperts,
    /// Sequences of all ranks are put in the order of their places; those of one place stay in the order of ranks.
    pub place: u32,
}

/// The `num_top` most probable tokens of a teacher's distribution at each of some tokens, in their order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TeacherTop {
    /// Tokens of each distribution.
    pub num_top: usize,
    /// Ids of the teacher's most probable tokens.
    pub ids: Vec<u32>,
    /// Log-probabilities of `ids` in nats.
    pub logprobs: Vec<f32>,
}

impl Sequence {
    /// A sequence of tokens alone; those of the completion are all scored.
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

    /// A prompt and what was sampled after it.
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

    /// The completion behind the prompt of its teacher; masked where there is none.
    pub fn behind_teacher_prompt(&self) -> Self {
        let prompt = self.teacher_prompt.as_deref().unwrap_or_else(|| self.prompt());
        Self {
            loss_mask: self.loss_mask.clone(),
            masked: self.masked || self.teacher_prompt.is_none(),
            ..Self::of_tokens([prompt, self.completion()].concat(), prompt.len())
        }
    }

    /// Takes the scores of its teacher from the sequence that [`Sequence::behind_teacher_prompt`] gave: NaN where there are none, of
    /// `num_top` tokens each.
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

    /// Ids of the prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.token_ids[..self.prompt_len]
    }

    /// Ids of the completion.
    pub fn completion(&self) -> &[u32] {
        &self.token_ids[self.prompt_len..]
    }

    /// Number of completion tokens, context included.
    pub fn completion_len(&self) -> usize {
        self.token_ids.len() - self.prompt_len
    }

    /// Places of the scored tokens in the completion.
    pub fn scored(&self) -> impl Iterator<Item = usize> + '_ {
        self.loss_mask.iter().enumerate().filter(|(_, is_scored)| **is_scored).map(|(at, _)| at)
    }

    /// Number of scored tokens.
    pub fn num_scored(&self) -> usize {
        self.scored().count()
    }
}
