//! Keys for losses, estimators and advantages that are not used by default.

use super::check::check;
use super::field::{Field, keys};
use super::range::{ANY, COUNT, above, at_least, from_to};
use super::raw::RawConfig;
use super::{AdvantageEstimator, Config, KlEstimator, MultiObjectiveAggregation, RouterReplay};
use crate::error::Result;

keys! {
    /// Keys for losses, estimators and advantages, at the top level.
    ///
    /// TRL's `RLOOTrainer`: the baseline is the mean of the others, and the divergence is taken off the rewards:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{AdvantageEstimator, KlEstimator, MultiObjectiveAggregation, ObjectiveConfig, RouterReplay};
    ///
    /// let words = [
    ///     "advantage_estimator=rloo",
    ///     "scale_rewards=none",
    ///     "beta=0.05",
    ///     "kl_estimator=k1",
    ///     "use_kl_in_reward=true",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let objective: &ObjectiveConfig = &config.objective;
    /// assert_eq!((objective.advantage_estimator, objective.kl_estimator), (AdvantageEstimator::Rloo, KlEstimator::K1));
    /// assert_eq!(objective.multi_objective_aggregation, MultiObjectiveAggregation::SumThenNormalize); // not GDPO
    /// assert_eq!(objective.router_replay, RouterReplay::R3); // with experts, those that the sampler chose
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct ObjectiveConfig: flat {
        /// Subtract the KL divergence from the reference model from the rewards instead of adding it to the loss, as verl's key of this name: `beta`
        /// times the sum of `kl_estimator` over a completion's tokens is subtracted from its reward before advantages are computed. With k1 and
        /// `advantage_estimator = rloo` this is TRL's `RLOOTrainer`. Each step then scores its completions once more.
        pub use_kl_in_reward: bool = false,
        /// Estimator of the KL divergence from the reference model, with verl's names.
        pub kl_estimator: KlEstimator = KlEstimator::K3,
        /// Mix the policy into the reference model every `ref_model_sync_steps` updates: the new reference is `ref_model_mixup_alpha` times the
        /// policy plus the rest of the old reference (TR-DPO, arXiv 2404.09656). Checkpoints then also contain the reference model. Not available
        /// with LoRA, which has no separate reference weights.
        pub sync_ref_model: bool = false,
        /// Fraction of the policy in the reference model after `sync_ref_model` mixes them.
        pub ref_model_mixup_alpha: f64 = 0.6 => from_to(0.0, 1.0),
        /// Number of updates between two mixes of `sync_ref_model`, counted from the start of the run.
        pub ref_model_sync_steps: usize = 512 => COUNT,
        /// Baseline of advantages: `grpo` is the mean reward of the group, `rloo` for each completion the mean of the others. With `rloo`,
        /// `scale_rewards` is `none`, or `batch`, which normalizes the batch's advantages to mean 0 and standard deviation 1.
        pub advantage_estimator: AdvantageEstimator = AdvantageEstimator::Grpo,
        /// How several rewards are combined into one advantage: `normalize_then_sum` (GDPO) normalizes each reward within its group, sums them with
        /// `reward_weights`, and normalizes the sums over the batch.
        pub multi_objective_aggregation: MultiObjectiveAggregation = MultiObjectiveAggregation::SumThenNormalize,
        /// Lower bound of the importance sampling ratio: smaller ratios are raised to it (`*_truncate`) or set to 0 (`*_mask`).
        pub importance_sampling_clip_min: Option<f64> = None => at_least(0.0),
        /// Remove a completion with a negative advantage from the policy term if the sampler's log-probability exceeds the policy's by more than
        /// this, averaged over its tokens (arXiv 2512.02556, equation 9); `none` removes none.
        pub off_policy_mask_threshold: Option<f64> = None => above(0.0),
        /// Temperature of `loss_type = sapo` for advantages of at most 0.
        pub sapo_temperature_neg: f64 = 1.05 => above(0.0),
        /// Temperature of `loss_type = sapo` for advantages above 0.
        pub sapo_temperature_pos: f64 = 1.0 => above(0.0),
        /// Exponent of `loss_type = vespo` for advantages of at least 0: larger values give ratios below 1 less weight.
        pub vespo_k_pos: f64 = 2.0 => from_to(0.0, 1e3),
        /// Decay of `loss_type = vespo` for advantages of at least 0: larger values give ratios above 1 less weight.
        pub vespo_lambda_pos: f64 = 3.0 => from_to(0.0, 1e3),
        /// Exponent of `loss_type = vespo` for negative advantages.
        pub vespo_k_neg: f64 = 3.0 => from_to(0.0, 1e3),
        /// Decay of `loss_type = vespo` for negative advantages.
        pub vespo_lambda_neg: f64 = 2.0 => from_to(0.0, 1e3),
        /// Fraction of an update's tokens, those of highest entropy, that the policy term uses (arXiv 2506.01939 recommends 0.2); 1 uses all tokens,
        /// 0 only the one of highest entropy. Below 1 each update starts with a forward pass to find them.
        pub top_entropy_quantile: f64 = 1.0 => from_to(0.0, 1.0),
        /// Coefficient of the entropy bonus: this times the mean entropy of the update's tokens, in nats, is subtracted from the loss. With
        /// `use_adaptive_entropy` this is the initial coefficient.
        pub entropy_coef: f64 = 0.0 => from_to(-1e3, 1e3),
        /// Adapt the coefficient of the entropy bonus: raise it by `entropy_coef_delta` after an update whose entropy is at most `entropy_target`;
        /// after any other, lower it and omit the bonus from the next update (arXiv 2505.22312).
        pub use_adaptive_entropy: bool = false,
        /// Minimum coefficient with `use_adaptive_entropy`.
        pub entropy_coef_min: f64 = 0.0 => from_to(-1e3, 1e3),
        /// Maximum coefficient with `use_adaptive_entropy`.
        pub entropy_coef_max: f64 = 1.0 => from_to(-1e3, 1e3),
        /// Change of the coefficient per update with `use_adaptive_entropy`.
        pub entropy_coef_delta: f64 = 0.005 => from_to(0.0, 1e3),
        /// Target for the mean entropy with `use_adaptive_entropy`, in nats. Set it near the metric `entropy` of the first steps.
        pub entropy_target: f64 = 0.2 => at_least(0.0),
        /// Which experts the trainer uses, in models with experts: `R3` replays those that the sampler recorded, weighted by the trainer's own
        /// probabilities, also for old log-probabilities and when the sampler recomputes a prefix; `disabled` uses the trainer's own router. The
        /// reference model always uses its own router.
        pub router_replay: RouterReplay = RouterReplay::R3,
        /// Coefficient of the load balancing loss of models with experts; `none` is the value in the model's `config.json`.
        pub router_aux_loss_coef: Option<f64> = None => from_to(0.0, 1e3),
    }
}

