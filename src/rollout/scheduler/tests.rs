mod chunks;
mod drafts;
mod network;
mod random;
mod turns;

use std::collections::HashMap;

use super::*;
use crate::rollout::request::ModelIds;
use crate::rollout::sampler::Sampled;
use crate::rollout::stop::StopRules;
use crate::types::{FinishReason, RoutedExperts, SamplingParams, Trajectory};
use network::{Cache, Model, check_experts, collect, next_token, settle};

const ROOMY: StepLimits = StepLimits {
    num_blocks: 200,
    block_size: 4,
    max_num_seqs: 64,
    max_decode_rows: 64,
    max_num_batched_tokens: 1000,
    max_model_length: 64,
    has_states: false,
    num_stages: 1,
    runs_ahead: false,
};
const END: u32 = 0;

/// Runs all sequences to their end with `lag` steps under way when the next is scheduled. Returns completions and statistics.
fn simulate(
    limits: StepLimits,
    prompts: &[Vec<u32>],
    num_generations: usize,
    lag: usize,
) -> (Vec<Vec<u32>>, EngineStats) {
    let mut scheduler = scheduler(limits, prompts, num_generations);
    let mut complete = run(&mut scheduler, &mut Cache::new(), lag, usize::MAX);
    assert_eq!(scheduler.blocks.num_free(), limits.num_blocks);
    assert_eq!(scheduler.states.num_free(), if limits.has_states { limits.max_num_seqs } else { usize::MAX });
    complete.sort_unstable();
    assert_eq!(complete, (0..prompts.len()).collect::<Vec<_>>());
    (scheduler.sequences.iter().map(|sequence| sequence.completion().to_vec()).collect(), scheduler.stats)
}

fn scheduler(limits: StepLimits, prompts: &[Vec<u32>], num_generations: usize) -> Scheduler {
    let begun = vec![Vec::new(); prompts.len()];
    resumed(limits, prompts, num_generations, begun, KeptSequences::default(), EngineStats::default()).0
}

/// Creates a scheduler with partly sampled requests and the sequences that an earlier one kept. Also returns how many were already complete.
fn resumed(
    limits: StepLimits,
    prompts: &[Vec<u32>],
    num_generations: usize,
    begun: Vec<Vec<Trajectory>>,
    kept: KeptSequences,
    stats: EngineStats,
) -> (Scheduler, usize) {
    let mut scheduler = Scheduler::new(limits, kept, stats);
    for (prompt, begun) in prompts.iter().zip(begun) {
        scheduler.submit(request(prompt, num_generations, begun), None);
    }
    let num_complete = complete(scheduler.take_events()).len();
    (scheduler, num_complete)
}

fn request(prompt: &[u32], num_generations: usize, begun: Vec<Trajectory>) -> Request {
    let params = SamplingParams { num_generations, max_completion_length: 20, ..SamplingParams::default() };
    Request {
        prompt_id: 0,
        token_ids: prompt.to_vec(),
        first_step: 0,
        first_sample: 0,
        params: Arc::new(params),
        begun,
        adapter: None,
    }
}

fn complete(events: Vec<Event>) -> Vec<usize> {
    let of_event = |event| match event {
        Event::Complete { request } => Some(request.0),
        _ => None,
    };
    events.into_iter().filter_map(of_event).collect()
}

