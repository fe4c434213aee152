//! Start and end of a process: its log, the message of its failure, and its exit code.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::way_on::OnStop;
use super::{exit, report, signals, threads};
use crate::console;
use crate::error::{Error, ExitCode, Result, panic_message};
use crate::phase;
use crate::process::sweep;
use crate::ranks::WorkerEnv;
use crate::torch;

/// The default log filter: warnings, the engine's size and long waits for the compiler; `COLO_GRPO_LOG` overrides it.
const LOG_FILTER: &str = "warn,colo_grpo::rollout=info,colo_grpo::cuda=info";

/// Runs `work` as the program of this process, then ends the process: with 0, or with the message and exit code of the error, as `colo-grpo` does. On
/// TERM, INT, USR1 and HUP a run saves and exits with 75. Call it first in `main`, because the process may execute itself again with settings for
/// OpenMP and NCCL.
///
/// ```no_run
/// use std::sync::Arc;
/// use colo_grpo::{Config, Result, Trainer, World};
///
/// fn main() {
///     colo_grpo::main(train)
/// }
///
/// fn train() -> Result<()> {
///     let config = Config::load(Some("run.toml".as_ref()), &[])?;
///     let world = Arc::new(World::for_run(&config)?);
///     Trainer::new(config, world)?.run()?;
///     Ok(())
/// }
/// ```
pub fn main(work: impl FnOnce() -> Result<()>) -> ! {
    signals::hold_signals();
    threads::load_again_with_settings();
    signals::receive_signals(OnStop::Save);
    let outcome = begin_process().and_then(|()| {
        sweep();
        let is_first = WorkerEnv::from_env()?.is_none_or(|env| env.rank == 0);
        signals::stop_on_signals(OnStop::Save, is_first && !phase::is_watched());
        catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|panic| Err(Error::of_panic("the program", panic_message(&*panic))))
    });
    let code = outcome.map_or_else(|error| report_failure(&error), |()| ExitCode::Done);
    exit::exit_now(code as i32)
}

/// Prepares this process: log, file size limits, libtorch's memory, and the page that a launcher watches.
///
/// # Errors
/// [`Error::Environment`] if there is no memory for the page.
pub fn begin_process() -> Result<()> {
    init_tracing();
    signals::outlive_file_limits();
    torch::keep_memory();
    phase::publish()
}

/// Reports the failure of this process once: to a worker's launcher through the error file, otherwise on stderr. Returns the exit code to use.
pub fn report_failure(error: &Error) -> ExitCode {
    if console::is_closed_output(error) {
        return error.exit_code(); // its reader has seen enough, as `head` does
    }
    let rank = std::env::var("RANK").ok().and_then(|rank| rank.parse().ok());
    console::clear_progress(); // bars of phases that will not finish
    report::report_error(error, rank);
    error.exit_code()
}

/// Writes the log to stderr, filtered by `COLO_GRPO_LOG` (`debug`, `colo_grpo::rollout=trace`).
fn init_tracing() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("COLO_GRPO_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(LOG_FILTER));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(console::Log)
        .with_ansi(false)
        .with_target(false)
        .without_time()
        .try_init();
}
