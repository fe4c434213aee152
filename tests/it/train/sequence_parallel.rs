//! Ranks that share micro-batches: losses, gradients and weights equal those of one rank with the whole micro-batches.

use std::sync::Arc;

use colo_grpo::internal::config::{GradientCheckpointing, Quantization, TargetModule};
use colo_grpo::internal::model::{LoraSpec, ModelSpec, ParamTable, Plain, init_unit};
use colo_grpo::internal::ranks::{Mesh, ReduceOp, World, all_reduce_f64};
use colo_grpo::internal::train::{
    MicroBatch, NetworkOptions, OptimizerHome, Policy, PolicyOptions, PolicyStart, Scores, TokenGradients,
};
use tch::{Device, Kind, Tensor};

use super::run::{ADAM, LR, MAX_GRAD_NORM, Run, TEMPERATURE, max_difference, unpadded};
use crate::ranks;

/// A mesh with shard groups of `shard` ranks, in which groups of `size` ranks share micro-batches.
fn mesh(world: &World, shard: usize, size: usize) -> Mesh {
    world.mesh(1, shard).unwrap().with_sequence_groups(world, world.size(), size).unwrap()
}

/// Loss and gradient norm of each of three steps, and the trained weights after them.
fn steps(run: &Run, policy: &mut Policy, mesh: &Mesh, micro_batches: &[MicroBatch]) -> (Vec<[f64; 2]>, Vec<Vec<f64>>) {
    let step = |_: usize| -> [f64; 2] {
        let mut loss = [0.0];
        for (index, micro_batch) in micro_batches.iter().enumerate() {
            let mut gradients_of = |scores: &Scores| {
                let gradients = run.loss(micro_batch, scores);
                let TokenGradients { dlogprobs, dentropy, daux_loss, .. } = &gradients;
                let entropy = dentropy.as_ref().unwrap() * &scores.entropy;
                let own = (dlogprobs * &scores.logprobs + entropy).sum(Kind::Double).double_value(&[]);
                let balance = scores.aux_loss.as_ref().map_or(0.0, |aux_loss| aux_loss.double_value(&[]) * daux_loss);
                loss[0] += if mesh.speaks_for_sequences() { own + balance } else { 0.0 };
                Ok(gradients)
            };
            if index + 1 == micro_batches.len() && run.announced {
                policy.finish_gradients_with_next_backward();
            }
            policy.forward_backward(micro_batch, TEMPERATURE, &mut gradients_of).unwrap();
        }
        let outcome = policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap();
        all_reduce_f64(&*mesh.world, &mut loss, ReduceOp::Sum).unwrap();
        [loss[0], outcome.grad_norm]
    };
    let numbers = (0..3).map(step).collect();
    (numbers, unpadded(policy.trained_table(), |unit| policy.trained_weights(unit).unwrap()))
}

/// Asserts that scores, losses, gradient norms and weights of `run` equal those of one rank with all sequences.
fn equals_one_rank(mesh: &Mesh, run: &Run, policy_of: &dyn Fn(&Mesh) -> Policy, tolerance: f64) {
    let alone = World::single().mesh(1, 1).unwrap();
    let whole = Run { announced: false, ..*run };
    let (batches, shared) = (whole.micro_batches(&alone), run.micro_batches(mesh));
    let (mut one, mut own) = (policy_of(&alone), policy_of(mesh));
    if mesh.sequence_group().size == 1 {
        for (whole, part) in batches.iter().zip(&shared) {
            let [expected, got] =
                [one.teacher_logprobs(whole, TEMPERATURE, 3), own.teacher_logprobs(part, TEMPERATURE, 3)]
                    .map(Result::unwrap);
            let difference = |a: &Tensor, b: &Tensor| (a - b.to_device(Device::Cpu)).abs().max().double_value(&[]);
            assert!(difference(&expected.logprobs, &got.logprobs) < tolerance, "{run:?}");
            assert!(difference(&expected.entropy, &got.entropy) < tolerance, "{run:?}");
            let [expected, got] = [expected.top.unwrap(), got.top.unwrap()];
            let ids = got.ids.to_device(Device::Cpu);
            assert!(expected.ids.equal(&ids) && difference(&expected.logprobs, &got.logprobs) < tolerance);
        }
    }
    let (expected, expected_weights) = steps(&whole, &mut one, &alone, &batches);
    let (got, weights) = steps(run, &mut own, mesh, &shared);
    for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
        assert!((got / expected - 1.0).abs() < tolerance, "{run:?}: {got}, not {expected}");
    }
    let difference = max_difference(&weights, &expected_weights);
    assert!(difference < tolerance, "{run:?}: off by {difference}");
}

