//! The loss of an update's micro-batches.

use tch::{Kind, Tensor};

use super::options::{UpdateOptions, UpdateOutcome};
use crate::error::Result;
use crate::grpo::{
    Denominators, DeviceStats, EntropyTerm, LossInput, LossOutput, TopLogprobs, age_stats, exactness_stats,
};
use crate::phase::{self, Phase};
use crate::torch::scalar;
use crate::train::{MicroBatch, Scores, Sequence, TokenGradients};

/// Sums of loss and metrics over an update's micro-batches, on the device.
#[derive(Debug)]
pub(super) struct UpdateSums {
    term: Option<EntropyTerm>,
    /// Weight of the auxiliary loss that balances experts.
    router_aux_loss_coef: f64,
    /// Whether the weights are still those that sampled.
    is_first: bool,
    /// Whether this rank counts the sums, if several ranks share its micro-batches.
    counts: bool,
    sums: Option<LossSums>,
}

#[derive(Debug)]
struct LossSums {
    loss: Tensor,
    mean_entropy: Option<Tensor>,
    /// Contribution to the mean over the update's tokens.
    aux_loss: Option<Tensor>,
    differing_experts: Option<Tensor>, // [2]
    stats: DeviceStats,
}

impl UpdateSums {
    /// Creates sums for an update whose objective has the entropy term `term` and `router_aux_loss_coef` times the auxiliary loss that balances
    /// experts. `is_first` states whether it is the first update on its generation batch.
    pub(super) fn new(term: Option<EntropyTerm>, router_aux_loss_coef: f64, is_first: bool) -> Self {
        Self { term, router_aux_loss_coef, is_first, counts: true, sums: None }
    }

    /// Sets whether this rank counts the sums, or leaves that to another rank with the same micro-batches.
    pub(super) fn counting(self, counts: bool) -> Self {
        Self { counts, ..self }
    }

    /// Adds a micro-batch's loss and returns its gradient for each token. `selected_by` are the entropies that the term's threshold was computed from,
    /// if it has one: tokens with equal entropies there stay together, whatever the last bits of `scores` are. [C]
    pub(super) fn differentiate(
        &mut self,
        micro_batch: &MicroBatch,
        scores: &Scores,
        selected_by: Option<&Tensor>,
        denominators: &Denominators,
        options: &UpdateOptions,
    ) -> Result<TokenGradients> {
        let input = LossInput {
            logprobs: &scores.logprobs,
            old_logprobs: micro_batch.old_logprobs.as_ref(),
            ref_logprobs: micro_batch.ref_logprobs.as_ref(),
            teacher_logprobs: micro_batch.teacher_logprobs.as_ref(),
            rollout_logprobs: micro_batch.rollout_logprobs.as_ref(),
            advantages: &micro_batch.advantages,
            bnpo_divisors: micro_batch.bnpo_divisors.as_ref(),
            sequence_of_token: &micro_batch.sequence_of_token,
            top: scores
                .top
                .as_ref()
                .zip(micro_batch.teacher_top.as_ref())
                .map(|(own, teacher)| TopLogprobs { logprobs: &own.logprobs, teacher_logprobs: &teacher.logprobs }),
            entropy: Some(selected_by.unwrap_or(&scores.entropy)),
            entropy_term: self.term,
        };
        let LossOutput { loss, dlogprobs, dentropy, dtop, mean_entropy, stats } =
            options.differentiate(&input, denominators)?;
        let stats = self.completed(stats, &input, micro_batch.token_ages.as_ref(), options)?;
        // A non-finite loss makes the gradient non-finite, whose norm tells all ranks to skip the update.
        let spoilt = if phase::fires_nan(Phase::ForwardBackward) { f64::NAN } else { 0.0 };
        let dlogprobs = dlogprobs.f_add(&loss.f_mul(&scalar(spoilt))?)?;
        let share = micro_batch.num_sequence_tokens() / denominators.num_sequence_tokens;
        let aux_loss = scores.aux_loss.as_ref().map(|aux_loss| aux_loss.f_mul(&scalar(share))).transpose()?;
        let differing_experts = scores.differing_experts.as_ref().map(Tensor::shallow_clone);
        self.add(LossSums { loss, mean_entropy, aux_loss, differing_experts, stats })?;
        Ok(TokenGradients { dlogprobs, dentropy, dtop, daux_loss: self.router_aux_loss_coef * share })
    }

