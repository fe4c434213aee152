//! Messages from the hub to a rank that have not been handled yet.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use super::connection::End;
use super::frame::{Frame, FrameKind};
use super::layout::{NodeLayout, WorldRefusal};
use crate::error::ExitCode;
use crate::ranks::control::RankFailure;
use crate::ranks::shm::Member;

/// Received messages. A rank's reader thread stores them here, and its other threads wait for them.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) state: Mutex<InboxState>,
    pub(super) news: Condvar,
    /// This rank's place in the shared memory of its node, which must be told of failures on other nodes.
    pub(super) member: OnceLock<Arc<Member>>,
    pub(super) is_over: Arc<AtomicBool>,
}

/// The word and the payload of a relay message.
pub(super) type Relayed = (u64, Vec<u8>);

#[derive(Debug, Default)]
pub(super) struct InboxState {
    pub(super) welcome: Option<Result<NodeLayout, WorldRefusal>>,
    /// Results of gathers, by generation, division and number.
    pub(super) gathered: HashMap<(u64, u32, u64), Vec<u8>>,
    /// Number of failed epochs so far. Messages of earlier generations are dropped.
    pub(super) generation: u64,
    /// Messages from other ranks to this one, by generation, division and sender.
    pub(super) relayed: HashMap<(u64, u32, u32), VecDeque<Relayed>>,
    pub(super) verdicts: HashMap<u64, Option<RankFailure>>,
    pub(super) late: Option<Vec<usize>>,
    /// Failures on other nodes, with their epochs, that arrived before this rank had its place in shared memory.
    pub(super) early_failures: Vec<(u64, RankFailure)>,
    /// The failure of a rank, or of the hub, that is permanently gone.
    pub(super) lost: Option<RankFailure>,
    /// Ranks that have ended normally, each with the failure to report to a rank that waits for it.
    pub(super) left: HashMap<usize, RankFailure>,
    /// Whether the hub has said goodbye.
    pub(super) has_hub_left: bool,
}

impl Inbox {
    pub(super) fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a message from the hub. An unreadable message ends all waits, because one of them may be for it.
    pub(super) fn take(&self, frame: Frame) {
        if let Err(error) = self.keep(frame) {
            let message = format!("it runs the hub that connects the nodes, and its message cannot be read: {error}");
            self.lose(RankFailure { rank: 0, code: ExitCode::RankDied, message });
        }
    }

    fn keep(&self, frame: Frame) -> std::io::Result<()> {
        let mut state = self.lock();
        match frame.kind {
            FrameKind::Welcome => state.welcome = Some(Ok(frame.read_json()?)),
            FrameKind::Refused => state.welcome = Some(Err(frame.read_json()?)),
            FrameKind::Failure => {
                let failure = frame.read_json()?;
                let Some(member) = self.member.get() else {
                    state.early_failures.push((frame.epoch, failure));
                    return Ok(());
                };
                drop(state);
                member.post_of_other_node(frame.epoch, &failure);
                return Ok(());
            }
            FrameKind::Lost => {
                drop(state);
                self.lose(frame.read_json()?);
                return Ok(());
            }
            FrameKind::Left => {
                let failure: RankFailure = frame.read_json()?;
                state.left.insert(failure.rank, failure);
            }
            FrameKind::Verdict => {
                state.verdicts.insert(frame.epoch, frame.read_json()?);
            }
            FrameKind::Gathered | FrameKind::Relay if frame.epoch < state.generation => return Ok(()), // from before a failure
            FrameKind::Gathered => {
                state.gathered.insert((frame.epoch, frame.division, frame.word), frame.payload);
            }
            FrameKind::Relay => {
                let queue = state.relayed.entry((frame.epoch, frame.division, frame.rank)).or_default();
                queue.push_back((frame.word, frame.payload));
            }
            FrameKind::Late => state.late = Some(frame.read_json()?),
            other => return Err(std::io::Error::other(format!("unexpected message from the hub: {other:?}"))),
        }
        drop(state);
        self.news.notify_all();
        Ok(())
    }

    /// Records that a rank is permanently gone, and ends all waits on this node.
    pub(super) fn lose(&self, failure: RankFailure) {
        let failure = self.lock().lost.get_or_insert(failure).clone(); // first, so that a rank that attaches now finds it
        if let Some(member) = self.member.get() {
            member.lose(failure);
        }
        self.news.notify_all();
    }

    pub(super) fn end(&self, end: &End, place: &str) {
        match end {
            End::Left => self.lock().has_hub_left = true,
            how => {
                let message = format!("it runs the hub that connects the nodes, at {place}: {how}");
                self.lose(RankFailure { rank: 0, code: ExitCode::RankDied, message });
            }
        }
        self.news.notify_all();
    }
}
