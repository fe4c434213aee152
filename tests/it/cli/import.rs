//! The command `import` converts configurations of other trainers to runs, and accounts for every key.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{MODEL, command, end, metrics, run};

/// Imports a file. Returns the configuration's text and the messages.
fn imported(file: &Path) -> (String, String) {
    let ended = run(&format!("import {}", file.display()));
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.stdout, ended.stderr);
    (ended.stdout, ended.stderr)
}

fn golden(name: &str) -> std::path::PathBuf {
    Path::new("tests/golden/import").join(name)
}

/// Lines of the file that are not comments.
fn keys(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

/// Asserts that the notes mention every key that was not taken over unchanged.
fn assert_accounted(theirs: &[String], text: &str, said: &str) {
    for key in theirs {
        let is_kept = keys(text).iter().any(|line| line.starts_with(&format!("{key} = ")));
        assert!(is_kept || said.contains(key.as_str()), "{key} is in neither\n{text}\n{said}");
    }
    for line in said.lines().filter(|line| line.starts_with("  ")) {
        assert!(text.contains(line.trim()), "the file keeps what is said: {line}");
    }
}

/// Asserts that the configuration loads, and that a plan succeeds for a model of this shape.
fn assert_plans(text: &str, nproc: usize, preset: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.toml");
    fs::write(&file, text).unwrap();
    let plan =
        run(&format!("plan --nproc {nproc} --config {} --model_preset {preset} --gpu_memory_gib 139", file.display()));
    assert_eq!(plan.code, Some(0), "{text}\n{}", plan.stderr);
}

#[test]
fn import_translates_an_open_r1_recipe() {
    let file = golden("open_r1.yaml");
    let (text, said) = imported(&file);
    for line in [
        "model_name_or_path = \"Qwen/Qwen2.5-1.5B-Instruct\"",
        "dataset_prompt_column = \"problem\"",
        "reward_funcs = [\"accuracy\",\"format\",\"tag_count\",\"cosine\"]",
        "reward_weights = [1.0,0.5,0.5,1.0]",
        "reward.cosine_max_len = 2000",
        "learning_rate = 0.00002",
        "gradient_checkpointing = \"full\"",
        "num_generations = 16",
        "warmup_ratio = 0.1",
        // TRL 0.18's, which open-r1 pins
        "beta = 0.04",
        "loss_type = \"bnpo\"",
        "importance_sampling_correction = false",
        "use_bias_correction_kl = false",
    ] {
        assert!(keys(&text).contains(&line), "no {line} in\n{text}");
    }
    let lost = said.split("WITHOUT AN EQUIVALENT").nth(1).unwrap();
    assert!(lost.contains("save_strategy = \"epoch\"") && lost.lines().count() == 2, "{said}");
    let theirs = fs::read_to_string(&file).unwrap();
    let is_key = |line: &&str| line.starts_with(char::is_alphabetic);
    let theirs: Vec<_> = theirs
        .lines()
        .filter(is_key)
        .map(|line| line.split(':').next().unwrap().replace("cosine_", "reward.cosine_"))
        .collect();
    assert_accounted(&theirs, &text, &said);
    assert_plans(&text, 8, "qwen2.5-1.5b");
}

#[test]
fn import_translates_a_trl_configuration() {
    let (text, said) = imported(&golden("trl.yaml"));
    for line in [
        "warmup_ratio = 0.05",
        "lr_scheduler_type = \"cosine_with_min_lr\"",
        "lr_scheduler_kwargs.min_lr_rate = 0.1",
        "lora.r = 32",
        "lora.alpha = 64",
        "lora.target_modules = \"all-linear\"",
        "quantization = \"nf4\"",
        "tensor_parallel_size = 2",
        "importance_sampling_mode = \"token_truncate\"",
        "scale_rewards = \"none\"",
        "top_k = 0",
        "epsilon_high = 0.28",
        "save_steps = 50",
        "max_tool_calling_iterations = 3",
    ] {
        assert!(keys(&text).contains(&line), "no {line} in\n{text}\n{said}");
    }
    let lost = said.split("WITHOUT AN EQUIVALENT").nth(1).unwrap();
    for part in ["frobnicate_tokens = 3", "report_to = [\"mlflow\"]"] {
        assert!(lost.contains(part), "{part}: {said}");
    }
    assert!(said.contains("vllm_mode"), "{said}");
    assert_plans(&text, 2, "qwen2.5-0.5b");
}

#[test]
fn import_merges_trl_flags_with_a_recipe_and_data_mixture() {
    let (text, said) = imported(&golden("trl_flags.sh"));
    assert!(text.lines().next().unwrap().contains("colo-grpo --nproc 4 --config"), "{text}");
    for line in [
        "model_name_or_path = \"Qwen/Qwen2.5-0.5B-Instruct\"",
        "train_file = [\"hf://datasets/open-r1/OpenR1-Math-220k/default/train*\",\"hf://datasets/openai/gsm8k/main/train*\"]",
        "train_file_weights = [0.5,1.0]",
        "num_generations = 16",
        "per_device_train_batch_size = 16",
        "learning_rate = 0.00002",
        "lora.r = 32",
    ] {
        assert!(keys(&text).contains(&line), "no {line} in\n{text}\n{said}");
    }
    assert!(!text.contains("seed = 5"), "a flag of another command: {text}");
    let lost = said.split("WITHOUT AN EQUIVALENT").nth(1).unwrap();
    assert!(lost.contains("test_split_size = 0.1") && lost.lines().count() == 2, "{said}");
    assert_plans(&text, 4, "qwen2.5-0.5b");
}

#[test]
fn import_translates_a_verl_script() {
    let file = golden("verl.sh");
    let (text, said) = imported(&file);
    assert!(text.lines().next().unwrap().contains("colo-grpo --nproc 8 --config"), "{text}");
    for line in [
        "model_name_or_path = \"Qwen/Qwen2.5-7B-Instruct\"",
        "num_generations = 5",
        "per_device_train_batch_size = 160", // 256 prompts x 5 on 8 GPUs
        "steps_per_generation = 4",
        "max_completion_length = 1024",
        "learning_rate = 1e-6",
        "lr_scheduler_type = \"constant\"",
        "weight_decay = 0.01",
        "beta = 0.001",
        "loss_type = \"dapo\"",
        "reward_funcs = [\"numeric_answer\"]",
        "report_to = [\"wandb\"]",
        "tensor_parallel_size = 2",
        "num_train_epochs = 15",
        "eval_steps = 20", // 5 generation batches of 4 updates
        "save_steps = 80",
        "delta = 3",
        "importance_sampling_correction = false",
        "use_bias_correction_kl = false",
    ] {
        assert!(keys(&text).contains(&line), "no {line} in\n{text}\n{said}");
    }
    let home = std::env::var("HOME").unwrap();
    assert!(text.contains(&format!("train_file = \"{home}/data/gsm8k/train.parquet\"")), "{text}");
    let held_out = format!("eval_file = \"{home}/data/gsm8k/test.parquet\"");
    assert!(keys(&text).contains(&&*held_out) && keys(&text).contains(&"eval_temperature = 0"), "{text}\n{said}");
    let lost = said.split("WITHOUT AN EQUIVALENT").nth(1).unwrap();
    assert_eq!(lost.lines().skip(1).count(), 1, "{said}");
    assert!(lost.contains("trainer.rollout_data_dir"), "{said}");
    let theirs = fs::read_to_string(&file).unwrap();
    let theirs = theirs.lines().filter_map(|line| line.trim().split_once('=').filter(|(key, _)| key.contains('.')));
    let theirs: Vec<String> = theirs.map(|(key, _)| key.trim_start_matches("actor_rollout_ref.").to_owned()).collect();
    assert!(theirs.len() > 30);
    assert_accounted(&theirs, &text, &said);
    assert_plans(&text, 8, "qwen2.5-7b");
}

/// An imported configuration with verl's rows in Parquet and verl's reward function, and TRL's reward function. The rows have the columns of
/// verl's GSM8K script (data_source, prompt, ability, reward_model, extra_info) and were written by pyarrow.
#[test]
fn rows_and_rewards_of_verl_and_trl_train_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name).display().to_string();
    let verl = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    \
                assert data_source == 'openai/gsm8k' and ground_truth in ('3', '18') and extra_info['index'] in (0, 1)\n    \
                return {'score': len(solution_str) % 7 / 7, 'acc': ground_truth in solution_str}\n";
    let trl = "def brevity(completions, **kwargs):\n    assert kwargs['data_source'] and kwargs['trainer_state']\n    \
               return [-float(len(completion[0]['content'])) for completion in completions]\n";
    fs::write(folder.path().join("reward.py"), verl).unwrap();
    fs::write(folder.path().join("trl_reward.py"), trl).unwrap();
    let text = fs::read_to_string(golden("verl.yaml")).unwrap();
    let text = text.replace("ROWS", "tests/golden/import/verl.parquet").replace("MODEL", MODEL);
    let text = text.replace("REWARD", &place("reward.py")).replace("OUT", &place("out"));
    fs::write(folder.path().join("verl.yaml"), text).unwrap();
    let line = format!("import {} --output {}", place("verl.yaml"), place("run.toml"));
    let ended = run(&line);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("actor_rollout_ref.actor.entropy_coeff = 0.01"), "{}", ended.stderr);
    run(&line).assert_error("the file is there", 2, &["--output", "the path of a new file"]);

    let mut both = command(&format!("--config {} device=cpu logging_steps=1", place("run.toml")));
    both.arg(format!(
        "reward_funcs=[\"{}:compute_score\", \"{}:brevity\"]",
        place("reward.py"),
        place("trl_reward.py")
    ));
    let ended = end(both.spawn().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = metrics(&folder.path().join("out"));
    let steps: Vec<&Value> = lines.iter().filter(|line| line["loss"].is_number()).collect();
    assert_eq!(steps.len(), 4, "verl's steps are generation batches, of two updates each");
    for step in steps {
        assert_eq!(step["rewards/num_failed"], 0.0, "{step}");
        assert!(step["rewards/compute_score/mean"].as_f64().unwrap() >= 0.0, "{step}");
        assert!(step["rewards/brevity/mean"].as_f64().unwrap() < 0.0, "{step}");
    }
    let config: Value =
        serde_json::from_str(&fs::read_to_string(folder.path().join("out/run_config.json")).unwrap()).unwrap();
    assert_eq!((config["steps_per_generation"].as_u64(), config["epsilon_high"].as_f64()), (Some(2), Some(0.28)));
    assert_eq!((config["use_kl_in_reward"].as_bool(), config["beta"].as_f64()), (Some(true), Some(0.01)));
    assert_eq!(config["kl_estimator"], "k1");
}

