//! Settings of the updates on a generation batch, their results, and progress reporting.
//!
//! With several updates per generation batch, sequence i takes part in update i % updates, and not in a shuffled slice, so that the updates do not
//! depend on the world size.

use std::time::Duration;

use tch::Device;

use crate::config::{BatchPlan, Config, ObjectiveConfig};
use crate::error::Result;
use crate::grpo::{
    Denominators, EntropyControl, LossConfig, LossFunction, LossInput, LossOutput, LossStats, policy_loss,
};
use crate::phase::Phase;
use crate::train::{Schedule, Sequence, Transitions};

/// How a generation batch is turned into updates.
#[derive(Debug, Clone)]
pub struct UpdateOptions {
    /// The loss function's settings.
    pub loss: LossConfig,
    /// A loss function of the caller that replaces the built-in one.
    pub loss_function: Option<LossFunction>,
    /// Weight of the entropy bonus in the first update.
    pub entropy_control: EntropyControl,
    /// Whether the policy also scores the samples as their teacher.
    pub teaches_itself: bool,
    /// Temperature of the sampler, applied to the trainer's logits too.
    pub temperature: f64,
    /// Number of passes over the batch.
    pub num_iterations: usize,
    /// Number of updates in one pass.
    pub updates_per_generation: usize,
    /// How the reference model follows the policy; `None` if it is fixed.
    pub reference_sync: Option<ReferenceSync>,
    /// Maximum number of tokens in a micro-batch.
    pub max_tokens_per_micro_batch: usize,
    /// For the loss type `bnpo`: number of sequences over whose tokens each mean is computed.
    pub bnpo_batch_size: usize,
    /// Compute a group's prompt once for all its completions. It has no effect in models with a sliding window.
    pub share_prompts: bool,
    /// Learning rate of each update.
    pub schedule: Schedule,
    /// Number of updates before this batch.
    pub global_step: u64,
    /// Weight of the auxiliary loss that balances experts; `None` uses the model's own.
    pub router_aux_loss_coef: Option<f64>,
    /// Greatest token age, in generation steps, up to which statistics are recorded by age; 0 records none.
    pub max_token_age: usize,
    /// The sampler and the trainer compute equal log-probabilities, so the sampler's are used as the old ones without scoring, and a difference is an
    /// error.
    pub exact: bool,
    /// Maximum global gradient norm, for clipping; 0 is off.
    pub max_grad_norm: f64,
    /// Device of the micro-batches.
    pub device: Device,
}

/// When and how far a reference model moves towards the policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReferenceSync {
    /// Number of updates between two moves, counted from the start of the run.
    pub steps: u64,
    /// Weight of the policy in a move.
    pub alpha: f64,
}

impl ReferenceSync {
    /// The synchronization that the configuration requests, if any.
    fn new(config: &Config) -> Option<Self> {
        let ObjectiveConfig { sync_ref_model, ref_model_mixup_alpha: alpha, ref_model_sync_steps, .. } =
            config.objective;
        sync_ref_model.then_some(Self { steps: ref_model_sync_steps as u64, alpha })
    }
}

impl UpdateOptions {
    /// The options that the configuration requests, for batches divided as in `batch` and with the learning rates of `schedule`. They are for the
    /// first batch of a run: step 0, with the initial weight of the entropy bonus.
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

    /// Whether old log-probabilities must be computed before the first update. With a single update those of the training forward are used; in exact
    /// mode the sampler's are.
    pub(super) fn needs_old_logprobs(&self) -> bool {
        self.num_updates() > 1 && !self.exact
    }

    /// Computes a micro-batch's loss and its gradient.
    pub(super) fn differentiate(&self, input: &LossInput<'_>, denominators: &Denominators) -> Result<LossOutput> {
        match &self.loss_function {
            Some(own) => own.differentiate(input, &self.loss, denominators),
            None => policy_loss(input, &self.loss, denominators),
        }
    }

    /// Number of updates on one generation batch, including skipped ones, limited by the end of the schedule.
    pub fn num_updates(&self) -> u64 {
        let left = (self.schedule.total_steps as u64).saturating_sub(self.global_step);
        left.min((self.num_iterations * self.updates_per_generation) as u64)
    }
}

/// Results of the updates on one generation batch. Sums cover this rank's part; if ranks share micro-batches, only the first of them has the sums.
#[derive(Debug, Default)]
pub struct UpdateOutcome {
    /// This rank's contribution to the loss, averaged over updates; the sum over ranks is the loss.
    pub loss: f64,
    /// The loss without the entropy bonus and without the auxiliary loss that balances experts.
    pub policy_loss: f64,
    /// This rank's contribution to the mean auxiliary loss that balances experts, averaged over updates.
    pub aux_loss: Option<f64>,
    /// Numbers of replayed routing decisions on this rank, in which the sampler's experts are used: those that differ from the router's own choice,
    /// and all.
    pub differing_experts: [f64; 2],
    /// Weight of the entropy bonus after the last update.
    pub entropy_control: EntropyControl,
    /// Mean global gradient norm before clipping, over the updates that were not skipped.
    pub grad_norm: f64,
    /// Learning rate of the last update.
    pub learning_rate: f64,
    /// Loss metrics as in TRL.
    pub stats: LossStats,
    /// Number of updates, including skipped ones.
    pub num_updates: u64,
    /// Number of updates that all ranks skipped because of a non-finite gradient.
    pub num_skipped: u64,
    /// Tokens in forward and backward passes on this rank, or on the ranks that share its micro-batches.
    pub num_trained_tokens: usize,
    /// Floating-point operations of this rank's forward and backward passes, counted by
    /// [`MicroBatch::training_flop`](crate::train::MicroBatch::training_flop).
    pub training_flop: f64,
    /// Time for which computation waited for collectives.
    pub exposed_communication: Duration,
    /// Time for which computation waited for the exchange of heads, if ranks share micro-batches.
    pub exposed_exchange: Option<Duration>,
    /// Transfers of kept activations to the host and back.
    pub offloaded: Transitions,
}

/// Receives the progress of an update, micro-batch by micro-batch.
pub trait UpdateProgress {
    /// A phase with `total` micro-batches begins.
    fn begin(&self, phase: Phase, total: usize);
    /// A micro-batch of the phase is done.
    fn advance(&self);
    /// An update was skipped on all ranks because of a non-finite loss or gradient; `sequences` are those of this rank.
    ///
    /// # Errors
    /// If the implementation cannot record it.
    fn skipped(&self, update: u64, sequences: &[Sequence]) -> Result<()>;
}

/// An implementation that reports nothing.
impl UpdateProgress for () {
    fn begin(&self, _phase: Phase, _total: usize) {}
    fn advance(&self) {}
    fn skipped(&self, _update: u64, _sequences: &[Sequence]) -> Result<()> {
        Ok(())
    }
}
