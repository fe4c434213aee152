//! Bytes per rank that training holds between uses, computed from the layout. The memory plan adds them up before anything is allocated. Activations
//! and the peak have files of their own.

use std::borrow::Cow;

use tch::Kind;

use super::flow::bucket_bytes;
use super::gradients::GradientKinds;
use super::gradients::GradientOptions;
use super::optim::Optim;
use super::orthogonal::orthogonal_bytes;
use super::state_layout::StateLayout;
use crate::config::{Config, Quantization, RouterReplay};
use crate::cuda::residual_kind;
use crate::model::{Format, LoraSpec, ParamTable, Plain, Unit};
use crate::torch::accumulation_kind;

/// Bytes of one recorded expert id.
const EXPERT_BYTES: usize = 2;

/// The properties of a trained model that its memory depends on, apart from the shapes of micro-batches.
#[derive(Debug, Clone)]
pub struct TrainedModel<'a> {
    /// The layout of the weights; `table.shards` is the size of the shard group.
    pub table: &'a ParamTable,
    /// LoRA adapters that train instead of the weights.
    pub lora: Option<LoraSpec>,
    /// Storage format of the frozen base model under adapters.
    pub quantization: Quantization,
    /// ZeRO stage.
    pub stage: u8,
    /// Dtype of weights and activations.
    pub kind: Kind,
    /// Dtype of the residual stream.
    pub residual: Kind,
    /// The format of the blocks' GEMMs.
    pub format: &'static dyn Format,
    /// Dtypes for accumulating and reducing gradients.
    pub gradients: GradientOptions,
    /// The optimizer.
    pub optim: Optim,
    /// Number of ranks that share each micro-batch.
    pub sharers: usize,
    /// Whether tensors that blocks keep for backward are offloaded to the host.
    pub offloads: bool,
}

/// Bytes per rank that a [`super::Policy`] holds between uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainBytes {
    /// Bytes of the weights.
    pub weights: usize,
    /// Bytes of gradients between backward and optimizer step.
    pub gradients: usize,
    /// Bytes of master weights and moments.
    pub optimizer: usize,
    /// Bytes of the device buckets through which optimizer state on the host is streamed.
    pub optimizer_buckets: usize,
    /// Bytes of the adapters' B matrices in the expanded form that the engine uses.
    pub engine_adapters: usize,
}

impl<'a> TrainedModel<'a> {
    /// A model whose weights all train with AdamW; GEMMs and residual stream use the weights' dtype.
    pub fn whole(table: &'a ParamTable, stage: u8, kind: Kind, gradients: GradientOptions) -> Self {
        let (lora, quantization, optim) = (None, Quantization::None, Optim::AdamW);
        let (residual, format, sharers, offloads) = (kind, &Plain, 1, false);
        Self { table, lora, quantization, stage, kind, residual, format, gradients, optim, sharers, offloads }
    }

    /// The model that a configuration trains.
    pub fn of(config: &Config, table: &'a ParamTable, kind: Kind) -> Self {
        let gradients = GradientOptions::new(config.zero.grad_accum_dtype, config.zero.reduce_dtype);
        let (lora, quantization) = (LoraSpec::new(&config.lora), config.quantization);
        let residual = residual_kind(config.model.residual_dtype, kind);
        let optim = Optim::new(config.optimizer.optim, &config.optimizer.muon);
        let (format, sharers) = (config.training_format(), config.num_sharers());
        Self {
            lora,
            quantization,
            residual,
            format,
            optim,
            sharers,
            offloads: config.activation_offload,
            ..Self::whole(table, config.zero.stage, kind, gradients)
        }
    }

    /// Bytes that training holds between uses.
    pub fn bytes(&self) -> TrainBytes {
        let element = self.kind.elt_size_in_bytes();
        let (stage, trained, spec) = (self.trained_stage(), self.trained(), &self.table.spec);
        let share = |sharded: bool| if sharded { trained.total / trained.shards } else { trained.total };
        let (optimizer, optimizer_buckets) = self.state_bytes(&trained);
        TrainBytes {
            weights: self.base_bytes() + self.adapter_bytes(),
            gradients: self.gradient_kinds().accumulated.elt_size_in_bytes() * share(stage > 1),
            optimizer,
            optimizer_buckets,
            engine_adapters: self.lora.as_ref().map_or(0, |lora| element * lora.num_expanded(spec).all),
        }
    }

