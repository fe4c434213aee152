//! FP8 GEMMs: distance between sampler and trainer compared with bfloat16, for plain weights and for weights with outliers.

use colo_grpo::internal::config::{KvCacheDtype, RolloutQuantization};
use colo_grpo::internal::model::ModelSpec;
use colo_grpo::internal::rollout::EngineOptions;
use colo_grpo::internal::types::SamplingParams;
use serde_json::json;
use tch::Kind;

use super::{LARGE, Model, SMALL, completions, prompts};

/// Mean and 99th percentile of the distances between sampled log-probabilities and the trainer's.
fn distance(model: &Model, options: &EngineOptions, num_generations: usize) -> [f64; 2] {
    let params = SamplingParams { num_generations, max_completion_length: 200, ..SamplingParams::default() };
    let groups = model.generate(options, &prompts(6, 400), &params);
    let sampled: Vec<f32> = completions(&groups).flat_map(|(_, logprobs)| logprobs).collect();
    let trained = model.score(&groups, (Kind::BFloat16, options.residual));
    let mut distances: Vec<f64> = sampled.iter().zip(&trained).map(|(a, b)| f64::from((a - b).abs())).collect();
    distances.sort_by(f64::total_cmp);
    [distances.iter().sum::<f64>() / distances.len() as f64, distances[distances.len() * 99 / 100]]
}

fn compare(model: &Model, name: &str, num_generations: usize) {
    for residual in [Kind::BFloat16, Kind::Float] {
        let options = EngineOptions { residual, ..model.options(640) };
        let fp8 = EngineOptions { quantization: RolloutQuantization::Fp8, ..options.clone() };
        let cache = EngineOptions { kv_cache_dtype: KvCacheDtype::Fp8, ..options.clone() };
        let both = EngineOptions { kv_cache_dtype: KvCacheDtype::Fp8, ..fp8.clone() };
        let whole = EngineOptions { kv_cache_dtype: KvCacheDtype::Int8, ..options.clone() };
        let [plain, rounded, cached, both, whole] =
            [&options, &fp8, &cache, &both, &whole].map(|options| distance(model, options, num_generations));
        println!(
            "{}",
            json!({"test": "fp8", "model": name, "adapters": model.lora.is_some(), "outliers": model.has_outliers,
                "rows": 6 * num_generations, "residual": format!("{residual:?}"), "bf16_mean_and_p99": plain, "fp8_mean_and_p99": rounded,
                "fp8_cache_mean_and_p99": cached, "both_mean_and_p99": both, "int8_cache_mean_and_p99": whole})
        );
        assert!(rounded[0] > 1.2 * plain[0], "{rounded:?} beside {plain:?}: nothing is rounded");
        assert!(whole[0] < cached[0], "{whole:?} beside {cached:?} in FP8");
        for [mean, tail] in [rounded, cached, both] {
            assert!(mean < 0.2 && tail < 0.9, "{rounded:?}, {cached:?}, {both:?} beside {plain:?}");
        }
    }
}

/// int8 GEMMs after a rotation are nearer to the trainer than FP8's.
#[test]
#[ignore = "needs a GPU"]
fn gpu_int8_samples_nearer_to_the_trainer_than_fp8() {
    let model = Model::new(SMALL);
    let of = |quantization| EngineOptions { quantization, residual: Kind::Float, ..model.options(640) };
    let [plain, fp8, int8] = [RolloutQuantization::None, RolloutQuantization::Fp8, RolloutQuantization::Int8]
        .map(|quantization| distance(&model, &of(quantization), 16));
    println!("{}", json!({"test": "int8", "model": SMALL, "bf16": plain, "fp8": fp8, "int8": int8}));
    assert!(int8[0] > 1.05 * plain[0], "{int8:?} beside {plain:?}: nothing is rounded");
    assert!(int8[0] < 0.6 * fp8[0], "{int8:?} beside {fp8:?} in FP8");
}

/// Integer sums have no order: a strict engine supports int8 GEMMs.
#[test]
#[ignore = "needs a GPU"]
fn gpu_strict_steps_in_int8_are_independent_of_the_batch() {
    let int8 = |options| EngineOptions { quantization: RolloutQuantization::Int8, ..options };
    super::steps_do_not_see_their_batch(&Model::new(SMALL), &int8, &[(1024, 600, 200, 120)]);
    super::steps_do_not_see_their_batch(&Model::adapted(SMALL), &int8, &[(256, 170, 80, 50)]);
    let cached = |options| EngineOptions { kv_cache_dtype: KvCacheDtype::Int8, ..int8(options) };
    super::steps_do_not_see_their_batch(&Model::new(SMALL), &cached, &[(256, 170, 80, 50)]);
}

/// Few rows, for which this crate's own GEMM kernels may be used, and 48 x 6 rows, for which cuBLASLt is used.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_samples_near_the_trainer() {
    for has_outliers in [false, true] {
        let model = Model { has_outliers, ..Model::new(LARGE) };
        compare(&model, LARGE, 2);
    }
    let model = Model::new(SMALL);
    compare(&model, SMALL, 16);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_with_adapters_samples_near_the_trainer() {
    compare(&Model { has_outliers: true, ..Model::adapted(SMALL) }, SMALL, 2);
}

/// OLMo 2: inputs of GEMMs without a norm before them are rounded.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_with_post_norms_samples_near_the_trainer() {
    let name = "olmo2-1b";
    compare(&Model::new(name), name, 2);
}

/// Some layers of a mixture-of-experts model and of a hybrid: rounding changes log-probabilities about as much as in a dense model.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fp8_of_experts_and_delta_nets_samples_near_the_trainer() {
    for (name, layers) in [("qwen3-30b-a3b", 2), ("qwen3.5-9b", 4)] {
        let model = Model::of(ModelSpec::preset(name).unwrap().with_num_layers(layers));
        let options = model.options(640);
        let fp8 = EngineOptions { quantization: RolloutQuantization::Fp8, ..options.clone() };
        let [plain, rounded] = [&options, &fp8].map(|options| distance(&model, options, 2));
        println!("{}", json!({"test": "fp8", "model": name, "layers": layers, "bf16": plain, "fp8": rounded}));
        assert!(rounded[0] > 1.2 * plain[0], "{rounded:?} beside {plain:?}: nothing is rounded");
        assert!(rounded[0] < 0.2 && rounded[1] < 0.9, "{rounded:?} beside {plain:?}");
    }
}

/// A strict engine reads every key and value from the 8-bit cache, so that chunks, other batches and preemption change no bits.
#[test]
#[ignore = "needs a GPU"]
fn gpu_strict_steps_with_8_bit_cache_are_independent_of_the_batch() {
    for kv_cache_dtype in [KvCacheDtype::Fp8, KvCacheDtype::Int8] {
        let cache = |options| EngineOptions { kv_cache_dtype, ..options };
        super::steps_do_not_see_their_batch(&Model::new(SMALL), &cache, &[(256, 170, 80, 50)]);
    }
}
