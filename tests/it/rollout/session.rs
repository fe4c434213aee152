//! Engine sessions that a caller advances step by step.

use std::collections::BTreeMap;
use std::sync::Arc;

use colo_grpo::Error;
use colo_grpo::internal::rollout::{EngineOptions, Event, Request, RequestId, Session};
use colo_grpo::internal::train::Sequence;
use colo_grpo::internal::types::{FinishReason, Prompt, SamplingParams, Trajectory};

use super::setup::{Model, alone, options, prompts, sampled};

pub fn request(prompt: &Prompt, params: &SamplingParams) -> Request {
    Request {
        prompt_id: prompt.id,
        token_ids: prompt.token_ids.clone(),
        first_step: params.step,
        params: Arc::new(params.clone()),
        begun: Vec::new(),
        adapter: None,
        first_sample: 0,
    }
}

/// Completions assembled from events, as by a client.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    token_ids: Vec<Vec<u32>>,
    logprobs: Vec<Vec<f32>>,
    reasons: Vec<Option<FinishReason>>,
    is_complete: bool,
}

impl Heard {
    fn of(completions: &[Trajectory]) -> Self {
        Self {
            token_ids: completions.iter().map(|completion| completion.token_ids.clone()).collect(),
            logprobs: completions.iter().map(|completion| completion.rollout_logprobs.clone()).collect(),
            reasons: completions.iter().map(|completion| completion.finish_reason).collect(),
            is_complete: true,
        }
    }

    fn silent(num_generations: usize) -> Self {
        Self {
            token_ids: vec![Vec::new(); num_generations],
            logprobs: vec![Vec::new(); num_generations],
            reasons: vec![None; num_generations],
            is_complete: false,
        }
    }
}

fn hear(heard: &mut BTreeMap<RequestId, Heard>, event: Event) {
    match event {
        Event::Token { request, sample, token_id, logprob, .. } => {
            let heard = heard.get_mut(&request).unwrap();
            heard.token_ids[sample].push(token_id);
            heard.logprobs[sample].push(logprob);
        }
        Event::Finished { request, sample, reason } => heard.get_mut(&request).unwrap().reasons[sample] = Some(reason),
        Event::Complete { request } => heard.get_mut(&request).unwrap().is_complete = true,
        Event::Preempted { .. } => {}
        Event::Failed { message, .. } => panic!("{message}"),
    }
}

/// A request with its own parameters is added at each step. The events equal what a batch with only this request samples.
#[test]
fn requests_added_while_others_run_get_equal_tokens() {
    for model in [Model::micro(), Model::golden("qwen3_5")] {
        come_while_others_run(&model);
    }
}

fn come_while_others_run(model: &Model) {
    let all = [
        sampled(),
        SamplingParams { temperature: 0.0, num_generations: 1, ..sampled() },
        SamplingParams { temperature: 0.6, repetition_penalty: 1.4, ..sampled() },
        SamplingParams { top_k: 3, max_completion_length: 3, seed: 5, ..sampled() },
    ];
    let prompts = prompts(all.len() as u64);
    let few_slots = EngineOptions { max_num_seqs: 3, ..options() };
    for options in [options(), few_slots] {
        let mut engine = model.engine(options.clone(), alone());
        let mut rollout = engine.wake(model.weights(&*alone()), 1).unwrap();
        let mut session = rollout.session().unwrap();
        let (mut coming, mut heard) = (prompts.iter().zip(&all), BTreeMap::new());
        loop {
            if let Some((prompt, params)) = coming.next() {
                let id = session.submit(request(prompt, params)).unwrap();
                heard.insert(id, Heard::silent(params.num_generations));
            } else if !session.has_work() {
                break;
            }
            session.step().unwrap().into_iter().for_each(|event| hear(&mut heard, event));
        }
        for ((id, heard), (prompt, params)) in heard.iter().zip(prompts.iter().zip(&all)) {
            assert_eq!(*heard, Heard::of(&session.completions(*id).unwrap()));
            let (alone, _) = model.generate(options.clone(), std::slice::from_ref(prompt), params);
            assert_eq!(heard.token_ids, Heard::of(&alone[0].completions).token_ids, "{params:?}");
        }
        session.close().unwrap();
        assert!(rollout.stats().num_finished > 0);
    }
}

