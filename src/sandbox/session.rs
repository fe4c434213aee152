//! A sandboxed program that answers requests one by one. Between requests it is stopped, so that it computes nothing on its own.
#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};

use super::{Sandbox, Started};
use crate::process::{do_not_block, moved};

/// CPU time limit of a session over all its requests, as a multiple of the longest run.
const MAX_CPU_RUNS: u64 = 100;

/// A running sandboxed program with its pipes. Dropping it kills it and removes its files.
#[derive(Debug)]
pub struct SandboxSession {
    started: Started, // its process is killed before its folder goes
    /// Bytes of requests that are not written yet.
    unsent: Vec<u8>,
    /// Bytes received from the program that were not taken yet.
    pub received: Vec<u8>,
}

impl Sandbox {
    /// Starts `program`, to receive requests on standard input.
    ///
    /// # Errors
    /// Why the program could not be started.
    pub fn open(&self, program: &str) -> Result<SandboxSession, String> {
        let started = self.start(program, MAX_CPU_RUNS * self.cpu_seconds())?;
        let both = [started.input.as_raw_fd(), started.output.as_raw_fd()];
        both.into_iter()
            .try_for_each(do_not_block)
            .map_err(|error| format!("cannot use the pipes of the sandbox: {error}"))?;
        Ok(SandboxSession { started, unsent: Vec::new(), received: Vec::new() })
    }
}

impl SandboxSession {
    /// Continues the program with a request.
    pub fn ask(&mut self, request: &[u8]) {
        self.unsent.extend_from_slice(request);
        self.signal(libc::SIGCONT);
    }

    /// Stops the program until the next request.
    pub fn pause(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// The descriptor to read the program's answers from.
    pub fn readable(&self) -> RawFd {
        self.started.output.as_raw_fd()
    }

    /// The descriptor to write requests to; -1 if there is nothing to write.
    pub fn writable(&self) -> RawFd {
        if self.unsent.is_empty() { -1 } else { self.started.input.as_raw_fd() }
    }

    /// Moves the bytes that can be moved now; returns false once the program has closed either end.
    pub fn transfer(&mut self) -> bool {
        if !self.unsent.is_empty() {
            match moved(self.started.input.write(&self.unsent)) {
                Ok(num_sent) => drop(self.unsent.drain(..num_sent.unwrap_or(0))),
                Err(_) => return false,
            }
        }
        let mut part = [0; 1 << 16];
        match moved(self.started.output.read(&mut part)) {
            Ok(Some(0)) | Err(_) => false,
            Ok(num_read) => {
                self.received.extend_from_slice(&part[..num_read.unwrap_or(0)]);
                true
            }
        }
    }

    /// Sends a signal to the program's whole process group, which none of its processes can leave.
    fn signal(&self, signal: libc::c_int) {
        // SAFETY: plain system call; the group is led by an own child that is not reaped.
        unsafe { libc::kill(-self.started.process.pid, signal) };
    }
}
