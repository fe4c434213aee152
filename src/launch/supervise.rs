//! Supervises a run: its workers from start to end, and restarts while any are left.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use super::group::{AttemptOutcome, Workers};
use super::output::PipeReaders;
use super::signals::SignalInbox;
use super::way_on;
use super::worker::LaunchOptions;
use crate::checkpoint;
use crate::console;
use crate::cuda;
use crate::error::{ExitCode, Result};

/// Maximum time until the GPU memory of dead workers is free again.
const GPU_PATIENCE: Duration = Duration::from_secs(15);

/// Starts the workers, waits for all of them, and returns the exit code of the run: done; preempted, if a worker exited so; or that of the earliest
/// failure, which is printed. If a worker dies or hangs, the others are killed within a second and, while restarts are left, all are started again
/// from the newest checkpoint.
///
/// TERM, INT, USR1 and HUP are forwarded; a further one, more than a second later, kills the workers.
pub fn run(options: &LaunchOptions) -> ExitCode {
    launch(options).unwrap_or_else(|error| {
        console::say(format_args!("error: {error}"));
        error.exit_code()
    })
}

fn launch(options: &LaunchOptions) -> Result<ExitCode> {
    options.check()?;
    let mut inbox = SignalInbox::open()?;
    let mut options = options.clone();
    let before = saved(&options)?;
    for num_restarts in 0.. {
        let outcome = attempt(&options, num_restarts, &mut inbox)?;
        outcome.print();
        if num_restarts == options.max_restarts || !outcome.is_worth_a_restart() {
            if outcome.is_worth_a_restart() || outcome.was_stopped() {
                let may_restart = outcome.is_worth_a_restart() && options.max_restarts == 0;
                let hint = if may_restart { "; max_restarts=N restarts automatically" } else { "" };
                way_on::tell_way_on(options.output_dir.as_deref(), hint, &outcome.messages);
            }
            return Ok(outcome.code);
        }
        if options.needs_cuda && wait_for_gpus(&mut inbox)? {
            return Ok(ExitCode::Preempted);
        }
        let from = match options.node_rank == 0 && resume(&mut options, &before)? {
            _ if options.node_rank > 0 => "from the checkpoint that the node of rank 0 chooses",
            true => "from the newest checkpoint",
            false => "from the beginning, as no checkpoint was saved",
        };
        console::say(format_args!("restart {} of {} {from}", num_restarts + 1, options.max_restarts));
    }
    unreachable!("the count has no end")
}

/// Runs all workers once.
fn attempt(options: &LaunchOptions, num_restarts: usize, inbox: &mut SignalInbox) -> Result<AttemptOutcome> {
    let mut output = PipeReaders::default();
    let mut workers = Workers::start(options, num_restarts, &mut output)?;
    let interrupted = workers.wait(inbox, options.on_stop);
    output.finish(Duration::from_secs(1));
    console::clear_progress(); // bars of a rank that was killed
    Ok(workers.outcome(interrupted))
}

/// Makes the workers resume from the newest checkpoint written since `before`. Returns whether there is one. Checkpoints of later steps may exist, if
/// this run was itself resumed from an earlier one.
///
/// # Errors
/// [`Error::Io`] if the checkpoints cannot be read, because starting from the beginning would be wrong.
fn resume(options: &mut LaunchOptions, before: &[(PathBuf, SystemTime)]) -> Result<bool> {
    let saved = saved(options)?;
    let fresh = saved.iter().filter(|checkpoint| !before.contains(checkpoint));
    let Some((newest, _)) = fresh.max_by_key(|(_, written)| *written) else { return Ok(false) };
    let is_latest = saved.last().is_some_and(|(folder, _)| folder == newest);
    let from = if is_latest { OsStr::new("latest") } else { newest.as_os_str() };
    let mut key = OsString::from("resume_from_checkpoint=");
    key.push(from);
    if options.args.last() != Some(&key) {
        options.args.push(key);
    }
    Ok(true)
}

/// Complete checkpoints by step, with the time at which each was written.
fn saved(options: &LaunchOptions) -> Result<Vec<(PathBuf, SystemTime)>> {
    let folders = options.output_dir.as_deref().map_or(Ok(Vec::new()), checkpoint::list)?;
    let written = |folder: PathBuf| Some((folder.clone(), checkpoint::written(&folder)?));
    Ok(folders.into_iter().filter_map(written).collect())
}

/// Waits until the GPUs of the workers hold no memory of other processes. Returns whether a signal ended the wait.
fn wait_for_gpus(inbox: &mut SignalInbox) -> Result<bool> {
    let deadline = Instant::now() + GPU_PATIENCE;
    loop {
        match cuda::require_free() {
            Err(_) if Instant::now() < deadline => {
                if !inbox.wait(std::iter::empty(), Duration::from_millis(100)).is_empty() {
                    return Ok(true);
                }
            }
            free => return free.map(|()| false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_resumes_from_the_runs_own_readable_checkpoints() {
        let folder = tempfile::tempdir().unwrap();
        let mut options = LaunchOptions::new(1, Vec::new());
        assert!(!resume(&mut options, &[]).unwrap(), "nothing is saved without an output folder");
        options.output_dir = Some(folder.path().join("run"));
        assert!(!resume(&mut options, &[]).unwrap());
        let save = |step: u64, seconds: u64| {
            let checkpoint = folder.path().join(format!("run/checkpoint-{step}"));
            std::fs::create_dir_all(&checkpoint).unwrap();
            let manifest = std::fs::File::create(checkpoint.join("manifest.json")).unwrap();
            manifest.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
        };
        save(5, 1);
        save(3, 2);
        let before = saved(&options).unwrap();
        assert!(!resume(&mut options, &before).unwrap() && options.args.is_empty(), "they are an earlier run's");
        save(4, 3); // saved by a run that was resumed from step 3
        assert!(resume(&mut options, &before).unwrap() && resume(&mut options, &before).unwrap());
        let own = format!("resume_from_checkpoint={}", folder.path().join("run/checkpoint-4").display());
        assert_eq!(options.args, [own.as_str()]);
        save(5, 4);
        assert!(resume(&mut options, &before).unwrap());
        assert_eq!(options.args, [own.as_str(), "resume_from_checkpoint=latest"]);
        std::fs::write(folder.path().join("file"), "").unwrap();
        options.output_dir = Some(folder.path().join("file"));
        assert_eq!(resume(&mut options, &[]).unwrap_err().exit_code(), ExitCode::Storage);
    }
}
