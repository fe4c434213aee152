//! One worker process of a reward: starting it, exchanging frames, and ending it with all its descendants.
#![allow(unsafe_code)]

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use super::failures::{FailureKind, RewardFailure};
use super::protocol::{Ready, first_request, length, take_frame};
use super::reaper::{Reaper, kill_descendants};
use crate::error::Error;
use crate::process::Scratch;
use crate::process::{close_on_exec, do_not_block, ended, kill_group, moved, wait_for};

/// Time limit for a worker that reports when it is ready. Importing Python packages may take long.
const START: Duration = Duration::from_secs(120);
/// Time that a worker has to end by itself after it closed its pipes. `LOOK` is the interval at which this is checked.
const EXIT: Duration = Duration::from_millis(200);
const LOOK: Duration = Duration::from_millis(2);
/// Bytes kept from the end of the worker's standard error, for error messages.
const TAIL_BYTES: usize = 2048;
/// Environment variables for this process and its launcher, which workers do not inherit.
const OWN_VARIABLES: [&str; 4] =
    ["COLO_GRPO_PULSE_FD", "COLO_GRPO_STORE_FD", "COLO_GRPO_SEGMENT_FD", "COLO_GRPO_ERROR_FILE"];

/// A worker's program and where it was configured.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub command: Vec<String>,
    /// Whether the program belongs to this crate: it answers a first, empty request when it is ready, or with the reason why it cannot serve.
    pub is_ours: bool,
    pub origin: Origin,
    /// Largest size of a reply in bytes.
    pub max_reply_bytes: usize,
}

/// Where a program was configured; determines the error message if it does not start.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    /// A configuration key names the program; the key and its value.
    Key(String, String),
    /// The program is the sandbox worker, which no key configures.
    Sandbox,
    /// math-verify in the Python interpreter `python`, for the reward `reward`.
    MathVerify { reward: String, python: String },
}

impl Program {
    /// The error to return if the program's first worker does not start for this `cause`.
    pub fn refusal(&self, cause: &str) -> Error {
        match &self.origin {
            Origin::Key(key, value) => {
                let is_missing = cause.contains("ModuleNotFoundError") && self.command.len() > 1;
                let hint = || {
                    format!(
                        "; this module is missing in reward.python = {}: name an interpreter that has it",
                        self.command[0]
                    )
                };
                let hint = if is_missing && self.is_ours { hint() } else { String::new() };
                Error::invalid_value(
                    key,
                    value,
                    format!("a reward that can be started; starting it failed: {cause}{hint}"),
                )
            }
            Origin::Sandbox => Error::Environment { message: format!("reward 'code': {cause}") },
            Origin::MathVerify { reward, python } => {
                let install = format!("{python} -m pip install math-verify==0.9.0");
                let message = format!(
                    "reward '{reward}' needs the Python package math-verify: {cause}; install it with: {install}"
                );
                Error::Environment { message }
            }
        }
    }
}

/// A worker process with its pipes. Dropping it kills it and all its descendants, and removes its folder.
#[derive(Debug)]
pub(crate) struct RewardWorker {
    child: Child,
    /// Standard input; `None` after it was closed because no requests follow.
    requests: Option<ChildStdin>,
    replies: ChildStdout,
    /// Standard error; `None` once the worker has closed it.
    errors: Option<ChildStderr>,
    /// Bytes of requests that are not written yet.
    unsent: Vec<u8>,
    /// Bytes of replies that were not taken yet.
    received: Vec<u8>,
    /// The last bytes of the worker's standard error.
    tail: Vec<u8>,
    /// Whether the worker serves several requests concurrently.
    pub is_async: bool,
    /// Columns that its function requires as parameters.
    pub needed_columns: Vec<String>,
    is_reaped: bool,
    max_reply_bytes: usize,
    reaper: Option<Reaper>,
    /// The folder in which the sandbox worker creates folders of programs. If the worker is killed, it leaves one there.
    _folder: Option<Scratch>,
}

