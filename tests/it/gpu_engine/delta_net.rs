//! Models with gated delta nets: compares steps with themselves in another batch, and with the CPU's engine.

use std::process::Command;
use std::sync::Arc;

use colo_grpo::internal::config::{KvCacheDtype, RolloutQuantization};
use colo_grpo::internal::data::Tokenizer;
use colo_grpo::internal::model::{LoraSpec, ModelSpec, UnitLayout};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::rollout::{Engine, EngineOptions, kv_block_bytes};
use colo_grpo::internal::serve::Served;
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams};
use tch::{Device, Kind};

use super::kept::kept_sequences_go_on_where_they_were;
use super::{Model, completions, generate, prompts, steps_do_not_see_their_batch};

/// A narrow model with four layers and the head sizes of Qwen3.5-9B.
pub fn narrow() -> ModelSpec {
    let published = ModelSpec::preset("qwen3.5-9b").unwrap();
    ModelSpec { vocab_size: 100_352, ..published }.with_widths(1024, 3072).with_num_layers(4)
}

/// Chunked prompts, few slots, other batches, another order and preemption give the same bits.
#[test]
#[ignore = "needs a GPU"]
fn gpu_strict_delta_net_steps_are_independent_of_the_batch() {
    steps_do_not_see_their_batch(&Model::of(narrow()), &|options| options, &[(256, 170, 80, 50)]);
}

