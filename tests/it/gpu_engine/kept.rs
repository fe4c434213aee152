//! Unfinished sequences continue from the KV cache of an earlier wake.

use colo_grpo::internal::bench::LengthSpread;
use colo_grpo::internal::rollout::EngineOptions;
use colo_grpo::internal::types::{RolloutGroup, SamplingParams};
use serde_json::json;

use super::{Model, SMALL, completions, generate, prompts};

const NUM_WAKES: usize = 3;

/// With unchanged weights the bits equal those of a single rollout if steps are independent of the batch. Nothing is computed twice in any
/// case. The penalty uses the token history, which is kept with the cache.
#[test]
#[ignore = "needs a GPU"]
fn gpu_kept_sequences_continue_bit_for_bit() {
    kept_sequences_go_on_where_they_were(&Model::new(SMALL));
}

pub fn kept_sequences_go_on_where_they_were(model: &Model) {
    let prompts = prompts(9, 170);
    for (strict, repetition_penalty) in [(true, 1.0), (true, 1.2), (false, 1.2)] {
        let params = SamplingParams {
            num_generations: 3,
            max_completion_length: 80,
            repetition_penalty,
            ..SamplingParams::default()
        };
        let limit = LengthSpread { shortest: 8, longest: 80, long_tailed: true }.limit();
        let engine = || {
            let mut engine = model.engine(&EngineOptions { strict, ..model.options(256) });
            engine.limit_completions(limit.clone());
            engine
        };
        let expected = generate(&mut model.served_by(engine()), &prompts, &params);
        let mut served = model.served_by(engine().keeping_sequences());
        let mut groups: Vec<_> = prompts.iter().cloned().map(RolloutGroup::new).collect();
        let (mut complete, mut num_kept, mut num_recomputed) = (Vec::new(), 0, 0);
        for _ in 0..NUM_WAKES {
            let part = served.with_engine(|rollout| {
                let part = rollout.generate_first(groups, prompts.len() / NUM_WAKES, &params, |_| ())?;
                num_kept += rollout.stats().num_kept_tokens;
                num_recomputed += rollout.stats().num_recomputed_tokens;
                Ok(part)
            });
            let part = part.unwrap();
            complete.extend(part.complete.into_iter().map(|(_, group)| group));
            groups = part.unfinished.into_iter().map(|(_, group)| group).collect();
        }
        complete.sort_by_key(|group| group.prompt.id);
        assert!(num_kept > 0 && num_recomputed == 0, "{num_kept} tokens kept, {num_recomputed} computed again");
        let equal = num_equal(&complete, &expected, strict);
        println!("{}", json!({"test": "kept", "strict": strict, "kept": num_kept, "equal_of_all": equal}));
        let least = if strict { equal[1] } else { equal[1] * 9 / 10 }; // of nearly flat distributions, wrong keys part all
        assert!(equal[0] >= least, "{equal:?} are equal");
    }
}

/// Number of equal tokens (and of equal log-probabilities with `strict`) before each completion's first difference, and number of all tokens.
fn num_equal(groups: &[RolloutGroup], expected: &[RolloutGroup], strict: bool) -> [usize; 2] {
    let mut counts = [0; 2];
    for ((ids, logprobs), (expected_ids, expected_logprobs)) in completions(groups).zip(completions(expected)) {
        assert_eq!(ids.len(), expected_ids.len());
        let pairs = ids.iter().zip(logprobs).zip(expected_ids.iter().zip(expected_logprobs));
        let is_equal = |(got, expected): &((&u32, f32), (&u32, f32))| match strict {
            true => got == expected,
            false => got.0 == expected.0,
        };
        counts[0] += pairs.take_while(is_equal).count();
        counts[1] += ids.len();
    }
    counts
}
