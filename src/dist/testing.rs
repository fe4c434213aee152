//! Ranks as threads of one process, for unit tests of everything that takes a group or a world.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::collective::Collective;
use super::control::ControlPlane;
use super::shm::{Member, Segment, ShmControl};
use super::world::World;
use crate::error::Error;

/// Runs `body` on `num_ranks` threads, each a rank of one world, and returns their results in rank order. A panic of one
/// rank ends its peers' collectives and is passed on.
pub(crate) fn worlds<T: Send>(num_ranks: usize, body: impl Fn(World) -> T + Sync) -> Vec<T> {
    worlds_with(num_ranks, 64 << 10, Duration::from_secs(20), body)
}

/// Runs `body` on threads that are ranks, with slots of `slot_bytes` and waits of `timeout`.
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
    let segment = Arc::new(Segment::in_process(num_ranks, slot_bytes).unwrap());
    let run = |rank: usize| {
        let member = Arc::new(Member::new(segment.clone(), rank, timeout));
        catch_unwind(AssertUnwindSafe(|| body(member.clone(), rank))).inspect_err(|_| {
            member.post(&Error::Panic { place: "a test's rank", message: format!("rank {rank}") });
        })
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..num_ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("panics are caught inside")).collect()
    });
    results.into_iter().map(|result| result.unwrap_or_else(|panic| resume_unwind(panic))).collect()
}

/// Runs `body` on `num_ranks` threads, each with the group of all.
pub(crate) fn threads<T: Send>(num_ranks: usize, body: impl Fn(Arc<dyn Collective>) -> T + Sync) -> Vec<T> {
    worlds(num_ranks, |world| body(world.group()))
}
