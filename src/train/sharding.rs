//! The three choices of ZeRO (arXiv 1910.02054), and the groups of ranks that they apply to.

use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::model::ParamTable;
use crate::ranks::{Collective, Lane, Mesh};

/// The parts of every unit that this rank stores, owns and steps. A *slice* is one of S equal ranges of a unit, where S is the size of the shard
/// group; rank r of the group has slice r. If S < world size (hybrid sharding), the replicate group joins the ranks that have the same slice.
#[derive(Debug, Clone)]
pub(crate) struct Sharding {
    /// The shard group: ranks that together hold one copy of the state.
    pub shard: Arc<dyn Collective>,
    /// The replicate group: ranks with the same slice in other shard groups.
    pub replicate: Arc<dyn Collective>,
    /// Runs collectives of both groups overlapped with computation.
    pub lane: Arc<Lane>,
    /// Whether weights stay whole after use (stages 0 to 2).
    pub keeps_weights: bool,
    /// Whether gradients stay whole after backward (stages 0 and 1).
    pub keeps_gradients: bool,
    /// Whether this rank steps the whole unit instead of its slice (stage 0).
    pub owns_all: bool,
}

impl Sharding {
    /// Applies ZeRO stage `stage` to the groups of the mesh. A shard group of one rank has nothing to shard.
    ///
    /// # Errors
    /// `InvalidValue` for an unknown stage, `InvalidArgument` for a table of another shard group.
    pub(crate) fn new(table: &ParamTable, mesh: &Mesh, stage: u8) -> Result<Self> {
        if stage > 3 {
            return Err(Error::invalid_value("zero.stage", stage, "0, 1, 2 or 3"));
        }
        let (shard, replicate) = (mesh.shard.clone(), mesh.replicate.clone());
        if table.shards != shard.size() {
            return Err(Error::InvalidArgument {
                op: "Sharding::new",
                expected: format!("a table of {} shards", shard.size()),
                got: format!("{} shards", table.shards),
            });
        }
        let stage = if shard.size() == 1 { 0 } else { stage };
        let (keeps_weights, keeps_gradients, owns_all) = (stage < 3, stage < 2, stage == 0);
        Ok(Self { shard, replicate, lane: mesh.lane.clone(), keeps_weights, keeps_gradients, owns_all })
    }

    /// This rank's slice of a unit of `len` elements.
    pub(crate) fn slice(&self, len: usize) -> Range<usize> {
        let slice_len = len / self.shard.size();
        let start = self.shard.rank() * slice_len;
        start..start + slice_len
    }

    /// The range of a unit of `len` elements that this rank steps.
    pub(crate) fn owned(&self, len: usize) -> Range<usize> {
        if self.owns_all { 0..len } else { self.slice(len) }
    }
}

/// A view of `range` of a flat tensor.
pub(crate) fn narrow(flat: &Tensor, range: &Range<usize>) -> Tensor {
    flat.narrow(0, range.start as i64, range.len() as i64)
}

/// The intersection of two ranges.
pub(crate) fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}
