//! The program's commands, and how they parse user input.

mod faults;
mod import;
mod real_model;
mod recipes;
mod signals;
mod strangers;
mod verify;

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{MODEL, SMALL_RUN, command, end, json_lines, metrics, run, stdout_of};

const ANSWER: &str = "--answer_pattern ([0-9]+) --max_completion_length 12";

fn generate(more: &str, num_engines: usize) -> Vec<Value> {
    let mut command = command(&format!("generate --model {MODEL} --temperature 0 {more}"));
    for prompt in ["what is two plus three ?", "what is forty plus two ?", "what is nine plus nine ?"] {
        command.args(["--prompt", prompt]);
    }
    let ended = end(command.spawn().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("the KV cache has ").count(), num_engines, "{}", ended.stderr);
    json_lines(&ended.stdout)
}

#[test]
fn generate_is_greedy_equal_and_ordered_on_any_number_of_ranks() {
    let alone = generate("--chat", 1);
    assert_eq!(alone.len(), 3);
    assert_eq!(alone[1]["prompt"], "<user>what is forty plus two ?<assistant>");
    assert!(alone[1]["completion"].as_str().unwrap().starts_with("the answer is "), "{alone:?}");
    for (layout, num_engines) in
        [("--nproc 2", 2), ("--nproc 2 --tp 2", 1), ("--nproc 3 --pp 3 --pipeline_partition 2,1,1", 1)]
    {
        let spread = generate(&format!("--chat {layout}"), num_engines);
        for (alone, spread) in alone.iter().zip(&spread) {
            assert_eq!(alone["prompt"], spread["prompt"], "{layout}");
            assert_eq!(alone["completion"], spread["completion"], "{layout}");
            let logprob = |line: &Value| line["logprob"].as_f64().unwrap();
            assert!((logprob(alone) - logprob(spread)).abs() < 1e-3, "{layout}");
        }
    }
    assert_eq!(generate("-n 2", 1)[0]["prompt"], "what is two plus three ?");
}

#[test]
fn an_evaluation_is_the_same_on_any_number_of_ranks() {
    let eval = |more: &str| {
        let line = format!("eval --model {MODEL} --data configs/arithmetic/eval.jsonl -n 2 {ANSWER} {more}");
        json_lines(&stdout_of(&line)).remove(0)
    };
    let alone = eval("");
    assert_eq!((&alone["problems"], &alone["n"]), (&Value::from(200), &Value::from(2)));
    let (average, pass) = (alone["avg@2"]["mean"].as_f64().unwrap(), alone["pass@2"]["mean"].as_f64().unwrap());
    assert!(0.1 < average && average < pass && pass < 0.9, "{alone}");
    // Of two samples a majority is one answer twice, or half of either.
    assert!((alone["maj@2"]["mean"].as_f64().unwrap() - average).abs() < 0.1, "{alone}");
    assert!(alone["avg@2"]["standard_error"].as_f64().is_some_and(|error| 0.0 < error && error < 0.1), "{alone}");
    assert_eq!(eval("--nproc 2"), alone);
}

#[test]
fn a_supervised_run_lowers_the_loss_and_leaves_a_model_that_generates() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().display();
    stdout_of(&format!(
        "init --config_json configs/arithmetic/config.json --tokenizer {MODEL} --output {place}/random"
    ));
    let row = r#"{"prompt": "what is one plus one ?", "completion": "the answer is 2"}"#;
    fs::write(folder.path().join("rows.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    let said = stdout_of(&format!(
        "sft --nproc 2 --config configs/arithmetic/warmup.toml model_name_or_path={place}/random \
         train_file={place}/rows.jsonl output_dir={place}/out per_device_train_batch_size=2 max_steps=3 \
         warmup_steps=0 logging_steps=1"
    ));
    assert!(said.contains("loss: ") && said.contains("final"), "{said}");
    let losses: Vec<f64> =
        metrics(&folder.path().join("out")).iter().map(|line| line["loss"].as_f64().unwrap()).collect();
    assert_eq!(losses.len(), 3);
    assert!(losses[0] > losses[1] && losses[1] > losses[2], "{losses:?}");
    let line = stdout_of(&format!("generate --model {place}/out/final --prompt what --max_completion_length 3"));
    assert_eq!(json_lines(&line).len(), 1);
}

