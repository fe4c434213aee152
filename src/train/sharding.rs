//! The three choices of ZeRO (arXiv 1910.02054) and the groups they are made in.

use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::model::ParamTable;
use crate::ranks::{Collective, Lane, Mesh};

/// The parts of every unit that this rank keeps, owns and steps. A *slice* is one of S equal ranges of a unit, S being the size
/// of
/// the shard group; rank r of the group has slice r. With S < world (hybrid sharding) the replicate group joins the ranks
/// that have the same slice.
#[derive(Debug, Clone)]
pub(crate) struct Sharding {
    /// Ranks that share one copy of the state.
    pub shard: Arc<dyn Collective>,
    /// Ranks with the same slice in other shard groups.
    pub replicate: Arc<dyn Collective>,
    /// Where both work beside computation.
    pub lane: Arc<Lane>,
    /// Weights stay whole after use (stages 0 to 2).
    pub keeps_weights: bool,
    /// Gradients stay whole after backward (stages 0 and 1).
    pub keeps_gradients: bool,
    /// This rank steps the whole unit, not its slice (stage 0).
    pub owns_all: bool,
}

impl Sharding {
    /// The choices of `stage` over the mesh's groups; a shard group of one rank has nothing to shard.
    ///
    /// # Errors
    /// `InvalidValue` for an unknown stage, `InvalidArgument` for a table laid out for another shard group.
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

    /// The elements that this rank steps of a unit of `len`.
    pub(crate) fn owned(&self, len: usize) -> Range<usize> {
        if self.owns_all { 0..len } else { self.slice(len) }
    }
}

/// A view of `range` of a flat tensor.
pub(crate) fn narrow(flat: &Tensor, range: &Range<usize>) -> Tensor {
    flat.narrow(0, range.start as i64, range.len() as i64)
}

/// The elements that two ranges share.
pub(crate) fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}
