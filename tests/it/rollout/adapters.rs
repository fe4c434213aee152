//! Requests with different adapters in one batch: each gets what its adapter alone would sample.

use std::sync::Arc;

use colo_grpo::Error;
use colo_grpo::internal::config::TargetModule;
use colo_grpo::internal::model::{LoraSpec, ModelSpec, ParamTable, UnitLayout, init_unit};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::rollout::{Engine, EngineOptions, Request, kv_block_bytes};
use colo_grpo::internal::serve::Served;
use colo_grpo::internal::types::{SamplingParams, Trajectory};
use tch::{Device, Kind, Tensor};

use super::setup::{alone, options, prompts, sampled, words};

/// Adapters number `number`. They differ in LoRA rank and in the adapted projections.
fn lora(number: usize) -> LoraSpec {
    let some = vec![TargetModule::QProj, TargetModule::VProj, TargetModule::UpProj];
    match number {
        0 => LoraSpec { r: 4, alpha: 12.0, dropout: 0.0, targets: TargetModule::ALL.to_vec() },
        _ => LoraSpec { r: 2, alpha: 3.0, dropout: 0.0, targets: some },
    }
}

fn base_unit(layout: &UnitLayout) -> colo_grpo::Result<Tensor> {
    let flat = init_unit(layout, 1, Kind::Float)?;
    for param in layout.params.iter().filter(|param| param.decay) {
        let _ = layout.view(param.name, &flat).unwrap().g_mul_scalar_(12.0);
    }
    Ok(flat)
}

fn adapter_unit(number: usize, layout: &UnitLayout) -> colo_grpo::Result<Tensor> {
    let places = Tensor::arange(layout.len as i64, (Kind::Float, Device::Cpu));
    Ok((places * (1.7 + number as f64)).sin() * 0.5)
}

fn served(world: &Arc<World>, spec: &Arc<ModelSpec>, options: EngineOptions) -> Served {
    let (world, spec) = (world.clone(), spec.clone());
    let options = EngineOptions { device: world.device(), ..options };
    let tokenizer = Arc::new(words(spec.vocab_size));
    let engine = Engine::new(spec.clone(), tokenizer, options, alone()).unwrap();
    Served::new(world, Arc::new(ParamTable::new(spec, 1)), engine, &base_unit).unwrap()
}

fn completions(served: &mut Served, requests: Vec<Request>) -> (Vec<Vec<Trajectory>>, usize) {
    let complete = served.with_engine(|rollout| {
        let mut session = rollout.session()?;
        let ids = requests.into_iter().map(|request| session.submit(request)).collect::<colo_grpo::Result<Vec<_>>>()?;
        while session.has_work() {
            session.step()?;
        }
        let complete = ids.into_iter().map(|id| session.completions(id)).collect::<colo_grpo::Result<Vec<_>>>()?;
        let preempted = session.load().num_preemptions;
        session.close()?;
        Ok((complete, preempted))
    });
    complete.unwrap()
}

#[test]
fn memory_owners_are_listed_while_the_engine_is_awake() {
    let world = Arc::new(World::single());
    let spec = Arc::new(ModelSpec { vocab_size: 96, ..ModelSpec::preset("micro").unwrap() });
    let mut served = served(&world, &spec, options());
    let missing = || Error::OutOfMemory { owner: "a test".to_owned(), requested_bytes: 7 };
    let message = served.with_engine(|_| Err::<(), _>(missing())).unwrap_err().to_string();
    assert!(message.contains("a test (held: ") && message.contains("kv_cache "), "{message}");
}

#[test]
fn requests_of_one_batch_use_their_own_adapters() {
    tch::set_num_threads(1);
    compare(World::single(), "micro", options());
}

/// Samples the same prompts with equal random keys, with the base model and with each adapter. There are so few KV blocks that some
/// sequences are preempted.
pub fn compare(world: World, preset: &str, options: EngineOptions) {
    let spec = ModelSpec { vocab_size: 96, eos_token_ids: Vec::new(), ..ModelSpec::preset(preset).unwrap() };
    let spec = Arc::new(spec);
    let world = Arc::new(world);
    let params = Arc::new(SamplingParams { num_generations: 2, ..sampled() });
    let request = |prompt: &colo_grpo::internal::types::Prompt, adapter| Request {
        prompt_id: prompt.id,
        token_ids: prompt.token_ids.clone(),
        first_step: 0,
        first_sample: 0,
        params: params.clone(),
        begun: Vec::new(),
        adapter,
    };
    let (prompts, choices) = (prompts(4), [None, Some(0), Some(1)]);
    let kv_cache_bytes = 24 * 8 / options.block_size * kv_block_bytes(&spec, 1, options.block_size, Kind::Float);
    let few = EngineOptions { kv_cache_bytes, max_num_batched_tokens: 30, ..options.clone() };
    let mut all = served(&world, &spec, few);
    for number in 0..2 {
        all = all.with_choice(lora(number), &|layout| adapter_unit(number, layout)).unwrap();
    }
    let mixed = prompts.iter().flat_map(|prompt| choices.map(|adapter| request(prompt, adapter)));
    let (mixed, preempted) = completions(&mut all, mixed.collect());
    assert!(preempted > 0 || world.device() != Device::Cpu, "all fit"); // a GPU's memory comes in larger pieces
    let (mut tokens, mut far_off) = (Vec::new(), Vec::new());
    // Batches of other sizes add up in other orders: on a GPU 3 of 480 were off by 1e-4 to 3e-4. Another adapter samples other tokens.
    let most = if world.device() == Device::Cpu { 1e-4 } else { 1e-3 };
    for (place, choice) in choices.into_iter().enumerate() {
        let mut own = served(&world, &spec, options.clone());
        if let Some(number) = choice {
            own = own.with_adapters(lora(number), &|layout| adapter_unit(number, layout)).unwrap();
        }
        let expected = prompts.iter().map(|prompt| request(prompt, None)).collect();
        let (expected, _) = completions(&mut own, expected);
        for (got, expected) in mixed.iter().skip(place).step_by(choices.len()).zip(&expected) {
            for (got, expected) in got.iter().zip(expected) {
                assert_eq!(got.token_ids, expected.token_ids, "{choice:?}");
                let logprobs = got.rollout_logprobs.iter().zip(&expected.rollout_logprobs);
                let far = logprobs.enumerate().filter(|(_, (a, b))| (*a - *b).abs() >= most);
                far_off.extend(far.map(|(token, (a, b))| format!("{choice:?}, token {token}: {a} for {b}")));
            }
        }
        tokens.push(expected);
    }
    assert!(far_off.is_empty(), "{far_off:?}");
    assert!(tokens[0] != tokens[1] && tokens[0] != tokens[2] && tokens[1] != tokens[2], "adapters that change nothing");
    let unknown = all.with_engine(|rollout| rollout.session()?.submit(request(&prompts[0], Some(2))).map(drop));
    assert!(unknown.unwrap_err().to_string().contains("one of 2 adapters"));
}
