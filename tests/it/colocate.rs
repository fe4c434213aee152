//! The scope of a rollout on real ranks: which memory it frees, and how it ends if a rank fails. Generated tokens do
//! not depend on ZeRO stage, tensor-parallel degree or world size.

mod kept;
mod pages;
pub mod setup;
mod trainer;
mod update;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use colo_grpo::internal::colocate::Colocated;
use colo_grpo::internal::memory::Ledger;
use colo_grpo::internal::phase::{self, Fault, FaultKind, Phase};
use colo_grpo::internal::ranks::{Mesh, World};
use colo_grpo::internal::rollout::RolloutEngine;
use colo_grpo::internal::train::{PackOptions, Sequence, pack};
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams};
use colo_grpo::{Error, Result};
use tch::{Device, Kind};

use crate::ranks;
use crate::rollout::{prompts, token_ids};
use pages::Pages;
use setup::{Setup, TEMPERATURE, kv_cache_bytes, share, state, update_options};

const NUM_PROMPTS: usize = 8;

#[test]
fn a_rollout_scope_swaps_optimizer_state_for_the_kv_cache() {
    ranks::run(2, "colocate::a_rollout_scope_swaps_optimizer_state_for_the_kv_cache", |world: World| {
        let (world, mesh) = with_mesh(world, 2);
        for stage in [2, 3] {
            let mut colocated = Setup::new(stage).build(&world, &mesh);
            let _ = Cycle::run(&mut colocated); // moments are not zero any more
            let (bytes, before) = (colocated.policy().optimizer_bytes(), state(colocated.policy()));
            let asleep = [Pages::mapped(bytes), Pages::mapped(kv_cache_bytes(2))];
            let prompts = own_prompts(&colocated);
            let awake = colocated.with_rollout(|rollout| {
                generate(rollout, &prompts)?;
                let awake = [Pages::mapped(bytes), Pages::mapped(kv_cache_bytes(2))];
                let (gone, come) = (missing(&asleep[0], &awake[0]), missing(&awake[1], &asleep[1]));
                let ([arena], [kv_cache]) = (&gone[..], &come[..]) else { panic!("{asleep:?} {awake:?}") };
                Ok((*arena, arena.resident_bytes(), *kv_cache, kv_cache.resident_bytes()))
            });
            let (arena, arena_bytes, kv_cache, kv_bytes) = awake.unwrap();
            assert_eq!(arena_bytes, 0, "optimizer state stayed");
            assert!(kv_bytes > kv_cache_bytes(2) / 4, "{kv_bytes} bytes of KV cache");
            assert!(kv_cache.resident_bytes() <= kv_bytes / 20, "{} stayed", kv_cache.resident_bytes());
            assert!(arena.resident_bytes() >= bytes);
            assert!(state(colocated.policy()) == before, "stage {stage}: optimizer state changed");
        }
    });
}

#[test]
fn a_failed_rollout_scope_ends_on_all_ranks_and_the_next_works() {
    ranks::run(2, "colocate::a_failed_rollout_scope_ends_on_all_ranks_and_the_next_works", |world: World| {
        let (world, mesh) = with_mesh(world, 2);
        let mut undisturbed = Setup::new(0).alone();
        for (stage, keeps) in [(0, false), (3, false), (3, true)] {
            let mut colocated = Setup { keeps, ..Setup::new(stage) }.build(&world, &mesh);
            Cycle::run(&mut colocated).check(&Cycle::run(&mut undisturbed), &world);
            if stage == 0 || keeps {
                fail_inside(&mut colocated, &world);
            }
            for phase in [Phase::Offload, Phase::Gather, Phase::Wake, Phase::Generate, Phase::Sleep, Phase::Reload] {
                for kind in [FaultKind::Error, FaultKind::Panic] {
                    let message = arm_fault(phase, kind, "with_rollout", &world);
                    fails(&mut colocated, &message, generate);
                }
            }
            Cycle::run(&mut colocated).check(&Cycle::run(&mut undisturbed), &world);
            undisturbed = Setup::new(0).alone();
        }
    });
}

#[test]
fn a_hundred_rollout_scopes_leak_no_memory() {
    scopes_leave_memory_flat("colocate::a_hundred_rollout_scopes_leak_no_memory", 100);
}

#[test]
#[ignore = "takes a minute"]
fn a_thousand_rollout_scopes_leak_no_memory() {
    scopes_leave_memory_flat("colocate::a_thousand_rollout_scopes_leak_no_memory", 1000);
}

