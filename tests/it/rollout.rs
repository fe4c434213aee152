//! The engine: compared with transformers and a plain forward pass, across batches and tensor-parallel degrees; its memory.

pub mod adapters;
pub mod draft_head;
mod fp8;
mod kept;
mod mxfp4;
mod partial;
mod session;
pub mod setup;
pub mod speculation;
mod stages;
mod structure;

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use colo_grpo::Error;
use colo_grpo::internal::model::ModelSpec;
use colo_grpo::internal::ranks::{Collective, SingleRank, World};
use colo_grpo::internal::rollout::{Engine, EngineOptions, RolloutEngine};
use colo_grpo::internal::types::{FinishReason, Prompt, RolloutGroup, SamplingParams};
use tch::Kind;

use self::setup::{Model, alone, golden, greedy, prompt, sampled};
pub use self::setup::{options, prompts, token_ids, words};
pub use self::structure::tokenizer as bytes;
use crate::ranks;

/// Models with greedy tokens of transformers (scripts/golden.py).
const GOLDENS: [&str; 30] = [
    "qwen2_tied",
    "qwen2_untied",
    "qwen2_yarn",
    "qwen3",
    "llama3",
    "mistral",
    "olmo2",
    "smollm3",
    "smollm3_window",
    "granite",
    "gemma3",
    "gemma3_vision",
    "qwen2_window",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "phi3",
    "phi3_window",
    "ministral",
    "mistral3_vision",
    "qwen2_moe",
    "qwen2_moe_mixed",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "qwen3_5",
    "qwen3_5_vision",
    "qwen3_5_moe",
    "qwen3_next",
];

#[test]
fn greedy_rollouts_equal_transformers() {
    for name in GOLDENS {
        equals_transformers(&Model::golden(name), name, &alone());
    }
}

#[test]
fn greedy_rollouts_of_two_ranks_equal_transformers() {
    ranks::run(2, "rollout::greedy_rollouts_of_two_ranks_equal_transformers", |world: World| {
        for name in GOLDENS {
            let model = Model::golden(name);
            // Three key/value heads.
            assert_eq!(model.spec.validate_tp(2).is_err(), name == "qwen2_untied", "{name}");
            if name != "qwen2_untied" {
                equals_transformers(&model, name, &world.group());
            }
        }
    });
}

/// Compares greedy tokens with those of transformers; two ranks, which wait for each other in every step, sample half as many. Each rank passes a part
/// of the prompts.
fn equals_transformers(model: &Model, name: &str, tp: &Arc<dyn Collective>) {
    let text = std::fs::read_to_string(golden(name).join("golden.json")).unwrap();
    let numbers: serde_json::Value = serde_json::from_str(&text).unwrap();
    let lists = |key: &str| -> Vec<Vec<u32>> { serde_json::from_value(numbers[key].clone()).unwrap() };
    let expected = lists("greedy");
    let prompts: Vec<Prompt> =
        lists("input_ids").into_iter().enumerate().map(|(id, ids)| prompt(id as u64, ids)).collect();
    let own = tp.rank() * prompts.len() / tp.size()..(tp.rank() + 1) * prompts.len() / tp.size();
    let chunked = EngineOptions { block_size: 4, max_num_batched_tokens: 7, ..options() };
    for options in [chunked, options()].into_iter().take(3 - tp.size()) {
        let params = SamplingParams { num_generations: 2, ..greedy() };
        let (groups, _) = model.generate_on(tp.clone(), options, &prompts[own.clone()], &params);
        assert_eq!(groups.len(), own.len());
        for (group, expected) in groups.iter().zip(expected.iter().skip(own.start)) {
            for completion in &group.completions {
                assert_eq!(&completion.token_ids, expected, "{name}, prompt {}", group.prompt.id);
                let routed = model.routed_experts(&[&group.prompt.token_ids[..], expected].concat());
                assert_eq!(completion.routed_experts, routed, "{name}, prompt {}", group.prompt.id);
                assert_eq!(completion.finish_reason, Some(FinishReason::Length));
            }
        }
    }
    if numbers["long_greedy"].is_array() {
        let expected: Vec<u32> = serde_json::from_value(numbers["long_greedy"].clone()).unwrap();
        let options = EngineOptions { max_model_length: 256, ..options() };
        let expected = &expected[..expected.len() / tp.size()];
        let params = SamplingParams { max_completion_length: expected.len(), ..greedy() };
        let first = if tp.rank() == 0 { &prompts[..1] } else { &[] };
        let (groups, _) = model.generate_on(tp.clone(), options, first, &params);
        assert_eq!(groups.len(), first.len());
        groups.iter().for_each(|group| assert_eq!(group.completions[0].token_ids, expected, "{name}"));
    }
}

