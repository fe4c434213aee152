//! State and decisions of the hub: joined ranks, exchanges under way, failures and agreements. It uses sockets only to queue messages.

use std::collections::{BTreeMap, HashMap};

use super::connection::{Connection, End};
use super::frame::{Frame, FrameKind, pack, unpack};
use super::layout::{Greeting, NodeLayout, WorldRefusal};
use crate::error::ExitCode;
use crate::ranks::control::RankFailure;

/// The reason reported for a rank that ended normally while others wait for it.
const ENDED: &str = "its program has ended";

/// State of the hub.
#[derive(Debug)]
pub(super) struct Switch {
    own: Greeting,
    members: Vec<Option<JoinedRank>>,
    num_joined: u64,
    refusal: Option<WorldRefusal>,
    refused: Vec<Connection>,
    is_closed: bool,
    layout: Option<NodeLayout>,
    /// The current epoch, whose outcome is not known yet.
    epoch: u64,
    /// Number of failed epochs so far. Exchanges of earlier generations are over.
    generation: u64,
    failures: BTreeMap<u64, RankFailure>,
    /// For each node, whether it has sent its outcome of the current epoch.
    agreed: Vec<bool>,
    gathers: HashMap<GatherKey, PendingGather>,
    lost: Option<RankFailure>,
}

#[derive(Debug)]
struct JoinedRank {
    greeting: Greeting,
    connection: Option<Connection>,
    /// Distinguishes a connection from an earlier one of the same rank.
    place: u64,
    has_left: bool,
}

/// Division, first rank of the group, number of the exchange.
type GatherKey = (u32, u32, u64);

#[derive(Debug)]
struct PendingGather {
    ranks: Vec<usize>,
    parts: Vec<Option<Vec<u8>>>,
}

impl PendingGather {
    fn missing(&self) -> Vec<usize> {
        let missing = self.ranks.iter().zip(&self.parts).filter(|(_, part)| part.is_none());
        missing.map(|(rank, _)| *rank).collect()
    }
}

impl Switch {
    /// The state before any rank has joined; `own` is rank 0's greeting.
    pub(super) fn new(own: Greeting) -> Self {
        let members = (0..own.world_size).map(|_| None).collect();
        Self {
            own,
            members,
            num_joined: 0,
            refusal: None,
            refused: Vec::new(),
            is_closed: false,
            layout: None,
            epoch: 1,
            generation: 0,
            failures: BTreeMap::new(),
            agreed: Vec::new(),
            gathers: HashMap::new(),
            lost: None,
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.layout.is_some()
    }

    /// Whether ranks can still exchange data: all have joined, and none is lost.
    pub(super) fn serves(&self) -> bool {
        self.is_complete() && self.lost.is_none()
    }

    /// Admits a rank and returns a number for [`Switch::end`]. `None` if the rank is refused, in which case all others are, too. Also `None` if all
    /// ranks have joined: such a late process was replaced by another one with its rank.
    pub(super) fn join(&mut self, greeting: &Greeting, connection: Connection) -> Option<u64> {
        if self.layout.is_some() {
            return None;
        }
        if self.refusal.is_none() {
            self.refusal = self.own.check(greeting).err();
        }
        self.num_joined += 1;
        let (place, connection) = (self.num_joined, Some(connection));
        let joined = JoinedRank { greeting: greeting.clone(), connection, place, has_left: false };
        if let Some(refusal) = &self.refusal {
            let frame = Frame::json(FrameKind::Refused, 0, refusal);
            self.tell_all(&frame);
            joined.send(frame);
            self.refused.extend(joined.connection); // kept open until the rank has read the reason
            return None;
        }
        // A rank that joins again before all have joined was restarted: its earlier process is dead or dying.
        self.members[greeting.rank] = Some(joined);
        if self.members.iter().all(Option::is_some) {
            self.welcome();
        }
        Some(place)
    }

    fn welcome(&mut self) {
        let joined = || self.members.iter().flatten();
        let hosts =
            joined().filter(|member| member.greeting.local_rank == 0).map(|member| member.greeting.host.clone());
        let attempt = joined().map(|member| member.greeting.attempt).max().unwrap_or(0);
        let layout = NodeLayout { local_size: self.own.local_size, hosts: hosts.collect(), attempt };
        self.agreed = vec![false; layout.num_nodes()];
        self.tell_all(&Frame::json(FrameKind::Welcome, 0, &layout));
        self.layout = Some(layout);
    }

    /// Describes the ranks that have not joined yet.
    pub(super) fn describe_missing(&self) -> String {
        let missing: Vec<usize> = self.not_joined();
        let nodes = NodeLayout { local_size: self.own.local_size, hosts: Vec::new(), attempt: 0 };
        let (joined, all) = (self.members.len() - missing.len(), self.members.len());
        format!("ranks {missing:?} of {} ({joined} of {all} have joined)", nodes.describe(&missing))
    }

    fn not_joined(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&rank| self.members[rank].is_none()).collect()
    }

