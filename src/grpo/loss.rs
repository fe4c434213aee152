//! The policy loss and its gradient by the log-probabilities, written out.

use tch::{Kind, Tensor};

use super::importance::{PolicyRatio, SamplerCorrection};
use super::kl::k3;
use super::segments::Segments;
use super::stats::{DeviceStats, Recorder};
use crate::config::{Config, ImportanceSamplingLevel, ImportanceSamplingMode, LossType};
use crate::error::{Error, Result};

/// Loss of a micro-batch and its gradient.
///
/// With r the policy ratio, A the sequence's advantage, w the sampler correction and k the k3 estimate of the KL divergence,
/// a token's loss is `pg * w + beta * k`, where `k` is multiplied by r under `use_bias_correction_kl`
/// (arXiv 2512.02556), and
///
/// - grpo, dr_grpo, bnpo, dapo: `pg = -min(min(r, delta) A, clamp(r, 1 - epsilon, 1 + epsilon_high) A)`
///   (arXiv 1707.06347; epsilon_high: arXiv 2503.14476; delta: arXiv 2505.07291);
/// - cispo: `pg = -stop_gradient(min(r, epsilon_high)) A logprob` (arXiv 2506.13585).
///
/// Token losses are summed with the weights of [`Denominators`]. Only w and the ratio inside cispo are constants.
/// The gradient at ties (a ratio on a bound) is torch's: bounds belong to the clip range, `min` splits evenly.
///
/// # Errors
/// [`Error::InvalidArgument`] for shapes or kinds that do not fit, or a missing tensor that the configuration needs.
pub fn policy_loss(input: &LossInput, config: &LossConfig, denominators: &Denominators) -> Result<LossOutput> {
    input.validate(config)?;
    let kind = input.logprobs.kind();
    let advantages = input.advantages.to_kind(kind); // [N]
    let segments = Segments::new(input.sequence_of_token, advantages.size()[0], kind);
    let logprobs = input.logprobs;
    let old_logprobs = input.old_logprobs.unwrap_or(logprobs).to_kind(kind);
    let ratio = PolicyRatio::new(&(logprobs - &old_logprobs), config.importance_sampling_level, &segments);

    let mut recorder = Recorder::new(input.logprobs.device());
    let mut terms = match config.loss_type {
        LossType::Cispo => capped_reinforce(&ratio, &segments.expand(&advantages), logprobs, config),
        _ => clipped_surrogate(&ratio, &segments.expand(&advantages), config),
    };
    record_clipping(&mut recorder, &ratio, &advantages, config);
    if let Some(rollout) = input.rollout_logprobs.filter(|_| config.importance_sampling_correction) {
        let (mode, clip_max) = (config.importance_sampling_mode, config.importance_sampling_clip_max);
        let correction = SamplerCorrection::new(&old_logprobs, &rollout.to_kind(kind), mode, clip_max, &segments);
        terms = terms.map(|term| term * &correction.per_token);
        record_sampling(&mut recorder, &correction);
    }
    if let Some(reference) = input.ref_logprobs.filter(|_| config.beta != 0.0) {
        let kl = kl_term(&(reference.to_kind(kind) - logprobs), &ratio, config);
        recorder.mean("kl", &kl.value.sum(kind), &segments.ones.sum(kind));
        terms = terms.plus(&kl.map(|term| term * config.beta));
    }
    if let Some(entropy) = input.entropy {
        recorder.mean("entropy", &entropy.sum(Kind::Double), &segments.ones.sum(kind));
    }

    let weights = token_weights(&segments, config, denominators);
    let direct = &weights * terms.d_logprob;
    Ok(LossOutput {
        loss: (&weights * terms.value).sum(kind),
        dlogprobs: direct + ratio.backward(&(&weights * terms.d_log_ratio)),
        stats: recorder.finish()?,
    })
}

/// What the loss is made of. Defaults are those of TRL 1.16's `GRPOConfig`.
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
    /// Weight of the KL term.
    pub beta: f64,
    /// Multiply the KL term by the differentiable ratio.
    pub use_bias_correction_kl: bool,
    /// Multiply the policy term by the sampler correction where `rollout_logprobs` are given.
    pub importance_sampling_correction: bool,
    /// Level and kind of that correction.
    pub importance_sampling_mode: ImportanceSamplingMode,
    /// Upper bound of that correction.
    pub importance_sampling_clip_max: f64,
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
            beta: config.beta,
            use_bias_correction_kl: config.use_bias_correction_kl,
            importance_sampling_correction: config.importance_sampling_correction,
            importance_sampling_mode: config.importance_sampling_mode,
            importance_sampling_clip_max: config.importance_sampling_clip_max,
            max_completion_length: config.max_completion_length,
        }
    }
}

