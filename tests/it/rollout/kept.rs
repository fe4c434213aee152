//! Rollouts that continue from the KV cache of earlier ones.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use colo_grpo::Result;
use colo_grpo::internal::model::{AttentionSpec, ModelSpec, SequenceMixer};
use colo_grpo::internal::ranks::{Collective, World};
use colo_grpo::internal::rollout::{Engine, EngineOptions, kv_block_bytes};
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams};
use tch::{Kind, Tensor};

use super::setup::{Model, alone, options, prompts, sampled, token_ids};
use crate::ranks;

/// Numbers of tokens that were prefilled, recomputed and kept.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    prefilled: usize,
    recomputed: usize,
    kept: usize,
}

/// Complete groups in prompt order, each with the lengths of its completions at the end of every earlier wake.
type Parts = Vec<(RolloutGroup, Vec<Vec<usize>>)>;

/// Wakes an engine until all groups are complete. Each wake completes two more groups of all ranks, with the weights of `models` in turn.
fn generate_in_parts(
    models: &[&Model],
    engine: &mut Engine,
    tp: &Arc<dyn Collective>,
    prompts: &[Prompt],
    params: &SamplingParams,
) -> (Parts, Counts) {
    let mut groups: Vec<_> = prompts.iter().cloned().map(RolloutGroup::new).collect();
    let (mut complete, mut counts) = (Vec::new(), Counts::default());
    let mut lens: HashMap<u64, Vec<Vec<usize>>> = HashMap::new();
    for wake in 0..prompts.len() * tp.size() / 2 {
        let weights = models[wake % models.len()].weights(tp.as_ref());
        let mut rollout = engine.wake(weights, 1).unwrap();
        let part = rollout.generate_first(groups, 2 / tp.size(), params, |_| ()).unwrap();
        let stats = rollout.stats();
        counts.prefilled += stats.num_prefilled_tokens;
        counts.recomputed += stats.num_recomputed_tokens;
        counts.kept += stats.num_kept_tokens;
        complete.extend(part.complete.into_iter().map(|(_, group)| group));
        groups = part.unfinished.into_iter().map(|(_, group)| group).collect();
        for group in &groups {
            let of_wake = group.completions.iter().map(|completion| completion.token_ids.len()).collect();
            lens.entry(group.prompt.id).or_default().push(of_wake);
        }
    }
    assert!(groups.is_empty());
    complete.sort_by_key(|group| group.prompt.id);
    let with_lens = |group: RolloutGroup| {
        let lens = lens.remove(&group.prompt.id).unwrap_or_default();
        (group, lens)
    };
    (complete.into_iter().map(with_lens).collect(), counts)
}

fn groups(parts: &[(RolloutGroup, Vec<Vec<usize>>)]) -> Vec<RolloutGroup> {
    parts.iter().map(|(group, _)| group.clone()).collect()
}

fn num_prompt_tokens(prompts: &[Prompt]) -> usize {
    prompts.iter().map(|prompt| prompt.token_ids.len()).sum()
}

#[test]
fn kept_sequences_continue_bit_for_bit_without_recomputation() {
    goes_on_bit_for_bit(&Model::micro().spreading());
}

/// Kept sequences keep the pages of their states as well as their KV blocks.
#[test]
fn kept_hybrid_sequences_continue_bit_for_bit_without_recomputation() {
    goes_on_bit_for_bit(&Model::golden("qwen3_5").spreading());
}

fn goes_on_bit_for_bit(model: &Model) {
    let prompts = prompts(8);
    for params in [sampled(), SamplingParams { repetition_penalty: 1.3, top_k: 9, ..sampled() }] {
        let (expected, _) = model.generate(options(), &prompts, &params);
        let mut engine = model.engine(options(), alone()).keeping_sequences();
        let (parts, counts) = generate_in_parts(&[model], &mut engine, &alone(), &prompts, &params);
        assert_eq!(groups(&parts), expected);
        assert_eq!((counts.prefilled, counts.recomputed), (num_prompt_tokens(&prompts), 0));
        assert!(counts.kept > num_prompt_tokens(&prompts), "{counts:?}");
        // The other way: all that is kept here is computed again.
        let mut engine = model.engine(options(), alone());
        let (_, again) = generate_in_parts(&[model], &mut engine, &alone(), &prompts, &params);
        assert!(again.recomputed >= counts.kept && again.kept == 0, "{again:?} for {counts:?}");
    }
}

