//! Signals: as bytes in a pipe for the launcher, and as a stop flag for a worker. Also descriptors that signal the end of processes.
//!
//! Launcher and worker count signals equally ([`count`]): those within a second of the first are one request to save and end; a later one ends
//! everything at once.
//!
//! The program blocks these signals from its first instruction on ([`hold_signals`]), before libtorch initialises. They stay pending while the
//! program executes itself again, and are delivered once their effect is known ([`receive_signals`]).
#![allow(unsafe_code)]

use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use super::way_on::OnStop;
use crate::console;
use crate::error::{Error, ExitCode, Result};
use crate::phase;
use crate::process::detach;

/// Signals that request a run to save and end; a launcher forwards them.
const REQUESTS: [i32; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1, libc::SIGHUP];

/// Signals within this time of the first are the same request, because `timeout` and terminals send one to a whole group.
const SAME_REQUEST: Duration = Duration::from_secs(1);
/// Time of the first signal, in nanoseconds of the monotonic clock; 0 before any.
static FIRST: AtomicU64 = AtomicU64::new(0);
/// The byte in the launcher's pipe for a request after the first.
const AGAIN: u8 = u8::MAX;

/// A request to end, by a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopRequest {
    /// The first request, with the signal's number.
    First(i32),
    /// A later request, which ends everything at once.
    Again,
}

/// Counts a signal; `None` if it is part of the first request. Async-signal-safe.
fn count(signal: i32, first: &AtomicU64, now_ns: u64) -> Option<StopRequest> {
    match first.compare_exchange(0, now_ns, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => Some(StopRequest::First(signal)),
        Err(first_ns) if now_ns.saturating_sub(first_ns) <= SAME_REQUEST.as_nanos() as u64 => None,
        Err(_) => Some(StopRequest::Again),
    }
}

/// Blocks TERM, INT, USR1 and HUP. Signals that arrive stay pending, even across an exec. Async-signal-safe.
pub extern "C" fn hold_signals() {
    mask_requests(libc::SIG_BLOCK);
}

/// Unblocks the signals that [`hold_signals`] blocks. Until a run installs its own handlers, such a signal ends this process at once, because nothing
/// has begun yet: with 75 if a run would be saved, with 0 if requests would be answered, else by its default action.
pub fn receive_signals(on_stop: OnStop) {
    extern "C" fn leave_preempted(_: i32) {
        // SAFETY: async-signal-safe; ends the process.
        unsafe { libc::_exit(ExitCode::Preempted as i32) }
    }
    extern "C" fn leave(_: i32) {
        // SAFETY: as above.
        unsafe { libc::_exit(ExitCode::Done as i32) }
    }
    let handler: Option<extern "C" fn(i32)> = match on_stop {
        OnStop::Save => Some(leave_preempted),
        OnStop::Answer => Some(leave),
        OnStop::End => None,
    };
    if let Some(handler) = handler {
        for signal in REQUESTS {
            set_handler(signal, handler_address(handler));
        }
    }
    mask_requests(libc::SIG_UNBLOCK);
}

fn mask_requests(how: i32) {
    // SAFETY: async-signal-safe calls on a set that outlives them.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in REQUESTS {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut());
    }
}

/// Makes TERM, INT, USR1 and HUP request an orderly end of this worker ([`phase::request_stop`]). A signal more than a second after the first ends it
/// at once: with 130 or, under this crate's launcher, by the signal. A HUP that was ignored from the start (`nohup`) stays ignored. With `tells`, the
/// first request prints a message at once.
pub fn stop_on_signals(on_stop: OnStop, tells: bool) {
    IS_ALONE.store(!phase::is_watched(), Ordering::Relaxed);
    if tells {
        tell_requests(on_stop);
    }
    for signal in REQUESTS {
        set_handler(signal, handler_address(request_stop));
    }
}

/// Starts a thread that prints what a stop request does, because a signal handler may not write to the terminal. If no thread can be started, the run
/// still stops.
fn tell_requests(on_stop: OnStop) {
    let Ok((mut told, writer)) = UnixStream::pair() else { return };
    let tell = move || {
        if told.read_exact(&mut [0]).is_ok() {
            let (what, lost) = on_stop.describe();
            console::say(format_args!(
                "stop requested: {what}; another signal after a second ends the program at once{lost}"
            ));
        }
    };
    if detach(std::thread::Builder::new().name("signals".to_owned()), tell).is_ok() {
        REQUESTED.store(writer.into_raw_fd(), Ordering::Release); // owned by the signal handler from now on
    }
}

extern "C" fn request_stop(signal: i32) {
    match count(signal, &FIRST, monotonic_ns()) {
        Some(StopRequest::First(_)) => put(&REQUESTED, 1),
        Some(StopRequest::Again) if IS_ALONE.load(Ordering::Relaxed) => {
            // SAFETY: async-signal-safe; nothing that could block is done before.
            unsafe { libc::_exit(ExitCode::Interrupted as i32) }
        }
        Some(StopRequest::Again) => end_by(signal),
        None => {}
    }
    phase::request_stop();
}

