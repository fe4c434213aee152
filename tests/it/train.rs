//! Training on real ranks: all ZeRO stages are equal bit for bit, and equal AdamW with gradients from autograd.

mod autograd;
mod delta_net;
mod experts;
mod factors;
mod fp8;
mod offload;
mod optimizers;
mod real_shapes;
mod run;
mod self_distillation;
mod sequence_parallel;
mod state;
mod updates;

use colo_grpo::internal::config::GradientCheckpointing;
use colo_grpo::internal::memory::HostPool;
use colo_grpo::internal::model::{Unit, UnitLayout};
use colo_grpo::internal::ranks::{Backend, Mesh, ReduceOp, World, all_reduce_f64};
use colo_grpo::internal::train::{GradientOptions, MicroBatch, Policy, Reference, Scores, reference_bytes};
use tch::{Kind, Tensor};

use run::{ADAM, ENTROPY_COEF, LR, MAX_GRAD_NORM, Run, TEMPERATURE, initial, max_difference, unpadded, weights};
use state::state;

use crate::ranks;

#[test]
fn one_rank_trains_like_plain_adamw() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for &recompute in GradientCheckpointing::ALL {
        follows_plain_adamw(&mesh, Run { recompute, ..Run::new(0, Kind::Double) }, 1e-10);
        follows_plain_adamw(&mesh, Run { recompute, ..Run::new(3, Kind::Float) }, 0.02 * LR);
    }
}

/// Context tokens, which were not sampled, are attended to but have no loss. Compared with autograd on whole sequences, with and without shared
/// prompts.
#[test]
fn multi_turn_sequences_train_like_plain_adamw() {
    let mesh = World::single().mesh(1, 1).unwrap();
    let run = Run { has_turns: true, ..Run::new(0, Kind::Double) };
    let num_context: usize = run.sequences().iter().map(|it| it.completion_len() - it.num_scored()).sum();
    assert!(num_context > 15 && run.sequences().iter().any(|it| !it.loss_mask[0]), "{num_context}");
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Selective, GradientCheckpointing::Full] {
        for (budget, share_prompts) in [(24, false), (1000, false), (24, true), (1000, true)] {
            follows_plain_adamw(&mesh, Run { recompute, budget, share_prompts, ..run }, 1e-10);
        }
    }
}

#[test]
fn two_ranks_with_multi_turn_sequences_train_like_plain_adamw() {
    ranks::run(2, "train::two_ranks_with_multi_turn_sequences_train_like_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for stage in [0, 3] {
            let run = Run { has_turns: true, share_prompts: true, ..Run::new(stage, Kind::Double) };
            follows_plain_adamw(&mesh, run, 1e-10);
        }
    });
}

/// A prompt is computed once for several completions. Compared with autograd on whole sequences.
#[test]
fn shared_prompts_train_like_plain_adamw() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Selective, GradientCheckpointing::Full] {
        for budget in [1, 24, 1000] {
            let run = Run { recompute, budget, share_prompts: true, ..Run::new(0, Kind::Double) };
            follows_plain_adamw(&mesh, run, 1e-10);
            follows_plain_adamw(&mesh, Run { tied: true, ..run }, 1e-10);
        }
    }
    let tokens = |share_prompts| -> usize {
        let run = Run { budget: 1000, share_prompts, ..Run::new(0, Kind::Double) };
        run.micro_batches(&mesh).iter().map(MicroBatch::num_tokens).sum()
    };
    assert_eq!(tokens(false) - tokens(true), 3 + 3 + 7 + 5);
}