#[test]
fn two_ranks_keep_sequences_like_one() {
    ranks::run(2, "rollout::kept::two_ranks_keep_sequences_like_one", |world: World| {
        for model in [Model::micro().spreading(), Model::golden("qwen3_5").spreading()] {
            two_keep_as_one(&model, &world.group());
        }
    });
}

fn two_keep_as_one(model: &Model, tp: &Arc<dyn Collective>) {
    let prompts = prompts(8);
    let own = &prompts[4 * tp.rank()..4 * (tp.rank() + 1)];
    let (expected, _) = model.generate(options(), &prompts, &sampled());
    let mut engine = model.engine(options(), tp.clone()).keeping_sequences();
    let (parts, counts) = generate_in_parts(&[model], &mut engine, tp, own, &sampled());
    assert_eq!(token_ids(&groups(&parts)), token_ids(&expected[4 * tp.rank()..4 * (tp.rank() + 1)]));
    assert_eq!((counts.prefilled, counts.recomputed), (num_prompt_tokens(&prompts), 0));

    // A rank that lost what it kept is not alone with that.
    let mut rollout = engine.wake(model.weights(tp.as_ref()), 1).unwrap();
    let fresh = own.iter().cloned().map(RolloutGroup::new).collect();
    let part = rollout.generate_first(fresh, 1, &sampled(), |_| ()).unwrap();
    drop(rollout);
    if tp.rank() == 1 {
        engine.drop_kept();
    }
    let mut rollout = engine.wake(model.weights(tp.as_ref()), 1).unwrap();
    let unfinished = part.unfinished.into_iter().map(|(_, group)| group).collect();
    rollout.generate_first(unfinished, 1, &sampled(), |_| ()).unwrap();
    assert!(rollout.stats().num_kept_tokens == 0 && rollout.stats().num_recomputed_tokens > 0);
}

#[test]
fn too_few_kv_blocks_cost_only_time() {
    let (model, prompts, params) = (Model::micro().spreading(), prompts(8), sampled());
    let (expected, _) = model.generate(options(), &prompts, &params);
    let few = EngineOptions { kv_cache_bytes: 12 * kv_block_bytes(&model.spec, 1, 8, Kind::Float), ..options() };
    let mut engine = model.engine(few, alone()).keeping_sequences();
    let (parts, counts) = generate_in_parts(&[&model], &mut engine, &alone(), &prompts, &params);
    assert_eq!(token_ids(&groups(&parts)), token_ids(&expected));
    assert!(counts.kept > 0 && counts.recomputed > 0, "{counts:?}");
}

/// At the second wake there is memory for a larger cache, in which blocks would be at other addresses.
#[test]
fn a_shrunk_kv_cache_keeps_its_size_while_it_holds_sequences() {
    ranks::run(1, "rollout::kept::a_shrunk_kv_cache_keeps_its_size_while_it_holds_sequences", |_| shrinks_once());
}

/// Limits this process to `bytes` more writable memory than it has; `None` removes the limit.
fn limit_memory(bytes: Option<usize>) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
    let held: usize = line.trim().strip_suffix(" kB").unwrap().parse().unwrap();
    let rlim_cur = bytes.map_or(libc::RLIM_INFINITY, |bytes| (held * 1024 + bytes) as libc::rlim_t);
    let limit = libc::rlimit { rlim_cur, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: plain system call on a value that outlives it.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) }, 0);
}

