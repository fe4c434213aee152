//! The policy loss and its explicit gradient with respect to the log-probabilities.

use tch::{Kind, Tensor};

use super::distillation::{TopLogprobs, TopTerms, bounded_ratio, sampled_divergence, top_divergence};
use super::entropy::EntropyTerm;
use super::importance::{PolicyRatio, SamplerCorrection};
use super::options::{Distillation, LossConfig};
use super::segments::Segments;
use super::stats::{DeviceStats, StatsRecorder};
use super::surrogate::{Surrogate, kl_term, on_policy};
use crate::config::LossType;
use crate::error::{Error, Result};

/// Loss of a micro-batch and its gradient.
///
/// With r the policy ratio, A the sequence's advantage, w the sampler correction, m the off-policy mask and k the estimate of the KL divergence, a
/// token's loss is `pg * m * w + beta * k`, where `k` is multiplied by r under `use_bias_correction_kl` (arXiv 2512.02556), and
///
/// - grpo, dr_grpo, bnpo, dapo, luspo: `pg = -min(min(r, delta) A, clamp(r, 1 - epsilon, 1 + epsilon_high) A)` (arXiv 1707.06347; epsilon_high: arXiv
///   2503.14476; delta: arXiv 2505.07291);
/// - cispo: `pg = -stop_gradient(min(r, epsilon_high)) A logprob` (arXiv 2506.13585);
/// - sapo: `pg = -(4 / t) sigmoid(t (r - 1)) A`, with t the temperature for A's sign (arXiv 2511.20347, equation 6);
/// - vespo: `pg = -stop_gradient(exp(l + k log(v) - l v)) A logprob` without w, with v the product of r and w over the sequence's tokens and k and l
///   the exponent and decay for A's sign (arXiv 2602.10693).
///
/// m is 0 where A is negative and the mean over a sequence's tokens of `rollout - logprob` (of `old - logprob` if the sampler's log-probabilities are
/// missing) is above `off_policy_mask_threshold` (arXiv 2512.02556, equation 9), and 1 elsewhere.
///
/// With a teacher, all of this is multiplied by `1 - weight`, and one of two terms is added: `weight * w * stop_gradient((logprob - teacher) r)
/// logprob`, with r up to a bound ([`Distillation`]), or `weight * w * stop_gradient(r)` times the divergence over the teacher's most probable
/// tokens. For every loss type, the divergence is averaged over the tokens of each sequence that the teacher scored, and then over all sequences, as
/// in TRL's `SDPOTrainer` and `SDFTTrainer`.
///
/// Tokens with an entropy below the threshold of [`EntropyTerm`] are left out of pg. An entropy bonus subtracts `coef` times the mean entropy of the
/// remaining tokens from the loss.
///
/// Token losses are summed with the weights of [`Denominators`]. Only m, w and the arguments of `stop_gradient` are constants. At ties (a ratio on a
/// bound) the gradient equals torch's: bounds belong to the clip range, `min` splits evenly.
///
/// # Errors
/// [`Error::InvalidArgument`] for wrong shapes or dtypes, or a missing tensor that the configuration needs.
pub fn policy_loss(input: &LossInput, config: &LossConfig, denominators: &Denominators) -> Result<LossOutput> {
    input.validate(config)?;
    let kind = input.logprobs.kind();
    let advantages = input.advantages.to_kind(kind); // [N]
    let segments = Segments::new(input.sequence_of_token, advantages.size()[0], kind);
    let logprobs = input.logprobs;
    let old_logprobs = input.old_logprobs.unwrap_or(logprobs).to_kind(kind);
    let rollout_logprobs = input.rollout_logprobs.map(|rollout| rollout.to_kind(kind));
    let log_ratio = logprobs - &old_logprobs;
    let ratio = PolicyRatio::new(&log_ratio, config.importance_sampling_level, &segments);
    let corrected = rollout_logprobs.as_ref().filter(|_| config.importance_sampling_correction);
    let correction = corrected.map(|rollout| SamplerCorrection::new(&old_logprobs, rollout, config, &segments));

    let mut recorder = StatsRecorder::new(input.logprobs.device());
    let surrogate = Surrogate {
        ratio: &ratio,
        log_ratio: &log_ratio,
        logprobs,
        advantages: &advantages,
        correction: correction.as_ref(),
        segments: &segments,
        config,
    };
    let mut terms = surrogate.terms(&mut recorder);
    if let Some(threshold) = config.objective.off_policy_mask_threshold {
        let sampled = rollout_logprobs.as_ref().unwrap_or(&old_logprobs);
        let kept = on_policy(&(sampled - logprobs), &advantages, threshold, &segments);
        terms = terms.map(|term| term * &kept);
    }
    let kept = input.kept_by_entropy();
    if let Some(kept) = &kept {
        terms = terms.map(|term| term * kept.to_kind(kind));
    }
    if let Some(correction) = &correction {
        if config.multiplies_by_correction() {
            terms = terms.map(|term| term * &correction.per_token);
        }
        record_sampling(&mut recorder, correction);
    }
    if let Some(reference) = input.ref_logprobs.filter(|_| config.beta != 0.0) {
        let kl = kl_term(&(reference.to_kind(kind) - logprobs), &ratio, config);
        recorder.mean("kl", &kl.value.sum(kind), &segments.ones.sum(kind));
        terms = terms.plus(&kl.map(|term| term * config.beta));
    }
    let weights = token_weights(&segments, config, denominators, input.bnpo_divisors); // [C]
    let mut from_teacher = None;
    if let (Some(Distillation { weight, clip_max, top }), Some(teacher)) = (config.distillation, input.teacher_logprobs)
    {
        let teacher = teacher.to_kind(kind);
        let known = teacher.isnan().logical_not(); // tokens that the teacher scored
        let mut factor = sequence_means(&segments, &known.to_kind(kind), denominators) * weight;
        if let Some(correction) = &correction {
            factor *= &correction.per_token;
        }
        terms = terms.map(|term| term * (1.0 - weight));
        let divergence = match (top, input.top) {
            (Some(top), Some(logprobs)) => {
                let [own, of_teacher] = logprobs.to_kind(kind);
                let of_teacher = own.where_self(&of_teacher.isnan(), &of_teacher); // difference 0 for tokens without a teacher's score
                let TopTerms { divergence, d_logprobs } = top_divergence(&[own, of_teacher], top);
                if let Some(ratio) = bounded_ratio(&log_ratio, clip_max) {
                    factor *= ratio;
                }
                let loss = (&factor * &divergence).sum(kind);
                let dtop = factor.unsqueeze(1) * d_logprobs;
                from_teacher = Some(TeacherLoss { loss, dlogprobs: None, dtop: Some(dtop) });
                divergence
            }
            _ => {
                let teacher = teacher.where_self(&known, logprobs);
                let (own, difference) = sampled_divergence(logprobs, &teacher, &log_ratio, clip_max);
                let loss = (&factor * own.value).sum(kind);
                from_teacher = Some(TeacherLoss { loss, dlogprobs: Some(factor * own.d_logprob), dtop: None });
                difference
            }
        };
        let known = known.to_kind(kind);
        recorder.mean("distillation/kl", &(divergence * &known).sum(kind), &known.sum(kind));
    }
    if let Some(entropy) = input.entropy {
        recorder.mean("entropy", &entropy.sum(Kind::Double), &segments.ones.sum(kind));
    }

    let direct = &weights * terms.d_logprob;
    let mut output = LossOutput {
        loss: (&weights * terms.value).sum(kind),
        dlogprobs: direct + ratio.backward(&(&weights * terms.d_log_ratio)),
        dentropy: None,
        dtop: None,
        mean_entropy: None,
        stats: recorder.finish()?,
    };
    if let Some(TeacherLoss { loss, dlogprobs, dtop }) = from_teacher {
        output.loss += loss;
        output.dtop = dtop;
        if let Some(dlogprobs) = dlogprobs {
            output.dlogprobs += dlogprobs;
        }
    }
    if let (Some(entropy), Some(term)) = (input.entropy, input.entropy_term.filter(|_| config.has_entropy_bonus())) {
        output.add_bonus(entropy, kept.as_ref(), &term);
    }
    Ok(output)
}

