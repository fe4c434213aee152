//! The backends that transfer tensors between ranks.

use std::sync::Arc;

use tch::Device;

use super::collective::Collective;
use super::control::RankGroup;
use super::nccl::NcclGroups;
use super::nodes::{NodesControl, NodesGroup};
use super::shm::{Member, ShmGroup};
use super::single::SingleRank;
use crate::error::Result;

/// The backend that transfers tensors to other ranks.
#[derive(Debug)]
pub(super) enum Carrier {
    /// No backend, because there is only one rank.
    Nobody,
    Shm(Arc<Member>),
    Nodes(Arc<NodesControl>),
    Nccl(NcclGroups),
}

impl Carrier {
    /// Creates the communication group `group` for tensors on `device`. Collective over it.
    ///
    /// # Errors
    /// Errors of connecting the group's GPUs.
    pub(super) fn group(&self, group: Arc<RankGroup>, device: Device) -> Result<Arc<dyn Collective>> {
        match self {
            Carrier::Nobody => Ok(Arc::new(SingleRank::new(&group.name, group.ranks[group.rank], device))),
            Carrier::Shm(member) => Ok(Arc::new(ShmGroup::new(member.clone(), group))),
            Carrier::Nodes(control) => NodesGroup::of(control, group),
            Carrier::Nccl(nccl) => nccl.add(group),
        }
    }
}
