//! The trained model on one rank: weights, gradients and optimizer state, sharded by ZeRO stage.

use std::sync::Arc;
use std::time::Duration;

use tch::{Kind, Tensor};

use super::adapters::AdapterUse;
use super::bytes::TrainedModel;
use super::gradients::{GradientNorms, GradientOptions, Gradients};
use super::micro_batch::MicroBatch;
use super::moments::UpdateCourse;
use super::network::Network;
use super::network_options::NetworkOptions;
use super::optim::Optim;
use super::optimizer::{AdamOptions, Optimizer};
use super::residence::{OptimizerHome, Transitions};
use super::scores::{Scores, TokenGradients};
use super::sharding::Sharding;
use crate::config::{GradientCheckpointing, Quantization};
use crate::error::Result;
use crate::model::{BlockLora, LoraSpec, ParamTable, StoredBlock, Unit, UnitLayout};
use crate::ranks::Mesh;
use crate::torch::{self, accumulation_kind};

/// Options for sharding, computing and stepping a policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyOptions {
    /// ZeRO stage, 0 to 3.
    pub stage: u8,
    /// Dtypes and device of the network.
    pub network: NetworkOptions,
    /// Which activations backward recomputes.
    pub gradient_checkpointing: GradientCheckpointing,
    /// The optimizer.
    pub optim: Optim,
    /// Options of AdamW.
    pub adam: AdamOptions,
    /// Dtypes for accumulating and reducing gradients.
    pub gradients: GradientOptions,
}

/// The result of an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use = "a skipped step must be counted"]
pub struct StepOutcome {
    /// Norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// Whether the step was skipped on all ranks, because the norm was not finite.
    pub skipped: bool,
}

/// The model in training. Gradients are sums over micro-batches and ranks; the loss already includes the global denominators.
#[derive(Debug)]
pub struct Policy {
    pub(super) network: Network,
    pub(super) optimizer: Optimizer,
    pub(super) sharding: Sharding,
    pub(super) version: u64,
    gradients: Gradients,
    options: PolicyOptions,
    has_stepped: bool,
    num_skipped: u64,
    num_micro_batches: u64, // micro-batches since the last step
}

