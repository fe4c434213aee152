//! Bytes per rank of what training holds, as functions of the layout: the plan adds them up before anything is allocated.
//! Activations are the network's and not counted here.

use tch::Kind;

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
    /// Whole units, at most, whose gradients are being made and will be scattered.
    pub gradient_scratch: usize,
    /// Master weights and moments.
    pub optimizer: usize,
}

impl TrainBytes {
    /// For weights of `kind` at a ZeRO stage; `table.shards` is the shard group's size.
    pub fn new(table: &ParamTable, stage: u8, kind: Kind) -> Self {
        let stage = if table.shards == 1 { 0 } else { stage };
        let share = |sharded: bool| if sharded { table.total / table.shards } else { table.total };
        let (bytes, wide_bytes) = (kind.elt_size_in_bytes(), accumulation_kind(kind).elt_size_in_bytes());
        Self {
            weights: bytes * share(stage > 2),
            gathered: if stage > 2 { bytes * two_largest(table) } else { 0 },
            gradients: wide_bytes * share(stage > 1),
            gradient_scratch: if stage > 1 { wide_bytes * gradient_scratch(table) } else { 0 },
            optimizer: 3 * wide_bytes * share(stage > 0),
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
    /// For weights of `kind`; `table.shards` is the shard group's size.
    pub fn new(table: &ParamTable, kind: Kind) -> Self {
        let TrainBytes { weights, gathered, .. } = TrainBytes::new(table, 3, kind);
        Self { weights, gathered }
    }
}

/// Elements of the two largest units together.
fn two_largest(table: &ParamTable) -> usize {
    let mut lens: Vec<usize> = table.units.iter().map(|layout| layout.len).collect();
    lens.sort_unstable_by(|a, b| b.cmp(a));
    lens.iter().take(2).sum()
}

/// Elements of the largest unit, or with a tied head of the embedding, open through the whole backward, and the largest
/// other one.
fn gradient_scratch(table: &ParamTable) -> usize {
    let embedding = table.unit(Unit::Embedding).len;
    let others = table.units.iter().skip(1).map(|layout| layout.len).max().unwrap_or(0);
    if table.spec.tie_word_embeddings { embedding + others } else { embedding.max(others) }
}
