//! Malicious model folders, configurations and rows give the documented exit code and a message that names the file, and need no more memory and
//! time than a valid run. Numbers in comments are rows of the table in docs/faults.md.
#![allow(unsafe_code)]

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::ExitStatus;

use rustix::fs::{CWD, FileType, Mode};
use serde_json::json;

use crate::hostile::footer;
use crate::program::{Ended, SMALL_RUN, command, copy_of_model, end};

/// CPU time limit of the program in seconds; a valid run takes a few.
const CPU_S: u64 = 20;
/// Memory that a hostile file may need in addition to that of a valid run.
const EXTRA_KIB: i64 = 256 << 10;

/// Runs the program with a CPU time limit. Returns its result and the peak resident memory in KiB.
#[allow(clippy::zombie_processes)] // wait4 waits
fn measured(line: &str) -> (Ended, i64) {
    let mut command = command(line);
    let limit = libc::rlimit { rlim_cur: CPU_S, rlim_max: CPU_S };
    // SAFETY: setrlimit may be called between fork and exec.
    unsafe {
        command.pre_exec(move || match libc::setrlimit(libc::RLIMIT_CPU, &limit) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut child = command.spawn().unwrap();
    let pipes = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let text = |pipe| std::io::read_to_string(pipe).unwrap();
    let (stdout, stderr) = std::thread::scope(|scope| {
        let stdout = scope.spawn(|| std::io::read_to_string(pipes.0).unwrap());
        let stderr = text(pipes.1);
        (stdout.join().unwrap(), stderr)
    });
    let mut status = 0;
    // SAFETY: rusage is plain numbers, for which zeros are valid; both pointers live for the call.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::wait4(child.id() as i32, &mut status, 0, &mut usage), child.id() as i32);
        usage
    };
    (Ended { code: ExitStatus::from_raw(status).code(), stdout, stderr }, usage.ru_maxrss)
}

fn pipe(path: &Path) {
    let _ = fs::remove_file(path);
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

fn zeros(path: &Path) {
    let _ = fs::remove_file(path);
    symlink("/dev/zero", path).unwrap();
}

fn honest_kib() -> i64 {
    let folder = tempfile::tempdir().unwrap();
    let (ended, peak_kib) =
        measured(&format!("{SMALL_RUN} max_train_samples=4096 output_dir={}", folder.path().display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    peak_kib
}

#[test]
fn hostile_files_are_refused_in_bounded_time_and_memory() {
    let folder = tempfile::tempdir().unwrap();
    let allowed_kib = honest_kib() + EXTRA_KIB;
    let check = |what: &str, line: &str, code: i32, fragments: &[&str]| {
        let (ended, peak_kib) = measured(&format!("{line} output_dir={}", folder.path().join("out").display()));
        ended.assert_error(what, code, fragments);
        assert!(peak_kib <= allowed_kib, "{what}: {peak_kib} KiB, allowed {allowed_kib}");
    };
    type Damage<'a> = &'a dyn Fn(&Path);
    let template = |model: &Path, text: String| fs::write(model.join("chat_template.jinja"), text).unwrap();
    let index = |model: &Path, file: &str| {
        fs::rename(model.join("model.safetensors"), model.join("model-1.safetensors")).unwrap();
        let text = json!({"weight_map": {"model.norm.weight": file}}).to_string();
        fs::write(model.join("model.safetensors.index.json"), text).unwrap();
    };
    let grown =
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}";
    let models: &[(&str, Damage, &[&str])] = &[
        ("40 config.json is a pipe", &|model| pipe(&model.join("config.json")), &["config.json", "a pipe"]),
        ("40 generation_config.json is a pipe", &|model| pipe(&model.join("generation_config.json")), &["a pipe"]),
        ("40 tokenizer.json is a pipe", &|model| pipe(&model.join("tokenizer.json")), &["tokenizer.json", "a pipe"]),
        ("40 weights are a pipe", &|model| pipe(&model.join("model.safetensors")), &["model.safetensors", "a pipe"]),
        ("40 tokenizer.json is zeros", &|model| zeros(&model.join("tokenizer.json")), &["tokenizer.json", "a device"]),
        (
            "40 a template of zeros",
            &|model| zeros(&model.join("chat_template.jinja")),
            &["chat_template.jinja", "device"],
        ),
        (
            "40 config.json is a folder",
            &|model| {
                fs::remove_file(model.join("config.json")).unwrap();
                fs::create_dir(model.join("config.json")).unwrap();
            },
            &["config.json", "a folder"],
        ),
        ("12 NUL in an index", &|model| index(model, "a\0b.safetensors"), &["index.json", "expected the name of"]),
        (
            "12 a tokenizer.json of a gigabyte",
            &|model| fs::File::create(model.join("tokenizer.json")).unwrap().set_len(1 << 30).unwrap(),
            &["tokenizer.json", "1073741824 bytes: expected at most"],
        ),
        ("39 a template that doubles", &|model| template(model, grown.to_owned()), &["chat template", "MiB of memory"]),
        (
            "39 a template of minus signs",
            &|model| template(model, format!("{{{{ {}1 }}}}", "-".repeat(200_000))),
            &["chat template", "operators: expected at most"],
        ),
        (
            "39 a template that searches",
            &|model| template(model, "{{ 5 in [1] * 1000000000000 }}".to_owned()),
            &["chat template", "CPU time"],
        ),
    ];
    for (what, damage, fragments) in models {
        let model = copy_of_model(&folder.path().join(what.replace(' ', "_")));
        damage(&model);
        check(what, &format!("{SMALL_RUN} model_name_or_path={}", model.display()), 3, fragments);
    }

    let file = |name: &str, text: &[u8]| {
        fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name).display().to_string()
    };
    let keys: String = (0..100_000).map(|index| format!("learning_rat_{index} = 1\n")).collect();
    let short: String = (0..60_000).map(|index| format!("k{index} = 1\n")).collect();
    let few: String = (0..100).map(|index| format!("learning_rat_{index} = 1\n")).collect();
    let configs = [
        ("39 YAML of brackets", file("a.yaml", "[".repeat(100_000).as_bytes()), "brackets, dots and list dashes"),
        ("39 TOML of keys", file("b.toml", keys.as_bytes()), "bytes: expected at most"),
        ("39 TOML of short keys", file("e.toml", short.as_bytes()), "more than 2048 keys"),
        ("39 TOML of unknown keys", file("c.toml", few.as_bytes()), "and 80 more"),
    ];
    for (what, path, fragment) in &configs {
        check(what, &format!("--config {path}"), 2, &[fragment]);
    }
    pipe(&folder.path().join("d.toml"));
    check(
        "40 a configuration is a pipe",
        &format!("--config {}", folder.path().join("d.toml").display()),
        2,
        &["a pipe"],
    );

    let footer = footer(20_000);
    let parquet = [b"PAR1", &footer[..], &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat();
    let long = format!("{{\"prompt\": \"{}\", \"answer\": \"1\"}}\n", "what is one ? ".repeat(1 << 20));
    let rows = [
        ("39 Parquet groups", file("rows.parquet", &parquet), "20001 columns and groups"),
        ("23 a prompt of 14 MB", file("rows.jsonl", long.as_bytes()), "1 read, 1 longer than"),
    ];
    for (what, path, fragment) in &rows {
        check(what, &format!("{SMALL_RUN} train_file={path}"), 3, &[fragment]);
    }
}

#[test]
fn a_tokenizer_that_is_a_pipe_is_not_copied() {
    let folder = tempfile::tempdir().unwrap();
    let model = copy_of_model(&folder.path().join("model"));
    pipe(&model.join("tokenizer_config.json"));
    let to = folder.path().join("new");
    let line = format!("init --preset micro --tokenizer {} --output {}", model.display(), to.display());
    let ended = end(command(&line).spawn().unwrap());
    assert!(ended.stderr.contains("tokenizer_config.json: expected a regular file, found a pipe"), "{}", ended.stderr);
    assert_eq!(ended.code, Some(3));
}