fn every_mixer(mesh: &Mesh) {
    let stages = if mesh.shard.size() == 1 { 0..=0 } else { 0..=3 };
    for stage in stages {
        let run = Run { announced: stage > 1, ..Run::new(stage, Kind::Double) };
        let experts =
            Run { experts: true, aux_loss_coef: if mesh.sequence_group().size == 1 { 0.5 } else { 0.0 }, ..run };
        let delta_nets = Run { delta_nets: true, ..run };
        let recompute = GradientCheckpointing::Full;
        for run in [
            Run { tied: true, ..run },
            Run { recompute, budget: 24, has_turns: true, ..run },
            Run { recompute: GradientCheckpointing::KeepAttention, ..run },
            Run { share_prompts: true, budget: 1000, recompute, factors: true, ..run },
            Run { windows: true, ..run },
            Run { windows: true, recompute: GradientCheckpointing::Selective, ..run },
            // Two ranks exchange these heads in two parts.
            Run { num_kv_heads: 4, recompute, ..run },
            Run { num_kv_heads: 4, windows: true, recompute: GradientCheckpointing::KeepAttention, ..run },
            Run { budget: 1000, ..experts },
            Run { share_prompts: true, recompute, ..experts },
            delta_nets,
            Run { share_prompts: true, budget: 1000, recompute: GradientCheckpointing::KeepChunks, ..delta_nets },
            Run { share_prompts: true, recompute, ..delta_nets },
        ] {
            // A balancing loss depends on what is in a micro-batch.
            let run = if run.aux_loss_coef > 0.0 { Run { budget: 1000, ..run } } else { run };
            equals_one_rank(mesh, &run, &|mesh| run.policy(mesh), 1e-10);
        }
    }
}

/// Ranks that compute attention in two parts of their heads, for all micro-batches, for the longer ones, and for none; other numbers of
/// heads than the first only for all. `heads` are numbers of query and key/value heads.
fn halves_and_whole_heads(mesh: &Mesh, heads: &[[usize; 2]], tolerance: f64) {
    for (index, &[num_heads, num_kv_heads]) in heads.iter().enumerate() {
        let thresholds = if index == 0 { &[0, 30, i64::MAX][..] } else { &[0] };
        let run = Run { num_heads, num_kv_heads, recompute: GradientCheckpointing::Full, ..Run::new(0, Kind::Double) };
        let keep_attention = GradientCheckpointing::KeepAttention;
        for run in [
            Run { tied: true, ..run },
            Run { windows: true, recompute: keep_attention, ..run },
            Run { share_prompts: true, factors: true, recompute: GradientCheckpointing::Selective, ..run },
            Run { delta_nets: true, share_prompts: true, recompute: keep_attention, ..run },
        ] {
            for &halved_from in thresholds {
                let run = Run { halved_from: Some(halved_from), ..run };
                equals_one_rank(mesh, &run, &|mesh| run.policy(mesh), tolerance);
            }
        }
    }
}

/// Parts of one head; of seven query heads that read one key; of three heads; of heads that both ranks hold; and heads that cannot be halved.
const HEADS_OF_TWO: [[usize; 2]; 5] = [[4, 4], [28, 4], [12, 12], [12, 3], [6, 6]];

#[test]
fn two_ranks_that_halve_their_heads_equal_one() {
    let name = "train::sequence_parallel::two_ranks_that_halve_their_heads_equal_one";
    ranks::run(2, name, |world: World| halves_and_whole_heads(&mesh(&world, 2, 2), &HEADS_OF_TWO, 1e-10));
}

