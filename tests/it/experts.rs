//! Whole runs of a tiny mixture-of-experts model: adapters of experts, and recorded routes.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::checkpoint::Runs;
use crate::program::{json_lines, random_model_of, run, stdout_of};

/// A reward that some of the random model's completions get.
const REWARD: [&str; 4] = [
    "reward_funcs=[\"format\"]",
    "reward_weights=[1.0]",
    "reward.format_pattern=.*(two|five|nine).*",
    "learning_rate=2e-2",
];

/// Writes a random model with two layers of four experts each, and the demo's tokenizer.
fn random_model(folder: &Path) -> PathBuf {
    let sizes = json!({"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "head_dim": 16});
    random_model_of(folder, "configs/arithmetic/config-moe.json", &sizes)
}

/// Greedy completions of a model folder with their log-probabilities.
fn generate(model: &Path, more: &str) -> Vec<(Value, f64)> {
    let prompt = "--prompt what --prompt five --prompt plus";
    let model = model.display();
    let lines =
        stdout_of(&format!("generate --model {model} --temperature 0 --max_completion_length 12 {prompt} {more}"));
    json_lines(&lines).iter().map(|line| (line["completion"].clone(), line["logprob"].as_f64().unwrap())).collect()
}

/// Two ranks of an engine split each expert or distribute the experts. The base is sharded, or in 4 bits. The saved adapters give the
/// same results merged and unmerged.
#[test]
fn lora_adapters_of_experts_are_trained_saved_and_served() {
    let runs = Runs::new();
    let model = random_model(&runs.path(""));
    let key = format!("model_name_or_path={}", model.display());
    let common =
        [&REWARD[..], &[&key, "lora.r=8", "lora.alpha=16", "max_steps=3", "save_steps=none", "beta=0.05"]].concat();
    let base = generate(&model, "");
    for (name, keys, more) in [
        ("width", &["zero.stage=2"][..], "--nproc 2 --tp 2"),
        ("whole", &["zero.stage=3", "enable_expert_parallel=true"], "--nproc 2 --tp 2 --enable_expert_parallel"),
        ("nf4", &["quantization=nf4", "lora.target_modules=[\"v_proj\", \"down_proj\"]"], ""),
    ] {
        runs.train_to_the_end(name, 2, &[&common[..], keys].concat());
        let metrics = runs.metrics(name);
        for step in 1..=3 {
            let values = &metrics[&(step, false)].values;
            assert!(values["sampling/sampling_logp_difference/max"] < 1e-4, "{name}: {values:?}");
            assert!(values["grad_norm"] > 0.0 && values["router_replay/differing_share"] < 1e-2, "{name}: {values:?}");
        }
        assert!(metrics[&(3, false)].values["kl"] > 1e-5, "{name}: {:?}", metrics[&(3, false)]);
        let (adapters, merged) = (runs.path(name).join("final"), runs.path(&format!("{name}-merged")));
        stdout_of(&format!("export --model {} --output {} --merge", adapters.display(), merged.display()));
        let (own, whole) = (generate(&adapters, more), generate(&merged, ""));
        for ((own, whole), (_, base)) in own.iter().zip(&whole).zip(&base) {
            assert!(own.0 == whole.0 && (own.1 - whole.1).abs() < 1e-3, "{name}: {own:?} {whole:?}");
            assert!((own.1 - base).abs() > 1e-2, "{name}: {own:?}, the base {base}");
        }
    }
    let adapters = runs.path("width").join("final");
    let options = "--prompt a --device cpu --rollout_quantization mxfp4";
    let refused = run(&format!("generate --model {} {options}", adapters.display()));
    refused.assert_error("adapters beside MXFP4", 2, &["rollout_quantization = mxfp4", "adapters of experts"]);
    let keys = format!(
        "{key} lora.r=8 train_file=configs/arithmetic/train.jsonl reward_funcs=[\"format\"] max_completion_length=12"
    );
    let refused = run(&format!("plan {keys} lora.target_modules=[\"gate_proj\"]"));
    refused.assert_error("half of what PEFT reads", 2, &["lora.target_modules = gate_proj", "down_proj together"]);
    let refused = run(&format!("plan {keys} lora.dropout=0.1"));
    refused.assert_error(
        "dropout",
        2,
        &["lora.dropout = 0.1", "PEFT does not support dropout for adapters of experts"],
    );
}

/// Whole runs with gated delta nets and experts including a shared one: two ranks share an engine; sharded full training, or
/// adapters on a 4-bit base. The trainer replays the sampler's routes.
#[test]
fn hybrids_with_experts_sample_and_train() {
    let runs = Runs::new();
    let keys = json!({
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    });
    let model = random_model_of(&runs.path(""), "configs/arithmetic/config-hybrid.json", &keys);
    let key = format!("model_name_or_path={}", model.display());
    let common = [&REWARD[..], &[&key, "max_steps=2", "save_steps=none", "learning_rate=2e-3"]].concat();
    for (name, keys) in [
        ("whole", &["zero.stage=3", "gradient_checkpointing=full"][..]),
        ("nf4", &["zero.stage=2", "gradient_checkpointing=selective", "lora.r=8", "lora.alpha=16", "quantization=nf4"]),
    ] {
        runs.train_to_the_end(name, 2, &[&common[..], keys].concat());
        let metrics = runs.metrics(name);
        for step in 1..=2 {
            let values = &metrics[&(step, false)].values;
            assert!(values["sampling/sampling_logp_difference/max"] < 1e-3, "{name}: {values:?}");
            assert!(values["grad_norm"] > 0.0 && values["router_replay/differing_share"] < 1e-2, "{name}: {values:?}");
        }
    }
    let (alone, shared) = (generate(&model, ""), generate(&model, "--nproc 2 --tp 2"));
    for (alone, shared) in alone.iter().zip(&shared) {
        assert!(alone.0 == shared.0 && (alone.1 - shared.1).abs() < 1e-3, "{alone:?} {shared:?}");
    }
}

/// The resumed run, including the adapters' optimizer shards, equals the uninterrupted one.
#[test]
fn a_resumed_run_with_adapters_of_experts_equals_an_uninterrupted_one() {
    let runs = Runs::new();
    let model = format!("model_name_or_path={}", random_model(&runs.path("")).display());
    let common = [&REWARD[..], &[&model, "lora.r=4", "zero.stage=2", "max_steps=4"]].concat();
    runs.train_to_the_end("straight", 2, &common);
    runs.train_to_the_end("resumed", 2, &[&common[..], &[&runs.resume("straight", 2)]].concat());
    runs.assert_same("resumed", "straight", &[3, 4]);
}

fn differing(runs: &Runs, run: &str, step: u64) -> f64 {
    runs.metrics(run)[&(step, false)].values["router_replay/differing_share"]
}

/// Unfinished trajectories keep their routes, also in checkpoints. Routes of older weights differ from the trainer's own; without carried groups
/// there are none.
#[test]
fn recorded_routes_survive_carrying_and_resuming() {
    let runs = Runs::new();
    let model = format!("model_name_or_path={}", random_model(&runs.path("")).display());
    let common = [&REWARD[..], &[&model, "max_steps=4"]].concat();
    let carried = [&common[..], &["oversample=1.0", "partial_rollout=true", "max_num_seqs=24"]].concat();
    runs.train_to_the_end("straight", 2, &carried);
    let state = std::fs::read_to_string(runs.path("straight/checkpoint-2/trainer_state.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    let begun = state["carried"].as_array().unwrap().iter().filter_map(|group| group["completions"].as_array());
    let routed: Vec<&Value> = begun.flatten().map(|completion| &completion["routed_experts"]).collect();
    assert!(routed.iter().any(|routed| routed[0] == 4 && !routed[1].as_str().unwrap().is_empty()), "{routed:?}");
    runs.train_to_the_end("resumed", 2, &[&carried[..], &[&runs.resume("straight", 2)]].concat());
    runs.assert_same("resumed", "straight", &[3, 4]);
    let kept = [&carried[..], &["carried_kv=keep"]].concat();
    runs.train_to_the_end("kept", 2, &kept);
    runs.train_to_the_end("plain", 2, &common);
    let share = |run| (1..=4).map(|step| differing(&runs, run, step)).collect::<Vec<_>>();
    println!("carried {:?}, kept {:?}, plain {:?}", share("straight"), share("kept"), share("plain"));
    assert!(share("straight")[1..].iter().any(|share| *share > 1e-3), "{:?}", share("straight"));
    assert!(share("kept")[1..].iter().any(|share| *share > 1e-3), "{:?}", share("kept"));
    assert!(share("plain").iter().all(|share| *share < 1e-3), "{:?}", share("plain"));
}

/// Each update of a generation batch replays the routes of its own sequences, on whichever rank they were sampled. Weights hardly change, so
/// that the trainer would choose the same routes. Engines are on separate ranks, so that sequences and routes are moved between ranks.
#[test]
fn every_update_replays_the_routes_of_its_sequences() {
    let runs = Runs::new();
    let model = format!("model_name_or_path={}", random_model(&runs.path("")).display());
    let two =
        ["learning_rate=1e-6", "steps_per_generation=2", "tensor_parallel_size=1", "max_steps=4", "save_steps=none"];
    runs.train_to_the_end("updates", 2, &[&REWARD[..3], &two, &[&model]].concat());
    let metrics = runs.metrics("updates");
    let shares: Vec<f64> = metrics.values().map(|line| line.values["router_replay/differing_share"]).collect();
    assert!(!shares.is_empty() && shares.iter().all(|share| *share < 1e-3), "{shares:?}");
}

/// Routes are sent from the engines' ranks to the trainers'. Batches that were sampled ahead have the routes of the weights that sampled them.
#[test]
fn split_mode_engines_record_routes() {
    let runs = Runs::new();
    let model = format!("model_name_or_path={}", random_model(&runs.path("")).display());
    let three = ["per_device_train_batch_size=8", "tensor_parallel_size=1", "residency.optimizer=auto", "max_steps=4"];
    // Micro-batches are others on two trainers, and each balances its own tokens.
    let common = [&REWARD[..], &three, &["router_aux_loss_coef=0", &model]].concat();
    let split = [&common[..], &["mode=split", "split.rollout_gpus=1"]].concat();
    runs.train_to_the_end("both", 3, &common);
    runs.train_to_the_end("split", 3, &split);
    let (split_metrics, both) = (runs.metrics("split"), runs.metrics("both"));
    for step in 1..=4 {
        let texts = |run| runs.completions(run, step).into_iter().map(|row| (row.prompt, row.completion, row.rewards));
        assert!(texts("split").eq(texts("both")), "step {step}");
        for name in ["loss", "grad_norm", "entropy", "sampling/sampling_logp_difference/mean"] {
            let [own, other] = [&split_metrics, &both].map(|metrics| metrics[&(step, false)].values[name]);
            assert!((own - other).abs() < 1e-5 + 1e-4 * other.abs(), "step {step}, {name}: {own}, {other}");
        }
    }
    runs.train_to_the_end("resumed", 3, &[&split[..], &[&runs.resume("split", 2)]].concat());
    runs.assert_same("resumed", "split", &[3, 4]);
    runs.train_to_the_end("ahead", 3, &[&split[..], &["split.async_steps=1", "save_steps=none"]].concat());
    let share = |run| (1..=4).map(|step| differing(&runs, run, step)).collect::<Vec<_>>();
    println!("split {:?}, ahead {:?}", share("split"), share("ahead"));
    assert!(share("split").iter().all(|share| *share < 1e-3), "{:?}", share("split"));
    let ahead = share("ahead");
    assert!(ahead[0] < 1e-3 && ahead[1..].iter().any(|share| *share > 1e-3), "{ahead:?}");
}