/// Runs until `num_groups` are complete or no work is left, then collects the steps under way. Returns the complete groups.
fn run(scheduler: &mut Scheduler, cache: &mut Cache, lag: usize, num_groups: usize) -> Vec<usize> {
    let limits = scheduler.limits;
    let tokens = scheduler.sequences.iter().map(|sequence| sequence.token_ids.clone()).collect();
    let mut model = Model { cache, tokens };
    let (mut complete, mut under_way) = (Vec::new(), VecDeque::<(Step, Vec<Sampled>)>::new());
    while (scheduler.has_work() && complete.len() < num_groups) || !under_way.is_empty() {
        let goes_on = scheduler.has_work() && complete.len() < num_groups;
        if goes_on && (scheduler.is_to_draft() || under_way.iter().any(|(step, _)| step.has_drafts())) {
            for (step, sampled) in under_way.drain(..) {
                collect(scheduler, &step, &sampled, true);
            }
            complete.extend(self::complete(scheduler.take_events()));
        }
        let goes_on = goes_on && scheduler.has_work();
        let step = if goes_on { scheduler.schedule() } else { None };
        let is_idle = step.is_none();
        if is_idle && under_way.is_empty() {
            continue; // no work is left after the results that a step with draft tokens had to wait for
        }
        if let Some(step) = step {
            let num_tokens: usize = step.runs.iter().map(|run| run.tokens.len()).sum();
            let most = if step.is_decode { limits.max_decode_rows } else { limits.max_num_batched_tokens };
            assert!((1..=most).contains(&num_tokens) && scheduler.running.len() <= limits.max_num_seqs);
            scheduler.check_integrity().unwrap();
            let sampled = model.run(&step, scheduler);
            under_way.push_back((step, sampled));
        }
        if is_idle || under_way.len() > lag {
            let (step, sampled) = under_way.pop_front().expect("idle only while results are awaited");
            collect(scheduler, &step, &sampled, true);
            complete.extend(self::complete(scheduler.take_events()));
            scheduler.check_integrity().unwrap();
        }
    }
    scheduler.sequences.iter().filter(|sequence| !sequence.completion().is_empty()).for_each(check_experts);
    complete
}

/// Creates a trajectory in which these tokens are already sampled.
fn begun(token_ids: &[u32]) -> Trajectory {
    Trajectory {
        token_ids: token_ids.to_vec(),
        loss_mask: vec![true; token_ids.len()],
        rollout_logprobs: vec![0.0; token_ids.len()],
        weight_versions: vec![0; token_ids.len()],
        ..Trajectory::default()
    }
}

/// Returns the completions of every group so far.
fn sampled(scheduler: &Scheduler, num_groups: usize) -> Vec<Vec<Trajectory>> {
    let of_group =
        |group| scheduler.sequences[scheduler.members(group)].iter().map(EngineSequence::trajectory).collect();
    (0..num_groups).map(of_group).collect()
}

fn prompts() -> Vec<Vec<u32>> {
    (1..12).map(|len| (0..len).map(|token| token % 5 + 1).collect()).collect()
}

#[test]
fn scheduler_limits_do_not_change_sampled_tokens() {
    let prompts = prompts();
    let (expected, stats) = simulate(ROOMY, &prompts, 3, 0);
    assert_eq!(stats.num_preemptions, 0);
    let tight = [
        StepLimits { max_num_seqs: 1, ..ROOMY },
        StepLimits { max_num_seqs: 2, ..ROOMY },
        StepLimits { max_num_seqs: 7, ..ROOMY },
        StepLimits { max_num_batched_tokens: 3, ..ROOMY },
        StepLimits { num_blocks: 8, ..ROOMY },
        StepLimits { num_blocks: 8, max_num_seqs: 3, max_num_batched_tokens: 5, ..ROOMY },
        StepLimits { block_size: 1, num_blocks: 40, ..ROOMY },
        StepLimits { num_blocks: 20, ..ROOMY },
    ];
    for lag in 0..3 {
        for limits in [ROOMY].iter().chain(&tight) {
            for has_states in [false, true] {
                let limits = StepLimits { has_states, ..*limits };
                assert_eq!(simulate(limits, &prompts, 3, lag).0, expected, "{limits:?}, lag {lag}");
            }
        }
        assert!(simulate(tight[7], &prompts, 3, lag).1.num_preemptions > 0);
    }
    for num_stages in 2..5 {
        for limits in [ROOMY].iter().chain(&tight) {
            let limits = StepLimits { num_stages, ..*limits };
            assert_eq!(simulate(limits, &prompts, 3, num_stages - 1).0, expected, "{limits:?}");
            let limits = StepLimits { runs_ahead: true, ..limits };
            assert_eq!(simulate(limits, &prompts, 3, num_stages).0, expected, "{limits:?}");
        }
    }
}

