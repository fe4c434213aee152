//! Settings of the loss.

use crate::config::{Config, ImportanceSamplingLevel, ImportanceSamplingMode, LossType, ObjectiveConfig};

/// Settings of the loss. Defaults are those of TRL 1.16's `GRPOConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct LossConfig {
    /// The loss type, which also decides how token losses are summed.
    pub loss_type: LossType,
    /// Whether the policy ratio is per token or per sequence.
    pub importance_sampling_level: ImportanceSamplingLevel,
    /// Lower clip range.
    pub epsilon: f64,
    /// Upper clip range; for cispo the upper bound of the ratio itself.
    pub epsilon_high: f64,
    /// Upper bound of the ratio for negative advantages.
    pub delta: Option<f64>,
    /// Weight of the KL term; also 0 if the divergence is subtracted from the rewards.
    pub beta: f64,
    /// Whether to multiply the KL term by the differentiable ratio.
    pub use_bias_correction_kl: bool,
    /// Whether to multiply the policy term by the sampler correction, if `rollout_logprobs` are given.
    pub importance_sampling_correction: bool,
    /// Level and kind of the sampler correction.
    pub importance_sampling_mode: ImportanceSamplingMode,
    /// Upper bound of the sampler correction.
    pub importance_sampling_clip_max: f64,
    /// Further options of the objective. The loss ignores the keys for advantages and for the reference model.
    pub objective: ObjectiveConfig,
    /// The divergence from a teacher, if there is one.
    pub distillation: Option<Distillation>,
    /// Maximum completion length in tokens, the denominator of dr_grpo.
    pub max_completion_length: usize,
}

/// How a loss includes a divergence from a teacher.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distillation {
    /// Weight of the divergence; all other terms, except an entropy bonus, have weight `1 - weight`.
    pub weight: f64,
    /// Upper bound of the policy ratio that multiplies the divergence; `None` means no ratio.
    pub clip_max: Option<f64>,
    /// The divergence over the teacher's most probable tokens; `None` uses the sampled tokens.
    pub top: Option<TopDivergence>,
}

/// A divergence over some tokens of each distribution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopDivergence {
    /// 1 is the reverse KL divergence, from policy to teacher; 0 the forward one. Between them it is the generalised Jensen-Shannon divergence (arXiv
    /// 2306.13649), `(1 - alpha) KL(policy, m) + alpha KL(teacher, m)` with the mixture `m = (1 - alpha) policy + alpha teacher`.
    pub alpha: f64,
    /// Whether all other tokens count as one more token. If not, the distributions are conditioned on the given tokens.
    pub adds_tail: bool,
    /// Number of tokens of each distribution.
    pub num_tokens: usize,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self {
            loss_type: LossType::Dapo,
            importance_sampling_level: ImportanceSamplingLevel::Token,
            epsilon: 0.2,
            epsilon_high: 0.2,
            delta: None,
            beta: 0.0,
            use_bias_correction_kl: true,
            importance_sampling_correction: true,
            importance_sampling_mode: ImportanceSamplingMode::SequenceMask,
            importance_sampling_clip_max: 3.0,
            objective: ObjectiveConfig::default(),
            distillation: None,
            max_completion_length: 512,
        }
    }
}

impl From<&Config> for LossConfig {
    fn from(config: &Config) -> Self {
        Self {
            loss_type: config.loss_type,
            importance_sampling_level: config.importance_sampling_level,
            epsilon: config.epsilon,
            epsilon_high: config.epsilon_high.unwrap_or(config.epsilon),
            delta: config.delta,
            beta: if config.objective.use_kl_in_reward { 0.0 } else { config.beta },
            use_bias_correction_kl: config.use_bias_correction_kl,
            importance_sampling_correction: config.importance_sampling_correction && !config.exact,
            importance_sampling_mode: config.importance_sampling_mode,
            importance_sampling_clip_max: config.importance_sampling_clip_max,
            objective: config.objective.clone(),
            distillation: config.has_teacher().then_some(Distillation {
                weight: config.distillation.distillation_weight,
                clip_max: config.distillation.distillation_is_clip,
                top: config.distillation.num_top().map(|num_tokens| TopDivergence {
                    num_tokens,
                    alpha: config.distillation.distillation_alpha,
                    adds_tail: config.distillation.distillation_add_tail,
                }),
            }),
            max_completion_length: config.max_completion_length,
        }
    }
}

impl LossConfig {
    /// Whether the policy term is multiplied by the sampler correction; vespo's weights already include it.
    pub(super) fn multiplies_by_correction(&self) -> bool {
        match self.loss_type {
            LossType::Vespo => false,
            LossType::Grpo | LossType::DrGrpo | LossType::Bnpo | LossType::Dapo => true,
            LossType::Cispo | LossType::Sapo | LossType::Luspo => true,
        }
    }

    /// Whether the loss has an entropy bonus, even if its coefficient is 0 at present.
    pub fn has_entropy_bonus(&self) -> bool {
        self.objective.entropy_coef != 0.0 || self.objective.use_adaptive_entropy
    }

    /// Whether the policy term uses only a share of the tokens, by entropy.
    pub fn selects_by_entropy(&self) -> bool {
        self.objective.top_entropy_quantile < 1.0
    }
}
