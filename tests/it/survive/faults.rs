//! Single faults in runs of the program. Numbers in comments are rows of docs/faults.md.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::program::{Ended, MODEL, SMALL_RUN, command, end, metrics, run};

fn out(folder: &Path) -> String {
    format!("output_dir={}", folder.join("run").display())
}

/// Runs the program with the words of `line`, in a shell that executed `before`.
fn run_after(before: &str, line: &str) -> Ended {
    let mut shell = command("");
    let (program, root) = (shell.get_program().to_owned(), shell.get_current_dir().unwrap().to_owned());
    shell = Command::new("sh");
    shell.args(["-c", &format!("{before}; exec \"$0\" \"$@\"")]).arg(program).args(line.split_whitespace());
    shell.current_dir(root).env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
    end(shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// Row 2: the state of every rank is reported before all are killed, and the hanging rank is named.
#[test]
fn a_hanging_rank_is_found_and_all_ranks_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let fault = "max_steps=3 heartbeat.forward_backward_s=4 fault=1:1:forward_backward:hang";
    let ended = run(&format!("--nproc 2 {SMALL_RUN} {fault} {}", out(folder.path())));
    ended.assert_error("hang", 15, &["no progress", "error: rank 1, step 1, forward_backward: no heartbeat for "]);
    let line = |rank: usize| ended.stderr.lines().find(|line| line.starts_with(&format!("  rank {rank}: "))).unwrap();
    assert!(line(0).contains("in group '") && line(0).contains("waiting for peers; process "), "{}", line(0));
    assert!(line(1).starts_with("  rank 1: step 1, forward_backward; collective "), "{}", line(1));

    // Without a launcher the process watches itself.
    let alone =
        run(&format!("{SMALL_RUN} {} output_dir={}/alone", fault.replace("1:1:", "0:1:"), folder.path().display()));
    alone.assert_error("hang of one", 15, &["error: rank 0, step 1, forward_backward: no heartbeat for "]);
}

/// Row 1: the run continues from its newest checkpoint as if it had not been interrupted.
#[test]
fn a_crashed_run_restarts_from_its_newest_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let steps = "--nproc 2 max_steps=4 save_steps=1 save_async=false";
    let fault = "max_restarts=2 fault=1:2:generate:kill";
    let ended = run(&format!("{SMALL_RUN} {steps} {fault} {}", out(folder.path())));
    ended.assert_error("killed once", 0, &["error: rank 1, step 2, generate: rank 1 died: signal 9 (SIGKILL)"]);
    assert!(ended.stderr.contains("restart 1 of 2 from the newest checkpoint\n"), "{}", ended.stderr);
    assert!(ended.stderr.contains("checkpoint-2\n"), "{}", ended.stderr);
    let straight = folder.path().join("straight");
    assert_eq!(run(&format!("{SMALL_RUN} {steps} output_dir={}", straight.display())).code, Some(0));
    let left = |run: &Path| fs::read(run.join("final/model.safetensors")).unwrap();
    assert!(left(&folder.path().join("run")) == left(&straight));
    assert_eq!(metrics(&folder.path().join("run")).len(), 4);
    // What would fail again is not tried again.
    let wrong = run(&format!("--nproc 2 {SMALL_RUN} max_restarts=2 fault=0:0:wake:oom {}/wrong", out(folder.path())));
    wrong.assert_error("not worth a restart", 11, &["rank 0, step 0, wake: out of memory: injected in wake"]);
}

/// Rows 5 and 6: the message lists the memory's users and names a configuration key that reduces memory.
#[test]
fn out_of_memory_names_the_owner_and_the_key_to_lower() {
    let folder = tempfile::tempdir().unwrap();
    for (phase, key) in [("wake", "kv_cache_bytes"), ("forward_backward", "max_tokens_per_micro_batch")] {
        let ended = run(&format!("{SMALL_RUN} fault=0:0:{phase}:oom {}/{phase}", out(folder.path())));
        ended.assert_error(phase, 11, &[&format!("step 0, {phase}: out of memory"), "policy_weights ", key]);
    }
}

