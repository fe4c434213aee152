//! One rank's place in a shared memory segment: arriving, waiting for peers, and the world's first failure.
//!
//! Failures are counted in epochs, one per `agree`. `failure_state` holds `epoch << 2 | state`; a state of an older epoch is over. The first rank to
//! post in an epoch wins. `agree` closes an epoch without failure, so a post that comes too late belongs to the next one, and every rank reads the
//! same outcome.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::segment::{CONTROL, MESSAGE_BYTES, PARTITIONS, RankLine, Segment, SegmentHeader};
use crate::error::{Error, ExitCode, Result};
use crate::phase;
use crate::ranks::control::{Deadline, RankFailure, Stopped};

const WRITING: u64 = 1;
const POSTED: u64 = 2;
const CLOSED: u64 = 3;

/// Maximum sleep before a waiting rank checks for failures and the time again.
const NAP: Duration = Duration::from_millis(2);

/// How long a rank that could agree on a failure waits for those that have not noticed it, since one may be blocked on its GPU.
const PATIENCE: Duration = Duration::from_secs(30);

/// Maximum time that a living rank needs to post a failure, which only copies some bytes.
const LONGEST_POST: Duration = Duration::from_secs(10);

/// One rank of the world.
#[derive(Debug)]
pub(in crate::ranks) struct Member {
    segment: Arc<Segment>,
    /// This rank in the world.
    pub(super) rank: usize,
    /// World rank of the segment's first rank.
    first_rank: usize,
    timeout: Duration,
    epoch: AtomicU64,
    /// Locks that serialise the operations of several threads in one partition.
    turns: [Mutex<()>; PARTITIONS],
    /// Number of times a peer's counter is polled before the processor is yielded: 0 if ranks share processors.
    spins: usize,
    /// The failure of a rank that is permanently gone; nothing can be agreed on any more.
    lost: OnceLock<RankFailure>,
}

/// What ends a wait, besides arrivals and the time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// The world's first failure.
    Failure,
    /// The world's first failure, some time after it was posted.
    LongAfterFailure,
    /// A failure, or a request to stop.
    StopRequest,
}

