//! The terms of a token's loss: the surrogate objective of each loss type with its metrics, the off-policy mask, and the KL term.

use tch::Tensor;

use super::importance::{PolicyRatio, SamplerCorrection};
use super::kl::{KlEstimate, kl_estimate};
use super::options::LossConfig;
use super::segments::Segments;
use super::stats::StatsRecorder;
use crate::config::LossType;

/// vespo: bound on the absolute log ratio of a token, and upper bound on the log weight of a sequence.
const MAX_LOG_WEIGHT: f64 = 20.0;

/// vespo: lower bound on the weight of a sequence.
const MIN_WEIGHT: f64 = 1e-8;

/// A token's loss and its derivatives with respect to the log-probability (directly) and to the log of the ratio.
#[derive(Debug)]
pub(super) struct Terms {
    pub value: Tensor,       // [C]
    pub d_logprob: Tensor,   // [C]
    pub d_log_ratio: Tensor, // [C]
}

impl Terms {
    pub fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Terms {
        Terms { value: f(&self.value), d_logprob: f(&self.d_logprob), d_log_ratio: f(&self.d_log_ratio) }
    }

    pub fn plus(&self, other: &Terms) -> Terms {
        Terms {
            value: &self.value + &other.value,
            d_logprob: &self.d_logprob + &other.d_logprob,
            d_log_ratio: &self.d_log_ratio + &other.d_log_ratio,
        }
    }
}

/// The inputs of the policy term.
#[derive(Debug)]
pub(super) struct Surrogate<'a> {
    pub ratio: &'a PolicyRatio<'a>,
    pub log_ratio: &'a Tensor,  // [C]
    pub logprobs: &'a Tensor,   // [C]
    pub advantages: &'a Tensor, // [N]
    pub correction: Option<&'a SamplerCorrection>,
    pub segments: &'a Segments,
    pub config: &'a LossConfig,
}

impl Surrogate<'_> {
    /// The policy term of each token, before mask and correction. Records the metrics of the loss type.
    pub fn terms(&self, recorder: &mut StatsRecorder) -> Terms {
        match self.config.loss_type {
            LossType::Cispo => {
                let terms = self.capped_reinforce();
                self.record_capping(recorder);
                terms
            }
            LossType::Sapo => self.soft_gate(),
            LossType::Vespo => self.gamma_weighted(recorder),
            LossType::Grpo | LossType::DrGrpo | LossType::Bnpo | LossType::Dapo | LossType::Luspo => {
                let terms = self.clipped();
                self.record_clipping(recorder);
                terms
            }
        }
    }

    fn clipped(&self) -> Terms {
        let (ratio, advantages) = (self.ratio.per_token(), self.segments.expand(self.advantages));
        let (low, high, delta) = self.config.bounds();
        let free = ratio.clamp_max(delta) * &advantages;
        let clipped = ratio.clamp(low, high) * &advantages;
        // Share of the gradient through `free`: 1, 0, or 1/2 at a tie, where both terms usually are the same anyway.
        let through_free = (free.less_tensor(&clipped).to_kind(ratio.kind()) + free.le_tensor(&clipped)) * 0.5;
        let moves: Tensor =
            &through_free * ratio.le(delta) + (1.0 - &through_free) * ratio.ge(low).logical_and(&ratio.le(high));
        let d_log_ratio = -(moves * &advantages * &ratio);
        Terms { value: -free.minimum(&clipped), d_logprob: ratio.zeros_like(), d_log_ratio }
    }

    fn capped_reinforce(&self) -> Terms {
        let advantages = self.segments.expand(self.advantages);
        self.reinforce(-(self.ratio.per_token().clamp_max(self.config.epsilon_high) * advantages))
    }

    /// `d_logprob * logprob`, where `d_logprob` is treated as a constant.
    fn reinforce(&self, d_logprob: Tensor) -> Terms {
        Terms { value: &d_logprob * self.logprobs, d_log_ratio: d_logprob.zeros_like(), d_logprob }
    }

    fn soft_gate(&self) -> Terms {
        let (negative, positive) =
            (self.config.objective.sapo_temperature_neg, self.config.objective.sapo_temperature_pos);
        let temperatures =
            self.segments.expand(&by_sign(self.advantages, &self.advantages.gt(0.0), positive, negative));
        let (ratio, advantages) = (self.ratio.per_token(), self.segments.expand(self.advantages));
        let gate = (&temperatures * (&ratio - 1.0)).sigmoid();
        let value = -(&gate * 4.0 / temperatures * &advantages);
        let slope: Tensor = &gate * (1.0 - &gate) * 4.0;
        let d_log_ratio = -(slope * advantages * &ratio);
        Terms { value, d_logprob: ratio.zeros_like(), d_log_ratio }
    }

    fn gamma_weighted(&self, recorder: &mut StatsRecorder) -> Terms {
        let weights = self.gamma_weights();
        recorder.mean_of("vespo/phi_seq_mean", &weights);
        self.reinforce(-(self.segments.expand(&(weights * self.advantages))))
    }

    /// `exp(l + k log(v) - l v)` for each sequence of weight v, which is 1 at v = 1. `[N]`
    fn gamma_weights(&self) -> Tensor {
        let (config, min_log_weight) = (self.config, MIN_WEIGHT.ln());
        let mut log_weight = self.segments.sum(&self.log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT));
        if let Some(correction) = self.correction {
            let log_correction = correction.per_token.log().clamp(min_log_weight, MAX_LOG_WEIGHT);
            log_weight += self.segments.sum(&log_correction);
        }
        let log_weight = log_weight.clamp(min_log_weight, MAX_LOG_WEIGHT);
        let is_positive = self.advantages.ge(0.0);
        let k = by_sign(self.advantages, &is_positive, config.objective.vespo_k_pos, config.objective.vespo_k_neg);
        let lambda = by_sign(
            self.advantages,
            &is_positive,
            config.objective.vespo_lambda_pos,
            config.objective.vespo_lambda_neg,
        );
        let lambda = lambda.clamp_min(1e-4);
        let log_phi = &lambda + k * &log_weight - lambda * log_weight.exp();
        log_phi.exp().nan_to_num(0.0, 0.0, 0.0)
    }

    fn record_capping(&self, recorder: &mut StatsRecorder) {
        let values = &self.ratio.values;
        let advantages = self.ratio.of_sequences(self.advantages);
        let capped = values.gt(self.config.epsilon_high).logical_and(&advantages.gt(0.0));
        recorder.mean("cispo_clip_ratio", &capped.sum(values.kind()), &values.ones_like().sum(values.kind()));
    }

    fn record_clipping(&self, recorder: &mut StatsRecorder) {
        let (ratio, kind) = (self.ratio, self.ratio.values.kind());
        let advantages = ratio.of_sequences(self.advantages);
        let count = ratio.values.ones_like().sum(kind);
        let mean =
            |recorder: &mut StatsRecorder, name, clipped: &Tensor| recorder.mean(name, &clipped.sum(kind), &count);
        let (low, high, delta) = self.config.bounds();
        // TRL counts clipping after the bound for negative advantages is applied.
        let values = ratio.values.clamp_max(delta);
        let clipped_low = values.lt(low).logical_and(&advantages.lt(0.0));
        let clipped_high = values.gt(high).logical_and(&advantages.gt(0.0));
        mean(recorder, "clip_ratio/low_mean", &clipped_low);
        mean(recorder, "clip_ratio/high_mean", &clipped_high);
        mean(recorder, "clip_ratio/region_mean", &clipped_low.logical_or(&clipped_high));
        recorder.min("clip_ratio/low_min", &ratio.sequence_means(&clipped_low.to_kind(kind)));
        recorder.max("clip_ratio/high_max", &ratio.sequence_means(&clipped_high.to_kind(kind)));
    }
}

