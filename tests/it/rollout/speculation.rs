//! Speculative decoding: tokens, log-probabilities and recorded experts equal those without draft tokens.

use std::collections::HashMap;
use std::sync::Arc;

use colo_grpo::internal::config::{Speculation, StateDtype};
use colo_grpo::internal::ranks::{Collective, World};
use colo_grpo::internal::rollout::{
    DraftInjection, Engine, EngineOptions, EngineStats, SpeculationOptions, kv_block_bytes,
};
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams, Structure};
use serde_json::json;
use tch::Kind;

use super::setup::{Model, alone, greedy, options, prompts, sampled, token_ids};
use crate::ranks;

/// Draft tokens that a test injects.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DraftKind {
    Right,
    Wrong,
    /// Three of four draft tokens are right, regardless of the tokens before them.
    Mixed,
    /// N-gram drafts from earlier text, without injection.
    Ngram,
}

impl DraftKind {
    pub const ALL: [Self; 4] = [Self::Right, Self::Wrong, Self::Mixed, Self::Ngram];

    /// Creates draft tokens from known completions; `None` for n-gram drafts.
    pub fn of(self, known: &[RolloutGroup], vocab_size: usize) -> Option<DraftInjection> {
        let mut completions = HashMap::new();
        for group in known {
            for (sample, completion) in group.completions.iter().enumerate() {
                let tokens = [&group.prompt.token_ids[..], &completion.token_ids].concat();
                completions.insert((group.prompt.id, sample), tokens);
            }
        }
        let drafts = move |prompt: u64, sample: usize, token_ids: &[u32], most: usize| {
            let tokens = &completions[&(prompt, sample)];
            assert!(tokens.starts_with(token_ids), "prompt {prompt}, sample {sample}");
            // Behind its end a completion may have any drafts.
            let token = |at: usize| match tokens.get(at).copied().unwrap_or(0) {
                token if self == Self::Right || (self == Self::Mixed && !(at + sample).is_multiple_of(4)) => token,
                token => (token + 1) % vocab_size as u32,
            };
            (token_ids.len()..token_ids.len() + most).map(token).collect()
        };
        (self != Self::Ngram).then(|| DraftInjection::new(drafts))
    }
}

pub fn drafting(options: EngineOptions) -> EngineOptions {
    EngineOptions { speculation: SpeculationOptions { method: Speculation::Ngram, num_tokens: 7 }, ..options }
}

/// Generates with a new engine and injected draft tokens.
fn generate_with(
    (model, tp): (&Model, Arc<dyn Collective>),
    options: &EngineOptions,
    prompts: &[Prompt],
    params: &SamplingParams,
    injection: Option<DraftInjection>,
) -> (Vec<RolloutGroup>, EngineStats) {
    let mut engine = model.engine(drafting(options.clone()), tp.clone());
    injection.into_iter().for_each(|injection| engine.inject_drafts(injection));
    let mut rollout = engine.wake(model.weights(tp.as_ref()), 1).unwrap();
    let groups = rollout.generate(prompts, params, |_| ()).unwrap();
    (groups, *rollout.stats())
}

/// Largest difference between log-probabilities of a token in steps with different numbers of rows.
fn tolerance(options: &EngineOptions) -> f32 {
    match options.state_dtype {
        _ if options.exact => 0.0,
        StateDtype::Bfloat16 => 5e-3, // what is near the middle is rounded to the other side
        StateDtype::Float32 => 1e-4,
    }
}

/// Asserts that tokens, finish reasons and experts are equal, and log-probabilities up to a tolerance.
pub fn assert_equal(got: &[RolloutGroup], expected: &[RolloutGroup], tolerance: f32, context: &str) {
    assert_eq!(token_ids(got), token_ids(expected), "{context}");
    let completions =
        |groups: &[RolloutGroup]| groups.iter().flat_map(|group| group.completions.clone()).collect::<Vec<_>>();
    for (got, expected) in completions(got).iter().zip(&completions(expected)) {
        assert_eq!(got.finish_reason, expected.finish_reason, "{context}");
        assert_eq!(got.text, expected.text);
        assert_eq!(got.routed_experts, expected.routed_experts, "{context}");
        assert_eq!(got.weight_versions, expected.weight_versions);
        for (got, expected) in got.rollout_logprobs.iter().zip(&expected.rollout_logprobs) {
            let is_equal = got.to_bits() == expected.to_bits() || (got - expected).abs() < tolerance;
            assert!(is_equal, "{got} {expected} {context}");
        }
    }
}