/// Metrics are close to those of a float32 run, and differ from those with a bfloat16 residual stream.
#[test]
fn residual_dtype_applies_to_supervised_runs_and_samplers() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().display();
    let row = r#"{"prompt": "what is one plus one ?", "completion": "the answer is 2"}"#;
    fs::write(folder.path().join("rows.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    let numbers = |dtype: &str, residual: &str| -> [f64; 2] {
        let output = folder.path().join(format!("{dtype}-{residual}"));
        stdout_of(&format!(
            "sft --config configs/arithmetic/warmup.toml model_name_or_path={MODEL} train_file={place}/rows.jsonl \
             output_dir={} per_device_train_batch_size=2 max_steps=1 logging_steps=1 dtype={dtype} \
             residual_dtype={residual}",
            output.display()
        ));
        let sampled = stdout_of(&format!(
            "generate --model {MODEL} --prompt what --temperature 0 --max_completion_length 12 --dtype {dtype} \
             --residual_dtype {residual}"
        ));
        [metrics(&output)[0]["loss"].as_f64().unwrap(), json_lines(&sampled)[0]["logprob"].as_f64().unwrap()]
    };
    let exact = numbers("float32", "auto");
    let [narrow, wide] = ["auto", "float32"].map(|residual| numbers("bfloat16", residual));
    for ((exact, narrow), wide) in exact.into_iter().zip(narrow).zip(wide) {
        assert!((wide - exact).abs() < 0.02 * exact.abs(), "{wide}, in float32 {exact}");
        assert!(wide != narrow, "{wide} with either stream");
    }
}

#[test]
fn init_without_a_tokenizer_says_how_to_get_one() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    let said = stdout_of(&format!("init --preset micro --output {}", model.display()));
    assert!(said.contains("parameters"), "{said}");
    let generate = format!("generate --model {} --prompt what", model.display());
    run(&generate).assert_error("no tokenizer", 3, &["tokenizer.json", "init", "--tokenizer"]);
    let with_tokenizer = format!("init --preset micro --tokenizer {MODEL} --output {}", model.display());
    run(&with_tokenizer).assert_error("a model is there", 2, &["--output", "does not exist yet or is empty"]);
    fs::remove_dir_all(&model).unwrap();
    stdout_of(&with_tokenizer);
    stdout_of(&format!("{generate} --max_completion_length 2 --stop the --min_p 0.1"));
    let near = run("init --preset qwen2.5-8b --output x");
    near.assert_error("preset", 2, &["possible values: micro, tiny", "similar", "'qwen2.5-7b'", "--config_json FILE"]);
}

#[test]
fn models_larger_than_the_disk_or_memory_are_refused_early() {
    let folder = tempfile::tempdir().unwrap();
    let (shape, output) = (folder.path().join("config.json"), folder.path().join("model"));
    let mut config: Value = serde_json::from_slice(&fs::read("configs/arithmetic/config-moe.json").unwrap()).unwrap();
    for (key, size) in [("hidden_size", 1 << 20), ("num_hidden_layers", 4096), ("num_experts", 4096)] {
        config[key] = size.into();
    }
    config["moe_intermediate_size"] = (1 << 24).into();
    fs::write(&shape, config.to_string()).unwrap();
    let made = run(&format!("init --config_json {} --output {}", shape.display(), output.display()));
    made.assert_error("larger than the disk", 12, &["18446744073709551615 bytes are needed"]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 1, "nothing is left");
    for command in ["generate --prompt what", "eval --data configs/arithmetic/eval.jsonl"] {
        let many = run(&format!("{command} --model {MODEL} -n 99999999999"));
        many.assert_error(command, 2, &["'--n <N>': expected a whole number from 1 to 65536"]);
    }
    let cold = run(&format!("generate --model {MODEL} --prompt what --temperature 1e-40"));
    cold.assert_error("divides by nothing", 2, &["'--temperature <TEMPERATURE>': expected 0, or a number of at least"]);
}

#[test]
fn plan_prints_a_table_and_refuses_what_cannot_fit() {
    let planned = run("plan --nproc 2 --config configs/tiny-cpu.toml");
    assert!(planned.stderr.contains("each process also needs"), "{}", planned.stderr);
    let plan = planned.stdout;
    for class in ["memory per rank", "policy weights", "Adam", "gradients", "activations", "KV cache", "peak", "blocks"]
    {
        assert!(plan.contains(class), "{class}\n{plan}");
    }
    let columns: Vec<usize> = plan.lines().take(7).map(|line| line.chars().count()).collect();
    assert!(columns.iter().all(|width| *width == columns[0]), "{plan}");
    let huge = run("plan --nproc 2 --config configs/tiny-cpu.toml kv_cache_bytes=1000000000000000");
    huge.assert_error("too large", 4, &["per rank and", "available", "KV cache"]);
}

