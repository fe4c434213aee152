//! Tests every combination of a phase, a kind of failure, and the first or last of four ranks: how soon the failure is noticed, how soon all
//! processes have ended, and that the restarted run equals an undisturbed one bit for bit.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::program::{SMALL_RUN, command, processes_of};

const NUM_RANKS: usize = 4;
const PHASES: [&str; 12] = [
    "load",
    "prefill",
    "decode",
    "reward",
    "sleep",
    "wake",
    "forward_backward",
    "optimizer",
    "gather",
    "checkpoint",
    "write",
    "eval",
];
/// Kinds of failures and their exit codes.
const KINDS: [(&str, i32); 5] = [("kill", 10), ("stop", 15), ("segv", 10), ("exit", 10), ("oom", 11)];
/// Heartbeat timeout of these runs in seconds.
const LIMIT_S: f64 = 5.0;

struct Cell {
    phase: &'static str,
    kind: &'static str,
    code: i32,
    rank: usize,
}

/// Time from the fault to its detection by the launcher, and from there to the end of the last process.
struct Times {
    noticed: Duration,
    gone: Duration,
}

/// A run with three steps on four ranks and two engines of two ranks, which saves a checkpoint after every step.
fn run_of(output_dir: &Path, more: &str) -> Command {
    let limits: String = ["load", "checkpoint", "write"].map(|name| format!(" heartbeat.{name}_s={LIMIT_S}")).concat();
    let mut run = command(&format!(
        "--nproc {NUM_RANKS} {SMALL_RUN} tensor_parallel_size=2 max_steps=3 save_steps=1 eval_steps=1 \
         eval_file=configs/arithmetic/eval.jsonl heartbeat.timeout_s={LIMIT_S} heartbeat.startup_s=60{limits} output_dir={} {more}",
        output_dir.display()
    ));
    run.env("COLO_GRPO_LOG", "warn,colo_grpo::launch=debug");
    run
}

/// The folder of an undisturbed run, which is made once.
fn straight() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let ended = run_of(&folder.path().join("run"), "").output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        folder
    });
    folder.path()
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-r").args([from, to]).status().unwrap();
    assert!(copied.success());
}

/// Resumes after the first step, fails in the second, and is restarted.
fn survive(cell: &Cell) -> Times {
    let what = format!("rank {}, {}, {}", cell.rank, cell.phase, cell.kind);
    let folder = tempfile::tempdir().unwrap();
    let output_dir = folder.path().join("run");
    std::fs::create_dir(&output_dir).unwrap();
    copy(&straight().join("run/checkpoint-1"), &output_dir);
    let step = if cell.phase == "load" { 0 } else { 1 };
    let fault = format!("resume_from_checkpoint=latest fault={}:{step}:{}:{}", cell.rank, cell.phase, cell.kind);
    let mut run = run_of(&output_dir, &fault).spawn().unwrap();
    let lines = timed_lines(&mut run);
    let code = run.wait().unwrap().code();
    let ended = Instant::now();
    let lines: Vec<(Instant, String)> = lines.iter().collect();
    let text = || lines.iter().map(|(_, line)| format!("{line}\n")).collect::<String>();
    assert_eq!(code, Some(cell.code), "{what}\n{}", text());
    assert_eq!(processes_of(folder.path()), Vec::<String>::new(), "{what}: left running");
    let at = |fragments: &[&str]| {
        let found = lines.iter().find(|(_, line)| fragments.iter().any(|fragment| line.contains(fragment)));
        found.unwrap_or_else(|| panic!("{what}: none of {fragments:?} in\n{}", text())).0
    };
    let (fired, noticed) = (at(&["injected fault"]), at(&[" ended: ", " hangs"]));
    let blamed = format!("error: rank {}, step ", cell.rank);
    assert!(lines.iter().any(|(_, line)| line.starts_with(&blamed)), "{what}\n{}", text());
    let saved = output_dir.join("checkpoint-1/manifest.json");
    assert!(saved.exists(), "{what}: the checkpoint is gone");

    let again = run_of(&output_dir, "resume_from_checkpoint=latest").output().unwrap();
    assert!(again.status.success(), "{what}\n{}", String::from_utf8_lossy(&again.stderr));
    let weights = |folder: PathBuf| std::fs::read(folder.join("final/model.safetensors")).unwrap();
    assert!(weights(output_dir) == weights(straight().join("run")), "{what}: other weights than undisturbed");
    Times { noticed: noticed.saturating_duration_since(fired), gone: ended - noticed }
}

/// The lines of a run's standard error, each with its time of arrival.
fn timed_lines(run: &mut Child) -> Receiver<(Instant, String)> {
    let (sender, receiver) = channel();
    let stderr = run.stderr.take().unwrap();
    std::thread::spawn(move || {
        let lines = BufReader::new(stderr).lines().map_while(Result::ok);
        lines.map(|line| (Instant::now(), line)).try_for_each(|line| sender.send(line))
    });
    receiver
}

/// Checks all cases. Times are compared with limits only if `is_alone`, on an otherwise idle machine.
fn check(cells: &[Cell], is_alone: bool) {
    let told = |cell: &Cell| {
        let times = survive(cell);
        println!(
            "{} {} rank {}: {:.3} s, {:.3} s",
            cell.phase,
            cell.kind,
            cell.rank,
            times.noticed.as_secs_f64(),
            times.gone.as_secs_f64()
        );
        times
    };
    let times: Vec<Times> = cells.iter().map(told).collect();
    for (name, kinds) in [("ended or failed", &["kill", "segv", "exit", "oom"][..]), ("stopped", &["stop"])] {
        let of = |part: fn(&Times) -> Duration| {
            let own = cells.iter().zip(&times).filter(|(cell, _)| kinds.contains(&cell.kind));
            let mut seconds: Vec<f64> = own.map(|(_, times)| part(times).as_secs_f64()).collect();
            seconds.sort_by(f64::total_cmp);
            (seconds[seconds.len() / 2], seconds[seconds.len() - 1])
        };
        let (noticed, gone) = (of(|times| times.noticed), of(|times| times.gone));
        println!(
            "{name}: noticed after {:.3} s (worst {:.3}), all gone {:.3} s later (worst {:.3})",
            noticed.0, noticed.1, gone.0, gone.1
        );
        let allowed = if name == "stopped" { LIMIT_S + 2.0 } else { 1.0 };
        let is_soon = noticed.1 < allowed && gone.1 < 15.0;
        assert!(is_soon || !is_alone, "{name}: noticed {noticed:?}, gone {gone:?}");
    }
}

#[test]
fn some_injected_faults_end_the_run_with_the_expected_code() {
    let cell = |(phase, kind, code, rank)| Cell { phase, kind, code, rank };
    let cells = [
        ("load", "segv", 10, 3),
        ("decode", "oom", 11, 0),
        ("wake", "stop", 15, 3),
        ("optimizer", "kill", 10, 0),
        ("checkpoint", "exit", 10, 0),
        ("write", "oom", 11, 3),
    ];
    check(&cells.map(cell), false);
}

#[test]
#[ignore = "takes ten minutes"]
fn all_injected_faults_end_the_run_with_the_expected_code() {
    let mut cells = Vec::new();
    for phase in PHASES {
        for (kind, code) in KINDS {
            cells.extend([0, NUM_RANKS - 1].map(|rank| Cell { phase, kind, code, rank }));
        }
    }
    println!("{} cells", cells.len());
    check(&cells, true);
}
