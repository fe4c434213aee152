//! Bytes per rank of what training holds, as functions of the layout: the plan adds them up before anything is allocated.
//! Activations have a file of their own.

use tch::Kind;

use super::flow::bucket_bytes;
use super::policy::GradientOptions;
use crate::config::Quantization;
use crate::model::{LoraSpec, ParamTable, QuantizedBlock, Unit};
use crate::torch::accumulation_kind;

/// Bytes per rank of a [`super::Policy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainBytes {
    /// Weights between uses.
    pub weights: usize,
    /// Gathered units, at most, while the network runs.
    pub gathered: usize,
    /// Gradients between backward and step.
    pub gradients: usize,
    /// Whole units, at most, whose gradients are being made or reduced.
    pub gradient_scratch: usize,
    /// Master weights and moments.
    pub optimizer: usize,
    /// What they flow through on the device, where they live on the host.
    pub optimizer_buckets: usize,
}

impl TrainBytes {
    /// For weights of `kind` at a ZeRO stage; `table.shards` is the shard group's size.
    pub fn new(table: &ParamTable, stage: u8, kind: Kind, gradients: GradientOptions) -> Self {
        let stage = if table.shards == 1 { 0 } else { stage };
        let share = |sharded: bool| if sharded { table.total / table.shards } else { table.total };
        let wide = accumulation_kind(kind);
        let (bytes, wide_bytes) = (kind.elt_size_in_bytes(), wide.elt_size_in_bytes());
        let kinds = gradients.kinds(wide);
        let [gradient_bytes, sent_bytes] = [kinds.accumulated, kinds.reduced].map(|kind| kind.elt_size_in_bytes());
        let cast_bytes = if kinds.accumulated == kinds.reduced { 0 } else { sent_bytes * largest(table) };
        Self {
            weights: bytes * share(stage > 2),
            gathered: if stage > 2 { bytes * gathered(table) } else { 0 },
            gradients: gradient_bytes * share(stage > 1),
            gradient_scratch: cast_bytes + if stage > 1 { gradient_bytes * gradient_scratch(table) } else { 0 },
            optimizer: 3 * wide_bytes * share(stage > 0),
            optimizer_buckets: bucket_bytes(largest(table) / if stage > 0 { table.shards } else { 1 }, wide),
        }
    }

    /// For what a configuration trains: all weights, or adapters of a base that is stored so.
    pub fn of(
        table: &ParamTable,
        (lora, quantization): (Option<&LoraSpec>, Quantization),
        stage: u8,
        kind: Kind,
        gradients: GradientOptions,
    ) -> Self {
        match lora {
            Some(lora) => Self::with_adapters(table, lora, stage, kind, quantization, gradients),
            None => Self::new(table, stage, kind, gradients),
        }
    }

    /// For a frozen model whose adapters train: theirs are all gradients and optimizer state, and their weights are whole.
    /// So are quantised blocks, one of which is dequantised at a time and the next beside it. The engine's copies of B,
    /// expanded, count as weights.
    fn with_adapters(
        table: &ParamTable,
        lora: &LoraSpec,
        stage: u8,
        kind: Kind,
        quantization: Quantization,
        gradients: GradientOptions,
    ) -> Self {
        let mut base = Self::new(table, stage, kind, gradients);
        if quantization == Quantization::Nf4 {
            let (spec, block) = (&table.spec, table.unit(Unit::Block(0)).len);
            let others = (table.total - spec.num_layers * block) * kind.elt_size_in_bytes();
            base.weights = others + spec.num_layers * QuantizedBlock::bytes(spec, kind);
            base.gathered = 2 * block * kind.elt_size_in_bytes();
        }
        let trained =
            Self::new(&ParamTable::adapters(table.spec.clone(), lora, table.shards), stage.min(2), kind, gradients);
        let expanded = lora.num_expanded(&table.spec) * kind.elt_size_in_bytes();
        Self { weights: base.weights + trained.weights + expanded, gathered: base.gathered, ..trained }
    }
}

/// Bytes per rank of a [`super::Reference`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReferenceBytes {
    /// Weights between uses.
    pub weights: usize,
    /// Gathered units, at most, while the network runs.
    pub gathered: usize,
}

impl ReferenceBytes {
    /// For weights of `kind`; `table.shards` is the shard group's size. On the host they are brought to the device as they
    /// are gathered, by a rank alone too.
    pub fn new(table: &ParamTable, kind: Kind, on_host: bool) -> Self {
        let bytes = kind.elt_size_in_bytes();
        let gathers = on_host || table.shards > 1;
        Self {
            weights: bytes * table.total / table.shards,
            gathered: if gathers { bytes * gathered(table) } else { 0 },
        }
    }
}

/// Elements of the largest unit.
fn largest(table: &ParamTable) -> usize {
    table.units.iter().map(|layout| layout.len).max().unwrap_or(0)
}

/// Elements of the largest two neighbours: the unit in use and the one on its way, forward or backward.
fn neighbours(table: &ParamTable) -> usize {
    table.units.windows(2).map(|pair| pair[0].len + pair[1].len).max().unwrap_or(0)
}

/// Elements of whole units at once: neighbours, or a tied head with its table and the last block.
fn gathered(table: &ParamTable) -> usize {
    let tied = table.spec.tie_word_embeddings;
    let last: usize = table.units.iter().rev().take(2).map(|layout| layout.len).sum();
    neighbours(table).max(if tied { table.unit(Unit::Embedding).len + last } else { 0 })
}

/// Elements of gradients of whole units at once: neighbours, and with a tied head the embedding's through the whole backward.
fn gradient_scratch(table: &ParamTable) -> usize {
    if !table.spec.tie_word_embeddings || table.units[0].unit != Unit::Embedding {
        return neighbours(table);
    }
    let others = table.units[1..].windows(2).map(|pair| pair[0].len + pair[1].len).max().unwrap_or(0);
    table.units[0].len + others
}
