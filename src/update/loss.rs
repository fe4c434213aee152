//! The loss of an update's micro-batches.

use tch::{Kind, Tensor};

use super::options::{UpdateOptions, UpdateOutcome};
use crate::error::Result;
use crate::grpo::{Denominators, DeviceStats, LossInput, LossOutput, policy_loss};
use crate::phase::{self, Phase};
use crate::torch::scalar;
use crate::train::{MicroBatch, Scores, Sequence, TokenGradients};

/// Loss and metrics of an update's micro-batches, on the device.
#[derive(Debug, Default)]
pub(super) struct UpdateSums(Option<(Tensor, DeviceStats)>);

impl UpdateSums {
    /// Adds a micro-batch's loss and returns its gradient by token.
    pub(super) fn differentiate(
        &mut self,
        micro_batch: &MicroBatch,
        scores: &Scores,
        denominators: &Denominators,
        options: &UpdateOptions,
    ) -> Result<TokenGradients> {
        let input = LossInput {
            logprobs: &scores.logprobs,
            old_logprobs: micro_batch.old_logprobs.as_ref(),
            ref_logprobs: micro_batch.ref_logprobs.as_ref(),
            rollout_logprobs: micro_batch.rollout_logprobs.as_ref(),
            advantages: &micro_batch.advantages,
            sequence_of_token: &micro_batch.sequence_of_token,
            entropy: Some(&scores.entropy),
        };
        let LossOutput { loss, dlogprobs, stats } = policy_loss(&input, &options.loss, denominators)?;
        // A loss that is not finite makes the gradient so: its norm tells all ranks to skip.
        let spoilt = if phase::fires_nan(Phase::ForwardBackward) { f64::NAN } else { 0.0 };
        let dlogprobs = dlogprobs.f_add(&loss.f_mul(&scalar(spoilt))?)?;
        self.add(&loss, stats)?;
        Ok(TokenGradients { dlogprobs, dentropy: None })
    }

    /// Adds the masked sequences of a rank's share, which are never packed: a micro-batch without tokens.
    pub(super) fn count_masked(&mut self, share: &[Sequence], options: &UpdateOptions) -> Result<()> {
        let masked: Vec<&Sequence> = share.iter().filter(|sequence| sequence.masked).collect();
        if masked.is_empty() {
            return Ok(());
        }
        let advantages: Vec<f32> = masked.iter().map(|sequence| sequence.advantage).collect();
        let no_tokens = |kind| Tensor::f_zeros([0], (kind, options.device));
        let (no_logprobs, no_indexes) = (no_tokens(Kind::Float)?, no_tokens(Kind::Int64)?);
        let have_logprobs = masked.iter().all(|sequence| sequence.rollout_logprobs.is_some());
        let input = LossInput {
            logprobs: &no_logprobs,
            old_logprobs: None,
            ref_logprobs: Some(&no_logprobs),
            rollout_logprobs: have_logprobs.then_some(&no_logprobs),
            advantages: &Tensor::from_slice(&advantages).f_to_device(options.device)?,
            sequence_of_token: &no_indexes,
            entropy: Some(&no_logprobs),
        };
        let nothing_to_divide = Denominators { num_sequences: 1.0, num_tokens: 1.0 };
        let LossOutput { loss, stats, .. } = policy_loss(&input, &options.loss, &nothing_to_divide)?;
        self.add(&loss, stats)
    }

    /// Into the outcome of all updates; nothing where all micro-batches were empty. Waits for the device.
    pub(super) fn read_into(self, outcome: &mut UpdateOutcome) -> Result<()> {
        let Some((loss, stats)) = self.0 else { return Ok(()) };
        outcome.loss += loss.double_value(&[]);
        outcome.stats.merge(&stats.read()?)
    }

    fn add(&mut self, loss: &Tensor, more: DeviceStats) -> Result<()> {
        match &mut self.0 {
            None => self.0 = Some((loss.shallow_clone(), more)),
            Some((sum, stats)) => {
                *sum = sum.f_add(loss)?;
                stats.merge(&more)?;
            }
        }
        Ok(())
    }
}
