//! The world: how ranks join, how they are grouped, and how a failure of one reaches all.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tch::Device;

use super::carrier::Carrier;
use super::collective::Collective;
use super::control::{Alone, ControlPlane, RankGroup};
use super::env::WorkerEnv;
use super::lane::Lane;
use super::nccl::{self, NcclGroups};
use super::nodes;
use super::options::{Backend, WorldOptions};
use super::rendezvous;
use super::shm::ShmControl;
use super::single::SingleRank;
use crate::config::{Config, WorldSize};
use crate::console::hide_progress;
use crate::cuda::Placement;
use crate::error::{Error, Result};
use crate::types::Place;

/// The division of the group of all ranks for tensors. Division 0 is for host data; those of [`World::subgroup`] follow.
pub(super) const TENSORS: usize = 1;
/// The first division of [`World::subgroup`]. Those before it are groups of the whole world.
pub(super) const FIRST_DIVISION: usize = 2;

/// All ranks of a run, seen from one of them.
///
/// ```
/// use colo_grpo::World;
/// use colo_grpo::ranks::ReduceOp;
/// use tch::Tensor;
///
/// let world = World::single(); // or `World::for_run`, which joins the ranks that a launcher started
/// let mut num_rows = Tensor::from_slice(&[12.0_f32]);
/// world.group().all_reduce(&mut num_rows, ReduceOp::Sum)?;
/// println!("rank {} of {}: {num_rows:?} rows in all", world.rank(), world.size());
/// # Ok::<(), colo_grpo::Error>(())
/// ```
#[derive(Debug)]
pub struct World {
    pub(super) env: WorkerEnv,
    pub(super) control: Arc<dyn ControlPlane>,
    pub(super) everyone: Arc<RankGroup>,
    pub(super) tensors: Carrier,
    /// All ranks, for tensors.
    group: Arc<dyn Collective>,
    lane: Arc<Lane>,
    pub(super) next_division: AtomicUsize,
}

impl World {
    /// A world with this process only.
    pub fn single() -> Self {
        let env = WorkerEnv {
            rank: 0,
            local_rank: 0,
            world_size: 1,
            local_world_size: 1,
            master_addr: "127.0.0.1".to_owned(),
            master_port: 0,
            attempt: 0,
        };
        Self::alone(env, Device::Cpu, Lane::immediate())
    }

    /// A world with this process only, for tensors of `backend`; with NCCL, on the first visible GPU.
    ///
    /// # Errors
    /// [`Error::Environment`] if there is no GPU or libtorch's CUDA library cannot be loaded.
    pub fn single_on(backend: Backend) -> Result<Self> {
        Self::join(&Self::single().env, WorldOptions { backend, ..WorldOptions::default() })
    }

    /// Joins the world that this process was started in by this crate's launcher, torchrun or srun (see [`WorkerEnv::from_env`]). Without such a
    /// launcher it is a world with this process only.
    ///
    /// # Errors
    /// The errors of [`WorkerEnv::from_env`] and [`World::join`].
    pub fn from_env(options: WorldOptions) -> Result<Self> {
        let env = WorkerEnv::from_env()?.unwrap_or_else(|| Self::single().env);
        Self::join(&env, options)
    }

    /// Joins the world of [`World::from_env`] for a run of `config`: on its device, with its `collective_timeout_s` and `node_timeout_s`.
    ///
    /// # Errors
    /// Returns the errors of [`World::from_env`]; [`Error::InvalidValue`] for a device that does not exist.
    pub fn for_run(config: &Config) -> Result<Self> {
        let on_cuda = Placement::new(config.model.device, config.model.dtype)?.on_cuda;
        Self::from_env(WorldOptions {
            timeout: Duration::from_secs_f64(config.supervision.collective_timeout_s),
            backend: if on_cuda { Backend::Nccl } else { Backend::Shm },
            node_timeout: Duration::from_secs_f64(config.supervision.node_timeout_s),
            compared: config.compared(),
            ..WorldOptions::default()
        })
    }

    fn alone(env: WorkerEnv, device: Device, lane: Arc<Lane>) -> Self {
        let control = Arc::new(Alone { attempt: env.attempt });
        let group = Arc::new(SingleRank::new("world", 0, device));
        Self::new(env, control, Carrier::Nobody, group, lane)
    }

    pub(super) fn new(
        env: WorkerEnv,
        control: Arc<dyn ControlPlane>,
        tensors: Carrier,
        group: Arc<dyn Collective>,
        lane: Arc<Lane>,
    ) -> Self {
        let everyone = everyone(&env, 0);
        Self { env, control, everyone, tensors, group, lane, next_division: AtomicUsize::new(FIRST_DIVISION) }
    }