#[test]
fn interrupted_sequences_continue_with_the_same_tokens() {
    let prompts = prompts();
    let expected = simulate(ROOMY, &prompts, 3, 0).0;
    let tight = StepLimits { num_blocks: 12, max_num_seqs: 5, max_num_batched_tokens: 7, ..ROOMY };
    let both = |limits| [limits, StepLimits { has_states: true, ..limits }];
    let cases = [(ROOMY, 0), (ROOMY, 1), (tight, 0), (tight, 2)];
    for (limits, lag) in cases.into_iter().flat_map(|(limits, lag)| both(limits).map(|limits| (limits, lag))) {
        let mut held = vec![Vec::new(); prompts.len()];
        let mut num_complete = Vec::new();
        while num_complete.last() != Some(&prompts.len()) {
            let (kept, stats) = Default::default();
            let (mut scheduler, count) = resumed(limits, &prompts, 3, held, kept, stats);
            num_complete.push(count);
            run(&mut scheduler, &mut Cache::new(), lag, 2);
            held = sampled(&scheduler, prompts.len());
        }
        assert!(num_complete.len() > 2 && num_complete.is_sorted(), "{num_complete:?}");
        let completions: Vec<_> = held.into_iter().flatten().map(|completion| completion.token_ids).collect();
        assert_eq!(completions, expected, "{limits:?}, lag {lag}");
    }
}

/// Between the two rollouts, other prompts run with the blocks that are left.
#[test]
fn kept_sequences_continue_without_recomputation() {
    let prompts = prompts();
    let expected = simulate(ROOMY, &prompts, 3, 0).0;
    let tight = StepLimits { num_blocks: 12, max_num_seqs: 5, max_num_batched_tokens: 7, ..ROOMY };
    let few_slots = StepLimits { max_num_seqs: 7, max_num_batched_tokens: 11, ..ROOMY }; // no prompt is chunked: a chunked one would start again
    let both = |limits| [limits, StepLimits { has_states: true, ..limits }];
    let cases = [(ROOMY, 0), (ROOMY, 1), (few_slots, 0), (few_slots, 2), (tight, 0), (tight, 2)];
    for (limits, lag) in cases.into_iter().flat_map(|(limits, lag)| both(limits).map(|limits| (limits, lag))) {
        let (mut held, mut kept) = (vec![Vec::new(); prompts.len()], KeptSequences::default());
        let (mut cache, mut stats, mut num_complete) = (Cache::new(), EngineStats::default(), 0);
        while num_complete < prompts.len() {
            let mut scheduler;
            (scheduler, num_complete) = resumed(limits, &prompts, 3, held, kept, stats);
            run(&mut scheduler, &mut cache, lag, 2);
            held = sampled(&scheduler, prompts.len());
            (stats, kept) = (scheduler.stats, scheduler.into_kept());
            let (mut other, _) = resumed(limits, &[vec![7; 9]], 4, vec![Vec::new()], kept, EngineStats::default());
            run(&mut other, &mut cache, lag, usize::MAX);
            kept = other.into_kept();
        }
        assert_eq!(kept.tables().count(), 0);
        let completions: Vec<_> = held.into_iter().flatten().map(|completion| completion.token_ids).collect();
        assert_eq!(completions, expected, "{limits:?}, lag {lag}");
        let num_prompt_tokens: usize = prompts.iter().map(Vec::len).sum();
        let EngineStats { num_prefilled_tokens, num_recomputed_tokens, num_kept_tokens, .. } = stats;
        assert!(num_kept_tokens > 0, "{stats:?}");
        if limits.num_blocks == tight.num_blocks {
            assert!(num_recomputed_tokens > 0, "{stats:?}");
        } else if limits.has_states && limits.max_num_seqs == few_slots.max_num_seqs {
            // The other prompts take pages of kept states, and a prompt whose states are lost is computed again.
            assert!(num_prefilled_tokens > num_prompt_tokens, "{stats:?}");
        } else {
            assert_eq!((num_prefilled_tokens, num_recomputed_tokens), (num_prompt_tokens, 0), "{stats:?}");
        }
    }
}