#[test]
fn four_ranks_that_halve_their_heads_equal_one() {
    let name = "train::sequence_parallel::four_ranks_that_halve_their_heads_equal_one";
    ranks::run(4, name, |world: World| halves_and_whole_heads(&mesh(&world, 4, 4), &[[8, 8], [24, 6]], 1e-10));
}

#[test]
fn two_sequence_parallel_ranks_equal_one_with_every_mixer() {
    ranks::run(
        2,
        "train::sequence_parallel::two_sequence_parallel_ranks_equal_one_with_every_mixer",
        |world: World| {
            every_mixer(&mesh(&world, 2, 2));
        },
    );
}

#[test]
fn four_sequence_parallel_ranks_equal_one_with_every_mixer() {
    ranks::run(
        4,
        "train::sequence_parallel::four_sequence_parallel_ranks_equal_one_with_every_mixer",
        |world: World| {
            every_mixer(&mesh(&world, 4, 4));
        },
    );
}

/// Shard groups smaller than sequence-parallel groups, and groups of which some have no sequences.
#[test]
fn sequence_parallel_groups_in_hybrid_shards_equal_one_rank() {
    let name = "train::sequence_parallel::sequence_parallel_groups_in_hybrid_shards_equal_one_rank";
    ranks::run(4, name, |world: World| {
        let mesh = mesh(&world, 2, 2);
        every_mixer(&mesh);
        for stage in 0..=3 {
            let run = Run { num_sharers: 1, budget: 24, ..Run::new(stage, Kind::Double) };
            equals_one_rank(&mesh, &run, &|mesh| run.policy(mesh), 1e-10);
        }
    });
}

/// Adapters on a base in float32 or NF4, with a width that NF4 supports.
#[test]
fn sequence_parallel_adapters_equal_one_rank() {
    ranks::run(2, "train::sequence_parallel::sequence_parallel_adapters_equal_one_rank", |world: World| {
        let mesh = mesh(&world, 2, 2);
        for preset in ["tiny", "tiny-hybrid"] {
            let spec = Arc::new(ModelSpec::preset(preset).unwrap().with_num_layers(4));
            for (kind, quantization, stage) in
                [(Kind::Double, Quantization::None, 3), (Kind::Float, Quantization::Nf4, 2)]
            {
                let run = Run { share_prompts: true, ..Run::new(stage, kind) };
                let adapted = |mesh: &Mesh| {
                    let table = Arc::new(ParamTable::new(spec.clone(), mesh.shard.size()));
                    let network = NetworkOptions { kind, residual: kind, device: Device::Cpu, format: &Plain };
                    let options = PolicyOptions { network, adam: ADAM, ..run.options(mesh) };
                    let targets = TargetModule::ALL.to_vec();
                    let lora = Some(LoraSpec { r: 4, alpha: 8.0, dropout: 0.0, targets });
                    let start = PolicyStart { lora, quantization, seed: 7, adapters: None, keeps_initial: false };
                    let source = |layout: &_| init_unit(layout, 3, Kind::Float);
                    Policy::start(table, mesh, options, OptimizerHome::Resident, &source, start).unwrap()
                };
                let tolerance = if kind == Kind::Double { 1e-10 } else { 1e-4 };
                equals_one_rank(&mesh, &run, &adapted, tolerance);
            }
        }
    });
}

