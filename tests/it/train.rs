//! The trainer over real ranks: every ZeRO stage against the others bit for bit, and against AdamW on autograd's gradients.

mod autograd;
mod real_shapes;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use colo_grpo::Result;
use colo_grpo::config::GradientCheckpointing;
use colo_grpo::dist::{Backend, Mesh, ReduceOp, World, all_gather_bytes, all_reduce_f64};
use colo_grpo::memory::{HostPool, Ledger, Place};
use colo_grpo::model::{Family, ModelSpec, ParamName, ParamTable, Unit, UnitLayout};
use colo_grpo::train::{
    AdamOptions, GradientOptions, MicroBatch, NetworkOptions, OptimizerHome, PackOptions, ParamShard, ParamState,
    Policy, PolicyOptions, Reference, Scores, Sequence, StepOutcome, TokenGradients, TrainedModel, pack,
    pad_to_agreed_count, reference_bytes,
};
use tch::{Device, Kind, Tensor};

use crate::ranks;

const LR: f64 = 1e-3;
const MAX_GRAD_NORM: f64 = 0.5;
const TEMPERATURE: f64 = 0.8;
const ENTROPY_COEF: f64 = 0.05;
/// `eps` is above f32's rounding of the gradients: below it Adam steps by the sign of noise.
const ADAM: AdamOptions = AdamOptions { beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1 };
const BUDGET: usize = 40;

#[test]
fn one_rank_follows_plain_adamw() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Selective, GradientCheckpointing::Full] {
        follows_plain_adamw(&mesh, Run { recompute, ..Run::new(0, Kind::Double) }, 1e-10);
        follows_plain_adamw(&mesh, Run { recompute, ..Run::new(3, Kind::Float) }, 0.02 * LR);
    }
}

/// Prompts run once for several completions, against autograd on whole sequences.
#[test]
fn shared_prompts_follow_plain_adamw() {
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

#[test]
fn two_ranks_follow_plain_adamw() {
    ranks::run(2, "train::two_ranks_follow_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for stage in 0..=3 {
            follows_plain_adamw(&mesh, Run::new(stage, Kind::Double), 1e-10);
            follows_plain_adamw(&mesh, Run { tied: true, ..Run::new(stage, Kind::Double) }, 1e-10);
            follows_plain_adamw(&mesh, Run::new(stage, Kind::Float), 0.02 * LR);
            let gradients = GradientOptions { accumulated: None, reduced: Some(Kind::BFloat16) };
            follows_plain_adamw(&mesh, Run { gradients, ..Run::new(stage, Kind::Float) }, 4.0 * LR);
        }
    });
}

#[test]
fn four_ranks_follow_plain_adamw() {
    ranks::run(4, "train::four_ranks_follow_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 4).unwrap();
        for stage in 0..=3 {
            follows_plain_adamw(&mesh, Run { tied: true, ..Run::new(stage, Kind::Double) }, 1e-10);
        }
    });
}

#[test]
fn hybrid_groups_follow_plain_adamw() {
    ranks::run(4, "train::hybrid_groups_follow_plain_adamw", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for stage in 0..=3 {
            follows_plain_adamw(&mesh, Run { announced: true, ..Run::new(stage, Kind::Double) }, 1e-10);
            follows_plain_adamw(&mesh, Run { tied: true, ..Run::new(stage, Kind::Float) }, 0.02 * LR);
        }
    });
}

