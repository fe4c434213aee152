//! Runs that are killed, stopped by signals, or made to fail.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use crate::program::{
    Ended, MODEL, SMALL_RUN, await_line, command, end, metrics, processes_of, run, signal, wait_until,
};

/// Starts a long run on two ranks and waits until it has done a step.
fn start(output_dir: &Path) -> Child {
    start_with(&format!("{SMALL_RUN} save_steps=none"), output_dir)
}

fn start_with(line: &str, output_dir: &Path) -> Child {
    let line = format!("{line} --nproc 2 max_steps=100000 output_dir={}", output_dir.display());
    let mut run = command(&line).spawn().unwrap();
    wait_until(|| !metrics(output_dir).is_empty() || run.try_wait().unwrap().is_some());
    run
}

/// CPU time that a process has used, in hundredths of a second.
fn processor_ticks(pid: &str) -> u64 {
    let stat = fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(2);
    fields.filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
}

fn is_rank(pid: &str, rank: usize) -> bool {
    let variables = fs::read(Path::new("/proc").join(pid).join("environ")).unwrap_or_default();
    variables.split(|byte| *byte == 0).any(|variable| variable == format!("RANK={rank}").as_bytes())
}

#[test]
fn a_killed_worker_ends_the_run_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let run = start(folder.path());
    let pids = processes_of(folder.path());
    assert_eq!(pids.len(), 3, "the launcher and its workers");
    signal(pids.iter().find(|pid| is_rank(pid, 1)).unwrap(), "-9");
    let ended = end(run);
    ended.assert_error(
        "killed",
        10,
        &["rank 1, step ", "rank 1 died: signal 9 (SIGKILL)", "ran out of memory", "  rank 0: step "],
    );
    assert_eq!(processes_of(folder.path()), Vec::<String>::new());
}

#[test]
fn a_stopped_run_saves_and_can_be_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let stopped = start(folder.path());
    signal(stopped.id(), "-TERM");
    let ended = end(stopped);
    assert_eq!(ended.code, Some(75), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("; saved ").count(), 1, "{}", ended.stderr);
    assert!(!ended.stderr.contains("error"), "{}", ended.stderr);
    assert!(ended.stderr.contains("the current step is finished, a checkpoint is saved"), "{}", ended.stderr);
    let step = metrics(folder.path()).last().unwrap()["step"].as_u64().unwrap();
    assert!(folder.path().join(format!("checkpoint-{step}")).join("trainer_state.json").exists());

    // The command that it prints continues it, as far as the test has time for.
    let told = ended.stderr.lines().find_map(|line| line.strip_prefix("to continue: ")).expect("a command");
    let told = told.replace("max_steps=100000", &format!("max_steps={}", step + 1));
    assert!(told.ends_with("resume_from_checkpoint=latest"), "{told}");
    let root = env!("CARGO_MANIFEST_DIR");
    let shell =
        std::process::Command::new("sh").args(["-c", &told]).current_dir(root).env("OMP_NUM_THREADS", "1").output();
    let shell = shell.unwrap();
    let resumed = Ended {
        code: shell.status.code(),
        stdout: String::new(),
        stderr: String::from_utf8_lossy(&shell.stderr).into(),
    };
    assert_eq!(resumed.code, Some(0), "{told}\n{}", resumed.stderr);
    assert!(resumed.stderr.contains("resumed from"), "{}", resumed.stderr);
    assert_eq!(metrics(folder.path()).last().unwrap()["step"], step + 1);
    assert!(folder.path().join("final").join("model.safetensors").exists());
}

/// Ctrl-C in a run of one process takes effect while the step is still running.
#[test]
fn a_run_of_one_process_answers_a_signal_before_its_step_ends() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!(
        "{SMALL_RUN} save_steps=none max_steps=100000 fault=0:1:generate:hang output_dir={}",
        folder.path().display()
    );
    let mut run = command(&line).spawn().unwrap();
    await_line(&mut run, "injected fault"); // no step ends from here on
    signal(run.id(), "-INT");
    await_line(
        &mut run,
        "stop requested: the current step is finished, a checkpoint is saved, and the run ends with exit code 75",
    );
    std::thread::sleep(Duration::from_millis(1100)); // so that the next one is another request; longer does no harm
    signal(run.id(), "-TERM");
    let ended = end(run);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
}

/// Row 4: after the last step only the model has to be saved, so a stop request changes nothing.
#[test]
fn a_run_stopped_in_its_last_step_ends_normally() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL_RUN} save_steps=none output_dir={}", folder.path().display());
    let mut run = command(&line).spawn().unwrap();
    wait_until(|| folder.path().join("run_config.json").exists() || run.try_wait().unwrap().is_some());
    signal(run.id(), "-TERM");
    let ended = end(run);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(folder.path().join("final/model.safetensors").exists());
}