/// Divisors of token losses, over all ranks and micro-batches of one optimizer update. With them the contributions of micro-batches simply add up,
/// and no loss depends on how tokens were packed.
///
/// | loss | weight of a token of sequence s |
/// |---|---|
/// | grpo (arXiv 2402.03300), sapo (arXiv 2511.20347) | `1 / (length_s * num_sequences)` |
/// | luspo (arXiv 2602.05261) | `1 / num_sequences` |
/// | dr_grpo (arXiv 2503.20783) | `1 / (num_sequences * max_completion_length)` |
/// | dapo (arXiv 2503.14476), cispo (arXiv 2506.13585), vespo (arXiv 2602.10693) | `1 / num_tokens` |
/// | bnpo | `1 / bnpo_divisors[s]` of [`LossInput`], or `1 / num_tokens` if these are missing |
///
/// A teacher's divergence has the weights of grpo under every loss type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Denominators {
    /// Sequences of the update, including masked ones.
    pub num_sequences: f64,
    /// For dapo, cispo and vespo: packed tokens of the generation batch, divided by the number of updates in one pass over it. Otherwise: packed
    /// tokens of the update. Both are equal if a generation batch makes one update.
    pub num_tokens: f64,
    /// Tokens of the update; the entropy bonus is their mean.
    pub num_update_tokens: f64,
    /// Tokens of the update's sequences including prompts; the load-balancing loss of experts is their mean.
    pub num_sequence_tokens: f64,
}

