//! The keys of losses, estimators and advantages that a run chooses beside the defaults.

use super::field::{Field, keys};
use super::range::{ANY, COUNT, above, at_least, from_to};
use super::raw::RawConfig;
use super::validate::check;
use super::{
    AdvantageEstimator, Config, DynamicSampling, ImportanceSamplingLevel, ImportanceSamplingMode, KlEstimator,
    LossType, MultiObjectiveAggregation, RouterReplay, ScaleRewards,
};
use crate::error::Result;

keys! {
    /// Losses, estimators and advantages; keys of the top.
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
    /// Whether the keys of the objective make sense together.
    pub(super) fn check_objective(&self) -> Vec<Result<()>> {
        vec![
            self.check_clipping(),
            self.check_loss_type(),
            self.check_advantages(),
            self.check_kl(),
            self.check_reference_sync(),
            self.check_correction(),
            self.check_entropy(),
        ]
    }

    fn check_clipping(&self) -> Result<()> {
        let Some(delta) = self.delta else { return Ok(()) };
        let high = self.epsilon_high.unwrap_or(self.epsilon);
        check("delta", delta, delta > 1.0 + high, format!("above 1 + epsilon_high = {}", 1.0 + high))?;
        let clips = match self.loss_type {
            LossType::Grpo | LossType::DrGrpo | LossType::Bnpo | LossType::Dapo | LossType::Luspo => true,
            LossType::Cispo | LossType::Sapo | LossType::Vespo => false,
        };
        let expected = format!("to be left out: loss_type {} does not read it", self.loss_type.name());
        check("delta", delta, clips, expected)
    }

    fn check_loss_type(&self) -> Result<()> {
        let (given, default) = (&self.objective, ObjectiveConfig::default());
        let of_sapo = [
            ("sapo_temperature_neg", given.sapo_temperature_neg, default.sapo_temperature_neg),
            ("sapo_temperature_pos", given.sapo_temperature_pos, default.sapo_temperature_pos),
        ];
        let of_vespo = [
            ("vespo_k_pos", given.vespo_k_pos, default.vespo_k_pos),
            ("vespo_lambda_pos", given.vespo_lambda_pos, default.vespo_lambda_pos),
            ("vespo_k_neg", given.vespo_k_neg, default.vespo_k_neg),
            ("vespo_lambda_neg", given.vespo_lambda_neg, default.vespo_lambda_neg),
        ];
        for (loss_type, keys) in [(LossType::Sapo, &of_sapo[..]), (LossType::Vespo, &of_vespo)] {
            for (key, value, default) in keys {
                let is_read = self.loss_type == loss_type || value == default;
                let expected = format!("to be left out, or loss_type = {}, which alone reads it", loss_type.name());
                check(key, value, is_read, expected)?;
            }
        }
        let level = self.importance_sampling_level;
        let fits = |loss_type, wanted| self.loss_type != loss_type || level == wanted;
        let whole = "sequence: loss_type luspo sums the loss of whole sequences";
        check(
            "importance_sampling_level",
            level.name(),
            fits(LossType::Luspo, ImportanceSamplingLevel::Sequence),
            whole,
        )?;
        let own = "token: loss_type vespo makes ratios of sequences by itself";
        check("importance_sampling_level", level.name(), fits(LossType::Vespo, ImportanceSamplingLevel::Token), own)
    }

    fn check_advantages(&self) -> Result<()> {
        let (estimator, scale) = (self.objective.advantage_estimator, self.scale_rewards);
        let leaves_one_out = estimator == AdvantageEstimator::Rloo;
        let decoupled = self.objective.multi_objective_aggregation == MultiObjectiveAggregation::NormalizeThenSum;
        let expected = "none, or batch to bring the batch's advantages to mean 0 and standard deviation 1, as \
                        advantage_estimator is rloo";
        check("scale_rewards", scale.name(), !leaves_one_out || scale != ScaleRewards::Group, expected)?;
        let expected = "grpo: normalize_then_sum scales each reward by its group's mean and standard deviation";
        check("advantage_estimator", estimator.name(), !(leaves_one_out && decoupled), expected)?;
        let expected = "group: normalize_then_sum scales by group and then by batch";
        check("scale_rewards", scale.name(), !decoupled || scale == ScaleRewards::Group, expected)
    }

    fn check_kl(&self) -> Result<()> {
        let estimator = self.objective.kl_estimator;
        let expected = "k3, or beta above 0: without beta there is no KL term";
        check("kl_estimator", estimator.name(), self.beta > 0.0 || estimator == KlEstimator::K3, expected)?;
        let in_reward = self.objective.use_kl_in_reward;
        let expected = "false, or beta above 0, which weighs it";
        check("use_kl_in_reward", in_reward, !in_reward || self.beta > 0.0, expected)?;
        let sums = self.objective.multi_objective_aggregation == MultiObjectiveAggregation::SumThenNormalize;
        let expected = "false: multi_objective_aggregation = normalize_then_sum scales each reward by itself, and none of them has the \
                        divergence";
        check("use_kl_in_reward", in_reward, !in_reward || sums, expected)?;
        let keeps_all = self.dynamic_sampling == DynamicSampling::None;
        let expected =
            "false, or dynamic_sampling = none: with the divergence in the rewards groups of equal rewards teach, too";
        check("use_kl_in_reward", in_reward, !in_reward || keeps_all, expected)?;
        let in_loss = self.beta > 0.0 && !in_reward;
        let is_noise = in_loss && estimator == KlEstimator::K1 && !self.use_bias_correction_kl;
        let expected = "true, or kl_estimator k2 or k3: the gradient of k1 alone is 0 in the mean";
        check("use_bias_correction_kl", self.use_bias_correction_kl, !is_noise, expected)
    }

    fn check_reference_sync(&self) -> Result<()> {
        let (given, default) = (&self.objective, ObjectiveConfig::default());
        let syncs = given.sync_ref_model;
        let expected = "false, or beta above 0: without beta there is no reference model";
        check("sync_ref_model", syncs, !syncs || self.beta > 0.0, expected)?;
        let expected =
            "false: adapters have their frozen base for a reference model, and none of their own to mix into";
        check("sync_ref_model", syncs, !syncs || self.lora.r.is_none(), expected)?;
        let (alpha, steps) = (given.ref_model_mixup_alpha, given.ref_model_sync_steps);
        let expected = "to be left out, or sync_ref_model = true, which alone reads it";
        check("ref_model_mixup_alpha", alpha, syncs || alpha == default.ref_model_mixup_alpha, expected)?;
        check("ref_model_sync_steps", steps, syncs || steps == default.ref_model_sync_steps, expected)
    }

    fn check_entropy(&self) -> Result<()> {
        let (given, default) = (&self.objective, ObjectiveConfig::default());
        let (least, most) = (given.entropy_coef_min, given.entropy_coef_max);
        check("entropy_coef_min", least, least <= most, format!("at most entropy_coef_max = {most}"))?;
        for (key, value, default) in [
            ("entropy_coef_min", least, default.entropy_coef_min),
            ("entropy_coef_max", most, default.entropy_coef_max),
            ("entropy_coef_delta", given.entropy_coef_delta, default.entropy_coef_delta),
            ("entropy_target", given.entropy_target, default.entropy_target),
        ] {
            let is_read = given.use_adaptive_entropy || value == default;
            check(key, value, is_read, "to be left out, or use_adaptive_entropy = true, which alone reads it")?;
        }
        let (share, drops) = (given.top_entropy_quantile, self.lora.r.is_some() && self.lora.dropout > 0.0);
        let expected = "1, or lora.dropout = 0: the entropies of a pass with dropout are not known before it";
        check("top_entropy_quantile", share, share == 1.0 || !drops, expected)
    }

    fn check_correction(&self) -> Result<()> {
        let (mode, is_on) = (self.importance_sampling_mode, self.importance_sampling_correction);
        let of_tokens = matches!(mode, ImportanceSamplingMode::TokenTruncate | ImportanceSamplingMode::TokenMask);
        let expected =
            "token_truncate or token_mask: loss_type vespo multiplies the ratios of a sequence's tokens itself";
        let fits = !is_on || self.loss_type != LossType::Vespo || of_tokens;
        check("importance_sampling_mode", mode.name(), fits, expected)?;
        let Some(least) = self.objective.importance_sampling_clip_min else { return Ok(()) };
        let most = self.importance_sampling_clip_max;
        let below = format!("below importance_sampling_clip_max = {most}");
        check("importance_sampling_clip_min", least, least < most, below)?;
        let expected = "to be left out: importance_sampling_correction is off";
        check("importance_sampling_clip_min", least, is_on, expected)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};
    use super::*;

    #[test]
    fn keys_that_nothing_reads_and_estimates_that_teach_nothing_are_refused() {
        for (overrides, part) in [
            (&["delta=2.0", "loss_type=sapo"][..], "loss_type sapo does not read it"),
            (&["sapo_temperature_neg=2"], "loss_type = sapo, which alone reads it"),
            (&["vespo_lambda_pos=1", "loss_type=sapo"], "loss_type = vespo, which alone reads it"),
            (&["loss_type=luspo"], "importance_sampling_level = token: expected sequence"),
            (&["loss_type=vespo"], "importance_sampling_mode = sequence_mask: expected token_truncate or token_mask"),
            (
                &["loss_type=vespo", "importance_sampling_mode=token_mask", "importance_sampling_level=sequence"],
                "importance_sampling_level = sequence: expected token",
            ),
            (&["advantage_estimator=rloo"], "scale_rewards = group: expected none, or batch"),
            (
                &["advantage_estimator=rloo", "scale_rewards=none", "multi_objective_aggregation=normalize_then_sum"],
                "advantage_estimator = rloo: expected grpo",
            ),
            (&["multi_objective_aggregation=normalize_then_sum", "scale_rewards=none"], "by group and then by batch"),
            (&["kl_estimator=k2"], "beta above 0"),
            (&["kl_estimator=k1", "beta=0.1", "use_bias_correction_kl=false"], "gradient of k1 alone is 0"),
            (&["use_kl_in_reward=true"], "or beta above 0, which weighs it"),
            (
                &["use_kl_in_reward=true", "beta=0.1", "multi_objective_aggregation=normalize_then_sum"],
                "none of them has the divergence",
            ),
            (&["use_kl_in_reward=true", "beta=0.1", "dynamic_sampling=filter"], "or dynamic_sampling = none"),
            (&["sync_ref_model=true"], "or beta above 0: without beta there is no reference model"),
            (&["sync_ref_model=true", "beta=0.1", "lora.r=4"], "none of their own to mix into"),
            (&["ref_model_sync_steps=2"], "or sync_ref_model = true, which alone reads it"),
            (&["ref_model_mixup_alpha=1.5", "sync_ref_model=true", "beta=0.1"], "from 0 to 1"),
            (&["importance_sampling_clip_min=3"], "below importance_sampling_clip_max = 3"),
            (
                &["importance_sampling_clip_min=0.5", "importance_sampling_correction=false"],
                "importance_sampling_correction is off",
            ),
            (&["off_policy_mask_threshold=0"], "above 0"),
            (&["entropy_coef_min=2", "use_adaptive_entropy=true"], "at most entropy_coef_max = 1"),
            (&["entropy_target=2"], "use_adaptive_entropy = true, which alone reads it"),
            (&["top_entropy_quantile=0.2", "lora.r=4", "lora.dropout=0.1"], "or lora.dropout = 0"),
        ] {
            let text = message(overrides);
            assert!(text.contains(part), "{overrides:?}: {text}");
        }
    }

    #[test]
    fn what_fits_together_is_taken() {
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
