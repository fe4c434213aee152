//! Invalid input ends with the documented exit code and one message that says what is wrong, where, what was expected, and how to fix it.
//! Numbers in comments are rows of the table in docs/faults.md.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::program::{MODEL, SMALL_RUN, copy_of_model, metrics, run};

#[test]
fn faulty_model_folders_are_refused_with_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let weights = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL).join("model.safetensors")).unwrap();
    let half = weights.len() / 2;
    let half_text = half.to_string();
    type Damage<'a> = &'a dyn Fn(&Path);
    let cases: &[(&str, Damage, i32, &[&str])] = &[
        (
            "11 truncated",
            &|model| write(model, "model.safetensors", &weights[..half]),
            3,
            &["model.safetensors", "expected", &half_text],
        ),
        (
            "12 header larger than the file",
            &|model| hostile(model, u64::MAX, b"{}"),
            3,
            &["model.safetensors", "header"],
        ),
        (
            "12 offsets outside the file",
            &|model| hostile(model, HOSTILE.len() as u64, HOSTILE),
            3,
            &["model.safetensors"],
        ),
        (
            "12 a path out of the folder",
            &|model| index(model, "../outside.safetensors"),
            3,
            &["model.safetensors.index.json", "../outside.safetensors"],
        ),
        (
            "13 pickled weights",
            &|model| rename(model, "model.safetensors", "pytorch_model.bin"),
            3,
            &["pytorch_model.bin", "convert them with: python3"],
        ),
        (
            "25 vocabulary",
            &|model| edit(model, "config.json", |config| config["vocab_size"] = json!(8)),
            3,
            &["tokenizer", "ids up to", "8 embedding rows"],
        ),
        ("26 no EOS", &|model| remove_eos(model), 3, &["end-of-sequence", "eos_token"]),
        (
            "26 no chat template",
            &|model| edit(model, "tokenizer_config.json", |config| remove(config, "chat_template")),
            3,
            &["chat template", "chat_template.jinja"],
        ),
        (
            "layers that nothing computes",
            &|model| edit(model, "config.json", |config| config["layer_types"] = json!(vec!["linear_attention"; 4])),
            3,
            &["config.json: layer_types", "layer 0 is \"linear_attention\""],
        ),
        (
            "no configuration",
            &|model| fs::remove_file(model.join("config.json")).unwrap(),
            3,
            &["config.json", "this is not a Hugging Face model folder"],
        ),
    ];
    for (what, damage, code, fragments) in cases {
        let model = copy_of_model(&folder.path().join(what.replace(' ', "_")));
        damage(&model);
        let line = format!("{SMALL_RUN} model_name_or_path={} output_dir={}", model.display(), out(folder.path()));
        run(&line).assert_error(what, *code, fragments);
    }
}

/// Header with a tensor that claims more bytes than the file has.
const HOSTILE: &[u8] = br#"{"model.norm.weight":{"dtype":"F32","shape":[128],"data_offsets":[0,99999999999]}}"#;

fn write(model: &Path, file: &str, bytes: &[u8]) {
    fs::write(model.join(file), bytes).unwrap();
}

fn rename(model: &Path, from: &str, to: &str) {
    fs::rename(model.join(from), model.join(to)).unwrap();
}

fn hostile(model: &Path, header_len: u64, header: &[u8]) {
    write(model, "model.safetensors", &[&header_len.to_le_bytes()[..], header].concat());
}

fn index(model: &Path, file: &str) {
    rename(model, "model.safetensors", "model-00001-of-00001.safetensors");
    let index = json!({"weight_map": {"model.norm.weight": file}});
    write(model, "model.safetensors.index.json", index.to_string().as_bytes());
}

fn edit(model: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(model.join(file)).unwrap()).unwrap();
    change(&mut value);
    write(model, file, value.to_string().as_bytes());
}

fn remove(object: &mut Value, key: &str) {
    object.as_object_mut().unwrap().remove(key);
}