#[test]
fn drained_requests_continue_in_another_session() {
    let (model, params) = (Model::micro(), sampled());
    let prompts = prompts(3);
    let (expected, _) = model.generate(options(), &prompts, &params);
    let mut engine = model.engine(options(), alone());
    let mut rollout = engine.wake(model.weights(&*alone()), 1).unwrap();
    let submit = |session: &mut Session<'_>, begun: Vec<_>| -> Vec<RequestId> {
        let requests = prompts.iter().zip(begun).map(|(prompt, begun)| Request { begun, ..request(prompt, &params) });
        requests.map(|request| session.submit(request).unwrap()).collect()
    };
    let mut session = rollout.session().unwrap();
    let ids = submit(&mut session, vec![Vec::new(); 3]);
    for _ in 0..4 {
        session.step().unwrap();
    }
    session.drain().unwrap();
    let begun: Vec<_> = ids.iter().map(|&id| session.completions(id).unwrap()).collect();
    assert!(begun.iter().flatten().any(|completion| !completion.token_ids.is_empty()));
    session.close().unwrap();
    let mut session = rollout.session().unwrap();
    let ids = submit(&mut session, begun);
    while session.has_work() {
        session.step().unwrap();
    }
    for (id, expected) in ids.iter().zip(&expected) {
        let tokens = |completions: &[Trajectory]| Heard::of(completions).token_ids;
        assert_eq!(tokens(&session.completions(*id).unwrap()), tokens(&expected.completions));
    }
    session.close().unwrap();
}

#[test]
fn an_invalid_request_leaves_the_session_unchanged() {
    let (model, params) = (Model::micro(), sampled());
    let mut engine = model.engine(options(), alone());
    let mut rollout = engine.wake(model.weights(&*alone()), 1).unwrap();
    let mut session = rollout.session().unwrap();
    let good = request(&prompts(1)[0], &params);
    let wrong = [
        Request { token_ids: Vec::new(), ..good.clone() },
        Request { token_ids: vec![u32::MAX], ..good.clone() },
        Request { params: Arc::new(SamplingParams { top_p: 0.0, ..params }), ..good.clone() },
        Request { begun: vec![Default::default()], ..good.clone() },
        Request { adapter: Some(0), ..good.clone() },
    ];
    for request in wrong {
        assert!(matches!(session.submit(request), Err(Error::InvalidArgument { .. })));
        assert!(!session.has_work());
    }
    let id = session.submit(good).unwrap();
    while session.has_work() {
        session.step().unwrap();
    }
    assert!(!session.completions(id).unwrap().is_empty());
    session.close().unwrap();
}

/// Whichever request is removed, and whenever: the other requests are not affected, all blocks are free at the end, and request numbers continue.
#[test]
fn removing_a_request_frees_its_blocks_and_affects_no_other() {
    for model in [Model::micro(), Model::golden("qwen3_5")] {
        are_removed(&model);
    }
}

fn are_removed(model: &Model) {
    let params = sampled();
    let prompts = prompts(6);
    let (expected, _) = model.generate(options(), &prompts, &params);
    let block_bytes = colo_grpo::internal::rollout::kv_block_bytes(&model.spec, 1, 8, tch::Kind::Float);
    let few_blocks = EngineOptions { kv_cache_bytes: 24 * block_bytes, ..options() };
    for options in [options(), EngineOptions { max_num_seqs: 3, ..options() }, few_blocks] {
        for when in [0, 1, 4] {
            let mut engine = model.engine(options.clone(), alone());
            let mut rollout = engine.wake(model.weights(&*alone()), 1).unwrap();
            let mut session = rollout.session().unwrap();
            let ids: Vec<RequestId> =
                prompts.iter().map(|prompt| session.submit(request(prompt, &params)).unwrap()).collect();
            let mut heard: BTreeMap<_, _> = ids.iter().map(|&id| (id, Heard::silent(params.num_generations))).collect();
            for _ in 0..when {
                session.step().unwrap().into_iter().for_each(|event| hear(&mut heard, event));
            }
            for id in [ids[0], ids[3]] {
                session.remove(id).unwrap();
                assert!(matches!(session.remove(id), Err(Error::InvalidArgument { .. })));
                heard.remove(&id); // an event of it would be none of these
            }
            while session.has_work() {
                session.step().unwrap().into_iter().for_each(|event| hear(&mut heard, event));
            }
            for (position, id) in ids.iter().enumerate().filter(|(_, id)| heard.contains_key(id)) {
                assert_eq!(heard[id].token_ids, Heard::of(&expected[position].completions).token_ids, "{when}");
                session.remove(*id).unwrap();
            }
            let load = session.load();
            assert_eq!((load.num_running, load.num_waiting, load.num_free_blocks), (0, 0, load.num_blocks));
            session.close().unwrap();
        }
    }
}