/// A step that is undone samples the same tokens again, so two block tables are kept for every sequence.
#[test]
fn kept_sequences_that_nobody_continues_are_freed() {
    let prompts = prompts();
    let (mut kept, mut cache, mut held) = (KeptSequences::default(), Cache::new(), Vec::new());
    for num_tries in 1..3 {
        let begun = vec![Vec::new(); prompts.len()];
        let (mut scheduler, _) = resumed(ROOMY, &prompts, 3, begun, kept, EngineStats::default());
        run(&mut scheduler, &mut cache, 0, 2);
        held = sampled(&scheduler, prompts.len());
        let num_running = scheduler.running.len();
        kept = scheduler.into_kept();
        assert_eq!(kept.tables().count(), num_tries * num_running);
    }
    let few_slots = StepLimits { max_num_seqs: 2, ..ROOMY };
    assert!(kept.tables().count() > 2 * few_slots.max_num_seqs);
    let (mut scheduler, _) = resumed(few_slots, &prompts, 3, held, kept, EngineStats::default());
    scheduler.drop_unclaimed();
    assert_eq!((scheduler.running.len(), scheduler.kept.tables().count()), (2, 0));
    scheduler.check_integrity().unwrap();
    run(&mut scheduler, &mut cache, 0, usize::MAX);
    assert_eq!(scheduler.blocks.num_free(), few_slots.num_blocks);
    let completions: Vec<_> = scheduler.sequences.iter().map(|sequence| sequence.completion().to_vec()).collect();
    assert_eq!(completions, simulate(ROOMY, &prompts, 3, 0).0);
}

/// Tokens in blocks that several sequences share are counted once.
#[test]
fn a_kept_group_needs_as_many_blocks_as_a_recomputed_one() {
    let mut scheduler = scheduler(ROOMY, &[(1..13).collect()], 3);
    let mut cache = Cache::new();
    assert_eq!(run(&mut scheduler, &mut cache, 0, 1), [0]);
    let lens: Vec<usize> = scheduler.sequences.iter().map(EngineSequence::len).collect();
    let half = |sequence: &EngineSequence| begun(&sequence.completion()[..sequence.completion().len() / 2]);
    let halves: Vec<_> = scheduler.sequences.iter().map(half).collect();
    assert!(halves.iter().all(|half| !half.token_ids.is_empty()), "{lens:?}");
    let resumed = |kept: KeptSequences| {
        let (prompt, begun) = ((1..13).collect(), vec![halves.clone()]);
        let (scheduler, num_complete) = self::resumed(ROOMY, &[prompt], 3, begun, kept, EngineStats::default());
        assert_eq!(num_complete, 0);
        scheduler
    };
    let mut computed = resumed(KeptSequences::default());
    computed.schedule();
    computed.schedule();
    let num_computed = computed.stats.num_recomputed_tokens;
    assert_eq!(num_computed, computed.stats.num_prefilled_tokens);
    computed.sequences.iter_mut().for_each(|sequence| sequence.num_computed = sequence.len() - 1);
    let kept = resumed(computed.into_kept());
    assert_eq!(
        (kept.stats.num_kept_tokens, kept.running.len()),
        (num_computed - 3, 3),
        "last tokens are left to compute"
    );
}

/// Requests that are submitted while others run do not change the tokens of the running ones, and run beside them.
#[test]
fn requests_may_be_added_between_any_two_steps() {
    let prompts = prompts();
    let expected = simulate(ROOMY, &prompts, 3, 0).0;
    let tight = StepLimits { num_blocks: 12, max_num_seqs: 5, max_num_batched_tokens: 7, ..ROOMY };
    for limits in [ROOMY, tight] {
        let mut scheduler = Scheduler::new(limits, KeptSequences::default(), EngineStats::default());
        let rules = StopRules { eos_token_ids: &[END], decode: &|_| Ok(String::new()) };
        let (mut cache, mut tokens, mut coming, mut num_complete) = (Cache::new(), Vec::new(), prompts.iter(), 0);
        while num_complete < prompts.len() {
            if let Some(prompt) = coming.next() {
                scheduler.submit(request(prompt, 3, Vec::new()), None);
                tokens.extend(std::iter::repeat_n(prompt.clone(), 3));
            }
            if scheduler.has_work() {
                let step = scheduler.schedule().expect("nothing is under way");
                let mut model = Model { cache: &mut cache, tokens: std::mem::take(&mut tokens) };
                let sampled = model.run(&step, &scheduler);
                tokens = model.tokens;
                scheduler.postprocess(&step, &sampled, &rules).unwrap();
                scheduler.check_integrity().unwrap();
            }
            num_complete += complete(scheduler.take_events()).len();
        }
        let completions: Vec<_> = scheduler.sequences.iter().map(|sequence| sequence.completion().to_vec()).collect();
        assert_eq!(completions, expected, "{limits:?}");
    }
}

