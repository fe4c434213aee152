//! Signals, as bytes in a pipe for the launcher and as a stop flag for a worker; ends of processes, as descriptors.
#![allow(unsafe_code)]

use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::phase;

/// Signals that a launcher passes on.
pub(super) const FORWARDED: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1];

/// Signals within this time of the first are the same request, sent to a whole group and passed on by the launcher.
const SAME_REQUEST: Duration = Duration::from_secs(1);
/// When the first came, in nanoseconds of the monotonic clock.
static FIRST: AtomicU64 = AtomicU64::new(0);

/// Makes TERM, INT and USR1 ask this worker for a save and an orderly end ([`phase::request_stop`]); a second request, a
/// second or more later, ends it at once.
pub fn stop_on_signals() {
    for signal in FORWARDED {
        set_handler(signal, handler_address(request_stop));
    }
}

extern "C" fn request_stop(signal: i32) {
    let now = monotonic_ns();
    if !phase::stop_requested() {
        FIRST.store(now, Ordering::Relaxed);
    } else if now.saturating_sub(FIRST.load(Ordering::Relaxed)) > SAME_REQUEST.as_nanos() as u64 {
        // SAFETY: both calls are async-signal-safe; the signal arrives again, now with its default action.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
    phase::request_stop();
}

fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: async-signal-safe; the time outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A descriptor that can be read from once `pid`, a child not yet reaped, has ended.
///
/// # Errors
/// [`Error::Environment`] where the kernel has no such descriptors (before Linux 5.3).
pub(super) fn process_end(pid: u32) -> Result<OwnedFd> {
    // SAFETY: plain system call.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) } as RawFd;
    if fd < 0 {
        let message = format!("pidfd_open: {}; the launcher needs Linux 5.3", std::io::Error::last_os_error());
        return Err(Error::Environment { message });
    }
    // SAFETY: the descriptor was made just now and is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Receives this process's forwarded signals until dropped.
#[derive(Debug)]
pub(super) struct Inbox {
    pipe: UnixStream,
    before: Vec<(i32, libc::sigaction)>,
}

/// The writing end that the handler finds; -1 is none.
static PIPE: AtomicI32 = AtomicI32::new(-1);
/// One inbox at a time.
static OPEN: Mutex<()> = Mutex::new(());

extern "C" fn write_to_pipe(signal: i32) {
    let byte = signal as u8;
    // SAFETY: write is async-signal-safe and the pipe does not block; errno is put back for whoever was interrupted.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(PIPE.load(Ordering::Relaxed), (&raw const byte).cast(), 1);
        *errno = before;
    }
}

impl Inbox {
    pub(super) fn open() -> Result<Self> {
        let _one = OPEN.lock();
        let failed = |error: std::io::Error| Error::Environment { message: format!("signal pipe: {error}") };
        let (pipe, writer) = UnixStream::pair().map_err(failed)?;
        writer.set_nonblocking(true).map_err(failed)?;
        pipe.set_nonblocking(true).map_err(failed)?;
        if PIPE.compare_exchange(-1, writer.as_raw_fd(), Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(Error::Environment { message: "another launch is under way in this process".to_owned() });
        }
        let _ = writer.into_raw_fd(); // the handler's, closed on drop
        let before = FORWARDED.map(|signal| (signal, set_handler(signal, handler_address(write_to_pipe)))).into();
        Ok(Self { pipe, before })
    }

    /// Waits for signals, at most `timeout`, and returns them; `ends` of processes cut the wait short.
    pub(super) fn wait<'a>(&mut self, ends: impl Iterator<Item = &'a OwnedFd>, timeout: Duration) -> Vec<i32> {
        let descriptors = std::iter::once(self.pipe.as_raw_fd()).chain(ends.map(AsRawFd::as_raw_fd));
        let mut polls: Vec<_> = descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        // SAFETY: valid entries that outlive the call.
        unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout.as_millis() as i32) };
        let mut bytes = [0u8; 64];
        let len = self.pipe.read(&mut bytes).unwrap_or(0);
        bytes[..len].iter().map(|&byte| i32::from(byte)).filter(|signal| FORWARDED.contains(signal)).collect()
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        for (signal, action) in &self.before {
            // SAFETY: the action is the one that was in force before.
            unsafe { libc::sigaction(*signal, action, std::ptr::null_mut()) };
        }
        let writer = PIPE.swap(-1, Ordering::AcqRel);
        // SAFETY: the descriptor was given up to the handler, which finds it no more.
        unsafe { libc::close(writer) };
    }
}

fn handler_address(handler: extern "C" fn(i32)) -> libc::sighandler_t {
    handler as *const () as libc::sighandler_t
}

/// Installs a handler that restarts interrupted calls, and returns what was there.
fn set_handler(signal: i32, handler: libc::sighandler_t) -> libc::sigaction {
    // SAFETY: a zeroed sigaction is valid, the handlers are async-signal-safe, and the signals can be handled.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART;
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const action, &raw mut before);
        before
    }
}
