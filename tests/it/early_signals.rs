//! Signals that arrive before the program has installed its handlers.
#![allow(unsafe_code)]

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use colo_grpo::internal::launch::hold_signals;

/// Arguments, environment variables and expected exit code; `None` if the signal ends the program.
type Case<'a> = (Vec<&'a str>, &'a [(&'a str, &'a str)], Option<i32>);

const TRAIN: [&str; 4] = ["--config", "configs/tiny-cpu.toml", "max_steps=1", "eval_steps=none"];

/// The signal is pending when the program is loaded, so it arrives at the earliest possible moment. Commands that compute load the program
/// twice.
#[test]
fn a_signal_during_startup_ends_as_documented() {
    let folder = tempfile::tempdir().unwrap();
    let output = format!("output_dir={}", folder.path().join("run").display());
    let model = ["--model", "configs/arithmetic/model"];
    let worker = [
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ];
    let train = |more: &[&'static str]| [&TRAIN[..], more].concat();
    let cases: [Case<'_>; 7] = [
        (train(&["--nproc", "1"]), &[], Some(75)),
        (train(&["--nproc", "2"]), &[], Some(75)),
        (train(&[]), &worker, Some(75)),
        (vec!["sft", "--config", "configs/sft.toml", "max_steps=1"], &[], Some(75)),
        ([&["serve"][..], &model, &["--port", "0"]].concat(), &[], Some(0)),
        ([&["generate"][..], &model, &["--prompt", "what is one plus one ?"]].concat(), &[], None),
        (vec!["watch", "configs"], &[], Some(0)),
    ];
    for signal in [libc::SIGTERM, libc::SIGUSR1] {
        for (args, variables, code) in &cases {
            let mut command = Command::new(env!("CARGO_BIN_EXE_colo-grpo"));
            command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args).env("TMPDIR", folder.path());
            if args.iter().any(|arg| arg.starts_with("max_steps")) {
                command.arg(&output);
            }
            command.envs(variables.iter().copied()).stdin(Stdio::null());
            // SAFETY: async-signal-safe calls; the signal stays pending over the exec.
            unsafe {
                command.pre_exec(move || {
                    hold_signals();
                    libc::raise(signal);
                    Ok(())
                })
            };
            let ended = command.output().unwrap();
            let text = String::from_utf8_lossy(&ended.stderr);
            assert_eq!(ended.status.code(), *code, "{args:?}: {text}");
            assert!(code.is_some() || ended.status.signal() == Some(signal), "{args:?}: {:?}", ended.status);
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "something is left");
}