fn remove_eos(model: &Path) {
    edit(model, "tokenizer_config.json", |config| remove(config, "eos_token"));
    for file in ["config.json", "generation_config.json"] {
        edit(model, file, |config| remove(config, "eos_token_id"));
    }
}

fn out(folder: &Path) -> String {
    folder.join("out").display().to_string()
}

#[test]
fn faulty_data_files_are_refused_with_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let good = r#"{"prompt": "what is one plus one ?", "answer": "2"}"#;
    let cases: &[(&str, String, &str, &[&str])] = &[
        ("21 empty", String::new(), "", &["rows.jsonl", "no usable prompts", "0 read"]),
        (
            "21 empty after filtering",
            format!("{good}\n{good}\n"),
            "max_prompt_length=1",
            &["2 read", "2 longer than max_prompt_length", "0 kept"],
        ),
        (
            "22 missing column",
            format!("{good}\n{{\"prompt\": \"what\", \"result\": 2}}\n"),
            "",
            &["rows.jsonl:2", "'answer'", "columns seen: prompt, result"],
        ),
        (
            "22 no prompt",
            format!("{good}\n\n{{\"text\": \"what\", \"answer\": 2}}\n"),
            "--nproc 2",
            &["rows.jsonl:3", "'prompt' or 'problem' or 'question'", "columns seen: text, answer"],
        ),
        ("22 bad line", format!("{good}\n{{\"prompt\": \n"), "--nproc 2", &["rows.jsonl:2", "not JSON"]),
        (
            "23 no room for a completion",
            format!("{good}\n"),
            "max_completion_length=60",
            &["1 read", "1 longer than 4 tokens, context 64 less max_completion_length 60"],
        ),
    ];
    let rows = folder.path().join("rows.jsonl");
    for (what, text, more, fragments) in cases {
        fs::write(&rows, text).unwrap();
        let line = format!("{SMALL_RUN} train_file={} output_dir={} {more}", rows.display(), out(folder.path()));
        run(&line).assert_error(what, 3, fragments);
    }
    fs::write(&rows, format!("{good}\n")).unwrap();
    let few = format!("--nproc 2 {SMALL_RUN} train_file={} output_dir={}", rows.display(), out(folder.path()));
    run(&few).assert_error("fewer rows than a batch", 2, &["4 prompts", "rows.jsonl has 1"]);
    for command in ["", "plan"] {
        let line =
            format!("{command} --nproc 2 {SMALL_RUN} max_completion_length=64 output_dir={}", out(folder.path()));
        let ended = run(line.trim_start());
        ended.assert_error("no room at all", 2, &["max_completion_length = 64: expected at most 63", "context of 64"]);
        assert!(!ended.stderr.contains("rank"), "{}", ended.stderr);
    }
    let missing = format!("{SMALL_RUN} --nproc 2 train_file=nowhere.jsonl output_dir={}", out(folder.path()));
    run(&missing).assert_error("missing file", 3, &["nowhere.jsonl: train_file: No such file"]);
    let missing = format!("{SMALL_RUN} --nproc 2 eval_file=nowhere.jsonl output_dir={}", out(folder.path()));
    run(&missing).assert_error("missing held-out file", 3, &["nowhere.jsonl: eval_file: No such file"]);
    let sft = format!("sft --config configs/arithmetic/warmup.toml train_file={}", rows.display());
    for line in [SMALL_RUN, &sft] {
        let ended = run(&format!("{line} --nproc 2 output_dir={}/below", rows.display()));
        ended.assert_error("output_dir below a file", 2, &["output_dir = ", "rows.jsonl/below: expected a folder"]);
        assert!(!ended.stderr.contains("rank"), "{}", ended.stderr);
    }
}

