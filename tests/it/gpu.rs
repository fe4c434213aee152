//! Compares GPUs with the CPU backend: attention, greedy tokens, log-probabilities. Ignored without a GPU;
//! scripts/gpu_check.sh runs these tests. Tests of collectives and training on GPUs are next to the CPU ones.

use std::path::Path;
use std::sync::Arc;

use colo_grpo::internal::config::{EngineShape, GradientCheckpointing, KvCacheDtype, RolloutQuantization, StateDtype};
use colo_grpo::internal::data::{Dataset, DatasetOptions, Tokenizer};
use colo_grpo::internal::model::{ModelSpec, ParamTable, Plain, Stages, UnitLayout, WeightFiles};
use colo_grpo::internal::ops::attention::{
    Attended, Bounds, PackedLayout, QkvGradients, SavedAttention, SharedBounds, packed_backward, packed_forward, sinks,
};
use colo_grpo::internal::ranks::{Backend, Mesh, World};
use colo_grpo::internal::rollout::{Engine, EngineOptions, EngineRanks, SpeculationOptions};
use colo_grpo::internal::serve::Served;
use colo_grpo::internal::torch;
use colo_grpo::internal::train::{
    AdamOptions, GradientOptions, NetworkOptions, Optim, PackOptions, Policy, PolicyOptions, Sequence, pack,
};
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams};
use tch::{Device, Kind, Tensor};

use crate::ranks;

/// The demo's model after warm-up: its distributions are neither flat nor nearly certain.
const MODEL: &str = "configs/arithmetic/model";

/// Multiplier of attention scores.
const SCALE: f64 = 0.2;

/// Separate sequences and shared prompts with any lengths (flash), with one length (cuDNN) and with long and short ones (both). cuDNN's kernels
/// are used from the second call on.
#[test]
#[ignore = "needs a GPU"]
fn gpu_attention_equals_the_cpus() {
    let gpu = World::single_on(Backend::Nccl).unwrap().device();
    let shared = |prompts: &[i64], completions: &[&[i64]]| {
        let prompts = cu_seqlens(0, prompts);
        let first = prompts[prompts.len() - 1];
        let groups: Vec<i64> = completions.iter().map(|lens| lens.iter().sum()).collect();
        let (groups, completions) = (cu_seqlens(first, &groups), cu_seqlens(first, &completions.concat()));
        Bounds::Shared(SharedBounds { prompts, groups, completions })
    };
    let cases = [
        (separate(&[5, 0, 40, 3, 1, 333]), 7, 2, 64),
        (separate(&[1]), 2, 2, 32),
        (separate(&[64, 129]), 4, 2, 40),
        (separate(&[300, 300, 300]), 7, 2, 128),
        (separate(&[700]), 7, 2, 128),
        (shared(&[40, 200], &[&[5, 300, 1], &[70, 7]]), 7, 2, 128),
        (shared(&[200, 200], &[&[150, 150, 150], &[150, 150, 150]]), 6, 2, 128),
        (separate(&[40, 1800, 5, 300, 2000, 1900]), 7, 4, 128),
        (shared(&[40, 200], &[&[1800, 30], &[7, 1900]]), 7, 4, 64),
        (separate(&[300, 300, 300]), 4, 4, 256),
        (separate(&[40, 3100, 5, 300, 3500]), 4, 4, 256),
        (shared(&[200, 200], &[&[150, 150, 150], &[150, 150, 150]]), 4, 2, 256),
    ];
    for (bounds, group, num_kv_heads, head_dim) in cases {
        compare_attention(
            gpu,
            &bounds,
            &AttentionCase { group, num_kv_heads, head_dim, window: None, has_sinks: false },
        );
    }
}

