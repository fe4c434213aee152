//! Speculative decoding on a GPU: with `strict`, completions equal those without draft tokens bit for bit; otherwise up to near ties.

use std::sync::Arc;

use colo_grpo::internal::bench::LengthSpread;
use colo_grpo::internal::config::{Speculation, StateDtype};
use colo_grpo::internal::data::Tokenizer;
use colo_grpo::internal::model::{ModelSpec, UnitLayout};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::rollout::{
    DraftInjection, Engine, EngineOptions, EngineStats, SpeculationOptions, kv_block_bytes,
};
use colo_grpo::internal::serve::Served;
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams};
use tch::Kind;

use super::delta_net::narrow;
use super::{Model, SMALL, completions, prompts};
use crate::rollout::setup::golden;
use crate::rollout::speculation::{DraftKind, drafting};

fn generate(
    model: &Model,
    options: &EngineOptions,
    injection: Option<DraftInjection>,
    prompts: &[Prompt],
    params: &SamplingParams,
) -> (Vec<RolloutGroup>, EngineStats) {
    let mut engine = model.engine(options);
    injection.into_iter().for_each(|injection| engine.inject_drafts(injection));
    let mut served = model.served_by(engine);
    served.with_engine(|rollout| Ok((rollout.generate(prompts, params, |_| ())?, *rollout.stats()))).unwrap()
}

/// Token ids and bits of log-probabilities of all completions.
fn bits(groups: &[RolloutGroup]) -> Vec<(Vec<u32>, Vec<u32>)> {
    completions(groups).map(|(ids, logprobs)| (ids.to_vec(), logprobs.map(f32::to_bits).collect())).collect()
}

