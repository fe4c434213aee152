//! The engine's recorded steps on shapes of real models, random weights: against the trainer, against themselves in another
//! batch, and against the host's runner.

use std::sync::Arc;

use colo_grpo::colocate::Served;
use colo_grpo::config::GradientCheckpointing;
use colo_grpo::data::Tokenizer;
use colo_grpo::dist::{Backend, World};
use colo_grpo::model::{ModelSpec, ParamTable, UnitLayout, init_unit_on};
use colo_grpo::rollout::{Engine, EngineOptions, kv_block_bytes};
use colo_grpo::train::{
    AdamOptions, GradientOptions, NetworkOptions, PackOptions, Policy, PolicyOptions, Sequence, pack,
};
use colo_grpo::types::{Prompt, RolloutGroup, SamplingParams};
use serde_json::json;
use tch::{Device, Kind};

const MODEL: &str = "qwen2.5-0.5b";
const SEED: u64 = 7;

#[test]
#[ignore = "needs a GPU"]
fn gpu_sampled_logprobs_are_the_trainers() {
    let world = world();
    let params = SamplingParams { num_generations: 4, max_completion_length: 200, ..SamplingParams::default() };
    let mut served = served(&world, &EngineOptions { max_num_seqs: 12, ..options(&world) });
    let groups = generate(&mut served, &prompts(6, 300), &params);
    drop(served);
    let sampled: Vec<f32> = completions(&groups).flat_map(|(_, logprobs)| logprobs).collect();
    let trained = score(&world, &groups);
    assert_eq!(sampled.len(), trained.len());
    let differences = sampled.iter().zip(&trained).map(|(a, b)| f64::from((a - b).abs()));
    let mean = differences.clone().sum::<f64>() / sampled.len() as f64;
    println!("{}", json!({"test": "logprobs", "model": MODEL, "mean": mean, "max": differences.fold(0.0, f64::max)}));
    assert!(mean < 0.01, "{mean}");
}

/// Chunked prompts, few slots, other neighbours, another order: the same bits.
#[test]
#[ignore = "needs a GPU"]
fn gpu_strict_steps_do_not_see_their_batch() {
    let world = world();
    let params = SamplingParams { num_generations: 3, max_completion_length: 80, ..SamplingParams::default() };
    let strict = EngineOptions { strict: true, ..options(&world) };
    let mut prompts = prompts(9, 150);
    let expected = generate(&mut served(&world, &strict), &prompts, &params);
    prompts.reverse();
    let few = EngineOptions { max_num_seqs: 7, max_num_batched_tokens: 400, ..strict };
    let mut got = generate(&mut served(&world, &few), &prompts, &params);
    got.reverse();
    for ((ids, logprobs), (other_ids, other_logprobs)) in completions(&expected).zip(completions(&got)) {
        assert_eq!(ids, other_ids);
        assert_eq!(
            logprobs.map(f32::to_bits).collect::<Vec<_>>(),
            other_logprobs.map(f32::to_bits).collect::<Vec<_>>()
        );
    }
}

/// Greedy tokens of the host's runner, which a penalty of next to nothing asks for. Where the two part, both tokens were nearly
/// equally likely.
#[test]
#[ignore = "needs a GPU"]
fn gpu_greedy_tokens_equal_the_host_runners() {
    let world = world();
    let greedy =
        SamplingParams { num_generations: 1, temperature: 0.0, max_completion_length: 64, ..SamplingParams::default() };
    let on_host = SamplingParams { repetition_penalty: 1.000_000_1, ..greedy.clone() };
    let mut served = served(&world, &options(&world));
    let prompts = prompts(16, 100);
    let groups = generate(&mut served, &prompts, &greedy);
    let expected = generate(&mut served, &prompts, &on_host);
    let (mut equal, mut total) = (0, 0);
    for ((ids, logprobs), (other_ids, other_logprobs)) in completions(&groups).zip(completions(&expected)) {
        let parted = ids.iter().zip(other_ids).position(|(a, b)| a != b);
        equal += parted.unwrap_or(ids.len());
        total += parted.map_or(ids.len(), |at| at + 1);
        let (ours, theirs): (Vec<f32>, Vec<f32>) = (logprobs.collect(), other_logprobs.collect());
        let at = parted.unwrap_or(0);
        assert!((ours[at] - theirs[at]).abs() < 0.05, "{} and {} at {at}", ours[at], theirs[at]);
    }
    println!("{}", json!({"test": "greedy", "model": MODEL, "equal": equal, "compared": total}));
    // Random weights make near ties of one position in fifteen.
    assert!(equal * 100 >= total * 85, "{equal} of {total}");
}