fn shrinks_once() {
    let (model, prompts, params) = (Model::micro().spreading(), prompts(8), sampled());
    let (expected, _) = model.generate(options(), &prompts, &params);
    let kv_cache_bytes = 1 << 30; // never touched but for some blocks
    limit_memory(Some(kv_cache_bytes / 4 * 3));
    let mut engine = model.engine(EngineOptions { kv_cache_bytes, ..options() }, alone()).keeping_sequences();
    let mut wake = |groups, count| {
        let mut rollout = engine.wake(model.weights(alone().as_ref()), 1).unwrap();
        let part = rollout.generate_first(groups, count, &params, |_| ()).unwrap();
        let stats = *rollout.stats();
        drop(rollout);
        (part, stats, engine.absent_bytes())
    };
    let (mut part, first, absent_bytes) = wake(prompts.into_iter().map(RolloutGroup::new).collect(), 2);
    let num_asked = kv_cache_bytes / kv_block_bytes(&model.spec, 1, 8, Kind::Float);
    let is_what_there_is = first.num_blocks < num_asked / 4 * 3 && first.num_blocks > num_asked / 8 * 5;
    assert!(is_what_there_is, "of three quarters most: {} of {num_asked}", first.num_blocks);
    assert_eq!(absent_bytes, 0);
    limit_memory(None);
    let (rest, second, absent_bytes) = wake(part.unfinished.into_iter().map(|(_, group)| group).collect(), 6);
    assert!(second.num_kept_tokens > 0 && second.num_recomputed_tokens == 0, "{second:?}");
    assert_eq!(second.num_blocks, first.num_blocks);
    assert!(absent_bytes > 0, "nothing is kept any more, and more may be mapped");
    part.complete.extend(rest.complete);
    let mut got: Vec<_> = part.complete.into_iter().map(|(_, group)| group).collect();
    got.sort_by_key(|group| group.prompt.id);
    assert_eq!(token_ids(&got), token_ids(&expected));
}

/// Other prompts get the blocks that they need; if no others are free, kept blocks are used.
#[test]
fn an_evaluation_takes_precedence_over_kept_sequences() {
    let (model, prompts, params) = (Model::micro().spreading(), prompts(10), sampled());
    let (expected, _) = model.generate(options(), &prompts, &params);
    for (num_blocks, is_kept) in [(400, true), (40, false)] {
        let kv_cache_bytes = num_blocks * kv_block_bytes(&model.spec, 1, 8, Kind::Float);
        let mut engine = model.engine(EngineOptions { kv_cache_bytes, ..options() }, alone()).keeping_sequences();
        let fresh = prompts[..6].iter().cloned().map(RolloutGroup::new).collect();
        let wake = |engine: &mut Engine, groups, count| {
            let mut rollout = engine.wake(model.weights(alone().as_ref()), 1).unwrap();
            (rollout.generate_first(groups, count, &params, |_| ()).unwrap(), *rollout.stats())
        };
        let (mut part, _) = wake(&mut engine, fresh, 2);
        let others = prompts[6..].iter().cloned().map(RolloutGroup::new).collect();
        let (evaluated, _) = wake(&mut engine, others, 4);
        let unfinished: Vec<_> = part.unfinished.into_iter().map(|(_, group)| group).collect();
        let (rest, stats) = wake(&mut engine, unfinished, 4);
        assert_eq!(stats.num_recomputed_tokens == 0, is_kept, "{stats:?}");
        part.complete.extend(rest.complete.into_iter().chain(evaluated.complete));
        let mut got: Vec<_> = part.complete.into_iter().map(|(_, group)| group).collect();
        got.sort_by_key(|group| group.prompt.id);
        assert_eq!(token_ids(&got), token_ids(&expected));
    }
}

/// There are 16 state pages. An evaluation of 16 sequences needs those of kept sequences.
#[test]
fn an_evaluation_may_take_the_state_pages_of_kept_sequences() {
    let (model, prompts, params) = (Model::golden("qwen3_5").spreading(), prompts(10), sampled());
    let (expected, _) = model.generate(options(), &prompts, &params);
    for (num_others, is_kept) in [(1, true), (4, false)] {
        let options = EngineOptions { max_num_seqs: 16, ..options() };
        let mut engine = model.engine(options, alone()).keeping_sequences();
        let mut wake = |groups, count| {
            let mut rollout = engine.wake(model.weights(alone().as_ref()), 1).unwrap();
            (rollout.generate_first(groups, count, &params, |_| ()).unwrap(), *rollout.stats())
        };
        let (mut part, _) = wake(prompts[..6].iter().cloned().map(RolloutGroup::new).collect(), 2);
        let others: Vec<_> = prompts[6..6 + num_others].iter().cloned().map(RolloutGroup::new).collect();
        let (evaluated, _) = wake(others, num_others);
        let (rest, stats) = wake(part.unfinished.into_iter().map(|(_, group)| group).collect(), 4);
        assert_eq!(stats.num_recomputed_tokens == 0, is_kept, "{num_others} others: {stats:?}");
        part.complete.extend(rest.complete.into_iter().chain(evaluated.complete));
        let mut got: Vec<_> = part.complete.into_iter().map(|(_, group)| group).collect();
        got.sort_by_key(|group| group.prompt.id);
        assert_eq!(token_ids(&got), token_ids(&expected[..6 + num_others]));
    }
}