#[test]
fn an_unfinished_group_computes_its_prompt_once() {
    let completion = |token_id| begun(&[token_id; 5]);
    let (kept, stats) = Default::default();
    let begun: Vec<Vec<Trajectory>> = vec![(1..9).map(completion).collect()];
    let (mut scheduler, _) = resumed(ROOMY, &[(1..13).collect()], 8, begun, kept, stats);
    run(&mut scheduler, &mut Cache::new(), 1, 1);
    assert_eq!((scheduler.stats.num_prefilled_tokens, scheduler.stats.num_shared_tokens), (12 + 8 * 5, 7 * 12));
}

#[test]
fn a_group_computes_its_prompt_once() {
    let prompt: Vec<u32> = (1..11).collect();
    let (_, stats) = simulate(ROOMY, std::slice::from_ref(&prompt), 8, 1);
    assert_eq!((stats.num_prefilled_tokens, stats.num_shared_tokens), (10, 70));
    let generated = simulate(ROOMY, &[prompt], 8, 0).0.iter().map(Vec::len).sum::<usize>();
    assert_eq!((stats.num_generated_tokens, stats.num_finished), (generated, 8));
}

#[test]
fn shared_blocks_keep_the_experts_recorded_for_them() {
    let held = vec![vec![begun(&[9; 5]), Trajectory::default(), Trajectory::default()]];
    let (kept, stats) = Default::default();
    let (mut scheduler, _) = resumed(ROOMY, &[(1..11).collect()], 3, held, kept, stats);
    // The first step has the partly sampled completion with the prompt, the second the others after the prompt's full blocks, the third all of them.
    for _ in 0..3 {
        let step = scheduler.schedule().expect("nothing is under way");
        let samples = step.runs.iter().flat_map(|run| run.samples.clone());
        let sampled = samples.map(|_| Sampled { token_id: 5, logprob: 0.0, top: Vec::new() });
        collect(&mut scheduler, &step, &sampled.collect::<Vec<_>>(), true);
    }
    assert_eq!(scheduler.stats.num_prefilled_tokens, 15 + 2, "the others share blocks");
    scheduler.sequences.iter().for_each(check_experts);
}

#[test]
fn sequences_that_can_never_fit_are_refused_with_the_numbers() {
    let ids = ModelIds { vocab_size: 9, num_experts: 0, experts_per_token: 0 };
    let refusal = |limits, len| request(&vec![1; len], 1, Vec::new()).check(ids, 0, &limits).unwrap_err().to_string();
    let message = refusal(StepLimits { num_blocks: 7, ..ROOMY }, 10);
    assert!(
        message.contains("at most 7 KV blocks") && message.contains("prompt of 10") && message.contains("8 blocks")
    );
    assert!(refusal(ROOMY, 64).contains("1 to 63 tokens"));
    assert!(refusal(ROOMY, 0).contains("got a prompt of 0 tokens"));
}

/// With as many steps under way as stages, each step has about equally many sequences, and no sequence is in two of them.
#[test]
fn pipeline_stages_get_equal_shares_of_the_sequences() {
    let prompts = vec![vec![1, 2, 3]; 4];
    let mut scheduler = scheduler(StepLimits { num_stages: 3, max_num_batched_tokens: 24, ..ROOMY }, &prompts, 3);
    let prefill: Vec<usize> = std::iter::from_fn(|| scheduler.schedule().filter(|step| !step.is_decode))
        .map(|step| step.runs.iter().map(|run| run.tokens.len()).sum())
        .collect();
    assert_eq!(prefill, [6, 3, 3], "an equal part, and whole prompts");
}
