//! Events outside of a run: its terminal is closed, its files are deleted, its program file is replaced. Numbers in comments are rows of
//! docs/faults.md.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use colo_grpo::internal::process::Scratch;

use crate::program::{MODEL, SMALL_RUN, command, end, metrics, processes_of, signal, wait_until};

const LEFT_VARIABLE: &str = "COLO_GRPO_TEST_LEAVES";

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// Row 36: a run does not end because its messages cannot be written.
#[test]
fn a_run_continues_when_its_messages_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    for (name, more) in [("one", ""), ("two", "--nproc 2")] {
        for is_full in [false, true] {
            let output_dir = folder.path().join(format!("{name}-{is_full}"));
            let line = format!("{SMALL_RUN} {more} max_steps=3 save_steps=none output_dir={}", output_dir.display());
            let mut started = command(&line);
            if is_full {
                started.stderr(full()).stdout(full());
            }
            let mut started = started.spawn().unwrap();
            drop((started.stderr.take(), started.stdout.take())); // the readers leave
            assert_eq!(started.wait().unwrap().code(), Some(0), "{line}, full: {is_full}");
            assert_eq!(metrics(&output_dir).len(), 3);
            assert!(output_dir.join("final/model.safetensors").exists());
        }
    }
}

/// Rows 4 and 36: `program 2>&1 | tee log`, where a signal ends `tee` first, or the terminal is closed.
#[test]
fn a_run_stopped_after_its_reader_exited_still_saves() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["-INT", "-HUP"] {
        let output_dir = folder.path().join(name);
        let line = format!("{SMALL_RUN} max_steps=100000 save_steps=none output_dir={}", output_dir.display());
        let program = command(&line);
        let mut started = Command::new("env"); // under `nohup` the tests ignore HUP, and so would the run
        started.arg("--default-signal=HUP").arg(program.get_program()).args(program.get_args());
        started.env("OMP_NUM_THREADS", "1").current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
        let mut started = started.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop((started.stderr.take(), started.stdout.take()));
        wait_until(|| !metrics(&output_dir).is_empty() || started.try_wait().unwrap().is_some());
        signal(started.id(), name);
        assert_eq!(started.wait().unwrap().code(), Some(75), "{name}");
        let step = &metrics(&output_dir).pop().unwrap()["step"];
        assert!(output_dir.join(format!("checkpoint-{step}/trainer_state.json")).exists(), "{name}");
    }
}

/// Row 36: it is an error if results are only written to standard output and this fails, but not if they are also saved.
#[test]
fn a_full_standard_output_is_an_error_if_results_are_lost() {
    let folder = tempfile::tempdir().unwrap();
    let sampled = format!("generate --model {MODEL} --prompt what --max-completion-length 2");
    for line in [sampled.as_str(), "config"] {
        let ended = end(command(line).stdout(full()).spawn().unwrap());
        ended.assert_error(line, 12, &["standard output: No space left on device"]);
    }
    let line = format!("{SMALL_RUN} save_steps=none output_dir={}", folder.path().join("run").display());
    let trained = end(command(&line).stdout(full()).spawn().unwrap());
    assert_eq!(trained.code, Some(0), "{}", trained.stderr);
    assert!(trained.stderr.contains("warning: standard output: No space left"), "{}", trained.stderr);
}

/// Text from other sources cannot send control codes to the terminal.
#[test]
fn escape_codes_reach_the_terminal_as_text() {
    let mut refused = command("plan");
    refused.arg("x\u{1b}]0;owned\u{7}\u{9b}31m=1");
    let ended = end(refused.spawn().unwrap());
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(!ended.stderr.contains(['\u{1b}', '\u{7}', '\u{9b}']), "{}", ended.stderr.escape_debug());
    assert!(ended.stderr.contains("x\\u001b]0;owned\\u0007\\u009b31m"), "{}", ended.stderr);
}

#[test]
fn arguments_that_are_not_utf8_are_named() {
    let mut refused = command("plan");
    refused.arg(OsStr::from_bytes(b"output_dir=\xff"));
    let ended = end(refused.spawn().unwrap());
    ended.assert_error("bytes", 2, &["argument 2 = \"output_dir=\\xFF\"", "UTF-8"]);
}

