//! Child processes: their exit status, killing their process group, non-blocking pipes, detached threads, and temporary folders (`scratch`), which
//! the next start removes if their process was killed.
#![allow(unsafe_code)]

mod scratch;

use std::io;
use std::os::fd::RawFd;
use std::process::Child;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

pub use scratch::{Scratch, sweep};

/// Path to start this program again: the file that was loaded, even if it was replaced since.
pub const PROGRAM: &str = "/proc/self/exe";

/// Starts a detached thread. The work begins once the thread is detached: glibc's `pthread_detach` reads the thread's stack after detaching it, and a
/// thread that ends at that moment has unmapped it (glibc bug 19951).
///
/// # Errors
/// The system's error if it has no thread or no address space for the stack; `work` is dropped then.
pub fn detach(thread: thread::Builder, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (detached, waits) = channel::<()>();
    let begin = move || {
        let _ = waits.recv();
        work();
    };
    drop(thread.spawn(begin)?);
    drop(detached);
    Ok(())
}

/// How a child has ended, as reported by waitid(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChildEnd {
    /// `si_code`: by an exit, by a signal, ..
    pub code: i32,
    /// `si_status`: the exit code, or the signal.
    pub status: i32,
}

/// How a child has ended, without reaping it; `None` while it runs.
pub fn ended(pid: u32) -> Option<ChildEnd> {
    // SAFETY: a zeroed siginfo is valid, outlives the call and is filled by it; its pid stays 0 if the child lives.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        let found = libc::waitid(libc::P_PID, pid, &raw mut info, options) == 0 && info.si_pid() != 0;
        found.then(|| ChildEnd { code: info.si_code, status: info.si_status() })
    }
}

/// Kills the process group that a child leads. The child must not be reaped yet, so that its id is not reused.
pub fn kill_group(child: &Child) {
    // SAFETY: plain system call without pointers.
    unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
}

/// In a child between fork and exec: closes all inherited files and sockets except standard input, output and error.
///
/// # Errors
/// None; the type is that of a `pre_exec` closure.
pub fn close_on_exec() -> io::Result<()> {
    // SAFETY: plain system call without pointers; a kernel that does not know it leaves what was marked one by one.
    unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) };
    Ok(())
}

/// Bytes moved by a non-blocking read or write; `None` if the pipe is empty or full for now.
///
/// # Errors
/// Every other error of `outcome`.
pub fn moved(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        other => other.map(Some),
    }
}

/// Makes reads and writes of an open descriptor non-blocking.
///
/// # Errors
/// The error of the system call.
pub fn do_not_block(fd: RawFd) -> io::Result<()> {
    // SAFETY: plain system call without pointers.
    let outcome = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Waits until one of `readable` can be read or one of `writable` can be written, at most for `limit`. Descriptors of -1 are ignored.
pub fn wait_for(readable: &[RawFd], writable: &[RawFd], limit: Duration) {
    let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
    let mut fds: Vec<_> = readable.iter().map(|fd| entry(*fd, libc::POLLIN)).collect();
    fds.extend(writable.iter().map(|fd| entry(*fd, libc::POLLOUT)));
    let limit_ms = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX).max(1);
    // SAFETY: the entries outlive the call.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit_ms) };
}
