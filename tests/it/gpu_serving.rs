//! Compares features for clients of a server on a GPU engine with a CPU engine. Ignored without a GPU.

use std::sync::Arc;

use colo_grpo::internal::model::{ModelSpec, ParamTable, UnitLayout, init_unit};
use colo_grpo::internal::ranks::{Backend, World};
use colo_grpo::internal::rollout::{Engine, EngineOptions, Event, Request, RolloutEngine};
use colo_grpo::internal::serve::Served;
use colo_grpo::internal::types::{FinishReason, SamplingParams, Structure, TokenLogprob, Trajectory};
use tch::Kind;

use crate::ranks;
use crate::rollout::{adapters, bytes, options, prompts};

/// Size of the vocabulary: an end-of-sequence token and the tokens of [`bytes`].
const VOCAB: usize = 300;
const EOS: u32 = 299;

/// A completion with the most probable token ids at each position.
struct Sampled {
    completion: Trajectory,
    top: Vec<Vec<TokenLogprob>>,
}

fn unit(layout: &UnitLayout) -> colo_grpo::Result<tch::Tensor> {
    let flat = init_unit(layout, 1, Kind::Float)?;
    for param in layout.params.iter().filter(|param| param.decay) {
        let _ = layout.view(param.name, &flat).unwrap().g_mul_scalar_(6.0);
    }
    Ok(flat)
}

fn long() -> EngineOptions {
    EngineOptions { block_size: 16, max_model_length: 256, records_experts: false, ..options() }
}

/// The completions of all requests, sampled in one batch by a float32 engine on the world's device.
fn sampled(world: World, requests: &[SamplingParams]) -> Vec<Sampled> {
    let spec = ModelSpec { vocab_size: VOCAB, eos_token_ids: vec![EOS], ..ModelSpec::preset("tiny").unwrap() };
    let (spec, world) = (Arc::new(spec), Arc::new(world));
    let mesh = world.mesh(world.size(), world.size()).unwrap();
    let options = EngineOptions { device: world.device(), ..long() };
    let engine = Engine::new(spec.clone(), Arc::new(bytes()), options, mesh.tp.clone()).unwrap();
    let mut served = Served::new(world, Arc::new(ParamTable::new(spec, 1)), engine, &unit).unwrap();
    served.with_engine(|rollout| in_one_batch(rollout, requests)).unwrap()
}

fn in_one_batch(rollout: &mut RolloutEngine<'_>, requests: &[SamplingParams]) -> colo_grpo::Result<Vec<Sampled>> {
    let mut session = rollout.session()?;
    let mut ids = Vec::new();
    for (prompt, params) in prompts(requests.len() as u64).into_iter().zip(requests) {
        let params = Arc::new(params.clone());
        let (prompt_id, token_ids) = (prompt.id, prompt.token_ids);
        ids.push(session.submit(Request {
            prompt_id,
            token_ids,
            first_step: 0,
            first_sample: 0,
            params,
            begun: Vec::new(),
            adapter: None,
        })?);
    }
    let mut top: Vec<Vec<Vec<Vec<TokenLogprob>>>> =
        requests.iter().map(|params| vec![Vec::new(); params.num_generations]).collect();
    while session.has_work() {
        for event in session.step()? {
            if let Event::Token { request, sample, top_logprobs, .. } = event {
                let place = ids.iter().position(|id| *id == request).unwrap();
                top[place][sample].push(top_logprobs);
            }
        }
    }
    let mut all = Vec::new();
    for (id, top) in ids.into_iter().zip(top) {
        all.extend(session.completions(id)?.into_iter().zip(top).map(|(completion, top)| Sampled { completion, top }));
    }
    session.close()?;
    Ok(all)
}

const SUM: &str = "[1-9][0-9]{0,2}\\+[1-9][0-9]{0,2}=[0-9]{1,4}(, (true|false|null)){0,3}";

