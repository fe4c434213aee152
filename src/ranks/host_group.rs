//! Groups of ranks that exchange small pieces of host memory without using their devices.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::collective::gather_json;
use super::control::{ControlPlane, RankGroup};
use crate::error::Result;

/// A group of ranks on the control plane; see [`World::host_group`](super::World::host_group).
#[derive(Debug, Clone)]
pub struct HostGroup {
    pub(super) control: Arc<dyn ControlPlane>,
    pub(super) ranks: Arc<RankGroup>,
}

impl HostGroup {
    /// Index of this rank within the group.
    pub fn rank(&self) -> usize {
        self.ranks.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.ranks.len()
    }

    /// Gathers every rank's value, in rank order, as JSON. `op` names the exchange in errors. Collective over the group.
    ///
    /// # Errors
    /// [`Error::PeerFailed`](crate::Error::PeerFailed) as soon as a rank of the world has posted a failure;
    /// [`Error::CollectiveTimeout`](crate::Error::CollectiveTimeout) with the late ranks; [`Error::Collective`](crate::Error::Collective) for a value
    /// that cannot be written as JSON.
    pub fn all_gather_json<T: Serialize + DeserializeOwned>(&self, op: &'static str, own: T) -> Result<Vec<T>> {
        if self.size() == 1 {
            return Ok(vec![own]);
        }
        let rank = self.ranks.ranks[self.ranks.rank];
        gather_json((&self.ranks.name, rank), op, &own, |own| self.control.all_gather_bytes(&self.ranks, own))
    }
}
