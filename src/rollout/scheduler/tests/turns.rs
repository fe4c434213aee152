//! Tests of completions with several turns.

use super::*;

/// Runs sequences of up to four turns with context between them; `keeps` says whether their blocks are kept between turns.
fn several_turns(limits: StepLimits, lag: usize, keeps: bool) -> (Vec<Vec<u32>>, EngineStats) {
    let prompts = prompts();
    let (mut scheduler, mut cache) = (scheduler(limits, &prompts, 1), Cache::new());
    if keeps {
        scheduler.keep_turns();
    }
    let mut requests: Vec<usize> = (0..prompts.len()).collect();
    for turn in 0..4 {
        run(&mut scheduler, &mut cache, lag, usize::MAX);
        for (prompt, newest) in prompts.iter().zip(&mut requests) {
            let mut trajectory = scheduler.sequences[scheduler.members(*newest).start].trajectory();
            if turn < 3 && trajectory.finish_reason == Some(FinishReason::Eos) && trajectory.token_ids.len() < 16 {
                trajectory.push_context(&[7, 8, 9 + turn], 0);
                *newest = scheduler.submit(request(prompt, 1, vec![trajectory]), None).0;
            } else {
                scheduler.forget_turn(&[&prompt[..], &trajectory.token_ids].concat());
            }
        }
    }
    assert_eq!(scheduler.blocks.num_free(), limits.num_blocks, "nothing is left to turns that do not come");
    assert_eq!(scheduler.states.num_free(), if limits.has_states { limits.max_num_seqs } else { usize::MAX });
    let newest = |&group: &usize| scheduler.sequences[scheduler.members(group).start].completion().to_vec();
    (requests.iter().map(newest).collect(), scheduler.stats)
}

#[test]
fn a_turn_prefills_only_its_new_context_if_blocks_were_kept() {
    let (expected, whole) = several_turns(ROOMY, 0, false);
    assert_eq!((whole.num_turn_tokens, whole.num_lost_turn_tokens), (0, whole.num_recomputed_tokens));
    for lag in 0..3 {
        let (tokens, stats) = several_turns(ROOMY, lag, true);
        assert_eq!(tokens, expected, "lag {lag}");
        assert!(stats.num_turn_tokens > 50, "{stats:?}");
        assert_eq!((stats.num_recomputed_tokens, stats.num_lost_turn_tokens), (0, 0));
        assert_eq!(stats.num_prefilled_tokens + stats.num_turn_tokens, whole.num_prefilled_tokens);
        // With few blocks, some are freed and computed again.
        for num_blocks in [10, 24] {
            let tight = StepLimits { num_blocks, max_num_batched_tokens: 7, ..ROOMY };
            let (tokens, stats) = several_turns(tight, lag, true);
            assert_eq!(tokens, expected, "{num_blocks} blocks, lag {lag}");
            assert!(stats.num_lost_turn_tokens > 0 && stats.num_recomputed_tokens > 0, "{stats:?}");
        }
    }
}

/// A state is left behind unless a step that ran ahead has fed what was never sampled; pages that others need are given up. A step that ran
/// ahead and fed the turn's last token has the token's experts.
#[test]
fn a_turn_continues_from_the_saved_delta_net_states() {
    for num_blocks in [10, 24, ROOMY.num_blocks] {
        for max_num_seqs in [3, ROOMY.max_num_seqs] {
            let states = StepLimits { has_states: true, num_blocks, max_num_seqs, ..ROOMY };
            let (expected, whole) = several_turns(states, 0, false);
            assert_eq!(whole.num_turn_tokens, 0);
            for lag in 0..3 {
                let (tokens, stats) = several_turns(states, lag, true);
                assert_eq!(tokens, expected, "{num_blocks} blocks, {max_num_seqs} pages, lag {lag}");
                match (num_blocks, max_num_seqs) {
                    (200, 64) if lag < 2 => {
                        assert!(stats.num_turn_tokens > 50, "lag {lag}: {stats:?}");
                        assert_eq!((stats.num_recomputed_tokens, stats.num_lost_turn_tokens), (0, 0));
                    }
                    _ => assert!(stats.num_lost_turn_tokens > 0, "lag {lag}: {stats:?}"),
                }
            }
        }
    }
}
