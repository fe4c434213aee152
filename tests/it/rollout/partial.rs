//! Rollouts that end before all groups are complete, and continue at a later wake.

use std::collections::VecDeque;
use std::sync::Arc;

use colo_grpo::internal::ranks::{Collective, World};
use colo_grpo::internal::rollout::{Batches, EngineOptions, SampledGroup, SingleTurns};
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams};

use super::setup::{Model, alone, options, prompts, sampled, token_ids};
use crate::ranks;

/// Wakes an engine until all groups are complete. Each wake completes two more groups of all ranks and has its own step number.
fn generate_in_parts(
    model: &Model,
    tp: &Arc<dyn Collective>,
    prompts: &[Prompt],
    params: &SamplingParams,
) -> Vec<RolloutGroup> {
    let mut engine = model.engine(options(), tp.clone());
    let mut groups: Vec<_> = prompts.iter().cloned().map(RolloutGroup::new).collect();
    let (mut complete, mut num_carried) = (Vec::new(), 0);
    for wake in 0..prompts.len() * tp.size() / 2 {
        let params = SamplingParams { step: params.step + wake as u64, ..params.clone() };
        let mut rollout = engine.wake(model.weights(tp.as_ref()), 1).unwrap();
        let mut handed = Vec::new();
        let done = |group: &RolloutGroup| handed.push(group.clone());
        let part = rollout.generate_first(groups, 2 / tp.size(), &params, done).unwrap();
        assert_eq!(handed.len(), part.complete.len());
        assert!(part.complete.iter().all(|(_, group)| handed.contains(group)));
        complete.extend(part.complete.into_iter().map(|(_, group)| group));
        groups = part.unfinished.into_iter().map(|(_, group)| group).collect();
        num_carried += groups.iter().filter(|group| !group.completions.is_empty()).count();
    }
    assert!(groups.is_empty() && num_carried > 2, "{num_carried} times carried");
    complete.sort_by_key(|group| group.prompt.id);
    complete
}

/// The parts on each rank together equal what one rank samples in a single rollout.
fn goes_on_as_if_uninterrupted(tp: &Arc<dyn Collective>) {
    let (model, prompts) = (Model::micro().spreading(), prompts(8));
    let own = prompts.len() * tp.rank() / tp.size()..prompts.len() * (tp.rank() + 1) / tp.size();
    for params in [
        SamplingParams { step: 3, ..sampled() },
        SamplingParams { repetition_penalty: 1.3, stop: vec!["w7 ".into()], ..sampled() },
    ] {
        let (expected, _) = model.generate(options(), &prompts, &params);
        let got = generate_in_parts(&model, tp, &prompts[own.clone()], &params);
        assert_eq!(token_ids(&got), token_ids(&expected[own.clone()]));
        for (got, expected) in got.iter().zip(&expected[own.clone()]) {
            for (got, expected) in got.completions.iter().zip(&expected.completions) {
                assert_eq!((got.finish_reason, &got.text), (expected.finish_reason, &expected.text));
                let pairs = got.rollout_logprobs.iter().zip(&expected.rollout_logprobs);
                pairs.for_each(|(got, expected)| assert!((got - expected).abs() < 1e-4, "{got} {expected}"));
            }
        }
    }
}

#[test]
fn unfinished_groups_continue_with_the_tokens_of_an_uninterrupted_rollout() {
    goes_on_as_if_uninterrupted(&alone());
}

#[test]
fn two_ranks_continue_unfinished_groups_like_one() {
    let test = "rollout::partial::two_ranks_continue_unfinished_groups_like_one";
    ranks::run(2, test, |world: World| goes_on_as_if_uninterrupted(&world.group()));
}

/// Batches of several steps on one engine, which pauses as soon as the first batch is complete. Tokens equal those of each batch sampled alone,
/// and have the version of the wake that sampled them.
#[test]
fn several_paused_batches_continue() {
    let (model, tp, all) = (Model::micro().spreading(), alone(), prompts(6));
    let narrow = EngineOptions { max_num_seqs: 6, ..options() };
    let mut engine = model.engine(narrow, tp.clone()).keeping_sequences();
    let group = |prompt: &Prompt, step| RolloutGroup { first_step: step, ..RolloutGroup::new(prompt.clone()) };
    let batch = |at: usize| all[2 * at..2 * at + 2].iter().map(|prompt| group(prompt, 5 + at as u64)).collect();
    let mut queue: VecDeque<Vec<SampledGroup>> = (0..3)
        .map(batch)
        .map(|groups: Vec<RolloutGroup>| groups.into_iter().map(SampledGroup::open).collect())
        .collect();
    let mut num_continued = 0;
    for wake in 0..3 {
        let params = SamplingParams { step: 4 + wake, ..sampled() };
        let mut rollout = engine.wake(model.weights(tp.as_ref()), 1).unwrap();
        let open = queue.iter().map(|groups| {
            groups.iter().filter(|group| group.done.is_none()).map(|group| group.group.clone()).collect()
        });
        let (batches, mut num_done) = (open.collect(), 0);
        let (mut pauses, mut done) = (|| Ok(true), |_: usize, _: &RolloutGroup| num_done += 1);
        let mut policy = Batches::ahead(batches, &params, &mut pauses, &mut done);
        rollout.run(Box::<SingleTurns>::default(), &mut policy).unwrap();
        let after = policy.into_sampled();
        assert_eq!(after.iter().flatten().filter(|group| group.done.is_some()).count(), num_done);
        for (groups, after) in queue.iter_mut().zip(after) {
            groups.iter_mut().filter(|group| group.done.is_none()).zip(after).for_each(|(group, it)| *group = it);
        }
        let first = queue.pop_front().unwrap();
        assert!(first.iter().all(|group| group.done.is_some()), "wake {wake}");
        let groups: Vec<RolloutGroup> = first.into_iter().map(|group| group.group).collect();
        let whole = SamplingParams { step: 5 + wake, ..sampled() };
        let (expected, _) = model.generate(options(), &all[2 * wake as usize..2 * wake as usize + 2], &whole);
        assert_eq!(token_ids(&groups), token_ids(&expected));
        for completion in groups.iter().flat_map(|group| &group.completions) {
            assert!(completion.weight_versions.is_sorted() && completion.weight_versions.last() <= Some(&(4 + wake)));
            num_continued += usize::from(completion.weight_versions.first() != completion.weight_versions.last());
        }
    }
    assert!(num_continued > 0, "no completion was paused");
}