/// What token losses are divided by, over all ranks and all micro-batches of one optimizer update: with it a micro-batch's
/// contributions simply add up, and no loss depends on how tokens were packed.
///
/// | loss | weight of a token of sequence s |
/// |---|---|
/// | grpo (arXiv 2402.03300) | `1 / (length_s * num_sequences)` |
/// | dr_grpo (arXiv 2503.20783) | `1 / (num_sequences * max_completion_length)` |
/// | bnpo, dapo (arXiv 2503.14476), cispo (arXiv 2506.13585) | `1 / num_tokens` |
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Denominators {
    /// Sequences of the update, masked ones included.
    pub num_sequences: f64,
    /// bnpo: packed tokens of the update. dapo and cispo: packed tokens of the generation batch over the number of
    /// updates made from one pass over it. The two are the same where a generation batch makes one update.
    pub num_tokens: f64,
}

/// A micro-batch: every one of its tokens counts. Sequences without tokens are those of which no token counts, such as truncated
/// ones that are masked: they add to the statistics that are over sequences, with a ratio of 1, as in TRL.
///
/// Log-probabilities are float32 or float64; everything else is brought to their kind.
#[derive(Debug, Clone, Copy)]
pub struct LossInput<'a> {
    /// The policy's, of the forward that the gradient goes through.
    pub logprobs: &'a Tensor, // [C]
    /// The policy's before the first update from these samples; `None` says that this is that update: `logprobs` serve.
    pub old_logprobs: Option<&'a Tensor>, // [C]
    /// The reference model's; needed if `beta` is not 0.
    pub ref_logprobs: Option<&'a Tensor>, // [C]
    /// The sampler's; NaN where it could not score. `None` leaves the correction out.
    pub rollout_logprobs: Option<&'a Tensor>, // [C]
    /// One per sequence.
    pub advantages: &'a Tensor, // [N]
    /// Each token's sequence, 0 to N.
    pub sequence_of_token: &'a Tensor, // [C] i64
    /// Entropy of each token's distribution in nats, to be reported.
    pub entropy: Option<&'a Tensor>, // [C]
}

impl LossInput<'_> {
    fn validate(&self, config: &LossConfig) -> Result<()> {
        let invalid = |expected: String, got: String| Err(Error::InvalidArgument { op: "policy_loss", expected, got });
        if !matches!(self.logprobs.kind(), Kind::Float | Kind::Double) {
            return invalid("logprobs of kind Float or Double".into(), format!("{:?}", self.logprobs.kind()));
        }
        let shape = self.logprobs.size();
        if shape.len() != 1 || self.advantages.dim() != 1 || self.advantages.numel() == 0 {
            let got = format!("logprobs {shape:?}, advantages {:?}", self.advantages.size());
            return invalid("logprobs [C], advantages [N] with N > 0".into(), got);
        }
        let tokens = [
            ("old_logprobs", self.old_logprobs),
            ("ref_logprobs", self.ref_logprobs),
            ("rollout_logprobs", self.rollout_logprobs),
            ("sequence_of_token", Some(self.sequence_of_token)),
            ("entropy", self.entropy),
        ];
        for (name, tensor) in tokens {
            if let Some(tensor) = tensor.filter(|tensor| tensor.size() != shape) {
                return invalid(format!("{name} of shape {shape:?}"), format!("{:?}", tensor.size()));
            }
        }
        if config.beta != 0.0 && self.ref_logprobs.is_none() {
            return invalid("ref_logprobs, as beta is not 0".into(), "none".into());
        }
        Ok(())
    }
}

/// Loss and gradient of a micro-batch.
#[derive(Debug)]
pub struct LossOutput {
    /// This micro-batch's contribution; the sum over all micro-batches and ranks is the loss. A scalar of the inputs' kind.
    pub loss: Tensor,
    /// dloss / dlogprobs.
    pub dlogprobs: Tensor, // [C]
    /// What TRL logs, ready to be added to, still on the device.
    pub stats: DeviceStats,
}

/// A token's loss and its derivatives by its log-probability (directly) and by the log of its ratio.
#[derive(Debug)]
struct Terms {
    value: Tensor,       // [C]
    d_logprob: Tensor,   // [C]
    d_log_ratio: Tensor, // [C]
}

impl Terms {
    fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Terms {
        Terms { value: f(&self.value), d_logprob: f(&self.d_logprob), d_log_ratio: f(&self.d_log_ratio) }
    }

    fn plus(&self, other: &Terms) -> Terms {
        Terms {
            value: &self.value + &other.value,
            d_logprob: &self.d_logprob + &other.d_logprob,
            d_log_ratio: &self.d_log_ratio + &other.d_log_ratio,
        }
    }
}