impl Policy {
    /// Loads the weights unit by unit. `source` returns the whole flat tensor `[len]` of a layout in any floating dtype. Master weights, moments and
    /// gradients use the accumulation dtype.
    ///
    /// # Errors
    /// `InvalidValue` for an unknown stage, `InvalidArgument` for a table of another shard group or a unit of another length, `OutOfMemory`, and the
    /// errors of `source`.
    pub fn new(
        table: Arc<ParamTable>,
        mesh: &Mesh,
        options: PolicyOptions,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<Self> {
        Self::with_home(table, mesh, options, OptimizerHome::Resident, source)
    }

    pub(super) fn assemble(network: Network, optimizer: Optimizer, sharding: Sharding, options: PolicyOptions) -> Self {
        let NetworkOptions { kind, device, .. } = options.network;
        let (table, kinds) = (network.trained().table().clone(), options.gradients.kinds(accumulation_kind(kind)));
        Self {
            gradients: Gradients::new(table, sharding.clone(), kinds, device),
            network,
            optimizer,
            sharding,
            version: 0,
            options,
            has_stepped: false,
            num_skipped: 0,
            num_micro_batches: 0,
        }
    }

    /// The version of the weights; every change of the weights changes it.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Number of updates, without skipped ones: the exponent of Adam's bias corrections.
    pub fn num_updates(&self) -> u64 {
        self.optimizer.num_updates()
    }

    /// Steps skipped since this policy was created, because gradients were not finite.
    pub fn num_skipped(&self) -> u64 {
        self.num_skipped
    }

    /// The optimizer.
    pub(super) fn optim(&self) -> Optim {
        self.options.optim
    }

    /// Number of ranks that train the policy together.
    pub fn num_ranks(&self) -> usize {
        self.sharding.shard.size() * self.sharding.replicate.size()
    }

    /// Dtype of the weights.
    pub fn kind(&self) -> Kind {
        self.network.kind()
    }

    /// The layout of the weights.
    pub fn table(&self) -> &Arc<ParamTable> {
        self.network.weights.table()
    }

    /// The layout of the weights that train: the adapters', if there are any.
    pub fn trained_table(&self) -> &Arc<ParamTable> {
        self.network.trained().table()
    }

    /// The adapters' settings, if only adapters train.
    pub fn lora(&self) -> Option<&LoraSpec> {
        self.network.adapters.as_ref().map(|adapters| &adapters.lora)
    }

    /// The adapters of a block; empty if all weights train.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch).
    pub fn block_adapters(&self, layer: usize) -> Result<BlockLora> {
        let adapters = self.network.adapters.as_ref();
        adapters.map_or_else(|| Ok(BlockLora::default()), |adapters| adapters.engine_block(layer))
    }

    /// Storage format of the base model under adapters.
    pub fn base_quantization(&self) -> Quantization {
        self.network.weights.quantization()
    }

    /// The base's blocks in stored form, if they are quantized.
    pub fn quantized_blocks(&self) -> &[StoredBlock] {
        self.network.weights.quantized()
    }

    /// Scores a micro-batch without gradients (collective at stage 3).
    ///
    /// # Errors
    /// The errors of [`Collective`](crate::ranks::Collective); errors of earlier device work.
    pub fn forward_logprobs(&mut self, micro_batch: &MicroBatch, temperature: f64) -> Result<Scores> {
        self.network.score(micro_batch, temperature, AdapterUse::On)
    }

    /// Scores as a teacher does: [`Policy::forward_logprobs`] with the `num_top` most probable tokens of each distribution.
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub fn teacher_logprobs(&mut self, micro_batch: &MicroBatch, temperature: f64, num_top: usize) -> Result<Scores> {
        self.network.num_top = num_top;
        let scores = self.forward_logprobs(micro_batch, temperature);
        self.network.num_top = 0;
        scores
    }

    /// Scores a micro-batch with the reference model of a run that trains adapters. This is the frozen base with the initial adapters, if a copy of
    /// them is kept, else the base alone.
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub fn reference_logprobs(&mut self, micro_batch: &MicroBatch, temperature: f64) -> Result<Scores> {
        self.network.score(micro_batch, temperature, AdapterUse::Initial)
    }

    /// Sets the denominator of the draft head's loss, if there is a draft head: the update's scored tokens on all ranks.
    pub fn weigh_drafts(&mut self, num_tokens: f64) {
        self.network.draft_weight = num_tokens.max(1.0).recip();
    }

    /// Whether all copies of [`Policy::reload_optimizer`] are queued, so that waiting for the device waits for the state.
    pub fn reload_is_queued(&self) -> bool {
        self.optimizer.residence().is_queued()
    }

    /// Makes libtorch's GPU cache hold one block for all that an update of these micro-batches allocates, under a budget of `max_tokens`
    /// ([`torch::keep_block`]). Call it before an update's first micro-batch, while no gradients are accumulated: they may be freed. It does nothing
    /// in the first update, because permanent allocations of libraries must not lie in the block, nor while optimizer state is being copied back,
    /// because taking memory from the driver would wait for that.
    ///
    /// # Errors
    /// [`Error::Environment`](crate::Error::Environment) if libtorch's CUDA library is not loaded.
    pub fn keep_block_for(&mut self, micro_batches: &[MicroBatch], max_tokens: usize) -> Result<()> {
        let device = self.options.network.device;
        if !device.is_cuda() || !self.has_stepped || self.optimizer.residence().is_returning() {
            return Ok(());
        }
        let shapes: Vec<_> = micro_batches.iter().map(MicroBatch::shape).collect();
        let (keep, streams) = (self.options.gradient_checkpointing, self.optimizer.residence().streamed().is_some());
        let course = UpdateCourse { keep, micro_batches: &shapes, is_warm: false, streams };
        let bytes = self.trained_model().block_bytes(&course, max_tokens);
        if torch::lacks_block(device, bytes) {
            self.drop_gradients(); // a tensor in the last block would prevent its release
            torch::keep_block(device, bytes)?;
        }
        Ok(())
    }

    /// The properties of the model that its memory depends on.
    fn trained_model(&self) -> TrainedModel<'_> {
        let PolicyOptions { stage, network, gradients, optim, .. } = self.options;
        TrainedModel {
            lora: self.lora().cloned(),
            quantization: self.base_quantization(),
            residual: network.residual,
            format: network.format,
            optim,
            sharers: self.network.num_sharers(),
            offloads: self.network.offload.is_some(),
            ..TrainedModel::whole(self.table(), stage, network.kind, gradients)
        }
    }