/// Attention outputs that are kept have the same bits as recomputed ones, with and without sequence parallelism.
#[test]
fn kept_attention_equals_full_recomputation_bit_for_bit() {
    let name = "train::sequence_parallel::kept_attention_equals_full_recomputation_bit_for_bit";
    ranks::run(2, name, |world: World| {
        for mesh in [World::single().mesh(1, 1).unwrap(), mesh(&world, 2, 2)] {
            for kind in [Kind::Float, Kind::BFloat16] {
                let run = Run { share_prompts: true, budget: 1000, ..Run::new(0, kind) };
                let windows = Run { windows: true, share_prompts: false, ..run };
                for run in [run, windows, Run { num_kv_heads: 4, ..run }, Run { delta_nets: true, ..run }] {
                    let trained = |recompute| {
                        let run = Run { recompute, ..run };
                        steps(&run, &mut run.policy(&mesh), &mesh, &run.micro_batches(&mesh))
                    };
                    let expected = trained(GradientCheckpointing::Full);
                    assert!(trained(GradientCheckpointing::KeepAttention) == expected, "{run:?}");
                }
            }
        }
    });
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_with_sequence_parallelism_equal_one() {
    let name = "train::sequence_parallel::gpu_two_ranks_with_sequence_parallelism_equal_one";
    ranks::run_on_gpus(2, name, |world: World| every_mixer(&mesh(&world, 2, 2)));
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_that_halve_their_heads_equal_one() {
    let name = "train::sequence_parallel::gpu_two_ranks_that_halve_their_heads_equal_one";
    // A GPU's GEMMs add in an order that depends on the number of rows.
    ranks::run_on_gpus(2, name, |world: World| halves_and_whole_heads(&mesh(&world, 2, 2), &HEADS_OF_TWO, 1e-9));
}

/// GPU kernels in bfloat16, compared with ranks that have their own micro-batches: seven query heads per key head, and key heads of gated delta nets.
/// The last three halve the heads of each rank.
#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_share_micro_batches_by_kernels() {
    let name = "train::sequence_parallel::gpu_two_ranks_share_micro_batches_by_kernels";
    ranks::run_on_gpus(2, name, |world: World| {
        let own = world.mesh(1, 2).unwrap();
        let shared = own.clone().with_sequence_groups(&world, 2, 2).unwrap();
        let some = &[GradientCheckpointing::Full, GradientCheckpointing::KeepAttention][..];
        for (preset, num_layers, share_prompts, halved_from, recomputes) in [
            ("qwen2.5-0.5b", 2, true, None, GradientCheckpointing::ALL),
            ("qwen3-0.6b", 2, false, None, &some[..1]),
            ("qwen3.5-9b", 4, true, None, GradientCheckpointing::ALL),
            ("qwen2.5-7b", 2, true, Some(0), some),
            ("qwen3-0.6b", 2, false, Some(0), some),
            ("qwen3.5-9b", 4, true, Some(0), some),
        ] {
            let published = ModelSpec::preset(preset).unwrap().with_num_layers(num_layers);
            // One model has its own widths and vocabulary, the others small ones, since a test of all takes minutes.
            let spec = match recomputes.len() {
                1 => published,
                _ => ModelSpec { vocab_size: 8192, ..published.with_widths(512, 1024) },
            };
            let spec = Arc::new(spec);
            for &recompute in recomputes {
                let run = Run { recompute, share_prompts, halved_from, budget: 1000, ..Run::new(3, Kind::BFloat16) };
                let numbers = |mesh: &Mesh| {
                    let table = Arc::new(ParamTable::new(spec.clone(), mesh.shard.size()));
                    let source = |layout: &_| init_unit(layout, 3, Kind::Float);
                    let home = OptimizerHome::Resident;
                    let policy = Policy::with_home(table, mesh, run.options(mesh), home, &source).unwrap();
                    let mut policy = run.halved(policy);
                    steps(&run, &mut policy, mesh, &run.micro_batches(mesh)).0
                };
                let (expected, got) = (numbers(&own), numbers(&shared));
                for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
                    let off = (got / expected - 1.0).abs();
                    assert!(off < 0.02, "{preset}, {halved_from:?}, {recompute:?}: {got}, not {expected}");
                }
            }
        }
    });
}

/// Four heads cannot be divided among three ranks.
#[test]
fn sequence_parallelism_refuses_indivisible_heads() {
    let spec = ModelSpec::preset("micro").unwrap();
    let error = spec.validate_sequence_parallel(3).unwrap_err().to_string();
    assert_eq!(
        error,
        "sequence_parallel_size = 3: expected one of 1, 2, 4 (the model has 4 query heads, 2 key/value heads)"
    );
    let error = ModelSpec::preset("tiny-hybrid").unwrap().validate_sequence_parallel(8).unwrap_err().to_string();
    assert!(error.contains("2 key heads and 4 value heads of gated delta nets"), "{error}");
}