/// The draft head, whose gradients are clipped separately, with and without shared prompts. The rest of the model equals one trained without
/// draft head bit for bit.
#[test]
fn a_draft_head_trains_like_plain_adamw_and_changes_nothing_else() {
    ranks::run(2, "train::a_draft_head_trains_like_plain_adamw_and_changes_nothing_else", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for (stage, tied, share_prompts) in [(0, true, false), (2, false, true), (3, true, true)] {
            let with = Run { draft_head: true, tied, share_prompts, has_turns: true, ..Run::new(stage, Kind::Double) };
            follows_plain_adamw(&mesh, with, 1e-10);
            follows_plain_adamw(&mesh, Run { announced: true, budget: 1000, ..with }, 1e-10);
            let without = Run { draft_head: false, ..with };
            let (mut own, mut other) = (with.policy(&mesh), without.policy(&mesh));
            for _ in 0..3 {
                let norms = [with.step(&mut own, &mesh), without.step(&mut other, &mesh)].map(|step| step.grad_norm);
                assert_eq!(norms[0].to_bits(), norms[1].to_bits());
            }
            let units = |policy: &Policy| {
                let units =
                    policy.table().units.iter().map(|layout| layout.unit).filter(|unit| *unit != Unit::DraftHead);
                units.map(|unit| policy.unit_weights(unit).unwrap()).collect::<Vec<_>>()
            };
            assert!(units(&own).iter().zip(&units(&other)).all(|(own, other)| own.equal(other)));
        }
    });
}

#[test]
fn two_ranks_train_like_plain_adamw() {
    ranks::run(2, "train::two_ranks_train_like_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for stage in 0..=3 {
            follows_plain_adamw(&mesh, Run::new(stage, Kind::Double), 1e-10);
            follows_plain_adamw(&mesh, Run { tied: true, ..Run::new(stage, Kind::Double) }, 1e-10);
            follows_plain_adamw(
                &mesh,
                Run { experts: true, share_prompts: true, ..Run::new(stage, Kind::Double) },
                1e-10,
            );
            follows_plain_adamw(&mesh, Run::new(stage, Kind::Float), 0.02 * LR);
            let gradients = GradientOptions { accumulated: None, reduced: Some(Kind::BFloat16) };
            follows_plain_adamw(&mesh, Run { gradients, ..Run::new(stage, Kind::Float) }, 4.0 * LR);
        }
    });
}

#[test]
fn four_ranks_train_like_plain_adamw() {
    ranks::run(4, "train::four_ranks_train_like_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 4).unwrap();
        for stage in 0..=3 {
            follows_plain_adamw(&mesh, Run { tied: true, ..Run::new(stage, Kind::Double) }, 1e-10);
        }
    });
}

#[test]
fn hybrid_shard_groups_train_like_plain_adamw() {
    ranks::run(4, "train::hybrid_shard_groups_train_like_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for stage in 0..=3 {
            follows_plain_adamw(&mesh, Run { announced: true, ..Run::new(stage, Kind::Double) }, 1e-10);
            follows_plain_adamw(&mesh, Run { tied: true, ..Run::new(stage, Kind::Float) }, 0.02 * LR);
        }
    });
}

#[test]
fn replicas_train_like_plain_adamw() {
    ranks::run(2, "train::replicas_train_like_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 1).unwrap();
        follows_plain_adamw(&mesh, Run::new(3, Kind::Double), 1e-10);
    });
}

#[test]
fn micro_batches_of_any_size_give_the_same_gradients() {
    ranks::run(2, "train::micro_batches_of_any_size_give_the_same_gradients", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for budget in [1, 12, 24, 1000] {
            for stage in [0, 1, 2, 3] {
                let run = Run { budget, tied: true, announced: stage > 0, ..Run::new(stage, Kind::Double) };
                follows_plain_adamw(&mesh, run, 1e-10);
            }
        }
    });
}

#[test]
fn a_rank_without_sequences_joins_its_peers() {
    ranks::run(2, "train::a_rank_without_sequences_joins_its_peers", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for stage in 0..=3 {
            let run = Run { num_sharers: 1, budget: 24, announced: true, ..Run::new(stage, Kind::Double) };
            assert_eq!(run.micro_batches(&mesh).iter().all(MicroBatch::is_empty), world.rank() == 1);
            follows_plain_adamw(&mesh, run, 1e-10);
        }
    });
}

