//! The files that model-written code can read: only paths of a list, which contain nothing of the run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use colo_grpo::internal::config::RewardConfig;
use colo_grpo::internal::sandbox::Readable;

use super::sandbox::{PATIENT_S, Sandbox};
use crate::program::{SMALL_RUN, run};

/// A project whose folder is itself a virtual environment, as `python -m venv .` creates it, with secret files next to it.
fn project(folder: &Path) -> PathBuf {
    let project = folder.canonicalize().unwrap().join("project");
    let made = Command::new("python3").args(["-m", "venv", "--without-pip"]).arg(&project).status().unwrap();
    assert!(made.success(), "python3 -m venv");
    for path in SECRETS {
        fs::create_dir_all(project.join(path).parent().unwrap()).unwrap();
        fs::write(project.join(path), "the answer").unwrap();
    }
    fs::write(project.join("src/mine.py"), "").unwrap();
    let packages = packages(&project);
    fs::write(packages.join("mine.pth"), format!("{}\n", project.join("src").display())).unwrap();
    std::os::unix::fs::symlink(project.join("data"), packages.join("link")).unwrap();
    project
}

/// Files of the project that a program must not be able to read.
const SECRETS: [&str; 6] =
    ["tests.jsonl", "data/train.jsonl", "outputs/checkpoint-1/model", "lib/answers.txt", "bin/secret", "src/keys.py"];

/// The package folder of a virtual environment.
fn packages(project: &Path) -> PathBuf {
    let mut versions = fs::read_dir(project.join("lib")).unwrap().map(|entry| entry.unwrap().path());
    versions.find(|path| path.is_dir()).unwrap().join("site-packages")
}

#[test]
fn sandboxed_programs_can_read_only_the_interpreters_paths() {
    let folder = tempfile::tempdir().unwrap();
    let project = project(folder.path());
    let mut settings = RewardConfig::default().code;
    settings.command.0[0] = project.join("bin/python3").display().to_string();
    let readable = Readable::new(&settings).unwrap();
    readable.paths().iter().for_each(|path| println!("{}", path.display()));
    // Of the project: its packages and what leads to the interpreter.
    let own: Vec<_> = readable.paths().iter().filter_map(|path| path.strip_prefix(&project).ok()).collect();
    let version = packages(&project).parent().unwrap().file_name().unwrap().to_owned();
    let packages = Path::new("lib").join(version).join("site-packages");
    let leads = |path: &&Path| path.starts_with("bin") && project.join(path).is_symlink();
    let others: Vec<_> = own.iter().copied().filter(|path| !leads(path)).collect();
    assert!(own.iter().any(leads), "{own:?}");
    assert_eq!(others, [packages.as_path(), Path::new("pyvenv.cfg")]);
    // Of the machine: libraries of the system, the standard library and the packages that come with it, shared libraries.
    let question = "import os, sys, sysconfig; print(os.path.realpath(sys.executable), *map(os.path.realpath, \
                    (sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib'), sys.base_prefix)), sep='\\n')";
    let said = Command::new("python3").args(["-I", "-c", question]).output().unwrap().stdout;
    let said = String::from_utf8(said).unwrap();
    let [executable, stdlib, platstdlib, base] =
        said.lines().map(PathBuf::from).collect::<Vec<_>>().try_into().unwrap();
    let system = ["/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"].map(PathBuf::from);
    for path in readable.paths().iter().filter(|path| !path.starts_with(&project) && !path.is_symlink()) {
        let is_library = path.parent() == Some(&base.join("lib")) && path.to_string_lossy().contains(".so");
        let is_own = [&executable, &stdlib, &platstdlib].contains(&path) || system.contains(path) || is_library;
        assert!(is_own || path.file_name().is_some_and(|name| name == "dist-packages"), "{}", path.display());
    }
    for secret in SECRETS.map(|path| project.join(path)).iter().chain([&project]) {
        assert_eq!(readable.shows(secret), None, "{}", secret.display());
    }
}

