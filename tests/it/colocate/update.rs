//! Optimizer updates on one generation batch.

use std::sync::Arc;

use colo_grpo::internal::colocate::Colocated;
use colo_grpo::internal::config::LossType;
use colo_grpo::internal::grpo::LossConfig;
use colo_grpo::internal::phase::{FaultKind, Phase};
use colo_grpo::internal::ranks::{ReduceOp, World, all_reduce_f64};
use colo_grpo::internal::train::{Schedule, Sequence};
use colo_grpo::internal::update::UpdateOptions;

use super::setup::{Setup, share, state, update_options};
use super::{arm_fault, scope_fails};
use crate::ranks;

const LOSS_TYPES: &[LossType] = LossType::ALL;

#[test]
fn two_ranks_have_the_loss_of_one() {
    ranks::run(2, "colocate::update::two_ranks_have_the_loss_of_one", |world: World| losses_agree(world, &[0, 2, 3]));
}

#[test]
fn four_ranks_have_the_loss_of_one() {
    ranks::run(4, "colocate::update::four_ranks_have_the_loss_of_one", |world: World| losses_agree(world, &[2]));
}

/// Loss and gradient norm of two passes of three updates are independent of ranks, ZeRO stage, packing and shared prompts.
fn losses_agree(world: World, stages: &[u8]) {
    let world = Arc::new(world);
    let mesh = world.mesh(1, world.size()).unwrap();
    for &loss_type in LOSS_TYPES {
        let options = |budget, share_prompts| UpdateOptions {
            share_prompts,
            loss: LossConfig { loss_type, epsilon_high: 1.2, ..LossConfig::default() },
            num_iterations: 2,
            updates_per_generation: 3, // a rank's sequences do not begin with the first update's
            max_tokens_per_micro_batch: budget,
            schedule: Schedule { peak: 1e-3, ..update_options().schedule }, // later losses magnify rounding by the rate
            ..update_options()
        };
        let (loss, norm) = totals(&mut Setup::new(0).alone(), &sequences(), &options(10_000, false));
        assert!(loss.abs() > 1e-3 && norm > 1e-3, "{loss_type:?}: {loss} {norm}");
        let packings = [(40, true), (40, false), (10_000, true)];
        for (stage, (budget, shared)) in stages.iter().flat_map(|stage| packings.map(|packing| (*stage, packing))) {
            let own = &sequences()[share(&world, sequences().len())];
            let mut colocated = Setup::new(stage).build(&world, &mesh);
            let (got_loss, got_norm) = totals(&mut colocated, own, &options(budget, shared));
            let differences = [(got_loss / loss - 1.0).abs(), (got_norm / norm - 1.0).abs()];
            assert!(differences.iter().all(|it| *it < 1e-5), "{loss_type:?}, stage {stage}, {budget}: {differences:?}");
        }
    }
}

#[test]
fn a_failure_in_an_update_ends_it_on_all_ranks_and_the_next_one_works() {
    ranks::run(
        2,
        "colocate::update::a_failure_in_an_update_ends_it_on_all_ranks_and_the_next_one_works",
        |world: World| {
            let world = Arc::new(world);
            let mesh = world.mesh(1, world.size()).unwrap();
            let all = sequences();
            let own = &all[share(&world, all.len())];
            for stage in [0, 2, 3] {
                let setup = Setup { with_reference: true, ..Setup::new(stage) };
                let options =
                    || UpdateOptions { loss: LossConfig { beta: 0.04, ..LossConfig::default() }, ..update_options() };
                let expected = totals(&mut setup.build(&world, &mesh), own, &options());
                let mut colocated = setup.build(&world, &mesh);
                for phase in [Phase::Pack, Phase::Reload, Phase::Score, Phase::ForwardBackward, Phase::Optimizer] {
                    for kind in [FaultKind::Error, FaultKind::Panic] {
                        let message = arm_fault(phase, kind, "update", &world);
                        scope_fails(&mut colocated, &message, |colocated| {
                            colocated.update(own, &options(), &()).map(drop)
                        });
                    }
                }
                assert_eq!(totals(&mut colocated, own, &options()), expected, "stage {stage}");
            }
        },
    );
}

