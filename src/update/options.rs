//! How a generation batch becomes updates, what comes of them, and who is shown how far they are.
//!
//! With several updates per generation batch, sequence i takes part in update i % updates, not in a shuffled slice: the updates then
//! do not depend on the world size.

use std::time::Duration;

use tch::Device;

use crate::config::{BatchPlan, Config, ObjectiveConfig};
use crate::error::Result;
use crate::grpo::{
    Denominators, EntropyControl, LossConfig, LossFunction, LossInput, LossOutput, LossStats, policy_loss,
};
use crate::phase::Phase;
use crate::train::{Schedule, Sequence, Transitions};

/// How a generation batch becomes updates.
#[derive(Debug, Clone)]
pub struct UpdateOptions {
    /// The objective.
    pub loss: LossConfig,
    /// A loss of the caller's own in place of it.
    pub loss_function: Option<LossFunction>,
    /// Weight of the entropy bonus in the first update.
    pub entropy_control: EntropyControl,
    /// Whether the policy scores the samples as their teacher.
    pub teaches_itself: bool,
    /// Temperature of the sampler, applied to the trainer's logits too.
    pub temperature: f64,
    /// Passes over the batch.
    pub num_iterations: usize,
    /// Updates in one pass.
    pub updates_per_generation: usize,
    /// How the reference model follows the policy, if it does.
    pub reference_sync: Option<ReferenceSync>,
    /// Token budget of a micro-batch.
    pub max_tokens_per_micro_batch: usize,
    /// Sequences of a batch whose tokens the loss `bnpo` is a mean over.
    pub bnpo_batch_size: usize,
    /// Run the prompt of a group once for all its completions, where no sliding window is shorter than a sequence.
    pub share_prompts: bool,
    /// Learning rate by update.
    pub schedule: Schedule,
    /// Updates made before this batch.
    pub global_step: u64,
    /// Weight of the loss that keeps experts equally busy; `None` is the model's own.
    pub router_aux_loss_coef: Option<f64>,
    /// Greatest age of tokens in generation steps, up to which statistics are recorded by age; 0 records none.
    pub max_token_age: usize,
    /// The sampler's log-probabilities are the trainer's, and so the old ones: nothing is scored for them, and a difference is an error.
    pub exact: bool,
    /// Clip the global gradient norm to this; 0 is off.
    pub max_grad_norm: f64,
    /// Where micro-batches live.
    pub device: Device,
}

/// When and how far a reference model moves towards the policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReferenceSync {
    /// Updates, counted from the start of the run, between two moves.
    pub steps: u64,
    /// Share of the policy after a move.
    pub alpha: f64,
}

impl ReferenceSync {
    /// The synchronisation that the configuration asks for, if it asks for one.
    fn new(config: &Config) -> Option<Self> {
        let ObjectiveConfig { sync_ref_model, ref_model_mixup_alpha: alpha, ref_model_sync_steps, .. } =
            config.objective;
        sync_ref_model.then_some(Self { steps: ref_model_sync_steps as u64, alpha })
    }
}

impl UpdateOptions {
    /// The updates that the configuration asks for of a generation batch spread as `batch` says, by the learning rates of `schedule`,
    /// as the first of a run: of step 0, with the first weight of the entropy bonus.
    pub fn new(config: &Config, batch: &BatchPlan, schedule: Schedule, device: Device) -> Self {
        let loss = LossConfig::from(config);
        Self {
            entropy_control: EntropyControl::new(&loss),
            loss,
            loss_function: None,
            teaches_itself: config.teaches_itself(),
            temperature: f64::from(config.temperature),
            num_iterations: config.num_iterations,
            updates_per_generation: batch.updates_per_generation,
            reference_sync: ReferenceSync::new(config),
            max_tokens_per_micro_batch: config.max_tokens_per_micro_batch,
            bnpo_batch_size: config.per_device_train_batch_size,
            share_prompts: config.share_prompts,
            schedule,
            global_step: 0,
            router_aux_loss_coef: config.objective.router_aux_loss_coef,
            max_token_age: config.split.async_steps,
            exact: config.exact,
            max_grad_norm: config.optimizer.max_grad_norm,
            device,
        }
    }

    /// Whether the log-probabilities before the first update must be kept: with a single update the training forward's own
    /// serve as old ones. The sampler's serve where they are the same.
    pub(super) fn needs_old_logprobs(&self) -> bool {
        self.num_updates() > 1 && !self.exact
    }

    /// A micro-batch's loss and its gradient.
    pub(super) fn differentiate(&self, input: &LossInput<'_>, denominators: &Denominators) -> Result<LossOutput> {
        match &self.loss_function {
            Some(own) => own.differentiate(input, &self.loss, denominators),
            None => policy_loss(input, &self.loss, denominators),
        }
    }

    /// Updates of one generation batch, skipped ones too; no more than the schedule has left.
    pub fn num_updates(&self) -> u64 {
        let left = (self.schedule.total_steps as u64).saturating_sub(self.global_step);
        left.min((self.num_iterations * self.updates_per_generation) as u64)
    }
}

/// Results of the updates of one generation batch; sums are over this rank's part. Of ranks that share micro-batches the first has them.
#[derive(Debug, Default)]
pub struct UpdateOutcome {
    /// This rank's contribution to the loss, mean over updates; the sum over ranks is the loss.
    pub loss: f64,
    /// The loss without the entropy bonus and without the loss that keeps experts equally busy.
    pub policy_loss: f64,
    /// This rank's contribution to the mean of the loss that keeps experts equally busy, mean over updates.
    pub aux_loss: Option<f64>,
    /// The sampler's experts that this rank took: those that the router by itself would not have chosen, and all.
    pub differing_experts: [f64; 2],
    /// Weight of the entropy bonus after the last update.
    pub entropy_control: EntropyControl,
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
    /// Tokens run forward and backward on this rank, or on those that share its micro-batches.
    pub num_trained_tokens: usize,
    /// Floating-point operations of this rank's forward and backward passes, as [`MicroBatch::training_flop`](crate::train::MicroBatch::training_flop) counts them.
    pub training_flop: f64,
    /// How long computation waited for collectives.
    pub exposed_communication: Duration,
    /// How long it waited for the exchange of heads, where ranks share micro-batches.
    pub exposed_exchange: Option<Duration>,
    /// Kept tensors of blocks that moved to the host and back.
    pub offloaded: Transitions,
}

/// Is shown how far an update is, micro-batch by micro-batch.
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