/// Enters and leaves `num_scopes` scopes with generation and swapping. The first half only fills the caches of libraries.
fn scopes_leave_memory_flat(test: &str, num_scopes: usize) {
    ranks::run(1, test, |world: World| {
        let (world, mesh) = with_mesh(world, 1);
        let mut colocated = Setup::new(2).build(&world, &mesh);
        let prompts = own_prompts(&colocated);
        let mut cycle = || {
            colocated.with_rollout(|rollout| generate(rollout, &prompts)).unwrap();
            pages::resident_bytes() as f64
        };
        let before = (0..num_scopes / 2).map(|_| cycle()).fold(0.0, f64::max);
        let after = (0..num_scopes / 2).map(|_| cycle()).fold(0.0, f64::max);
        println!("resident after {num_scopes} scopes: {:.2} times what it was after half of them", after / before);
        assert!(after <= before * 1.01, "{before} bytes, then {after}");
    });
}

/// The ranges of `from` that are not in `others`.
fn missing(from: &[Pages], others: &[Pages]) -> Vec<Pages> {
    from.iter().filter(|pages| !others.contains(pages)).copied().collect()
}

/// Rank 1 fails in its own code while its peer waits for it in a collective of the engine.
fn fail_inside(colocated: &mut Colocated, world: &World) {
    let failing = world.rank() == 1;
    fails(colocated, "first column: nothing is left", |rollout, prompts| match failing {
        true => Err(Error::NonFinite { message: "first column: nothing is left".into() }),
        false => generate(rollout, prompts),
    });
    fails(colocated, "panic in with_rollout: before generating", |rollout, prompts| {
        assert!(!failing, "before generating");
        generate(rollout, prompts)
    });
    fails(colocated, "panic in with_rollout: while generating", |rollout, prompts| {
        rollout.generate(prompts, &sampled(), |_| assert!(!failing, "while generating"))
    });
    // The work's own error, found after the engine was used.
    fails(colocated, "libtorch: Internal torch error: after generating", |rollout, prompts| {
        let groups = generate(rollout, prompts)?;
        if failing { Err(tch::TchError::Torch("after generating".into()).into()) } else { Ok(groups) }
    });
}

/// Makes rank 1 fail at the start of `phase`. Returns the error message that it will report for the scope.
fn arm_fault(phase: Phase, kind: FaultKind, scope: &str, world: &World) -> String {
    phase::arm_fault(Some(Fault { rank: 1, step: 0, repeats: false, phase, kind }), world.rank());
    match kind {
        FaultKind::Panic => format!("panic in {scope}: injected panic in {}", phase.name()),
        _ => format!("injected fault in {}", phase.name()),
    }
}