impl Default for ObjectiveConfig {
    fn default() -> Self {
        Self::read(&RawConfig::default(), "", None, &ANY, &mut Vec::new()).expect("every key has a default")
    }
}

impl Config {
    /// Checks keys that bound each other.
    pub(super) fn check_bounds(&self) -> Result<()> {
        let most = 1.0 + self.epsilon_high.unwrap_or(self.epsilon);
        let delta = self.delta.unwrap_or(f64::INFINITY);
        check("delta", delta, delta > most, format!("above 1 + epsilon_high = {most}"))?;
        let ObjectiveConfig { entropy_coef_min: least, entropy_coef_max: most, .. } = self.objective;
        check("entropy_coef_min", least, least <= most, format!("at most entropy_coef_max = {most}"))?;
        let (least, most) = (self.objective.importance_sampling_clip_min, self.importance_sampling_clip_max);
        let is_below = least.is_none_or(|least| least < most);
        let expected = format!("below importance_sampling_clip_max = {most}");
        check("importance_sampling_clip_min", least.unwrap_or_default(), is_below, expected)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};
    use super::*;

    #[test]
    fn keys_that_bound_each_other_are_checked_together() {
        for (overrides, part) in [
            (&["ref_model_mixup_alpha=1.5", "sync_ref_model=true", "beta=0.1"][..], "from 0 to 1"),
            (&["delta=1.1"], "above 1 + epsilon_high = 1.2"),
            (&["importance_sampling_clip_min=3"], "below importance_sampling_clip_max = 3"),
            (&["off_policy_mask_threshold=0"], "above 0"),
            (&["entropy_coef_min=2", "use_adaptive_entropy=true"], "at most entropy_coef_max = 1"),
        ] {
            let text = message(overrides);
            assert!(text.contains(part), "{overrides:?}: {text}");
        }
    }

    #[test]
    fn valid_combinations_of_objective_keys_are_accepted() {
        let vespo = config(&["loss_type=vespo", "importance_sampling_mode=token_mask", "vespo_k_pos=1.5"]);
        assert_eq!((vespo.objective.vespo_k_pos, vespo.objective.vespo_k_neg), (1.5, 3.0));
        let rloo = config(&["advantage_estimator=rloo", "scale_rewards=batch", "beta=0.1", "kl_estimator=k1"]);
        assert_eq!(rloo.objective.advantage_estimator, AdvantageEstimator::Rloo);
        let in_reward =
            config(&["use_kl_in_reward=true", "beta=0.1", "kl_estimator=k1", "use_bias_correction_kl=false"]);
        assert!(in_reward.objective.use_kl_in_reward && in_reward.has_reference());
        let luspo = config(&["loss_type=luspo", "importance_sampling_level=sequence", "delta=1.5"]);
        assert_eq!(luspo.objective, ObjectiveConfig::default());
    }
}
