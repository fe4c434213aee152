//! FP8 GEMMs as simulated on a CPU: distance between sampler and trainer, for plain weights and for weights with outlier
//! channels, as trained models have them.

use colo_grpo::internal::config::{KvCacheDtype, MixedPrecision, RolloutQuantization, StateDtype};
use colo_grpo::internal::model::{Matrix, ModelSpec, ParamName};
use colo_grpo::internal::ranks::{Collective, World};
use colo_grpo::internal::rollout::{EngineOptions, kv_block_bytes};
use colo_grpo::internal::types::SamplingParams;

use tch::{Kind, Tensor};

use super::setup::{Model, alone, options, prompts, sampled};
use crate::ranks;

/// Length of completions over which rounding errors of states might accumulate.
const LONG: usize = 1000;

fn fp8() -> EngineOptions {
    EngineOptions { quantization: RolloutQuantization::Fp8, ..options() }
}

/// A model larger than micro, so that a row's scale covers many elements. As in trained models, every block adds little to its input;
/// otherwise each block would magnify the rounding errors of the previous one.
fn model() -> Model {
    let spec = ModelSpec::preset("micro").unwrap().with_widths(128, 320).with_num_layers(4);
    let model = Model::random(spec, 3);
    for block in &model.blocks {
        for (matrix, factor) in [(Matrix::Qkv, 0.35), (Matrix::GateUp, 0.35), (Matrix::O, 0.1), (Matrix::Down, 0.1)] {
            let _ = block.linear(matrix).weight().shallow_clone().g_mul_scalar_(factor);
        }
    }
    model
}

/// Makes some channels `factor` times as large as the others, as in trained models: inputs of GEMMs, by the norms' weights, and the
/// MLP's activation. The weights for these channels are divided by the same factor, so that the network computes the same.
fn plant_outliers(model: &Model, factor: f64) {
    let scale = |tensor: Tensor, factor: f64| drop(tensor.shallow_clone().g_mul_scalar_(factor));
    for block in &model.blocks {
        for (norm, matrix) in [(ParamName::InputNorm, Matrix::Qkv), (ParamName::PostNorm, Matrix::GateUp)] {
            for channel in [3, 77] {
                scale(block.norm(norm).unwrap().get(channel), factor);
                scale(block.linear(matrix).weight().select(1, channel), 1.0 / factor);
            }
        }
        scale(block.linear(Matrix::GateUp).weight().get(11), factor); // up 5
        scale(block.linear(Matrix::Down).weight().select(1, 5), 1.0 / factor);
    }
}

/// Absolute differences between sampled log-probabilities and the training forward pass, sorted in ascending order.
fn distances(model: &Model, tp: std::sync::Arc<dyn Collective>, options: EngineOptions) -> Vec<f32> {
    let params = SamplingParams { num_generations: 4, max_completion_length: 32, ..sampled() };
    let (groups, _) = model.generate_on(tp, options, &prompts(6), &params);
    let mut distances = Vec::new();
    for group in &groups {
        for completion in &group.completions {
            let all = [group.prompt.token_ids.as_slice(), &completion.token_ids].concat();
            let trained = model.logprobs(&all, group.prompt.token_ids.len(), f64::from(params.temperature));
            distances.extend(completion.rollout_logprobs.iter().zip(&trained).map(|(a, b)| (a - b).abs()));
        }
    }
    distances.sort_by(f32::total_cmp);
    distances
}

fn mean(distances: &[f32]) -> f32 {
    distances.iter().sum::<f32>() / distances.len() as f32
}

/// The 99th percentile of sorted distances.
fn tail(distances: &[f32]) -> f32 {
    distances[distances.len() * 99 / 100]
}

#[test]
fn fp8_rollouts_stay_close_to_the_trainer_with_outliers() {
    for (name, plants, [most_mean, most_tail]) in [("plain", false, [0.006, 0.03]), ("outliers", true, [0.009, 0.045])]
    {
        let model = model();
        if plants {
            plant_outliers(&model, 100.0);
        }
        let exact = distances(&model, alone(), options());
        let rounded = distances(&model, alone(), fp8());
        println!("{name}: mean {} tail {}, exact {}", mean(&rounded), tail(&rounded), tail(&exact));
        assert!(tail(&exact) < 1e-3, "{name}: {}", tail(&exact));
        assert!(mean(&rounded) > 1e-3, "{name}: nothing is rounded");
        assert!(
            mean(&rounded) < most_mean && tail(&rounded) < most_tail,
            "{name}: {} {}",
            mean(&rounded),
            tail(&rounded)
        );
    }
}