/// Attention over the keys and values of all tokens so far, which may have been computed with different weights.
#[derive(Default)]
struct Growing {
    layers: RefCell<HashMap<usize, (Tensor, Tensor)>>, // keys and values, [tokens so far, Hkv, hd] each
}

impl SequenceMixer for Growing {
    fn attention(
        &self,
        layer: usize,
        attention: AttentionSpec,
        [q, k, v]: [&Tensor; 3],
    ) -> Result<(Tensor, Option<Tensor>)> {
        let grown = |old: Option<&Tensor>, new: &Tensor| match old {
            Some(old) => Tensor::cat(&[old, new], 0),
            None => new.shallow_clone(),
        };
        let mut layers = self.layers.borrow_mut();
        let old = layers.get(&layer);
        let (k, v) = (grown(old.map(|old| &old.0), k), grown(old.map(|old| &old.1), v));
        let groups = q.size()[1] / k.size()[1];
        let of_heads = |kv: &Tensor| kv.repeat_interleave_self_int(groups, 1, None).transpose(0, 1); // [H, tokens, hd]
        let scores = q.transpose(0, 1).matmul(&of_heads(&k).transpose(1, 2)) * attention.scale; // [H, T, tokens]
        let unseen = Tensor::ones_like(&scores).triu(k.size()[0] - q.size()[0] + 1).to_kind(Kind::Bool);
        let weights = scores.masked_fill(&unseen, f64::NEG_INFINITY).softmax(-1, Kind::Float);
        let o = weights.matmul(&of_heads(&v)).transpose(0, 1).contiguous();
        layers.insert(layer, (k, v));
        Ok((o, None))
    }
}

/// Weights change between wakes. Every recorded log-probability is that of the weights at its time, with keys and values of
/// earlier weights.
#[test]
fn logprobs_of_kept_sequences_use_new_weights_over_the_old_cache() {
    let models = [1, 2, 3].map(|seed| Model::random(ModelSpec::preset("micro").unwrap(), seed).spreading());
    let models: Vec<&Model> = models.iter().collect();
    let (prompts, params) = (prompts(8), SamplingParams { temperature: 0.8, ..sampled() });
    let mut engine = models[0].engine(options(), alone()).keeping_sequences();
    let (parts, counts) = generate_in_parts(&models, &mut engine, &alone(), &prompts, &params);
    assert!(counts.recomputed == 0 && counts.kept > 0, "{counts:?}");
    let (mut num_mixed, mut apart_from_recomputed) = (0, 0.0_f32);
    for (group, lens) in &parts {
        for (sample, completion) in group.completions.iter().enumerate() {
            let prompt_len = group.prompt.token_ids.len();
            let all = [group.prompt.token_ids.as_slice(), &completion.token_ids].concat();
            let attention = Growing::default();
            let (mut expected, mut fed) = (Vec::new(), 0);
            let ends = lens.iter().map(|of_wake| of_wake[sample]).chain([completion.token_ids.len()]);
            for (wake, end) in ends.enumerate() {
                let fed_before_end = fed..prompt_len + end - 1;
                fed = fed_before_end.end;
                let model = models[wake % models.len()];
                expected.extend(match fed_before_end.is_empty() {
                    true => Vec::new(),
                    false => model.next_logprobs(&all, fed_before_end, 0.8, &attention),
                });
            }
            let expected = &expected[prompt_len - 1..];
            assert_eq!(expected.len(), completion.rollout_logprobs.len());
            for (got, expected) in completion.rollout_logprobs.iter().zip(expected) {
                assert!((got - expected).abs() < 1e-4, "{got} {expected}");
            }
            if let [first, .., last] = &lens[..]
                && first[sample] < last[sample]
            {
                num_mixed += 1;
                let newest = models[lens.len() % models.len()].logprobs(&all, prompt_len, 0.8);
                let last_token = |logprobs: &[f32]| logprobs[logprobs.len() - 1];
                apart_from_recomputed =
                    apart_from_recomputed.max((last_token(&newest) - last_token(&completion.rollout_logprobs)).abs());
            }
        }
    }
    assert!(num_mixed > 3 && apart_from_recomputed > 0.01, "{num_mixed} mixed, {apart_from_recomputed} apart");
}
