//! Importance ratios: policy to old policy, and trainer to sampler.

use tch::Tensor;

use super::options::LossConfig;
use super::segments::Segments;
use crate::config::{ImportanceSamplingLevel, ImportanceSamplingMode};

/// The ratio of the policy to the old policy, from which the samples are assumed to come.
///
/// Token level: `r_t = exp(logprob_t - old_t)`. Sequence level (GSPO, arXiv 2507.18071, equation 6):
/// `r_s = exp(mean over tokens of (logprob_t - old_t))`, the same for every token of s, and 1 without any.
#[derive(Debug)]
pub(crate) struct PolicyRatio<'a> {
    level: ImportanceSamplingLevel,
    segments: &'a Segments,
    /// One value per token or per sequence.
    pub values: Tensor, // [C] or [N]
}

impl<'a> PolicyRatio<'a> {
    /// Computes the ratio from `logprob - old` `[C]`.
    pub fn new(log_ratio: &Tensor, level: ImportanceSamplingLevel, segments: &'a Segments) -> Self {
        let values = match level {
            ImportanceSamplingLevel::Token => log_ratio.exp(),
            ImportanceSamplingLevel::Sequence => (segments.sum(log_ratio) / segments.divisors()).exp(),
        };
        Self { level, segments, values }
    }

    /// The ratio for each token. `[C]`
    pub fn per_token(&self) -> Tensor {
        self.at_tokens(&self.values)
    }

    fn at_tokens(&self, values: &Tensor) -> Tensor {
        match self.level {
            ImportanceSamplingLevel::Token => values.shallow_clone(),
            ImportanceSamplingLevel::Sequence => self.segments.expand(values),
        }
    }

    /// Converts a value per sequence to the level of the ratio. `[N] -> [C] or [N]`
    pub fn of_sequences(&self, values: &Tensor) -> Tensor {
        match self.level {
            ImportanceSamplingLevel::Token => self.segments.expand(values),
            ImportanceSamplingLevel::Sequence => values.shallow_clone(),
        }
    }

    /// Mean over each sequence of a quantity at the ratio's level; at token level NaN for a sequence without tokens. `[C] or [N] -> [N]`
    pub fn sequence_means(&self, x: &Tensor) -> Tensor {
        match self.level {
            ImportanceSamplingLevel::Token => self.segments.sum(x) / &self.segments.lengths,
            ImportanceSamplingLevel::Sequence => x.shallow_clone(),
        }
    }

    /// Gradient with respect to the log-probabilities, from the gradient with respect to the log ratio of each token; both `[C]`. A sequence's ratio
    /// depends on all its tokens equally: `dlog r_s / dlogprob_t = 1 / length_s`.
    pub fn backward(&self, d_log_ratio: &Tensor) -> Tensor {
        match self.level {
            ImportanceSamplingLevel::Token => d_log_ratio.shallow_clone(),
            ImportanceSamplingLevel::Sequence => {
                let per_sequence = self.segments.sum(d_log_ratio) / self.segments.divisors();
                self.segments.expand(&per_sequence)
            }
        }
    }
}

/// The weight that corrects for the difference between the sampler's and the trainer's probabilities: `w = exp(old - rollout)`, of a token or summed
/// in the exponent over a sequence. It is bounded by `clip_max` and, if set, by `clip_min`: either clipped (truncated importance sampling; Yao et
/// al., "Your efficient RL framework secretly brings you off-policy RL training", 2025) or set to 0 outside the bounds (masked). It is a constant
/// without gradient. Where the sampler reported NaN the difference counts as 0.
#[derive(Debug)]
pub(crate) struct SamplerCorrection {
    /// The weight for each token.
    pub per_token: Tensor, // [C]
    /// The weights to report: of every token, or of every sequence, where a sequence without tokens has 1.
    pub reported: Tensor, // [C] or [N]
    /// |old - rollout|, NaN where the sampler did not score a token.
    pub differences: Tensor, // [C]
}

impl SamplerCorrection {
    /// Computes the correction from the old policy's and the sampler's log-probabilities `[C]`.
    pub fn new(old_logprobs: &Tensor, rollout_logprobs: &Tensor, config: &LossConfig, segments: &Segments) -> Self {
        let (mode, clip_max) = (config.importance_sampling_mode, config.importance_sampling_clip_max);
        let clip_min = config.objective.importance_sampling_clip_min;
        let raw = old_logprobs - rollout_logprobs;
        let difference = raw.nan_to_num(0.0, f64::INFINITY, f64::NEG_INFINITY);
        let differences = raw.abs();
        let (weights, sequence_level) = match mode {
            ImportanceSamplingMode::TokenTruncate | ImportanceSamplingMode::TokenMask => (difference.exp(), false),
            ImportanceSamplingMode::SequenceTruncate | ImportanceSamplingMode::SequenceMask => {
                (segments.sum(&difference).exp(), true)
            }
        };
        let weights = match mode {
            ImportanceSamplingMode::TokenTruncate | ImportanceSamplingMode::SequenceTruncate => {
                let weights = weights.clamp_max(clip_max);
                clip_min.map_or_else(|| weights.shallow_clone(), |least| weights.clamp_min(least))
            }
            ImportanceSamplingMode::TokenMask | ImportanceSamplingMode::SequenceMask => {
                let masked = weights.masked_fill(&weights.gt(clip_max), 0.0);
                clip_min.map_or_else(|| masked.shallow_clone(), |least| masked.masked_fill(&weights.lt(least), 0.0))
            }
        };
        if sequence_level {
            Self { per_token: segments.expand(&weights), reported: weights, differences }
        } else {
            Self { reported: weights.shallow_clone(), per_token: weights, differences }
        }
    }
}