#[test]
fn plan_needs_neither_gpus_nor_weights() {
    let plan = |more: &str| stdout_of(&format!("plan --nproc 8 --model_preset qwen2.5-7b --gpu_memory_gib {more}"));
    let (roomy, tight) = (plan("139"), plan("79 max_model_length=16384 --host_memory_gib 2000"));
    assert!(roomy.contains("of 139.0 GiB available") && roomy.contains("gradient_checkpointing: none"), "{roomy}");
    assert!(tight.contains("of 79.0 GiB available") && tight.contains("gradient_checkpointing: "), "{tight}");
    let refused = run("plan --nproc 1 --preset qwen2.5-7b --gpu_memory_gib 24 residency.optimizer=resident");
    refused.assert_error("one small GPU", 4, &["per rank and 24.0 GiB are available", "lora.r = 16"]);
    // Weights that leave generation no room: nothing that training computes again makes any.
    let refused = run("plan --nproc 1 --preset qwen2.5-7b --gpu_memory_gib 12 gradient_checkpointing=none");
    refused.assert_error("too small for the weights", 4, &["are available; set lora.r = 16 and quantization = nf4"]);
}

/// Micro-batches of 262,144 tokens on four GPUs of 79 GiB: either two GPUs share a micro-batch, or each has its own with kept tensors offloaded to
/// the host. A sequence longer than the token budget counts, too.
#[test]
fn plan_chooses_sequence_parallel_size() {
    let long = "plan --nproc 4 --model_preset qwen2.5-7b --gpu_memory_gib 79 --host_memory_gib 1000 zero.stage=3 max_num_seqs=8 \
                max_prompt_length=1024 max_completion_length=30000 max_tokens_per_micro_batch=262144";
    let said = stdout_of(&format!("{long} sequence_parallel_size=auto --compare"));
    let chosen =
        "sequence_parallel_size: 2, the least that leaves a tenth of the memory free while training, of 1, 2, 4";
    assert!(said.contains(chosen), "{said}");
    let table = said.lines().skip_while(|line| !line.starts_with(" sequence_parallel_size"));
    let own = table.take(4).find(|line| line.starts_with('*')).unwrap_or_else(|| panic!("{said}"));
    assert_eq!(own.split_whitespace().nth(1), Some("2"), "{said}");
    run(&format!("{long} sequence_parallel_size=1")).assert_error(
        "one GPU",
        4,
        &["per rank and 79.0 GiB are available"],
    );
    let offloaded = stdout_of(&format!("{long} sequence_parallel_size=1 activation_offload=true"));
    let activations = offloaded.lines().find(|line| line.starts_with("activations")).unwrap();
    assert!(activations.ends_with("GiB"), "{activations}");
    run(&format!("{long} activation_offload=true gradient_checkpointing=none")).assert_error(
        "what is kept beside",
        2,
        &["activation_offload = true: expected false"],
    );
    let longest = "plan --nproc 4 --model_preset qwen3.5-9b --gpu_memory_gib 79 --host_memory_gib 2000 zero.stage=3 max_num_seqs=2 \
                   max_prompt_length=1024 max_completion_length=250000";
    run(longest).assert_error("250,000 tokens", 4, &["set activation_offload = true (saved inputs of blocks are kept"]);
    assert!(stdout_of(&format!("{longest} activation_offload=true")).contains("x 251024"));
}

/// A plan with another model's shape uses the file's run, except for its rewards.
#[test]
fn plan_accepts_another_model_shape() {
    let said = stdout_of(
        "plan --nproc 8 --gpu_memory_gib 79 --model_preset qwen2.5-7b --config configs/tiny-cpu.toml dtype=bfloat16",
    );
    assert!(said.contains("of 79.0 GiB available"), "{said}");
}

/// If the engine's weights do not fit, following the advice makes the run fit.
#[test]
fn plan_advises_tensor_parallelism_for_large_models() {
    let command = "plan --nproc 8 --gpu_memory_gib 60 --model_preset qwen2.5-32b zero.stage=3 lora.r=16";
    run(command).assert_error(
        "32B, tp 1",
        4,
        &["set tensor_parallel_size = 2 (the ranks of an engine share its weights"],
    );
    assert!(stdout_of(&format!("{command} tensor_parallel_size=2")).contains("of 60.0 GiB available"));
}