fn clipped_surrogate(ratio: &PolicyRatio, advantages: &Tensor, config: &LossConfig) -> Terms {
    let ratio = ratio.per_token();
    let (low, high, delta) = config.bounds();
    let free = ratio.clamp_max(delta) * advantages;
    let clipped = ratio.clamp(low, high) * advantages;
    // Share of the gradient that goes through `free`: 1, 0, or one half at a tie, where the two mostly are the same anyway.
    let through_free = (free.less_tensor(&clipped).to_kind(ratio.kind()) + free.le_tensor(&clipped)) * 0.5;
    let moves: Tensor =
        &through_free * ratio.le(delta) + (1.0 - &through_free) * ratio.ge(low).logical_and(&ratio.le(high));
    Terms { value: -free.minimum(&clipped), d_logprob: ratio.zeros_like(), d_log_ratio: -(moves * advantages * ratio) }
}

fn capped_reinforce(ratio: &PolicyRatio, advantages: &Tensor, logprobs: &Tensor, config: &LossConfig) -> Terms {
    let d_logprob = -(ratio.per_token().clamp_max(config.epsilon_high) * advantages);
    Terms { value: &d_logprob * logprobs, d_log_ratio: d_logprob.zeros_like(), d_logprob }
}

fn kl_term(reference_difference: &Tensor, ratio: &PolicyRatio, config: &LossConfig) -> Terms {
    let (kl, d_kl) = k3(reference_difference);
    if !config.use_bias_correction_kl {
        return Terms { d_log_ratio: kl.zeros_like(), value: kl, d_logprob: d_kl };
    }
    let ratio = ratio.per_token();
    let value = kl * &ratio;
    Terms { d_log_ratio: value.shallow_clone(), value, d_logprob: d_kl * ratio }
}

/// Weight of each token in the loss. `[C]`
fn token_weights(segments: &Segments, config: &LossConfig, denominators: &Denominators) -> Tensor {
    let Denominators { num_sequences, num_tokens } = *denominators;
    match config.loss_type {
        LossType::Grpo => &segments.ones / (segments.expand(&segments.divisors()) * num_sequences),
        LossType::DrGrpo => &segments.ones / (num_sequences * config.max_completion_length as f64),
        LossType::Bnpo | LossType::Dapo | LossType::Cispo => &segments.ones / num_tokens.max(1.0),
    }
}

fn record_clipping(recorder: &mut Recorder, ratio: &PolicyRatio, advantages: &Tensor, config: &LossConfig) {
    let kind = ratio.values.kind();
    let advantages = ratio.of_sequences(advantages);
    let count = ratio.values.ones_like().sum(kind);
    let mean = |recorder: &mut Recorder, name, clipped: &Tensor| recorder.mean(name, &clipped.sum(kind), &count);
    if config.loss_type == LossType::Cispo {
        let capped = ratio.values.gt(config.epsilon_high).logical_and(&advantages.gt(0.0));
        return mean(recorder, "cispo_clip_ratio", &capped);
    }
    let (low, high, delta) = config.bounds();
    // TRL counts after the bound for negative advantages has acted.
    let values = ratio.values.clamp_max(delta);
    let clipped_low = values.lt(low).logical_and(&advantages.lt(0.0));
    let clipped_high = values.gt(high).logical_and(&advantages.gt(0.0));
    mean(recorder, "clip_ratio/low_mean", &clipped_low);
    mean(recorder, "clip_ratio/high_mean", &clipped_high);
    mean(recorder, "clip_ratio/region_mean", &clipped_low.logical_or(&clipped_high));
    recorder.min("clip_ratio/low_min", &ratio.sequence_means(&clipped_low.to_kind(kind)));
    recorder.max("clip_ratio/high_max", &ratio.sequence_means(&clipped_high.to_kind(kind)));
}

fn record_sampling(recorder: &mut Recorder, correction: &SamplerCorrection) {
    recorder.mean_of("sampling/sampling_logp_difference/mean", &correction.differences);
    recorder.max("sampling/sampling_logp_difference/max", &correction.differences);
    recorder.min("sampling/importance_sampling_ratio/min", &correction.reported);
    recorder.mean_of("sampling/importance_sampling_ratio/mean", &correction.reported);
    recorder.max("sampling/importance_sampling_ratio/max", &correction.reported);
}

impl LossConfig {
    /// Lower and upper end of the clip range, and the bound for negative advantages.
    fn bounds(&self) -> (f64, f64, f64) {
        (1.0 - self.epsilon, 1.0 + self.epsilon_high, self.delta.unwrap_or(f64::INFINITY))
    }
}
