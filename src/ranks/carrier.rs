//! Backends that carry tensors between ranks.

use std::sync::Arc;

use tch::Device;

use super::collective::Collective;
use super::control::RankGroup;
use super::nccl::NcclGroups;
use super::nodes::{NodesControl, NodesGroup};
use super::shm::{Member, ShmGroup};
use super::single::SingleRank;
use crate::error::Result;

/// The backend that carries tensors to other ranks.
#[derive(Debug)]
pub(super) enum Carrier {
    /// There are none.
    Nobody,
    Shm(Arc<Member>),
    Nodes(Arc<NodesControl>),
    Nccl(NcclGroups),
}

impl Carrier {
    /// The group `group` for tensors on `device`. Collective over it.
    ///
    /// # Errors
    /// The errors of connecting its GPUs.
    pub(super) fn group(&self, group: Arc<RankGroup>, device: Device) -> Result<Arc<dyn Collective>> {
        match self {
            Carrier::Nobody => Ok(Arc::new(SingleRank::new(&group.name, group.ranks[group.rank], device))),
            Carrier::Shm(member) => Ok(Arc::new(ShmGroup::new(member.clone(), group))),
            Carrier::Nodes(control) => NodesGroup::of(control, group),
            Carrier::Nccl(nccl) => nccl.add(group),
        }
    }
}