/// Row 4: after a first update, one signal saves a checkpoint, and a second one ends the run at once. Row 3: no process outlives the launcher.
#[test]
fn a_second_signal_or_a_dead_launcher_ends_all_processes() {
    let folder = tempfile::tempdir().unwrap();
    let hung = "fault=0:1:generate:hang";
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let mut run = start_with(&format!("{SMALL_RUN} {hung}"), &first);
    await_line(&mut run, "injected fault"); // a signal before that is obeyed
    signal(run.id(), "-USR1");
    await_line(&mut run, "(SIGUSR1): passed on to all ranks");
    std::thread::sleep(Duration::from_millis(1100)); // so that the next one is another request; longer does no harm
    assert!(!processes_of(&first).is_empty(), "a rank that hangs cannot save");
    signal(run.id(), "-TERM");
    let ended = end(run);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("ended at once by a second signal") && !ended.stderr.contains("error"),
        "{}",
        ended.stderr
    );
    let mut run = start_with(&format!("{SMALL_RUN} {hung}"), &second);
    run.kill().unwrap();
    run.wait().unwrap();
    for folder in [&first, &second] {
        wait_until(|| processes_of(folder).is_empty());
    }
}

#[test]
fn a_stopped_supervised_run_saves_and_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    fs::write(&rows, "{\"prompt\": \"what is one plus one ?\", \"completion\": \"the answer is 2\"}\n".repeat(4))
        .unwrap();
    let line = format!(
        "sft --config configs/arithmetic/warmup.toml model_name_or_path={MODEL} train_file={} \
         per_device_train_batch_size=2 logging_steps=1 lr_scheduler_type=constant",
        rows.display()
    );
    let stopped = start_with(&line, folder.path());
    signal(stopped.id(), "-TERM");
    let ended = end(stopped);
    assert_eq!(ended.code, Some(75), "{}", ended.stderr);
    let step = metrics(folder.path()).last().unwrap()["step"].as_u64().unwrap();
    assert!(ended.stderr.contains(&format!("stopped by a signal at step {step}; saved ")), "{}", ended.stderr);
    let resume = format!("--nproc 2 max_steps={} resume_from_checkpoint=latest", step + 1);
    let resumed = run(&format!("{line} {resume} output_dir={}", folder.path().display()));
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    assert!(resumed.stderr.contains(&format!("checkpoint-{step}\n")), "{}", resumed.stderr);
    assert_eq!(metrics(folder.path()).last().unwrap()["step"], step + 1);
    assert!(folder.path().join("final").join("model.safetensors").exists());
}

#[test]
fn a_supervised_run_is_started_again_from_its_newest_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    fs::write(&rows, "{\"prompt\": \"what is one plus one ?\", \"completion\": \"the answer is 2\"}\n".repeat(4))
        .unwrap();
    let line = format!(
        "sft --config configs/arithmetic/warmup.toml model_name_or_path={MODEL} train_file={} max_restarts=1 \
         per_device_train_batch_size=2 logging_steps=1 lr_scheduler_type=constant save_steps=1 save_total_limit=2",
        rows.display()
    );
    let mut run = start_with(&line, folder.path());
    let has_saved = || {
        fs::read_dir(folder.path()).unwrap().flatten().any(|entry| {
            entry.file_name().to_string_lossy().starts_with("checkpoint-")
                && entry.path().join("trainer_state.json").exists()
        })
    };
    wait_until(|| has_saved() || run.try_wait().unwrap().is_some());
    signal(processes_of(folder.path()).iter().find(|pid| is_rank(pid, 1)).unwrap(), "-9");
    await_line(&mut run, "restart 1 of 1 from the newest checkpoint");
    await_line(&mut run, "resumed from");
    signal(run.id(), "-TERM");
    assert_eq!(end(run).code, Some(75));
}

#[test]
fn injected_faults_end_the_run_with_their_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let cases: &[(&str, i32, &[&str])] = &[
        ("1:1:generate:kill", 10, &["rank 1", "SIGKILL"]),
        ("0:1:wake:error", 10, &["rank 0", "step 1", "wake"]),
        ("1:0:optimizer:oom", 11, &["rank 1", "step 0", "optimizer", "out of memory"]),
        ("0:0:pack:exit", 10, &["rank 0", "exit status 1"]),
    ];
    for (fault, code, fragments) in cases {
        let line = format!("--nproc 2 {SMALL_RUN} max_steps=3 fault={fault} output_dir={}", folder.path().display());
        run(&line).assert_error(fault, *code, fragments);
    }
}

/// A benchmark saves nothing, so a signal ends it directly.
#[test]
fn a_stopped_benchmark_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    fs::copy(Path::new(MODEL).join("config.json"), &config).unwrap();
    let line = format!("bench train --device cpu --nproc 2 --steps 1000000 --config_json {}", config.display());
    let mut bench = command(&line).spawn().unwrap();
    let is_at_work = |pid: &String| processor_ticks(pid) > 100;
    let at_work = || processes_of(folder.path()).iter().filter(|pid| is_at_work(pid)).count();
    wait_until(|| at_work() >= 2 || bench.try_wait().unwrap().is_some());
    signal(bench.id(), "-TERM");
    let ended = end(bench);
    assert_eq!((ended.code, processes_of(folder.path())), (Some(75), Vec::new()), "{}", ended.stderr);
}