/// An open-r1 recipe runs unchanged, except for the model, rows and number of GPUs.
#[test]
fn an_imported_recipe_trains() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name).display().to_string();
    let row = r#"{"problem": "what is two plus two ?", "solution": "4"}"#;
    fs::write(folder.path().join("rows.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    let recipe = fs::read_to_string(golden("open_r1.yaml")).unwrap();
    // math-verify is another test's: the rewards here need no package.
    let recipe = recipe.replace("- accuracy\n", "- reasoning_steps\n").replace("- cosine\n", "- repetition_penalty\n");
    fs::write(folder.path().join("recipe.yaml"), recipe).unwrap();
    let ended = run(&format!("import {} --output {}", place("recipe.yaml"), place("run.toml")));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let mut command = command(&format!(
        "--config {} model_name_or_path={MODEL} dataset_name=none train_file={} output_dir={} device=cpu max_steps=1",
        place("run.toml"),
        place("rows.jsonl"),
        place("out")
    ));
    command.args([
        "report_to=none",
        "system_prompt=none",
        "gradient_accumulation_steps=1",
        "max_completion_length=8",
        "max_prompt_length=40",
    ]);
    let ended = end(command.spawn().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = metrics(&folder.path().join("out"));
    assert_eq!(
        lines.iter().filter(|line| line["rewards/tag_count/mean"].is_number() && line["loss"].is_number()).count(),
        1
    );
}

#[test]
fn import_refuses_files_that_are_no_configuration() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text, parts) in [
        ("a.sh", "echo hello\n", &["expected a script that starts verl"][..]),
        ("a.py", "GRPOConfig()\n", &["Python scripts cannot be imported", "GRPOConfig into a YAML file"]),
        ("a.txt", "x\n", &["expected a configuration", "a shell script (.sh)"]),
        ("a.yaml", "- 1\n", &["expected a mapping (key: value)"]),
    ] {
        let (file, output) = (folder.path().join(name), folder.path().join("out.toml"));
        fs::write(&file, text).unwrap();
        run(&format!("import {} --output {}", file.display(), output.display())).assert_error(name, 2, parts);
        assert!(!output.exists(), "{name}: what is refused leaves no file");
    }
}

/// A script with reward functions in its Python code is imported, and notes name what is missing. Advice about a key with a secret's name is not
/// redacted.
#[test]
fn import_notes_files_that_it_cannot_find() {
    let folder = tempfile::tempdir().unwrap();
    let (script, output) = (folder.path().join("train.sh"), folder.path().join("run.toml"));
    let line = "trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/tldr --hub_token hf_abcdefghijklmnop1234";
    fs::write(&script, line).unwrap();
    let ended = run(&format!("import {} --output {}", script.display(), output.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let text = fs::read_to_string(&output).unwrap();
    for said in [&ended.stderr, &text] {
        assert!(
            said.contains("MISSING, add each before the run:") && said.contains("reward_funcs: expected a list"),
            "{said}"
        );
        assert!(said.contains("`hub_token`: HF_TOKEN in the environment") && !said.contains("hf_abc"), "{said}");
    }
}
