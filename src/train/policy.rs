//! The trained model of one rank: weights, gradients and optimizer state, sharded by stage.

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

/// How a policy is sharded, computed and stepped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PolicyOptions {
    /// ZeRO stage, 0 to 3.
    pub stage: u8,
    /// Kind and device of the network.
    pub network: NetworkOptions,
    /// The activations that backward recomputes.
    pub gradient_checkpointing: GradientCheckpointing,
    /// The optimizer.
    pub optim: Optim,
    /// Options of AdamW.
    pub adam: AdamOptions,
    /// How gradients are added up.
    pub gradients: GradientOptions,
}

/// Results of an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use = "a skipped step must be counted"]
pub struct StepOutcome {
    /// Norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// The norm was not finite: no rank changed anything.
    pub skipped: bool,
}

/// The model in training. Gradients are sums over micro-batches and ranks: the loss carries the global denominators.
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
    num_micro_batches: u64, // since the last step
}

impl Policy {
    /// Loads the weights unit by unit from `source`, which returns a layout's whole flat tensor `[len]` of any floating kind.
    /// Master weights, moments and gradients are kept in the accumulation kind.
    ///
    /// # Errors
    /// `InvalidValue` for an unknown stage, `InvalidArgument` for a table laid out for another shard group or a unit of
    /// another length, `OutOfMemory`, and what `source` returns.
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

    /// Changes whenever the weights do.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Updates made, skipped ones not counted: the exponent of Adam's bias corrections.
    pub fn num_updates(&self) -> u64 {
        self.optimizer.num_updates()
    }

    /// Steps skipped since this policy was made, for gradients that were not finite.
    pub fn num_skipped(&self) -> u64 {
        self.num_skipped
    }

    /// The optimizer.
    pub(super) fn optim(&self) -> Optim {
        self.options.optim
    }

    /// Ranks that train it together.
    pub fn num_ranks(&self) -> usize {
        self.sharding.shard.size() * self.sharding.replicate.size()
    }

    /// Kind of the weights.
    pub fn kind(&self) -> Kind {
        self.network.kind()
    }

    /// The layout of the weights.
    pub fn table(&self) -> &Arc<ParamTable> {
        self.network.weights.table()
    }

    /// The layout of what trains: the adapters', if there are any.
    pub fn trained_table(&self) -> &Arc<ParamTable> {
        self.network.trained().table()
    }

    /// The adapters' settings, if only they train.
    pub fn lora(&self) -> Option<&LoraSpec> {
        self.network.adapters.as_ref().map(|adapters| &adapters.lora)
    }

    /// The adapters that a block computes with; none where all weights train.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch).
    pub fn block_adapters(&self, layer: usize) -> Result<BlockLora> {
        let adapters = self.network.adapters.as_ref();
        adapters.map_or_else(|| Ok(BlockLora::default()), |adapters| adapters.engine_block(layer))
    }

    /// How the base of adapters is stored.
    pub fn base_quantization(&self) -> Quantization {
        self.network.weights.quantization()
    }

    /// The base's blocks as they are stored, if they are quantised.
    pub fn quantized_blocks(&self) -> &[StoredBlock] {
        self.network.weights.quantized()
    }

    /// Scores a micro-batch without gradients (collective at stage 3).
    ///
    /// # Errors
    /// The errors of [`Collective`](crate::ranks::Collective); what the device failed at until here.
    pub fn forward_logprobs(&mut self, micro_batch: &MicroBatch, temperature: f64) -> Result<Scores> {
        self.network.score(micro_batch, temperature, AdapterUse::On)
    }

    /// [`Policy::forward_logprobs`] with the `num_top` most probable tokens of each distribution, as a teacher scores.
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub fn teacher_logprobs(&mut self, micro_batch: &MicroBatch, temperature: f64, num_top: usize) -> Result<Scores> {
        self.network.num_top = num_top;
        let scores = self.forward_logprobs(micro_batch, temperature);
        self.network.num_top = 0;
        scores
    }

    /// Scores a micro-batch with the reference model of a run that trains adapters: the frozen base with the adapters that
    /// training started from where a copy of them is kept, else without any.
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub fn reference_logprobs(&mut self, micro_batch: &MicroBatch, temperature: f64) -> Result<Scores> {
        self.network.score(micro_batch, temperature, AdapterUse::Initial)
    }

    /// Sets the denominator of the loss of the head that drafts tokens, where there is one: the update's scored tokens on all ranks.
    pub fn weigh_drafts(&mut self, num_tokens: f64) {
        self.network.draft_weight = num_tokens.max(1.0).recip();
    }

    /// Whether all copies of [`Policy::reload_optimizer`] are queued, so that waiting for the device waits for the state.
    pub fn reload_is_queued(&self) -> bool {
        self.optimizer.residence().is_queued()
    }

