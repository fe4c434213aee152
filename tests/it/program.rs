//! Runs the program as a user starts it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The demo's model folder.
pub const MODEL: &str = "configs/arithmetic/model";

/// Arguments of a small run for tests, in one process without `--nproc`: 2 prompts with 4 completions per rank. It reads few
/// rows, because an unoptimized program needs more time to render and tokenize all rows than for a step.
pub const SMALL_RUN: &str = "--config configs/tiny-cpu.toml tensor_parallel_size=1 per_device_train_batch_size=8 \
    num_generations=4 max_steps=1 eval_steps=none eval_file=none max_train_samples=256";

/// Arguments of a run whose rewards differ between completions of any model.
pub const VARIED_REWARDS: &str =
    "reward_funcs=[\"get_repetition_penalty_reward\"] reward_weights=[1.0] reward.repetition_n_grams=1";

/// Result of a run of the program.
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A command that runs the program with the words of `line` in the repository's root, without a surrounding launcher. On a machine other
/// than the one it was built on, COLO_GRPO_PROGRAM is the program's path, and the current folder is the root.
pub fn command(line: &str) -> Command {
    let mut command = match std::env::var_os("COLO_GRPO_PROGRAM") {
        Some(program) => Command::new(program),
        None => {
            let mut command = Command::new(env!("CARGO_BIN_EXE_colo-grpo"));
            command.current_dir(env!("CARGO_MANIFEST_DIR"));
            command
        }
    };
    command.args(line.split_whitespace()).env("OMP_NUM_THREADS", "1");
    for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_STEP_NODELIST", "RUST_BACKTRACE"] {
        command.env_remove(name);
    }
    command.env("HF_HUB_OFFLINE", "1"); // a name that is no folder is an error, not a download
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the program until it ends.
pub fn run(line: &str) -> Ended {
    end(command(line).spawn().unwrap())
}

/// Runs the program, which must succeed, and returns its standard output.
pub fn stdout_of(line: &str) -> String {
    let ended = run(line);
    assert_eq!(ended.code, Some(0), "{line}\n{}", ended.stderr);
    ended.stdout
}

/// Reads the standard error of a started program up to the line that contains `fragment`, and returns this line. The rest is left to [`end`].
pub fn await_line(child: &mut Child, fragment: &str) -> String {
    let (mut read, mut byte) = (Vec::new(), [0]);
    while child.stderr.as_mut().unwrap().read(&mut byte).unwrap() == 1 {
        read.extend(byte);
        if read.ends_with(b"\n") && String::from_utf8_lossy(&read).contains(fragment) {
            return String::from_utf8_lossy(&read).lines().last().unwrap_or_default().to_owned();
        }
    }
    panic!("it ended without '{fragment}'\n{}", String::from_utf8_lossy(&read));
}

/// Sends a signal, such as `-TERM`, to a process id.
pub fn signal(pid: impl ToString, signal: &str) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

/// Waits until a started program ends.
pub fn end(child: Child) -> Ended {
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ended { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
}

impl Ended {
    /// Asserts that the run failed with exit code `code` and one error message that contains every one of `fragments`.
    pub fn assert_error(&self, what: &str, code: i32, fragments: &[&str]) {
        let Ended { code: got, stderr, .. } = self;
        assert_eq!(*got, Some(code), "{what}\n{stderr}");
        assert_eq!(stderr.matches("error: ").count(), 1, "{what}\n{stderr}");
        for fragment in fragments {
            assert!(stderr.contains(fragment), "{what}: no '{fragment}' in\n{stderr}");
        }
    }
}

/// Parses a text with one JSON object per line.
pub fn json_lines(text: &str) -> Vec<serde_json::Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// The lines of a run's metrics.jsonl.
pub fn metrics(output_dir: &Path) -> Vec<serde_json::Value> {
    json_lines(&std::fs::read_to_string(output_dir.join("metrics.jsonl")).unwrap_or_default())
}

/// Copies the demo's model folder, so that a test can damage it.
pub fn copy_of_model(to: &Path) -> PathBuf {
    std::fs::create_dir_all(to).unwrap();
    for file in Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL).read_dir().unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
    to.to_owned()
}

/// Makes `folder` a copy of the model `name` in tests/golden, with the demo's tokenizer. The model has more ids than the tokenizer.
pub fn golden_model(folder: &Path, name: &str) -> PathBuf {
    std::fs::create_dir_all(folder).unwrap();
    let golden = Path::new("tests/golden").join(name).read_dir().unwrap().map(|file| file.unwrap().path());
    let tokenizer = ["tokenizer.json", "tokenizer_config.json"].map(|file| Path::new(MODEL).join(file));
    for file in golden.chain(tokenizer) {
        std::fs::copy(&file, folder.join(file.file_name().unwrap())).unwrap();
    }
    folder.to_owned()
}

/// Writes a random model with the shape in the file `shape`, changed by `keys`.
pub fn random_model_of(folder: &Path, shape: &str, keys: &serde_json::Value) -> PathBuf {
    let (config, model) = (folder.join("config.json"), folder.join("model"));
    let mut shape: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(shape).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        shape[key] = value.clone();
    }
    std::fs::write(&config, shape.to_string()).unwrap();
    let (config, output) = (config.display(), model.display());
    stdout_of(&format!("init --config_json {config} --tokenizer {MODEL} --output {output}"));
    model
}

/// Processes that have `text` on their command line.
pub fn processes_of(text: &Path) -> Vec<String> {
    let has = |pid: &String| {
        let line = std::fs::read(Path::new("/proc").join(pid).join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&*text.to_string_lossy())
    };
    let names = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    names.filter(|name| name.parse::<u32>().is_ok()).filter(has).collect()
}

/// Waits for an event without a time limit, because durations depend on the load of the machine. If the event never comes, the test runner
/// ends the test.
pub fn wait_until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether `condition` becomes true before `limit`; only for measurements on an idle machine.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}