/// Windows that cut no sequence, some and all, and attention sinks, with the head widths of gpt-oss, of Mistral and of Gemma 3.
#[test]
#[ignore = "needs a GPU"]
fn gpu_attention_with_windows_and_sinks_equals_the_cpus() {
    let gpu = World::single_on(Backend::Nccl).unwrap().device();
    let lens: [&[i64]; 3] = [&[5, 0, 40, 3, 1, 333, 700], &[300, 300, 300], &[40, 1500, 129]];
    for (group, num_kv_heads, head_dim) in [(8, 2, 64), (1, 4, 128), (4, 2, 128), (2, 4, 256)] {
        for window in [None, Some(1), Some(64), Some(128), Some(5000)] {
            for has_sinks in [false, true] {
                let case = AttentionCase { group, num_kv_heads, head_dim, window, has_sinks };
                lens.iter().for_each(|lens| compare_attention(gpu, &separate(lens), &case));
            }
        }
    }
}

fn separate(lens: &[i64]) -> Bounds {
    Bounds::Separate(cu_seqlens(0, lens))
}

/// An attention with `group` query heads per key/value head.
#[derive(Debug)]
struct AttentionCase {
    group: i64,
    num_kv_heads: i64,
    head_dim: i64,
    window: Option<usize>,
    has_sinks: bool,
}

/// Compares forward and backward in bfloat16 on a GPU, twice, with float32 on the CPU.
fn compare_attention(gpu: Device, bounds: &Bounds, case: &AttentionCase) {
    let &AttentionCase { group, num_kv_heads, head_dim, window, has_sinks } = case;
    let num_heads = num_kv_heads * group;
    let options = (Kind::BFloat16, Device::Cpu);
    let rand = |heads: i64| Tensor::randn([bounds.num_tokens(), heads, head_dim], options);
    let inputs = [rand(num_heads), rand(num_kv_heads), rand(num_kv_heads), rand(num_heads)];
    let own_sinks = has_sinks.then(|| Tensor::randn([num_heads], options));
    let run = |device, kind| {
        let on = |tensor: &Tensor| tensor.to_kind(kind).to_device(device);
        let ([q, k, v, d_o], own_sinks) = (inputs.each_ref().map(on), own_sinks.as_ref().map(on));
        let layout = PackedLayout::of(bounds, num_kv_heads as usize, window, device);
        let attended = packed_forward(&q, &k, &v, &layout, SCALE).unwrap();
        let Attended { o, lse } = match &own_sinks {
            Some(own) => sinks::join(attended, own).unwrap(),
            None => attended,
        };
        let QkvGradients { dq, dk, dv } =
            packed_backward(&d_o, SavedAttention { q: &q, k: &k, v: &v, o: &o, lse: &lse }, &layout, SCALE).unwrap();
        let mut d_sinks = Tensor::zeros([num_heads], (Kind::Float, device));
        if let Some(own) = &own_sinks {
            sinks::accumulate(&d_o, [&o, &lse], own, &mut d_sinks).unwrap();
        }
        [o, lse, dq, dk, dv, d_sinks].map(|tensor| tensor.to_device(Device::Cpu).to_kind(Kind::Double))
    };
    let expected = run(Device::Cpu, Kind::Float);
    for got in [run(gpu, Kind::BFloat16), run(gpu, Kind::BFloat16)] {
        for ((got, expected), what) in got.iter().zip(&expected).zip(["o", "lse", "dq", "dk", "dv", "d_sinks"]) {
            assert_eq!(got.size(), expected.size(), "{what}");
            let norm = |tensor: &Tensor| tensor.to_kind(Kind::Double).norm().double_value(&[]);
            // A single token's dq and dk are zero: measured against the gradient that comes in.
            let least = if has_sinks && what == "d_sinks" { 0.0 } else { norm(&inputs[3]) };
            let error = norm(&(got - expected)) / norm(expected).max(least);
            assert!(error < 0.01, "{what} of {bounds:?}, {case:?}: off by {error}");
        }
    }
}