#[test]
fn rollout_logprobs_match_a_plain_forward() {
    let cases = [
        SamplingParams { temperature: 0.8, ..sampled() },
        SamplingParams { temperature: 1.4, top_k: 5, repetition_penalty: 1.2, ..sampled() },
    ];
    for name in [
        None,
        Some("qwen3"),
        Some("mistral"),
        Some("olmo2"),
        Some("smollm3_window"),
        Some("granite"),
        Some("gemma3"),
        Some("gpt_oss"),
        Some("qwen3_5"),
    ] {
        let model = name.map_or_else(Model::micro, Model::golden);
        for params in &cases {
            let (groups, _) = model.generate(options(), &prompts(4), params);
            for group in &groups {
                for completion in &group.completions {
                    let all = [group.prompt.token_ids.as_slice(), &completion.token_ids].concat();
                    let expected = model.logprobs(&all, group.prompt.token_ids.len(), f64::from(params.temperature));
                    assert_eq!(expected.len(), completion.rollout_logprobs.len());
                    for (got, expected) in completion.rollout_logprobs.iter().zip(&expected) {
                        assert!((got - expected).abs() < 1e-4, "{got} {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn sampled_tokens_are_independent_of_batching() {
    decided_by_the_prompt(&Model::micro());
}

/// A preempted sequence recomputes its state, and a group's members begin with copies of one state.
#[test]
fn sampled_tokens_of_hybrids_are_independent_of_batching() {
    decided_by_the_prompt(&Model::golden("qwen3_5"));
}

fn decided_by_the_prompt(model: &Model) {
    let (prompts, params) = (prompts(9), sampled());
    let (expected, stats) = model.generate(options(), &prompts, &params);
    assert_eq!((stats.num_preemptions, stats.num_finished), (0, 36));
    let prompt_tokens: usize = prompts.iter().map(|prompt| prompt.token_ids.len()).sum();
    assert_eq!((stats.num_prefilled_tokens, stats.num_shared_tokens), (prompt_tokens, 3 * prompt_tokens));
    assert_ne!(expected[0].completions[0].token_ids, expected[0].completions[1].token_ids);

    let block_bytes = colo_grpo::internal::rollout::kv_block_bytes(&model.spec, 1, 8, Kind::Float);
    let few_blocks = EngineOptions { kv_cache_bytes: 24 * block_bytes, ..options() };
    let variants = [
        EngineOptions { max_num_seqs: 1, ..options() },
        EngineOptions { max_num_seqs: 6, ..options() },
        EngineOptions { max_num_batched_tokens: 5, ..options() },
        EngineOptions { block_size: 3, ..options() },
        few_blocks.clone(),
        EngineOptions { max_num_batched_tokens: 11, ..few_blocks.clone() },
    ];
    for options in variants {
        let (groups, stats) = model.generate(options.clone(), &prompts, &params);
        assert_eq!(token_ids(&groups), token_ids(&expected), "{options:?}");
        assert_eq!(stats.num_preemptions > 0, options.kv_cache_bytes == few_blocks.kv_cache_bytes, "{stats:?}");
    }
    let mut reversed = prompts.clone();
    reversed.reverse();
    let (mut groups, _) = model.generate(options(), &reversed, &params);
    groups.reverse();
    assert_eq!(token_ids(&groups), token_ids(&expected));
    let (groups, _) = model.generate(options(), &prompts[4..5], &params);
    assert_eq!(token_ids(&groups), token_ids(&expected[4..5]));
    let (groups, _) = model.generate(options(), &prompts[4..5], &SamplingParams { step: 1, ..params });
    assert_ne!(token_ids(&groups), token_ids(&expected[4..5]));
}

/// Each rank passes a part of the prompts and gets what a single rank would sample for them.
fn equals_one_rank(world: &World) {
    let num_blocks = 40 + world.rank();
    // Two key/value heads: whole groups at tp = 2, shared ones at tp = 4; Qwen3 adds norms and an own head width, OLMo 2 norms over
    // the heads of all ranks.
    let mut models = vec![
        Model::micro(),
        Model::golden("qwen3"),
        Model::golden("qwen2_tied"),
        Model::golden("olmo2"),
        Model::golden("smollm3_window"),
        Model::golden("gemma3"),
        Model::golden("qwen3_5"),
        Model::golden("qwen3_5_moe"),
        Model::golden("qwen3_moe_mixed"),
        Model::expert_parallel("qwen3_moe_mixed"),
        Model::golden("qwen2_moe"),
        Model::expert_parallel("qwen2_moe_mixed"),
    ];
    if world.size() == 2 {
        models.extend(["smollm3", "granite", "glm4", "glm4_moe", "gpt_oss", "phi3", "ministral"].map(Model::golden)); // of six query heads
    }
    for (index, model) in models.iter().enumerate() {
        // A gated norm divides what is left of a state; small ones show how the ranks' sums round.
        let tolerance = if model.spec.delta_net().is_some() { 1e-3 } else { 1e-4 };
        let all = prompts(9);
        let own = |rank: usize| rank * all.len() / world.size()..(rank + 1) * all.len() / world.size();
        let own = own(world.rank());
        let block_bytes = colo_grpo::internal::rollout::kv_block_bytes(&model.spec, world.size(), 8, Kind::Float);
        let kv_cache_bytes = num_blocks * block_bytes;
        let options = EngineOptions { kv_cache_bytes, max_num_batched_tokens: 16, ..options() };
        let cases = [
            SamplingParams { top_p: 0.8, min_p: Some(0.02), repetition_penalty: 1.3, ..sampled() },
            greedy(),
            sampled(),
            SamplingParams { temperature: 0.7, top_k: 7, top_p: 0.9, ..sampled() },
        ];
        // Filters do not know the model: the first has all of them, the others the one that reads most.
        let num_cases = if index == 0 { cases.len() } else { 1 };
        for params in cases.into_iter().take(num_cases) {
            let (expected, _) = model.generate(self::options(), &all, &params);
            let (groups, stats) = model.generate_on(world.group(), options.clone(), &all[own.clone()], &params);
            assert_eq!(stats.num_blocks, 40, "the poorest rank decides");
            assert_eq!(token_ids(&groups), token_ids(&expected[own.clone()]), "{params:?}");
            for (group, expected) in groups.iter().zip(&expected[own.clone()]) {
                assert_eq!(group.prompt, expected.prompt);
                for (completion, expected) in group.completions.iter().zip(&expected.completions) {
                    let pairs = completion.rollout_logprobs.iter().zip(&expected.rollout_logprobs);
                    pairs.for_each(|(got, expected)| assert!((got - expected).abs() < tolerance, "{got} {expected}"));
                }
            }
        }
    }
}

#[test]
fn an_engine_of_two_ranks_equals_one_rank() {
    ranks::run(2, "rollout::an_engine_of_two_ranks_equals_one_rank", |world: World| equals_one_rank(&world));
}

#[test]
fn an_engine_of_four_ranks_equals_one_rank() {
    ranks::run(4, "rollout::an_engine_of_four_ranks_equals_one_rank", |world: World| equals_one_rank(&world));
}

#[test]
fn groups_are_returned_as_they_finish() {
    let model = Model::micro();
    let mut engine = model.engine(EngineOptions { max_num_seqs: 8, ..options() }, alone());
    let (steps, handed) = (Cell::new(0), RefCell::new(Vec::new()));
    let groups = {
        let mut rollout = engine.wake(model.weights(&SingleRank::default()), 1).unwrap();
        rollout.on_progress(|stats| steps.set(stats.num_steps));
        let done = |group: &RolloutGroup| handed.borrow_mut().push((group.clone(), steps.get()));
        rollout.generate(&prompts(6), &sampled(), done).unwrap()
    };
    let handed = handed.into_inner();
    let mut ids: Vec<u64> = handed.iter().map(|(group, _)| group.prompt.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [0, 1, 2, 3, 4, 5]);
    assert!(handed.iter().all(|(group, _)| groups.contains(group)));
    assert!(handed.first().unwrap().1 < handed.last().unwrap().1);
}

#[test]
fn completions_end_at_stop_strings_end_tokens_and_length_limits() {
    let model = Model::micro();
    let (free, _) = model.generate(options(), &prompts(3), &sampled());
    let reference = &free[1].completions[2];
    // Two words in a row, as text: the match spans tokens.
    let stop = reference.text.split(' ').skip(8).take(2).collect::<Vec<_>>().join(" ");
    let params = SamplingParams { stop: vec!["never".into(), stop.clone()], ..sampled() };
    let (groups, _) = model.generate(options(), &prompts(3), &params);
    let stopped = &groups[1].completions[2];
    assert_eq!(stopped.finish_reason, Some(FinishReason::Stop));
    assert!(stopped.text.ends_with(&stop), "{}", stopped.text);
    assert_eq!(stopped.token_ids, reference.token_ids[..stopped.token_ids.len()]);
    assert!(stopped.token_ids.len() <= 10 && stopped.token_ids.len() == stopped.rollout_logprobs.len());

    let end = reference.token_ids[5];
    let spec = ModelSpec { eos_token_ids: vec![end], ..(*model.spec).clone() };
    let ending = Model { spec: Arc::new(spec), ..Model::micro() };
    let (groups, _) = ending.generate(options(), &prompts(3), &sampled());
    for (group, free) in groups.iter().zip(&free) {
        for (completion, free) in group.completions.iter().zip(&free.completions) {
            let at = free.token_ids.iter().position(|&id| id == end);
            let (len, reason) = at.map_or((20, FinishReason::Length), |at| (at + 1, FinishReason::Eos));
            assert_eq!((&completion.token_ids[..], completion.finish_reason), (&free.token_ids[..len], Some(reason)));
        }
    }

    let short = EngineOptions { max_model_length: 21, ..options() };
    let (groups, _) = model.generate(short, &prompts(3), &sampled());
    for group in &groups {
        let room = 21 - group.prompt.token_ids.len();
        assert!(group.completions.iter().all(|completion| completion.token_ids.len() == room.min(20)));
    }
}

#[test]
fn a_sleeping_engine_holds_no_memory() {
    let model = Model::micro();
    let mut engine = model.engine(options(), alone());
    let mut asleep = Vec::new();
    for _ in 0..30 {
        let mut rollout = engine.wake(model.weights(&SingleRank::default()), 1).unwrap();
        rollout.generate(&prompts(4), &greedy(), |_| ()).unwrap();
        drop(rollout);
        asleep.push(engine.resident_bytes().unwrap());
    }
    assert!(asleep.iter().all(|&bytes| bytes < 4096), "{asleep:?}");
}

#[test]
fn stale_weights_are_refused_and_the_engine_stays_usable() {
    let model = Model::micro();
    let mut engine = model.engine(options(), alone());
    let wake = |engine: &mut Engine, version| {
        let woken: Result<RolloutEngine, Error> = engine.wake(model.weights(&SingleRank::default()), version);
        woken.map(|mut rollout| rollout.generate(&prompts(2), &greedy(), |_| ()).unwrap())
    };
    assert!(matches!(wake(&mut engine, 2), Err(Error::StaleWeights { engine: 1, policy: 2 })));
    let expected = wake(&mut engine, 1).unwrap();

    let broken = Model::micro();
    let _ = broken.head.final_norm.shallow_clone().fill_(f64::NAN);
    let mut rollout = engine.wake(broken.weights(&SingleRank::default()), 1).unwrap();
    assert!(matches!(rollout.generate(&prompts(2), &sampled(), |_| ()), Err(Error::NonFinite { .. })));
    drop(rollout);
    assert!(engine.resident_bytes().unwrap() < 4096);
    assert_eq!(wake(&mut engine, 1).unwrap(), expected);
}

#[test]
fn unsupported_rollout_options_are_refused_with_the_numbers() {
    let model = Model::micro();
    let refusal = |options: EngineOptions, token_ids: Vec<u32>| {
        let mut engine = model.engine(options, alone());
        let mut rollout = engine.wake(model.weights(&SingleRank::default()), 1).unwrap();
        rollout.generate(&[prompt(5, token_ids)], &sampled(), |_| ()).unwrap_err().to_string()
    };
    assert!(
        refusal(options(), vec![1; 128]).contains("1 to 127 tokens (max_model_length - 1), got a prompt of 128 tokens")
    );
    assert!(refusal(options(), vec![96]).contains("below 96, got 96 in prompt 5"));
    let block_bytes = colo_grpo::internal::rollout::kv_block_bytes(&model.spec, 1, 8, Kind::Float);
    let small = EngineOptions { kv_cache_bytes: 4 * block_bytes, ..options() };
    assert!(refusal(small, vec![1; 14]).contains("at most 4 KV blocks of 8 tokens"));
    let tiny = EngineOptions { kv_cache_bytes: block_bytes - 1, ..options() };
    let new = |options| Engine::new(model.spec.clone(), model.tokenizer.clone(), options, alone()).unwrap_err();
    assert!(new(tiny).to_string().contains(&format!("at least {block_bytes}")));
    assert!(
        new(EngineOptions { strict: true, ..options() })
            .to_string()
            .contains("on CPUs the order of floating-point sums depends on the batch")
    );
}
