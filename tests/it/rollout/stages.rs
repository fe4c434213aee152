//! Engines with pipeline stages, compared with engines on one rank.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use colo_grpo::Error;
use colo_grpo::internal::bench::LengthSpread;
use colo_grpo::internal::config::{EngineShape, KvCacheDtype, RolloutQuantization};
use colo_grpo::internal::model::{Mixer, ModelSpec, Stage, Stages};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::rollout::{EngineOptions, EngineRanks, EngineStats, Event, Session, kv_block_bytes};
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams, Structure};
use tch::Kind;

use super::session::request;
use super::setup::{Model, greedy, options, prompts, sampled, token_ids};
use crate::ranks;

/// Models with enough layers for up to four stages.
fn models() -> Vec<Model> {
    let micro = ModelSpec::preset("micro").unwrap().with_num_layers(5);
    let untied = ModelSpec { tie_word_embeddings: false, ..micro.clone() };
    let golden = |name: &str, num_layers| (*Model::golden(name).spec).clone().with_num_layers(num_layers);
    let hybrid = golden("qwen3_5", 6);
    let [attention, delta_net] = [Mixer::Attention(hybrid.attention()), Mixer::DeltaNet(hybrid.delta_net().unwrap())];
    let hybrid = hybrid.map_blocks(|layer, block| {
        block.mixer = if [0, 2, 4, 5].contains(&layer) { attention } else { delta_net };
    });
    let specs = [micro, untied, golden("qwen2_moe_mixed", 5), hybrid];
    specs.into_iter().map(|spec| Model::random(spec, 1)).collect()
}

fn ranks_of(world: &World, model: &Model, shape: EngineShape, partition: &[usize]) -> EngineRanks {
    let mesh = world.mesh(shape, world.size()).unwrap();
    EngineRanks::new(&mesh, Stages::new(&model.spec, shape.pipeline_parallel_size, partition).unwrap())
}

fn generate(
    model: &Model,
    ranks: &EngineRanks,
    options: EngineOptions,
    prompts: &[Prompt],
    params: &SamplingParams,
) -> (Vec<RolloutGroup>, EngineStats) {
    let mut engine = model.engine_in_stages(options, ranks.clone());
    let mut rollout = engine.wake(model.weights_of(ranks), 1).unwrap();
    let groups = rollout.generate(prompts, params, |_| ()).unwrap();
    (groups, *rollout.stats())
}

/// Each rank passes a part of the prompts and gets what a single rank would sample for them, for any split of layers.
fn equals_one_rank(world: &World, shape: EngineShape, uneven: &[usize]) {
    let [of_five, of_six] = [5, 6].map(|num_layers: usize| -> Vec<usize> {
        let first = num_layers - uneven[1..].iter().sum::<usize>();
        std::iter::once(first).chain(uneven[1..].iter().copied()).collect()
    });
    let ranks = ranks_of(world, &models()[0], shape, &[]); // of a world's groups there is a limit
    let filtered = SamplingParams { temperature: 0.7, top_k: 7, top_p: 0.9, ..sampled() };
    let chunked = EngineOptions { max_num_batched_tokens: 16, max_num_seqs: 6, ..options() };
    for (index, model) in models().iter().enumerate() {
        let cut: &[usize] = if model.spec.num_layers() == 5 { &of_five } else { &of_six };
        let ranks = |cut: &[usize]| EngineRanks {
            stages: Stages::new(&model.spec, shape.pipeline_parallel_size, cut).unwrap(),
            ..ranks.clone()
        };
        let check = |cut: &[usize], options: &[&EngineOptions], params: &SamplingParams| {
            check(model, &ranks(cut), options, params);
        };
        let few_blocks = EngineOptions { kv_cache_bytes: 24 * check_cache(model, &ranks(cut)), ..options() };
        check(cut, &[&few_blocks], &greedy());
        if index == 0 {
            check(cut, &[&few_blocks, &chunked], &sampled());
            check(&[], &[&options()], &filtered);
        } else {
            check(cut, &[&options()], &sampled());
        }
    }
}

/// Size in bytes of a KV block on the stage with the largest blocks. Every stage's cache has as many blocks, for its own layers only.
fn check_cache(model: &Model, ranks: &EngineRanks) -> usize {
    let block_bytes =
        |stage: &Stage| kv_block_bytes(&model.spec.of_layers(&stage.layers), ranks.tp.size(), 8, Kind::Float);
    let most = ranks.stages.iter().map(|stage| block_bytes(&stage)).max().unwrap();
    let options = EngineOptions { kv_cache_bytes: 6400 * most, ..options() };
    let (reserved, own) = (model.engine_in_stages(options, ranks.clone()).absent_bytes(), block_bytes(&ranks.stage()));
    assert!((6400 * own..6400 * own + (2 << 20)).contains(&reserved), "{reserved} bytes for 6400 blocks of {own}");
    most
}

