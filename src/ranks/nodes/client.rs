//! A rank's end of its connection to the hub.

use std::collections::{HashMap, VecDeque};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::auth::{TOKEN_VARIABLE, Token, Unproven};
use super::connection::{self, Connection};
use super::frame::{Frame, FrameKind, pack, unpack};
use super::inbox::{Inbox, InboxState};
use super::layout::{Greeting, NodeLayout};
use crate::console;
use crate::error::{Error, ExitCode, Result};
use crate::phase;
use crate::process::detach;
use crate::ranks::control::{Deadline, RankFailure, RankGroup, Stopped};
use crate::ranks::rendezvous;
use crate::ranks::shm::Member;

/// Interval at which a wait checks for other reasons to end.
const LOOK: Duration = Duration::from_millis(20);
/// Pause between attempts to reach the hub.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval of messages while a rank tries to reach the hub.
const SAY: Duration = Duration::from_secs(10);
/// Maximum wait for one network answer while a rank joins.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Maximum wait for the hub's answer which ranks are late.
const ANSWER: Duration = Duration::from_secs(2);
/// The first epoch of failures in a world.
pub(super) const FIRST_EPOCH: u64 = 1;
/// Maximum time that an ending rank waits until all its messages are sent; the last one says goodbye.
const FAREWELL: Duration = Duration::from_secs(10);

/// The connection to the hub, and the messages received on it.
#[derive(Debug)]
pub(super) struct Client {
    rank: usize,
    connection: Mutex<Connection>,
    inbox: Arc<Inbox>,
    /// Number of exchanges started in each division since the last failure.
    turns: Mutex<HashMap<u32, u64>>,
    generation: AtomicU64,
}

impl Client {
    /// Connects to the hub at `host:port`. Retries until `deadline`, because the hub may not have started yet.
    ///
    /// # Errors
    /// [`Error::Environment`] if no hub answers, or one with another token; [`Error::StoppedEarly`] if a stop was requested.
    pub(super) fn join(
        (host, port): (&str, u16),
        token: &Token,
        greeting: &Greeting,
        longest_silence: Duration,
        deadline: Deadline,
    ) -> Result<Self> {
        let bytes = serde_json::to_vec(greeting).expect("numbers and text");
        let mut said = Instant::now();
        let stream = loop {
            phase::beat(); // the wait has a deadline of its own, whose error says what is missing
            // Resolving a name or refusing a connection may take long, so use another thread.
            let (name, key, own) = (host.to_owned(), token.clone(), bytes.clone());
            let reached = rendezvous::heeding_stop(move || Ok(reach(&name, port, &key, &own)))?;
            let why = match reached {
                Ok(stream) => break stream,
                Err(Unproven::Denied) => {
                    let message = format!(
                        "{host}:{port} is not this run's rank 0, or {TOKEN_VARIABLE} differs between its node and this one: set the \
                         same value on every node"
                    );
                    return Err(Error::Environment { message });
                }
                Err(Unproven::Broken(error)) => error,
            };
            if phase::stop_requested() {
                return Err(Error::StoppedEarly);
            }
            if deadline.is_over() {
                let message = format!(
                    "rank {} could not connect to rank 0 at {host}:{port} within {:.0} s: {why}; check that its node \
                     is running, that the name resolves on this node, and that no firewall blocks the port \
                     (MASTER_ADDR, MASTER_PORT)",
                    greeting.rank,
                    deadline.limit.as_secs_f64()
                );
                return Err(Error::Environment { message });
            }
            if greeting.local_rank == 0 && said.elapsed() > SAY {
                said = Instant::now();
                let limit = deadline.limit.as_secs_f64();
                console::say(format_args!(
                    "cannot connect to rank 0 at {host}:{port} yet: {why}; retrying for up to {limit:.0} s"
                ));
            }
            std::thread::sleep(PAUSE);
        };
        let connection = Connection::new(&stream)?;
        let inbox = Arc::new(Inbox::default());
        let (heard, rank) = (inbox.clone(), greeting.rank);
        let place = format!("{host}:{port}");
        let thread = std::thread::Builder::new().name("node-reader".to_owned()).stack_size(256 << 10);
        let reader = detach(thread, move || {
            let end = connection::read(stream, longest_silence, &heard.is_over, |frame| heard.take(frame));
            heard.end(&end, &place);
        });
        let failed = |error| Error::Environment {
            message: format!("cannot start the thread of the connection to rank 0: {error}"),
        };
        reader.map_err(failed)?;
        let (connection, turns) = (Mutex::new(connection), Mutex::default());
        Ok(Self { rank, connection, inbox, turns, generation: AtomicU64::new(0) })
    }

