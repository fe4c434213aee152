//! Bytes of the numbers that activations are made of.

use tch::Kind;

use crate::torch::accumulation_kind;

/// Bytes of an element of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementBytes {
    /// Weights and activations.
    pub narrow: usize,
    /// The accumulation kind.
    pub wide: usize,
    /// The residual stream.
    pub residual: usize,
    /// Rows that a product of forward reads: as they are, rounded, or both.
    pub read: usize,
    /// Gradients beside those that are kept as they are: rounded ones.
    pub rounded: usize,
}

impl ElementBytes {
    /// For weights of `kind`.
    pub fn new(kind: Kind, residual: Kind) -> Self {
        let [narrow, wide, residual] = [kind, accumulation_kind(kind), residual].map(|kind| kind.elt_size_in_bytes());
        Self { narrow, wide, residual, read: narrow, rounded: 0 }
    }
}