    /// Bytes of the recorded experts for this many tokens, if routing is replayed. All of an update's are held from its beginning to its end.
    pub fn recorded_bytes(&self, replay: RouterReplay, tokens: usize) -> usize {
        match replay {
            RouterReplay::R3 => EXPERT_BYTES * self.table.spec.routed_experts_per_token() * tokens,
            RouterReplay::Disabled => 0,
        }
    }

    /// Bytes of the device buckets through which optimizer state on the host is streamed.
    pub(super) fn optimizer_buckets(&self) -> usize {
        self.state_bytes(&self.trained()).1
    }

    /// Bytes of optimizer state and of its buckets, on the rank with the most.
    fn state_bytes(&self, trained: &ParamTable) -> (usize, usize) {
        let num_slices = if self.trained_stage() > 0 { trained.shards } else { 1 };
        let of_rank = |rank: usize| {
            let slice = |len: usize| rank * (len / num_slices)..(rank + 1) * (len / num_slices);
            let layout = StateLayout::new(trained, self.optim, accumulation_kind(self.kind), slice);
            (layout.bytes(), bucket_bytes(&layout))
        };
        let num_kinds = if self.optim == Optim::AdamW { 1 } else { num_slices }; // all slices of AdamW have the same size
        let most = |(a, b): (usize, usize), (c, d): (usize, usize)| (a.max(c), b.max(d));
        (0..num_kinds).map(of_rank).reduce(most).unwrap_or_default()
    }

    /// Bytes that a step of Muon holds in addition to state and gradients.
    pub(super) fn orthogonal_bytes(&self) -> usize {
        match self.optim {
            Optim::Muon(_) if self.lora.is_none() => orthogonal_bytes(self.table, self.trained_stage() > 0),
            Optim::AdamW | Optim::AdamW8bit | Optim::Muon(_) => 0,
        }
    }

    /// Bytes of one copy of the adapters' weights, which every rank holds whole.
    pub fn adapter_bytes(&self) -> usize {
        if self.lora.is_some() { self.kind.elt_size_in_bytes() * self.trained().total } else { 0 }
    }

    /// Bytes of device memory that an optimizer step reads and writes: the state in both directions, the gradients twice (once for their norm), and
    /// the new weights. Transfers between ranks are not included.
    pub fn optimizer_step_bytes(&self) -> usize {
        let trained = self.trained();
        let owned = trained.total / if self.trained_stage() > 0 { trained.shards } else { 1 };
        let gradient = self.gradient_kinds().accumulated.elt_size_in_bytes();
        2 * self.bytes().optimizer + owned * (2 * gradient + self.kind.elt_size_in_bytes())
    }

    /// Bytes of the weights, including frozen ones under adapters. Quantized blocks are whole on every rank.
    fn base_bytes(&self) -> usize {
        let (table, element) = (self.table, self.kind.elt_size_in_bytes());
        match self.quantization.format() {
            None if self.shards_weights() => element * table.total / table.shards,
            None => element * table.total,
            Some(format) => {
                let others = [Unit::Embedding, Unit::Head].map(|unit| table.unit(unit).len).iter().sum::<usize>();
                let blocks = table.spec.kinds_of_blocks().into_iter();
                let blocks = blocks.map(|kind| kind.count * format.block_bytes(&table.spec, kind.layer, self.kind));
                element * others + blocks.sum::<usize>()
            }
        }
    }

    /// The layout of the weights that have gradients.
    pub(super) fn trained(&self) -> Cow<'a, ParamTable> {
        match &self.lora {
            None => Cow::Borrowed(self.table),
            Some(lora) => Cow::Owned(ParamTable::adapters(self.table.spec.clone(), lora, self.table.shards)),
        }
    }

    /// The ZeRO stage of the trained weights: 0 for a shard group of one rank; adapters' weights are never sharded.
    pub(super) fn trained_stage(&self) -> u8 {
        match (&self.lora, self.table.shards) {
            (_, 1) => 0,
            (None, _) => self.stage,
            (Some(_), _) => self.stage.min(2),
        }
    }

    /// Whether units are gathered before use.
    pub fn shards_weights(&self) -> bool {
        self.stage > 2 && self.table.shards > 1 && self.quantization == Quantization::None
    }

    pub(super) fn gradient_kinds(&self) -> GradientKinds {
        self.gradients.kinds(accumulation_kind(self.kind))
    }
}

/// Bytes per rank that a [`super::Reference`] holds between uses, on the device or the host; `table.shards` is the size of the shard group.
pub fn reference_bytes(table: &ParamTable, kind: Kind) -> usize {
    kind.elt_size_in_bytes() * table.total / table.shards
}