impl Member {
    /// World rank `rank` in a segment whose first rank is `first_rank`.
    pub(in crate::ranks) fn new(segment: Arc<Segment>, rank: usize, first_rank: usize, timeout: Duration) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if segment.num_ranks() <= processors { 400 } else { 0 };
        let (epoch, turns, lost) = (AtomicU64::new(1), Default::default(), OnceLock::new());
        Self { segment, rank, first_rank, timeout, epoch, turns, spins, lost }
    }

    /// Posts this rank's failure to the segment's ranks, unless one was posted before, and returns the failure's epoch. An [`Error::PeerFailed`] is
    /// not posted, because all ranks know it already.
    pub(in crate::ranks) fn post(&self, error: &Error) -> Option<u64> {
        if matches!(error, Error::PeerFailed { .. }) {
            return None;
        }
        let header = self.segment.header();
        let state = &header.failure_state;
        loop {
            let now = state.load(Ordering::Acquire);
            let own = self.epoch.load(Ordering::Acquire);
            let epoch = match (now >> 2).cmp(&own) {
                std::cmp::Ordering::Less => own,
                std::cmp::Ordering::Equal if now & 3 == CLOSED => own + 1,
                _ => return None,
            };
            if self.write_in(now, epoch, || (self.rank, error.exit_code(), error.to_string())) {
                return Some(epoch);
            }
        }
    }

    /// Posts the failure in `epoch` of a rank on another node to the segment's ranks, unless this node has already ended that epoch.
    pub(in crate::ranks) fn post_of_other_node(&self, epoch: u64, failure: &RankFailure) {
        let state = &self.segment.header().failure_state;
        loop {
            let now = state.load(Ordering::Acquire);
            let told = || (failure.rank, failure.code, failure.message.clone());
            if now >> 2 >= epoch || self.write_in(now, epoch, told) {
                return;
            }
        }
    }

    /// Writes the failure of `epoch`, if the state is still `now`.
    fn write_in(&self, now: u64, epoch: u64, failure: impl FnOnce() -> (usize, ExitCode, String)) -> bool {
        let header = self.segment.header();
        let state = &header.failure_state;
        let writes = state.compare_exchange(now, epoch << 2 | WRITING, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if writes {
            let (rank, code, message) = failure();
            write_failure(header, rank, code, &message);
            state.store(epoch << 2 | POSTED, Ordering::Release);
        }
        writes
    }

    /// Ends all waits of this rank, because a rank of the world is permanently gone.
    pub(in crate::ranks) fn lose(&self, failure: RankFailure) {
        let _ = self.lost.set(failure);
    }

    /// The posted failure of the current epoch, if any; that of a permanently gone rank stays.
    pub(in crate::ranks) fn failure(&self) -> Option<RankFailure> {
        if let Some(lost) = self.lost.get() {
            return Some(lost.clone());
        }
        let header = self.segment.header();
        let posted = self.epoch.load(Ordering::Acquire) << 2 | POSTED;
        (header.failure_state.load(Ordering::Acquire) == posted).then(|| read_failure(header))
    }

    /// Ends an epoch on all ranks together, and returns the posted failure, if any. After a failure every partition is reset.
    pub(in crate::ranks) fn agree(&self) -> Result<Option<RankFailure>> {
        self.agree_by(|_, own| Ok(own))
    }

    /// [`Member::agree`] if the segment does not hold all ranks of the world: `verdict` maps the epoch and the outcome on this node to the outcome in
    /// the world, which is equal on all nodes.
    pub(in crate::ranks) fn agree_by(
        &self,
        verdict: impl FnOnce(u64, Option<RankFailure>) -> Result<Option<RankFailure>>,
    ) -> Result<Option<RankFailure>> {
        self.meet_world("agree", Until::LongAfterFailure)?;
        let own = self.close_epoch()?;
        let verdict = verdict(self.epoch.load(Ordering::Acquire), own)?;
        if verdict.is_some() {
            for partition in 0..PARTITIONS {
                self.line(partition, self.rank).arrived.store(0, Ordering::Release);
            }
            // Ranks that have received the outcome may have exited by now: it is final nevertheless.
            let met = self.meet_world("agree", Until::LongAfterFailure);
            if self.lost.get().is_none() {
                met?;
            }
        }
        self.epoch.fetch_add(1, Ordering::AcqRel);
        Ok(verdict)
    }

    /// Whether `rank` is in an [`Member::agree`] that this rank has not reached.
    pub(in crate::ranks) fn is_waiting(&self, rank: usize) -> bool {
        reached(self.line(CONTROL, rank), self.next_turn(CONTROL))
    }

    /// Waits until every rank of the segment has mapped it, or this process is asked to stop.
    pub(in crate::ranks) fn join(&self) -> Result<()> {
        self.meet_world("join", Until::StopRequest)
    }

    /// Waits for every rank of the segment, even after failures.
    fn meet_world(&self, op: &'static str, until: Until) -> Result<()> {
        let ranks: Vec<usize> = (self.first_rank..self.first_rank + self.segment.num_ranks()).collect();
        let _seen = phase::collective(op, "world", 0);
        let (turn, deadline) = (self.arrive(CONTROL), self.deadline());
        let met = self.wait(CONTROL, &ranks, turn, deadline, until);
        met.map_err(|stopped| stopped.error(op, "world", self.rank, deadline))
    }

    /// The deadline of a wait that begins now.
    pub(in crate::ranks) fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }

    /// How long a rank that could agree on a failure waits for others.
    pub(in crate::ranks) fn patience(&self) -> Duration {
        PATIENCE.min(self.timeout)
    }

    /// The [`RankLine`] of a world rank in a partition.
    pub(super) fn line(&self, partition: usize, rank: usize) -> &RankLine {
        self.segment.line(partition, rank - self.first_rank)
    }

    /// One half of the slot of a world rank, see [`Segment::half`].
    pub(super) fn half(&self, partition: usize, rank: usize, half: usize) -> *mut u8 {
        self.segment.half(partition, rank - self.first_rank, half)
    }

    /// Bytes of one half of a slot.
    pub(super) fn half_bytes(&self) -> usize {
        self.segment.half_bytes()
    }

    /// Locks a partition for this thread.
    pub(super) fn turn(&self, partition: usize) -> MutexGuard<'_, ()> {
        self.turns[partition].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes this rank's next arrival in a partition and returns its number.
    pub(super) fn arrive(&self, partition: usize) -> u32 {
        let line = self.line(partition, self.rank);
        let turn = self.next_turn(partition);
        line.arrived.store(turn, Ordering::SeqCst);
        if line.sleepers.load(Ordering::SeqCst) > 0 {
            futex_wake(&line.arrived);
        }
        turn
    }

    /// The number of this rank's next arrival in a partition.
    pub(super) fn next_turn(&self, partition: usize) -> u32 {
        self.line(partition, self.rank).arrived.load(Ordering::Relaxed).wrapping_add(1)
    }

    /// Waits until all of `ranks` have arrived at `turn`, or until the event `until`.
    pub(super) fn wait(
        &self,
        partition: usize,
        ranks: &[usize],
        turn: u32,
        deadline: Deadline,
        until: Until,
    ) -> Result<(), Stopped> {
        for &rank in ranks {
            let line = self.line(partition, rank);
            let spun = (0..self.spins).any(|_| {
                std::hint::spin_loop();
                reached(line, turn)
            });
            if !spun && !self.wait_slowly(line, turn, deadline, until)? {
                let here = |&&rank: &&usize| !reached(self.line(partition, rank), turn);
                return Err(Stopped::Late(ranks.iter().filter(here).copied().collect()));
            }
        }
        Ok(())
    }

    /// Waits while yielding the processor: first to other ready threads, then by sleeping on the peer's counter. Returns false if the deadline
    /// passed.
    fn wait_slowly(&self, line: &RankLine, turn: u32, deadline: Deadline, until: Until) -> Result<bool, Stopped> {
        let mut failed_at = None;
        for look in 0.. {
            let arrived = line.arrived.load(Ordering::SeqCst);
            if has_reached(arrived, turn) {
                return Ok(true);
            }
            if let Some(failure) = self.failure() {
                let at_once = until == Until::Failure || self.lost.get().is_some();
                let patience = if at_once { Duration::ZERO } else { self.patience() };
                if failed_at.get_or_insert_with(Instant::now).elapsed() >= patience {
                    return Err(Stopped::Failed(failure));
                }
            }
            if until == Until::StopRequest && phase::stop_requested() {
                return Err(Stopped::OnRequest);
            }
            if look < 20 {
                std::thread::yield_now();
            } else if deadline.is_over() {
                return Ok(false);
            } else {
                line.sleepers.fetch_add(1, Ordering::SeqCst);
                futex_wait(&line.arrived, arrived, NAP);
                line.sleepers.fetch_sub(1, Ordering::SeqCst);
            }
        }
        unreachable!("the loop has no end")
    }

    /// Ends the current epoch and returns its outcome.
    ///
    /// # Errors
    /// [`Error::Collective`] if the failing rank died before it had posted its failure completely.
    fn close_epoch(&self) -> Result<Option<RankFailure>> {
        let header = self.segment.header();
        let state = &header.failure_state;
        let epoch = self.epoch.load(Ordering::Acquire);
        let deadline = Deadline::after(self.timeout.min(LONGEST_POST));
        loop {
            let now = state.load(Ordering::Acquire);
            match (now >> 2).cmp(&epoch) {
                std::cmp::Ordering::Greater => return Ok(None),
                std::cmp::Ordering::Equal if now & 3 == WRITING && deadline.is_over() => {
                    let message = "a failed rank ended before it reported its error".to_owned();
                    return Err(Error::Collective { op: "agree", group: "world".to_owned(), rank: self.rank, message });
                }
                std::cmp::Ordering::Equal if now & 3 == WRITING => std::thread::yield_now(),
                std::cmp::Ordering::Equal => return Ok((now & 3 == POSTED).then(|| read_failure(header))),
                std::cmp::Ordering::Less => {
                    let _ = state.compare_exchange(now, epoch << 2 | CLOSED, Ordering::AcqRel, Ordering::Acquire);
                }
            }
        }
    }
}

