//! Unfinished sequences that a colocated engine keeps during training and after failures.

use colo_grpo::internal::colocate::Colocated;
use colo_grpo::internal::phase::{FaultKind, Phase};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::train::Schedule;
use colo_grpo::internal::types::RolloutGroup;
use colo_grpo::internal::update::UpdateOptions;

use super::setup::{Setup, update_options};
use super::{arm_fault, fails, generate, own_prompts, sampled, scope_fails, sequences, with_mesh};
use crate::ranks;
use crate::rollout::token_ids;

/// What happens between a rollout that leaves groups unfinished and the one that continues them.
type Between = fn(&mut Colocated, &World, &[RolloutGroup]);

/// With `true`, both ranks of an engine keep all tokens in between; with `false`, both recompute all.
#[test]
fn a_kept_kv_cache_survives_training_unless_a_rank_lost_it() {
    const CASES: [(&str, bool, Between); 6] = [
        ("training", true, |colocated, _, _| train(colocated)),
        ("a failure before waking", true, |colocated, world, _| fault(colocated, world, Phase::Wake)),
        ("a failure after generating", true, |colocated, world, _| fault(colocated, world, Phase::Sleep)),
        ("one rank fails among the kept", false, fail_while_generating),
        ("one rank loads", false, |colocated, world, _| {
            if world.rank() == 1 {
                colocated.policy_mut();
            }
        }),
        ("all load", false, |colocated, _, _| {
            colocated.policy_mut();
        }),
    ];
    let test = "colocate::kept::a_kept_kv_cache_survives_training_unless_a_rank_lost_it";
    ranks::run(2, test, |world: World| {
        let (world, mesh) = with_mesh(world, 2);
        let mut colocated = Setup { keeps: true, draws_lengths: true, ..Setup::new(0) }.build(&world, &mesh);
        let prompts = own_prompts(&colocated);
        let expected = colocated.with_rollout(|rollout| rollout.generate(&prompts, &sampled(), |_| ())).unwrap();
        for (name, is_kept, between) in CASES {
            let fresh: Vec<_> = prompts.iter().cloned().map(RolloutGroup::new).collect();
            let (mut complete, unfinished, _) = first(&mut colocated, fresh, 1);
            between(&mut colocated, &world, &unfinished);
            let num_left = unfinished.len();
            let (rest, unfinished, [num_kept, num_recomputed]) = first(&mut colocated, unfinished, num_left);
            assert!(unfinished.is_empty());
            assert_eq!((num_kept > 0, num_recomputed > 0), (is_kept, !is_kept), "{name}");
            complete.extend(rest);
            complete.sort_by_key(|group| group.prompt.id);
            assert_eq!(token_ids(&complete), token_ids(&expected), "{name}");
        }
    });
}

/// Complete groups, unfinished groups, and the numbers of their tokens that were kept and recomputed.
fn first(
    colocated: &mut Colocated,
    groups: Vec<RolloutGroup>,
    num_groups: usize,
) -> (Vec<RolloutGroup>, Vec<RolloutGroup>, [usize; 2]) {
    let (rollout, stats) = colocated
        .with_rollout(|rollout| {
            let first = rollout.generate_first(groups, num_groups, &sampled(), |_| ())?;
            Ok((first, *rollout.stats()))
        })
        .unwrap();
    let complete = rollout.complete.into_iter().map(|(_, group)| group).collect();
    let unfinished = rollout.unfinished.into_iter().map(|(_, group)| group).collect();
    (complete, unfinished, [stats.num_kept_tokens, stats.num_recomputed_tokens])
}

/// An update that allocates memory and does not change the weights.
fn train(colocated: &mut Colocated) {
    let prompts = own_prompts(colocated);
    let groups = colocated.with_rollout(|rollout| generate(rollout, &prompts)).unwrap();
    let options = update_options();
    let options = UpdateOptions { schedule: Schedule { peak: 0.0, ..options.schedule }, ..options };
    assert_eq!(colocated.update(&sequences(&groups), &options, &()).unwrap().num_updates, 1);
}

fn fault(colocated: &mut Colocated, world: &World, phase: Phase) {
    let message = arm_fault(phase, FaultKind::Error, "with_rollout", world);
    fails(colocated, &message, generate);
}

/// Fails after both ranks began to overwrite the memory of the kept sequences.
fn fail_while_generating(colocated: &mut Colocated, world: &World, unfinished: &[RolloutGroup]) {
    let (failing, groups) = (world.rank() == 1, unfinished.to_vec());
    scope_fails(colocated, "panic in with_rollout: while generating", |colocated| {
        let num_groups = groups.len();
        let done = |_: &RolloutGroup| assert!(!failing, "while generating");
        colocated.with_rollout(|rollout| rollout.generate_first(groups, num_groups, &sampled(), done)).map(drop)
    });
}