/// Row 6: libtorch cannot allocate a tensor. The process's address space is limited so that a small run fits and a large
/// batch does not.
#[test]
fn a_failed_allocation_in_training_is_reported_as_out_of_memory() {
    let folder = tempfile::tempdir().unwrap();
    let large = "per_device_train_batch_size=2560 num_generations=16 max_tokens_per_micro_batch=1000000 kv_cache_bytes=33554432";
    // A backtrace takes memory that is not to be had, and every thread's own heap takes addresses, as many as happen to be made.
    let before = "export RUST_BACKTRACE=0 MALLOC_ARENA_MAX=1; ulimit -v 1250000";
    let ended = run_after(before, &format!("{SMALL_RUN} {large} {}", out(folder.path())));
    assert_eq!(ended.code, Some(11), "{}", ended.stderr);
    let told = ended.stderr.lines().last().unwrap();
    for part in ["error: step 0, ", "out of memory: a tensor in ", "(held: ", "policy_weights 3 MiB", "to mend: "] {
        assert!(told.contains(part), "no '{part}' in {told}");
    }
}

/// Row 8: the incomplete checkpoint is removed, earlier ones are kept, and the exit code is the one for storage errors.
#[test]
fn a_failed_checkpoint_save_keeps_the_old_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL_RUN} save_steps=1 {}", out(folder.path()));
    assert_eq!(run(&line).code, Some(0));
    // Files end at 2 MiB, as on a disk that is full; the model has 3.
    for how in ["save_async=true", "save_async=false"] {
        let more = format!("{line} max_steps=3 resume_from_checkpoint=latest {how}");
        let ended = run_after("ulimit -f 4096", &more);
        ended.assert_error(how, 12, &["checkpoint-2.tmp", "File too large", "(ulimit -f); raise the limit"]);
        let mut names: Vec<String> = fs::read_dir(folder.path().join("run"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.contains("checkpoint-"))
            .collect();
        names.sort();
        assert_eq!(names, ["checkpoint-1"], "{how}");
    }
    let goes_on = run(&format!("{line} max_steps=2 resume_from_checkpoint=latest"));
    assert_eq!(goes_on.code, Some(0), "{}", goes_on.stderr);
}

/// Rows 8 and 9: the model's folder contains either the complete new model or the complete previous one.
#[test]
fn a_failed_model_save_keeps_the_previous_model() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL_RUN} save_steps=none {}", out(folder.path()));
    assert_eq!(run(&line).code, Some(0));
    let model = folder.path().join("run/final");
    let weights = || fs::read(model.join("model.safetensors")).unwrap();
    let before = weights();
    let full = run_after("ulimit -f 4096", &format!("{line} seed=7"));
    full.assert_error("a full disk", 12, &["final.tmp", "File too large"]);
    let killed = run(&format!("--nproc 2 {line} seed=7 fault=0:0:checkpoint:kill"));
    killed.assert_error("killed", 10, &["checkpoint: rank 0 died"]);
    assert!(weights() == before && model.join("tokenizer.json").exists());
    assert_eq!(run(&format!("{line} seed=7")).code, Some(0));
    assert!(weights() != before);
    let names = fs::read_dir(folder.path().join("run")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
    assert_eq!(left, [".lock"]);
}

/// Rows 1 and 2: commands that only sample are monitored like training.
#[test]
fn a_rank_failing_while_sampling_ends_all_ranks() {
    for (fault, code, told) in [
        ("1:0:decode:hang", 15, "error: rank 1, step 0, decode: no heartbeat for "),
        ("1:0:decode:panic", 10, "rank 1, step 0, decode: panic in the program: injected panic in decode"),
        ("0:0:load:kill", 10, "rank 0, step 0, load: rank 0 died: signal 9 (SIGKILL)"),
    ] {
        let ended = run(&format!(
            "generate --nproc 2 --model {MODEL} --prompt what --prompt what --heartbeat-timeout-s 10 --fault {fault}"
        ));
        ended.assert_error(fault, code, &[told]);
    }
}