/// int8 after a rotation is nearer to the trainer than e4m3, unless outlier channels are so large that a row of this width has little else.
#[test]
fn int8_rollouts_are_nearer_to_the_trainer_than_fp8() {
    for factor in [1.0, 5.0] {
        let model = model();
        plant_outliers(&model, factor);
        let int8 = EngineOptions { quantization: RolloutQuantization::Int8, ..options() };
        let [fp8, int8] = [fp8(), int8].map(|options| distances(&model, alone(), options));
        println!("outliers of {factor}: int8 {} {}, fp8 {} {}", mean(&int8), tail(&int8), mean(&fp8), tail(&fp8));
        assert!(mean(&int8) > 1e-4, "nothing is rounded");
        assert!(mean(&int8) < 0.6 * mean(&fp8) && tail(&int8) < 0.8 * tail(&fp8));
    }
}

/// With tensor-parallel slices, which have their own scales, log-probabilities are as close.
fn ranks_are_as_near(world: &World) {
    let (model, tp) = (model(), world.group());
    let own = distances(&model, tp, fp8());
    assert!(mean(&own) > 1e-3 && mean(&own) < 0.006, "{}", mean(&own));
    let int8 = EngineOptions { quantization: RolloutQuantization::Int8, ..options() };
    let own = distances(&model, world.group(), int8);
    assert!(mean(&own) > 1e-4 && mean(&own) < 0.003, "{}", mean(&own));
}

#[test]
fn fp8_rollouts_on_two_ranks_stay_close_to_the_trainer() {
    ranks::run(2, "rollout::fp8::fp8_rollouts_on_two_ranks_stay_close_to_the_trainer", |world: World| {
        ranks_are_as_near(&world)
    });
}

/// FP8 keys and values are close to the trainer, also if prompts are chunked or recomputed after preemption and thus read
/// rounded values from the cache.
#[test]
fn an_fp8_kv_cache_stays_close_to_the_trainer() {
    let model = model();
    let cached = EngineOptions { kv_cache_dtype: KvCacheDtype::Fp8, ..options() };
    let block_bytes = |kind| kv_block_bytes(&model.spec, 1, cached.block_size, kind);
    assert_eq!(8 * block_bytes(Kind::Float8e4m3fn), 3 * block_bytes(Kind::Float), "heads of 8 in float32, and a scale");
    let large = ModelSpec::preset("qwen2.5-7b").unwrap();
    let [rounded, plain] = [Kind::Float8e4m3fn, Kind::BFloat16].map(|kind| kv_block_bytes(&large, 1, 16, kind));
    assert_eq!(64 * rounded, 33 * plain, "heads of 128 in bfloat16: 1.94 times the blocks");
    let few = EngineOptions {
        kv_cache_bytes: 24 * block_bytes(Kind::Float8e4m3fn),
        max_num_batched_tokens: 11,
        ..cached.clone()
    };
    let plain = distances(&model, alone(), options());
    for options in [cached.clone(), few, EngineOptions { quantization: RolloutQuantization::Fp8, ..cached }] {
        let rounded = distances(&model, alone(), options);
        assert!(mean(&rounded) > 10.0 * mean(&plain), "nothing is rounded");
        assert!(mean(&rounded) < 0.006 && tail(&rounded) < 0.09, "{} {}", mean(&rounded), tail(&rounded));
    }
}

/// int8 keys and values are closer to the trainer than FP8, also if prompts are chunked or recomputed.
#[test]
fn an_int8_kv_cache_is_closer_to_the_trainer_than_fp8() {
    let model = model();
    let of = |kv_cache_dtype| EngineOptions { kv_cache_dtype, ..options() };
    let block_bytes = |kind| kv_block_bytes(&model.spec, 1, options().block_size, kind);
    assert_eq!(block_bytes(Kind::Int8), block_bytes(Kind::Float8e4m3fn));
    let whole = of(KvCacheDtype::Int8);
    let few =
        EngineOptions { kv_cache_bytes: 24 * block_bytes(Kind::Int8), max_num_batched_tokens: 11, ..whole.clone() };
    let [plain, fp8] = [options(), of(KvCacheDtype::Fp8)].map(|options| mean(&distances(&model, alone(), options)));
    for options in [whole, few] {
        let rounded = distances(&model, alone(), options);
        assert!(mean(&rounded) > 3.0 * plain, "nothing is rounded");
        assert!(mean(&rounded) < 0.5 * fp8, "{} beside {fp8} in FP8", mean(&rounded));
    }
}

