//! Bytes per rank of what training holds, as functions of the layout: the plan adds them up before anything is allocated.
//! Activations are the network's and not counted here.

use tch::Kind;

use super::flow::bucket_bytes;
use super::policy::GradientOptions;
use crate::model::{ParamTable, Unit};
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
        let (bytes, wide_bytes) = (kind.elt_size_in_bytes(), accumulation_kind(kind).elt_size_in_bytes());
        let wide = accumulation_kind(kind);
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
    let embedding = table.unit(Unit::Embedding).len;
    let others = table.units[1..].windows(2).map(|pair| pair[0].len + pair[1].len).max().unwrap_or(0);
    if table.spec.tie_word_embeddings { embedding + others } else { neighbours(table) }
}
