//! Answers compared by math-verify, in a reward pool and in the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use colo_grpo::internal::reward::{FailureCount, FailureKind, RewardPool};
use serde_json::{Value, json};

use super::processes::{Scores, group, pool, scores};
use crate::program::{SMALL_RUN, run};

/// A folder with math-verify 0.9.0 and its dependencies, downloaded once by pip with checked hashes.
fn package() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let home = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let folder = home.join("math-verify-0.9.0");
        if !folder.exists() {
            let made = tempfile::tempdir_in(home).unwrap();
            let mut pip = Command::new("python3");
            pip.args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--require-hashes",
            ]);
            pip.args(["--only-binary=:all:", "--requirement", "scripts/math_verify.txt", "--target"]).arg(made.path());
            let ended = pip.output().unwrap();
            assert!(ended.status.success(), "pip: {}", String::from_utf8_lossy(&ended.stderr));
            let _ = fs::rename(made.keep(), &folder); // another test process may have been faster
        }
        folder
    })
}

/// A Python interpreter that finds only these packages.
fn python(folder: &Path, packages: &Path) -> String {
    let path = folder.join("python");
    fs::write(&path, format!("#!/bin/sh\nPYTHONPATH={} exec python3 -S \"$@\"\n", packages.display())).unwrap();
    let mut mode = fs::metadata(&path).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
    fs::set_permissions(&path, mode).unwrap();
    path.display().to_string()
}

fn with_package(folder: &Path, reward: &str, keys: &[&str]) -> RewardPool {
    let own = [format!("reward_funcs={reward}"), format!("reward.python={}", python(folder, package()))];
    let keys: Vec<String> = own.into_iter().chain(keys.iter().map(|key| (*key).to_owned())).collect();
    pool(&keys)
}

/// The results recorded by scripts/golden_rewards.py.
fn golden() -> Value {
    serde_json::from_str(include_str!("../../golden/rewards.json")).unwrap()
}

/// Scores of single completions, each with its own reference answer.
fn score_all(pool: &mut RewardPool, rows: &[(String, String)]) -> Vec<Option<f32>> {
    let groups: Vec<_> = rows.iter().map(|(gold, text)| group(json!({"answer": gold}), &[text])).collect();
    let mut groups = groups;
    pool.score(&mut groups).unwrap();
    groups.iter().map(|group| group.completions[0].reward).collect()
}

/// Every result equals math-verify's on the cases of its own tests.
#[test]
fn math_reward_equals_math_verify_on_its_own_tests() {
    let folder = tempfile::tempdir().unwrap();
    let golden = golden();
    let table: Vec<(String, String, String, Option<f32>)> = serde_json::from_value(golden["math"].clone()).unwrap();
    let rows: Vec<_> = table.iter().map(|(_, gold, text, _)| (gold.clone(), text.clone())).collect();
    let mut pool = with_package(folder.path(), "math", &["reward.timeout_s=60"]);
    pool.start().unwrap();
    for ((file, gold, text, expected), score) in table.iter().zip(score_all(&mut pool, &rows)) {
        assert_eq!(score, *expected, "{file}: {gold} and {text}");
    }
    assert!(table.len() > 250 && pool.take_failures().is_empty());
}

/// Compares with rewards of open-r1 and TRL that depend on an answer, except for reference answers listed as different in docs/built-in-rewards.md.
#[test]
fn math_reward_equals_open_r1_and_trl() {
    let folder = tempfile::tempdir().unwrap();
    let golden = golden();
    let rows: Vec<(String, String)> = serde_json::from_value(golden["answers"].clone()).unwrap();
    for (name, expected) in golden["of_answer"].as_object().unwrap() {
        if ["length", "get_cosine_scaled_reward"].contains(&name.as_str()) {
            continue; // of whole groups, and of tokens: held to the goldens where they are computed
        }
        let mut pool = with_package(folder.path(), name, &["reward.cosine_max_len=100", "reward.timeout_s=60"]);
        for (((gold, text), score), expected) in
            rows.iter().zip(score_all(&mut pool, &rows)).zip(expected.as_array().unwrap())
        {
            let is_masked_here = gold == "nothing to read";
            let is_read_here_alone = name == "cosine" && gold == "42";
            let expected = expected.as_f64().map(|score| score as f32).filter(|_| !is_masked_here);
            let close = |a: f32, b: f32| (a - b).abs() < 1e-6;
            let agrees = expected.zip(score).map_or(expected == score, |(a, b)| close(a, b));
            assert!(agrees || is_read_here_alone, "{name}: {gold} and {text}: {score:?}, expected {expected:?}");
        }
    }
}

