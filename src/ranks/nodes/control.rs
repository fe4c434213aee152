//! The control plane for ranks on several nodes: shared memory within a node, the hub between nodes.

use std::sync::Arc;

use super::client::Client;
use super::frame::{Frame, FrameKind};
use super::layout::NodeLayout;
use crate::error::{Error, Result};
use crate::phase;
use crate::ranks::control::{ControlPlane, Deadline, RankFailure, RankGroup, Stopped};
use crate::ranks::shm::{Member, ShmControl};

/// One rank's end of the control plane.
#[derive(Debug)]
pub(in crate::ranks) struct NodesControl {
    pub(super) member: Arc<Member>,
    pub(super) client: Client,
    pub(super) layout: NodeLayout,
    rank: usize,
    within: ShmControl,
    /// The hub, on rank 0. It is dropped after the client, which still says goodbye to it.
    _hub: Option<super::hub::NodeHub>,
}

impl NodesControl {
    pub(super) fn new(
        rank: usize,
        member: Arc<Member>,
        client: Client,
        layout: NodeLayout,
        hub: Option<super::hub::NodeHub>,
    ) -> Self {
        client.attach(member.clone());
        let within = ShmControl::new(member.clone(), layout.attempt);
        Self { member, client, layout, rank, within, _hub: hub }
    }

    #[cfg(test)]
    pub(in crate::ranks) fn break_off(&self) {
        self.client.break_off();
    }

    /// Why a wait for other nodes has to end early, if it has to.
    pub(super) fn ended(&self) -> Option<Stopped> {
        self.member.failure().map(Stopped::Failed)
    }

    /// Converts to an error that includes the nodes of late ranks.
    pub(super) fn error(&self, stopped: Stopped, op: &'static str, name: &str, deadline: Deadline) -> Error {
        let place = match &stopped {
            Stopped::Late(missing) => format!(" of {}", self.layout.describe(missing)),
            _ => String::new(),
        };
        match stopped.error(op, name, self.rank, deadline) {
            Error::CollectiveTimeout { op, group, rank, timeout_s, missing, .. } => {
                Error::CollectiveTimeout { op, group, rank, timeout_s, missing, place }
            }
            other => other,
        }
    }

    /// Gathers the bytes of every rank of a group that spans nodes.
    fn gather(&self, op: &'static str, group: &RankGroup, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let _seen = phase::collective(op, &group.name, bytes.len());
        let deadline = self.member.deadline();
        let own = [op.as_bytes(), &[0], bytes].concat();
        let all = self.client.gather(group, &own, deadline, || self.ended());
        let all = all.map_err(|stopped| self.error(stopped, op, &group.name, deadline))?;
        let parts = all.iter().zip(&group.ranks).map(|(part, rank)| {
            let end = part.iter().position(|&byte| byte == 0).unwrap_or(part.len());
            let (called, bytes) = part.split_at(end);
            if called == op.as_bytes() {
                return Ok(bytes[1..].to_vec());
            }
            let message = format!("this rank called {op}, but rank {rank} {}", String::from_utf8_lossy(called));
            Err(Error::Collective { op, group: group.name.clone(), rank: self.rank, message })
        });
        parts.collect()
    }
}

impl ControlPlane for NodesControl {
    fn attempt(&self) -> u64 {
        self.layout.attempt
    }

    fn is_one_node(&self, group: &RankGroup) -> bool {
        self.layout.is_one_node(&group.ranks)
    }

    fn nodes_of(&self, ranks: &[usize]) -> String {
        self.layout.describe(ranks)
    }

    fn post_failure(&self, error: &Error) {
        if let Some(epoch) = self.member.post(error) {
            self.client.post_failure(epoch, error);
        }
    }

    fn failure(&self) -> Option<RankFailure> {
        self.member.failure()
    }

    /// The ranks of a node agree on the outcome of the epoch, and the node's leader reports it to the hub. The hub returns the outcome over all
    /// nodes.
    fn agree(&self) -> Result<Option<RankFailure>> {
        if let Some(failure) = self.client.lost() {
            return Err(failure.into());
        }
        self.member.agree_by(|epoch, own| {
            if self.rank == self.layout.leader_of(self.layout.node_of(self.rank)) {
                self.client.send(Frame::json(FrameKind::Agree, epoch, &own));
            }
            let _seen = phase::collective("agree", "world", 0);
            let (deadline, patience) = (self.member.deadline(), Deadline::after(self.member.patience()));
            let given_up = || own.clone().filter(|_| patience.is_over()).map(Stopped::Failed);
            let verdict = self.client.verdict(epoch, deadline, given_up);
            verdict.map_err(|stopped| self.error(stopped, "agree", "world", deadline))
        })
    }

    /// Whether a rank of this node waits in `agree`; always false for ranks on other nodes, because it is not known.
    fn is_waiting(&self, rank: usize) -> bool {
        self.layout.node_of(rank) == self.layout.node_of(self.rank) && self.within.is_waiting(rank)
    }

    fn barrier(&self, group: &Arc<RankGroup>) -> Result<()> {
        match self.is_one_node(group) {
            true => self.within.barrier(group),
            false => self.gather("barrier", group, &[]).map(drop),
        }
    }

    fn all_gather_bytes(&self, group: &Arc<RankGroup>, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        match self.is_one_node(group) {
            true => self.within.all_gather_bytes(group, bytes),
            false => self.gather("all_gather", group, bytes),
        }
    }

    fn broadcast(&self, group: &Arc<RankGroup>, bytes: &mut [u8], root: usize) -> Result<()> {
        if self.is_one_node(group) {
            return self.within.broadcast(group, bytes, root);
        }
        let own: &[u8] = if group.rank == root { bytes } else { &[] };
        let all = self.gather("broadcast", group, own)?;
        let [theirs, len] = [all[root].len(), bytes.len()];
        if theirs != len {
            let message = format!("this rank expects {len} bytes, but rank {} sent {theirs}", group.ranks[root]);
            return Err(Error::Collective { op: "broadcast", group: group.name.clone(), rank: self.rank, message });
        }
        bytes.copy_from_slice(&all[root]);
        Ok(())
    }
}
