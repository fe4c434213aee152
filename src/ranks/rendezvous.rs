//! How the ranks of a world on one host get shared memory (`nodes::join` handles several hosts). Under this crate's launcher they inherit its file
//! descriptor, and no other process can access it. Otherwise rank 0 creates the memory, and tells the others its descriptor through the rendezvous
//! store.
//!
//! A TCPStore has no passwords: any process that reaches its port can read and write its keys. So a rank reads only two numbers from it, and checks
//! that the memory they name belongs to this user and this run. An attacker can prevent a run from starting, but cannot make a rank read or write
//! other memory.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use super::env::WorkerEnv;
use super::options::WorldOptions;
use super::shm::{Member, Segment};
use crate::error::{Error, Result};
use crate::phase::{self, awake_now};
use crate::process::detach;
use crate::torch::Store;

/// Environment variable with the descriptor of the store's listening socket. The launcher binds it and rank 0 inherits it, so the port cannot be
/// taken in between.
pub const STORE_FD_VARIABLE: &str = "COLO_GRPO_STORE_FD";
/// Environment variable with the descriptor of the memory that the launcher's workers share.
pub const SEGMENT_FD_VARIABLE: &str = "COLO_GRPO_SEGMENT_FD";

/// Interval at which a rank that waits for the store checks for stop requests and deadlines.
const LOOK: Duration = Duration::from_millis(50);
/// The run number of inherited memory, which cannot belong to another run.
pub(super) const INHERITED: u64 = 0;

/// The shared memory that a launcher creates for its workers.
#[derive(Debug)]
pub struct SharedSegment(File);

impl SharedSegment {
    /// Creates memory for `num_ranks` workers that join with the default [`WorldOptions::slot_bytes`].
    ///
    /// # Errors
    /// [`Error::Environment`] if the machine has too little memory.
    pub fn new(num_ranks: usize) -> Result<Self> {
        Segment::create(num_ranks, WorldOptions::default().slot_bytes, INHERITED).map(|(_, file)| Self(file))
    }

    /// The descriptor to pass in [`SEGMENT_FD_VARIABLE`].
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Joins all ranks of `env`'s world, which are on this host, and maps their shared memory.
pub(super) fn meet(env: &WorkerEnv, options: &WorldOptions) -> Result<Member> {
    let (segment, _offered) = match inherited(SEGMENT_FD_VARIABLE)? {
        Some(fd) => {
            let file = File::from(fd);
            (Segment::open(&file, env.world_size, options.slot_bytes, INHERITED)?, None)
        }
        None => through_store(env, options)?,
    };
    let member = Member::new(Arc::new(segment), env.rank, 0, options.timeout);
    member.join()?;
    Ok(member) // rank 0's file and store can be closed now
}

/// The address of rank 0's memory: its process id and its file descriptor there.
pub(super) type SegmentAddress = (u32, RawFd);

/// Rank 0's file, and the store that it may serve. Both are kept until every rank has mapped the memory.
struct OfferedSegment {
    _file: File,
    _store: Arc<Store>,
}

/// Rank 0 creates the memory, and the others open it.
fn through_store(env: &WorkerEnv, options: &WorldOptions) -> Result<(Segment, Option<OfferedSegment>)> {
    let (own, opened) = (env.clone(), options.clone());
    let store = Arc::new(heeding_stop(move || open_store(&own, &opened))?);
    let (num_ranks, slot_bytes, run) = (env.world_size, options.slot_bytes, u64::from(env.master_port));
    if env.rank == 0 {
        let made = Segment::create(num_ranks, slot_bytes, run);
        let place = made.as_ref().map(|(_, file)| (std::process::id(), file.as_raw_fd()));
        let sent: Result<SegmentAddress, String> = place.map_err(ToString::to_string);
        let json = serde_json::to_vec(&sent).expect("numbers and text");
        let (sent, key) = (store.clone(), key(env));
        heeding_stop(move || sent.set(&key, &json))?;
        let (segment, file) = made?;
        return Ok((segment, Some(OfferedSegment { _file: file, _store: store })));
    }
    let refuse = |message: String| Error::Environment { message: format!("rendezvous: {message}") };
    let key = key(env);
    let json = heeding_stop(move || store.get(&key))?;
    let sent: Result<SegmentAddress, String> =
        serde_json::from_slice(&json).map_err(|error| refuse(error.to_string()))?;
    let file = open_segment(sent.map_err(refuse)?)?;
    Ok((Segment::open(&file, num_ranks, slot_bytes, run)?, None))
}

/// Opens the shared memory of another process on this host.
pub(super) fn open_segment((process, fd): SegmentAddress) -> Result<File> {
    let path = format!("/proc/{process}/fd/{fd}");
    let opened = OpenOptions::new().read(true).write(true).open(&path);
    let why = "all ranks must run as the same user and see each other's processes";
    opened.map_err(|error| Error::Environment {
        message: format!("rendezvous: cannot open the shared memory of rank 0, {path}: {error}; {why}"),
    })
}

/// Runs possibly long blocking work in a separate thread. A stop request ends the wait, not the thread.
pub(super) fn heeding_stop<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name("rendezvous".to_owned());
    let started = detach(thread, move || drop(sender.send(work())));
    started.map_err(|error| Error::Environment {
        message: format!("cannot start the thread of the rendezvous: {error}"),
    })?;
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Timeout) if phase::stop_requested() => return Err(Error::StoppedEarly),
            Err(RecvTimeoutError::Timeout) => {
                awake_now(); // a deadline counts this wait, too
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::Panic { place: "the rendezvous", message: "see above".to_owned() });
            }
        }
    }
}

/// The store's key for the memory. It includes the attempt, because a restart under torchrun uses the same store.
fn key(env: &WorkerEnv) -> String {
    format!("colo-grpo/{}/segment", env.attempt)
}

pub(super) fn open_store(env: &WorkerEnv, options: &WorldOptions) -> Result<Store> {
    if env.rank != 0 || agent_serves() {
        return Store::connect(&env.master_addr, env.master_port, options.timeout);
    }
    Store::host(&env.master_addr, env.master_port, inherited(STORE_FD_VARIABLE)?, options.timeout)
}

/// Whether torchrun serves the store.
pub(super) fn agent_serves() -> bool {
    std::env::var("TORCHELASTIC_USE_AGENT_STORE").is_ok_and(|value| value == "True")
}

/// The file descriptor that an environment variable names.
#[allow(unsafe_code)]
pub(super) fn inherited(variable: &str) -> Result<Option<OwnedFd>> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    let refuse = || Error::Environment { message: format!("{variable}={text}: not an open file descriptor") };
    let fd: RawFd = text.parse().map_err(|_| refuse())?;
    // SAFETY: asking for a descriptor's flags changes nothing.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(refuse());
    }
    // SAFETY: the launcher opened it for this process and nothing else here knows of it.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}