/// Ends this process by the signal's default action. Async-signal-safe.
fn end_by(signal: i32) {
    // SAFETY: both calls are async-signal-safe; the signal arrives again, now with its default action.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// Makes a write that reaches the file size limit of `ulimit -f` return an error, like a full disk, instead of ending this process. Programs that it
/// starts are not affected.
pub fn outlive_file_limits() {
    extern "C" fn nothing(_: i32) {}
    set_handler(libc::SIGXFSZ, handler_address(nothing));
}

fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: async-signal-safe; the time outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A descriptor that becomes readable once `pid`, a child that has not been reaped, has ended.
///
/// # Errors
/// [`Error::Environment`] if the kernel does not support this (before Linux 5.3).
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

/// Receives this process's signals until dropped. If there was a request, the process is about to end then: further signals of the same request still
/// have no effect, and a later signal has its default action.
#[derive(Debug)]
pub(super) struct SignalInbox {
    pipe: UnixStream,
    before: Vec<(i32, libc::sigaction)>,
}

/// The writing end of the pipe for the handler; -1 if there is none.
static PIPE: AtomicI32 = AtomicI32::new(-1);
/// The writing end for a worker's handler.
static REQUESTED: AtomicI32 = AtomicI32::new(-1);
/// Whether a worker runs without this crate's launcher.
static IS_ALONE: AtomicBool = AtomicBool::new(false);
/// Ensures that only one inbox is open at a time.
static OPEN: Mutex<()> = Mutex::new(());

extern "C" fn write_to_pipe(signal: i32) {
    let byte = match count(signal, &FIRST, monotonic_ns()) {
        Some(StopRequest::First(signal)) => signal as u8,
        Some(StopRequest::Again) if PIPE.load(Ordering::Relaxed) < 0 => return end_by(signal),
        Some(StopRequest::Again) => AGAIN,
        None => return,
    };
    put(&PIPE, byte);
}

/// Writes a byte to a descriptor if it is open. Async-signal-safe.
fn put(descriptor: &AtomicI32, byte: u8) {
    // SAFETY: write is async-signal-safe and takes one byte without blocking; errno is put back for whoever was interrupted.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(descriptor.load(Ordering::Relaxed), (&raw const byte).cast(), 1);
        *errno = before;
    }
}

impl SignalInbox {
    pub(super) fn open() -> Result<Self> {
        let _one = OPEN.lock();
        let failed = |error: std::io::Error| Error::Environment { message: format!("signal pipe: {error}") };
        let (pipe, writer) = UnixStream::pair().map_err(failed)?;
        writer.set_nonblocking(true).map_err(failed)?;
        pipe.set_nonblocking(true).map_err(failed)?;
        if PIPE.compare_exchange(-1, writer.as_raw_fd(), Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(Error::Environment { message: "this process is already running another launch".to_owned() });
        }
        let _ = writer.into_raw_fd(); // owned by the handler, closed on drop
        let before = REQUESTS.map(|signal| (signal, set_handler(signal, handler_address(write_to_pipe)))).into();
        Ok(Self { pipe, before })
    }

    /// Waits for requests, at most `timeout`, and returns them; it returns earlier if a process in `ends` has ended.
    pub(super) fn wait<'a>(&mut self, ends: impl Iterator<Item = &'a OwnedFd>, timeout: Duration) -> Vec<StopRequest> {
        let descriptors = std::iter::once(self.pipe.as_raw_fd()).chain(ends.map(AsRawFd::as_raw_fd));
        let mut polls: Vec<_> = descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        // SAFETY: valid entries that outlive the call.
        unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout.as_millis() as i32) };
        let mut bytes = [0u8; 64];
        let len = self.pipe.read(&mut bytes).unwrap_or(0);
        let request = |&byte: &u8| if byte == AGAIN { StopRequest::Again } else { StopRequest::First(i32::from(byte)) };
        bytes[..len].iter().map(request).collect()
    }
}

impl Drop for SignalInbox {
    fn drop(&mut self) {
        let is_requested = FIRST.load(Ordering::Relaxed) != 0;
        for (signal, action) in self.before.iter().filter(|_| !is_requested) {
            // SAFETY: the action is the one that was in force before.
            unsafe { libc::sigaction(*signal, action, std::ptr::null_mut()) };
        }
        let writer = PIPE.swap(-1, Ordering::AcqRel);
        // SAFETY: the descriptor was given to the handler, which can no longer find it.
        unsafe { libc::close(writer) };
    }
}

fn handler_address(handler: extern "C" fn(i32)) -> libc::sighandler_t {
    handler as *const () as libc::sighandler_t
}

/// Installs a handler that restarts interrupted calls, and returns the previous one. An ignored HUP stays ignored.
fn set_handler(signal: i32, handler: libc::sighandler_t) -> libc::sigaction {
    // SAFETY: a zeroed sigaction is valid, the handlers are async-signal-safe, and the signals can be handled.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART;
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut before);
        if signal != libc::SIGHUP || before.sa_sigaction != libc::SIG_IGN {
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `timeout` and schedulers send several signals, and one may arrive when the launch is over.
    #[test]
    fn a_repeated_signal_within_a_second_does_not_end_the_program() {
        let mut inbox = SignalInbox::open().unwrap();
        // SAFETY: the handler is this module's.
        unsafe { libc::raise(libc::SIGTERM) };
        assert_eq!(inbox.wait(std::iter::empty(), Duration::ZERO), [StopRequest::First(libc::SIGTERM)]);
        FIRST.store(monotonic_ns(), Ordering::Relaxed); // independent of the time taken above
        drop(inbox);
        // SAFETY: as above.
        unsafe { libc::raise(libc::SIGUSR1) };
    }

    #[test]
    fn signals_within_a_second_are_one_request() {
        let (first, second_ns) = (AtomicU64::new(0), 1_000_000_000);
        assert_eq!(count(libc::SIGTERM, &first, 5), Some(StopRequest::First(libc::SIGTERM)));
        assert_eq!(count(libc::SIGTERM, &first, 6), None);
        assert_eq!(count(libc::SIGHUP, &first, 5 + second_ns), None);
        assert_eq!(count(libc::SIGUSR1, &first, 6 + second_ns), Some(StopRequest::Again));
    }
}
