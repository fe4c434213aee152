//! The control plane: communication between ranks other than tensors. It reports a failure to all ranks, lets them agree on the outcome of a scope,
//! and exchanges small pieces of host memory. Code outside this module does not know its implementation.
//!
//! Within a host the implementation is shared memory (`shm::control`); between hosts it is a hub on rank 0 (`nodes`). An implementation must keep
//! three promises. A wait ends with the first failure of any rank. A wait has a [`Deadline`], after which the error names the late ranks. Messages of
//! an earlier attempt of the run are never mistaken for messages of this attempt.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, ExitCode, Result};
use crate::phase::awake_now;

/// Communication of all ranks of a run, except tensors. Methods with a [`RankGroup`] are collective over it: all ranks of the group must call them in
/// the same order.
///
/// # Errors
/// [`Error::PeerFailed`] as soon as a rank of the world has posted a failure; [`Error::CollectiveTimeout`] with the late ranks; [`Error::Collective`]
/// if ranks call different operations.
pub(super) trait ControlPlane: Send + Sync + Debug {
    /// How many times the run was started before this attempt.
    fn attempt(&self) -> u64;
    /// Whether all ranks of a group share memory.
    fn is_one_node(&self, _group: &RankGroup) -> bool {
        true
    }
    /// Names of the nodes of `ranks`; empty if there is only one node.
    fn nodes_of(&self, _ranks: &[usize]) -> String {
        String::new()
    }
    /// Reports this rank's failure to all ranks, unless another failure was posted before. An [`Error::PeerFailed`] is not reported, because all
    /// ranks know it already.
    fn post_failure(&self, error: &Error);
    /// The posted failure that ranks have not agreed on yet, if any.
    fn failure(&self) -> Option<RankFailure>;
    /// Waits for every rank of the world, failed or not. Returns the posted failure, if any, on all of them, and clears it.
    fn agree(&self) -> Result<Option<RankFailure>>;
    /// Whether `rank` already waits in [`ControlPlane::agree`] for this one. Returns at once. An implementation that does not know returns false.
    fn is_waiting(&self, _rank: usize) -> bool {
        false
    }
    /// Waits until every rank of the group has arrived.
    fn barrier(&self, group: &Arc<RankGroup>) -> Result<()>;
    /// Gathers every rank's bytes, in group order; lengths may differ.
    fn all_gather_bytes(&self, group: &Arc<RankGroup>, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// Replaces `bytes` by those of group rank `root`; all ranks must pass equally many.
    fn broadcast(&self, group: &Arc<RankGroup>, bytes: &mut [u8], root: usize) -> Result<()>;
}

/// A group of ranks of the world, as seen from one of them.
#[derive(Debug)]
pub struct RankGroup {
    /// The group's name, for messages.
    pub name: String,
    /// World ranks, in group order.
    pub ranks: Vec<usize>,
    /// Index of this rank within the group.
    pub rank: usize,
    /// Number of the division that this group is part of. A division splits the world into groups, so each rank is in one group of it.
    pub division: usize,
}

impl RankGroup {
    /// The group of `ranks`; world rank `rank` must be one of them.
    pub fn new(division: usize, name: &str, ranks: &[usize], rank: usize) -> Arc<Self> {
        let rank = ranks.iter().position(|&member| member == rank).expect("a member of its own group");
        Arc::new(Self { name: name.to_owned(), ranks: ranks.to_vec(), rank, division })
    }
}

/// The first failure of any rank, as reported to all ranks.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct RankFailure {
    pub rank: usize,
    pub code: ExitCode,
    pub message: String,
}

impl From<RankFailure> for Error {
    fn from(failure: RankFailure) -> Self {
        Error::PeerFailed { rank: failure.rank, code: failure.code, message: failure.message }
    }
}

/// The end of a wait for peers; messages name its `limit`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    at: Instant,
    pub limit: Duration,
}

impl Deadline {
    /// A deadline at `limit` from now.
    pub fn after(limit: Duration) -> Self {
        Self { at: awake_now() + limit, limit }
    }

    pub fn is_over(&self) -> bool {
        awake_now() > self.at
    }
}