/// Runs a scope that fails on rank 1 with `message`, and checks each rank's error and memory.
fn fails(
    colocated: &mut Colocated,
    message: &str,
    work: impl FnOnce(&mut RolloutEngine<'_>, &[Prompt]) -> Result<Vec<RolloutGroup>>,
) {
    let (prompts, before) = (own_prompts(colocated), state(colocated.policy()));
    let keeps = colocated.engine().absent_bytes() == 0;
    scope_fails(colocated, message, |colocated| colocated.with_rollout(|rollout| work(rollout, &prompts)).map(drop));
    assert!(state(colocated.policy()) == before, "{message}: optimizer state changed");
    let engine = colocated.engine();
    let is_right = if keeps { engine.absent_bytes() == 0 } else { engine.resident_bytes().unwrap() == 0 };
    assert!(is_right, "{message}: the engine is awake, or has lost its memory");
    let gone = if keeps { &["engine_weights", "gradients"][..] } else { &["engine_weights", "gradients", "kv_cache"] };
    assert!(!Ledger::report().iter().any(|account| gone.contains(&account.owner)));
}

/// Runs a scope that fails on rank 1 with `message`, and checks each rank's error. A rank that still waits in a collective gets the collective's
/// timeout error instead.
fn scope_fails(colocated: &mut Colocated, message: &str, scope: impl FnOnce(&mut Colocated) -> Result<()>) {
    let outcome = catch_unwind(AssertUnwindSafe(|| scope(colocated)));
    let is_panic = outcome.is_err();
    if let Ok(outcome) = outcome {
        let error = outcome.unwrap_err().to_string();
        let expected = if colocated.world().rank() == 0 { format!("rank 1 failed: {message}") } else { message.into() };
        assert_eq!(error, expected);
    }
    assert_eq!(is_panic, colocated.world().rank() == 1 && message.starts_with("panic"), "{message}");
}

#[test]
fn two_ranks_generate_and_train_like_one() {
    ranks::run(2, "colocate::two_ranks_generate_and_train_like_one", |world: World| {
        let world = Arc::new(world);
        let meshes = [world.mesh(1, 2).unwrap(), world.mesh(2, 2).unwrap()];
        let expected = Cycle::run(&mut Setup::new(0).alone());
        assert_ne!(token_ids(&expected.before), token_ids(&expected.after), "stale weights would not be seen");
        for mesh in &meshes {
            for stage in 0..=3 {
                let cycle = Cycle::run(&mut Setup::new(stage).build(&world, mesh));
                cycle.check(&expected, &world);
                assert!(cycle.gaps.iter().all(|gap| *gap < 1e-5), "stage {stage}: {:?}", cycle.gaps);
            }
            for stage in [1, 3] {
                let setup = Setup { kind: Kind::BFloat16, ..Setup::new(stage) };
                let Cycle { gaps, .. } = Cycle::run(&mut setup.build(&world, mesh));
                assert!(gaps.iter().all(|gap| *gap < 0.05), "bfloat16, stage {stage}: {gaps:?}");
            }
        }
    });
}

#[test]
fn four_ranks_generate_and_train_like_one() {
    ranks::run(4, "colocate::four_ranks_generate_and_train_like_one", |world: World| {
        let (world, mesh) = with_mesh(world, 2);
        let cycle = Cycle::run(&mut Setup::new(3).build(&world, &mesh));
        cycle.check(&Cycle::run(&mut Setup::new(0).alone()), &world);
        assert!(cycle.gaps.iter().all(|gap| *gap < 1e-5), "{:?}", cycle.gaps);
    });
}

/// The results of two rollouts with an update between them, for this rank's prompts.
struct Cycle {
    before: Vec<RolloutGroup>,
    after: Vec<RolloutGroup>,
    /// Mean difference of the sampler's and the trainer's log-probabilities of sampled tokens, before and after the update.
    gaps: [f64; 2],
}

impl Cycle {
    fn run(colocated: &mut Colocated) -> Self {
        let prompts = own_prompts(colocated);
        let before = colocated.with_rollout(|rollout| generate(rollout, &prompts)).unwrap();
        let trained = sequences(&before);
        let gap_before = gap(colocated, &trained);
        let outcome = colocated.update(&trained, &update_options(), &()).unwrap();
        assert_eq!((outcome.num_updates, outcome.num_skipped), (1, 0));
        let after = colocated.with_rollout(|rollout| generate(rollout, &prompts)).unwrap();
        let gaps = [gap_before, gap(colocated, &sequences(&after))];
        Self { before, after, gaps }
    }

    /// Compares this rank's tokens with those of a single process.
    fn check(&self, expected: &Self, world: &World) {
        let own = share(world, NUM_PROMPTS);
        for (got, expected) in [(&self.before, &expected.before), (&self.after, &expected.after)] {
            for (kind, expected) in expected.chunks(NUM_PROMPTS).enumerate() {
                let got = &got[kind * own.len()..][..own.len()];
                assert_eq!(token_ids(got), token_ids(&expected[own.clone()]), "{}", ["greedy", "sampled"][kind]);
            }
        }
    }
}

fn with_mesh(world: World, tp_size: usize) -> (Arc<World>, Mesh) {
    let mesh = world.mesh(tp_size, world.size()).unwrap();
    (Arc::new(world), mesh)
}

fn own_prompts(colocated: &Colocated) -> Vec<Prompt> {
    prompts(NUM_PROMPTS as u64)[share(colocated.world(), NUM_PROMPTS)].to_vec()
}

fn sampled() -> SamplingParams {
    SamplingParams {
        num_generations: 4,
        temperature: TEMPERATURE,
        max_completion_length: 16,
        ..SamplingParams::default()
    }
}

/// Generates greedy groups, then sampled groups.
fn generate(rollout: &mut RolloutEngine<'_>, prompts: &[Prompt]) -> Result<Vec<RolloutGroup>> {
    let greedy = SamplingParams { num_generations: 1, temperature: 0.0, ..sampled() };
    let mut groups = rollout.generate(prompts, &greedy, |_| ())?;
    groups.extend(rollout.generate(prompts, &sampled(), |_| ())?);
    Ok(groups)
}

/// Sequences of the sampled half of [`generate`]'s groups, with an advantage by index.
fn sequences(groups: &[RolloutGroup]) -> Vec<Sequence> {
    let sequence = |(group, sample): (&RolloutGroup, usize)| Sequence {
        advantage: sample as f32 - 1.5,
        ..Sequence::of_trajectory(&group.prompt.token_ids, &group.completions[sample])
    };
    let samples = groups[groups.len() / 2..].iter().flat_map(|group| (0..4).map(move |sample| (group, sample)));
    samples.map(sequence).collect()
}

fn gap(colocated: &mut Colocated, sequences: &[Sequence]) -> f64 {
    let options = PackOptions { max_tokens: usize::MAX, share_prompts: true, device: Device::Cpu };
    let micro_batch = pack(sequences, &options).unwrap().remove(0);
    let scores = colocated.policy_mut().forward_logprobs(&micro_batch, f64::from(TEMPERATURE)).unwrap();
    let difference = scores.logprobs - micro_batch.rollout_logprobs.unwrap();
    difference.abs().mean(Kind::Double).double_value(&[])
}
