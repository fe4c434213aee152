//! Ranks and what they say to one another: how they meet ([`World`]), how they are grouped ([`Mesh`]) and what a group does
//! together ([`Collective`]), in shared memory on a CPU and through NCCL on GPUs, on one node or on several (`nodes`). What is no tensor goes over the control plane
//! (`control`). Knows nothing of models.

mod carrier;
mod checks;
mod collective;
mod control;
mod division;
mod env;
mod host_group;
mod lane;
mod mesh;
mod nccl;
mod nodes;
mod options;
mod peers;
mod rendezvous;
mod scope;
mod shm;
mod single;
#[cfg(test)]
pub(crate) mod testing;
mod world;

pub use collective::{
    Collective, ReduceOp, all_gather_bytes, all_gather_f64, all_gather_json, all_reduce_f64, any_rank, first_text,
};
pub use env::{RESTART_COUNT_VARIABLE, WorkerEnv};
pub use host_group::HostGroup;
pub use lane::{Lane, Work};
pub use mesh::Mesh;
pub use nccl::NCCL_SETTINGS;
pub use nodes::{NCCL_INTERFACE_VARIABLE, nccl_interface, require_token};
pub use options::{Backend, WorldOptions};
pub use rendezvous::{SEGMENT_FD_VARIABLE, STORE_FD_VARIABLE, SharedSegment};
pub use single::SingleRank;
pub use world::World;

use std::ops::Range;

/// The share of `rank` of `size` in `len` rows: consecutive, in rank order, sizes at most one apart.
pub fn share(len: usize, (rank, size): (usize, usize)) -> Range<usize> {
    len * rank / size..len * (rank + 1) / size
}