    /// Scores a micro-batch and adds the gradient of a loss, which `loss` differentiates by token. Collective at stages 2 and 3, where every rank
    /// needs the same number of micro-batches, see [`super::pad_to_agreed_count`]. `loss` is not called for an empty micro-batch, so it must not be
    /// collective. After an error the sums are partial: drop them.
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`], and those of `loss`.
    pub fn forward_backward(
        &mut self,
        micro_batch: &MicroBatch,
        temperature: f64,
        loss: &mut dyn FnMut(&Scores) -> Result<TokenGradients>,
    ) -> Result<()> {
        let (update, recompute) = (self.optimizer.num_updates(), self.options.gradient_checkpointing);
        let adapters = self.network.adapters.as_ref();
        let adapter_use = adapters.map_or(AdapterUse::Off, |own| own.training_use(update, self.num_micro_batches));
        self.num_micro_batches += 1;
        self.network.forward_backward(micro_batch, (temperature, adapter_use), recompute, &mut self.gradients, loss)
    }

    /// Announces that the next [`Policy::forward_backward`] is the last before the step. The remaining gradients are then reduced as each unit's
    /// backward ends, overlapping the next unit's. All ranks must call it, or none.
    pub fn finish_gradients_with_next_backward(&mut self) {
        self.gradients.finish_with_next_backward();
    }

    /// How long computation has waited for overlapped collectives since the last call. Waits for the device.
    ///
    /// # Errors
    /// Any error of device work that was queued before.
    pub fn take_exposed_communication(&self) -> Result<Duration> {
        self.sharding.lane.take_exposed()
    }

    /// How long computation has waited for the exchange of heads since the last call; `None` unless ranks share micro-batches.
    /// Waits for the device.
    ///
    /// # Errors
    /// Any error of device work that was queued before.
    pub fn take_exposed_exchange(&self) -> Result<Option<Duration>> {
        self.network.take_exposed_exchange()
    }

    /// Steps on the gradients added so far and zeroes them (collective): sums over ranks, computes the global norm, clips to `max_grad_norm` (0 is
    /// off) by min(1, max_grad_norm / (norm + 1e-6)) as in torch, steps the part that this rank owns, and casts and gathers the new weights. If the
    /// norm is not finite, all ranks skip the step.
    ///
    /// # Errors
    /// `InvalidArgument` while the optimizer state is offloaded.
    pub fn optimizer_step(&mut self, lr: f64, max_grad_norm: f64) -> Result<StepOutcome> {
        self.optimizer.check_here()?;
        let reduced = self.gradients.reduce()?;
        let GradientNorms { model: grad_norm, draft_head } = self.gradients.norms(&reduced)?;
        // No rank changes its weights before all have reached this point.
        self.sharding.shard.barrier()?;
        self.sharding.replicate.barrier()?;
        let skipped = !(grad_norm + draft_head).is_finite();
        if skipped {
            self.num_skipped += 1;
        } else {
            let clip = |norm: f64| if max_grad_norm > 0.0 { (max_grad_norm / (norm + 1e-6)).min(1.0) } else { 1.0 };
            self.step_owned(&reduced, lr, [clip(grad_norm), clip(draft_head)])?;
        }
        self.gradients.zero();
        self.num_micro_batches = 0;
        self.has_stepped = true;
        Ok(StepOutcome { grad_norm, skipped })
    }

    fn step_owned(&mut self, gradients: &[Tensor], lr: f64, [of_model, of_draft_head]: [f64; 2]) -> Result<()> {
        self.optimizer.begin_update()?;
        for (index, gradient) in gradients.iter().enumerate() {
            let is_head = self.trained_table().units[index].unit == Unit::DraftHead;
            let gradient_scale = if is_head { of_draft_head } else { of_model };
            let mut weight = self.network.trained_mut().owned(index)?;
            self.optimizer.step(index, gradient, &mut weight, lr, gradient_scale)?;
            self.network.trained_mut().spread(index)?; // overlaps the next unit's step
        }
        self.optimizer.end_update()?;
        self.version += 1;
        Ok(())
    }

    /// Forgets the gradients and frees them, all gathered weights and what a pass that failed has left.
    pub fn drop_gradients(&mut self) {
        self.gradients.free();
        self.num_micro_batches = 0;
        self.network.weights.free_gathered();
        self.network.offload.iter_mut().for_each(|offload| offload.drop_unfinished());
    }

    /// A whole unit's weights `[len]`: the stored tensor itself at stages 0 to 2, else a new tensor (collective).
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub fn unit_weights(&self, unit: Unit) -> Result<Tensor> {
        self.network.weights.gather(unit)
    }

    /// Gathers whole units, each only on the rank of the shard group that wants it: `wanted` has for each rank the unit it wants, or none. Returns
    /// this rank's unit as in [`Policy::unit_weights`] (collective).
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub(crate) fn wanted_weights(&self, wanted: &[Option<Unit>]) -> Result<Option<Tensor>> {
        self.network.weights.gather_wanted(wanted)
    }

    /// The weights of a unit of [`Policy::trained_table`].
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub fn trained_weights(&self, unit: Unit) -> Result<Tensor> {
        self.network.trained().gather(unit)
    }

    /// Size of the optimizer state in bytes.
    pub fn optimizer_bytes(&self) -> usize {
        self.optimizer.bytes()
    }

    /// Device bytes that [`Policy::reload_optimizer`] will take; 0 if the state is on the device already or stays on the host.
    pub fn absent_optimizer_bytes(&self) -> usize {
        self.optimizer.residence().absent_bytes()
    }

    /// Starts copying master weights and moments to the host, if they are to be there during rollout. Does nothing if they are there already.
    ///
    /// # Errors
    /// Any error of device work that was queued before.
    pub fn offload_optimizer(&mut self) -> Result<()> {
        self.optimizer.residence().leave()
    }

    /// Waits for the copies that [`Policy::offload_optimizer`] started and frees the device memory, piece by piece. The weights may be read
    /// meanwhile.
    ///
    /// # Errors
    /// The error of a copy that failed.
    pub fn finish_offload(&self) -> Result<()> {
        self.optimizer.residence().left()
    }

    /// Starts copying master weights and moments back to the device, bit for bit; the next step waits for it. Does nothing if they are on the device
    /// or are stored on the host permanently.
    ///
    /// # Errors
    /// `OutOfMemory` if the state does not fit on the device (it then stays on the host, and a later call tries again); the errors of
    /// [`Policy::finish_offload`].
    pub fn reload_optimizer(&mut self) -> Result<()> {
        self.optimizer.residence().come_back()
    }

    /// Time and bytes of moving optimizer state since the last call. Waits for the device.
    ///
    /// # Errors
    /// Any error of device work that was queued before.
    pub fn take_transitions(&self) -> Result<Transitions> {
        self.optimizer.residence().take_transitions()
    }
}