/// A model with gated delta nets keeps keys and values of its attention layers in FP8; its states are not rounded.
#[test]
fn an_fp8_kv_cache_works_for_hybrid_models() {
    let model = Model::golden("qwen3_5");
    for layer in model.spec.attention_layers() {
        // As in `model`: attention adds little.
        let _ = model.blocks[layer].linear(Matrix::O).weight().shallow_clone().g_mul_scalar_(0.1);
    }
    let cached = EngineOptions { kv_cache_dtype: KvCacheDtype::Fp8, ..options() };
    let block_bytes = kv_block_bytes(&model.spec, 1, cached.block_size, Kind::Float8e4m3fn);
    let few = EngineOptions { kv_cache_bytes: 24 * block_bytes, max_num_batched_tokens: 11, ..cached.clone() };
    let plain = distances(&model, alone(), options());
    for options in [cached, few] {
        let rounded = distances(&model, alone(), options);
        assert!(mean(&rounded) > 10.0 * mean(&plain), "nothing is rounded");
        assert!(mean(&rounded) < 0.006 && tail(&rounded) < 0.045, "{} {}", mean(&rounded), tail(&rounded));
    }
}

/// States rounded to bfloat16 after every step keep the sampler close to the trainer, and errors do not grow with the number of
/// tokens: both halves of the completions are about as close.
#[test]
fn bfloat16_states_stay_close_to_the_trainer_over_many_tokens() {
    let model = Model::golden("qwen3_5");
    let params = SamplingParams { num_generations: 2, max_completion_length: LONG, ..sampled() };
    let halves = |state_dtype: StateDtype| {
        let options = EngineOptions { state_dtype, max_model_length: LONG + 64, kv_cache_bytes: 32 << 20, ..options() };
        let (groups, _) = model.generate_on(alone(), options, &prompts(2), &params);
        let mut halves = [Vec::new(), Vec::new()];
        for group in &groups {
            for completion in &group.completions {
                let all = [group.prompt.token_ids.as_slice(), &completion.token_ids].concat();
                let trained = model.logprobs(&all, group.prompt.token_ids.len(), f64::from(params.temperature));
                for (place, (a, b)) in completion.rollout_logprobs.iter().zip(&trained).enumerate() {
                    halves[usize::from(place >= LONG / 2)].push((a - b).abs());
                }
            }
        }
        halves.map(|distances| {
            assert!(distances.len() > LONG / 2, "{} tokens", distances.len());
            mean(&distances)
        })
    };
    let (plain, rounded) = (halves(StateDtype::Float32), halves(StateDtype::Bfloat16));
    println!(
        "mean distance from the trainer, earlier and later half: {plain:?} with float32 states, {rounded:?} with bfloat16"
    );
    assert!(rounded[0] > 10.0 * plain[0], "nothing is rounded: {plain:?} {rounded:?}");
    assert!(rounded[1] < 1.5 * rounded[0], "{rounded:?}");
}

/// A trainer that rounds to FP8 multiplies the same rounded rows in experts and gated delta nets. Remaining differences come from the order of sums,
/// and
/// from a few codes and expert choices that this changes.
#[test]
fn fp8_experts_and_delta_nets_match_training() {
    for name in ["qwen3_moe", "qwen2_moe", "qwen3_5", "qwen3_5_moe"] {
        let mut model = Model::golden(name);
        let blocks = std::mem::take(&mut model.blocks).into_iter();
        model.blocks = blocks.map(|block| block.training_in(MixedPrecision::Fp8.format())).collect();
        let [plain, own] = [options(), fp8()].map(|options| distances(&model, alone(), options));
        println!("{name}: {} without rounding, {} {} with it", mean(&plain), mean(&own), tail(&own));
        assert!(mean(&plain) > 1e-3 && mean(&own) < 0.2 * mean(&plain), "{name}: {} {}", mean(&plain), mean(&own));
    }
}
