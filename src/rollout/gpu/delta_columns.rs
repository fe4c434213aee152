//! Column layout of the projections of a gated delta net, which share one buffer.

use crate::ops::delta_net::DeltaHeads;

/// Alignment of each projection, in elements, for the fastest GEMMs.
pub(super) const ALIGNED: usize = 8;

/// Column counts of a token's projections in a gated delta net.
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

    /// Columns of: queries, keys and values together; the output gate; write strengths; decays.
    pub(super) fn parts(self) -> [usize; 4] {
        [self.channels, self.values, self.heads, self.heads]
    }

    /// Total columns, with each projection aligned.
    pub(super) fn all(self) -> usize {
        self.parts().iter().map(|columns| columns.next_multiple_of(ALIGNED)).sum()
    }
}