    /// Makes libtorch's cache on a GPU hold one block for all that an update of these micro-batches makes, under a budget of
    /// `max_tokens` ([`torch::keep_block`]). Call before an update's first micro-batch, while no gradients are added: they may be
    /// freed. Nothing to do in the first update: what libraries allocate then for good must not lie within the block. Nothing either
    /// while optimizer state is on its way back: taking memory from the driver would wait for that.
    ///
    /// # Errors
    /// [`Error::Environment`](crate::Error::Environment) if libtorch's CUDA half is not loaded.
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
            self.drop_gradients(); // a tensor within the last block would keep it from being released
            torch::keep_block(device, bytes)?;
        }
        Ok(())
    }

    /// The model as its bytes depend on it.
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

    /// Scores a micro-batch and adds the gradient of a loss that `loss` differentiates by token (collective at stages 2 and
    /// 3: every rank has the same number of micro-batches, see [`super::pad_to_agreed_count`]). `loss` is not called for an
    /// empty micro-batch, so it must not be collective. After an error the sums are partial: drop them.
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

    /// Says that the next [`Policy::forward_backward`] is the last before the step: gradients that are not reduced yet are, as
    /// each unit's backward ends, beside the next unit's. Every rank says so or none does.
    pub fn finish_gradients_with_next_backward(&mut self) {
        self.gradients.finish_with_next_backward();
    }

    /// How long computation has waited for collectives beside it since the last call. Waits for the device.
    ///
    /// # Errors
    /// Any error of the device in work that it was given before.
    pub fn take_exposed_communication(&self) -> Result<Duration> {
        self.sharding.lane.take_exposed()
    }

    /// How long computation has waited for the exchange of heads since the last call, with the copies before and behind it; `None` where
    /// ranks do not share micro-batches. Waits for the device.
    ///
    /// # Errors
    /// Any error of the device in work that it was given before.
    pub fn take_exposed_exchange(&self) -> Result<Option<Duration>> {
        self.network.take_exposed_exchange()
    }

    /// Steps on the gradients added so far and zeroes them (collective): sum over ranks, global norm, clipping to
    /// `max_grad_norm` (0 is off) by min(1, max_grad_norm / (norm + 1e-6)) as in torch, AdamW on what this rank owns, new
    /// weights cast and gathered. All ranks skip together where the norm is not finite.
    ///
    /// # Errors
    /// `InvalidArgument` while the optimizer is offloaded.
    pub fn optimizer_step(&mut self, lr: f64, max_grad_norm: f64) -> Result<StepOutcome> {
        self.optimizer.check_here()?;
        let reduced = self.gradients.reduce()?;
        let GradientNorms { model: grad_norm, draft_head } = self.gradients.norms(&reduced)?;
        // No rank changes its weights before all have come this far.
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
            self.network.trained_mut().spread(index)?; // beside the next unit's step
        }
        self.optimizer.end_update()?;
        self.version += 1;
        Ok(())
    }

    /// Forgets the gradients and frees them and all gathered weights.
    pub fn drop_gradients(&mut self) {
        self.gradients.free();
        self.num_micro_batches = 0;
        self.network.weights.free_gathered();
    }

    /// A whole unit's weights `[len]`: the kept ones themselves at stages 0 to 2, else a new tensor (collective).
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub fn unit_weights(&self, unit: Unit) -> Result<Tensor> {
        self.network.weights.gather(unit)
    }

    /// Whole units of which each rank of the shard group gets the one that it wants, of `wanted` one or none for each of them, and no
    /// other's; this rank's, as [`Policy::unit_weights`] (collective).
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub(crate) fn wanted_weights(&self, wanted: &[Option<Unit>]) -> Result<Option<Tensor>> {
        self.network.weights.gather_wanted(wanted)
    }

    /// The weights of a unit that trains: one of [`Policy::trained_table`].
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

    /// Bytes that [`Policy::reload_optimizer`] will take on the device; 0 where the state is there or stays away.
    pub fn absent_optimizer_bytes(&self) -> usize {
        self.optimizer.residence().absent_bytes()
    }

    /// Starts copies of master weights and moments to the host, if that is their home during rollout; nothing to do if they
    /// are there.
    ///
    /// # Errors
    /// Any error of the device in work that it was given before.
    pub fn offload_optimizer(&mut self) -> Result<()> {
        self.optimizer.residence().leave()
    }

    /// Waits for the copies that [`Policy::offload_optimizer`] started and gives the memory back, piece by piece; the weights
    /// may be read meanwhile.
    ///
    /// # Errors
    /// A copy that failed.
    pub fn finish_offload(&self) -> Result<()> {
        self.optimizer.residence().left()
    }

    /// Starts the way back of master weights and moments, bit for bit; the next step waits for it. Nothing to do if they are
    /// here or live on the host.
    ///
    /// # Errors
    /// `OutOfMemory` where the state does not fit on the device: it stays on the host, and a later call tries again; as
    /// [`Policy::finish_offload`].
    pub fn reload_optimizer(&mut self) -> Result<()> {
        self.optimizer.residence().come_back()
    }

    /// Time and bytes of moving optimizer state since the last call. Waits for the device.
    ///
    /// # Errors
    /// Any error of the device in work that it was given before.
    pub fn take_transitions(&self) -> Result<Transitions> {
        self.optimizer.residence().take_transitions()
    }
}
