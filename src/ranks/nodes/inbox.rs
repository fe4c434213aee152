//! The messages of the hub to a rank that nobody has taken yet.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use super::connection::End;
use super::frame::{Frame, FrameKind};
use super::layout::{NodeLayout, WorldRefusal};
use crate::error::ExitCode;
use crate::ranks::control::RankFailure;
use crate::ranks::shm::Member;

/// Where a rank's reader puts what comes, and others of its threads wait for it.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) state: Mutex<InboxState>,
    pub(super) news: Condvar,
    /// This rank's place in the memory of its node, which learns of failures elsewhere.
    pub(super) member: OnceLock<Arc<Member>>,
    pub(super) is_over: Arc<AtomicBool>,
}

/// The word and the payload of a relay.
pub(super) type Relayed = (u64, Vec<u8>);

#[derive(Debug, Default)]
pub(super) struct InboxState {
    pub(super) welcome: Option<Result<NodeLayout, WorldRefusal>>,
    /// Results of gathers, by generation, division and number.
    pub(super) gathered: HashMap<(u64, u32, u64), Vec<u8>>,
    /// Failed verdicts so far: what belongs to an earlier generation is not kept.
    pub(super) generation: u64,
    /// Messages of other ranks to this one, by generation, division and sender: word and payload.
    pub(super) relayed: HashMap<(u64, u32, u32), VecDeque<Relayed>>,
    pub(super) verdicts: HashMap<u64, Option<RankFailure>>,
    pub(super) late: Option<Vec<usize>>,
    /// Failures elsewhere, with their epochs, that came before this rank had its place in the memory of its node.
    pub(super) early_failures: Vec<(u64, RankFailure)>,
    /// A rank is gone for good, or the hub.
    pub(super) lost: Option<RankFailure>,
    /// Ranks that have ended in good order, each with what is said to whoever waits for it.
    pub(super) left: HashMap<usize, RankFailure>,
    /// The hub has said farewell.
    pub(super) has_hub_left: bool,
}

impl Inbox {
    pub(super) fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what the hub sent. What cannot be read ends all waits: one of them may be for it.
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
            FrameKind::Gathered | FrameKind::Relay if frame.epoch < state.generation => return Ok(()), // of before a failure
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

    /// A rank is gone for good: whoever waits for anything on this node is told.
    pub(super) fn lose(&self, failure: RankFailure) {
        let failure = self.lock().lost.get_or_insert(failure).clone(); // first: who attaches now finds it
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
