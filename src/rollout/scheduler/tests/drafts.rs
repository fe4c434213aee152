//! Tests of steps with draft tokens: no draft token may change what is sampled.

use super::*;
use crate::config::Speculation;
use crate::rollout::speculation::{DraftInjection, SpeculationOptions};

/// A speculator with draft tokens from `drafts`, up to seven per sequence.
pub(super) fn speculator(drafts: impl Fn(usize, &[u32]) -> u32 + Send + Sync + 'static) -> Option<Speculator> {
    let options = SpeculationOptions { method: Speculation::Ngram, num_tokens: 7 };
    let mut speculator = Speculator::new(options).unwrap();
    speculator.inject(DraftInjection::new(move |_, sample, token_ids, most| {
        let mut all = token_ids.to_vec();
        for _ in 0..most {
            all.push(drafts(sample, &all));
        }
        all.split_off(token_ids.len())
    }));
    Some(speculator)
}

fn right(sample: usize, tokens: &[u32]) -> u32 {
    next_token(tokens, sample).token_id
}

fn wrong(sample: usize, tokens: &[u32]) -> u32 {
    right(sample, tokens) + 1
}

/// Draft tokens that are correct three times out of four.
pub(super) fn mixed(sample: usize, tokens: &[u32]) -> u32 {
    right(sample, tokens) + u32::from((tokens.len() + sample).is_multiple_of(4))
}

fn of_occurrences() -> Option<Speculator> {
    Speculator::new(SpeculationOptions { method: Speculation::Ngram, num_tokens: 4 })
}

/// Creates a scheduler with three completions of each prompt.
fn drafting(speculator: Option<Speculator>, limits: StepLimits, prompts: &[Vec<u32>]) -> Scheduler {
    let (kept, stats) = Default::default();
    let mut scheduler = Scheduler::new(limits, kept, stats).with_speculator(speculator);
    for prompt in prompts {
        scheduler.submit(request(prompt, 3, Vec::new()), None);
    }
    scheduler
}

fn simulate_with(
    speculator: Option<Speculator>,
    limits: StepLimits,
    prompts: &[Vec<u32>],
    lag: usize,
) -> (Vec<Vec<u32>>, EngineStats) {
    let mut scheduler = drafting(speculator, limits, prompts);
    let complete = run(&mut scheduler, &mut Cache::new(), lag, usize::MAX);
    assert_eq!((scheduler.blocks.num_free(), complete.len()), (limits.num_blocks, prompts.len()));
    (scheduler.sequences.iter().map(|sequence| sequence.completion().to_vec()).collect(), scheduler.stats)
}

#[test]
fn draft_tokens_do_not_change_sampled_tokens() {
    let prompts = prompts();
    let (expected, without) = simulate(ROOMY, &prompts, 3, 0);
    let tight = [
        StepLimits { max_decode_rows: 34, ..ROOMY },
        StepLimits { max_num_seqs: 2, ..ROOMY },
        StepLimits { num_blocks: 8, max_num_seqs: 3, max_num_batched_tokens: 5, ..ROOMY },
        StepLimits { block_size: 1, num_blocks: 40, ..ROOMY },
        StepLimits { num_blocks: 20, ..ROOMY },
        StepLimits { max_model_length: 14, ..ROOMY },
        StepLimits { has_states: true, ..ROOMY },
        StepLimits { has_states: true, num_blocks: 20, max_num_seqs: 9, ..ROOMY },
    ];
    for lag in 0..3 {
        for limits in [ROOMY].iter().chain(&tight) {
            let expected = match limits.max_model_length == ROOMY.max_model_length {
                true => expected.clone(),
                false => simulate(*limits, &prompts, 3, 0).0,
            };
            for speculator in [speculator(right), speculator(wrong), speculator(mixed), of_occurrences()] {
                let (got, stats) = simulate_with(speculator, *limits, &prompts, lag);
                assert_eq!(got, expected, "{limits:?}, lag {lag}, {stats:?}");
                assert_eq!(stats.num_generated_tokens, expected.iter().map(Vec::len).sum::<usize>());
            }
        }
        let of = |speculator| simulate_with(speculator, ROOMY, &prompts, lag).1;
        let (all, none, some) = (of(speculator(right)), of(speculator(wrong)), of(speculator(mixed)));
        assert!(all.num_steps < without.num_steps / 2, "{all:?}");
        assert!(all.num_accepted_tokens > all.num_draft_tokens / 2, "tokens behind an end alone are not drawn");
        assert_eq!(none.num_accepted_tokens, 0);
        assert!(none.num_draft_tokens > 0 && none.num_steps <= without.num_steps + 2 * lag);
        assert!(some.num_accepted_tokens > 0 && some.num_accepted_tokens < some.num_draft_tokens);
    }
}

/// Uses the most sequences and the fewest blocks: a draft token may not take a block that a sampled token needs.
#[test]
fn no_sequence_is_preempted_for_a_draft_token() {
    let limits = StepLimits { num_blocks: 34, block_size: 2, ..ROOMY };
    let prompts = [vec![1, 2, 3], vec![2, 3], vec![4]];
    let without = simulate(limits, &prompts, 3, 0).1;
    let with = simulate_with(speculator(wrong), limits, &prompts, 0).1;
    assert!(with.num_draft_tokens > 0 && with.num_preemptions <= without.num_preemptions, "{with:?} {without:?}");
}

