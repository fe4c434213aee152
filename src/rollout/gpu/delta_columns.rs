//! Where the projections of a gated delta net lie beside one another.

use crate::ops::delta_net::DeltaHeads;

/// Projections begin at multiples of this, in elements: products then take them fastest.
pub(super) const ALIGNED: usize = 8;

/// Columns of the projections of a token.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeltaColumns {
    channels: usize,
    pub(super) values: usize,
    heads: usize,
}

impl DeltaColumns {
    pub(super) fn new(heads: DeltaHeads) -> Self {
        let DeltaHeads { num_value_heads, value_dim, .. } = heads;
        Self { channels: heads.channels(), values: num_value_heads * value_dim, heads: num_value_heads }
    }

    /// Columns of queries, keys and values, of the gate, of write strengths and of decays.
    pub(super) fn parts(self) -> [usize; 4] {
        [self.channels, self.values, self.heads, self.heads]
    }

    /// All columns, each projection aligned.
    pub(super) fn all(self) -> usize {
        self.parts().iter().map(|columns| columns.next_multiple_of(ALIGNED)).sum()
    }
}