fn cases() -> Vec<SamplingParams> {
    vec![
        sampled(),
        greedy(),
        SamplingParams { temperature: 0.7, top_k: 7, top_p: 0.9, ..sampled() },
        SamplingParams { min_p: Some(0.02), repetition_penalty: 1.3, ..sampled() },
        SamplingParams { stop: vec!["w3 ".into(), "w1".into()], repetition_penalty: 0.9, ..sampled() },
    ]
}

#[test]
fn draft_tokens_change_no_sampled_token() {
    let exact = EngineOptions { exact: true, ..options() };
    let few_blocks = |model: &Model| EngineOptions {
        kv_cache_bytes: 24 * kv_block_bytes(&model.spec, 1, 8, Kind::Float),
        ..options()
    };
    let bf16_states = EngineOptions { state_dtype: StateDtype::Bfloat16, max_num_seqs: 9, ..options() };
    let names = ["qwen3", "smollm3_window", "granite", "olmo2", "qwen3_5", "qwen3_next"].map(Some);
    for name in [None].into_iter().chain(names) {
        let model = name.map_or_else(Model::micro, Model::golden).spreading();
        let cases = if name.is_none() { cases() } else { cases().split_off(3) };
        // Gated delta nets have no exact steps.
        let other = if model.spec.delta_net().is_some() { &bf16_states } else { &exact };
        let all_options = [other.clone(), few_blocks(&model)];
        for (options, params) in all_options.iter().flat_map(|options| cases.iter().map(move |case| (options, case))) {
            let (expected, without) = model.generate(options.clone(), &prompts(7), params);
            for kind in DraftKind::ALL {
                let injection = kind.of(&expected, model.spec.vocab_size);
                let of = (&model, alone());
                let (groups, stats) = generate_with(of, options, &prompts(7), params, injection);
                let context = format!("{name:?} {kind:?} {params:?}");
                assert_equal(&groups, &expected, tolerance(options), &context);
                let EngineStats { num_draft_tokens, num_accepted_tokens, .. } = stats;
                match kind {
                    DraftKind::Right => assert!(stats.num_steps < without.num_steps, "{context}"),
                    DraftKind::Wrong => assert_eq!(num_accepted_tokens, 0, "{context}"),
                    DraftKind::Mixed => assert!((1..num_draft_tokens).contains(&num_accepted_tokens), "{context}"),
                    DraftKind::Ngram => {}
                }
            }
        }
    }
}

/// Experts are recorded only for accepted tokens.
#[test]
fn draft_tokens_change_no_recorded_expert() {
    for name in ["qwen3_moe", "qwen2_moe_mixed"] {
        let model = Model::golden(name).spreading();
        let (expected, _) = model.generate(options(), &prompts(5), &sampled());
        for kind in DraftKind::ALL {
            let injection = kind.of(&expected, model.spec.vocab_size);
            let (groups, _) = generate_with((&model, alone()), &options(), &prompts(5), &sampled(), injection);
            assert_equal(&groups, &expected, 1e-4, &format!("{name} {kind:?}"));
        }
    }
}

/// Unfinished groups are continued in the next session, with or without kept keys and values.
#[test]
fn draft_tokens_change_nothing_of_unfinished_groups() {
    let exact = EngineOptions { exact: true, ..options() };
    for (model, options) in [(Model::micro(), exact), (Model::golden("qwen3_5").spreading(), options())] {
        changes_nothing_of_what_is_carried_over(&model, &options);
    }
}

/// Completes groups of six prompts, two per rollout; unfinished groups continue in the next one. Returns the groups in the prompts' order.
pub fn in_parts(model: &Model, engine: &mut Engine) -> Vec<RolloutGroup> {
    let mut open: Vec<_> = prompts(6).into_iter().map(RolloutGroup::new).collect();
    let mut complete = Vec::new();
    while !open.is_empty() {
        let mut rollout = engine.wake(model.weights(alone().as_ref()), 1).unwrap();
        let part = rollout.generate_first(open, 2, &sampled(), |_| ()).unwrap();
        complete.extend(part.complete.into_iter().map(|(_, group)| group));
        open = part.unfinished.into_iter().map(|(_, group)| group).collect();
    }
    complete.sort_by_key(|group: &RolloutGroup| group.prompt.id);
    complete
}

fn changes_nothing_of_what_is_carried_over(model: &Model, options: &EngineOptions) {
    let (expected, _) = model.generate(options.clone(), &prompts(6), &sampled());
    for (kind, keeps) in DraftKind::ALL.into_iter().flat_map(|kind| [false, true].map(|keeps| (kind, keeps))) {
        let mut engine = model.engine(drafting(options.clone()), alone());
        engine = if keeps { engine.keeping_sequences() } else { engine };
        kind.of(&expected, model.spec.vocab_size).into_iter().for_each(|injection| engine.inject_drafts(injection));
        let complete = in_parts(model, &mut engine);
        assert_equal(&complete, &expected, tolerance(options), &format!("{kind:?}, kept: {keeps}"));
    }
}