    /// Adds the masked sequences of a rank's share, which are never packed, as a micro-batch without tokens.
    pub(super) fn count_masked(&mut self, share: &[Sequence], options: &UpdateOptions) -> Result<()> {
        let masked: Vec<&Sequence> = share.iter().filter(|sequence| sequence.masked).collect();
        if masked.is_empty() {
            return Ok(());
        }
        let advantages: Vec<f32> = masked.iter().map(|sequence| sequence.advantage).collect();
        let no_tokens = |kind| Tensor::f_zeros([0], (kind, options.device));
        let (no_logprobs, no_indexes) = (no_tokens(Kind::Float)?, no_tokens(Kind::Int64)?);
        let no_top = Tensor::f_zeros([0, 1], (Kind::Float, options.device))?;
        let have_logprobs = masked.iter().all(|sequence| sequence.rollout_logprobs.is_some());
        let input = LossInput {
            logprobs: &no_logprobs,
            old_logprobs: None,
            ref_logprobs: Some(&no_logprobs),
            teacher_logprobs: Some(&no_logprobs),
            rollout_logprobs: have_logprobs.then_some(&no_logprobs),
            advantages: &Tensor::from_slice(&advantages).f_to_device(options.device)?,
            bnpo_divisors: None,
            sequence_of_token: &no_indexes,
            top: Some(TopLogprobs { logprobs: &no_top, teacher_logprobs: &no_top }),
            entropy: Some(&no_logprobs),
            entropy_term: self.term,
        };
        let nothing_to_divide =
            Denominators { num_sequences: 1.0, num_tokens: 1.0, num_update_tokens: 1.0, num_sequence_tokens: 1.0 };
        let LossOutput { loss, mean_entropy, stats, .. } = options.differentiate(&input, &nothing_to_divide)?;
        let stats = self.completed(stats, &input, Some(&no_indexes), options)?;
        self.add(LossSums { loss, mean_entropy, aux_loss: None, differing_experts: None, stats })
    }

    /// Adds the sums to the outcome of all updates; adds nothing if all micro-batches were empty. Returns this rank's contribution to the mean
    /// entropy, for the entropy bonus. Waits for the device.
    pub(super) fn read_into(self, outcome: &mut UpdateOutcome) -> Result<f64> {
        let Some(LossSums { loss, mean_entropy, aux_loss, differing_experts, stats }) = self.sums else {
            return Ok(0.0);
        };
        let loss = loss.double_value(&[]);
        let mean_entropy = mean_entropy.map_or(0.0, |mean| mean.double_value(&[]));
        let aux_loss = aux_loss.map(|mean| mean.double_value(&[]));
        outcome.loss += loss + self.router_aux_loss_coef * aux_loss.unwrap_or(0.0);
        if let Some(counts) = differing_experts {
            let counts = [0, 1].map(|index| counts.int64_value(&[index]) as f64);
            outcome.differing_experts = [0, 1].map(|index| outcome.differing_experts[index] + counts[index]);
        }
        outcome.aux_loss = outcome.aux_loss.map(|sum| sum + aux_loss.unwrap_or(0.0));
        outcome.policy_loss += loss + self.term.map_or(0.0, |term| term.coef * mean_entropy);
        outcome.stats.merge(&stats.read()?)?;
        Ok(mean_entropy)
    }

    fn add(&mut self, more: LossSums) -> Result<()> {
        if !self.counts {
            return Ok(());
        }
        let Some(sums) = &mut self.sums else {
            self.sums = Some(more);
            return Ok(());
        };
        sums.loss = sums.loss.f_add(&more.loss)?;
        if let (Some(sum), Some(mean)) = (&mut sums.mean_entropy, more.mean_entropy) {
            *sum = sum.f_add(&mean)?;
        }
        sums.aux_loss = match (sums.aux_loss.take(), more.aux_loss) {
            (Some(sum), Some(mean)) => Some(sum.f_add(&mean)?),
            (sum, mean) => sum.or(mean),
        };
        sums.differing_experts = match (sums.differing_experts.take(), more.differing_experts) {
            (Some(sum), Some(counts)) => Some(sum.f_add(&counts)?),
            (sum, counts) => sum.or(counts),
        };
        sums.stats.merge(&more.stats)
    }

    /// Adds the statistics by token age and those of equality with the sampler, if they are recorded.
    fn completed(
        &self,
        stats: DeviceStats,
        input: &LossInput<'_>,
        token_ages: Option<&Tensor>,
        options: &UpdateOptions,
    ) -> Result<DeviceStats> {
        let stats = match options.exact {
            true => stats.join(exactness_stats(input, token_ages, self.is_first)?)?,
            false => stats,
        };
        match options.max_token_age {
            0 => Ok(stats),
            max_age => stats.join(age_stats(input, &options.loss, token_ages, max_age)?),
        }
    }
}