/// Sequences are so long that the kernels' sums over blocks of keys would be in random order without the deterministic mode.
#[test]
#[ignore = "needs a GPU"]
fn gpu_deterministic_attention_is_repeatable_bit_for_bit() {
    let gpu = World::single_on(Backend::Nccl).unwrap().device();
    torch::set_deterministic(true).unwrap();
    let rand = |heads: i64| Tensor::randn([8192, heads, 128], (Kind::BFloat16, gpu));
    let [q, k, v, d_o] = [rand(8), rand(2), rand(2), rand(8)];
    let run = || {
        let layout = PackedLayout::new(&[0, 4096, 8192], 2, None, gpu);
        let Attended { o, lse } = packed_forward(&q, &k, &v, &layout, 0.1).unwrap();
        let QkvGradients { dq, dk, dv } =
            packed_backward(&d_o, SavedAttention { q: &q, k: &k, v: &v, o: &o, lse: &lse }, &layout, 0.1).unwrap();
        [o, lse, dq, dk, dv]
    };
    let first = run();
    for _ in 0..5 {
        assert!(run().iter().zip(&first).all(|(got, first)| got.equal(first)));
    }
    torch::set_deterministic(false).unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_tokens_equal_the_cpus() {
    assert_eq!(tokens(&gpu_world(), 1), tokens(&Arc::new(World::single()), 1));
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_sample_what_the_cpu_does() {
    ranks::run_on_gpus(2, "gpu::gpu_two_ranks_sample_what_the_cpu_does", |world| samples_what_the_cpu_does(world, 2));
}

#[test]
#[ignore = "needs four GPUs"]
fn gpu_four_ranks_sample_what_the_cpu_does() {
    ranks::run_on_gpus(4, "gpu::gpu_four_ranks_sample_what_the_cpu_does", |world| samples_what_the_cpu_does(world, 4));
}

/// Two engines of four tensor-parallel ranks each.
#[test]
#[ignore = "needs eight GPUs"]
fn gpu_eight_ranks_sample_what_the_cpu_does() {
    ranks::run_on_gpus(8, "gpu::gpu_eight_ranks_sample_what_the_cpu_does", |world| samples_what_the_cpu_does(world, 4));
}

/// An engine with two pipeline stages of one rank each.
const IN_TWO_STAGES: EngineShape = EngineShape { tensor_parallel_size: 1, pipeline_parallel_size: 2 };

/// Two pipeline stages, one on each GPU.
#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_in_stages_sample_what_the_cpu_does() {
    ranks::run_on_gpus(2, "gpu::gpu_two_ranks_in_stages_sample_what_the_cpu_does", |world| {
        samples_what_the_cpu_does(world, IN_TWO_STAGES);
    });
}

/// Two pipeline stages of two tensor-parallel ranks each.
#[test]
#[ignore = "needs four GPUs"]
fn gpu_four_ranks_in_stages_sample_what_the_cpu_does() {
    ranks::run_on_gpus(4, "gpu::gpu_four_ranks_in_stages_sample_what_the_cpu_does", |world| {
        samples_what_the_cpu_does(world, EngineShape { tensor_parallel_size: 2, ..IN_TWO_STAGES });
    });
}

fn samples_what_the_cpu_does(world: World, shape: impl Into<EngineShape>) {
    let expected = tokens(&Arc::new(World::single()), 1);
    let (first, got) = (world.rank() == 0, tokens(&Arc::new(world), shape));
    assert_eq!(got, if first { expected } else { vec![Vec::new(); sampling().len()] });
}

/// Sampling parameters: greedy, and every kind of logits processing.
fn sampling() -> [SamplingParams; 5] {
    let base = SamplingParams { num_generations: 2, max_completion_length: 24, ..SamplingParams::default() };
    [
        SamplingParams { temperature: 0.0, num_generations: 1, ..base.clone() },
        SamplingParams { temperature: 0.0, repetition_penalty: 1.5, ..base.clone() },
        SamplingParams { temperature: 1.2, repetition_penalty: 1.3, ..base.clone() },
        SamplingParams { top_k: 5, top_p: 0.9, min_p: Some(0.01), ..base.clone() },
        SamplingParams { top_k: 9, top_p: 0.8, repetition_penalty: 1.2, ..base },
    ]
}

/// Data types of the residual stream in runs with bfloat16 weights.
const STREAMS: [Kind; 2] = [Kind::BFloat16, Kind::Float];

/// Log-probabilities of the sampler in bfloat16, and of the trainer for the same tokens, are compared with float32 on the CPU.
#[test]
#[ignore = "needs a GPU"]
fn gpu_bfloat16_logprobs_are_near_the_cpus() {
    let gpu = gpu_world();
    let mesh = gpu.mesh(1, 1).unwrap();
    for residual in STREAMS {
        let groups = sampled_near_the_cpus(&gpu, &mesh, residual);
        let exact = score(&Arc::new(World::single()), (Kind::Float, Kind::Float), &groups);
        near("trainer", &score(&gpu, (Kind::BFloat16, residual), &groups), &exact, 0.02);
        near("trainer in float32", &score(&gpu, (Kind::Float, Kind::Float), &groups), &exact, 1e-4);
    }
}

/// Sums are made through the ranks' own GPU memory, which supports bfloat16.
#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_bfloat16_logprobs_are_near_the_cpus() {
    ranks::run_on_gpus(2, "gpu::gpu_two_ranks_bfloat16_logprobs_are_near_the_cpus", |world| {
        ranks_sample_near_the_cpus(world, 2);
    });
}