/// Requests with structured output and every kind of logits processing, requests for the most probable tokens, and plain ones.
fn requests() -> Vec<SamplingParams> {
    let base = SamplingParams { num_generations: 3, max_completion_length: 60, ..SamplingParams::default() };
    let schema = r#"{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}"#;
    let json = Structure::Json { schema: schema.to_owned(), is_compact: true };
    let sum = Structure::Regex(SUM.to_owned());
    vec![
        SamplingParams { structure: Some(sum.clone()), ..base.clone() },
        base.clone(),
        SamplingParams { structure: Some(json.clone()), top_logprobs: 5, temperature: 0.7, ..base.clone() },
        SamplingParams { top_logprobs: 20, temperature: 0.0, num_generations: 1, ..base.clone() },
        SamplingParams { structure: Some(sum.clone()), top_k: 4, top_p: 0.9, ..base.clone() },
        SamplingParams { structure: Some(json), repetition_penalty: 1.3, min_p: Some(0.05), ..base.clone() },
        SamplingParams { structure: Some(sum), temperature: 0.0, top_logprobs: 2, ..base },
    ]
}

/// Asserts that texts follow their structures, and that completions equal the CPU's up to the first token that rounding changes.
fn compare(got: &[Sampled], expected: &[Sampled]) {
    assert_eq!(got.len(), expected.len());
    let near = |a: f32, b: f32| (a - b).abs() < 2e-3;
    let mut num_equal = 0;
    for (place, (got, expected)) in got.iter().zip(expected).enumerate() {
        let (own, theirs) = (&got.completion, &expected.completion);
        let tokens = own.token_ids.iter().zip(&theirs.token_ids);
        let same = tokens.take_while(|(a, b)| a == b).count();
        num_equal += usize::from(own.token_ids == theirs.token_ids);
        for at in 0..same {
            assert!(near(own.rollout_logprobs[at], theirs.rollout_logprobs[at]), "{place}, token {at}");
            assert_eq!(got.top[at].len(), expected.top[at].len(), "{place}, token {at}");
            for (a, b) in got.top[at].iter().zip(&expected.top[at]) {
                assert!(near(a.logprob, b.logprob), "{place}, token {at}: {:?} {:?}", got.top[at], expected.top[at]);
            }
            let own_entry = got.top[at].iter().find(|other| other.token_id == own.token_ids[at]);
            assert!(own_entry.is_none_or(|entry| entry.logprob == own.rollout_logprobs[at]), "{place}, token {at}");
        }
    }
    println!("{num_equal} of {} completions have the CPU's tokens", got.len());
    assert!(num_equal * 10 >= got.len() * 9, "{num_equal} of {} are equal", got.len());
    let sum = regex::Regex::new(&format!("^{SUM}$")).unwrap();
    let requests = requests();
    let structures = requests.iter().flat_map(|params| vec![params.structure.clone(); params.num_generations]);
    for (Sampled { completion, .. }, structure) in got.iter().zip(structures) {
        let text = &completion.text;
        if completion.finish_reason != Some(FinishReason::Eos) {
            continue; // the beginning of such a text
        }
        match structure {
            Some(Structure::Regex(_)) => assert!(sum.is_match(text), "{text}"),
            Some(_) => assert!(
                serde_json::from_str::<Vec<serde_json::Value>>(text).is_ok_and(|list| (2..=4).contains(&list.len()))
            ),
            None => {}
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_structured_output_and_top_logprobs_equal_the_cpus() {
    tch::set_num_threads(1);
    let expected = sampled(World::single(), &requests());
    compare(&sampled(World::single_on(Backend::Nccl).unwrap(), &requests()), &expected);
}

#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_agree_on_structured_output() {
    ranks::run_on_gpus(2, "gpu_serving::gpu_two_ranks_agree_on_structured_output", |world| {
        let expected = sampled(World::single(), &requests());
        compare(&sampled(world, &requests()), &expected);
    });
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_requests_of_one_batch_use_their_own_adapters() {
    adapters::compare(World::single_on(Backend::Nccl).unwrap(), "tiny", long());
}

/// Makes the same comparison between two engines on the CPU.
#[test]
fn structured_output_and_top_logprobs_are_engine_independent() {
    tch::set_num_threads(1);
    let [first, second] = [(); 2].map(|()| sampled(World::single(), &requests()));
    assert!(first.iter().any(|sampled| sampled.completion.finish_reason == Some(FinishReason::Eos)));
    compare(&first, &second);
}