/// Row 1: a restart runs the original program, not a file that now has its name.
#[test]
fn a_restart_uses_the_original_program_file() {
    let folder = tempfile::tempdir().unwrap();
    let (program, output_dir) = (folder.path().join("colo-grpo"), folder.path().join("run"));
    fs::copy(command("").get_program(), &program).unwrap();
    let line = format!(
        "--nproc 2 {SMALL_RUN} max_steps=3 save_steps=1 save_async=false max_restarts=1 fault=1:1:generate:kill output_dir={}",
        output_dir.display()
    );
    let mut started = Command::new(&program);
    started.args(line.split_whitespace()).env("OMP_NUM_THREADS", "1").current_dir(env!("CARGO_MANIFEST_DIR"));
    started.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut started = started.spawn().unwrap();
    wait_until(|| output_dir.join("run_config.json").exists() || started.try_wait().unwrap().is_some());
    let other = folder.path().join("other");
    fs::write(&other, "another program").unwrap();
    fs::rename(other, &program).unwrap();
    let ended = end(started);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("restart 1 of 1"), "{}", ended.stderr);
    assert_eq!(metrics(&output_dir).len(), 3);
}

/// Row 8: if the output folder is deleted or moved during the run, it is created again and a message says so.
#[test]
fn a_deleted_output_folder_is_created_again() {
    let folder = tempfile::tempdir().unwrap();
    let (output_dir, moved) = (folder.path().join("run"), folder.path().join("moved"));
    let steps = "max_steps=60 save_steps=30 logging_steps=1";
    let line = format!("{SMALL_RUN} {steps} output_dir={}", output_dir.display());
    let mut started = command(&line).spawn().unwrap();
    wait_until(|| !metrics(&output_dir).is_empty() || started.try_wait().unwrap().is_some());
    fs::rename(&output_dir, &moved).unwrap();
    fs::remove_dir_all(&moved).unwrap();
    let ended = end(started);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("was deleted or moved: creating it again"), "{}", ended.stderr);
    assert_eq!(metrics(&output_dir).len(), 60);
    for file in ["final/model.safetensors", "report.html", "run_config.json", "checkpoint-60/manifest.json", ".lock"] {
        assert!(output_dir.join(file).exists(), "{file}");
    }
}

/// Row 38: the next start removes temporary folders of killed processes.
#[test]
fn temporary_folders_of_dead_processes_are_removed_at_start() {
    if let Some(done) = std::env::var_os(LEFT_VARIABLE) {
        let scratch = Scratch::new().unwrap();
        fs::write(scratch.path().join("file"), "").unwrap();
        fs::write(done, "").unwrap();
        loop {
            std::thread::park();
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let (temporary, done) = (folder.path().join("temporary"), folder.path().join("done"));
    fs::create_dir(&temporary).unwrap();
    let test = "survive::outside::temporary_folders_of_dead_processes_are_removed_at_start";
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .envs([(LEFT_VARIABLE, &done), ("TMPDIR", &temporary)])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_until(|| done.exists() || owner.try_wait().unwrap().is_some());
    let start = || assert_eq!(end(command("config").env("TMPDIR", &temporary).spawn().unwrap()).code, Some(0));
    let num_left = || fs::read_dir(&temporary).unwrap().count();
    start();
    assert_eq!(num_left(), 1, "its owner lives");
    owner.kill().unwrap();
    owner.wait().unwrap();
    start();
    assert_eq!(num_left(), 0);
}

/// A run interrupted at any moment of its start leaves no files outside of its output folder.
#[test]
fn an_interrupted_start_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let temporary = folder.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    let mut program = command(&format!("--nproc 2 {SMALL_RUN} output_dir={}/run", folder.path().display()));
    let mut started = program.env("TMPDIR", &temporary).spawn().unwrap();
    let shared = || shared_memory_of(&processes_of(folder.path()));
    wait_until(|| shared().len() == 2 || started.try_wait().unwrap().is_some());
    let names = shared();
    started.kill().unwrap();
    started.wait().unwrap();
    wait_until(|| processes_of(folder.path()).is_empty());
    assert_eq!(names, ["/memfd:colo-grpo-world", "/memfd:colo-grpo-world"]);
    assert_eq!(fs::read_dir(temporary).unwrap().count(), 0);
}

/// Names of the shared memory of these processes, one per process.
fn shared_memory_of(pids: &[String]) -> Vec<String> {
    let maps = |pid: &String| fs::read_to_string(Path::new("/proc").join(pid).join("maps")).unwrap_or_default();
    let is_shared = |name: &&str| name.starts_with("/dev/shm/") || name.contains("colo-grpo-world");
    let name = |maps: String| {
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(is_shared).map(str::to_owned)
    };
    pids.iter().map(maps).filter_map(name).collect()
}
