//! Pipes to and from processes that must never make us wait.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

/// Bytes moved by a read or a write; `None` where the pipe is empty or full for now.
pub(super) fn moved(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        other => other.map(Some),
    }
}

/// Reads and writes of an open descriptor return at once.
pub(super) fn do_not_block(fd: RawFd) -> io::Result<()> {
    // SAFETY: plain system call without pointers.
    let outcome = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Waits until one of `readable` can be read or `writable` be written, or for `limit`; -1 stands for none.
pub(super) fn wait_for(readable: &[RawFd], writable: RawFd, limit: Duration) {
    let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
    let mut fds: Vec<_> = readable.iter().map(|fd| entry(*fd, libc::POLLIN)).collect();
    fds.push(entry(writable, libc::POLLOUT));
    let limit_ms = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX).max(1);
    // SAFETY: the entries outlive the call.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit_ms) };
}