/// A program can read exactly the listed paths, with all sandbox layers and with Landlock only.
#[test]
fn sandboxed_programs_cannot_read_a_project_next_to_the_interpreter() {
    let folder = tempfile::tempdir().unwrap();
    let project = project(folder.path());
    let packages = packages(&project);
    let command = project.join("bin/python3");
    fs::write(packages.join("helper.py"), "value = 7").unwrap();
    let whole = Sandbox::complete_with(&command, PATIENT_S);
    let Some(mut sandbox) = whole else { return };
    let tried: Vec<_> = SECRETS.map(|path| project.join(path)).into_iter().collect();
    let program = format!(
        r#"
import os, helper, sqlite3, ssl, sys, zoneinfo
assert sys.prefix == {project:?}, sys.prefix
seen = []
for path in {tried:?} + [{linked:?}]:
    try: seen.append((path, open(path).read()))
    except OSError: pass
for path in {folders:?}:
    try: seen.append((path, os.listdir(path)))
    except OSError: pass
try:
    import mine
    seen.append("mine")
except ImportError: pass
print(helper.value, seen)
"#,
        linked = packages.join("link/train.jsonl"),
        folders = [project.clone(), project.join("lib"), project.join("data"), folder.path().to_owned()],
    );
    assert_eq!(sandbox.score(&program, &[("", "7 []")]), 1.0, "{program}");
    assert_eq!(sandbox.score("open('x', 'w')", &[("", ""), ("", "y")]), 0.0, "silence alone is no answer");
}

#[test]
fn a_run_whose_files_a_program_could_read_is_refused_with_both_paths() {
    let folder = tempfile::tempdir().unwrap();
    let project = project(folder.path());
    let (python, packages) = (project.join("bin/python3"), packages(&project));
    let rows = packages.join("rows/train.jsonl");
    fs::create_dir(rows.parent().unwrap()).unwrap();
    fs::write(&rows, "{\"prompt\": \"1 + 1 = \", \"tests\": [{\"input\": \"\", \"output\": \"2\"}]}\n").unwrap();
    let linked = folder.path().join("linked.jsonl");
    std::os::unix::fs::symlink(&rows, &linked).unwrap();
    let (shown, home) = (packages.display(), std::env::current_dir().unwrap());
    let output = folder.path().join("run");
    let own = format!("reward.code.command=[\"{}\"]", python.display());
    let given = |path: &Path| format!("reward.code.readable=[\"{}\"]", path.display());
    let code = "reward_funcs=[\"code\"] reward_weights=[]";
    for (keys, parts) in [
        (
            format!("{code} {own} train_file={}", rows.display()),
            vec![format!("train_file, {}", rows.display()), format!("is inside {shown}")],
        ),
        (format!("{code} {own} train_file={}", linked.display()), vec![format!("is inside {shown}")]),
        (format!("{code} {own} output_dir={shown}/run"), vec!["output_dir".to_owned(), format!("is inside {shown}")]),
        (format!("tools=[\"python\"] {own} train_file={}", rows.display()), vec![format!("is inside {shown}")]),
        (format!("{code} {}", given(&home)), vec!["reward.code.readable = ".to_owned()]),
        (format!("{code} {}", given(Path::new("/proc"))), vec!["the state of processes".to_owned()]),
        (
            format!("{code} {} output_dir={}", given(&output.join("part")), output.display()),
            vec!["output_dir".to_owned(), "holds".to_owned()],
        ),
    ] {
        fs::create_dir_all(output.join("part")).unwrap();
        let keys = format!("{SMALL_RUN} output_dir={} {keys}", output.display());
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        run(&keys).assert_error(&keys, 2, &parts);
    }
    let keys = format!(
        "eval --model configs/arithmetic/model --config configs/tiny-cpu.toml {code} {own} eval_file={}",
        linked.display()
    );
    run(&keys).assert_error(&keys, 2, &[&format!("is inside {shown}")]);
}