/// A server's session never ends: removed requests are deleted from its lists while other requests are running.
#[test]
fn a_session_survives_many_removed_requests() {
    let (model, short) = (Model::micro(), SamplingParams { max_completion_length: 2, ..sampled() });
    let long = SamplingParams { max_completion_length: 30, num_generations: 1, ..sampled() };
    let prompts = prompts(2);
    let alone_with = |params| model.generate(options(), &prompts[1..], params).0.remove(0);
    let (long_expected, short_expected) = (alone_with(&long), alone_with(&short));
    let mut engine = model.engine(options(), alone());
    let mut rollout = engine.wake(model.weights(&*alone()), 1).unwrap();
    let mut session = rollout.session().unwrap();
    let mut last_long = None;
    for round in 0..600 {
        let (params, expected) = if round == 500 { (&long, &long_expected) } else { (&short, &short_expected) };
        let id = session.submit(request(&prompts[1], params)).unwrap();
        if round == 500 {
            last_long = Some((id, Heard::silent(1), expected));
            continue;
        }
        let mut heard = BTreeMap::from([(id, Heard::silent(params.num_generations))]);
        while !heard[&id].is_complete {
            for event in session.step().unwrap() {
                match &mut last_long {
                    Some((long, of_long, _)) if event.request() == *long => {
                        let mut one = BTreeMap::from([(*long, std::mem::take(of_long))]);
                        hear(&mut one, event);
                        *of_long = one.remove(long).unwrap();
                    }
                    _ => hear(&mut heard, event),
                }
            }
        }
        assert_eq!(heard[&id].token_ids, Heard::of(&expected.completions).token_ids, "round {round}");
        session.remove(id).unwrap();
    }
    let (_, of_long, expected) = last_long.unwrap();
    assert_eq!(of_long.token_ids, Heard::of(&expected.completions).token_ids);
    session.close().unwrap();
}

/// The second turn is greedy, so that it must equal the completion of a prompt with the same tokens.
#[test]
fn a_second_turn_is_sampled_after_the_appended_context() {
    let model = Model::micro();
    let params = |step, max_completion_length| SamplingParams {
        num_generations: 1,
        temperature: 0.0,
        max_completion_length,
        step,
        ..sampled()
    };
    let prompt = &prompts(1)[0];
    let mut engine = model.engine(options(), alone());
    let mut rollout = engine.wake(model.weights(&*alone()), 1).unwrap();
    let mut session = rollout.session().unwrap();
    let mut turn = |request: Request| {
        let id = session.submit(request).unwrap();
        while session.has_work() {
            session.step().unwrap();
        }
        session.completions(id).unwrap().remove(0)
    };
    let first = turn(request(prompt, &params(7, 6)));
    let mut begun = first.clone();
    begun.push_context(&[3, 1, 4, 1], 7);
    let both = turn(Request { begun: vec![begun.clone()], ..request(prompt, &params(8, 16)) });
    assert_eq!(both.token_ids[..10], begun.token_ids);
    assert_eq!(both.rollout_logprobs[..10], begun.rollout_logprobs);
    assert_eq!(both.turns(), [0..6, 10..16]);
    assert_eq!(both.weight_versions, [vec![7; 10], vec![8; 6]].concat());
    session.close().unwrap();

    let token_ids = [&prompt.token_ids[..], &begun.token_ids].concat();
    let (alone, _) = model.generate(options(), &[Prompt { token_ids, ..prompt.clone() }], &params(8, 6));
    assert_eq!(both.token_ids[10..], alone[0].completions[0].token_ids);
    let sequence = Sequence::of_trajectory(&prompt.token_ids, &both);
    assert_eq!((sequence.num_scored(), sequence.completion_len()), (12, 16));
    assert_eq!(sequence.rollout_logprobs.unwrap()[6..], both.rollout_logprobs[10..]);
}
