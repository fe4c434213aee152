//! How a generation batch becomes updates, what comes of them, and the loss in between.

use std::time::Duration;

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::grpo::{Denominators, DeviceStats, LossConfig, LossInput, LossOutput, LossStats, policy_loss};
use crate::phase::{self, Phase};
use crate::torch::scalar;
use crate::train::{MicroBatch, Schedule, Scores, Sequence, TokenGradients};

/// How a generation batch becomes updates.
#[derive(Debug, Clone)]
pub struct UpdateOptions {
    /// The objective.
    pub loss: LossConfig,
    /// Temperature of the sampler, applied to the trainer's logits too.
    pub temperature: f64,
    /// Passes over the batch.
    pub num_iterations: usize,
    /// Updates in one pass.
    pub updates_per_generation: usize,
    /// Token budget of a micro-batch.
    pub max_tokens_per_micro_batch: usize,
    /// Run the prompt of a group once for all its completions, where no sliding window is shorter than a sequence.
    pub share_prompts: bool,
    /// Learning rate by update.
    pub schedule: Schedule,
    /// Updates made before this batch.
    pub global_step: u64,
    /// Clip the global gradient norm to this; 0 is off.
    pub max_grad_norm: f64,
    /// Where micro-batches live.
    pub device: Device,
}

impl UpdateOptions {
    /// Whether the log-probabilities before the first update must be kept: with a single update the training forward's own
    /// serve as old ones.
    pub(super) fn needs_old_logprobs(&self) -> bool {
        self.num_updates() > 1
    }

    /// Updates of one generation batch, skipped ones too; no more than the schedule has left.
    pub fn num_updates(&self) -> u64 {
        let left = (self.schedule.total_steps as u64).saturating_sub(self.global_step);
        left.min((self.num_iterations * self.updates_per_generation) as u64)
    }
}

/// What the updates of one generation batch did; sums are over this rank's part.
#[derive(Debug, Default)]
pub struct UpdateOutcome {
    /// This rank's contribution to the loss, mean over updates; the sum over ranks is the loss.
    pub loss: f64,
    /// Mean global gradient norm before clipping, over the updates that were not skipped.
    pub grad_norm: f64,
    /// Rate of the last update.
    pub learning_rate: f64,
    /// TRL's loss metrics.
    pub stats: LossStats,
    /// Updates made or skipped.
    pub num_updates: u64,
    /// Updates skipped on all ranks for a non-finite gradient.
    pub num_skipped: u64,
    /// Tokens run forward and backward on this rank.
    pub num_trained_tokens: usize,
    /// How long computation waited for collectives.
    pub exposed_communication: Duration,
}

/// Told how far an update is, micro-batch by micro-batch.
pub trait UpdateProgress {
    /// A phase of `total` micro-batches begins.
    fn begin(&self, phase: Phase, total: usize);
    /// One of them is done.
    fn advance(&self);
    /// An update over `sequences` of this rank was skipped on all ranks, for a loss or gradient that is not finite.
    ///
    /// # Errors
    /// If that cannot be written down.
    fn skipped(&self, update: u64, sequences: &[Sequence]) -> Result<()>;
}

/// For callers that show nothing.
impl UpdateProgress for () {
    fn begin(&self, _phase: Phase, _total: usize) {}
    fn advance(&self) {}
    fn skipped(&self, _update: u64, _sequences: &[Sequence]) -> Result<()> {
        Ok(())
    }
}

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
