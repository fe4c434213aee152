//! Settings of the loss.

use super::distillation::{Distillation, TopDivergence};
use crate::config::{Config, ImportanceSamplingLevel, ImportanceSamplingMode, KlEstimator, LossType};

/// Settings of the loss. Defaults are those of TRL 1.16's `GRPOConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct LossConfig {
    /// How token losses are summed.
    pub loss_type: LossType,
    /// Level of the policy ratio.
    pub importance_sampling_level: ImportanceSamplingLevel,
    /// Lower clip range.
    pub epsilon: f64,
    /// Upper clip range; for cispo the bound of the ratio itself.
    pub epsilon_high: f64,
    /// Upper bound of the ratio for negative advantages.
    pub delta: Option<f64>,
    /// Weight of the KL term; 0 also where the divergence is taken off the rewards.
    pub beta: f64,
    /// Multiply the KL term by the differentiable ratio.
    pub use_bias_correction_kl: bool,
    /// Multiply the policy term by the sampler correction where `rollout_logprobs` are given.
    pub importance_sampling_correction: bool,
    /// Level and kind of that correction.
    pub importance_sampling_mode: ImportanceSamplingMode,
    /// Upper bound of that correction.
    pub importance_sampling_clip_max: f64,
    /// Lower bound of that correction.
    pub importance_sampling_clip_min: Option<f64>,
    /// Leave sequences with a negative advantage out of the policy term that are further off the sampler's policy.
    pub off_policy_mask_threshold: Option<f64>,
    /// Estimator of the KL divergence, in the loss or in the reward.
    pub kl_estimator: KlEstimator,
    /// sapo's temperature for advantages of 0 and below.
    pub sapo_temperature_neg: f64,
    /// sapo's temperature for advantages above 0.
    pub sapo_temperature_pos: f64,
    /// vespo's exponent for advantages of 0 and above.
    pub vespo_k_pos: f64,
    /// vespo's decay for advantages of 0 and above.
    pub vespo_lambda_pos: f64,
    /// vespo's exponent for negative advantages.
    pub vespo_k_neg: f64,
    /// vespo's decay for negative advantages.
    pub vespo_lambda_neg: f64,
    /// Share of an update's tokens, those of highest entropy, that the policy term is over.
    pub top_entropy_quantile: f64,
    /// Weight of the entropy bonus; with `use_adaptive_entropy` that of the first update.
    pub entropy_coef: f64,
    /// Move the weight of the entropy bonus after each update.
    pub use_adaptive_entropy: bool,
    /// Least weight of an adaptive bonus.
    pub entropy_coef_min: f64,
    /// Greatest weight of an adaptive bonus.
    pub entropy_coef_max: f64,
    /// The step by which an update moves the weight of an adaptive bonus.
    pub entropy_coef_delta: f64,
    /// Entropy in nats above which an adaptive bonus is off.
    pub entropy_target: f64,
    /// The divergence from a teacher, if there is one.
    pub distillation: Option<Distillation>,
    /// In tokens; dr_grpo's denominator.
    pub max_completion_length: usize,
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
            importance_sampling_clip_min: None,
            off_policy_mask_threshold: None,
            kl_estimator: KlEstimator::K3,
            sapo_temperature_neg: 1.05,
            sapo_temperature_pos: 1.0,
            vespo_k_pos: 2.0,
            vespo_lambda_pos: 3.0,
            vespo_k_neg: 3.0,
            vespo_lambda_neg: 2.0,
            top_entropy_quantile: 1.0,
            entropy_coef: 0.0,
            use_adaptive_entropy: false,
            entropy_coef_min: 0.0,
            entropy_coef_max: 1.0,
            entropy_coef_delta: 0.005,
            entropy_target: 0.2,
            distillation: None,
            max_completion_length: 512,
        }
    }
}

impl From<&Config> for LossConfig {
    fn from(config: &Config) -> Self {
        let objective = &config.objective;
        Self {
            loss_type: config.loss_type,
            importance_sampling_level: config.importance_sampling_level,
            epsilon: config.epsilon,
            epsilon_high: config.epsilon_high.unwrap_or(config.epsilon),
            delta: config.delta,
            beta: if objective.use_kl_in_reward { 0.0 } else { config.beta },
            use_bias_correction_kl: config.use_bias_correction_kl,
            importance_sampling_correction: config.importance_sampling_correction,
            importance_sampling_mode: config.importance_sampling_mode,
            importance_sampling_clip_max: config.importance_sampling_clip_max,
            importance_sampling_clip_min: objective.importance_sampling_clip_min,
            off_policy_mask_threshold: objective.off_policy_mask_threshold,
            kl_estimator: objective.kl_estimator,
            sapo_temperature_neg: objective.sapo_temperature_neg,
            sapo_temperature_pos: objective.sapo_temperature_pos,
            vespo_k_pos: objective.vespo_k_pos,
            vespo_lambda_pos: objective.vespo_lambda_pos,
            vespo_k_neg: objective.vespo_k_neg,
            vespo_lambda_neg: objective.vespo_lambda_neg,
            top_entropy_quantile: objective.top_entropy_quantile,
            entropy_coef: objective.entropy_coef,
            use_adaptive_entropy: objective.use_adaptive_entropy,
            entropy_coef_min: objective.entropy_coef_min,
            entropy_coef_max: objective.entropy_coef_max,
            entropy_coef_delta: objective.entropy_coef_delta,
            entropy_target: objective.entropy_target,
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
    /// Whether the policy term is multiplied by the sampler correction; vespo's weights contain it.
    pub(super) fn multiplies_by_correction(&self) -> bool {
        match self.loss_type {
            LossType::Vespo => false,
            LossType::Grpo | LossType::DrGrpo | LossType::Bnpo | LossType::Dapo => true,
            LossType::Cispo | LossType::Sapo | LossType::Luspo => true,
        }
    }

    /// Whether the loss has an entropy bonus, if only with a weight that is 0 for now.
    pub fn has_entropy_bonus(&self) -> bool {
        self.entropy_coef != 0.0 || self.use_adaptive_entropy
    }

    /// Whether the policy term is over a share of the tokens.
    pub fn selects_by_entropy(&self) -> bool {
        self.top_entropy_quantile < 1.0
    }
}
