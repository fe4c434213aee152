//! The sandbox for programs written by a model. A program runs in its own process behind every protection that the kernel offers, to its end or to a
//! limit; or it stays and answers requests one by one. Independent of rewards. The calling process must have only one thread, because the sandbox
//! forks.
//!
//! | file | what it is |
//! |---|---|
//! | `session` | a program that answers several requests |
//! | `readable` | the list of paths that a program can read |
//! | `inside` | what the forked process does before it becomes the program: namespaces, mounts, limits |
//! | `layers` | Landlock rules and the seccomp filter of system calls |
#![allow(unsafe_code)]

mod inside;
mod layers;
mod readable;
mod session;

use std::ffi::CString;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use inside::{ASKS_FOR_IDS, INNER_ID, NOBODY, become_program};

use crate::config::CodeConfig;
use crate::process::{ChildEnd, do_not_block, ended, moved, wait_for};

pub use readable::Readable;
pub use session::SandboxSession;

/// Name of the program's file in its start folder.
const PROGRAM_FILE: &str = "main.py";

/// Maximum number of bytes that a program may write to standard output.
const MAX_OUTPUT_BYTES: usize = 1 << 20;
/// Time limit for setting up the sandbox.
const SETUP: Duration = Duration::from_secs(10);
/// Interval of checks whether a program that closed its output has ended.
const LOOK: Duration = Duration::from_millis(1);

/// A started program with its pipes.
#[derive(Debug)]
struct Started {
    process: Process,
    input: PipeWriter,
    output: PipeReader,
    /// The program's own folder, kept until it has ended.
    folder: TempDir,
}

/// A sandbox that has run an empty program successfully.
#[derive(Debug)]
pub struct Sandbox {
    settings: CodeConfig,
    /// Path of the interpreter, its arguments and the program's file.
    command: Vec<CString>,
    /// Paths that the program may read.
    readable: Readable,
}

/// The outcome of a program.
#[derive(Debug)]
pub struct SandboxRun {
    /// Whether it ended by itself with exit status 0.
    pub succeeded: bool,
    /// The program's standard output.
    pub output: Vec<u8>,
}

/// The pipe ends that belong to the sandboxed process.
struct Pipes {
    input: PipeReader,
    output: PipeWriter,
    /// Receives the message that the ids are mapped.
    go: PipeReader,
    /// Sends the reason why the process cannot become the program; closed by exec.
    report: PipeWriter,
}

impl Sandbox {
    /// Finds the interpreter and runs an empty program.
    ///
    /// # Errors
    /// The names of missing layers, or another reason why no program can run.
    pub fn new(settings: &CodeConfig) -> Result<Self, String> {
        let readable = Readable::new(settings)?;
        let interpreter = readable.interpreter.to_string_lossy().into_owned();
        let args = settings.command.0[1..].iter().map(String::as_str);
        let words = [interpreter.as_str()].into_iter().chain(args).chain([PROGRAM_FILE]);
        let command = words.map(CString::new).collect::<Result<_, _>>().map_err(|error| error.to_string())?;
        let settings = settings.clone();
        let sandbox = Self { settings, command, readable };
        let tried = sandbox.run("", b"", Instant::now() + SETUP)?;
        if tried.succeeded {
            Ok(sandbox)
        } else {
            Err(format!("{interpreter} cannot run even an empty program in the sandbox"))
        }
    }

    /// Runs `program` with `input` at most until `deadline`; afterwards its processes and files are removed.
    ///
    /// # Errors
    /// Why the program could not be run or its folder not removed; never a failure of the program itself.
    pub fn run(&self, program: &str, input: &[u8], deadline: Instant) -> Result<SandboxRun, String> {
        let Started { process, input: input_end, output, folder } = self.start(program, self.cpu_seconds())?;
        let run = process.follow(input_end, output, input, deadline);
        let run = run.map_err(|error| format!("cannot use the pipes of the sandbox: {error}"))?;
        folder.close().map_err(|error| format!("cannot remove the program's folder: {error}"))?;
        Ok(run)
    }

    /// CPU time limit in seconds of a program that runs for the longest time allowed.
    fn cpu_seconds(&self) -> u64 {
        self.settings.timeout_s.ceil() as u64 + 1
    }

