//! Tests of the launcher with shell scripts as workers. The launcher runs in a process of its own, which is this test binary again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use colo_grpo::internal::launch::{LaunchOptions, run};

use crate::program::{await_line, wait_until};

/// The launcher's folder for temporary files, inside the test's folder.
const TEMPORARY: &str = "temporary";
const SCRIPT_VARIABLE: &str = "COLO_GRPO_TEST_LAUNCH";

/// A launcher whose workers run `sh -c script`.
struct Launcher {
    child: Child,
    folder: tempfile::TempDir,
}

struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Launcher {
    /// In the test: starts this binary again with only this test, in a folder for the workers' files. In that process:
    /// runs the launcher, and exits with its code.
    fn start(test: &str, num_workers: usize, script: &str) -> Self {
        Self::start_with(test, script, |options| options.num_workers = num_workers)
    }

    fn start_with(test: &str, script: &str, change: impl FnOnce(&mut LaunchOptions)) -> Self {
        if std::env::var_os(SCRIPT_VARIABLE).is_some() {
            let mut options = LaunchOptions::new(2, vec!["-c".into(), script.into()]);
            options.program = "sh".into();
            change(&mut options);
            std::process::exit(run(&options) as i32);
        }
        let folder = tempfile::tempdir().unwrap();
        let temporary = folder.path().join(TEMPORARY);
        fs::create_dir(&temporary).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("launch::{test}"), "--nocapture"])
            .env(SCRIPT_VARIABLE, "yes")
            .env("OMP_NUM_THREADS", "3")
            .env("TMPDIR", temporary)
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    /// Waits until `num` workers have written their files `name.RANK`, and returns the files' contents.
    fn wait_for(&self, name: &str, num: usize) -> Vec<String> {
        let files: Vec<PathBuf> = (0..num).map(|rank| self.folder.path().join(format!("{name}.{rank}"))).collect();
        let complete = |file: &PathBuf| fs::read_to_string(file).is_ok_and(|text| text.ends_with('\n'));
        wait_until(|| files.iter().all(complete));
        files.iter().map(|file| fs::read_to_string(file).unwrap()).collect()
    }

    /// Sends signals, one directly after the other.
    fn signal(&self, signals: &[&str]) {
        let kill: Vec<String> = signals.iter().map(|signal| format!("kill -{signal} {}", self.child.id())).collect();
        assert!(Command::new("sh").args(["-c", &kill.join("; ")]).status().unwrap().success());
    }

    /// Waits until the launcher has handled a signal as a stop request.
    fn await_request(&mut self, signal: &str) {
        await_line(&mut self.child, &format!("({signal}): passed on to all ranks"));
    }

    fn end(self) -> Ended {
        let output = self.child.wait_with_output().unwrap();
        Ended {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Whether a process exists and is not a zombie.
fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

/// A worker script that writes its process id and that of a child, then waits for a minute.
const LINGER: &str = "sleep 60 & echo $$ $! > pids.$RANK; wait";

#[test]
fn the_first_error_is_printed_and_all_other_processes_are_killed() {
    let report = |time_s: u32, of_peer: bool, message: &str| {
        let peer = if of_peer { "1" } else { "null" };
        format!(
            r#"{{"time_s":{time_s},"rank":'$RANK',"phase":"wake","step":3,"code":"OutOfMemory","message":"{message}","peer":{peer}}}"#
        )
    };
    let script = format!(
        "case $RANK in
         0) echo '{}' > $COLO_GRPO_ERROR_FILE; {LINGER};;
         1) while [ ! -s pids.0 ] || [ ! -s pids.2 ]; do sleep 0.02; done
            echo '{}' > $COLO_GRPO_ERROR_FILE; echo > failed.0; exit 11;;
         2) {LINGER};;
         esac",
        report(1, true, "rank 1 failed"),
        report(2, false, "out of memory"),
    );
    let test = "the_first_error_is_printed_and_all_other_processes_are_killed";
    let launcher = Launcher::start(test, 3, &script);
    launcher.wait_for("failed", 1);
    let pids: Vec<String> = [0, 2]
        .iter()
        .flat_map(|rank| {
            let text = fs::read_to_string(launcher.folder.path().join(format!("pids.{rank}"))).unwrap();
            text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(pids.len(), 4);
    let ended = launcher.end();
    assert_eq!(ended.code, Some(11), "{}", ended.stderr);
    let errors: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors, ["error: rank 1, step 3, wake: out of memory"]);
    wait_until(|| !pids.iter().any(|pid| is_alive(pid)));
}