    /// Waits until all ranks have joined.
    pub(super) fn await_welcome(&self, deadline: Deadline) -> Result<NodeLayout> {
        let ended = || {
            phase::beat();
            phase::stop_requested().then_some(Stopped::OnRequest)
        };
        let welcome = self.wait_or_ask(deadline, |state| state.welcome.take(), ended, (0, 0, 0));
        Ok(welcome.map_err(|stopped| stopped.error("join", "world", self.rank, deadline))??)
    }

    /// Lets failures on other nodes end waits in this node's shared memory.
    pub(super) fn attach(&self, member: Arc<Member>) {
        let (early, lost) = {
            let mut state = self.inbox.lock();
            let _ = self.inbox.member.set(member.clone());
            (std::mem::take(&mut state.early_failures), state.lost.clone())
        };
        early.iter().for_each(|(epoch, failure)| member.post_of_other_node(*epoch, failure));
        if let Some(lost) = lost {
            member.lose(lost);
        }
    }

    pub(super) fn send(&self, frame: Frame) {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).send(frame);
    }

    /// Reports this rank's failure in `epoch` to all nodes. Failures of other ranks are reported by those ranks.
    pub(super) fn post_failure(&self, epoch: u64, error: &Error) {
        if !matches!(error, Error::PeerFailed { .. }) {
            let failure = RankFailure { rank: self.rank, code: error.exit_code(), message: error.to_string() };
            self.send(Frame::json(FrameKind::Failure, epoch, &failure));
        }
    }

    #[cfg(test)]
    pub(super) fn break_off(&self) {
        self.connection.lock().unwrap().break_off();
    }

    /// The failure of a rank that is permanently gone, if any.
    pub(super) fn lost(&self) -> Option<RankFailure> {
        self.inbox.lock().lost.clone()
    }

    /// Gathers every rank's bytes, in group order. `ended` returns other reasons to end the wait.
    pub(super) fn gather(
        &self,
        group: &RankGroup,
        bytes: &[u8],
        deadline: Deadline,
        ended: impl FnMut() -> Option<Stopped>,
    ) -> Result<Vec<Vec<u8>>, Stopped> {
        let (generation, division) = (self.generation.load(Ordering::Acquire), group.division as u32);
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            let turn = turns.entry(division).or_default();
            *turn += 1;
            *turn
        };
        let ranks = serde_json::to_vec(&group.ranks).expect("numbers");
        let (first, payload) = (group.ranks[0] as u32, pack([&ranks[..], bytes]));
        let frame = Frame { division, rank: first, word: turn, ..Frame::new(FrameKind::Gather, generation, payload) };
        self.send(frame);
        let find = |state: &mut InboxState| state.gathered.remove(&(generation, division, turn));
        let all = self.wait_or_ask(deadline, find, ended, (division, first, turn))?;
        unpack(&all).filter(|all| all.len() == group.ranks.len()).ok_or_else(|| {
            let message = format!("its reply to a gather in group '{}' does not have one part per rank", group.name);
            Stopped::Failed(RankFailure { rank: 0, code: ExitCode::RankDied, message })
        })
    }

    /// Sends bytes to a rank, which receives them under the same division.
    pub(super) fn relay(&self, division: usize, to: usize, word: u64, payload: Vec<u8>) {
        let generation = self.generation.load(Ordering::Acquire);
        let frame = Frame::new(FrameKind::Relay, generation, payload);
        self.send(Frame { division: division as u32, rank: to as u32, word, ..frame });
    }

    /// Waits for the next message of rank `from`, as word and payload. The wait ends when that rank ends.
    pub(super) fn receive(
        &self,
        division: usize,
        from: usize,
        deadline: Deadline,
        ended: impl FnMut() -> Option<Stopped>,
    ) -> Result<(u64, Vec<u8>), Stopped> {
        let key = (self.generation.load(Ordering::Acquire), division as u32, from as u32);
        let next = |state: &mut InboxState| match state.relayed.get_mut(&key).and_then(VecDeque::pop_front) {
            None => state.left.get(&from).map(|failure| Err(Stopped::Failed(failure.clone()))),
            Some(relayed) => Some(Ok(relayed)),
        };
        self.wait(deadline, next, ended)?
    }

    /// Waits for the outcome of an epoch that all nodes agree on. After a failure all messages under way are dropped.
    pub(super) fn verdict(
        &self,
        epoch: u64,
        deadline: Deadline,
        ended: impl FnMut() -> Option<Stopped>,
    ) -> Result<Option<RankFailure>, Stopped> {
        let verdict = self.wait_or_ask(deadline, |state| state.verdicts.remove(&epoch), ended, (0, 0, 0))?;
        if verdict.is_some() {
            let generation = self.generation.fetch_add(1, Ordering::AcqRel) + 1;
            self.turns.lock().unwrap_or_else(PoisonError::into_inner).clear();
            let mut state = self.inbox.lock();
            state.generation = generation;
            state.gathered.retain(|key, _| key.0 >= generation);
            state.relayed.retain(|key, _| key.0 >= generation);
        }
        Ok(verdict)
    }

    /// Waits until `find` returns something, a rank is lost, `ended` returns another reason, or the deadline passes.
    fn wait<T>(
        &self,
        deadline: Deadline,
        mut find: impl FnMut(&mut InboxState) -> Option<T>,
        mut ended: impl FnMut() -> Option<Stopped>,
    ) -> Result<T, Stopped> {
        let mut state = self.inbox.lock();
        loop {
            if let Some(found) = find(&mut state) {
                return Ok(found);
            }
            if let Some(lost) = &state.lost {
                return Err(Stopped::Failed(lost.clone()));
            }
            if state.has_hub_left {
                let message = "its program has ended".to_owned();
                return Err(Stopped::Failed(RankFailure { rank: 0, code: ExitCode::RankDied, message }));
            }
            if let Some(stopped) = ended() {
                return Err(stopped);
            }
            if deadline.is_over() {
                return Err(Stopped::Late(Vec::new()));
            }
            state = self.inbox.news.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// [`Client::wait`] for an answer of the hub. After the deadline it asks the hub which ranks are late, identified by division, first rank and
    /// number. The answer may still arrive meanwhile.
    fn wait_or_ask<T>(
        &self,
        deadline: Deadline,
        mut find: impl FnMut(&mut InboxState) -> Option<T>,
        ended: impl FnMut() -> Option<Stopped>,
        (division, rank, word): (u32, u32, u64),
    ) -> Result<T, Stopped> {
        match self.wait(deadline, &mut find, ended) {
            Err(Stopped::Late(_)) => {
                let late = self.ask_late(division, rank, word);
                find(&mut self.inbox.lock()).ok_or(Stopped::Late(late))
            }
            ended => ended,
        }
    }

    /// The ranks that the hub still waits for, or rank 0 if the hub does not answer.
    pub(super) fn ask_late(&self, division: u32, rank: u32, word: u64) -> Vec<usize> {
        self.inbox.lock().late = None;
        self.send(Frame { division, rank, word, ..Frame::empty(FrameKind::Query) });
        self.wait(Deadline::after(ANSWER), |state| state.late.take(), || None).unwrap_or_else(|_| vec![0])
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.connection.get_mut().unwrap_or_else(PoisonError::into_inner).leave(FAREWELL);
        self.inbox.is_over.store(true, Ordering::Relaxed);
    }
}

/// Opens a connection and authenticates both sides.
fn reach(host: &str, port: u16, token: &Token, greeting: &[u8]) -> Result<TcpStream, Unproven> {
    let mut last = std::io::Error::other("the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, ATTEMPT) {
            Ok(mut stream) => {
                stream.set_read_timeout(Some(ATTEMPT))?;
                stream.set_write_timeout(Some(ATTEMPT))?;
                token.greet(&mut stream, greeting)?;
                stream.set_write_timeout(None)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(Unproven::Broken(last))
}