#[test]
fn a_full_step_has_no_draft_tokens() {
    let limits = StepLimits { max_num_seqs: 33, max_decode_rows: 33, ..ROOMY };
    let mut scheduler = drafting(speculator(right), limits, &prompts());
    while !scheduler.schedule().unwrap().is_decode {
        assert!(!scheduler.is_to_draft());
    }
    assert_eq!(scheduler.running.len(), 33);
    assert!(!scheduler.is_to_draft(), "all rows are sequences: the host runs ahead as without drafts");
    let step = scheduler.schedule().unwrap();
    assert!(!step.has_drafts() && !step.waited);
}

#[test]
fn interrupted_and_kept_sequences_continue_equally_with_drafts() {
    let prompts = prompts();
    let expected = simulate(ROOMY, &prompts, 3, 0).0;
    let tight = StepLimits { num_blocks: 12, max_num_seqs: 5, max_num_batched_tokens: 7, ..ROOMY };
    let states = |limits| StepLimits { has_states: true, ..limits };
    for (limits, lag) in [(ROOMY, 0), (ROOMY, 1), (tight, 0), (tight, 2), (states(ROOMY), 1), (states(tight), 0)] {
        for keeps in [false, true] {
            let mut held = vec![Vec::new(); prompts.len()];
            let (mut cache, mut kept, mut stats) = (Cache::new(), KeptSequences::default(), EngineStats::default());
            let (mut drafter, mut num_complete) = (speculator(mixed), 0);
            while num_complete < prompts.len() {
                let mut scheduler = Scheduler::new(limits, kept, stats).with_speculator(drafter);
                for (prompt, begun) in prompts.iter().zip(held) {
                    scheduler.submit(request(prompt, 3, begun), None);
                }
                num_complete = complete(scheduler.take_events()).len();
                run(&mut scheduler, &mut cache, lag, 2);
                held = sampled(&scheduler, prompts.len());
                stats = scheduler.stats;
                drafter = scheduler.speculator.take().map(Speculator::close);
                settle(&mut scheduler, &mut cache);
                kept = if keeps { scheduler.into_kept() } else { KeptSequences::default() };
            }
            let completions: Vec<_> = held.into_iter().flatten().map(|completion| completion.token_ids).collect();
            assert_eq!(completions, expected, "{limits:?}, lag {lag}, kept: {keeps}");
            assert!(stats.num_accepted_tokens > 0);
        }
    }
}

#[test]
fn drafts_come_from_completions_of_earlier_rollouts() {
    let prompts = [vec![1, 2, 3], vec![4, 5]];
    let sampled = |drafter| {
        let mut scheduler = drafting(drafter, ROOMY, &prompts);
        run(&mut scheduler, &mut Cache::new(), 0, usize::MAX);
        (scheduler.stats, scheduler.speculator.take().map(Speculator::close))
    };
    let (first, drafter) = sampled(of_occurrences());
    let (second, _) = sampled(drafter); // samples the same completions again
    assert!(second.num_accepted_tokens > 2 * first.num_accepted_tokens.max(8), "{first:?} {second:?}");
    assert!(second.num_steps < first.num_steps);
}

/// A session may end once a preempted sequence has blocks again, before its tokens are computed.
#[test]
fn a_sequence_that_is_to_be_computed_again_has_no_drafts_to_settle() {
    let limits = StepLimits { has_states: true, max_num_batched_tokens: 8, ..ROOMY };
    let mut scheduler = scheduler(limits, &[vec![1; 8], vec![2; 8]], 1);
    for _ in 0..2 {
        let step = scheduler.schedule().expect("a prompt");
        collect(&mut scheduler, &step, &[next_token(&[1], 0)], false);
    }
    (0..2).for_each(|_| scheduler.preempt_last());
    assert_eq!(scheduler.schedule().map(|step| step.runs.len()), Some(1));
    let num_computed: Vec<usize> = scheduler.running.iter().map(|&at| scheduler.sequences[at].num_computed).collect();
    assert_eq!(num_computed, [8, 0]);
    assert!(scheduler.settle_drafts().is_empty());
}

/// Sequences of one step end, continue and are removed while their draft tokens are under way.
#[test]
fn a_removed_request_leaves_no_state() {
    let mut scheduler = drafting(speculator(right), ROOMY, &prompts());
    let tokens = scheduler.sequences.iter().map(|sequence| sequence.token_ids.clone()).collect();
    let mut cache = Cache::new();
    let mut model = Model { cache: &mut cache, tokens };
    let rules = StopRules { eos_token_ids: &[END], decode: &|_| Ok(String::new()) };
    let mut removed = false;
    while scheduler.has_work() {
        let _ = scheduler.is_to_draft();
        let Some(step) = scheduler.schedule() else { break };
        let sampled = model.run(&step, &scheduler);
        if step.has_drafts() && !removed {
            scheduler.remove(3);
            removed = true;
        }
        scheduler.postprocess(&step, &sampled, &rules).unwrap();
        scheduler.check_integrity().unwrap();
    }
    assert!(removed && scheduler.sequences[9..12].iter().all(|sequence| sequence.token_ids.is_empty()));
    assert_eq!(scheduler.blocks.num_free(), ROOMY.num_blocks);
}
