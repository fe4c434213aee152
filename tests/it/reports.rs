//! Reports to W&B and trackio: all metrics arrive, and a run does not depend on the service.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use crate::program::{Ended, SMALL_RUN, command, end, json_lines, metrics};

/// A fake of the service's Python module, which writes each call as a line.
const MODULE: &str = "
import json, os
class Run: id = 'run-1'
def write(line): print(json.dumps(line), file=open(os.environ['CALLS'], 'a'))
def init(**options):
    write({'init': {key: options[key] for key in ('project', 'name', 'resume')}, 'seed': options['config']['seed']})
    return Run
def log(values, step): write({'step': step, **values})
def finish(): write({'finish': True})
";

fn run(folder: &Path, module: &str, more: &str) -> Ended {
    let service = if more.contains("trackio") { "trackio.py" } else { "wandb.py" };
    fs::write(folder.join(service), module).unwrap();
    let mut command = command(&format!("{SMALL_RUN} max_steps=3 output_dir={} {more}", folder.join("out").display()));
    command.env("PYTHONPATH", folder).env("CALLS", folder.join("calls")).env_remove("WANDB_PROJECT");
    end(command.spawn().unwrap())
}

#[test]
fn every_metric_line_reaches_wandb_with_transformers_names() {
    let folder = tempfile::tempdir().unwrap();
    let ended = run(folder.path(), MODULE, "report_to=wandb run_name=first");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let calls = json_lines(&fs::read_to_string(folder.path().join("calls")).unwrap());
    assert_eq!(calls[0]["init"], serde_json::json!({"project": "colo-grpo", "name": "first", "resume": "allow"}));
    assert_eq!((&calls[0]["seed"], calls.last().unwrap()), (&Value::from(42), &serde_json::json!({"finish": true})));
    let lines = metrics(&folder.path().join("out"));
    assert_eq!(calls.len(), lines.len() + 2);
    for (line, call) in lines.iter().zip(&calls[1..]) {
        assert_eq!(
            (&line["step"], &line["reward"], &line["step"]),
            (&call["step"], &call["train/reward"], &call["train/global_step"])
        );
    }
    assert!(!folder.path().join("out/tensorboard").exists(), "nobody asked for it");
}

/// trackio has wandb's functions, but reads the project's name from its own environment variable and has no run ids.
#[test]
fn every_metric_line_reaches_trackio() {
    let folder = tempfile::tempdir().unwrap();
    let module = MODULE.replace("class Run: id = 'run-1'", "").replace("return Run", "assert 'id' not in options");
    let ended = run(folder.path(), &module, "report_to=trackio");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let calls = json_lines(&fs::read_to_string(folder.path().join("calls")).unwrap());
    assert_eq!(calls[0]["init"], serde_json::json!({"project": "colo-grpo", "name": "out", "resume": "allow"}));
    let lines = metrics(&folder.path().join("out"));
    let steps = |lines: &[Value]| lines.iter().map(|line| line["step"].clone()).collect::<Vec<_>>();
    assert_eq!(steps(&calls[1..calls.len() - 1]), steps(&lines));
    assert_eq!(calls.last().unwrap(), &serde_json::json!({"finish": true}));
    assert!(calls[1..].iter().any(|call| call["train/reward"].is_number()), "{calls:?}");
}

#[test]
fn a_failing_reporting_service_is_reported_once() {
    for (module, more, told) in [
        ("import os\nos._exit(3)", "report_to=wandb", "report_to wandb: its process ended with exit status: 3"),
        ("", "report_to=[\"tensorboard\",\"no_such_service\"]", "a list [..] of tensorboard, wandb, trackio"),
        (
            "raise ModuleNotFoundError('No module named wandb')",
            "report_to=wandb",
            "install with: python3 -m pip install wandb",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let ended = run(folder.path(), module, more);
        let is_refused = more.contains("no_such_service");
        assert_eq!(ended.code, Some(if is_refused { 2 } else { 0 }), "{}", ended.stderr);
        assert_eq!(ended.stderr.matches(told).count(), 1, "{}", ended.stderr);
        if !is_refused {
            assert_eq!(metrics(&folder.path().join("out")).len(), 3);
        }
    }
}

/// A missing Python package is reported before a model is loaded; `all` uses only the installed services.
#[test]
fn a_missing_reporting_package_is_reported_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("bare");
    fs::write(&python, "#!/bin/sh\nexec python3 -I -S \"$@\"\n").unwrap();
    fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    fs::create_dir(folder.path().join("wandb")).unwrap(); // what W&B leaves behind is no module
    let keys = format!(
        "{SMALL_RUN} max_steps=1 reward.python={} output_dir={}",
        python.display(),
        folder.path().join("out").display()
    );
    let refused = end(command(&format!("{keys} report_to=wandb")).spawn().unwrap());
    let installs = format!("{} -m pip install wandb", python.display());
    refused.assert_error("wandb", 2, &["report_to = wandb", &installs, "(command line)"]);
    assert!(!folder.path().join("out").exists());
    let ended = run(folder.path(), MODULE, "report_to=all");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("report_to = all skips trackio"), "{}", ended.stderr);
    let calls = json_lines(&fs::read_to_string(folder.path().join("calls")).unwrap());
    assert_eq!(calls.last().unwrap(), &serde_json::json!({"finish": true}), "wandb is there");
}

/// A run, its report and a watcher do not follow links below the output folder. The folder itself may be a link.
#[test]
fn symbolic_links_in_the_output_folder_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (outside, secret) = (path("outside"), path("outside/secret"));
    fs::create_dir_all(&outside).unwrap();
    fs::write(&secret, "secret").unwrap();
    let plant = |files: &[&str], folders: &[&str]| {
        let _ = fs::remove_dir_all(path("real"));
        fs::create_dir(path("real")).unwrap();
        files.iter().for_each(|name| symlink(&secret, path("real").join(name)).unwrap());
        folders.iter().for_each(|name| symlink(&outside, path("real").join(name)).unwrap());
    };
    symlink(path("real"), path("run")).unwrap();
    let train = |more: &str| {
        let keys = format!("{SMALL_RUN} max_steps=2 log_completions=true report_to=tensorboard {more}");
        end(command(&format!("{keys} output_dir={}", path("run").display())).spawn().unwrap())
    };
    plant(
        &[
            "metrics.jsonl",
            "metrics.jsonl.old",
            "run_config.json",
            "report.html",
            ".report.html.tmp",
            ".run_config.json.tmp",
        ],
        &["completions", "ranks", "tensorboard"],
    );
    let ended = train("");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for name in ["completions", "tensorboard"] {
        assert!(
            ended.stderr.contains(&format!("{name} is a symbolic link, which could lead out of its folder")),
            "{}",
            ended.stderr
        );
    }
    assert!(metrics(&path("run")).len() == 2 && fs::read_to_string(path("run/report.html")).unwrap().contains("<svg"));
    plant(&[".lock"], &[]);
    train("").assert_error("lock", 12, &[".lock is a symbolic link"]);
    plant(&[], &["trace"]);
    train("trace=true").assert_error("trace", 12, &["trace is a symbolic link"]);
    let names: Vec<_> = fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!((names, fs::read_to_string(&secret).unwrap()), (vec!["secret".into()], "secret".to_owned()));
}