/// The inputs of a loss for a micro-batch. Every token counts. A sequence may have no tokens, such as a truncated one that is masked: it counts in
/// statistics over sequences, with a ratio of 1, as in TRL.
///
/// Log-probabilities are float32 or float64; all other inputs are converted to their dtype.
#[derive(Debug, Clone, Copy)]
pub struct LossInput<'a> {
    /// The policy's log-probabilities, from the forward pass that is differentiated.
    pub logprobs: &'a Tensor, // [C]
    /// The policy's log-probabilities before the first update from these samples. `None` in that first update, where they equal `logprobs`.
    pub old_logprobs: Option<&'a Tensor>, // [C]
    /// The reference model's log-probabilities; needed if `beta` is not 0.
    pub ref_logprobs: Option<&'a Tensor>, // [C]
    /// A teacher's log-probabilities; NaN for a token that it has not scored, which is left out of the divergence.
    pub teacher_logprobs: Option<&'a Tensor>, // [C]
    /// Log-probabilities of the teacher's most probable tokens, for a divergence over these.
    pub top: Option<TopLogprobs<'a>>,
    /// The sampler's log-probabilities; NaN where it did not score a token. `None` turns the correction off.
    pub rollout_logprobs: Option<&'a Tensor>, // [C]
    /// The advantage of each sequence.
    pub advantages: &'a Tensor, // [N]
    /// For bnpo: the number of tokens in each sequence's batch, times the number of batches of the update. A batch has as many consecutive sequences
    /// as TRL's ranks process at once. `None` treats the whole update as one batch.
    pub bnpo_divisors: Option<&'a Tensor>, // [N]
    /// Index of each token's sequence, from 0 to N - 1.
    pub sequence_of_token: &'a Tensor, // [C] i64
    /// Entropy of each token's distribution in nats, for the statistics.
    pub entropy: Option<&'a Tensor>, // [C]
    /// The update's entropy term, if its objective has one.
    pub entropy_term: Option<EntropyTerm>,
}

impl LossInput<'_> {
    /// 1 for the tokens in the policy term and 0 for the others; `None` if all are in it.
    fn kept_by_entropy(&self) -> Option<Tensor> {
        let (entropy, least) = (self.entropy?, self.entropy_term?.least?);
        Some(entropy.ge(least).to_kind(entropy.kind())) // [C]
    }

    pub(super) fn validate(&self, config: &LossConfig) -> Result<()> {
        let invalid = |expected: String, got: String| Err(Error::InvalidArgument { op: "policy_loss", expected, got });
        if !matches!(self.logprobs.kind(), Kind::Float | Kind::Double) {
            return invalid("logprobs of kind Float or Double".into(), format!("{:?}", self.logprobs.kind()));
        }
        let shape = self.logprobs.size();
        if shape.len() != 1 || self.advantages.dim() != 1 || self.advantages.numel() == 0 {
            let got = format!("logprobs {shape:?}, advantages {:?}", self.advantages.size());
            return invalid("logprobs [C], advantages [N] with N > 0".into(), got);
        }
        if let Some(divisors) = self.bnpo_divisors.filter(|divisors| divisors.size() != self.advantages.size()) {
            return invalid(format!("bnpo_divisors {:?}", self.advantages.size()), format!("{:?}", divisors.size()));
        }
        let tokens = [
            ("old_logprobs", self.old_logprobs),
            ("ref_logprobs", self.ref_logprobs),
            ("teacher_logprobs", self.teacher_logprobs),
            ("rollout_logprobs", self.rollout_logprobs),
            ("sequence_of_token", Some(self.sequence_of_token)),
            ("entropy", self.entropy),
        ];
        for (name, tensor) in tokens {
            if let Some(tensor) = tensor.filter(|tensor| tensor.size() != shape) {
                return invalid(format!("{name} of shape {shape:?}"), format!("{:?}", tensor.size()));
            }
        }
        if self.entropy_term.is_some() && self.entropy.is_none() {
            return invalid("entropy, as the objective has an entropy term".into(), "none".into());
        }
        if config.beta != 0.0 && self.ref_logprobs.is_none() {
            return invalid("ref_logprobs, as beta is above 0".into(), "none".into());
        }
        if config.distillation.is_some() && self.teacher_logprobs.is_none() {
            return invalid("teacher_logprobs, as the objective has a distillation term".into(), "none".into());
        }
        if config.distillation.is_some_and(|distillation| distillation.top.is_some()) {
            let Some(top) = self.top else {
                return invalid("top, as the distillation term uses the teacher's top tokens".into(), "none".into());
            };
            let shapes = [top.logprobs.size(), top.teacher_logprobs.size()];
            if shapes[0] != shapes[1] || shapes[0].len() != 2 || shapes[0][0] != shape[0] {
                return invalid(
                    format!("log-probabilities [{}, K] of the policy and of the teacher", shape[0]),
                    format!("{shapes:?}"),
                );
            }
        }
        Ok(())
    }
}

