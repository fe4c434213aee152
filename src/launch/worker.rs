//! How one worker process is started.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::threads;
use super::way_on::OnStop;
use crate::config::HeartbeatConfig;
use crate::cuda;
use crate::error::{Error, Result};
use crate::phase::{HeartbeatLimits, PULSE_FD_VARIABLE};
use crate::process::PROGRAM;
use crate::ranks::{NCCL_INTERFACE_VARIABLE, SEGMENT_FD_VARIABLE, STORE_FD_VARIABLE, nccl_interface, require_token};

/// The default rendezvous address, which only this machine can reach.
pub const LOOPBACK: &str = "127.0.0.1";

/// The workers to launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchOptions {
    /// Number of workers on this node, one per rank (`--nproc`).
    pub num_workers: usize,
    /// Number of nodes, with equally many workers each (`--nnodes`).
    pub num_nodes: usize,
    /// Index of this node (`--node_rank`).
    pub node_rank: usize,
    /// The program that each worker runs.
    pub program: PathBuf,
    /// Arguments of each worker.
    pub args: Vec<OsString>,
    /// Address that the rendezvous store is bound to (`--master_addr`).
    pub master_addr: String,
    /// Port of the rendezvous store (`--master_port`); `None` chooses a free one.
    pub master_port: Option<u16>,
    /// Whether every worker needs its own GPU (`device = "cuda"`).
    pub needs_cuda: bool,
    /// Maximum time without progress of a worker, by phase.
    pub limits: HeartbeatLimits,
    /// How many times all workers are restarted after one died or hung.
    pub max_restarts: usize,
    /// Where restarted workers look for checkpoints to resume from.
    pub output_dir: Option<PathBuf>,
    /// The effect of a stop request on workers.
    pub on_stop: OnStop,
}

impl LaunchOptions {
    /// Creates options for `num_workers` workers that run this program again with `args`, with the rendezvous on the loopback interface.
    pub fn new(num_workers: usize, args: Vec<OsString>) -> Self {
        Self {
            num_workers,
            num_nodes: 1,
            node_rank: 0,
            program: PROGRAM.into(),
            args,
            master_addr: LOOPBACK.to_owned(),
            master_port: None,
            needs_cuda: false,
            limits: HeartbeatConfig::default().limits(),
            max_restarts: 0,
            on_stop: OnStop::End,
            output_dir: None,
        }
    }

    /// Refuses options that this machine cannot run.
    pub(super) fn check(&self) -> Result<()> {
        if self.num_workers == 0 {
            return Err(Error::invalid_value("nproc", 0, "at least 1"));
        }
        if self.num_nodes > 1 {
            require_token()?;
        }
        if self.needs_cuda {
            self.check_gpus()?;
        }
        Ok(())
    }

    fn check_gpus(&self) -> Result<()> {
        let devices = cuda::devices()?;
        if self.num_workers <= devices.len() {
            return cuda::require_free();
        }
        let list = if devices.is_empty() { "none".to_owned() } else { devices.join("; ") };
        let message = format!(
            "--nproc {} needs more GPUs than are visible: {list} (CUDA_VISIBLE_DEVICES={}); lower --nproc or set \
             device=cpu",
            self.num_workers,
            std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "unset".to_owned())
        );
        Err(Error::Environment { message })
    }
}

/// The rendezvous of a run's ranks. On the node of rank 0 it holds the listening socket, which rank 0 inherits, so no other process can take the port
/// in between.
#[derive(Debug)]
pub struct Rendezvous {
    listener: Option<TcpListener>,
    address: String,
    port: u16,
}

impl Rendezvous {
    /// Binds only `address`, on `port` or on a free port.
    ///
    /// # Errors
    /// [`Error::Environment`] if a given port is in use.
    pub fn bind(address: &str, port: Option<u16>) -> Result<Self> {
        let refuse = |error: std::io::Error| Error::Environment {
            message: match port {
                Some(port) => {
                    format!(
                        "cannot listen on --master_port {port} at {address}: {error}; choose another port, or omit the \
                         option to use a free one"
                    )
                }
                None => format!("cannot listen on --master_addr {address}: {error}; give an address of this machine"),
            },
        };
        let listener = TcpListener::bind((address, port.unwrap_or(0))).map_err(refuse)?;
        let port = listener.local_addr().map_err(refuse)?.port();
        Ok(Self { listener: Some(listener), address: address.to_owned(), port })
    }