/// Lists tensor parallelism and pipeline stages, including combinations that are impossible.
#[test]
fn plan_compare_lists_kv_blocks_of_engines() {
    let shape = "--model_preset qwen2.5-7b --config configs/tiny-cpu.toml dtype=bfloat16 tensor_parallel_size=1";
    let said = stdout_of(&format!("plan --compare --nproc 3 --gpu_memory_gib 139 {shape}"));
    let rows: Vec<Vec<&str>> = said.lines().take(3).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][..5], ["tp", "pp", "engines", "zero.stage", "layers"], "{said}");
    assert_eq!(rows[1][..5], ["*", "1", "1", "3", "2"], "{said}");
    assert_eq!((rows[2][0], rows[2][1], rows[2][3], rows[2][4]), ("1", "3", "3", "10,10,8"), "{said}");
    assert!(said.contains("of 139.0 GiB available"), "{said}");
    let eight = stdout_of(&format!("plan --compare --nproc 8 --gpu_memory_gib 79 {shape}"));
    let sizes = eight.lines().skip(1).take_while(|line| !line.starts_with("columns for one engine"));
    let sizes: Vec<(&str, &str)> = sizes
        .map(|line| line.trim_start_matches('*').split_whitespace())
        .map(|mut cells| (cells.next().unwrap(), cells.next().unwrap()))
        .collect();
    let expected =
        [("1", "1"), ("1", "2"), ("1", "4"), ("1", "8"), ("2", "1"), ("2", "2"), ("2", "4"), ("4", "1"), ("4", "2")];
    assert_eq!(sizes, expected, "28 heads are not divided by 8: {eight}");
    let nodes = stdout_of(&format!("plan --compare --nnodes 2 --nproc 7 --gpu_memory_gib 139 {shape}"));
    let within: Vec<&str> =
        nodes.lines().skip(1).take_while(|line| !line.starts_with("columns for one engine")).collect();
    assert!(within.len() == 2 && within[1].contains("5,5,4,4,4,4,2"), "none over nodes: {nodes}");
    let uneven = run(&format!("plan --compare --nproc 5 --gpu_memory_gib 79 {shape} per_device_train_batch_size=3"));
    uneven.assert_error("no row has a batch", 2, &["generation_batch_size = 15: expected"]);
    assert!(uneven.stdout.is_empty(), "{}", uneven.stdout);
    let wrong = run(&format!("plan --compare --nproc 4 --gpu_memory_gib 79 {shape} tensor_parallel_size=3"));
    wrong.assert_error("no such engines", 2, &["tensor_parallel_size = 3: expected a divisor of the 4 ranks"]);
    assert!(wrong.stdout.is_empty(), "{}", wrong.stdout);
    let short = run(&format!("plan --compare --nproc 4 --gpu_memory_gib 9 {shape} zero.stage=0"));
    short.assert_error("the table says which engines fit", 4, &["9.0 GiB are available"]);
    assert!(short.stdout.contains("# KV blocks"), "{}", short.stdout);
    let many = run(&format!("plan --nnodes 9999999999 --nproc 9999999999 {shape}"));
    many.assert_error("more than there can be", 2, &["'--nnodes <NNODES>': expected a whole number from 1 to 16384"]);
    let gpu = format!("plan --nproc 2 --gpu_memory_gib 139 {shape} zero.stage=3 pipeline_parallel_size=2");
    assert!(stdout_of(&gpu).contains("\nstage 1: layers 15 to 27 and head"));
    run(&gpu.replace("qwen2.5-7b", "qwen3-30b-a3b")).assert_error(
        "experts on GPUs",
        2,
        &[
            "pipeline_parallel_size = 2: expected 1, or ",
            "pipeline stages of such a model are supported only on CPUs so far",
        ],
    );
    let cpu = "plan --config configs/tiny-cpu.toml tensor_parallel_size=1 zero.stage=3 pipeline_parallel_size=2";
    let staged = stdout_of(&format!("{cpu} --nproc 2"));
    assert!(
        staged.contains("stage 0: layers 0 to 1, engine weights ")
            && staged.contains("\nstage 1: layers 2 to 3 and head"),
        "{staged}"
    );
    let copies = stdout_of(&format!("{cpu} --nproc 2 zero.shard_group_size=1"));
    assert!(copies.contains("\nstage 0: layers 0 to 1, engine weights in place, KV cache "), "{copies}");
    let split = "mode=split split.rollout_gpus=3 residency.optimizer=auto pipeline_parallel_size=3 zero.stage=2";
    let split = stdout_of(&format!("{cpu} --nproc 4 {split}"));
    let (_, engines) = split.split_once("memory per rank that generates").unwrap();
    assert!(engines.contains("\nstage 2: layer 3 and head, engine weights "), "{split}");
    for (more, expected) in [
        ("--nproc 3", "pipeline_parallel_size = 2: expected a divisor of the 3 ranks that generate: 1, 3"),
        (
            "--nproc 2 pipeline_partition=3,2",
            "pipeline_partition = 3,2: expected a sum of 4, the model's number of layers",
        ),
        ("--nproc 5 pipeline_parallel_size=5", "pipeline_parallel_size = 5: expected 1 to 4"),
    ] {
        run(&format!("{cpu} {more}")).assert_error(more, 2, &[expected]);
    }
}

