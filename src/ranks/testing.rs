//! Ranks as threads of one process, for unit tests of code that takes a group or a world.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use tch::Device;

use super::carrier::Carrier;
use super::collective::Collective;
use super::control::ControlPlane;
use super::env::WorkerEnv;
use super::lane::Lane;
use super::nodes::testing::{TestHub, control};
use super::shm::{Member, Segment, ShmControl};
use super::world::{TENSORS, World, everyone};
use crate::error::Error;

/// Worlds whose ranks are threads.
impl World {
    fn in_process(member: Arc<Member>, rank: usize, world_size: usize) -> Self {
        let control = Arc::new(ShmControl::new(member.clone(), 0));
        Self::of_threads((rank, world_size, world_size), control, Carrier::Shm(member))
    }

    /// The world of a thread that is one of `local_size` ranks on its node.
    fn of_threads(
        (rank, world_size, local_size): (usize, usize, usize),
        control: Arc<dyn ControlPlane>,
        tensors: Carrier,
    ) -> Self {
        let alone = Self::single().env;
        let env = WorkerEnv { rank, local_rank: rank % local_size, world_size, local_world_size: local_size, ..alone };
        let group = tensors.group(everyone(&env, TENSORS), Device::Cpu).expect("nothing to connect");
        Self::new(env, control, tensors, group, Lane::immediate())
    }

    /// Ends this rank's connection to other nodes as if its process had died.
    pub(super) fn break_off(&self) {
        if let Carrier::Nodes(control) = &self.tensors {
            control.break_off();
        }
    }
}

/// Runs `body` on `num_ranks` threads, each a rank of one world, and returns the results in rank order. A panic of one rank ends its peers'
/// collectives and is propagated.
pub(crate) fn worlds<T: Send>(num_ranks: usize, body: impl Fn(World) -> T + Sync) -> Vec<T> {
    worlds_with(num_ranks, 64 << 10, Duration::from_secs(20), body)
}

/// Runs `body` on threads that are ranks, with slots of `slot_bytes` and a timeout of `timeout`.
pub(crate) fn worlds_with<T: Send>(
    num_ranks: usize,
    slot_bytes: usize,
    timeout: Duration,
    body: impl Fn(World) -> T + Sync,
) -> Vec<T> {
    members(num_ranks, slot_bytes, timeout, |member, rank| body(World::in_process(member, rank, num_ranks)))
}

/// Runs `body` on `num_ranks` threads, each with its end of the control plane and its rank, in this `attempt` of a run.
pub(super) fn controls(num_ranks: usize, attempt: u64, body: impl Fn(&dyn ControlPlane, usize) + Sync) {
    let run = |member, rank| body(&ShmControl::new(member, attempt), rank);
    members(num_ranks, 64 << 10, Duration::from_secs(20), run);
}

fn members<T: Send>(
    num_ranks: usize,
    slot_bytes: usize,
    timeout: Duration,
    body: impl Fn(Arc<Member>, usize) -> T + Sync,
) -> Vec<T> {
    let body = &body;
    let segment = Arc::new(Segment::in_process(num_ranks, slot_bytes).unwrap());
    on_threads(num_ranks, |rank| {
        let member = Arc::new(Member::new(segment.clone(), rank, 0, timeout));
        (member.clone(), move || body(member, rank))
    })
}

/// Runs `body` on threads that are ranks of `num_nodes` nodes with `local_size` ranks each, which join over TCP.
pub(crate) fn worlds_on_nodes<T: Send>(
    num_nodes: usize,
    local_size: usize,
    timeout: Duration,
    body: impl Fn(World) -> T + Sync,
) -> Vec<T> {
    let hub = TestHub::new();
    let segments: Vec<_> =
        (0..num_nodes).map(|_| Arc::new(Segment::in_process(local_size, 64 << 10).unwrap())).collect();
    let sizes = (num_nodes * local_size, local_size);
    on_threads(sizes.0, |rank| {
        let member =
            Arc::new(Member::new(segments[rank / local_size].clone(), rank, rank / local_size * local_size, timeout));
        let (hub, body) = (&hub, &body);
        (member.clone(), move || {
            let control = control(hub, member, (rank, sizes.0, sizes.1));
            body(World::of_threads((rank, sizes.0, sizes.1), control.clone(), Carrier::Nodes(control)))
        })
    })
}

fn on_threads<T: Send, F: FnOnce() -> T>(num_ranks: usize, rank: impl Fn(usize) -> (Arc<Member>, F) + Sync) -> Vec<T> {
    let run = |index: usize| {
        let (member, body) = rank(index);
        catch_unwind(AssertUnwindSafe(body)).inspect_err(|_| {
            member.post(&Error::Panic { place: "a test's rank", message: format!("rank {index}") });
        })
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..num_ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("panics are caught inside")).collect()
    });
    results.into_iter().map(|result| result.unwrap_or_else(|panic| resume_unwind(panic))).collect()
}

/// Runs `body` on `num_ranks` threads, each with the group of all ranks.
pub(crate) fn threads<T: Send>(num_ranks: usize, body: impl Fn(Arc<dyn Collective>) -> T + Sync) -> Vec<T> {
    worlds(num_ranks, |world| body(world.group()))
}