fn reached(line: &RankLine, turn: u32) -> bool {
    has_reached(line.arrived.load(Ordering::Acquire), turn)
}

/// Compares counters that may wrap around.
fn has_reached(arrived: u32, turn: u32) -> bool {
    arrived.wrapping_sub(turn) as i32 >= 0
}

fn write_failure(header: &SegmentHeader, rank: usize, code: ExitCode, message: &str) {
    let bytes = &message.as_bytes()[..message.len().min(MESSAGE_BYTES)];
    for (slot, byte) in header.message.iter().zip(bytes) {
        slot.store(*byte, Ordering::Relaxed);
    }
    header.message_len.store(bytes.len() as u32, Ordering::Relaxed);
    header.failure_rank.store(rank as u32, Ordering::Relaxed);
    header.failure_code.store(code as u32, Ordering::Relaxed);
}

fn read_failure(header: &SegmentHeader) -> RankFailure {
    let len = (header.message_len.load(Ordering::Relaxed) as usize).min(MESSAGE_BYTES);
    let message: Vec<u8> = header.message[..len].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
    RankFailure {
        rank: header.failure_rank.load(Ordering::Relaxed) as usize,
        code: ExitCode::from_number(header.failure_code.load(Ordering::Relaxed) as i32).unwrap_or(ExitCode::RankDied),
        message: String::from_utf8_lossy(&message).into_owned(),
    }
}