fn check(model: &Model, ranks: &EngineRanks, options: &[&EngineOptions], params: &SamplingParams) {
    let tolerance = if model.spec.delta_net().is_some() { 1e-3 } else { 1e-4 };
    let (all, (rank, size)) = (prompts(7), (ranks.all.rank(), ranks.all.size()));
    let own = rank * all.len() / size..(rank + 1) * all.len() / size;
    let (expected, _) = model.generate(super::options(), &all, params);
    for &options in options {
        let (groups, stats) = generate(model, ranks, options.clone(), &all[own.clone()], params);
        assert_eq!(token_ids(&groups), token_ids(&expected[own.clone()]), "{:?} {params:?} {options:?}", ranks.stages);
        assert!(stats.stage.computing > Duration::ZERO && stats.stage.waiting > Duration::ZERO);
        for (group, expected) in groups.iter().zip(&expected[own.clone()]) {
            for (got, expected) in group.completions.iter().zip(&expected.completions) {
                assert_eq!(got.routed_experts, expected.routed_experts);
                let pairs = got.rollout_logprobs.iter().zip(&expected.rollout_logprobs);
                pairs.for_each(|(a, b)| assert!((a - b).abs() < tolerance, "{a} {b}"));
            }
        }
    }
}

fn staged(tensor_parallel_size: usize, pipeline_parallel_size: usize) -> EngineShape {
    EngineShape { tensor_parallel_size, pipeline_parallel_size }
}

#[test]
fn two_pipeline_stages_equal_one_rank() {
    ranks::run(2, "rollout::stages::two_pipeline_stages_equal_one_rank", |world| {
        equals_one_rank(&world, staged(1, 2), &[4, 1]);
    });
}

#[test]
fn three_pipeline_stages_equal_one_rank() {
    ranks::run(3, "rollout::stages::three_pipeline_stages_equal_one_rank", |world| {
        equals_one_rank(&world, staged(1, 3), &[2, 2, 1]);
    });
}

#[test]
fn four_pipeline_stages_equal_one_rank() {
    ranks::run(4, "rollout::stages::four_pipeline_stages_equal_one_rank", |world| {
        equals_one_rank(&world, staged(1, 4), &[1, 2, 1, 1]);
    });
}

#[test]
fn two_pipeline_stages_of_two_ranks_equal_one_rank() {
    ranks::run(4, "rollout::stages::two_pipeline_stages_of_two_ranks_equal_one_rank", |world| {
        equals_one_rank(&world, staged(2, 2), &[2, 3]);
    });
}

/// FP8 keys and values, FP8 GEMMs, structured output, and unfinished groups, whose blocks are kept on every stage.
#[test]
fn pipeline_stages_support_fp8_structures_and_kept_sequences() {
    ranks::run(2, "rollout::stages::pipeline_stages_support_fp8_structures_and_kept_sequences", |world| {
        let (model, params, num_groups) = (&models()[0], sampled(), [4, 0][world.rank()]);
        let ranks = ranks_of(&world, model, staged(1, 2), &[]);
        let prompts = &prompts(num_groups as u64);
        let rounded =
            EngineOptions { quantization: RolloutQuantization::Fp8, kv_cache_dtype: KvCacheDtype::Fp8, ..options() };
        let (expected, _) = model.generate(rounded.clone(), prompts, &params);
        assert_eq!(token_ids(&generate(model, &ranks, rounded, prompts, &params).0), token_ids(&expected));

        let spec = ModelSpec { vocab_size: 300, ..ModelSpec::preset("micro").unwrap() }.with_num_layers(4);
        let held = Model { tokenizer: Arc::new(super::bytes()), ..Model::random(spec, 2) };
        let structure = Some(Structure::Regex("a[bc]{3,12}".to_owned()));
        let in_order = SamplingParams { structure, ..sampled() };
        let of_held = EngineRanks { stages: Stages::new(&held.spec, 2, &[]).unwrap(), ..ranks.clone() };
        let (expected, _) = held.generate(options(), prompts, &in_order);
        let (groups, _) = generate(&held, &of_held, options(), prompts, &in_order);
        assert_eq!(token_ids(&groups), token_ids(&expected));
        let texts = groups.iter().flat_map(|group| &group.completions).map(|completion| &completion.text);
        assert!(
            texts.clone().all(|text| text.starts_with("ab") || text.starts_with("ac")),
            "{:?}",
            texts.collect::<Vec<_>>()
        );

        let (expected, _) = model.generate(options(), prompts, &params);
        let mut engine = model.engine_in_stages(options(), ranks.clone()).keeping_sequences();
        engine.limit_completions(LengthSpread { shortest: 2, longest: 20, long_tailed: true }.limit());
        let mut groups: Vec<RolloutGroup> = prompts.iter().cloned().map(RolloutGroup::new).collect();
        let (mut complete, mut num_kept) = (Vec::new(), 0);
        for _ in 0..num_groups.max(4) {
            let mut rollout = engine.wake(model.weights_of(&ranks), 1).unwrap();
            let part = rollout.generate_first(groups, usize::from(world.rank() == 0), &params, |_| ()).unwrap();
            num_kept += part.stats.num_kept_tokens;
            complete.extend(part.complete.into_iter().map(|(_, group)| group));
            groups = part.unfinished.into_iter().map(|(_, group)| group).collect();
        }
        complete.sort_by_key(|group| group.prompt.id);
        assert!(num_kept > 0 && complete.len() == num_groups);
        for (got, expected) in complete.iter().zip(&expected) {
            for (got, expected) in got.completions.iter().zip(&expected.completions) {
                assert_eq!(got.token_ids, expected.token_ids[..got.token_ids.len()], "up to its own length");
            }
        }
    });
}