/// Errors that depend on the number of processes are reported with their line, together with all other errors.
#[test]
fn too_few_ranks_are_reported_together_with_other_errors() {
    let ended = run(
        "--config configs/tiny-cpu.toml per_device_train_batch_size=3 reward_funcs=[\"exact_match\"] reward_weights=[]",
    );
    let file = fs::read_to_string("configs/tiny-cpu.toml").unwrap();
    let line = 1 + file.lines().position(|line| line.starts_with("tensor_parallel_size = 2")).unwrap();
    let size = format!(
        "tensor_parallel_size = 2: expected 1, as there is only one rank to generate; --nproc 2 starts more ranks (configs/tiny-cpu.toml:{line})"
    );
    let others = [
        "generation_batch_size = 3: expected",
        "reward_funcs = exact_match: expected built-in rewards",
        "the equivalent here: exact_answer",
    ];
    ended.assert_error("one process", 2, &[&[&*size][..], &others].concat());
    run("--config configs/tiny-cpu.toml lr=1e-4").assert_error(
        "a short name",
        2,
        &["unknown key 'lr'; did you mean 'learning_rate'?"],
    );
}

#[test]
fn report_rewrites_report_html() {
    let folder = tempfile::tempdir().unwrap();
    let line = r#"{"step": 1, "time": 1.0, "reward": 0.5}"#;
    fs::write(folder.path().join("metrics.jsonl"), format!("{line}\n")).unwrap();
    let said = stdout_of(&format!("report {}", folder.path().display()));
    assert!(Path::new(said.trim()).ends_with("report.html") && folder.path().join("report.html").exists());
    run("report nowhere").assert_error("no run", 3, &["nowhere/metrics.jsonl", "output folder of a run"]);
}

