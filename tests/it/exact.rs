//! Runs with `exact`: the trainer's log-probabilities equal the sampler's, with packing, shared prompts, recomputation, sharding, carried groups, and
//! every family of dense models.

use serde_json::Value;

use crate::program::{SMALL_RUN, VARIED_REWARDS, golden_model, metrics, run};

const MAX: &str = "sampling/sampling_logp_difference/max";

/// The dense models of tests/golden: with and without windows, biases, norms of heads, partial rotation, GELU, scaled residuals and logits.
const DENSE_MODELS: [&str; 13] = [
    "gemma3",
    "glm",
    "glm4",
    "granite",
    "llama3",
    "ministral",
    "mistral",
    "olmo2",
    "phi3",
    "phi3_window",
    "qwen2_window",
    "qwen3",
    "smollm3_window",
];

/// The metrics of all steps of a run, which must succeed.
fn steps(keys: &str) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL_RUN} max_steps=3 learning_rate=1e-3 {keys} output_dir={}", folder.path().display());
    let ended = run(&line);
    assert_eq!(ended.code, Some(0), "{line}\n{}", ended.stderr);
    metrics(folder.path()).into_iter().filter(|line| line["loss"].is_number()).collect()
}

fn assert_exact(keys: &str) -> Vec<Value> {
    let steps = steps(&format!("exact=true {keys}"));
    let greatest: Vec<_> = steps.iter().map(|step| &step[MAX]).collect();
    assert!(greatest.len() >= 2 && greatest.iter().all(|max| max.as_f64() == Some(0.0)), "{keys}: {greatest:?}");
    assert!(steps.iter().any(|step| step["grad_norm"].as_f64() > Some(0.0)), "{keys}: nothing was learned");
    steps
}

/// Two ranks with shared prompts, packing, full recomputation and optimizer state that is swapped to the host.
#[test]
fn exact_sampler_and_trainer_agree_in_float32() {
    assert_exact("--nproc 2 zero.stage=2 gradient_checkpointing=full share_prompts=true");
    let without = steps("--nproc 2 zero.stage=2 gradient_checkpointing=full share_prompts=true");
    assert!(without.iter().any(|step| step[MAX].as_f64() > Some(0.0)), "else equality would show nothing");
}

/// Weights gathered unit by unit, one sequence per micro-batch, chunked prompts, and a float32 residual stream.
#[test]
fn exact_sampler_and_trainer_agree_in_bfloat16() {
    assert_exact(
        "--nproc 2 zero.stage=3 dtype=bfloat16 residual_dtype=float32 share_prompts=false max_tokens_per_micro_batch=40 \
         max_num_batched_tokens=16 max_num_seqs=3 gradient_checkpointing=selective temperature=0.7 top_p=0.9",
    );
}

/// Every rank has all weights and gradients, and its part of the optimizer's state.
#[test]
fn exact_sampler_and_trainer_agree_in_stage_1() {
    assert_exact("--nproc 2 zero.stage=1 share_prompts=true");
    assert_exact("--nproc 2 zero.stage=1 dtype=bfloat16 share_prompts=false gradient_checkpointing=selective");
}

#[test]
fn exact_sampler_and_trainer_agree_for_all_dense_models_in_float32() {
    dense_models_agree("float32");
}

#[test]
fn exact_sampler_and_trainer_agree_for_all_dense_models_in_bfloat16() {
    dense_models_agree("bfloat16");
}

fn dense_models_agree(dtype: &str) {
    let folder = tempfile::tempdir().unwrap();
    for name in DENSE_MODELS {
        let model = golden_model(&folder.path().join(name), name);
        // Sequences are longer than the models' windows of 8 tokens.
        assert_exact(&format!(
            "{VARIED_REWARDS} max_steps=2 max_train_samples=16 max_completion_length=12 temperature=1.5 save_steps=none \
             dtype={dtype} model_name_or_path={}",
            model.display()
        ));
    }
}

/// Adapters, with trainers and engines on separate ranks.
#[test]
fn exact_sampler_and_trainer_agree_with_adapters() {
    assert_exact("--nproc 2 zero.stage=2 lora.r=4 lora.target_modules=all-linear beta=0.04");
    assert_exact(
        "--nproc 2 zero.stage=0 mode=split split.rollout_gpus=1 lora.r=4 dtype=bfloat16 residency.optimizer=resident",
    );
}

/// The batch contains tokens of older weights: log-probabilities of the newest tokens are equal, and ratios of the others differ from 1.
#[test]
fn exact_sampler_and_trainer_agree_with_carried_groups() {
    let steps = assert_exact("--nproc 2 max_steps=5 oversample=1.0 partial_rollout=true max_completion_length=24");
    let continued = |step: &Value| step["partial_rollout/continued_token_share"].as_f64().unwrap_or(0.0);
    assert!(steps.iter().any(|step| continued(step) > 0.0), "nothing was carried over");
}

/// Several updates per batch use the sampler's log-probabilities as old ones, so that no forward pass computes them.
#[test]
fn exact_runs_use_the_samplers_log_probabilities_as_old_ones() {
    for step in assert_exact("max_steps=12 num_iterations=2 steps_per_generation=2 gradient_accumulation_steps=1") {
        assert!(step["timing_s/score"].as_f64().unwrap_or(0.0) == 0.0, "{step}");
    }
}

/// A GEMM with another summation order in one step on one rank.
#[test]
fn an_exact_run_ends_when_a_gemm_differs() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!(
        "{SMALL_RUN} --nproc 2 max_steps=4 exact=true fault=1:1:forward_backward:unequal output_dir={}",
        folder.path().display()
    );
    let ended = run(&line);
    assert_eq!(ended.code, Some(16), "{line}\n{}", ended.stderr);
    assert!(
        ended.stderr.contains("log-probabilities of the trainer and of the sampler differ by up to"),
        "{}",
        ended.stderr
    );
}

/// A run without `exact` is resumed with it and vice versa; a message says so.
#[test]
fn a_run_can_be_resumed_with_and_without_exact() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display();
    let go = |keys: &str| {
        let ended = run(&format!("{SMALL_RUN} save_steps=1 output_dir={out} {keys}"));
        assert_eq!(ended.code, Some(0), "{keys}\n{}", ended.stderr);
        ended.stderr
    };
    go("max_steps=1");
    let said = go("max_steps=2 exact=true resume_from_checkpoint=latest");
    assert!(said.contains("exact was false, is true"), "{said}");
    let said = go("max_steps=3 exact=false resume_from_checkpoint=latest");
    assert!(said.contains("exact was true, is false"), "{said}");
    let last: Vec<Value> = metrics(folder.path()).into_iter().filter(|line| line["loss"].is_number()).collect();
    assert_eq!(last.iter().map(|step| step[MAX].as_f64() == Some(0.0)).filter(|is_exact| *is_exact).count(), 1);
}