/// Requests that are added between steps, one of which is removed, with the most probable token ids at each position.
#[test]
fn a_session_with_pipeline_stages_reports_like_one_rank() {
    ranks::run(2, "rollout::stages::a_session_with_pipeline_stages_reports_like_one_rank", |world| {
        let model = &models()[0];
        let ranks = ranks_of(&world, model, staged(1, 2), &[2, 3]);
        let mut alone = model.engine(options(), super::alone());
        let mut alone = alone.wake(model.weights(&*super::alone()), 1).unwrap();
        let expected = tokens(alone.session().unwrap());
        let mut engine = model.engine_in_stages(options(), ranks.clone());
        let mut rollout = engine.wake(model.weights_of(&ranks), 1).unwrap();
        assert_eq!(tokens(rollout.session().unwrap()), expected);
    });
}

type Tokens = BTreeMap<(String, usize), Vec<(u32, Vec<u32>)>>;

/// The tokens of each request's completions, with the most probable ids.
fn tokens(mut session: Session<'_>) -> Tokens {
    let params = SamplingParams { num_generations: 3, top_logprobs: 2, ..sampled() };
    let request = |prompt: &Prompt| request(prompt, &params);
    let mut waiting = prompts(5).into_iter();
    let removed = session.submit(request(&waiting.next().unwrap())).unwrap();
    let mut heard = Tokens::new();
    for step in 0.. {
        if let Some(prompt) = waiting.next() {
            session.submit(request(&prompt)).unwrap();
        } else if step == 7 {
            session.remove(removed).unwrap();
        } else if !session.has_work() {
            break;
        }
        for event in session.step().unwrap() {
            if let Event::Token { request, sample, token_id, top_logprobs, .. } = event
                && request != removed
            {
                let top = top_logprobs.iter().map(|top| top.token_id).collect();
                heard.entry((format!("{request:?}"), sample)).or_default().push((token_id, top));
            }
        }
    }
    session.close().unwrap();
    assert!(heard.len() == 12 && heard.values().flatten().all(|(_, top)| top.len() == 2));
    heard
}

#[test]
fn a_failing_pipeline_stage_ends_the_others_with_its_error() {
    let test = "rollout::stages::a_failing_pipeline_stage_ends_the_others_with_its_error";
    ranks::run(3, test, |world| {
        let model = &models()[0];
        let ranks = ranks_of(&world, model, staged(1, 3), &[]);
        let mut engine = model.engine_in_stages(options(), ranks.clone());
        for failing in [2, 0, 1] {
            let mut rollout = engine.wake(model.weights_of(&ranks), 1).unwrap();
            let mut steps = 0;
            let mut session = rollout.session().unwrap();
            for prompt in prompts(4) {
                session.submit(request(&prompt, &sampled())).unwrap();
            }
            let result = loop {
                steps += 1;
                if world.rank() == failing && steps == 6 {
                    break Err(Error::NonFinite { message: format!("stage {failing}") });
                }
                match session.step() {
                    Ok(_) if session.has_work() => {}
                    ended => break ended.map(|_| ()),
                }
            };
            drop(session);
            drop(rollout);
            match world.agree(result).unwrap_err() {
                Error::NonFinite { .. } => assert_eq!(world.rank(), failing),
                Error::PeerFailed { rank, message, .. } => {
                    assert_eq!((rank, message), (failing, format!("stage {failing}")))
                }
                other => panic!("{other}"),
            }
        }
        let all = prompts(3);
        let (expected, _) = model.generate(options(), &all, &greedy());
        let own = world.rank()..world.rank() + 1;
        let (groups, _) = generate(model, &ranks, options(), &all[own.clone()], &greedy());
        assert_eq!(token_ids(&groups), token_ids(&expected[own]));
    });
}

#[test]
fn pipeline_stages_load_only_their_own_weights() {
    ranks::run(2, "rollout::stages::pipeline_stages_load_only_their_own_weights", |world| {
        let model = &models()[0];
        let ranks = ranks_of(&world, model, staged(1, 2), &[]);
        let mut engine = model.engine_in_stages(options(), ranks.clone());
        let whole = model.weights(&*super::alone());
        let error = engine.wake(whole, 1).unwrap_err().to_string();
        assert!(error.contains("(blocks, embedding, lm_head, draft head)"), "{error}");
    });
}