    /// Handles a message of `rank`. A rank that sends an unreadable message is lost, because others would wait for it.
    pub(super) fn take(&mut self, rank: usize, frame: Frame) {
        if let Err(error) = self.act(rank, frame) {
            self.lose(rank, &format!("its message cannot be read: {error}"));
        }
    }

    fn act(&mut self, rank: usize, frame: Frame) -> std::io::Result<()> {
        match frame.kind {
            FrameKind::Failure => self.fail(frame.epoch, frame.read_json()?),
            FrameKind::Agree => self.agree(rank, frame.epoch, frame.read_json()?),
            FrameKind::Gather => self.gather(rank, frame)?,
            FrameKind::Relay => {
                let (to, rank) = (frame.rank as usize, rank as u32);
                if let Some(Some(member)) = self.members.get(to).filter(|_| !self.is_gone(to)) {
                    member.send(Frame { rank, ..frame });
                } else {
                    self.lose(to, "it has already disconnected");
                }
            }
            FrameKind::Query => self.answer(rank, &frame),
            other => return Err(std::io::Error::other(format!("unexpected message from a rank: {other:?}"))),
        }
        Ok(())
    }

    /// Records a failure of `epoch`. Only the first one counts. It is sent to all ranks, with its node, once the earlier epochs are over.
    fn fail(&mut self, epoch: u64, mut failure: RankFailure) {
        if epoch < self.epoch || self.failures.contains_key(&epoch) {
            return;
        }
        failure.message = format!("on {}: {}", self.place(failure.rank), failure.message);
        self.failures.insert(epoch, failure);
        if epoch == self.epoch {
            self.tell_failure();
        }
    }

    fn tell_failure(&self) {
        if let Some(failure) = self.failures.get(&self.epoch) {
            self.tell_all(&Frame::json(FrameKind::Failure, self.epoch, failure));
        }
    }

    /// Handles a node's outcome of an epoch, sent by its leader after all its ranks reached the end of the epoch.
    fn agree(&mut self, rank: usize, epoch: u64, failure: Option<RankFailure>) {
        let Some(layout) = &self.layout else { return };
        let node = layout.node_of(rank);
        if epoch != self.epoch {
            return;
        }
        self.agreed[node] = true;
        if let Some(failure) = failure {
            self.fail(epoch, failure);
        }
        if !self.agreed.iter().all(|agreed| *agreed) {
            return self.check_gone();
        }
        let verdict = self.failures.remove(&self.epoch);
        self.tell_all(&Frame::json(FrameKind::Verdict, self.epoch, &verdict));
        if verdict.is_some() {
            self.gathers.clear();
            self.generation += 1;
        }
        self.agreed.fill(false);
        self.epoch += 1;
        self.tell_failure();
    }

    fn gather(&mut self, rank: usize, frame: Frame) -> std::io::Result<()> {
        if frame.epoch != self.generation {
            return Ok(()); // from before a failure
        }
        let parts = unpack(&frame.payload).and_then(|parts| <[Vec<u8>; 2]>::try_from(parts).ok());
        let [ranks, bytes] = parts
            .ok_or_else(|| std::io::Error::other("a malformed gather message (expected the ranks and the bytes)"))?;
        let ranks = serde_json::from_slice::<Vec<usize>>(&ranks)?;
        let key = (frame.division, frame.rank, frame.word);
        let num_parts = ranks.len();
        let asked = || PendingGather { ranks: ranks.clone(), parts: vec![None; num_parts] };
        let pending = self.gathers.entry(key).or_insert_with(asked);
        if pending.ranks != ranks {
            self.lose(rank, "it called a gather over other ranks than its peers");
            return Ok(());
        }
        if let Some(at) = pending.ranks.iter().position(|&member| member == rank) {
            pending.parts[at] = Some(bytes);
        }
        if !pending.missing().is_empty() {
            self.check_gone();
            return Ok(());
        }
        let done = self.gathers.remove(&key).expect("it was there");
        let all = pack(done.parts.iter().map(|part| part.as_deref().unwrap_or_default()));
        let gathered = Frame { kind: FrameKind::Gathered, payload: all, ..frame };
        for member in done.ranks.iter().filter_map(|&rank| self.members.get(rank)?.as_ref()) {
            member.send(gathered.clone());
        }
        Ok(())
    }