/// Row 27: a NaN in one rank's gradient skips the update on all ranks; too many skips in a row end the run.
#[test]
fn non_finite_updates_are_skipped_and_five_in_a_row_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let nan = |step: &str, more: &str| {
        run(&format!("--nproc 2 {SMALL_RUN} fault=1:{step}:forward_backward:nan {more} {}", out(folder.path())))
    };
    let once = nan("1", "max_steps=3 save_steps=none");
    assert_eq!(once.code, Some(0), "{}", once.stderr);
    assert!(
        once.stderr.contains("update 2: the loss or gradient is not finite; the update is skipped on all ranks"),
        "{}",
        once.stderr
    );
    let run_dir = folder.path().join("run");
    let lines = metrics(&run_dir);
    let skipped: Vec<_> = lines.iter().map(|line| line["num_skipped_updates"].as_f64().unwrap()).collect();
    assert_eq!(skipped, [0.0, 1.0, 0.0]);
    assert!(lines[2]["loss"].is_number(), "{}", lines[2]);
    for rank in 0..2 {
        let dump = fs::read(run_dir.join(format!("non_finite/update_00002_rank_0000{rank}.json"))).unwrap();
        let dump: Value = serde_json::from_slice(&dump).unwrap();
        assert_eq!(dump["sequences"].as_array().unwrap().len(), 8);
        assert!(dump["sequences"][0]["token_ids"].as_array().is_some_and(|ids| ids.len() > 3), "{dump}");
    }
    let often = nan("1+", "max_steps=20 save_steps=none");
    often.assert_error(
        "often",
        13,
        &["5 updates in a row", "the last at step 6", "lower learning_rate", "non_finite/"],
    );
}

/// Rows 7 and 38: ranks use anonymous shared memory, so that /dev/shm neither limits it nor keeps any of it.
#[test]
fn ranks_need_no_space_in_dev_shm() {
    let has_namespaces = Command::new("unshare").args(["-rm", "true"]).status().is_ok_and(|status| status.success());
    if !has_namespaces {
        eprintln!("skipped: no namespaces to mount another /dev/shm in");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let line = format!("--nproc 4 {SMALL_RUN} per_device_train_batch_size=8 {}", out(folder.path()));
    let mut shell = command("");
    let program = shell.get_program().to_owned();
    shell = Command::new("unshare");
    shell.args(["-rm", "sh", "-c", "mount -t tmpfs -o ro none /dev/shm && exec \"$0\" \"$@\""]);
    shell.arg(program).args(line.split_whitespace()).current_dir(env!("CARGO_MANIFEST_DIR"));
    let ended = end(shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

/// Row 7: shared memory cannot be allocated, here because of `ulimit -f`.
#[test]
fn missing_shared_memory_is_reported_before_the_launch() {
    let folder = tempfile::tempdir().unwrap();
    let ended = run_after("ulimit -f 1024", &format!("--nproc 2 {SMALL_RUN} {}", out(folder.path())));
    ended.assert_error(
        "limit",
        4,
        &[
            "shared memory of ",
            " bytes for collectives of 2 ranks: File too large",
            "524288 bytes (ulimit -f); raise the limit",
        ],
    );
}

/// Row 33: metrics.jsonl is the primary log; another destination may fail.
#[test]
fn a_logger_that_fails_does_not_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().join("run");
    fs::create_dir(&run_dir).unwrap();
    fs::write(run_dir.join("tensorboard"), "a file where a folder should be").unwrap();
    let ended = run(&format!("{SMALL_RUN} {}", out(folder.path())));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("cannot write tensorboard: ").count(), 1, "{}", ended.stderr);
    assert_eq!(metrics(&run_dir).len(), 1);
}

/// Sizes that overflow 64-bit arithmetic are rejected.
#[test]
fn overflowing_numbers_are_refused() {
    let keys = [
        "num_generations",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
        "num_iterations",
        "max_tokens_per_micro_batch",
        "max_completion_length",
        "max_model_length",
        "tensor_parallel_size",
        "kv_cache_bytes",
        "kv_block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "warmup_steps",
    ];
    for key in keys {
        for value in ["9223372036854775807", "2147483648"] {
            let ended = run(&format!("plan --nproc 2 {SMALL_RUN} {key}={value}"));
            let accepted = ended.code == Some(0) && value == "2147483648"; // a bound that is never reached
            assert!(accepted || matches!(ended.code, Some(2 | 4)), "{key}={value}: {:?}\n{}", ended.code, ended.stderr);
            assert!(!ended.stderr.contains("panic"), "{key}={value}\n{}", ended.stderr);
        }
    }
}