#[test]
fn each_benchmark_prints_one_json_line() {
    for line in [
        "bench train --preset micro --steps 1 --sequences 2 --sequence_len 8",
        "bench train --preset micro --steps 1 --sequences 2 --sequence_len 8 --zero_stage 3 --nproc 2",
        "bench train --preset tiny-moe --layers 1 --steps 1 --sequences 4 --sequence_len 8 --group 2 --routing zipf",
        "bench generate --preset micro --repeats 1 --prompts 2 --group 2 --completion_len 4",
        "bench serve --preset micro --repeats 1 --streams 1,9 --completion_len 4",
        "bench generate --preset micro --repeats 1 --prompts 2 --group 2 --completion_len 4 --nproc 2 --tp 2",
        "bench step --preset micro --steps 2 --prompts 2 --group 2 --beta 0.04 --residency-optimizer swap device=cpu",
        "bench step --preset micro --steps 1 --prompts 4 --group 2 --nproc 2 --tp 2 --completion-spread tail:2..9 --zero-stage 3 --device cpu",
    ] {
        let lines = json_lines(&stdout_of(line));
        assert_eq!(lines.len(), 1, "{line}");
        assert!(lines[0]["tokens_per_second"].as_f64().is_some_and(|rate| rate > 0.0), "{line}");
        if let Some(phases) = lines[0]["phases_by_step_s"].as_array() {
            let within = |(phases, seconds): (&serde_json::Value, &serde_json::Value)| {
                let generate = phases["generate"].as_f64().unwrap();
                generate > 0.0 && generate < seconds.as_f64().unwrap()
            };
            let seconds = lines[0]["step_times"].as_array().unwrap();
            assert!(phases.len() == seconds.len() && phases.iter().zip(seconds).all(within), "{line}: {}", lines[0]);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let traced = "bench step --preset micro --steps 1 --prompts 2 --group 2 --nproc 2 device=cpu trace=true";
    stdout_of(&format!("{traced} output_dir={}", folder.path().display()));
    let trace = std::fs::read_to_string(folder.path().join("trace/trace.json")).unwrap();
    let events: Vec<serde_json::Value> = serde_json::from_str(&trace).unwrap();
    for (rank, phase) in [(0, "generate"), (1, "generate"), (0, "optimizer"), (1, "optimizer")] {
        let of_phase =
            events.iter().filter(|event| event["name"] == phase && event["pid"] == rank && event["ph"] == "X");
        let steps: Vec<_> = of_phase.map(|event| event["args"]["step"].as_u64()).collect();
        assert_eq!(steps, [Some(0), Some(1), Some(2)], "{phase} on rank {rank}"); // two warm up
    }
    let slept =
        &json_lines(&stdout_of("bench sleep_wake --gib 0.01 --offload-gib 0.01 --cycles 3 --rest-ms 20 --nproc 2"))[0];
    assert!(slept["wake_ms"]["worst"].as_f64() > Some(0.0) && slept["copies"]["out_gb_s"].as_f64() > Some(0.0));
    let collectives = &json_lines(&stdout_of("bench collectives --max-mib 1 --nproc 2"))[0];
    assert_eq!(collectives["results"].as_array().unwrap().len(), 2 * 5);
}

/// TOML and YAML, `--a.b c`, `a.b=c`, the spellings of other launchers and hyphens all work.
#[test]
fn every_notation_of_a_key_reaches_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let yaml = folder.path().join("run.yaml");
    let text = format!(
        "model_name_or_path: {MODEL}\ntrain_file: configs/arithmetic/train.jsonl\nreward_funcs: [numeric_answer]\n\
         per_device_train_batch_size: 4\nnum_generations: 2\nmax_completion_length: 2\nmax_steps: 1\nzero:\n  stage: 1\n"
    );
    fs::write(&yaml, text).unwrap();
    let (yaml, out) = (yaml.display(), folder.path().join("out"));
    for nproc in ["--nproc=2", "--nproc_per_node 2", "--num-processes 2"] {
        let _ = fs::remove_dir_all(&out);
        stdout_of(&format!(
            "{nproc} --config {yaml} --zero.stage 3 --log-completions --seed=7 reward.num_threads=1 output_dir={}",
            out.display()
        ));
        let config: Value = serde_json::from_slice(&fs::read(out.join("run_config.json")).unwrap()).unwrap();
        assert_eq!(config["zero"]["stage"], 3);
        assert_eq!((&config["log_completions"], &config["seed"]), (&Value::Bool(true), &Value::from(7)));
        assert_eq!(config["reward"]["num_threads"], 1);
        assert_eq!(metrics(&out).len(), 1);
    }
}

#[test]
fn secrets_appear_in_no_file_or_message_of_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let secret = "WANDB_API_KEY=topsecret";
    let line = format!("{SMALL_RUN} logging_steps=9 output_dir={} system_prompt={secret}", out.display());
    let said = run(&line);
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    let state = fs::read_to_string(out.join("checkpoint-1/trainer_state.json")).unwrap();
    let resume = format!("{line} resume_from_checkpoint=latest");
    assert_eq!(run(&resume).code, Some(0), "the same secret is no change");
    let other = run(&resume.replace("topsecret", "otherwise"));
    assert_eq!(other.code, Some(2), "{}", other.stderr);
    assert!(other.stderr.contains("system_prompt was ") && !other.stderr.contains("otherwise"), "{}", other.stderr);
    let config = fs::read_to_string(out.join("run_config.json")).unwrap();
    assert!(config.contains("WANDB_API_KEY=[redacted]"), "{config}");
    let report = fs::read_to_string(out.join("report.html")).unwrap();
    let failed = run(&format!("{SMALL_RUN} model_name_or_path=https://me:topsecret@host/model"));
    assert_eq!(failed.code, Some(3));
    for text in [config, report, state, said.stdout, said.stderr, failed.stderr] {
        assert!(!text.contains("topsecret"), "{text}");
    }
}
