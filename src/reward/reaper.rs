//! Kills all processes that a worker started, even if they left the worker's process group, and even if this process is killed.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::process::close_on_exec;

/// Environment variable that marks a worker and the processes started by it, which inherit it.
const MARK: &str = "COLO_GRPO_REWARD_WORKER";
/// The reaper's shell script. A shell is always available, also to programs that use the library, and needs little memory.
const SCRIPT: &str = include_str!("reaper.sh");
/// Number of times that a worker's descendants are listed, because new ones may start while others are killed.
const MAX_LOOKS: usize = 100;

/// A helper process that outlives this one. It then kills the processes that a worker left behind, and removes the worker's folder. Dropping it
/// does so immediately and waits for the end.
#[derive(Debug)]
pub(super) struct Reaper {
    shell: Child,
}

impl Reaper {
    /// Starts the helper process and sets the marking variable of `worker`, which must be started afterwards.
    pub fn start(worker: &mut Command, folder: Option<&Path>) -> io::Result<Self> {
        static NUM_STARTED: AtomicUsize = AtomicUsize::new(0);
        let number = NUM_STARTED.fetch_add(1, Ordering::Relaxed);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let mark = format!("{}-{now}-{number}.", std::process::id());
        worker.env(MARK, &mark);
        let folder = folder.map(Path::as_os_str).unwrap_or_default();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", SCRIPT, "reaper", &format!("{MARK}={mark}")]).arg(folder);
        shell.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        shell.current_dir("/").process_group(0);
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: the closure runs between fork and exec and makes one async-signal-safe call.
        unsafe { shell.pre_exec(close_on_exec) };
        shell.spawn().map(|shell| Self { shell })
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// Kills the descendants of process `pid`, which must not have been reaped yet, whatever their groups, sessions and environments.
pub(super) fn kill_descendants(pid: u32) {
    // SAFETY: the caller's own child, not yet reaped; stopped, it starts no more.
    unsafe { libc::kill(pid as i32, libc::SIGSTOP) };
    for _ in 0..MAX_LOOKS {
        let found = descendants(pid);
        if found.is_empty() {
            break;
        }
        for descendant in found {
            // SAFETY: plain system call; it was alive a moment ago.
            unsafe { libc::kill(descendant as i32, libc::SIGKILL) };
        }
    }
}

/// Running processes that are children or grandchildren of `pid`.
fn descendants(pid: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for (child, parent) in
        fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| family(entry.path()))
    {
        children.entry(parent).or_default().push(child);
    }
    let mut found = Vec::new();
    let mut open = vec![pid];
    while let Some(parent) = open.pop() {
        let own = children.remove(&parent).unwrap_or_default();
        found.extend_from_slice(&own);
        open.extend(own);
    }
    found
}

/// The ids of a running process and its parent, from its folder in /proc.
fn family(folder: PathBuf) -> Option<(u32, u32)> {
    let pid = folder.file_name()?.to_str()?.parse().ok()?;
    let line = fs::read_to_string(folder.join("stat")).ok()?;
    let (_, rest) = line.rsplit_once(") ")?; // the name may hold anything
    let mut words = rest.split(' ');
    let is_alive = !matches!(words.next()?, "Z" | "X");
    let parent = words.next()?.parse().ok()?;
    is_alive.then_some((pid, parent))
}