#[test]
fn replicas_follow_plain_adamw() {
    ranks::run(2, "train::replicas_follow_plain_adamw", |world: World| {
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
fn stages_are_bitwise_equal() {
    ranks::run(2, "train::stages_are_bitwise_equal", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        let kinds = |accumulated, reduced| GradientOptions { accumulated, reduced };
        for options in [
            (Kind::Float, kinds(None, None)),
            (Kind::BFloat16, kinds(None, None)),
            (Kind::BFloat16, kinds(None, Some(Kind::BFloat16))),
            (Kind::BFloat16, kinds(Some(Kind::BFloat16), Some(Kind::Float))),
        ] {
            for tied in [false, true] {
                let after = |stage, announced| {
                    let (kind, gradients) = options;
                    let run = Run { tied, budget: 1000, gradients, announced, ..Run::new(stage, kind) };
                    let mut policy = run.policy(&mesh);
                    let norms: Vec<f64> = (0..5).map(|_| run.step(&mut policy, &mesh).grad_norm).collect();
                    (norms, weights(&policy), state(&policy))
                };
                let (norms, expected, expected_state) = after(0, false);
                assert!(norms.iter().all(|norm| *norm > MAX_GRAD_NORM), "no step was clipped: {norms:?}");
                for (stage, announced) in (0..=3).flat_map(|stage| [(stage, false), (stage, true)]) {
                    let (stage_norms, got, got_state) = after(stage, announced);
                    let what = format!("differ at stage {stage}, announced {announced}, {options:?}, tied {tied}");
                    assert_eq!(stage_norms, norms, "norms {what}");
                    assert!(got == expected, "weights {what}");
                    assert!(got_state == expected_state, "state {what}");
                }
            }
        }
    });
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
fn offloaded_state_returns_bit_identical() {
    ranks::run(2, "train::offloaded_state_returns_bit_identical", |world: World| offloads(&world.mesh(1, 2).unwrap()));
}

fn offloads(mesh: &Mesh) {
    for stage in [0, 3] {
        let run = Run::new(stage, Kind::Float);
        let (mut policy, mut resident) = (run.policy_in(mesh, OptimizerHome::Swap(run.pool(mesh))), run.policy(mesh));
        for _ in 0..2 {
            let _ = run.step(&mut policy, mesh);
            let _ = run.step(&mut resident, mesh);
            let before = state(&policy);
            for _ in 0..2 {
                policy.drop_gradients();
                policy.offload_optimizer().unwrap();
                policy.offload_optimizer().unwrap();
                policy.finish_offload().unwrap();
                let refused = policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap_err();
                assert!(refused.to_string().contains("offloaded"), "{refused}");
                assert!(state(&policy) == before, "stage {stage}: in the pool");
                policy.reload_optimizer().unwrap();
                policy.reload_optimizer().unwrap();
                assert!(state(&policy) == before, "stage {stage}: on its way back");
            }
            let _ = (run.step(&mut policy, mesh), run.step(&mut resident, mesh));
            let moved = policy.take_transitions().unwrap();
            assert_eq!(moved.bytes, 3 * policy.optimizer_bytes(), "what has not changed does not leave again");
        }
        assert!(weights(&policy) == weights(&resident) && state(&policy) == state(&resident), "stage {stage}");
        // Turned back half way.
        policy.drop_gradients();
        policy.offload_optimizer().unwrap();
        policy.reload_optimizer().unwrap();
        assert!(state(&policy) == state(&resident), "stage {stage}");
    }
}

#[test]
fn streamed_state_steps_like_resident() {
    ranks::run(2, "train::streamed_state_steps_like_resident", |world: World| streams(&world.mesh(1, 2).unwrap()));
}

fn streams(mesh: &Mesh) {
    for (stage, kind) in [(0, Kind::Float), (1, Kind::BFloat16), (2, Kind::Float), (3, Kind::BFloat16)] {
        let run = Run { tied: stage == 1, ..Run::new(stage, kind) };
        let mut policy = run.policy_in(mesh, OptimizerHome::Stream(run.pool(mesh)));
        let on_device = |&(place, owner, _): &(Place, &str, usize)| (place, owner) == (Place::Device, "optimizer");
        assert!(!Ledger::report().iter().any(on_device), "{:?}", Ledger::report());
        let mut resident = run.policy(mesh);
        for _ in 0..3 {
            assert_eq!(run.step(&mut policy, mesh), run.step(&mut resident, mesh), "stage {stage}");
            assert!(weights(&policy) == weights(&resident) && state(&policy) == state(&resident), "stage {stage}");
            policy.offload_optimizer().unwrap(); // it is away already
            policy.finish_offload().unwrap();
            policy.reload_optimizer().unwrap();
        }
        assert_eq!(policy.take_transitions().unwrap().bytes, 0);
        let saved = saved_state(&policy, mesh);
        resident.import_state(7, &mut |unit, name, range| read(&saved, unit, name, range)).unwrap();
        policy.import_state(7, &mut |unit, name, range| read(&saved, unit, name, range)).unwrap();
        let _ = (run.step(&mut policy, mesh), run.step(&mut resident, mesh));
        assert!(weights(&policy) == weights(&resident), "stage {stage}: after a checkpoint");
    }
}

#[test]
fn state_moves_to_another_world_size_and_stage() {
    ranks::run(2, "train::state_moves_to_another_world_size_and_stage", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        let alone = World::single().mesh(1, 1).unwrap();
        let (from, to) = (Run::new(3, Kind::Double), Run { num_sharers: 1, ..Run::new(0, Kind::Double) });
        let (mut policy, mut moved) = (from.policy(&mesh), to.policy(&alone));
        for _ in 0..2 {
            let _ = from.step(&mut policy, &mesh);
        }
        let saved = saved_state(&policy, &mesh);
        moved.import_state(policy.num_updates(), &mut |unit, name, range| read(&saved, unit, name, range)).unwrap();
        assert!(weights(&moved) == weights(&policy));
        assert!(saved_state(&moved, &alone) == saved, "state changed on its way");
        // And back: each rank asks for what it owns.
        let mut back = from.policy(&mesh);
        back.import_state(policy.num_updates(), &mut |unit, name, range| read(&saved, unit, name, range)).unwrap();
        assert!(state(&back) == state(&policy));

        let _ = (from.step(&mut policy, &mesh), to.step(&mut moved, &alone), from.step(&mut back, &mesh));
        assert!(weights(&back) == weights(&policy));
        let difference = max_difference(&weights(&moved), &weights(&policy));
        assert!(difference < 1e-10, "{difference}");
    });
}

#[test]
fn the_ledger_holds_what_the_formulas_say() {
    ranks::run(2, "train::the_ledger_holds_what_the_formulas_say", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for (stage, tied, kind) in
            [(0, true, Kind::Float), (1, false, Kind::BFloat16), (2, true, Kind::BFloat16), (3, false, Kind::Float)]
        {
            let run = Run { tied, ..Run::new(stage, kind) };
            let mut policy = run.policy(&mesh);
            let source = |layout: &UnitLayout| Ok(initial(layout));
            let table = run.table(mesh.shard.size());
            let _reference = Reference::new(table.clone(), &mesh, run.options(&mesh).network, &source).unwrap();
            let _ = run.step(&mut policy, &mesh);
            run.accumulate(&mut policy, &mesh);
            let bytes = TrainedModel::whole(&table, stage, kind, GradientOptions::default()).bytes();
            let page_bytes = 4096;
            let expected = [
                ("gradients", bytes.gradients),
                ("optimizer", bytes.optimizer.next_multiple_of(page_bytes)),
                ("policy_weights", bytes.weights),
                ("reference_weights", reference_bytes(&table, kind)),
            ];
            assert_eq!(Ledger::report(), expected.map(|(owner, bytes)| (Place::Device, owner, bytes)), "stage {stage}");
            assert_eq!(policy.optimizer_bytes(), bytes.optimizer);
            policy.drop_gradients();
            assert!(Ledger::report().iter().all(|(_, owner, _)| *owner != "gradients"));
        }
        assert!(Ledger::report().is_empty(), "{:?}", Ledger::report());
    });
}

#[test]
fn a_reference_scores_like_the_policy_it_was_loaded_as() {
    ranks::run(2, "train::a_reference_scores_like_the_policy_it_was_loaded_as", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for tied in [false, true] {
            let run = Run { tied, ..Run::new(1, Kind::Double) };
            let table = run.table(mesh.shard.size());
            let source = |layout: &UnitLayout| Ok(initial(layout));
            let network = run.options(&mesh).network;
            let mut reference = Reference::new(table.clone(), &mesh, network, &source).unwrap();
            let bytes = reference_bytes(&table, run.kind);
            let pool = HostPool::new("reference_test", bytes, mesh.world.device(), &mut |_, _| ()).unwrap();
            let mut on_host = Reference::on_host(table, &mesh, network, pool, &source).unwrap();
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
fn gpu_one_rank_follows_plain_adamw() {
    let mesh = World::single_on(Backend::Nccl).unwrap().mesh(1, 1).unwrap();
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Selective, GradientCheckpointing::Full] {
        follows_plain_adamw(&mesh, Run { recompute, ..Run::new(0, Kind::Double) }, 1e-10);
        follows_plain_adamw(&mesh, Run { recompute, tied: true, ..Run::new(0, Kind::Float) }, 0.1 * LR);
    }
    offloads(&mesh);
    streams(&mesh);
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_follow_plain_adamw() {
    ranks::run_on_gpus(2, "train::gpu_two_ranks_follow_plain_adamw", |world: World| {
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
        offloads(&mesh);
        streams(&mesh);
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

/// The losses of ten steps, over all ranks. They are linear in what they are differentiated by.
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

/// Three steps of a run against three of plain AdamW on the whole batch's gradient.
fn follows_plain_adamw(mesh: &Mesh, run: Run, tolerance: f64) {
    let (mut policy, mut plain) = (run.policy(mesh), run.autograd());
    let sequences = run.sequences();
    for step in 0..3 {
        let outcome = run.step(&mut policy, mesh);
        let losses = sequences.iter().map(|sequence| {
            let (logprobs, entropy) = plain.scores(sequence, TEMPERATURE);
            let terms = logprobs * -f64::from(sequence.advantage) + entropy * ENTROPY_COEF;
            terms.sum(Kind::Double) / run.denominator()
        });
        let loss = losses.reduce(|a, b| a + b).unwrap();
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
    assert_eq!(policy.saves_state(), mesh.world.rank() < mesh.shard.size(), "only the first replica saves");
}

/// What a test trains, and how.
#[derive(Debug, Clone, Copy)]
struct Run {
    stage: u8,
    kind: Kind,
    tied: bool,
    recompute: GradientCheckpointing,
    budget: usize,
    gradients: GradientOptions,
    /// Whether the last backward before a step is said to be.
    announced: bool,
    share_prompts: bool,
    /// Ranks that share the sequences; the others have none.
    num_sharers: usize,
}

impl Run {
    fn new(stage: u8, kind: Kind) -> Self {
        let recompute = GradientCheckpointing::None;
        let gradients = GradientOptions::default();
        Self {
            stage,
            kind,
            tied: false,
            recompute,
            budget: BUDGET,
            gradients,
            share_prompts: false,
            announced: false,
            num_sharers: usize::MAX,
        }
    }

    fn options(&self, mesh: &Mesh) -> PolicyOptions {
        PolicyOptions {
            stage: self.stage,
            network: NetworkOptions { kind: self.kind, device: mesh.world.device() },
            gradient_checkpointing: self.recompute,
            adam: ADAM,
            gradients: self.gradients,
        }
    }

    fn table(&self, shards: usize) -> Arc<ParamTable> {
        Arc::new(ParamTable::new(Arc::new(spec(self.tied)), shards))
    }

    fn policy(&self, mesh: &Mesh) -> Policy {
        self.policy_in(mesh, OptimizerHome::Resident)
    }

    fn policy_in(&self, mesh: &Mesh, home: OptimizerHome) -> Policy {
        let source = |layout: &UnitLayout| Ok(initial(layout));
        Policy::with_home(self.table(mesh.shard.size()), mesh, self.options(mesh), home, &source).unwrap()
    }

    /// Host memory for the optimizer's state.
    fn pool(&self, mesh: &Mesh) -> HostPool {
        let table = self.table(mesh.shard.size());
        let bytes = TrainedModel::whole(&table, self.stage, self.kind, self.gradients).bytes().optimizer;
        HostPool::new("train_test", bytes, mesh.world.device(), &mut |_, _| ()).unwrap()
    }

    fn autograd(&self) -> autograd::Model {
        let table = ParamTable::new(Arc::new(spec(self.tied)), 1);
        // Starts from the weights as the policy's kind rounds them.
        let sources: Vec<Tensor> = table.units.iter().map(|layout| initial(layout).to_kind(self.kind)).collect();
        autograd::Model::new(table, |index| sources[index].shallow_clone())
    }

    /// Eight sequences of different lengths, neighbours with the same prompt among them.
    fn sequences(&self) -> Vec<Sequence> {
        let lengths = [(3, 4), (3, 9), (3, 2), (7, 12), (7, 1), (5, 6), (5, 10), (1, 8)];
        let id = |i: usize, salt: usize| ((i * i + 5 * salt + 3 * i) % 47) as u32;
        let sequence = |(n, (prompt_len, completion_len)): (usize, (usize, usize))| Sequence {
            token_ids: (0..prompt_len)
                .map(|i| id(i, prompt_len))
                .chain((prompt_len..prompt_len + completion_len).map(|i| id(i, n)))
                .collect(),
            prompt_len,
            advantage: 1.5 - 0.6 * n as f32,
            masked: false,
            rollout_logprobs: None,
            old_logprobs: None,
            ref_logprobs: None,
        };
        lengths.into_iter().enumerate().map(sequence).collect()
    }

    fn own_sequences(&self, mesh: &Mesh) -> Vec<Sequence> {
        let (rank, sharers) = (mesh.world.rank(), self.num_sharers.min(mesh.world.size()));
        let all = self.sequences().into_iter().enumerate();
        let mut own: Vec<Sequence> =
            all.filter(|(n, _)| rank < sharers && n % sharers == rank).map(|(_, sequence)| sequence).collect();
        own.push(Sequence { masked: true, advantage: 100.0, ..self.sequences()[0].clone() });
        own
    }

    fn micro_batches(&self, mesh: &Mesh) -> Vec<MicroBatch> {
        let options =
            PackOptions { max_tokens: self.budget, share_prompts: self.share_prompts, device: mesh.world.device() };
        let mut micro_batches = pack(&self.own_sequences(mesh), &options).unwrap();
        pad_to_agreed_count(&mut micro_batches, &*mesh.world).unwrap();
        micro_batches
    }

    /// Makes gradients large enough to be clipped.
    fn denominator(&self) -> f64 {
        10.0
    }

    /// Gradients of the sum over tokens of (-advantage * logprob + coefficient * entropy) / denominator.
    fn loss(&self, micro_batch: &MicroBatch, scores: &Scores) -> TokenGradients {
        let advantages = micro_batch.advantages.index_select(0, &micro_batch.sequence_of_token);
        let dentropy = scores.entropy.ones_like() * (ENTROPY_COEF / self.denominator());
        let dlogprobs = (advantages.to_kind(Kind::Double) / -self.denominator()).to_kind(scores.logprobs.kind());
        TokenGradients { dlogprobs, dentropy: Some(dentropy) }
    }

    fn step(&self, policy: &mut Policy, mesh: &Mesh) -> StepOutcome {
        self.accumulate(policy, mesh);
        policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap()
    }

    fn accumulate(&self, policy: &mut Policy, mesh: &Mesh) {
        let micro_batches = self.micro_batches(mesh);
        for (index, micro_batch) in micro_batches.iter().enumerate() {
            if self.announced && index + 1 == micro_batches.len() {
                policy.finish_gradients_with_next_backward();
            }
            let mut loss = |scores: &Scores| Ok(self.loss(micro_batch, scores));
            policy.forward_backward(micro_batch, TEMPERATURE, &mut loss).unwrap();
        }
    }
}

/// Qwen2-like when tied, Qwen3-like when not.
fn spec(tied: bool) -> ModelSpec {
    ModelSpec {
        family: if tied { Family::Qwen2 } else { Family::Qwen3 },
        vocab_size: 47,
        hidden_size: 24,
        intermediate_size: 40,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 6,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        rope_scaling: None,
        tie_word_embeddings: tied,
        qkv_bias: tied,
        qk_norm: !tied,
        sliding_window: None,
        max_position_embeddings: 64,
        bos_token_id: None,
        eos_token_ids: vec![0],
        dtype: Kind::Float,
    }
}

/// Weights that depend on the parameter alone, not on its place: matrices about 0, norms about 1.
fn initial(layout: &UnitLayout) -> Tensor {
    let flat = Tensor::zeros([layout.len as i64], (Kind::Double, Device::Cpu));
    for (n, param) in layout.params.iter().enumerate() {
        let phase = match layout.unit {
            Unit::Embedding => 0.0,
            Unit::Block(layer) => 1.0 + layer as f64,
            Unit::Head => 9.0,
        };
        let wave =
            (Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 1.7 + 10.0 * phase + n as f64).sin();
        let values = if param.decay { wave * 0.3 } else { wave * 0.1 + 1.0 };
        flat.narrow(0, param.offset as i64, param.numel() as i64).copy_(&values);
    }
    flat
}

/// Every parameter's elements without padding, in table order; collective at stage 3.
fn weights(policy: &Policy) -> Vec<Vec<f64>> {
    unpadded(policy.table(), |unit| policy.unit_weights(unit).unwrap())
}

fn unpadded(table: &ParamTable, flat: impl Fn(Unit) -> Tensor) -> Vec<Vec<f64>> {
    let unit_params = |layout: &UnitLayout| {
        let flat = flat(layout.unit).to_device(Device::Cpu).to_kind(Kind::Double);
        let params = layout.params.iter();
        params.map(|param| Vec::try_from(layout.view(param.name, &flat).unwrap().reshape([-1])).unwrap()).collect()
    };
    table.units.iter().flat_map(|layout| -> Vec<Vec<f64>> { unit_params(layout) }).collect()
}

fn max_difference(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(b).flat_map(|(a, b)| a.iter().zip(b));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// A range of a parameter with its master weights and moments, as bits.
type Piece = (Unit, ParamName, Range<usize>, [Vec<u64>; 3]);

/// This rank's slice of the optimizer state.
fn state(policy: &Policy) -> Vec<Piece> {
    let bits = |tensor: Tensor| {
        let values: Vec<f64> = Vec::try_from(tensor.to_kind(Kind::Double)).unwrap();
        values.into_iter().map(f64::to_bits).collect()
    };
    let piece = |shard: Result<ParamShard>| {
        let ParamShard { unit, name, elements, state: ParamState { master, m, v } } = shard.unwrap();
        (unit, name, elements, [master, m, v].map(bits))
    };
    policy.export_state().map(piece).collect()
}

/// What all ranks of a shard group save, put together: it must cover every parameter exactly once.
fn saved_state(policy: &Policy, mesh: &Mesh) -> BTreeMap<(Unit, ParamName), [Vec<u64>; 3]> {
    let own = serde_json::to_vec(&state(policy)).unwrap();
    let mut saved = BTreeMap::new();
    for pieces in all_gather_bytes(&*mesh.shard, &own).unwrap() {
        let pieces: Vec<Piece> = serde_json::from_slice(&pieces).unwrap();
        for (unit, name, elements, bits) in pieces {
            let [master, m, v]: &mut [Vec<u64>; 3] = saved.entry((unit, name)).or_default();
            assert_eq!(elements.start, master.len(), "{unit} {name:?}: ranks' slices come in order");
            for (whole, part) in [master, m, v].into_iter().zip(bits) {
                assert_eq!(part.len(), elements.len());
                whole.extend(part);
            }
        }
    }
    let params = policy.table().units.iter().flat_map(|layout| layout.params.iter().map(move |param| (layout, param)));
    for (layout, param) in params {
        assert_eq!(saved[&(layout.unit, param.name)][0].len(), param.numel(), "{} {:?}", layout.unit, param.name);
    }
    saved
}

fn read(
    saved: &BTreeMap<(Unit, ParamName), [Vec<u64>; 3]>,
    unit: Unit,
    name: ParamName,
    elements: Range<usize>,
) -> Result<ParamState> {
    let values = |bits: &Vec<u64>| {
        Tensor::from_slice(&bits[elements.clone()].iter().map(|&bits| f64::from_bits(bits)).collect::<Vec<f64>>())
    };
    let [master, m, v] = &saved[&(unit, name)];
    Ok(ParamState { master: values(master), m: values(m), v: values(v) })
}
