//! Ranks and their communication: how they join ([`World`]), how they are grouped ([`Mesh`]), and the collectives of a group ([`Collective`]), by
//! shared memory on CPUs and NCCL on GPUs, on one node or several (`nodes`). Everything but tensors uses the control plane (`control`). The module
//! knows nothing of models.
//!
//! Reducing values over ranks, here in a world of one rank:
//!
//! ```
//! use colo_grpo::ranks::{Collective, Mesh, ReduceOp};
//! use colo_grpo::World;
//! use tch::Tensor;
//!
//! let world = World::single();
//! let mesh: Mesh = world.mesh(1, 1)?; // tensor parallel and sharded in groups of one
//! let mut sum = Tensor::from_slice(&[1.0_f32, 2.0]);
//! mesh.dp.all_reduce(&mut sum, ReduceOp::Sum)?;
//! assert_eq!(Vec::<f32>::try_from(&sum).unwrap(), [1.0, 2.0]);
//! let group: std::sync::Arc<dyn Collective> = world.group();
//! assert_eq!((group.rank(), group.size()), (0, 1));
//! # Ok::<(), colo_grpo::Error>(())
//! ```
//!
//! Joining the ranks that a launcher has started:
//!
//! ```no_run
//! use colo_grpo::ranks::{Backend, WorkerEnv, WorldOptions};
//! use colo_grpo::{Result, World};
//!
//! fn join() -> Result<World> {
//!     let options = WorldOptions { backend: Backend::Shm, ..WorldOptions::default() };
//!     match WorkerEnv::from_env()? {
//!         Some(env) => World::join(&env, options), // torchrun, srun or `colo-grpo --nproc`
//!         None => Ok(World::single()),
//!     }
//! }
//! ```

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

pub use collective::{Collective, ReduceOp};
#[doc(hidden)]
pub use collective::{Trade, all_gather_bytes, all_gather_f64, all_gather_json, all_reduce_f64, any_rank, first_text};
#[doc(hidden)]
pub use env::RESTART_COUNT_VARIABLE;
pub use env::WorkerEnv;
#[doc(hidden)]
pub use host_group::HostGroup;
#[doc(hidden)]
pub use lane::{Lane, Work};
pub use mesh::Mesh;
#[doc(hidden)]
pub use nccl::NCCL_SETTINGS;
#[doc(hidden)]
pub use nodes::{NCCL_INTERFACE_VARIABLE, nccl_interface, require_token};
pub use options::{Backend, WorldOptions};
#[doc(hidden)]
pub use rendezvous::{SEGMENT_FD_VARIABLE, STORE_FD_VARIABLE, SharedSegment};
#[doc(hidden)]
pub use single::SingleRank;
pub use world::World;