    /// Sends `rank` the list of ranks that it still waits for.
    fn answer(&self, rank: usize, frame: &Frame) {
        let late = match (&self.layout, frame.word) {
            (None, _) => self.not_joined(),
            (Some(layout), 0) => {
                let late = (0..layout.num_nodes()).filter(|&node| !self.agreed[node]);
                late.flat_map(|node| layout.leader_of(node)..layout.leader_of(node + 1)).collect()
            }
            _ => {
                let pending = self.gathers.get(&(frame.division, frame.rank, frame.word));
                pending.map(PendingGather::missing).unwrap_or_default()
            }
        };
        if let Some(Some(member)) = self.members.get(rank) {
            member.send(Frame::json(FrameKind::Late, 0, &late));
        }
    }

    /// Handles the end of a connection.
    pub(super) fn end(&mut self, rank: usize, place: u64, end: &End) {
        let Some(member) = self.members[rank].as_mut().filter(|member| member.place == place) else { return };
        if self.is_closed {
            return;
        }
        if self.layout.is_none() {
            self.members[rank] = None; // the rank may connect again
            return;
        }
        member.has_left = true;
        match end {
            End::Left => {
                self.tell_all(&Frame::json(FrameKind::Left, 0, &self.ended(rank, ENDED)));
                self.check_gone();
            }
            how => self.lose(rank, &how.to_string()),
        }
    }

    fn place(&self, rank: usize) -> String {
        self.layout.as_ref().map(|layout| layout.describe(&[rank])).unwrap_or_default()
    }

    fn is_gone(&self, rank: usize) -> bool {
        self.members.get(rank).is_none_or(|member| member.as_ref().is_some_and(|member| member.has_left))
    }

    /// Treats a rank that ended normally as failed once others wait for it, or a failure waits to be agreed on.
    fn check_gone(&mut self) {
        let Some(layout) = &self.layout else { return };
        let waits_for = |rank: usize| {
            let agrees = self.agreed.iter().any(|agreed| *agreed) && !self.agreed[layout.node_of(rank)];
            agrees || self.failures.contains_key(&self.epoch)
        };
        let gathered = self.gathers.values().flat_map(PendingGather::missing).find(|&rank| self.is_gone(rank));
        let missed = gathered.or_else(|| (0..self.members.len()).find(|&rank| self.is_gone(rank) && waits_for(rank)));
        if let Some(rank) = missed {
            self.lose(rank, ENDED);
        }
    }

    /// Tells all ranks that a rank is permanently gone, with the failure that was reported first.
    fn lose(&mut self, rank: usize, how: &str) {
        if self.lost.is_some() {
            return;
        }
        let failure = self.ended(rank, how);
        let failure = self.failures.entry(self.epoch).or_insert(failure).clone();
        self.tell_all(&Frame::json(FrameKind::Lost, self.epoch, &failure));
        self.lost = Some(failure);
    }

    fn ended(&self, rank: usize, how: &str) -> RankFailure {
        RankFailure { rank, code: ExitCode::RankDied, message: format!("on {}: {how}", self.place(rank)) }
    }

    fn tell_all(&self, frame: &Frame) {
        self.members.iter().flatten().for_each(|member| member.send(frame.clone()));
    }

    /// Takes all connections, to say goodbye.
    pub(super) fn close(&mut self) -> Vec<Connection> {
        self.is_closed = true;
        let members = self.members.iter_mut().flatten().filter_map(|member| member.connection.take());
        members.chain(self.refused.drain(..)).collect()
    }
}

impl JoinedRank {
    fn send(&self, frame: Frame) {
        if let Some(connection) = &self.connection {
            connection.send(frame);
        }
    }
}
