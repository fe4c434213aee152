//! Bytes per rank of what training holds between uses, as functions of the layout: the plan adds them up before anything is
//! allocated. Activations and the fullest moment have files of their own.

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

/// A recorded choice of an expert.
const EXPERT_BYTES: usize = 2;

/// A model in training, as far as bytes depend on it beside the shape of micro-batches.
#[derive(Debug, Clone)]
pub struct TrainedModel<'a> {
    /// The layout of its weights; `table.shards` is the shard group's size.
    pub table: &'a ParamTable,
    /// Adapters that train in place of the weights.
    pub lora: Option<LoraSpec>,
    /// How the adapters' base is stored.
    pub quantization: Quantization,
    /// ZeRO stage.
    pub stage: u8,
    /// Type of weights and activations.
    pub kind: Kind,
    /// Type of the residual stream.
    pub residual: Kind,
    /// The format that blocks multiply in.
    pub format: &'static dyn Format,
    /// How gradients are added up.
    pub gradients: GradientOptions,
    /// The optimizer.
    pub optim: Optim,
    /// Ranks that share each micro-batch.
    pub sharers: usize,
    /// Whether kept tensors of blocks wait for backward on the host.
    pub offloads: bool,
}

/// Bytes per rank of a [`super::Policy`] between uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainBytes {
    /// Weights.
    pub weights: usize,
    /// Gradients between backward and step.
    pub gradients: usize,
    /// Master weights and moments.
    pub optimizer: usize,
    /// Buckets on the device that optimizer state on the host is copied through.
    pub optimizer_buckets: usize,
    /// Adapters' B as the engine keeps them, expanded.
    pub engine_adapters: usize,
}

impl<'a> TrainedModel<'a> {
    /// All weights of `table` train by AdamW, at a ZeRO stage, and multiply in their kind, which is the residual stream's.
    pub fn whole(table: &'a ParamTable, stage: u8, kind: Kind, gradients: GradientOptions) -> Self {
        let (lora, quantization, optim) = (None, Quantization::None, Optim::AdamW);
        let (residual, format, sharers, offloads) = (kind, &Plain, 1, false);
        Self { table, lora, quantization, stage, kind, residual, format, gradients, optim, sharers, offloads }
    }

    /// The model that a configuration trains.
    pub fn of(config: &Config, table: &'a ParamTable, kind: Kind) -> Self {
        let gradients = GradientOptions::new(config.zero.grad_accum_dtype, config.zero.reduce_dtype);
        let (lora, quantization) = (LoraSpec::new(&config.lora), config.quantization);
        let residual = residual_kind(config.residual_dtype, kind);
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

    /// Bytes between uses.
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

    /// Bytes of the experts that a sampler recorded for so many tokens, if they are replayed: all of an update's are there from its begin to
    /// its end.
    pub fn recorded_bytes(&self, replay: RouterReplay, tokens: usize) -> usize {
        match replay {
            RouterReplay::R3 => EXPERT_BYTES * self.table.spec.routed_experts_per_token() * tokens,
            RouterReplay::Disabled => 0,
        }
    }

    /// Bytes of the buckets alone that optimizer state on the host is copied through.
    pub(super) fn optimizer_buckets(&self) -> usize {
        self.state_bytes(&self.trained()).1
    }

    /// The optimizer's state and its buckets, of the rank that has the most.
    fn state_bytes(&self, trained: &ParamTable) -> (usize, usize) {
        let num_slices = if self.trained_stage() > 0 { trained.shards } else { 1 };
        let of_rank = |rank: usize| {
            let slice = |len: usize| rank * (len / num_slices)..(rank + 1) * (len / num_slices);
            let layout = StateLayout::new(trained, self.optim, accumulation_kind(self.kind), slice);
            (layout.bytes(), bucket_bytes(&layout))
        };
        let num_kinds = if self.optim == Optim::AdamW { 1 } else { num_slices }; // AdamW's slices are all alike
        let most = |(a, b): (usize, usize), (c, d): (usize, usize)| (a.max(c), b.max(d));
        (0..num_kinds).map(of_rank).reduce(most).unwrap_or_default()
    }

    /// Bytes that a step of Muon holds beside state and gradients.
    pub(super) fn orthogonal_bytes(&self) -> usize {
        match self.optim {
            Optim::Muon(_) if self.lora.is_none() => orthogonal_bytes(self.table, self.trained_stage() > 0),
            Optim::AdamW | Optim::AdamW8bit | Optim::Muon(_) => 0,
        }
    }

    /// One copy of the adapters' weights, which are whole on every rank.
    pub fn adapter_bytes(&self) -> usize {
        if self.lora.is_some() { self.kind.elt_size_in_bytes() * self.trained().total } else { 0 }
    }

    /// Bytes that an optimizer step reads and writes in device memory: the state both ways, gradients for their norm and again,
    /// and
    /// the new weights; without the way of either over ranks.
    pub fn optimizer_step_bytes(&self) -> usize {
        let trained = self.trained();
        let owned = trained.total / if self.trained_stage() > 0 { trained.shards } else { 1 };
        let gradient = self.gradient_kinds().accumulated.elt_size_in_bytes();
        2 * self.bytes().optimizer + owned * (2 * gradient + self.kind.elt_size_in_bytes())
    }

    /// Bytes of the weights, the frozen ones under adapters included. Quantised blocks are whole on every rank.
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

    /// The layout of what has gradients.
    pub(super) fn trained(&self) -> Cow<'a, ParamTable> {
        match &self.lora {
            None => Cow::Borrowed(self.table),
            Some(lora) => Cow::Owned(ParamTable::adapters(self.table.spec.clone(), lora, self.table.shards)),
        }
    }

    /// The stage at which that is sharded: adapters' weights stay whole, and a group of one rank has nothing to shard.
    pub(super) fn trained_stage(&self) -> u8 {
        match (&self.lora, self.table.shards) {
            (_, 1) => 0,
            (None, _) => self.stage,
            (Some(_), _) => self.stage.min(2),
        }
    }

    /// Whether units are gathered for use.
    pub fn shards_weights(&self) -> bool {
        self.stage > 2 && self.table.shards > 1 && self.quantization == Quantization::None
    }

    pub(super) fn gradient_kinds(&self) -> GradientKinds {
        self.gradients.kinds(accumulation_kind(self.kind))
    }
}

/// Bytes per rank of a [`super::Reference`] between uses, on the device or the host; `table.shards` is the shard group's size.
pub fn reference_bytes(table: &ParamTable, kind: Kind) -> usize {
    kind.elt_size_in_bytes() * table.total / table.shards
}
