//! A run that saves every step is killed completely, again and again, at random moments.

use std::path::Path;
use std::time::Duration;

use colo_grpo::internal::checkpoint::Checkpoint;

use crate::program::{SMALL_RUN, command, processes_of, run, wait_until};

const NUM_STEPS: u64 = 40;

fn line(output_dir: &Path) -> String {
    let steps = format!("max_steps={NUM_STEPS} save_steps=1 save_total_limit=3");
    format!("--nproc 2 {SMALL_RUN} {steps} output_dir={}", output_dir.display())
}

/// Kills the launcher `num_kills` times, which also ends its workers. The latest checkpoint must be complete and never older than before.
fn kill_again_and_again(num_kills: u64) {
    let folder = tempfile::tempdir().unwrap();
    let output_dir = folder.path().join("run");
    let mut newest = 0;
    let mut num_parts = 0;
    for kill in 0..num_kills {
        let resume = if newest > 0 { "resume_from_checkpoint=latest" } else { "" };
        let mut started = command(&format!("{} {resume}", line(&output_dir))).spawn().unwrap();
        let begun = output_dir.join(format!("checkpoint-{}", newest + 1));
        wait_until(|| begun.exists() || started.try_wait().unwrap().is_some());
        std::thread::sleep(Duration::from_millis(kill * 37 % 150));
        let _ = started.kill();
        started.wait().unwrap();
        wait_until(|| processes_of(&output_dir).is_empty());
        let names =
            std::fs::read_dir(&output_dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names: Vec<String> = names.collect();
        num_parts += usize::from(names.iter().any(|name| name.ends_with(".tmp")));
        let steps = names.iter().filter_map(|name| name.strip_prefix("checkpoint-")?.parse::<u64>().ok());
        let steps: Vec<u64> = steps.collect();
        for step in &steps {
            let opened = Checkpoint::open(&output_dir.join(format!("checkpoint-{step}")), true);
            opened.unwrap_or_else(|error| panic!("kill {kill}: {error}"));
        }
        let latest = steps.into_iter().max().unwrap();
        assert!(latest > newest, "kill {kill}: {latest} after {newest}");
        newest = latest;
        if newest == NUM_STEPS {
            break;
        }
    }
    println!("killed up to step {newest}; {num_parts} kills left a part of a checkpoint");
    let resumed = run(&format!("{} resume_from_checkpoint=latest", line(&output_dir)));
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    let straight = folder.path().join("straight");
    assert_eq!(run(&line(&straight)).code, Some(0));
    let weights = |run: &Path| std::fs::read(run.join("final/model.safetensors")).unwrap();
    assert!(weights(&output_dir) == weights(&straight), "other weights than undisturbed");
}

#[test]
fn a_run_killed_three_times_equals_an_uninterrupted_one() {
    kill_again_and_again(3);
}

#[test]
#[ignore = "takes a minute"]
fn a_run_killed_repeatedly_equals_an_uninterrupted_one() {
    kill_again_and_again(NUM_STEPS);
}