impl RewardWorker {
    /// Starts a worker that ends with the calling thread, and waits until it is ready.
    pub fn start(program: &Program) -> Result<Self, RewardFailure> {
        let died = |error: io::Error| RewardFailure::new(FailureKind::Died, format!("{}: {error}", program.command[0]));
        let mut command = Command::new(&program.command[0]);
        command.args(&program.command[1..]).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for name in OWN_VARIABLES {
            command.env_remove(name);
        }
        // The sandbox's worker makes the folders of programs in one of its own.
        let folder = matches!(program.origin, Origin::Sandbox).then(scratch).transpose().map_err(died)?;
        command.envs(folder.iter().map(|folder| ("TMPDIR", folder.path())));
        let reaper = Reaper::start(&mut command, folder.as_ref().map(Scratch::path)).map_err(died)?;
        let parent = std::process::id();
        // SAFETY: the closure runs between fork and exec and makes async-signal-safe calls alone.
        unsafe { command.pre_exec(move || stand_alone(parent)) };
        let mut child = command.spawn().map_err(died)?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(requests), Some(replies), Some(errors)) = pipes else { unreachable!("all three are piped") };
        let fds = [requests.as_raw_fd(), replies.as_raw_fd(), errors.as_raw_fd()];
        let mut worker = Self {
            child,
            requests: Some(requests),
            replies,
            errors: Some(errors),
            unsent: Vec::new(),
            received: Vec::new(),
            tail: Vec::new(),
            is_async: false,
            needed_columns: Vec::new(),
            is_reaped: false,
            max_reply_bytes: program.max_reply_bytes,
            reaper: Some(reaper),
            _folder: folder,
        };
        fds.into_iter().try_for_each(do_not_block).map_err(died)?;
        if program.is_ours {
            worker.send(&first_request());
            let ready = worker.receive(Instant::now() + START)?;
            let ready = Ready::parse(&ready.ok_or_else(|| worker.overdue())?)?;
            (worker.is_async, worker.needed_columns) = (ready.is_async, ready.needed_columns);
        }
        Ok(worker)
    }

    /// The worker's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Queues a request. It is written while replies are awaited.
    pub fn send(&mut self, request: &[u8]) {
        self.unsent.extend_from_slice(request);
    }

    /// Waits until `limit` for the next reply and returns it without its length prefix; `None` if there is none.
    pub fn receive(&mut self, limit: Instant) -> Result<Option<Vec<u8>>, RewardFailure> {
        loop {
            if let Some(reply) = self.reply_at_hand()? {
                return Ok(Some(reply));
            }
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            if !self.exchange(left)? {
                return Err(self.death());
            }
        }
    }

    /// Reads and writes what is possible without waiting, and returns the next reply if it is complete.
    pub fn poll(&mut self) -> Result<Option<Vec<u8>>, RewardFailure> {
        match self.reply_at_hand()? {
            None if !self.transfer()? => Err(self.death()),
            None => self.reply_at_hand(),
            reply => Ok(reply),
        }
    }

    /// Takes a reply that was already received.
    pub fn reply_at_hand(&mut self) -> Result<Option<Vec<u8>>, RewardFailure> {
        let Some(length) = length(&self.received) else { return Ok(None) };
        if length > self.max_reply_bytes {
            let what = format!("its reply has {length} bytes (limit: {})", self.max_reply_bytes);
            return Err(self.failure(FailureKind::Output, &what));
        }
        Ok(take_frame(&mut self.received))
    }

    /// Waits until one of `workers` can read or write, at most for `limit`.
    pub fn wait_any(workers: &[&Self], limit: Duration) {
        let readable: Vec<_> = workers.iter().flat_map(|worker| worker.readable()).collect();
        let writable: Vec<_> = workers.iter().map(|worker| worker.writable()).collect();
        wait_for(&readable, &writable, limit);
    }

    /// File descriptors of the worker's standard output and standard error.
    fn readable(&self) -> [RawFd; 2] {
        [self.replies.as_raw_fd(), self.errors.as_ref().map_or(-1, AsRawFd::as_raw_fd)]
    }

    /// File descriptor to write requests to; -1 if nothing is to be written.
    fn writable(&self) -> RawFd {
        self.requests.as_ref().filter(|_| !self.unsent.is_empty()).map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Ends a worker whose reply has no id, and checks that nothing follows the reply: closes its input and waits until it closes its
    /// output.
    pub fn finish(mut self, deadline: Instant) -> Result<(), RewardFailure> {
        if !self.unsent.is_empty() {
            return Err(self.failure(FailureKind::Output, "it replied before it had read the request"));
        }
        self.requests = None;
        while self.received.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = "its replies have no \"id\", and it did not end when its input was closed";
                return Err(self.failure(FailureKind::Timeout, what));
            }
            if !self.exchange(left)? {
                return Ok(());
            }
        }
        Err(self.failure(FailureKind::Output, "more than one reply to a request"))
    }

    /// The failure of a request that exceeded its time limit.
    pub fn overdue(&self) -> RewardFailure {
        self.failure(FailureKind::Timeout, "no reply before its deadline")
    }

    /// Waits until bytes can be read or written, at most for `limit`, and does so. Returns false once the worker has closed its output.
    fn exchange(&mut self, limit: Duration) -> Result<bool, RewardFailure> {
        wait_for(&self.readable(), &[self.writable()], limit);
        self.transfer()
    }

    /// Reads and writes the bytes that are possible without waiting. Returns false once the worker has closed its output.
    fn transfer(&mut self) -> Result<bool, RewardFailure> {
        self.read_errors();
        if let Some(pipe) = self.requests.as_mut().filter(|_| !self.unsent.is_empty()) {
            let num_sent = moved(pipe.write(&self.unsent)).map_err(|_| self.death())?.unwrap_or(0);
            self.unsent.drain(..num_sent);
        }
        let mut part = [0; 1 << 16];
        let num_read = moved(self.replies.read(&mut part)).map_err(|_| self.death())?;
        self.received.extend_from_slice(&part[..num_read.unwrap_or(0)]);
        Ok(num_read != Some(0))
    }

    /// Reads the worker's standard error, so that it never blocks on a full pipe.
    fn read_errors(&mut self) {
        let Some(errors) = &mut self.errors else { return };
        let mut part = [0; 1 << 16];
        match moved(errors.read(&mut part)) {
            Ok(Some(0)) | Err(_) => self.errors = None,
            Ok(None) => {}
            Ok(Some(num_read)) => {
                tracing::debug!("{}", String::from_utf8_lossy(&part[..num_read]).trim_end());
                self.tail.extend_from_slice(&part[..num_read]);
                let surplus = self.tail.len().saturating_sub(TAIL_BYTES);
                self.tail.drain(..surplus);
            }
        }
    }

    /// The failure of a worker that closed its pipes. Waits a moment for it to end by itself, because its own exit status is more informative than
    /// that of a kill.
    fn death(&mut self) -> RewardFailure {
        let end = Instant::now() + EXIT;
        while ended(self.child.id()).is_none() && Instant::now() < end {
            std::thread::sleep(LOOK);
        }
        self.read_errors();
        self.kill();
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        self.is_reaped = true;
        self.failure(FailureKind::Died, &format!("its worker process ended with {status}"))
    }

    /// Kills the worker's process group. The reaper finds descendants that left the group.
    fn kill(&self) {
        kill_descendants(self.child.id());
        kill_group(&self.child);
    }

    fn failure(&self, kind: FailureKind, what: &str) -> RewardFailure {
        let tail = String::from_utf8_lossy(&self.tail);
        let said = if tail.trim().is_empty() { String::new() } else { format!("; it said: {}", tail.trim()) };
        RewardFailure::new(kind, format!("{what}{said}"))
    }
}