#[test]
fn masked_completions_do_not_change_the_update() {
    for &loss_type in LOSS_TYPES {
        let options = UpdateOptions { loss: LossConfig { loss_type, ..LossConfig::default() }, ..update_options() };
        let run = |sequences: Vec<Sequence>| {
            let mut colocated = Setup::new(0).alone();
            let totals = totals(&mut colocated, &sequences, &options);
            (totals, state(colocated.policy()))
        };
        let mut others = sequences();
        for sequence in others.iter_mut().filter(|sequence| sequence.masked) {
            *sequence = Sequence { advantage: -9.0, masked: true, ..Sequence::of_tokens(vec![3; 12], 5) };
        }
        let (expected, expected_state) = run(sequences());
        let (got, got_state) = run(others);
        assert!(got == expected && got_state == expected_state, "{loss_type:?}: a masked completion was trained on");
        let unmasked = sequences().into_iter().map(|sequence| Sequence { masked: false, ..sequence }).collect();
        assert_ne!(run(unmasked).0, expected);
    }
}

#[test]
fn later_updates_use_the_log_probabilities_before_the_first() {
    let mut colocated = Setup::new(0).alone();
    let narrow = LossConfig { epsilon: 1e-3, epsilon_high: 1e-3, ..LossConfig::default() };
    let once = UpdateOptions { loss: narrow, ..update_options() };
    let four_times = UpdateOptions { num_iterations: 2, updates_per_generation: 2, ..once.clone() };
    let still = UpdateOptions { schedule: Schedule { peak: 0.0, ..once.schedule }, ..four_times.clone() };
    let clipped = |colocated: &mut Colocated, options: &UpdateOptions| {
        let outcome = colocated.update(&sequences(), options, &()).unwrap();
        assert_eq!(outcome.num_updates, (options.num_iterations * options.updates_per_generation) as u64);
        metric(&outcome.stats, "clip_ratio/region_mean")
    };
    assert_eq!(clipped(&mut colocated, &still), 0.0, "nothing moves, nothing is clipped");
    let region = clipped(&mut colocated, &four_times);
    assert!(region > 0.1, "{region}");
    assert_eq!(clipped(&mut colocated, &once), 0.0, "a single update is its own old policy");
}

#[test]
fn the_kl_term_is_zero_until_the_policy_leaves_the_reference() {
    ranks::run(2, "colocate::update::the_kl_term_is_zero_until_the_policy_leaves_the_reference", |world: World| {
        let world = Arc::new(world);
        let mesh = world.mesh(1, 2).unwrap();
        let loss = LossConfig { beta: 0.1, ..LossConfig::default() };
        let mut colocated = Setup { with_reference: true, ..Setup::new(2) }.build(&world, &mesh);
        let mut kl = || {
            let own = &sequences()[share(&world, sequences().len())];
            let outcome =
                colocated.update(own, &UpdateOptions { loss: loss.clone(), ..update_options() }, &()).unwrap();
            metric(&outcome.stats, "kl")
        };
        let (first, second) = (kl(), kl());
        assert!(first.abs() < 1e-9 && second > 1e-4, "{first} {second}");
    });
}

/// Loss over all ranks and mean gradient norm of one batch's updates.
fn totals(colocated: &mut Colocated, own: &[Sequence], options: &UpdateOptions) -> (f64, f64) {
    let outcome = colocated.update(own, options, &()).unwrap();
    let mut loss = [outcome.loss];
    all_reduce_f64(&*colocated.world().group(), &mut loss, ReduceOp::Sum).unwrap();
    (loss[0], outcome.grad_norm)
}

fn metric(stats: &colo_grpo::internal::grpo::LossStats, wanted: &str) -> f64 {
    let found = stats.entries().iter().find(|(name, _)| *name == wanted);
    found.unwrap_or_else(|| panic!("{wanted} is not reported")).1.value()
}

/// Sixteen sequences of different lengths and advantages, four per prompt, three of them masked.
fn sequences() -> Vec<Sequence> {
    let sequence = |n: usize| {
        let (prompt_len, completion_len) = (1 + n / 4 * 3 % 7, 2 + n * 5 % 11);
        let id = |i: usize, salt: usize| ((i * i + 5 * salt + 3 * i) % 96) as u32;
        let completion = (prompt_len..prompt_len + completion_len).map(|i| id(i, n));
        let token_ids = (0..prompt_len).map(|i| id(i, n / 4)).chain(completion).collect();
        let (advantage, masked) = (1.5 - 0.25 * n as f32, n % 6 == 2);
        Sequence { advantage, masked, ..Sequence::of_tokens(token_ids, prompt_len) }
    };
    (0..16).map(sequence).collect()
}