fn futex_wait(word: &AtomicU32, expected: u32, nap: Duration) {
    let nap = libc::timespec { tv_sec: 0, tv_nsec: libc::c_long::from(nap.subsec_nanos()) };
    // SAFETY: the word and the time outlive the call; waking early or not sleeping at all is harmless.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &nap) };
}

fn futex_wake(word: &AtomicU32) {
    // SAFETY: the word outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agreement_on_a_failure_does_not_wait_for_missing_peers() {
        let segment = Arc::new(Segment::in_process(2, 4096).unwrap());
        let member = Member::new(segment, 0, 0, Duration::from_millis(50));
        member.post(&Error::OutOfMemory { owner: "a test".to_owned(), requested_bytes: 1 });
        assert_eq!(member.agree().unwrap_err().exit_code(), ExitCode::OutOfMemory);
    }

    #[test]
    fn an_agreed_failure_stays_after_ranks_that_know_it_exit() {
        let segment = Arc::new(Segment::in_process(2, 4096).unwrap());
        let members = [0, 1].map(|rank| Member::new(segment.clone(), rank, 0, Duration::from_secs(20)));
        let failure = |rank| RankFailure { rank, code: ExitCode::Files, message: "a test".to_owned() };
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let outcome = members[1].agree_by(|_, _| {
                    members[1].lose(failure(3));
                    Ok(Some(failure(2)))
                });
                done.send(outcome.map(|verdict| verdict.map(|failure| failure.rank))).unwrap();
            });
            let late = members[0].agree_by(|_, _| {
                assert_eq!(is_done.recv().unwrap().unwrap(), Some(2), "of a rank that waits for this one");
                Ok(Some(failure(2)))
            });
            assert_eq!(late.unwrap().map(|failure| failure.rank), Some(2));
        });
    }

    #[test]
    fn a_rank_that_died_while_reporting_does_not_block_agreement() {
        let segment = Arc::new(Segment::in_process(1, 4096).unwrap());
        let member = Member::new(segment.clone(), 0, 0, Duration::from_millis(50));
        segment.header().failure_state.store(1 << 2 | WRITING, Ordering::Release);
        let error = member.agree().unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::RankDied);
        assert!(error.to_string().contains("ended before it reported its error"), "{error}");
    }
}