    /// Joins the other ranks through shared memory. Under this crate's launcher it is the memory inherited from the launcher, else rank 0's, which
    /// the others find through the rendezvous store at MASTER_ADDR:MASTER_PORT (served by rank 0, unless torchrun's agent serves it). Ranks on
    /// several hosts connect to rank 0 at that address, and share memory with the ranks of their own host.
    ///
    /// # Errors
    /// [`Error::Environment`] if the store, the memory or the backend is not available, or nodes are incompatible; [`Error::CollectiveTimeout`] with
    /// the missing ranks; [`Error::StoppedEarly`] if a stop was requested.
    pub fn join(env: &WorkerEnv, options: WorldOptions) -> Result<Self> {
        if env.rank > 0 {
            hide_progress();
        }
        let device = match options.backend {
            Backend::Shm => Device::Cpu,
            Backend::Nccl => nccl::device(env)?,
        };
        let lane = match device {
            Device::Cuda(ordinal) => Lane::of_gpu(ordinal)?,
            _ => Lane::immediate(),
        };
        if env.world_size == 1 {
            return Ok(Self::alone(env.clone(), device, lane));
        }
        let least = env.local_world_size * 256;
        if options.slot_bytes < least {
            let expected = format!("slot_bytes of at least {least} for {} ranks on a host", env.local_world_size);
            return Err(Error::InvalidArgument { op: "World::join", expected, got: options.slot_bytes.to_string() });
        }
        let (control, host): (Arc<dyn ControlPlane>, _) = match env.local_world_size == env.world_size {
            true => {
                let member = Arc::new(rendezvous::meet(env, &options)?);
                (Arc::new(ShmControl::new(member.clone(), env.attempt)), Carrier::Shm(member))
            }
            false => {
                let nodes = nodes::meet(env, &options)?;
                (nodes.clone(), Carrier::Nodes(nodes))
            }
        };
        let carried = || {
            let tensors = match device {
                Device::Cuda(ordinal) => {
                    Carrier::Nccl(NcclGroups::new(control.clone(), ordinal, options.timeout, lane.clone())?)
                }
                _ => host,
            };
            let group = tensors.group(everyone(env, TENSORS), device)?;
            Ok((tensors, group))
        };
        let (tensors, group) = carried().inspect_err(|error| control.post_failure(error))?; // others may wait for this rank
        Ok(Self::new(env.clone(), control, tensors, group, lane))
    }

    /// This rank's number in the world.
    pub fn rank(&self) -> usize {
        self.env.rank
    }

    /// This rank's number and the world size.
    pub fn place(&self) -> Place {
        Place { rank: self.rank(), size: self.size() }
    }

    /// Total number of ranks.
    pub fn size(&self) -> usize {
        self.env.world_size
    }

    /// This rank's number on its host.
    pub fn local_rank(&self) -> usize {
        self.env.local_rank
    }

    /// Number of ranks on this host.
    pub fn local_size(&self) -> usize {
        self.env.local_world_size
    }

    /// Number of ranks in total and on each host.
    pub fn world_size(&self) -> WorldSize {
        WorldSize { ranks: self.size(), local_ranks: self.local_size() }
    }

    /// Number of hosts; each has equally many ranks.
    pub fn num_nodes(&self) -> usize {
        self.size() / self.local_size()
    }

    /// The node of a rank for messages, like `node 1 (host)`; empty if there is only one node.
    pub(crate) fn node_of(&self, rank: usize) -> String {
        self.control.nodes_of(&[rank])
    }

    /// How many times the launcher, or torchrun, started the run before.
    pub fn attempt(&self) -> u64 {
        self.control.attempt()
    }

    /// The device of this rank's tensors.
    pub fn device(&self) -> Device {
        self.group.device()
    }

    /// The group of all ranks, for tensors.
    pub fn group(&self) -> Arc<dyn Collective> {
        self.group.clone()
    }

    /// Runs collectives overlapped with computation.
    pub fn lane(&self) -> Arc<Lane> {
        self.lane.clone()
    }

    /// Ends a scope on all ranks together: returns `result` if it is Ok everywhere. Otherwise every rank gets the first failure, as its own error on
    /// the failing rank and as [`Error::PeerFailed`] elsewhere, and all groups are reset, so that later collectives work again. Collective over the
    /// world, whatever `result` is.
    ///
    /// # Errors
    /// The first failure; [`Error::CollectiveTimeout`] if ranks do not arrive.
    pub fn agree<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.control.post_failure(error);
        }
        let verdict = match self.control.agree() {
            Ok(verdict) => verdict,
            Err(unreached) => return Err(result.err().unwrap_or(unreached)),
        };
        if let (Some(_), Carrier::Nccl(nccl)) = (&verdict, &self.tensors) {
            // The first failure is the cause, so report it. A group that cannot be rebuilt fails in its next collective.
            if let Err(error) = nccl.rebuild() {
                tracing::error!("cannot rebuild the NCCL communicators after a failure: {error}");
            }
        }
        match (verdict, result) {
            (None, result) => result,
            (Some(failure), Err(own)) if failure.rank == self.rank() && !matches!(own, Error::PeerFailed { .. }) => {
                Err(own)
            }
            (Some(failure), _) => Err(failure.into()),
        }
    }

    /// Broadcasts `bytes` of rank `root` to every rank; all ranks must pass equally many, at least one. On the host; collective over the world.
    ///
    /// # Errors
    /// [`Error::PeerFailed`] and [`Error::CollectiveTimeout`], as for every collective.
    pub(crate) fn broadcast_bytes(&self, bytes: &mut [u8], root: usize) -> Result<()> {
        self.control.broadcast(&self.everyone, bytes, root)
    }

    /// Reports a failure to all ranks at once: collectives under way return [`Error::PeerFailed`]. [`World::agree`] does this, too, when this rank
    /// calls it.
    pub fn post_failure(&self, error: &Error) {
        self.control.post_failure(error);
    }

    /// Whether `rank` has reached the end of the current scope and waits there for this rank. Returns at once.
    pub(crate) fn is_waiting(&self, rank: usize) -> bool {
        self.control.is_waiting(rank)
    }

    /// Whether a rank has reported a failure that ranks have not agreed on yet.
    pub fn has_failed(&self) -> bool {
        self.control.failure().is_some()
    }
}