#[test]
fn faulty_configurations_are_refused_with_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("run.toml");
    fs::write(&config, "seed = 1\n\n[zero]\nstage = 2\nstagee = 3\n").unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let eval = format!("eval --model {MODEL} --data configs/arithmetic/eval.jsonl");
    let port = taken.local_addr().unwrap().port();
    let small = |more: &str| format!("{SMALL_RUN} {more}");
    let cases: &[(&str, String, i32, &[&str])] = &[
        (
            "16 mistyped key in a file",
            format!("--config {}", config.display()),
            2,
            &["run.toml:5", "'zero.stagee'", "did you mean 'zero.stage'?"],
        ),
        ("16 mistyped option", small("--learnign_rate 1e-4"), 2, &["'learnign_rate'", "did you mean 'learning_rate'?"]),
        (
            "34 a secret in a word",
            "generate --model m --prompt x my_token=topsecret".into(),
            2,
            &["my_token=[redacted]"],
        ),
        (
            "16 mistyped reward",
            "eval --model configs/arithmetic/model --data configs/arithmetic/eval.jsonl --reward nosuch".into(),
            2,
            &["--reward = nosuch", "numeric_answer"],
        ),
        ("16 mistyped override", small("zreo.stage=1"), 2, &["command line", "did you mean 'zero.stage'?"]),
        ("4 bits to train", small("quantization=nf4"), 2, &["quantization", "lora.r"]),
        ("a rank of nothing", small("lora.r=0"), 2, &["lora.r = 0", "from 1 to"]),
        ("residency", small("residency.optimizer=disk"), 2, &["auto or one of resident, swap, stream"]),
        ("no such command", "trian --config configs/tiny-cpu.toml".into(), 2, &["'trian'", "'train'"]),
        ("no file", "--config nowhere.toml".into(), 2, &["nowhere.toml"]),
        ("no keys", "train beta=0".into(), 2, &["model_name_or_path", "required"]),
        ("a value of the wrong type", small("--beta"), 2, &["beta = true", "number"]),
        ("17 CUDA", small("device=cuda"), 4, &["device = cuda", "set device = cpu"]),
        (
            "17 CUDA, supervised",
            format!(
                "sft --nproc 2 --config configs/arithmetic/warmup.toml model_name_or_path={MODEL} train_file=configs/arithmetic/train.jsonl device=cuda"
            ),
            4,
            &["set device = cpu"],
        ),
        (
            "18 heads",
            small("--nproc 3 tensor_parallel_size=3"),
            2,
            &["tensor_parallel_size = 3", "1, 2, 4", "4 query heads"],
        ),
        ("18 ranks", small("--nproc 3 tensor_parallel_size=2"), 2, &["the 3 ranks that generate", "1, 3"]),
        ("18 batch", small("per_device_train_batch_size=6"), 2, &["num_generations = 4", "nearest valid", "4 or 8"]),
        ("19 port", small(&format!("--nproc 2 --master_port {port}")), 4, &["--master_port", "choose another port"]),
        ("19 address", small("--nproc 2 --master_addr 192.0.2.1"), 4, &["--master_addr 192.0.2.1", "of this machine"]),
        (
            "a network of one node",
            format!("plan {SMALL_RUN} --network_gb_s 50"),
            2,
            &["required arguments were not provided", "--nnodes"],
        ),
        ("a node by itself", small("--node_rank 1"), 2, &["--node_rank = 1", "the number of nodes in --nnodes"]),
        (
            "a node too many",
            format!("plan {SMALL_RUN} --nnodes 2 --node_rank 2"),
            2,
            &["--node_rank = 2: expected 0 to 1"],
        ),
        (
            "a type of no states",
            small("mamba_ssm_cache_dtype=bfloat16"),
            2,
            &["float32, or a model with gated delta nets"],
        ),
        (
            "no states to time",
            "bench generate --device cpu --preset micro --mamba_ssm_cache_dtype bfloat16".into(),
            2,
            &["--mamba_ssm_cache_dtype = bfloat16: expected float32"],
        ),
        ("cuts of one stage", small("pipeline_partition=2,2"), 2, &["expected none, or pipeline_parallel_size = 2"]),
        (
            "nothing to compare",
            "bench compare nowhere.jsonl --output nowhere".into(),
            3,
            &["nowhere.jsonl: No such file"],
        ),
        ("no ranks", small("--nproc 0"), 2, &["--nproc", "from 1 to 16384"]),
        ("reward", small("reward_weights=[] reward_funcs=[\"nosuch\"]"), 2, &["nosuch", "numeric_answer"]),
        ("too large", format!("bench collectives --max_mib {}", 1u64 << 44), 2, &["--max_mib", "1 to 1048576"]),
        ("no repetition", "bench train --steps 0".into(), 2, &["--steps", "at least 1"]),
        ("routing", "bench train --routing skewed".into(), 2, &["--routing", "`own`, `uniform`, `zipf`"]),
        ("no experts", "bench train --preset micro --routing zipf".into(), 2, &["--routing = zipf", "with experts"]),
        ("greedy below zero", format!("generate --model {MODEL} --prompt what --temperature -1"), 2, &["at least 0"]),
        (
            "heads of an engine",
            format!("generate --model {MODEL} --prompt what --tp 3 --nproc 3"),
            2,
            &["error: --tensor_parallel_size = 3", "1, 2, 4"],
        ),
        (
            "stages of a hybrid, before any process starts",
            "serve --model tests/golden/qwen3_5 --nproc 2 --pp 2 --port 0".into(),
            2,
            &["error: --pipeline_parallel_size = 2: expected 1, as every stage needs at least one layer with \
                 attention"],
        ),
        (
            "ranks of an engine",
            format!("generate --model {MODEL} --prompt what --tp 2 --nproc 3"),
            2,
            &["error: --tensor_parallel_size = 2: expected a divisor of the 3 ranks that generate: 1, 3"],
        ),
        ("no group", format!("{eval} --answer_pattern [0-9]"), 2, &["--answer_pattern = [0-9]", "with a group"]),
        (
            "23 prompt over the context",
            format!("generate --model {MODEL} --prompt {}", "7".repeat(80)),
            2,
            &["1 to 63 tokens"],
        ),
        (
            "23 prompt over a shorter context",
            format!("generate --model {MODEL} --prompt 7777777777 --max-model-length 8"),
            2,
            &["1 to 7 tokens"],
        ),
    ];
    for (what, line, code, fragments) in cases {
        run(line).assert_error(what, *code, fragments);
    }
}