impl LossOutput {
    /// Subtracts the entropy bonus over the kept tokens from the loss.
    fn add_bonus(&mut self, entropy: &Tensor, kept: Option<&Tensor>, term: &EntropyTerm) {
        let each = entropy.full_like(1.0 / term.num_tokens.max(1.0)); // [C]
        let each = kept.map_or_else(|| each.shallow_clone(), |kept| &each * kept);
        let mean = (entropy * &each).sum(self.loss.kind());
        if term.coef != 0.0 {
            self.loss = &self.loss - &mean * term.coef;
            self.dentropy = Some(each * -term.coef);
        }
        self.mean_entropy = Some(mean);
    }
}

/// Loss and gradient of a micro-batch.
#[derive(Debug)]
pub struct LossOutput {
    /// This micro-batch's contribution; the sum over all micro-batches and ranks is the loss. A scalar of the inputs' kind.
    pub loss: Tensor,
    /// dloss / dlogprobs.
    pub dlogprobs: Tensor, // [C]
    /// dloss / dentropy, if there is an entropy bonus with a coefficient other than 0.
    pub dentropy: Option<Tensor>, // [C]
    /// dloss / dlogprobs of the teacher's tokens, if there is a divergence over them.
    pub dtop: Option<Tensor>, // [C, K]
    /// This micro-batch's contribution to the mean entropy in the bonus, if there is one.
    pub mean_entropy: Option<Tensor>,
    /// TRL's statistics, still on the device, ready to be merged with other micro-batches'.
    pub stats: DeviceStats,
}

/// A micro-batch's weighted sum of divergences from a teacher.
struct TeacherLoss {
    loss: Tensor,
    dlogprobs: Option<Tensor>, // [C]
    dtop: Option<Tensor>,      // [C, K]
}

/// Weight of each token in the policy and KL terms. `[C]`
fn token_weights(
    segments: &Segments,
    config: &LossConfig,
    denominators: &Denominators,
    bnpo_divisors: Option<&Tensor>,
) -> Tensor {
    let Denominators { num_sequences, num_tokens, .. } = *denominators;
    match (config.loss_type, bnpo_divisors) {
        (LossType::Grpo | LossType::Sapo, _) => sequence_means(segments, &segments.ones, denominators),
        (LossType::Luspo, _) => &segments.ones / num_sequences,
        (LossType::DrGrpo, _) => &segments.ones / (num_sequences * config.max_completion_length as f64),
        (LossType::Bnpo, Some(divisors)) => &segments.ones / segments.expand(&divisors.to_kind(segments.ones.kind())),
        (LossType::Bnpo | LossType::Dapo | LossType::Cispo | LossType::Vespo, _) => {
            &segments.ones / num_tokens.max(1.0)
        }
    }
}

/// Weight of each token in the mean over sequences of per-sequence means; only tokens where `known` is 1 count. `[C]`
fn sequence_means(segments: &Segments, known: &Tensor, denominators: &Denominators) -> Tensor {
    known / (segments.expand(&segments.sum(known).clamp_min(1.0)) * denominators.num_sequences)
}

fn record_sampling(recorder: &mut StatsRecorder, correction: &SamplerCorrection) {
    recorder.mean_of("sampling/sampling_logp_difference/mean", &correction.differences);
    recorder.max("sampling/sampling_logp_difference/max", &correction.differences);
    recorder.min("sampling/importance_sampling_ratio/min", &correction.reported);
    recorder.mean_of("sampling/importance_sampling_ratio/mean", &correction.reported);
    recorder.max("sampling/importance_sampling_ratio/max", &correction.reported);
}