/// The group of all ranks, in the given division.
pub(super) fn everyone(env: &WorkerEnv, division: usize) -> Arc<RankGroup> {
    let ranks: Vec<usize> = (0..env.world_size).collect();
    RankGroup::new(division, "world", &ranks, env.rank)
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;
    use crate::error::ExitCode;
    use crate::ranks::{ReduceOp, testing};

    fn sum_of_ranks(group: &dyn Collective) -> Result<f64> {
        let mut tensor = Tensor::from_slice(&[group.rank() as f64]);
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
        Ok(tensor.double_value(&[0]))
    }

    #[test]
    fn the_first_failure_reaches_blocked_ranks_and_agreement_clears_it() {
        testing::worlds(4, |world| {
            let pair = world.subgroup("pair", &[world.rank() / 2 * 2, world.rank() / 2 * 2 + 1]).unwrap();
            for round in 0..20 {
                let failing = round % 4;
                let result = match world.rank() {
                    rank if rank == failing => Err(Error::NonFinite { message: format!("round {round}") }),
                    rank if rank / 2 == failing / 2 => sum_of_ranks(pair.as_ref()),
                    _ => sum_of_ranks(world.group().as_ref()),
                };
                let error = world.agree(result).unwrap_err();
                assert_eq!(error.exit_code(), ExitCode::Numerics);
                match error {
                    Error::NonFinite { .. } => assert_eq!(world.rank(), failing),
                    Error::PeerFailed { rank, message, .. } => {
                        assert_eq!((rank, message), (failing, format!("round {round}")));
                    }
                    other => panic!("{other}"),
                }
                assert_eq!(world.agree(sum_of_ranks(world.group().as_ref())).unwrap(), 6.0);
                let pair_sum = world.agree(sum_of_ranks(pair.as_ref()));
                assert_eq!(pair_sum.unwrap(), 1.0);
            }
        });
    }

    #[test]
    fn without_a_gpu_nccl_is_refused() {
        let options = WorldOptions { backend: Backend::Nccl, ..WorldOptions::default() };
        if crate::cuda::require().is_err() {
            let error = World::join(&World::single().env, options).unwrap_err();
            assert_eq!(error.exit_code(), ExitCode::Environment);
        }
    }

    #[test]
    fn missing_ranks_are_named() {
        let timeout = Duration::from_millis(200);
        let errors = testing::worlds_with(3, 4096, timeout, |world| {
            (world.rank() == 0).then(|| sum_of_ranks(world.group().as_ref()).unwrap_err().to_string())
        });
        let error = errors[0].as_ref().unwrap();
        assert!(error.contains("all_reduce in group 'world' timed out on rank 0"), "{error}");
        assert!(error.ends_with("missing ranks [1, 2]"), "{error}");
    }

    #[test]
    fn ranks_that_call_different_collectives_get_both_names() {
        let errors = testing::worlds(2, |world| {
            let mut tensor = Tensor::zeros([1 + world.rank() as i64], (Kind::Float, Device::Cpu));
            let group = world.group();
            let result = if world.rank() == 0 {
                group.all_reduce(&mut tensor, ReduceOp::Max)
            } else {
                group.broadcast(&mut tensor, 1)
            };
            let error = result.unwrap_err().to_string();
            world.agree(Ok(())).unwrap();
            error
        });
        let expected = "this rank called all_reduce of 4 bytes of Float (max), \
                        but rank 1 called broadcast of 8 bytes of Float (from group rank 1)";
        assert!(errors[0].contains(expected), "{}", errors[0]);
    }

    #[test]
    fn a_failure_posted_after_agreement_counts_for_the_next_scope() {
        testing::worlds(2, |world| {
            for _ in 0..200 {
                world.agree(Ok(())).unwrap();
                let result = if world.rank() == 1 { Err(Error::Injected { phase: "test" }) } else { Ok(()) };
                assert!(world.agree(result).is_err());
            }
        });
    }

    #[test]
    fn subgroups_that_disagree_are_refused() {
        testing::worlds(2, |world| {
            let name = ["a", "b"][world.rank()];
            let error = world.subgroup(name, &[0, 1]).unwrap_err().to_string();
            assert!(
                error.contains("rank 1 wants 'b' of [0, 1]") || error.contains("rank 0 wants 'a' of [0, 1]"),
                "{error}"
            );
            assert!(world.subgroup("c", &[1 - world.rank()]).is_err());
        });
    }
}