/// Row 29: an answer that hangs math-verify or cannot be parsed is not scored 0 but masked, and the other samples are scored.
#[test]
fn hanging_and_unparsable_math_answers_mask_their_samples() {
    let folder = tempfile::tempdir().unwrap();
    let mut pool = with_package(folder.path(), "math", &["reward.timeout_s=10"]);
    let hang = "\\boxed{9^{9^{9^{9}}}}"; // every digit of it
    let of_hang: Scores = scores(&mut pool, group(json!({"answer": "$x+1$"}), &["\\boxed{1+x}", hang, "\\boxed{x}"]));
    let unreadable = scores(&mut pool, group(json!({"answer": "no formula"}), &["\\boxed{5}", "no formula"]));
    let rewards = |scores: Scores| scores.into_iter().map(|(reward, _)| reward).collect::<Vec<_>>();
    assert_eq!(rewards(of_hang), [Some(1.0), None, Some(0.0)]);
    assert_eq!(rewards(unreadable), [None, None]);
    let failures = pool.take_failures();
    assert_eq!(
        failures,
        [FailureCount::new("math", FailureKind::Error, 2), FailureCount::new("math", FailureKind::Timeout, 1)]
    );
}

/// Without math-verify the run ends before a model is loaded; the error contains the install command.
#[test]
fn a_missing_math_verify_is_reported_with_the_install_command() {
    let folder = tempfile::tempdir().unwrap();
    let python = python(folder.path(), folder.path());
    let out = folder.path().join("run");
    let line =
        format!("{SMALL_RUN} reward_weights=[] reward_funcs=math reward.python={python} output_dir={}", out.display());
    let install = format!("install it with: {python} -m pip install math-verify==");
    run(&line).assert_error(
        "missing",
        4,
        &["reward 'math' needs the Python package math-verify", "No module named", &install],
    );
    assert!(!out.exists());
}

/// Reference answers that cannot be compared are counted when rows are loaded, by a run and by `eval`.
#[test]
fn unparsable_reference_answers_are_counted_at_load() {
    let folder = tempfile::tempdir().unwrap();
    let python = python(folder.path(), package());
    let rows = folder.path().join("rows.jsonl");
    let answers = ["12", "$\\frac{1}{2}$", "none", "x", "so \\boxed{2}", "it is 3", "$y$", "\u{4e8c}"];
    let lines = answers.map(|answer| json!({"prompt": "1 + 1 =", "answer": answer}).to_string() + "\n");
    fs::write(&rows, lines.concat()).unwrap();
    let notice = "3 of 8 reference answers could not be parsed; their samples are masked (the first is in row 3)";
    let ended = run(&format!(
        "--nproc 2 {SMALL_RUN} max_steps=1 save_steps=none reward_weights=[] reward_funcs=math reward.python={python} train_file={} \
         output_dir={}",
        rows.display(),
        folder.path().join("run").display()
    ));
    assert_eq!(ended.stderr.matches(notice).count(), 1, "{}", ended.stderr);
    let ended = run(&format!(
        "eval --model configs/arithmetic/model --data {} --reward math --python {python} --max_completion_length 4",
        rows.display()
    ));
    assert_eq!(ended.stderr.matches(notice).count(), 1, "{}", ended.stderr);
    assert!(
        ended.code == Some(0) && ended.stdout.contains("maj@1") && ended.stdout.contains("[\"math\"]"),
        "{}",
        ended.stdout
    );
}
