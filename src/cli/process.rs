//! The processes of a command: this process alone, a launcher with its workers, or a worker.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tch::Kind;

use super::args::{LaunchArgs, Placed, SamplingArgs};
use crate::config::{HeartbeatConfig, SupervisionConfig};
use crate::console;
use crate::cuda::Placement;
use crate::error::{Error, ExitCode, Result, panic_message};
use crate::launch::{self, LaunchOptions, OnStop};
use crate::memory::explain_out_of_memory;
use crate::phase::{self, HeartbeatLimits};
use crate::ranks::{Backend, WorkerEnv, World, WorldOptions};

/// How the ranks of a command are watched, and what happens when one dies.
pub(super) struct Supervision {
    /// Time limit for a collective.
    pub timeout: Duration,
    /// Time limit for a node that sends nothing.
    pub node_timeout: Duration,
    /// Keys and values that must be equal on all nodes.
    pub compared: Vec<(String, String)>,
    /// Heartbeat time limits by phase.
    pub limits: HeartbeatLimits,
    pub max_restarts: usize,
    /// Folder in which a restarted run finds its checkpoints.
    pub output_dir: Option<PathBuf>,
    /// The reaction to TERM, INT, USR1 and HUP. The command itself checks for the request to save or stop.
    pub on_stop: OnStop,
}

impl Supervision {
    /// Supervision of a run that saves checkpoints to `output_dir`; the nodes must agree on `compared`.
    pub fn of_run(config: &SupervisionConfig, output_dir: &Path, compared: Vec<(String, String)>) -> Self {
        Self {
            timeout: Duration::from_secs_f64(config.collective_timeout_s),
            node_timeout: Duration::from_secs_f64(config.node_timeout_s),
            compared,
            limits: config.heartbeat.limits(),
            max_restarts: config.max_restarts,
            output_dir: Some(output_dir.to_owned()),
            on_stop: OnStop::Save,
        }
    }

    /// Supervision with the default time limit for collectives.
    pub fn within(limits: HeartbeatLimits) -> Self {
        let WorldOptions { timeout, node_timeout, compared, .. } = WorldOptions::default();
        Self { timeout, node_timeout, compared, limits, max_restarts: 0, output_dir: None, on_stop: OnStop::End }
    }
}

/// Supervision of a command that samples.
impl From<&SamplingArgs> for Supervision {
    fn from(args: &SamplingArgs) -> Self {
        heartbeat(args.supervision.heartbeat_timeout_s)
    }
}

/// Supervision with a heartbeat time limit of `timeout_s` for every phase.
pub(super) fn heartbeat(timeout_s: f64) -> Supervision {
    let mut heartbeat = HeartbeatConfig::default();
    heartbeat.timeout_s = timeout_s;
    Supervision::within(heartbeat.limits())
}

/// Like [`distributed`], for a command whose arguments give device and dtype; `work` also gets the dtype.
pub(super) fn placed<T: Args>(
    args: &Placed<T>,
    watch: Supervision,
    work: impl FnOnce(&T, Arc<World>, Kind) -> Result<()>,
) -> Result<ExitCode> {
    let Placement { on_cuda, kind } = Placement::new(args.place.device, args.place.dtype)?;
    distributed(&args.launch, watch, on_cuda, |world| work(&args.own, world, kind))
}

/// Like [`prepared`], with nothing to prepare.
pub(super) fn distributed(
    args: &LaunchArgs,
    watch: Supervision,
    on_cuda: bool,
    work: impl FnOnce(Arc<World>) -> Result<()>,
) -> Result<ExitCode> {
    prepared(args, watch, on_cuda, || Ok(()), |world, ()| work(world))
}

/// Runs `work` on `nproc` ranks: as a worker if the environment says so, in this process if one rank is enough, else as the launcher of workers. A
/// working process runs `before` first, while it has no GPU context yet.
pub(super) fn prepared<T>(
    args: &LaunchArgs,
    watch: Supervision,
    on_cuda: bool,
    before: impl FnOnce() -> Result<T>,
    work: impl FnOnce(Arc<World>, T) -> Result<()>,
) -> Result<ExitCode> {
    let Supervision { timeout, node_timeout, compared, limits, max_restarts, output_dir, on_stop } = watch;
    let env = WorkerEnv::from_env()?;
    if env.is_none() {
        args.check_node()?;
    }
    if env.is_none() && (args.num_ranks() > 1 || max_restarts > 0) {
        let options = args.options(std::env::args_os().skip(1).collect())?;
        return Ok(launch::run(&LaunchOptions {
            needs_cuda: on_cuda,
            limits,
            max_restarts,
            output_dir,
            on_stop,
            ..options
        }));
    }
    if on_stop != OnStop::End {
        launch::stop_on_signals(on_stop, !phase::is_watched() && env.as_ref().is_none_or(|env| env.rank == 0));
    }
    if !phase::is_watched() {
        launch::watch_self(env.as_ref().map_or(0, |env| env.rank), &limits, timeout)?;
    }
    let prepared = before()?;
    let backend = if on_cuda { Backend::Nccl } else { Backend::Shm };
    let world = match env {
        Some(env) => {
            let options = WorldOptions { timeout, backend, node_timeout, compared, ..WorldOptions::default() };
            World::join(&env, options)?
        }
        None => World::single_on(backend)?,
    };
    let world = Arc::new(world);
    let outcome = catch_unwind(AssertUnwindSafe(|| work(world.clone(), prepared)));
    let outcome = outcome.unwrap_or_else(|panic| Err(Error::of_panic("the program", panic_message(&*panic))));
    let outcome = outcome.map_err(explain_out_of_memory);
    if let Err(error) = &outcome {
        world.post_failure(error);
    }
    outcome.map(|()| ExitCode::Done)
}

/// Prints one JSON line on rank 0.
pub(super) fn print_first(world: &World, value: serde_json::Value) -> Result<()> {
    if world.rank() == 0 {
        console::print(format_args!("{value}\n"))?;
    }
    Ok(())
}