/// 8-bit keys and values, for heads of a size without a tensor-core kernel.
#[test]
#[ignore = "needs a GPU"]
fn gpu_strict_delta_net_steps_with_8_bit_cache_are_independent_of_the_batch() {
    for kv_cache_dtype in [KvCacheDtype::Fp8, KvCacheDtype::Int8] {
        let of = |options| EngineOptions { kv_cache_dtype, ..options };
        steps_do_not_see_their_batch(&Model::of(narrow()), &of, &[(256, 170, 40, 50)]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_strict_delta_net_steps_with_adapters_are_independent_of_the_batch() {
    let adapters = Model::adapted("qwen2.5-0.5b").lora;
    let model = Model { lora: adapters, ..Model::of(narrow()) };
    steps_do_not_see_their_batch(&model, &|options| options, &[(256, 170, 40, 50)]);
}

/// Kept sequences keep their state pages.
#[test]
#[ignore = "needs a GPU"]
fn gpu_kept_delta_net_sequences_continue_bit_for_bit() {
    kept_sequences_go_on_where_they_were(&Model::of(narrow()));
}

/// Greedy completions of one prompt: the first continues from the prompt's state page, the others from copies of it.
#[test]
#[ignore = "needs a GPU"]
fn gpu_forked_delta_net_states_equal_the_original() {
    let model = Model::of(narrow());
    let options = EngineOptions { strict: true, ..model.options(256) };
    let params =
        SamplingParams { num_generations: 4, temperature: 0.0, max_completion_length: 24, ..SamplingParams::default() };
    let groups = model.generate(&options, &prompts(5, 170), &params);
    for group in &groups {
        let bits = |at: usize| {
            let completion = &group.completions[at];
            let bits: Vec<u32> = completion.rollout_logprobs.iter().map(|logprob| logprob.to_bits()).collect();
            (completion.token_ids.clone(), bits)
        };
        assert!((1..4).all(|at| bits(at) == bits(0)), "group {}", group.prompt.id);
    }
}

/// The first steps choose GEMM algorithms by timing trials on the current batch. Later, the same steps make no trials.
#[test]
#[ignore = "needs a GPU"]
fn gpu_timing_gemms_does_not_change_delta_net_states() {
    const TRIES: &str = "COLO_GRPO_TEST_TRIES";
    if std::env::var_os(TRIES).is_none() {
        let cache = tempfile::tempdir().unwrap();
        let test = "gpu_engine::delta_net::gpu_timing_gemms_does_not_change_delta_net_states";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--include-ignored"]);
        let output = command.env(TRIES, "1").env("COLO_GRPO_CACHE", cache.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(cache.path().join("products").is_dir(), "no products were tried: {said}");
        return;
    }
    let published = ModelSpec::preset("qwen3.5-9b").unwrap();
    let model = Model::of(ModelSpec { vocab_size: 100_352, ..published }.with_num_layers(4));
    let params =
        SamplingParams { num_generations: 16, temperature: 0.0, max_completion_length: 8, ..SamplingParams::default() };
    let options = EngineOptions { max_num_seqs: 96, quantization: RolloutQuantization::Fp8, ..model.options(256) };
    let mut served = model.served(&options);
    let [first, again] = [0, 1].map(|_| {
        let groups = generate(&mut served, &prompts(5, 170), &params);
        completions(&groups).map(|(ids, logprobs)| (ids.to_vec(), logprobs.collect())).collect::<Vec<(_, Vec<f32>)>>()
    });
    assert_eq!(first, again);
}

/// In float32, the GPU's greedy tokens are those of the CPU in float64, and log-probabilities are about as close to them as the CPU's in float32.
/// Prompts are chunked, several per group.
#[test]
#[ignore = "needs a GPU"]
fn gpu_greedy_tokens_of_delta_nets_equal_the_cpus() {
    for adapted in [false, true] {
        let spec = ModelSpec { eos_token_ids: Vec::new(), ..ModelSpec::preset("tiny-hybrid").unwrap() };
        let of_cpu = Model { world: Arc::new(World::single()), ..Model::of(spec.clone()) };
        let mut of_gpu = Model::of(spec);
        of_gpu.lora = adapted.then(|| Model::adapted("qwen2.5-0.5b").lora.unwrap());
        let lora = of_gpu.lora.clone();
        let mut asked = prompts(6, 90);
        let ids = asked.iter_mut().flat_map(|prompt| &mut prompt.token_ids);
        ids.for_each(|id| *id %= 64);
        let params = SamplingParams {
            num_generations: 2,
            temperature: 0.0,
            max_completion_length: 60,
            ..SamplingParams::default()
        };
        let run = |model, kind| sampled_in(kind, model, &of_cpu, lora.as_ref(), &asked, &params);
        let expected = run(&of_cpu, Kind::Double);
        let largest_error = |groups: &[RolloutGroup]| {
            let mut largest = 0.0f32;
            for ((ids, logprobs), (other_ids, other_logprobs)) in completions(&expected).zip(completions(groups)) {
                assert_eq!(ids, other_ids, "adapters: {adapted}");
                largest = logprobs.zip(other_logprobs).map(|(a, b)| (a - b).abs()).fold(largest, f32::max);
            }
            largest
        };
        let [on_cpu, on_gpu] = [&of_cpu, &of_gpu].map(|model| largest_error(&run(model, Kind::Float)));
        // The largest of 720 errors is one of few outliers: 4e-5 on a CPU, and 8e-5 with adapters.
        assert!(on_gpu < 4.0 * on_cpu, "{on_gpu} on the GPU, {on_cpu} on the CPU, adapters: {adapted}");
    }
}

/// Tokens sampled by an engine in data type `kind` on the model's device, with weights from `source`.
fn sampled_in(
    kind: Kind,
    model: &Model,
    source: &Model,
    lora: Option<&LoraSpec>,
    prompts: &[Prompt],
    params: &SamplingParams,
) -> Vec<RolloutGroup> {
    let device = model.world.device();
    let options = EngineOptions {
        kv_cache_bytes: 200 * kv_block_bytes(&model.spec, 1, 16, kind),
        kind,
        residual: kind,
        max_num_seqs: 7,
        max_num_batched_tokens: 100,
        device,
        ..model.options(160)
    };
    let tokenizer = Arc::new(Tokenizer::of_ids(model.spec.vocab_size).unwrap());
    let engine = Engine::new(model.spec.clone(), tokenizer, options, model.world.mesh(1, 1).unwrap().tp).unwrap();
    let unit = |layout: &UnitLayout| Ok((source.unit(layout)?.to_kind(kind) * 8.0).to_device(device));
    let served = Served::new(model.world.clone(), model.table(), engine, &unit).unwrap();
    let adapter = |layout: &UnitLayout| {
        let adapter = source.adapter_unit(layout)?.to_kind(kind);
        assert_eq!(adapter.device(), Device::Cpu);
        Ok(adapter.to_device(device))
    };
    let mut served = match lora {
        Some(lora) => served.with_adapters(lora.clone(), &adapter).unwrap(),
        None => served,
    };
    generate(&mut served, prompts, params)
}