/// Ranks that only notice another rank's failure may exit before the failed rank has reported its error.
#[test]
fn a_failed_rank_gets_time_to_report() {
    let report = |of_peer: bool, message: &str| {
        let peer = if of_peer { "1" } else { "null" };
        format!(
            r#"{{"time_s":1,"rank":'$RANK',"phase":"wake","step":3,"code":"OutOfMemory","message":"{message}","peer":{peer}}}"#
        )
    };
    let script = format!(
        "case $RANK in
         0) echo '{}' > $COLO_GRPO_ERROR_FILE; exit 11;;
         1) sleep 1; echo '{}' > $COLO_GRPO_ERROR_FILE; exit 11;;
         esac",
        report(true, "rank 1 failed"),
        report(false, "out of memory"),
    );
    let ended = Launcher::start("a_failed_rank_gets_time_to_report", 2, &script).end();
    assert_eq!(ended.code, Some(11), "{}", ended.stderr);
    assert!(ended.stderr.contains("error: rank 1, step 3, wake: out of memory"), "{}", ended.stderr);
}

#[test]
fn a_rank_killed_by_a_signal_is_named() {
    let script = format!("if [ $RANK = 1 ]; then echo > failed.0; kill -9 $$; fi; {LINGER}");
    let launcher = Launcher::start("a_rank_killed_by_a_signal_is_named", 2, &script);
    launcher.wait_for("failed", 1);
    let ended = launcher.end();
    assert_eq!(ended.code, Some(10));
    assert!(ended.stderr.contains("error: rank 1 died: signal 9 (SIGKILL)"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("rank 0 died"), "{}", ended.stderr);
}

#[test]
fn an_exit_status_without_a_report_becomes_that_of_the_run() {
    let launcher = Launcher::start("an_exit_status_without_a_report_becomes_that_of_the_run", 2, "exit $((RANK * 3))");
    let ended = launcher.end();
    assert_eq!(ended.code, Some(3));
    assert!(ended.stderr.contains("rank 1 died: exit status 3"), "{}", ended.stderr);
}

#[test]
fn output_of_ranks_above_0_is_prefixed() {
    let script = "echo hello $LOCAL_RANK/$LOCAL_WORLD_SIZE $WORLD_SIZE $MASTER_ADDR $OMP_NUM_THREADS; echo oops >&2; printf '\\033[2J\\n' >&2";
    let ended = Launcher::start("output_of_ranks_above_0_is_prefixed", 2, script).end();
    assert_eq!(ended.code, Some(0));
    for (rank, prefix) in [(0, ""), (1, "[rank 1] ")] {
        let line = format!("{prefix}hello {rank}/2 2 127.0.0.1 3");
        assert!(ended.stdout.lines().any(|found| found == line), "{}", ended.stdout);
        assert!(ended.stderr.lines().any(|found| found == format!("{prefix}oops")), "{}", ended.stderr);
    }
    assert!(
        ended.stderr.contains("[rank 1] \\u001b[2J") && !ended.stderr.contains("[rank 1] \u{1b}"),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_signal_is_forwarded_and_the_run_ends_as_preempted() {
    let script = "trap 'kill $child; exit 75' TERM; sleep 60 & child=$!; echo > ready.$RANK; wait";
    let launcher = Launcher::start("a_signal_is_forwarded_and_the_run_ends_as_preempted", 2, script);
    launcher.wait_for("ready", 2);
    launcher.signal(&["TERM"]);
    let ended = launcher.end();
    assert_eq!(ended.code, Some(75), "{}", ended.stderr);
    assert!(!ended.stderr.contains("error"), "{}", ended.stderr);
}

/// Row 37: `timeout` sends its signal to the program and to its process group; closing a terminal sends signals, too.
#[test]
fn simultaneous_signals_are_one_request_to_save() {
    let script = "trap 'kill $child; exit 75' TERM HUP INT USR1; sleep 60 & child=$!; echo > ready.$RANK; wait";
    for signals in [&["TERM", "USR1", "INT"][..], &["HUP", "TERM"]] {
        let launcher = Launcher::start("simultaneous_signals_are_one_request_to_save", 2, script);
        launcher.wait_for("ready", 2);
        launcher.signal(signals);
        let ended = launcher.end();
        assert_eq!(ended.code, Some(75), "{signals:?}: {}", ended.stderr);
        assert_eq!(ended.stderr.matches("passed on to all ranks").count(), 1, "{}", ended.stderr);
    }
}

/// Waits so long that a further signal counts as a new request.
fn let_the_second_pass() {
    std::thread::sleep(Duration::from_millis(1100)); // that it may last longer does no harm
}

#[test]
fn a_second_signal_kills_the_run() {
    let script = format!("trap '' TERM USR1; {LINGER}");
    let mut launcher = Launcher::start("a_second_signal_kills_the_run", 2, &script);
    let pids = launcher.wait_for("pids", 2).join(" ");
    launcher.signal(&["USR1"]);
    launcher.await_request("SIGUSR1");
    assert!(pids.split_whitespace().all(is_alive));
    let_the_second_pass();
    launcher.signal(&["TERM"]);
    let ended = launcher.end();
    assert_eq!(ended.code, Some(130));
    wait_until(|| !pids.split_whitespace().any(is_alive));
}

#[test]
fn workers_die_with_their_launcher() {
    let script = "echo $$ > pids.$RANK; read forever < fifo";
    let script = format!("[ -p fifo ] || mkfifo fifo 2>/dev/null; {script}");
    let mut launcher = Launcher::start("workers_die_with_their_launcher", 2, &script);
    let pids: Vec<String> = launcher.wait_for("pids", 2).iter().map(|text| text.trim().to_owned()).collect();
    assert!(pids.iter().all(|pid| is_alive(pid)));
    launcher.child.kill().unwrap();
    launcher.child.wait().unwrap();
    wait_until(|| !pids.iter().any(|pid| is_alive(pid)));
    // 38: what workers leave for it and share has no name.
    assert_eq!(fs::read_dir(launcher.folder.path().join(TEMPORARY)).unwrap().count(), 0);
}

#[test]
fn a_run_is_restarted_max_restarts_times() {
    let test = "a_run_is_restarted_max_restarts_times";
    let script = "echo $TORCHELASTIC_RESTART_COUNT $* >> starts.$RANK; [ $RANK = 0 ] || kill -9 $$; sleep 60";
    let launcher = Launcher::start_with(test, script, |options| options.max_restarts = 2);
    let starts = launcher.folder.path().join("starts.1");
    let wait = |lines: usize| fs::read_to_string(&starts).is_ok_and(|text| text.lines().count() >= lines);
    wait_until(|| wait(3));
    let ended = launcher.end();
    assert_eq!(ended.code, Some(10));
    assert_eq!(ended.stderr.matches("error: rank 1 died: signal 9").count(), 3, "{}", ended.stderr);
    let from = "from the beginning, as no checkpoint was saved";
    for text in [format!("restart 1 of 2 {from}"), format!("restart 2 of 2 {from}")] {
        assert!(ended.stderr.contains(&text), "{}", ended.stderr);
    }
}

#[test]
fn a_signal_during_startup_is_not_a_failure() {
    let script = "echo > ready.$RANK; exec sleep 60";
    let launcher = Launcher::start("a_signal_during_startup_is_not_a_failure", 2, script);
    launcher.wait_for("ready", 2);
    launcher.signal(&["USR1"]);
    let ended = launcher.end();
    assert_eq!(ended.code, Some(75), "{}", ended.stderr);
    assert!(ended.stderr.contains("stopped by a signal before there was anything to save"), "{}", ended.stderr);
}

#[test]
fn a_given_port_in_use_ends_the_launch() {
    // The launcher's own process takes a port first and then asks for it.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let launcher = Launcher::start_with("a_given_port_in_use_ends_the_launch", "true", |options| {
        options.master_port = Some(port);
    });
    let ended = launcher.end();
    assert_eq!(ended.code, Some(4), "{}", ended.stderr);
    assert!(ended.stderr.contains("error: cannot listen on --master_port"), "{}", ended.stderr);
}

#[test]
fn more_workers_than_gpus_are_refused() {
    let launcher = Launcher::start_with("more_workers_than_gpus_are_refused", "true", |options| {
        options.num_workers = 1000;
        options.needs_cuda = true;
    });
    let ended = launcher.end();
    assert_eq!(ended.code, Some(4));
    assert!(ended.stderr.contains("--nproc 1000 needs more GPUs than are visible"), "{}", ended.stderr);
}