/// Rows 23 and 24: prompts over the limit are counted; an incomplete last batch of an epoch and uneven micro-batches of ranks work.
#[test]
fn long_prompts_are_counted_and_incomplete_batches_train() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    let row = |words: &str| format!("{{\"prompt\": \"what is {words} ?\", \"answer\": \"2\"}}\n");
    let text = ["one plus one", "one", "two", "ten", "zero plus two", "twenty one plus twenty one plus one"].map(row);
    fs::write(&rows, text.concat()).unwrap();
    let line = format!(
        "--nproc 2 {SMALL_RUN} train_file={} output_dir={} max_prompt_length=8 max_steps=none num_train_epochs=2 \
         max_tokens_per_micro_batch=20 lr_scheduler_type=linear learning_rate=1e-4 top_k=-1",
        rows.display(),
        out(folder.path())
    );
    let ended = run(&format!("{line} dataloader_drop_last=false"));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("6 read, 1 longer than max_prompt_length"), "{}", ended.stderr);
    assert_eq!(metrics(&folder.path().join("out")).len(), 3); // 5 rows twice, 4 prompts a step

    let notice = "command line: top_k = -1 is read as top_k = 0";
    assert_eq!(ended.stderr.matches(notice).count(), 1, "once for all ranks\n{}", ended.stderr);

    fs::remove_dir_all(folder.path().join("out")).unwrap();
    let ended = run(&line);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let steps = metrics(&folder.path().join("out"));
    let column = |name: &str| steps.iter().map(|step| step[name].as_f64().unwrap()).collect::<Vec<_>>();
    assert_eq!((column("epoch"), column("learning_rate")), (vec![1.0, 2.0], vec![1e-4, 5e-5])); // as TRL 1.16
}

