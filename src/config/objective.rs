//! The keys of losses, estimators and advantages that a run chooses beside the defaults.

use super::check::check;
use super::field::{Field, keys};
use super::range::{ANY, COUNT, above, at_least, from_to};
use super::raw::RawConfig;
use super::{AdvantageEstimator, Config, KlEstimator, MultiObjectiveAggregation, RouterReplay};
use crate::error::Result;

keys! {
    /// Losses, estimators and advantages; keys of the top.
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
        /// Take the KL divergence from the reference model off the rewards in place of adding it to the loss, by verl's name: a
        /// completion's reward is lessened by `beta` times the sum of `kl_estimator` over its tokens, before advantages are computed.
        /// With k1 and `advantage_estimator = rloo` that is TRL's `RLOOTrainer`. Each step scores its completions once more.
        pub use_kl_in_reward: bool = false,
        /// Estimator of the KL divergence from the reference model, by verl's names.
        pub kl_estimator: KlEstimator = KlEstimator::K3,
        /// Mix the policy into the reference model every `ref_model_sync_steps` updates: the reference becomes
        /// `ref_model_mixup_alpha` times the policy plus the rest of itself (TR-DPO, arXiv 2404.09656). Checkpoints then have the
        /// reference model, too. Not where adapters train, which have no reference model of their own.
        pub sync_ref_model: bool = false,
        /// Share of the policy in the reference model after `sync_ref_model` has mixed the two.
        pub ref_model_mixup_alpha: f64 = 0.6 => from_to(0.0, 1.0),
        /// Updates between two times that `sync_ref_model` mixes, counted from the start of the run.
        pub ref_model_sync_steps: usize = 512 => COUNT,
        /// Baseline of the advantages: the group's mean, or for each completion the mean of the others (`rloo`). With `rloo`,
        /// `scale_rewards` is `none`, or `batch`, which brings the batch's advantages to mean 0 and standard deviation 1.
        pub advantage_estimator: AdvantageEstimator = AdvantageEstimator::Grpo,
        /// How several rewards become one advantage: `normalize_then_sum` (GDPO) scales each reward within its group, adds them
        /// up by `reward_weights`, and scales the sums over the batch.
        pub multi_objective_aggregation: MultiObjectiveAggregation = MultiObjectiveAggregation::SumThenNormalize,
        /// Lower bound of the correction for the sampler: ratios below are raised to it (`*_truncate`) or become 0 (`*_mask`).
        pub importance_sampling_clip_min: Option<f64> = None => at_least(0.0),
        /// Leave a completion with a negative advantage out of the policy term where the mean over its tokens of sampler's minus
        /// policy's log-probability is above this (arXiv 2512.02556, equation 9); `none` leaves none out.
        pub off_policy_mask_threshold: Option<f64> = None => above(0.0),
        /// Temperature of `loss_type = sapo` for advantages of 0 and below.
        pub sapo_temperature_neg: f64 = 1.05 => above(0.0),
        /// Temperature of `loss_type = sapo` for advantages above 0.
        pub sapo_temperature_pos: f64 = 1.0 => above(0.0),
        /// Exponent of `loss_type = vespo` for advantages of 0 and above: the more, the less weight have ratios below 1.
        pub vespo_k_pos: f64 = 2.0 => from_to(0.0, 1e3),
        /// Decay of `loss_type = vespo` for advantages of 0 and above: the more, the less weight have ratios above 1.
        pub vespo_lambda_pos: f64 = 3.0 => from_to(0.0, 1e3),
        /// Exponent of `loss_type = vespo` for negative advantages.
        pub vespo_k_neg: f64 = 3.0 => from_to(0.0, 1e3),
        /// Decay of `loss_type = vespo` for negative advantages.
        pub vespo_lambda_neg: f64 = 2.0 => from_to(0.0, 1e3),
        /// Share of an update's tokens, those of highest entropy, that the policy term is over (arXiv 2506.01939 recommends 0.2); 1
        /// is all of them, 0 the highest alone. Below 1 each update begins with a forward pass that finds them.
        pub top_entropy_quantile: f64 = 1.0 => from_to(0.0, 1.0),
        /// Weight of the entropy bonus: the loss is lessened by this times the mean entropy of the update's tokens, in nats. With
        /// `use_adaptive_entropy` the weight to begin with.
        pub entropy_coef: f64 = 0.0 => from_to(-1e3, 1e3),
        /// Raise the weight of the entropy bonus by `entropy_coef_delta` after an update whose entropy is at most `entropy_target`,
        /// lower it after any other, and leave the bonus out of the update after that (arXiv 2505.22312).
        pub use_adaptive_entropy: bool = false,
        /// Least weight with `use_adaptive_entropy`.
        pub entropy_coef_min: f64 = 0.0 => from_to(-1e3, 1e3),
        /// Greatest weight with `use_adaptive_entropy`.
        pub entropy_coef_max: f64 = 1.0 => from_to(-1e3, 1e3),
        /// Step of the weight with `use_adaptive_entropy`.
        pub entropy_coef_delta: f64 = 0.005 => from_to(0.0, 1e3),
        /// Mean entropy that `use_adaptive_entropy` aims at, in nats. Set it near the metric `entropy` of the first steps.
        pub entropy_target: f64 = 0.2 => at_least(0.0),
        /// Source of the trainer's experts, of a model with experts: with `R3` those that the sampler recorded, weighted by the trainer's own
        /// probabilities, for old log-probabilities too, and the sampler where it computes a prefix again; with `disabled` those of its own
        /// router. The reference model routes by itself.
        pub router_replay: RouterReplay = RouterReplay::R3,
        /// Weight of the loss that keeps experts equally busy, of a model with experts; `none` is the model's own, as `config.json` has it.
        pub router_aux_loss_coef: Option<f64> = None => from_to(0.0, 1e3),
    }
}

impl Default for ObjectiveConfig {
    fn default() -> Self {
        Self::read(&RawConfig::default(), "", None, &ANY, &mut Vec::new()).expect("every key has a default")
    }
}

impl Config {
    /// Checks the bounds that keys of the objective set one another.
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