fn cases() -> [SamplingParams; 3] {
    let params = SamplingParams { num_generations: 3, max_completion_length: 60, ..SamplingParams::default() };
    [
        params.clone(),
        SamplingParams { temperature: 0.0, repetition_penalty: 1.2, ..params.clone() },
        SamplingParams { top_p: 0.9, top_k: 50, repetition_penalty: 1.3, ..params },
    ]
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_draft_tokens_change_no_bit_of_strict_steps() {
    drafts_change_no_bit_of_strict_steps(&Model::new(SMALL));
}

/// States take in the drafts that were drawn, and no others.
#[test]
#[ignore = "needs a GPU"]
fn gpu_drafts_change_no_bit_of_strict_steps_with_states() {
    drafts_change_no_bit_of_strict_steps(&Model::of(narrow()));
}

fn drafts_change_no_bit_of_strict_steps(model: &Model) {
    let strict = EngineOptions { strict: true, ..model.options(256) };
    for params in cases() {
        let (expected, without) = generate(model, &strict, None, &prompts(5, 120), &params);
        for kind in DraftKind::ALL {
            let injection = kind.of(&expected, model.spec.vocab_size);
            let (got, stats) = generate(model, &drafting(strict.clone()), injection, &prompts(5, 120), &params);
            assert_eq!(bits(&got), bits(&expected), "{kind:?} {params:?}");
            match kind {
                DraftKind::Right => assert!(3 * stats.num_steps < without.num_steps, "{stats:?} {without:?}"),
                DraftKind::Wrong => assert_eq!(stats.num_accepted_tokens, 0),
                DraftKind::Mixed | DraftKind::Ngram => {}
            }
        }
    }
}

/// Few blocks, so that sequences give theirs back and are computed again, with prompts in pieces.
#[test]
#[ignore = "needs a GPU"]
fn gpu_drafts_with_states_stand_preemption() {
    let model = Model::of(narrow());
    let strict = EngineOptions { strict: true, ..model.options(256) };
    let few = EngineOptions {
        kv_cache_bytes: 60 * kv_block_bytes(&model.spec, 1, 16, Kind::BFloat16),
        max_num_batched_tokens: 50,
        ..strict.clone()
    };
    let params = SamplingParams { num_generations: 3, max_completion_length: 80, ..SamplingParams::default() };
    let (expected, _) = generate(&model, &strict, None, &prompts(9, 120), &params);
    for kind in DraftKind::ALL {
        let injection = kind.of(&expected, model.spec.vocab_size);
        let (got, stats) = generate(&model, &drafting(few.clone()), injection, &prompts(9, 120), &params);
        assert!(stats.num_preemptions > 0, "{stats:?}");
        assert_eq!(bits(&got), bits(&expected), "{kind:?}");
    }
}

/// A rollout's end may lie behind drafts that states have not taken in: the next one goes on from there, with kept states.
#[test]
#[ignore = "needs a GPU"]
fn gpu_drafts_with_states_change_nothing_of_what_is_kept() {
    for spec in [narrow(), narrow().with_draft_head()] {
        let has_head = spec.draft_head.is_some();
        let model = Model::of(spec);
        let strict = EngineOptions { strict: true, ..model.options(256) };
        let params = SamplingParams { num_generations: 2, max_completion_length: 70, ..SamplingParams::default() };
        let (expected, _) = generate(&model, &strict, None, &prompts(6, 90), &params);
        let kinds = if has_head { &[DraftKind::Ngram][..] } else { &DraftKind::ALL };
        for kind in kinds {
            let drafting = if has_head { by_head(3, &strict) } else { drafting(strict.clone()) };
            let mut engine = model.engine(&drafting).keeping_sequences();
            engine.limit_completions(LengthSpread { shortest: 8, longest: 70, long_tailed: true }.limit());
            let injection = if has_head { None } else { kind.of(&expected, model.spec.vocab_size) };
            injection.into_iter().for_each(|injection| engine.inject_drafts(injection));
            let mut served = model.served_by(engine);
            let mut groups: Vec<_> = prompts(6, 90).into_iter().map(RolloutGroup::new).collect();
            let (mut complete, mut num_kept) = (Vec::new(), 0);
            while !groups.is_empty() {
                let part = served.with_engine(|rollout| {
                    let part = rollout.generate_first(groups, 2, &params, |_| ())?;
                    num_kept += rollout.stats().num_kept_tokens;
                    Ok(part)
                });
                let part = part.unwrap();
                complete.extend(part.complete.into_iter().map(|(_, group)| group));
                groups = part.unfinished.into_iter().map(|(_, group)| group).collect();
            }
            complete.sort_by_key(|group| group.prompt.id);
            assert!(num_kept > 0);
            for ((ids, logprobs), (of, others)) in completions(&complete).zip(completions(&expected)) {
                let (logprobs, others): (Vec<f32>, Vec<f32>) = (logprobs.collect(), others.collect());
                assert_eq!((ids, &logprobs[..]), (&of[..ids.len()], &others[..ids.len()]), "{kind:?}");
            }
        }
    }
}

fn by_head(num_tokens: usize, options: &EngineOptions) -> EngineOptions {
    EngineOptions { speculation: SpeculationOptions { method: Speculation::Mtp, num_tokens }, ..options.clone() }
}

/// At first the engine is full, so that the head only follows steps that run ahead; the rest is drafted for.
#[test]
#[ignore = "needs a GPU"]
fn gpu_drafts_of_a_head_change_no_bit_of_strict_steps() {
    let model = Model::of(narrow().with_draft_head());
    let strict = EngineOptions { strict: true, max_num_seqs: 64, ..model.options(256) };
    for params in cases() {
        let (expected, without) = generate(&model, &strict, None, &prompts(25, 120), &params);
        for num_tokens in [1, 4] {
            let (got, stats) = generate(&model, &by_head(num_tokens, &strict), None, &prompts(25, 120), &params);
            println!("{num_tokens} drafts: {stats:?}, without {without:?}");
            assert_eq!(bits(&got), bits(&expected), "{num_tokens} {params:?}");
            assert!(stats.num_draft_tokens > stats.num_generated_tokens / 10, "{stats:?}");
        }
    }
}

/// In float32: the CPU's drafts, so that as many of them are drawn. Of random weights about half are, as the noise is the same.
#[test]
#[ignore = "needs a GPU"]
fn gpu_a_head_drafts_what_the_cpus_does() {
    for name in ["qwen3_5", "qwen3_next", "qwen3_5_moe"] {
        let spec = ModelSpec::from_folder(golden(name)).unwrap().with_draft_head();
        let spec = ModelSpec { eos_token_ids: Vec::new(), vocab_size: 24, ..spec };
        let of_cpu = Model { world: Arc::new(World::single()), ..Model::of(spec.clone()) };
        let of_gpu = Model::of(spec);
        let mut asked = prompts(5, 60);
        asked.iter_mut().flat_map(|prompt| &mut prompt.token_ids).for_each(|id| *id %= 24);
        let params = SamplingParams { num_generations: 3, max_completion_length: 60, ..SamplingParams::default() };
        let run = |model: &Model, speculation| {
            let options = EngineOptions {
                kv_cache_bytes: 400 * kv_block_bytes(&model.spec, 1, 16, Kind::Float),
                kind: Kind::Float,
                residual: Kind::Float,
                max_num_seqs: 12,
                max_num_batched_tokens: 50,
                device: model.world.device(),
                speculation,
                ..model.options(160)
            };
            let tp = model.world.mesh(1, 1).unwrap().tp;
            let tokenizer = Arc::new(Tokenizer::of_ids(model.spec.vocab_size).unwrap());
            let engine = Engine::new(model.spec.clone(), tokenizer, options, tp).unwrap();
            let device = model.world.device();
            let unit = |layout: &UnitLayout| Ok((of_cpu.unit(layout)?.to_kind(Kind::Float) * 4.0).to_device(device));
            let mut served = Served::new(model.world.clone(), model.table(), engine, &unit).unwrap();
            served.with_engine(|rollout| Ok((rollout.generate(&asked, &params, |_| ())?, *rollout.stats()))).unwrap()
        };
        let mtp = SpeculationOptions { method: Speculation::Mtp, num_tokens: 3 };
        let (expected, on_cpu) = run(&of_cpu, mtp);
        let (got, on_gpu) = run(&of_gpu, mtp);
        let (without, _) = run(&of_gpu, SpeculationOptions::NONE);
        let ids = |groups: &[RolloutGroup]| completions(groups).map(|(ids, _)| ids.to_vec()).collect::<Vec<_>>();
        assert_eq!(ids(&got), ids(&without), "{name}");
        let same = ids(&got).iter().zip(ids(&expected)).filter(|(got, expected)| *got == expected).count();
        let share = |stats: &EngineStats| stats.num_accepted_tokens as f64 / stats.num_draft_tokens as f64;
        let (host, device) = (share(&on_cpu), share(&on_gpu));
        println!(
            "{name}: {host:.3} of the CPU's drafts are drawn, {device:.3} of the GPU's; {same} of 15 completions are equal"
        );
        assert!(same >= 12 && host > 0.1 && (host - device).abs() < 0.05, "{name}: {host} {device}");
    }
}

/// Steps with other numbers of rows round differently, so that a few near ties are decided differently and the text after them changes.
#[test]
#[ignore = "needs a GPU"]
fn gpu_draft_tokens_change_few_completions_without_strict() {
    let bf16_states = |options| EngineOptions { state_dtype: StateDtype::Bfloat16, ..options };
    drafts_change_few_completions(&Model::new(SMALL), &|options| options);
    drafts_change_few_completions(&Model::of(narrow()), &|options| options);
    drafts_change_few_completions(&Model::of(narrow()), &bf16_states);
}

fn drafts_change_few_completions(model: &Model, with: &dyn Fn(EngineOptions) -> EngineOptions) {
    let options = with(model.options(256));
    let params = cases()[0].clone();
    let (expected, _) = generate(model, &options, None, &prompts(9, 120), &params);
    let (again, _) =
        generate(model, &EngineOptions { max_num_seqs: 5, ..options.clone() }, None, &prompts(9, 120), &params);
    let differing = |got: &[RolloutGroup]| {
        completions(got).zip(completions(&expected)).filter(|((own, _), (others, _))| own != others).count()
    };
    let of_batch = differing(&again);
    for injection in [Some(DraftInjection::new(|_, _, _, most| vec![3; most])), None] {
        let (got, stats) = generate(model, &drafting(options.clone()), injection, &prompts(9, 120), &params);
        let of_drafts = differing(&got);
        println!("{of_drafts} of 27 completions differ with drafts, {of_batch} in another batch; {stats:?}");
        assert!(of_drafts <= 2 * of_batch + 6, "{of_drafts} differ, {of_batch} in another batch");
    }
}

/// With `auto`, an engine switches between normal steps and steps with draft tokens. Tokens of strict steps do not change.
#[test]
#[ignore = "needs a GPU"]
fn gpu_automatic_speculation_changes_no_bit_of_strict_steps() {
    let model = Model::new(SMALL);
    let strict = EngineOptions { strict: true, ..model.options(512) };
    let speculation = SpeculationOptions { method: Speculation::Auto, num_tokens: 7 };
    // Greedy completions of random weights repeat themselves.
    let params = SamplingParams {
        num_generations: 1,
        temperature: 0.0,
        max_completion_length: 300,
        ..SamplingParams::default()
    };
    let (expected, without) = generate(&model, &strict, None, &prompts(4, 60), &params);
    let auto = EngineOptions { speculation, ..strict };
    let (got, stats) = generate(&model, &auto, None, &prompts(4, 60), &params);
    println!("auto: {stats:?}; without: {without:?}");
    assert_eq!(bits(&got), bits(&expected));
}
