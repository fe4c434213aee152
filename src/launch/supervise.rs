//! A run: its workers from start to end, and again where restarts are left.

use std::time::{Duration, Instant};

use super::group::{Outcome, Workers};
use super::output::Output;
use super::signals::Inbox;
use super::worker::LaunchOptions;
use crate::checkpoint;
use crate::cuda;
use crate::error::{Error, ExitCode, Result};
use crate::metrics::redact;

/// How long a dead group's GPU memory may take to be free again.
const GPU_PATIENCE: Duration = Duration::from_secs(15);

/// Starts the workers, waits for all of them, and returns the exit code of the run: done; preempted, if a worker left so; or
/// that of the failure that came first, which is printed. When a worker dies or stands still, the rest is killed within a
/// second, and all are started again from the newest checkpoint while restarts are left.
///
/// TERM, INT and USR1 are passed on; a second one kills.
pub fn run(options: &LaunchOptions) -> ExitCode {
    launch(options).unwrap_or_else(|error| {
        eprintln!("error: {}", redact(&error.to_string()));
        error.exit_code()
    })
}

fn launch(options: &LaunchOptions) -> Result<ExitCode> {
    options.check()?;
    let mut inbox = Inbox::open()?;
    let mut options = options.clone();
    for num_restarts in 0.. {
        let outcome = attempt(&options, num_restarts, &mut inbox)?;
        outcome.print();
        if num_restarts == options.max_restarts || !outcome.is_worth_a_restart() {
            return Ok(outcome.code);
        }
        if options.needs_cuda {
            wait_for_gpus()?;
        }
        let from = match resume(&mut options)? {
            true => "from the newest checkpoint",
            false => "from the beginning: there is no checkpoint",
        };
        eprintln!("restart {} of {} {from}", num_restarts + 1, options.max_restarts);
    }
    unreachable!("the count has no end")
}

/// All workers, once.
fn attempt(options: &LaunchOptions, num_restarts: usize, inbox: &mut Inbox) -> Result<Outcome> {
    let folder = tempfile::Builder::new().prefix("colo-grpo-").tempdir();
    let folder = folder.map_err(Error::io(std::env::temp_dir()))?;
    let mut output = Output::default();
    let mut workers = Workers::start(options, num_restarts, folder.path().into(), &mut output)?;
    let interrupted = workers.wait(inbox);
    output.finish(Duration::from_secs(1));
    Ok(workers.outcome(interrupted))
}

/// Makes the workers resume, if the run has saved anything. Returns whether it has.
///
/// # Errors
/// [`Error::Io`] where that cannot be read: a start from the beginning would not be what was asked for.
fn resume(options: &mut LaunchOptions) -> Result<bool> {
    let saved = options.output_dir.as_deref().map_or(Ok(Vec::new()), checkpoint::list)?;
    let found = !saved.is_empty();
    let flag = "resume_from_checkpoint=latest".into();
    if found && !options.args.contains(&flag) {
        options.args.push(flag);
    }
    Ok(found)
}

/// Waits until nobody holds memory of the GPUs that the workers will take.
fn wait_for_gpus() -> Result<()> {
    let deadline = Instant::now() + GPU_PATIENCE;
    loop {
        match cuda::require_free() {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(100)),
            free => return free,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_resumes_what_is_there_and_refuses_what_it_cannot_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut options = LaunchOptions::new(1, Vec::new()).unwrap();
        assert!(!resume(&mut options).unwrap(), "nothing is saved without an output folder");
        options.output_dir = Some(folder.path().join("run"));
        assert!(!resume(&mut options).unwrap());
        std::fs::create_dir_all(folder.path().join("run/checkpoint-3")).unwrap();
        assert!(resume(&mut options).unwrap() && resume(&mut options).unwrap());
        assert_eq!(options.args, ["resume_from_checkpoint=latest"]);
        std::fs::write(folder.path().join("file"), "").unwrap();
        options.output_dir = Some(folder.path().join("file"));
        assert_eq!(resume(&mut options).unwrap_err().exit_code(), ExitCode::Storage);
    }
}