    /// The rendezvous for `options`, bound if it is on this node.
    ///
    /// # Errors
    /// Returns the errors of [`Rendezvous::bind`].
    pub(super) fn of(options: &LaunchOptions) -> Result<Self> {
        match options.master_port {
            Some(port) if options.node_rank > 0 => {
                Ok(Self { listener: None, address: options.master_addr.clone(), port })
            }
            port => Self::bind(&options.master_addr, port),
        }
    }

    /// The port in use.
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// File descriptors that a worker inherits from its launcher.
#[derive(Debug, Clone, Copy, Default)]
pub struct Inherited {
    /// The shared page for the worker's progress ([`crate::phase::SharedPage`]).
    pub pulse: Option<RawFd>,
    /// The file for the worker's error.
    pub report: Option<RawFd>,
    /// The memory shared with the other workers ([`crate::ranks::SharedSegment`]); without it, workers use a rendezvous store.
    pub segment: Option<RawFd>,
}

/// The command that starts the worker of `local_rank`. It runs in its own process group, is killed when the spawning thread ends, and has its place
/// in the world in its environment.
pub fn worker_command(
    options: &LaunchOptions,
    rendezvous: &Rendezvous,
    local_rank: usize,
    inherited: Inherited,
) -> Command {
    let Inherited { pulse, report, segment } = inherited;
    let rank = options.node_rank * options.num_workers + local_rank;
    let mut command = Command::new(&options.program);
    if options.program == Path::new(PROGRAM) {
        command.arg0(std::env::args_os().next().unwrap_or_default()); // the name shown in process lists
    }
    command
        .args(&options.args)
        .stdin(Stdio::null())
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", local_rank.to_string())
        .env("WORLD_SIZE", (options.num_nodes * options.num_workers).to_string())
        .env("LOCAL_WORLD_SIZE", options.num_workers.to_string())
        .env("GROUP_RANK", options.node_rank.to_string())
        .env("MASTER_ADDR", &rendezvous.address)
        .env("MASTER_PORT", rendezvous.port.to_string())
        .process_group(0);
    threads::share_processors(&mut command, options.num_workers);
    let is_named = std::env::var_os(NCCL_INTERFACE_VARIABLE).is_some();
    if let Some(interface) = nccl_interface(&rendezvous.address, rendezvous.port)
        && options.num_nodes > 1
        && !is_named
    {
        command.env(NCCL_INTERFACE_VARIABLE, interface);
    }
    let store = rendezvous.listener.as_ref().filter(|_| rank == 0).map(AsRawFd::as_raw_fd);
    let named = [(STORE_FD_VARIABLE, store), (PULSE_FD_VARIABLE, pulse), (SEGMENT_FD_VARIABLE, segment)];
    for (name, fd) in named {
        match fd {
            Some(fd) => command.env(name, fd.to_string()),
            None => command.env_remove(name),
        };
    }
    let inherited = [store, pulse, segment, report];
    let launcher = std::process::id();
    // SAFETY: the closure runs between fork and exec and makes only async-signal-safe calls. The caller keeps the listener and the page alive.
    unsafe { command.pre_exec(move || prepare(launcher, inherited)) };
    command
}

/// Runs in the child before exec: makes it die with its launcher, and keeps the inherited descriptors open.
fn prepare(launcher: u32, inherited: [Option<RawFd>; 4]) -> std::io::Result<()> {
    // SAFETY: plain system calls without pointers.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        if libc::getppid() as u32 != launcher {
            libc::_exit(libc::SIGKILL); // the launcher died before the line above
        }
        for fd in inherited.into_iter().flatten() {
            if libc::fcntl(fd, libc::F_SETFD, 0) != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_used_port_is_refused_and_without_a_port_a_free_one_is_chosen() {
        let first = Rendezvous::bind("127.0.0.1", None).unwrap();
        let error = Rendezvous::bind("127.0.0.1", Some(first.port())).unwrap_err();
        assert_eq!(error.exit_code(), crate::error::ExitCode::Environment);
        assert!(error.to_string().contains(&format!("--master_port {}", first.port())), "{error}");
        assert_ne!(Rendezvous::bind("127.0.0.1", None).unwrap().port(), first.port());
    }
}