/// A completion with structured output gets no draft tokens itself; others in the same steps do.
#[test]
fn draft_tokens_work_with_structured_output() {
    let spec = colo_grpo::internal::model::ModelSpec { vocab_size: 300, ..Model::micro().spec.as_ref().clone() };
    let model = Model { tokenizer: Arc::new(super::bytes()), ..Model::random(spec, 3) };
    let structure = {
        let schema = json!({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}).to_string();
        Structure::Json { schema, is_compact: true }
    };
    let held = SamplingParams { structure: Some(structure), max_completion_length: 40, ..sampled() };
    let sample = |options: EngineOptions| {
        let mut engine = model.engine(options, alone());
        let mut rollout = engine.wake(model.weights(alone().as_ref()), 1).unwrap();
        let mut session = rollout.session().unwrap();
        let requests = prompts(4);
        let submit =
            |prompt: &Prompt| super::session::request(prompt, if prompt.id.is_multiple_of(2) { &held } else { &DULL });
        let ids: Vec<_> = requests.iter().map(|prompt| session.submit(submit(prompt)).unwrap()).collect();
        while session.has_work() {
            session.step().unwrap();
        }
        let texts = |id| session.completions(id).unwrap().into_iter().map(|completion| completion.token_ids);
        let all: Vec<Vec<u32>> = ids.into_iter().flat_map(texts).collect();
        session.close().unwrap();
        (all, *rollout.stats())
    };
    let (expected, _) = sample(options());
    let (got, stats) = sample(drafting(options()));
    assert_eq!(got, expected);
    assert!(stats.num_accepted_tokens > 0, "{stats:?}");
}

/// Parameters for greedy completions, which soon repeat themselves with random weights.
static DULL: std::sync::LazyLock<SamplingParams> =
    std::sync::LazyLock::new(|| SamplingParams { max_completion_length: 60, ..greedy() });

/// Draft tokens are taken from repeated text in a completion and from completions of an earlier rollout.
#[test]
fn drafts_from_repeated_text_save_steps() {
    let model = Model::micro();
    let params = SamplingParams { max_completion_length: 80, ..greedy() };
    let (expected, without) = model.generate(options(), &prompts(3), &params);
    let mut engine = model.engine(drafting(options()), alone());
    let mut steps = Vec::new();
    for _ in 0..2 {
        let mut rollout = engine.wake(model.weights(alone().as_ref()), 1).unwrap();
        let groups = rollout.generate(&prompts(3), &params, |_| ()).unwrap();
        assert_eq!(token_ids(&groups), token_ids(&expected));
        steps.push(rollout.stats().num_steps);
    }
    assert!(steps[0] < without.num_steps && 3 * steps[1] < without.num_steps, "{steps:?} {}", without.num_steps);
}

/// With `auto`, all ranks use draft tokens according to the first rank's times. Tokens are the same in any case.
fn equals_one_rank(world: &World, model: &Model) {
    let all = prompts(8);
    let own = world.rank() * 4..(world.rank() + 1) * 4;
    let (expected, _) = model.generate(options(), &all, &sampled());
    for kind in DraftKind::ALL {
        let injection = kind.of(&expected, model.spec.vocab_size);
        let (groups, stats) =
            generate_with((model, world.group()), &options(), &all[own.clone()], &sampled(), injection);
        assert_equal(&groups, &expected[own.clone()], 1e-4, &format!("{kind:?}"));
        if kind != DraftKind::Ngram {
            assert_eq!(stats.num_accepted_tokens > 0, kind != DraftKind::Wrong, "{kind:?}");
        }
    }
    let speculation = SpeculationOptions { method: Speculation::Auto, num_tokens: 7 };
    let mut engine = model.engine(EngineOptions { speculation, ..options() }, world.group());
    for step in 0..6 {
        let params = SamplingParams { step, max_completion_length: 60, ..greedy() };
        let (expected, _) = model.generate(options(), &all, &params);
        let mut rollout = engine.wake(model.weights(world.group().as_ref()), 1).unwrap();
        let groups = rollout.generate(&all[own.clone()], &params, |_| ()).unwrap();
        assert_equal(&groups, &expected[own.clone()], 1e-4, "auto");
    }
}

#[test]
fn two_ranks_propose_equal_draft_tokens() {
    ranks::run(2, "rollout::speculation::two_ranks_propose_equal_draft_tokens", |world: World| {
        for model in [Model::micro().spreading(), Model::golden("qwen3_5").spreading()] {
            equals_one_rank(&world, &model);
        }
    });
}