#[test]
#[ignore = "needs four GPUs"]
fn gpu_four_ranks_bfloat16_logprobs_are_near_the_cpus() {
    ranks::run_on_gpus(4, "gpu::gpu_four_ranks_bfloat16_logprobs_are_near_the_cpus", |world| {
        ranks_sample_near_the_cpus(world, 4);
    });
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_in_stages_bfloat16_logprobs_are_near_the_cpus() {
    ranks::run_on_gpus(2, "gpu::gpu_two_ranks_in_stages_bfloat16_logprobs_are_near_the_cpus", |world| {
        ranks_sample_near_the_cpus(world, IN_TWO_STAGES);
    });
}

fn ranks_sample_near_the_cpus(world: World, shape: impl Into<EngineShape>) {
    let mesh = world.mesh(shape, world.size()).unwrap();
    let world = Arc::new(world);
    STREAMS.iter().for_each(|&residual| drop(sampled_near_the_cpus(&world, &mesh, residual)));
}

/// This rank's groups, sampled in bfloat16 with a residual stream of data type `residual`.
fn sampled_near_the_cpus(world: &Arc<World>, mesh: &Mesh, residual: Kind) -> Vec<RolloutGroup> {
    let params = SamplingParams { num_generations: 4, max_completion_length: 24, ..SamplingParams::default() };
    let groups = generate(world, mesh, (Kind::BFloat16, residual), &[params]).remove(0);
    if world.rank() == 0 {
        let sampled: Vec<f32> =
            groups.iter().flat_map(|group| &group.completions).flat_map(|c| c.rollout_logprobs.clone()).collect();
        near("sampler", &sampled, &score(&Arc::new(World::single()), (Kind::Float, Kind::Float), &groups), 0.02);
    }
    groups
}

/// Asserts that log-probabilities differ on average by at most `most` from float32 on the CPU.
fn near(what: &str, got: &[f32], exact: &[f32], most: f64) {
    assert_eq!(got.len(), exact.len());
    let mean = got.iter().zip(exact).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / exact.len() as f64;
    println!("{what}: {} log-probabilities on average within {mean:.1e} of float32 on the CPU", exact.len());
    assert!(mean < most, "{what}: {mean}");
}

fn gpu_world() -> Arc<World> {
    Arc::new(World::single_on(Backend::Nccl).unwrap())
}

fn cu_seqlens(first: i64, lens: &[i64]) -> Vec<i64> {
    let mut bounds = vec![first];
    lens.iter().for_each(|len| bounds.push(bounds[bounds.len() - 1] + len));
    bounds
}

/// Token ids of completions with each of the sampling parameters.
fn tokens(world: &Arc<World>, shape: impl Into<EngineShape>) -> Vec<Vec<Vec<u32>>> {
    let of_groups = |groups: Vec<RolloutGroup>| {
        groups.into_iter().flat_map(|group| group.completions).map(|completion| completion.token_ids).collect()
    };
    let mesh = world.mesh(shape, world.size()).unwrap();
    generate(world, &mesh, (Kind::Float, Kind::Float), &sampling()).into_iter().map(of_groups).collect()
}

fn spec() -> Arc<ModelSpec> {
    let spec = ModelSpec::from_folder(Path::new(MODEL)).unwrap();
    Arc::new(ModelSpec { eos_token_ids: Vec::new(), ..spec })
}

/// Completions of the first rows of the demo's data with each of the sampling parameters; every rank gets all.
fn generate(
    world: &Arc<World>,
    mesh: &Mesh,
    (kind, residual): (Kind, Kind),
    params: &[SamplingParams],
) -> Vec<Vec<RolloutGroup>> {
    let (spec, device) = (spec(), world.device());
    let tokenizer = Arc::new(Tokenizer::from_folder(Path::new(MODEL)).unwrap());
    let options = EngineOptions {
        kv_cache_bytes: 64 << 20,
        block_size: 16,
        max_num_seqs: 48,
        max_num_batched_tokens: 100,
        max_model_length: 128,
        kind,
        residual,
        device,
        quantization: RolloutQuantization::None,
        kv_cache_dtype: KvCacheDtype::Auto,
        state_dtype: StateDtype::Float32,
        strict: false,
        exact: false,
        records_experts: false,
        speculation: SpeculationOptions::NONE,
    };
    let stages = Stages::new(&spec, mesh.pipe.size(), &[]).unwrap();
    let engine = Engine::in_stages(spec.clone(), tokenizer.clone(), options, EngineRanks::new(mesh, stages)).unwrap();
    let files = WeightFiles::open(MODEL, spec.clone()).unwrap();
    let table = Arc::new(ParamTable::new(spec, 1));
    let source = |layout: &UnitLayout| files.read_unit(layout, kind);
    let mut served = Served::new(world.clone(), table, engine, &source).unwrap();
    let rows = Path::new("configs/arithmetic/train.jsonl");
    let dataset = Dataset::from_file(rows, &tokenizer, &DatasetOptions::default()).unwrap();
    let prompts: Vec<Prompt> = (0..24).map(|row| dataset.prompt(row).clone()).collect();
    // Only the first rank brings prompts; tensor-parallel peers generate from them too.
    let own = if world.rank() == 0 { &prompts[..] } else { &[] };
    let mut run = |params| served.with_engine(|rollout| rollout.generate(own, params, |_| ())).unwrap();
    let groups: Vec<_> = params.iter().map(&mut run).collect();
    let tokens = |groups: &[RolloutGroup]| -> Vec<Vec<u32>> {
        groups.iter().flat_map(|group| &group.completions).map(|c| c.token_ids.clone()).collect()
    };
    assert_eq!(tokens(&groups[0]), tokens(&run(&params[0])), "the engine slept in between");
    groups
}

/// The trainer's log-probabilities of all completion tokens.
fn score(world: &World, (kind, residual): (Kind, Kind), groups: &[RolloutGroup]) -> Vec<f32> {
    let spec = spec();
    let files = WeightFiles::open(MODEL, spec.clone()).unwrap();
    let options = PolicyOptions {
        stage: 0,
        network: NetworkOptions { kind, residual, device: world.device(), format: &Plain },
        gradient_checkpointing: GradientCheckpointing::None,
        optim: Optim::AdamW,
        adam: AdamOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 },
        gradients: GradientOptions::default(),
    };
    let mesh = world.mesh(1, 1).unwrap();
    let table = Arc::new(ParamTable::new(spec, 1));
    let mut policy = Policy::new(table, &mesh, options, &|layout| files.read_unit(layout, kind)).unwrap();
    let sequences: Vec<Sequence> = groups
        .iter()
        .flat_map(|group| group.completions.iter().map(move |completion| (group, completion)))
        .map(|(group, completion)| {
            let prompt = group.prompt.token_ids.as_slice();
            Sequence::of_tokens([prompt, &completion.token_ids].concat(), prompt.len())
        })
        .collect();
    let micro_batches =
        pack(&sequences, &PackOptions { max_tokens: 1 << 20, share_prompts: false, device: world.device() }).unwrap();
    assert_eq!(micro_batches.len(), 1);
    let scores = policy.forward_logprobs(&micro_batches[0], 1.0).unwrap();
    Vec::try_from(scores.logprobs.to_device(Device::Cpu)).unwrap()
}