/// Row 28: a step without any gradient is not an error.
#[test]
fn equal_rewards_of_all_groups_give_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!(
        "{SMALL_RUN} max_steps=2 reward_funcs=[\"format\"] reward_weights=[1.0] reward.format_pattern=never output_dir={}",
        out(folder.path())
    );
    let ended = run(&line);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("warning: all groups have equal rewards").count(), 1, "{}", ended.stderr);
    for line in metrics(&folder.path().join("out")) {
        assert_eq!(
            (&line["frac_reward_zero_std"], &line["loss"], &line["grad_norm"]),
            (&json!(1.0), &json!(0.0), &json!(0.0))
        );
    }
}

/// A warning says once how much of a step an importance sampling correction on whole sequences masks. The correction per token masks little.
#[test]
fn an_importance_correction_that_masks_most_samples_gives_a_warning() {
    for (mode, count) in [("sequence_mask", 1), ("token_truncate", 0)] {
        let folder = tempfile::tempdir().unwrap();
        let keys = format!("importance_sampling_mode={mode} importance_sampling_clip_max=0.6");
        let ended = run(&format!("{SMALL_RUN} max_steps=2 {keys} output_dir={}", out(folder.path())));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let told = "warning: the importance sampling correction weights samples by 0.00 on average";
        assert_eq!(ended.stderr.matches(told).count(), count, "{mode}: {}", ended.stderr);
    }
}

/// Row 13: pickled adapters, as older versions of PEFT wrote them.
#[test]
fn pickled_adapters_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "adapter_config.json", json!({"base_model_name_or_path": MODEL}).to_string().as_bytes());
    write(folder.path(), "adapter_model.bin", b"pickled");
    let line = format!("generate --model {} --prompt what", folder.path().display());
    run(&line).assert_error("13 pickled adapters", 3, &["adapter_model.bin", "convert them with: python3"]);
}

/// Model sizes without a kernel are rejected by the plan, before the first step.
#[test]
fn model_shapes_that_gpus_do_not_support_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    let shape = |head_dim: usize, hidden_size: usize| {
        let mut json: Value = serde_json::from_slice(&fs::read(Path::new(MODEL).join("config.json")).unwrap()).unwrap();
        (json["head_dim"], json["hidden_size"]) = (head_dim.into(), hidden_size.into());
        json["max_position_embeddings"] = 4096.into();
        fs::write(&config, json.to_string()).unwrap();
    };
    let plan = |more: &str| run(&format!("plan --config_json {} {more}", config.display()));
    shape(100, 128);
    let heads = ["config.json: head_dim = 100 is not supported on a GPU", "multiples of 8 up to 256", "dtype=float32"];
    plan("--gpu_memory_gib 80").assert_error("bfloat16 heads of 100", 3, &heads);
    for served in ["--gpu_memory_gib 80 dtype=float32", "device=cpu"] {
        assert_eq!(plan(served).code, Some(0), "{served}");
    }
    shape(64, 160);
    let nf4 = plan("device=cpu quantization=nf4 lora.r=4");
    nf4.assert_error("NF4 of rows of 160", 2, &["quantization = nf4: expected none", "multiple of 64", "have 160"]);
}

/// Lengths to predict seconds for that no sequence of the model has.
#[test]
fn expected_lengths_beyond_the_context_are_refused() {
    let plan = |lengths: &str| run(&format!("plan --gpu h200 --model_preset qwen2.5-0.5b {lengths}"));
    let most = "expected prompt and completion of at most 32768 tokens together";
    for (lengths, what) in [
        ("--expected_prompt_length 1000000000000", "--expected_prompt_length = 1000000000000"),
        ("--expected_prompt_length 512 --expected_completion_length 64..32768", "--expected_completion_length = 32768"),
    ] {
        let refused = plan(lengths);
        refused.assert_error(lengths, 2, &[what, most]);
        assert_eq!(refused.stdout, "", "no plan before the error");
    }
    assert_eq!(plan("--expected_prompt_length 512 --expected_completion_length 32256").code, Some(0));
}