/// Why a wait ended before all peers arrived.
#[derive(Debug)]
pub(super) enum Stopped {
    /// A rank failed.
    Failed(RankFailure),
    /// The deadline passed; these world ranks had not arrived.
    Late(Vec<usize>),
    /// This process was asked to stop.
    OnRequest,
}

impl Stopped {
    /// Converts to the error of world rank `rank`, which waited in `op` of the group `name`.
    pub fn error(self, op: &'static str, name: &str, rank: usize, deadline: Deadline) -> Error {
        match self {
            Stopped::Failed(failure) => failure.into(),
            Stopped::OnRequest => Error::StoppedEarly,
            Stopped::Late(missing) => {
                let (group, timeout_s) = (name.to_owned(), deadline.limit.as_secs_f64());
                Error::CollectiveTimeout { op, group, rank, timeout_s, missing, place: String::new() }
            }
        }
    }
}

/// The control plane of a world with one rank.
#[derive(Debug)]
pub(super) struct Alone {
    pub attempt: u64,
}

impl ControlPlane for Alone {
    fn attempt(&self) -> u64 {
        self.attempt
    }

    fn post_failure(&self, _: &Error) {}

    fn failure(&self) -> Option<RankFailure> {
        None
    }

    fn agree(&self) -> Result<Option<RankFailure>> {
        Ok(None)
    }

    fn barrier(&self, _: &Arc<RankGroup>) -> Result<()> {
        Ok(())
    }

    fn all_gather_bytes(&self, _: &Arc<RankGroup>, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(vec![bytes.to_vec()])
    }

    fn broadcast(&self, _: &Arc<RankGroup>, _: &mut [u8], _: usize) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::testing;

    /// Checks that every control plane must pass, for any number of ranks.
    fn check(control: &dyn ControlPlane, ranks: &[usize], rank: usize) {
        let group = RankGroup::new(0, "world", ranks, rank);
        let expected: Vec<Vec<u8>> = ranks.iter().map(|&rank| vec![rank as u8; rank * 3]).collect();
        for round in 0..3 {
            assert_eq!(control.all_gather_bytes(&group, &vec![rank as u8; rank * 3]).unwrap(), expected);
            let mut bytes = [rank as u8; 5];
            control.broadcast(&group, &mut bytes, ranks.len() - 1).unwrap();
            assert_eq!(bytes, [*ranks.last().unwrap() as u8; 5]);
            control.barrier(&group).unwrap();
            assert!(control.failure().is_none() && control.agree().unwrap().is_none(), "round {round}");
            assert_eq!(control.attempt(), 2);
        }
    }

    #[test]
    fn control_operations_agree_for_one_and_several_ranks() {
        check(&Alone { attempt: 2 }, &[0], 0);
        testing::controls(3, 2, |control, rank| check(control, &[0, 1, 2], rank));
    }

    #[test]
    fn a_failure_ends_waiting_peers_and_is_cleared_by_agreement() {
        testing::controls(3, 0, |control, rank| {
            let group = RankGroup::new(0, "world", &[0, 1, 2], rank);
            if rank == 1 {
                control.post_failure(&Error::NonFinite { message: "rank 1's own".to_owned() });
                control.post_failure(&Error::StoppedEarly); // ignored: only the first failure counts
            } else {
                let ended = control.all_gather_bytes(&group, &[1]).unwrap_err();
                assert!(
                    matches!(&ended, Error::PeerFailed { rank: 1, message, .. } if message == "rank 1's own"),
                    "{ended}"
                );
            }
            assert_eq!(control.agree().unwrap().map(|failure| failure.rank), Some(1));
            assert!(control.failure().is_none());
            assert_eq!(control.all_gather_bytes(&group, &[rank as u8]).unwrap(), [[0], [1], [2]]);
        });
    }

    #[test]
    fn a_timeout_names_the_late_ranks_and_the_limit() {
        let deadline = Deadline::after(Duration::ZERO);
        while !deadline.is_over() {}
        let error = Stopped::Late(vec![4, 5]).error("barrier", "world", 0, deadline).to_string();
        assert!(error.contains("barrier in group 'world' timed out on rank 0") && error.ends_with("[4, 5]"), "{error}");
    }
}