    /// Starts `program` with a limit of `cpu_seconds` of CPU time.
    fn start(&self, program: &str, cpu_seconds: u64) -> Result<Started, String> {
        let failed = |error: io::Error| format!("cannot use the pipes of the sandbox: {error}");
        let (inner_input, input_end) = io::pipe().map_err(failed)?;
        let (output_end, inner_output) = io::pipe().map_err(failed)?;
        let (inner_go, mut go) = io::pipe().map_err(failed)?;
        let (mut report, inner_report) = io::pipe().map_err(failed)?;
        let folder = tempfile::tempdir().map_err(|error| format!("cannot create a temporary folder: {error}"))?;
        let inner = Pipes { input: inner_input, output: inner_output, go: inner_go, report: inner_report };
        // SAFETY: this process has one thread; the child runs on a copy of it and never returns.
        let process = match unsafe { libc::fork() } {
            -1 => return Err(format!("cannot start a process for the program: {}", io::Error::last_os_error())),
            0 => {
                drop((input_end, output_end, go, report));
                become_program(self, folder.path(), (program, cpu_seconds), inner)
            }
            pid => Process { pid },
        };
        drop(inner);
        process.follow_setup(&mut report, &mut go)?;
        Ok(Started { process, input: input_end, output: output_end, folder })
    }
}

/// The process of a run, leader of its process group. It is not reaped before it is dropped, so that the group's id is not reused.
#[derive(Debug)]
struct Process {
    pid: libc::pid_t,
}

impl Process {
    /// Handles the requests of the process until it has become the program.
    fn follow_setup(&self, report: &mut PipeReader, go: &mut PipeWriter) -> Result<(), String> {
        let mut said = Vec::new();
        let mut part = [0; 1024];
        let deadline = Instant::now() + SETUP;
        loop {
            wait_for(&[report.as_raw_fd()], &[], deadline.saturating_duration_since(Instant::now()));
            if Instant::now() >= deadline {
                return Err("the sandbox was not ready in time".to_owned());
            }
            let num_read = report.read(&mut part).map_err(|error| error.to_string())?;
            said.extend_from_slice(&part[..num_read]);
            if said == ASKS_FOR_IDS.as_bytes() {
                said.clear();
                self.map_ids().map_err(|error| format!("user_namespace: {error}"))?;
                go.write_all(&[1]).map_err(|error| error.to_string())?;
            } else if num_read == 0 {
                let said = String::from_utf8_lossy(&said).into_owned();
                return if said.is_empty() { Ok(()) } else { Err(said) };
            }
        }
    }

    /// Maps the program's user id to nobody's, and root's to itself while the sandbox is built; without privileges, maps to this process's own user.
    fn map_ids(&self) -> io::Result<()> {
        // SAFETY: plain system calls without arguments.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        let write = |name: &str, text: String| {
            File::options().write(true).open(format!("/proc/{}/{name}", self.pid))?.write_all(text.as_bytes())
        };
        let mapped = |own: u32| {
            if uid == 0 { format!("0 {own} 1\n{INNER_ID} {NOBODY} 1\n") } else { format!("{INNER_ID} {own} 1\n") }
        };
        if uid != 0 {
            write("setgroups", "deny".to_owned())?;
        }
        write("gid_map", mapped(gid))?;
        write("uid_map", mapped(uid))
    }

    /// Writes the input and reads the output of the program until it ends or reaches a limit.
    fn follow(
        self,
        input: PipeWriter,
        mut output: PipeReader,
        text: &[u8],
        deadline: Instant,
    ) -> io::Result<SandboxRun> {
        do_not_block(input.as_raw_fd())?;
        do_not_block(output.as_raw_fd())?;
        let (mut input, mut num_sent, mut written) = (Some(input), 0, Vec::new());
        let mut part = [0; 1 << 16];
        loop {
            if num_sent == text.len() {
                input = None;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || written.len() > MAX_OUTPUT_BYTES {
                return Ok(SandboxRun { succeeded: false, output: written });
            }
            wait_for(&[output.as_raw_fd()], &[input.as_ref().map_or(-1, AsRawFd::as_raw_fd)], left);
            if let Some(pipe) = &mut input {
                match moved(pipe.write(&text[num_sent..])) {
                    Ok(num) => num_sent += num.unwrap_or(0),
                    Err(_) => input = None, // it reads no further
                }
            }
            match moved(output.read(&mut part))? {
                Some(0) => break,
                num_read => written.extend_from_slice(&part[..num_read.unwrap_or(0)]),
            }
        }
        let succeeded = self.succeeds(deadline);
        Ok(SandboxRun { succeeded, output: written })
    }

    /// Waits for the end of a program that has closed its output; whether it succeeded.
    fn succeeds(&self, deadline: Instant) -> bool {
        while Instant::now() < deadline {
            if let Some(end) = ended(self.pid as u32) {
                return end == ChildEnd { code: libc::CLD_EXITED, status: 0 };
            }
            std::thread::sleep(LOOK);
        }
        false
    }
}

impl Drop for Process {
    /// Kills the remaining processes of the group, also if its leader has ended; the first process of a PID namespace takes all others with it.
    fn drop(&mut self) {
        // SAFETY: the own child, not yet reaped, and the group that it made; waited for, as it cannot refuse.
        unsafe {
            libc::kill(-self.pid, libc::SIGKILL);
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}