/// Top-k of one, and a top-p that one token fills, are greedy; filters that keep everything change nothing.
#[test]
#[ignore = "needs a GPU"]
fn gpu_filters_are_served_on_the_device() {
    let world = world();
    let params = SamplingParams { num_generations: 2, max_completion_length: 24, ..SamplingParams::default() };
    let mut served = served(&world, &options(&world));
    let prompts = prompts(6, 60);
    let mut tokens = |params: SamplingParams| -> Vec<Vec<u32>> {
        let groups = generate(&mut served, &prompts, &params);
        completions(&groups).map(|(ids, _)| ids.to_vec()).collect()
    };
    let greedy = tokens(SamplingParams { temperature: 0.0, ..params.clone() });
    assert_eq!(tokens(SamplingParams { top_k: 1, ..params.clone() }), greedy);
    assert_eq!(tokens(SamplingParams { top_p: 1e-6, ..params.clone() }), greedy);
    let free = tokens(params.clone());
    assert_eq!(tokens(SamplingParams { top_k: 1 << 20, ..params.clone() }), free);
    assert_eq!(tokens(SamplingParams { min_p: Some(1e-30), ..params }), free);
    assert_ne!(free, greedy);
}

/// Sleep after every call: graphs stay, tokens stay.
#[test]
#[ignore = "needs a GPU"]
fn gpu_recorded_steps_survive_sleep() {
    let world = world();
    let params = SamplingParams { num_generations: 2, max_completion_length: 20, ..SamplingParams::default() };
    let mut served = served(&world, &options(&world));
    let prompts = prompts(4, 50);
    let expected = generate(&mut served, &prompts, &params);
    for _ in 0..10 {
        assert_eq!(generate(&mut served, &prompts, &params), expected);
    }
}

fn world() -> Arc<World> {
    Arc::new(World::single_on(Backend::Nccl).unwrap())
}

fn spec() -> Arc<ModelSpec> {
    Arc::new(ModelSpec { eos_token_ids: Vec::new(), ..ModelSpec::preset(MODEL).unwrap() })
}

fn options(world: &World) -> EngineOptions {
    EngineOptions {
        kv_cache_bytes: 600 * kv_block_bytes(&spec(), 1, 16, Kind::BFloat16),
        block_size: 16,
        max_num_seqs: 48,
        max_num_batched_tokens: 1000,
        max_model_length: 512,
        kind: Kind::BFloat16,
        device: world.device(),
        strict: false,
    }
}

fn served(world: &Arc<World>, options: &EngineOptions) -> Served {
    let (spec, mesh) = (spec(), world.mesh(1, 1).unwrap());
    let tokenizer = Arc::new(Tokenizer::of_ids(spec.vocab_size).unwrap());
    let engine = Engine::new(spec.clone(), tokenizer, options.clone(), mesh.tp.clone()).unwrap();
    let source = |layout: &UnitLayout| init_unit_on(layout, SEED, Kind::BFloat16, world.device());
    Served::new(world.clone(), &mesh, Arc::new(ParamTable::new(spec, 1)), engine, &source).unwrap()
}

fn generate(served: &mut Served, prompts: &[Prompt], params: &SamplingParams) -> Vec<RolloutGroup> {
    served.with_engine(|rollout| rollout.generate(prompts, params, |_| ())).unwrap()
}

/// Prompts of different lengths up to `longest`.
fn prompts(count: usize, longest: usize) -> Vec<Prompt> {
    let prompt = |id: usize| {
        let len = longest - id * longest / (2 * count);
        let token_ids = (0..len).map(|at| ((id * 7919 + at * 104_729) % 150_000) as u32).collect();
        Prompt { id: id as u64, text: String::new(), token_ids, columns: Arc::default() }
    };
    (0..count).map(prompt).collect()
}

fn completions(groups: &[RolloutGroup]) -> impl Iterator<Item = (&[u32], impl Iterator<Item = f32>)> {
    let completions = groups.iter().flat_map(|group| &group.completions);
    completions.map(|completion| (completion.token_ids.as_slice(), completion.rollout_logprobs.iter().copied()))
}

/// The trainer's log-probabilities of all completion tokens.
fn score(world: &World, groups: &[RolloutGroup]) -> Vec<f32> {
    let options = PolicyOptions {
        stage: 0,
        network: NetworkOptions { kind: Kind::BFloat16, device: world.device() },
        gradient_checkpointing: GradientCheckpointing::Full,
        adam: AdamOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 },
        gradients: GradientOptions::default(),
    };
    let (mesh, table) = (world.mesh(1, 1).unwrap(), Arc::new(ParamTable::new(spec(), 1)));
    let source = |layout: &UnitLayout| init_unit_on(layout, SEED, Kind::BFloat16, world.device());
    let mut policy = Policy::new(table, &mesh, options, &source).unwrap();
    let of_group = |group: &RolloutGroup| {
        let prompt = group.prompt.token_ids.clone();
        let sequence = move |ids: &[u32]| Sequence {
            token_ids: [prompt.as_slice(), ids].concat(),
            prompt_len: prompt.len(),
            advantage: 0.0,
            masked: false,
            rollout_logprobs: None,
            old_logprobs: None,
            ref_logprobs: None,
        };
        group.completions.iter().map(|completion| sequence(&completion.token_ids)).collect::<Vec<_>>()
    };
    let sequences: Vec<Sequence> = groups.iter().flat_map(of_group).collect();
    let options = PackOptions { max_tokens: 1 << 20, share_prompts: false, device: world.device() };
    let micro_batches = pack(&sequences, &options).unwrap();
    let scores = policy.forward_logprobs(&micro_batches[0], 1.0).unwrap();
    Vec::try_from(scores.logprobs.to_device(Device::Cpu)).unwrap()
}