/// `positive` where `is_positive`, else `negative`, with the shape and dtype of `like`. `[N]`
fn by_sign(like: &Tensor, is_positive: &Tensor, positive: f64, negative: f64) -> Tensor {
    like.full_like(negative).masked_fill(is_positive, positive)
}

/// The off-policy mask. A token's mask is 1 if its sequence's advantage is not negative, or if the sequence's mean of `difference` (sampler's minus
/// policy's log-probability) is at most `threshold`; else 0. NaN log-probabilities of the sampler count as difference 0. `[C], [N] -> [C]`
pub(super) fn on_policy(difference: &Tensor, advantages: &Tensor, threshold: f64, segments: &Segments) -> Tensor {
    let difference = difference.nan_to_num(0.0, f64::INFINITY, f64::NEG_INFINITY);
    let means = segments.sum(&difference) / segments.divisors();
    let kept = advantages.ge(0.0).logical_or(&means.le(threshold));
    segments.expand(&kept.to_kind(advantages.kind()))
}

/// The KL term of each token, before the multiplication by beta.
pub(super) fn kl_term(reference_difference: &Tensor, ratio: &PolicyRatio, config: &LossConfig) -> Terms {
    let KlEstimate { value: kl, d_logprob: d_kl } = kl_estimate(config.objective.kl_estimator, reference_difference);
    if !config.use_bias_correction_kl {
        return Terms { d_log_ratio: kl.zeros_like(), value: kl, d_logprob: d_kl };
    }
    let ratio = ratio.per_token();
    let value = kl * &ratio;
    Terms { d_log_ratio: value.shallow_clone(), value, d_logprob: d_kl * ratio }
}

impl LossConfig {
    /// Lower and upper end of the clip range, and the ratio's bound for negative advantages.
    fn bounds(&self) -> (f64, f64, f64) {
        (1.0 - self.epsilon, 1.0 + self.epsilon_high, self.delta.unwrap_or(f64::INFINITY))
    }
}