#[test]
fn zero_stages_are_bitwise_equal() {
    ranks::run(2, "train::zero_stages_are_bitwise_equal", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        let kinds = |accumulated, reduced| GradientOptions { accumulated, reduced };
        for options in [
            (Kind::Float, kinds(None, None)),
            (Kind::BFloat16, kinds(None, None)),
            (Kind::BFloat16, kinds(None, Some(Kind::BFloat16))),
            (Kind::BFloat16, kinds(Some(Kind::BFloat16), Some(Kind::Float))),
        ] {
            for (tied, experts) in [(false, false), (true, false), (false, true)] {
                let (kind, gradients) = options;
                let run = Run { tied, experts, aux_loss_coef: 0.1, budget: 1000, gradients, ..Run::new(0, kind) };
                stages_equal(&mesh, run);
            }
        }
    });
}

/// Five steps of `run` give the same bits at every ZeRO stage, whether or not the last backward is announced.
fn stages_equal(mesh: &Mesh, run: Run) {
    let after = |stage, announced| {
        let run = Run { stage, announced, ..run };
        let mut policy = run.policy(mesh);
        let norms: Vec<f64> = (0..5).map(|_| run.step(&mut policy, mesh).grad_norm).collect();
        (norms, weights(&policy), state(&policy))
    };
    let (norms, expected, expected_state) = after(0, false);
    assert!(norms.iter().all(|norm| *norm > MAX_GRAD_NORM), "no step was clipped: {norms:?}");
    for (stage, announced) in (0..=3).flat_map(|stage| [(stage, false), (stage, true)]) {
        let (stage_norms, got, got_state) = after(stage, announced);
        let what = format!("differ at stage {stage}, announced {announced}, {run:?}");
        assert_eq!(stage_norms, norms, "norms {what}");
        assert!(got == expected, "weights {what}");
        assert!(got_state == expected_state, "state {what}");
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_skipped_by_all_ranks() {
    ranks::run(2, "train::a_gradient_that_is_not_finite_is_skipped_by_all_ranks", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for stage in 0..=3 {
            let run = Run::new(stage, Kind::Float);
            let (mut policy, mut undisturbed) = (run.policy(&mesh), run.policy(&mesh));
            for poison in [f64::NAN, f64::INFINITY] {
                let _ = run.step(&mut policy, &mesh);
                let _ = run.step(&mut undisturbed, &mesh);
                let (before, version) = (weights(&policy), policy.version());
                for micro_batch in &run.micro_batches(&mesh) {
                    let mut poisoned = |scores: &Scores| {
                        let gradients = run.loss(micro_batch, scores);
                        if world.rank() == 1 {
                            let _ = gradients.dlogprobs.get(0).fill_(poison);
                        }
                        Ok(gradients)
                    };
                    policy.forward_backward(micro_batch, TEMPERATURE, &mut poisoned).unwrap();
                }
                let outcome = policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap();
                assert!(outcome.skipped && !outcome.grad_norm.is_finite());
                assert!(weights(&policy) == before && policy.version() == version, "stage {stage} moved");
            }
            assert_eq!((policy.num_skipped(), policy.num_updates()), (2, 2));
            let _ = run.step(&mut policy, &mesh);
            let _ = run.step(&mut undisturbed, &mesh);
            assert!(weights(&policy) == weights(&undisturbed), "stage {stage} remembers a skipped step");
        }
    });
}

#[test]
fn a_reference_model_scores_like_the_initial_policy() {
    ranks::run(2, "train::a_reference_model_scores_like_the_initial_policy", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for tied in [false, true] {
            let run = Run { tied, ..Run::new(1, Kind::Double) };
            let table = run.table(mesh.shard.size());
            let source = |layout: &UnitLayout| Ok(initial(layout));
            let network = run.options(&mesh).network;
            let mut reference = Reference::new(table.clone(), &mesh, network, &source).unwrap();
            let bytes = reference_bytes(&table, run.kind);
            let pool = HostPool::new("reference_test", bytes, mesh.world.device(), &mut |_, _| ()).unwrap();
            let mut on_host = Reference::load("reference_weights", table, &mesh, network, Some(pool), &source).unwrap();
            let (mut policy, autograd) = (run.policy(&mesh), run.autograd());
            for micro_batch in &run.micro_batches(&mesh) {
                let scores = policy.forward_logprobs(micro_batch, TEMPERATURE).unwrap();
                let ref_scores = reference.forward_logprobs(micro_batch, TEMPERATURE).unwrap();
                let host_scores = on_host.forward_logprobs(micro_batch, TEMPERATURE).unwrap();
                assert!(ref_scores.logprobs.equal(&host_scores.logprobs));
                assert!(scores.logprobs.equal(&ref_scores.logprobs) && scores.entropy.equal(&ref_scores.entropy));
                let own = run.own_sequences(&mesh);
                let expected = micro_batch.sequences.iter().map(|&index| autograd.scores(&own[index], TEMPERATURE));
                let (logprobs, entropy): (Vec<_>, Vec<_>) = expected.unzip();
                if !micro_batch.is_empty() {
                    assert!((Tensor::cat(&logprobs, 0) - scores.logprobs).abs().max().double_value(&[]) < 1e-12);
                    assert!((Tensor::cat(&entropy, 0) - scores.entropy).abs().max().double_value(&[]) < 1e-12);
                }
            }
        }
    });
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_one_rank_trains_like_plain_adamw() {
    let mesh = World::single_on(Backend::Nccl).unwrap().mesh(1, 1).unwrap();
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Selective, GradientCheckpointing::Full] {
        follows_plain_adamw(&mesh, Run { recompute, ..Run::new(0, Kind::Double) }, 1e-10);
        follows_plain_adamw(&mesh, Run { recompute, tied: true, ..Run::new(0, Kind::Float) }, 0.1 * LR);
    }
    state::offloads(&mesh);
    state::streams(&mesh);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_waiting_for_optimizer_state_is_counted() {
    let mesh = World::single_on(Backend::Nccl).unwrap().mesh(1, 1).unwrap();
    state::counts_waiting(&mesh);
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_train_like_plain_adamw() {
    ranks::run_on_gpus(2, "train::gpu_two_ranks_train_like_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for stage in 0..=3 {
            for announced in [false, true] {
                let run = |kind| Run { announced, tied: announced, budget: 24, ..Run::new(stage, kind) };
                follows_plain_adamw(&mesh, run(Kind::Double), 1e-10);
                follows_plain_adamw(&mesh, run(Kind::Float), 0.1 * LR);
                let gradients = GradientOptions { accumulated: None, reduced: Some(Kind::BFloat16) };
                follows_plain_adamw(&mesh, Run { gradients, ..run(Kind::Float) }, 4.0 * LR);
            }
        }
        state::offloads(&mesh);
        state::streams(&mesh);
    });
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_losses_of_ten_steps_equal_the_cpus() {
    let name = "train::gpu_two_ranks_losses_of_ten_steps_equal_the_cpus";
    ranks::run_on_gpus(2, name, |world| losses_equal_the_cpus(&world));
}

#[test]
#[ignore = "needs four GPUs"]
fn gpu_four_ranks_losses_of_ten_steps_equal_the_cpus() {
    let name = "train::gpu_four_ranks_losses_of_ten_steps_equal_the_cpus";
    ranks::run_on_gpus(4, name, |world| losses_equal_the_cpus(&world));
}

#[test]
#[ignore = "needs eight GPUs"]
fn gpu_eight_ranks_losses_of_ten_steps_equal_the_cpus() {
    let name = "train::gpu_eight_ranks_losses_of_ten_steps_equal_the_cpus";
    ranks::run_on_gpus(8, name, |world| losses_equal_the_cpus(&world));
}

fn losses_equal_the_cpus(world: &World) {
    let (mesh, cpu) = (world.mesh(1, world.size()).unwrap(), World::single().mesh(1, 1).unwrap());
    for tied in [false, true] {
        let expected = losses(Run { tied, ..Run::new(0, Kind::Float) }, &cpu);
        for stage in 0..=3 {
            let got = losses(Run { tied, ..Run::new(stage, Kind::Float) }, &mesh);
            let worst = got.iter().zip(&expected).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
            if world.rank() == 0 {
                println!(
                    "stage {stage}, tied {tied}: losses of 10 steps within a factor of 1 +- {worst:.1e} of the CPU's"
                );
            }
            assert!(worst < 1e-4, "stage {stage}: {got:?} against {expected:?}");
        }
    }
}

/// The losses of ten steps over all ranks. They are linear in the outputs by which they are differentiated.
fn losses(run: Run, mesh: &Mesh) -> Vec<f64> {
    let mut policy = run.policy(mesh);
    let mut step = || {
        let mut loss = [0.0];
        for micro_batch in &run.micro_batches(mesh) {
            let mut gradients_of = |scores: &Scores| {
                let gradients = run.loss(micro_batch, scores);
                let entropy = gradients.dentropy.as_ref().unwrap() * &scores.entropy;
                loss[0] += (&gradients.dlogprobs * &scores.logprobs + entropy).sum(Kind::Double).double_value(&[]);
                Ok(gradients)
            };
            policy.forward_backward(micro_batch, TEMPERATURE, &mut gradients_of).unwrap();
        }
        let _ = policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap();
        all_reduce_f64(&*mesh.world, &mut loss, ReduceOp::Sum).unwrap();
        loss[0]
    };
    (0..10).map(|_| step()).collect()
}

/// Compares three steps of a run with three steps of plain AdamW on the whole batch's gradient.
fn follows_plain_adamw(mesh: &Mesh, run: Run, tolerance: f64) {
    let (mut policy, mut plain) = (run.policy(mesh), run.autograd());
    let sequences = run.sequences();
    for step in 0..3 {
        let outcome = run.step(&mut policy, mesh);
        let mut routes = Vec::new();
        let losses = sequences.iter().map(|sequence| {
            let (logprobs, entropy, own) = plain.scores_and_routes(sequence, TEMPERATURE);
            routes.extend(own);
            let terms = logprobs * -f64::from(sequence.advantage) + entropy * ENTROPY_COEF;
            terms.sum(Kind::Double) / run.denominator()
        });
        let mut loss = losses.reduce(|a, b| a + b).unwrap();
        if run.aux_loss_coef > 0.0 {
            loss += experts::load_balance(&routes) * run.aux_loss_coef;
        }
        if run.draft_head {
            loss += sequences.iter().map(|it| plain.draft_loss(it, TEMPERATURE)).reduce(|a, b| a + b).unwrap();
        }
        let norm = plain.step(loss, LR, MAX_GRAD_NORM, &ADAM);
        let rounding = if run.gradients.reduced.is_some() { 1e-2 } else { 1e-4 };
        assert!(
            (outcome.grad_norm / norm - 1.0).abs() < rounding,
            "{run:?}: norm {} against {norm}",
            outcome.grad_norm
        );
        let expected = unpadded(&plain.table, |unit| plain.units[plain.table.index(unit)].detach());
        let difference = max_difference(&weights(&policy), &expected);
        assert!(difference < tolerance, "{run:?}: off by {difference} after step {step}");
    }
    assert_eq!((policy.version(), policy.num_updates()), (3, 3));
    assert_eq!(
        policy.saves_state(&(0..mesh.world.size())),
        mesh.world.rank() < mesh.shard.size(),
        "only the first replica saves"
    );
}