impl Drop for RewardWorker {
    fn drop(&mut self) {
        if !self.is_reaped {
            self.kill();
            let _ = self.child.wait();
        }
        drop(self.reaper.take()); // waits for what left the group
    }
}

/// Creates a folder that an unprivileged program may traverse to reach its own folder inside.
fn scratch() -> io::Result<Scratch> {
    let folder = Scratch::new()?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711))?;
    Ok(folder)
}

/// In the child, before exec: makes the process end with the thread that started it, and closes files and sockets of that thread's process.
fn stand_alone(parent: u32) -> io::Result<()> {
    close_on_exec()?;
    // SAFETY: plain system calls without pointers.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::getppid() as u32 != parent {
            libc::_exit(libc::SIGKILL);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> RewardWorker {
        let command = ["sh", "-c", script].map(str::to_owned).to_vec();
        RewardWorker::start(&Program { command, is_ours: false, origin: Origin::Sandbox, max_reply_bytes: 99 }).unwrap()
    }

    /// A worker may close its pipes before it ends, as an interpreter does at shutdown, or may never end.
    #[test]
    fn the_exit_status_of_a_worker_is_reported() {
        for (script, status) in [
            ("echo no more >&2; exec >&-; sleep 0.05; exit 3", "exit status: 3; it said: no more"),
            ("exec >&-; sleep 60", "signal: 9 (SIGKILL)"),
        ] {
            let failure = shell(script).receive(Instant::now() + START).unwrap_err();
            assert_eq!(
                failure,
                RewardFailure::new(FailureKind::Died, format!("its worker process ended with {status}"))
            );
        }
    }

    #[test]
    fn a_killed_sandbox_worker_leaves_no_folder() {
        let mut worker = shell("mktemp -d; read never");
        wait_for(&[worker.replies.as_raw_fd()], &[], START);
        let mut made = [0; 4096];
        let length = worker.replies.read(&mut made).unwrap();
        let made = std::path::PathBuf::from(String::from_utf8_lossy(&made[..length]).trim());
        assert!(made.is_dir());
        drop(worker);
        assert!(!made.exists());
    }
}
