//! `generate` and `eval`: what samples from a model folder.

use std::sync::Arc;

use serde_json::json;
use tch::Kind;

use super::args::{EvalArgs, GenerateArgs, SamplingArgs, SourceArgs};
use super::process::print_first;
use crate::config::RewardConfig;
use crate::cuda::{self, residual_kind};
use crate::data::{Dataset, DatasetOptions, Message, Tokenizer};
use crate::dist::{World, all_gather_json, first_text};
use crate::error::{Error, Result};
use crate::eval::{self, Estimate};
use crate::memory;
use crate::model::{AdapterFiles, ModelSource, ModelSpec, ParamTable, UnitLayout, WeightFiles};
use crate::phase::{self, Phase, terminal};
use crate::reward::{self, RewardPool};
use crate::rollout::{Engine, EngineOptions, kv_block_bytes};
use crate::serve::Served;
use crate::types::{Completion, Prompt, RolloutGroup, SamplingParams};

/// Tokens per KV block of `generate` and `eval`.
const KV_BLOCK_SIZE: usize = 16;
/// The only reward of `eval` decides.
const SOLVED_BY: [usize; 1] = [0];
/// Most sequences that `generate` and `eval` decode at once.
const MAX_NUM_SEQS: usize = 256;

/// `generate`; collective over the world.
pub(super) fn generate(args: &GenerateArgs, world: Arc<World>, kind: Kind) -> Result<()> {
    let kinds = (kind, residual_kind(args.residual.residual_dtype, kind));
    let Service { mut served, tokenizer, max_model_length } = serve(&args.source, &args.sampling, &world, kinds)?;
    let prompts: Vec<Prompt> = (args.prompt.iter().enumerate().skip(world.rank()).step_by(world.size()))
        .map(|(index, text)| prompt(args, &tokenizer, max_model_length, index, text))
        .collect::<Result<_>>()?;
    let params = sampling(&args.sampling, args.n);
    let groups =
        served.with_engine(|rollout| phase::scope(Phase::Generate, || rollout.generate(&prompts, &params, |_| ())))?;
    let own: Vec<(u64, String)> = groups.iter().map(|group| (group.prompt.id, lines(group))).collect();
    let of_ranks: Vec<Vec<(u64, String)>> = all_gather_json(&*world.group(), "gather completions", &own)?;
    let mut all = of_ranks.concat();
    all.sort(); // as the prompts were given
    if world.rank() == 0 {
        all.iter().try_for_each(|(_, lines)| terminal::print(lines))?;
    }
    Ok(())
}

fn prompt(
    args: &GenerateArgs,
    tokenizer: &Tokenizer,
    max_model_length: usize,
    index: usize,
    text: &str,
) -> Result<Prompt> {
    let too_long = |length: &str| {
        let expected = format!("1 to {} tokens (the context less one), not {length}", max_model_length - 1);
        Error::invalid_value("--prompt", format!("'{}'", text.chars().take(80).collect::<String>()), expected)
    };
    if text.len() > tokenizer.max_bytes(max_model_length) {
        return Err(too_long(&format!("{} bytes", text.len())));
    }
    let text = match args.chat {
        true => {
            let system = args.system_prompt.iter().map(|text| Message { role: "system".into(), content: text.clone() });
            tokenizer.apply_chat_template(&system.chain([Message::user(text)]).collect::<Vec<_>>(), true)?
        }
        false => text.to_owned(),
    };
    let token_ids = tokenizer.encode(&text, !args.chat)?;
    if token_ids.is_empty() || token_ids.len() >= max_model_length {
        return Err(too_long(&token_ids.len().to_string()));
    }
    Ok(Prompt { id: index as u64, text, token_ids, columns: Arc::default() })
}

/// One JSON line per completion.
fn lines(group: &RolloutGroup) -> String {
    let line = |completion: &Completion| {
        let line = json!({
            "prompt": group.prompt.text,
            "completion": completion.text,
            "num_tokens": completion.token_ids.len(),
            "finish_reason": completion.finish_reason,
            "logprob": completion.rollout_logprobs.iter().sum::<f32>(),
        });
        format!("{line}\n")
    };
    group.completions.iter().map(line).collect()
}

/// `eval`; collective over the world.
pub(super) fn evaluate(args: &EvalArgs, settings: &RewardConfig, world: Arc<World>, kind: Kind) -> Result<()> {
    let mut rewards = RewardPool::single("--reward", &args.reward, settings)?;
    phase::scope(Phase::Load, || rewards.start())?;
    let kinds = (kind, residual_kind(args.residual.residual_dtype, kind));
    let Service { mut served, tokenizer, max_model_length } = serve(&args.source, &args.sampling, &world, kinds)?;
    let options = DatasetOptions {
        required_columns: rewards.required_columns(),
        max_model_length: Some(max_model_length),
        max_completion_length: 1, // shorter ones are cut by the context and count as they are
        system_prompt: args.system_prompt.clone(),
        prompt_format: args.prompt_format,
        ..DatasetOptions::default()
    };
    let dataset = phase::scope(Phase::Load, || Dataset::from_file(&args.data, &tokenizer, &options))?;
    if world.rank() == 0 {
        dataset.counts().notices().iter().for_each(terminal::say);
    }
    let notice = eval::unreadable_notice(&args.data.display().to_string(), &dataset, &rewards, &world)?;
    notice.filter(|_| world.rank() == 0).iter().for_each(terminal::say);
    let prompts = eval::share_of(&dataset, &world);
    let params = SamplingParams { step: eval::SAMPLING_STEP, ..sampling(&args.sampling, args.n) };
    let mut groups = served.with_engine(|rollout| {
        phase::scope(Phase::Generate, || rollout.generate(&prompts, &params, |done| rewards.submit(done)))
    })?;
    phase::scope(Phase::Reward, || rewards.wait(&mut groups))?;
    let outcome = eval::Outcome::of(&groups, &SOLVED_BY, &*world.group())?;
    let cause = first_text(&*world.group(), rewards.take_cause())?;
    if outcome.reward.count == 0.0 {
        let message = cause.unwrap_or_else(|| format!("{} applies to none", args.reward));
        return Err(Error::NoScore { place: format!("of {}", args.data.display()), message });
    }
    let average = Estimate::of(&outcome.problems);
    if average.mean == 0.0 && world.rank() == 0 {
        terminal::say("warning: no sample was right; does --answer_pattern fit what the model writes?");
    }
    let pass: serde_json::Map<_, _> =
        outcome.pass.iter().map(|(k, stats)| (format!("pass@{k}"), json!(Estimate::of(stats)))).collect();
    let mut line = json!({
        "model": args.source.model.display().to_string(),
        "problems": outcome.problems.count as u64,
        "prompts_over_context": dataset.counts().over_context,
        "n": args.n,
        "solved_by": rewards.names(),
    });
    line[format!("avg@{}", args.n)] = json!(average);
    line.as_object_mut().expect("made as an object").extend(pass);
    if let Some(answer_of) = reward::answer_reader(&args.reward, settings)? {
        let majority = eval::majority(&groups, &SOLVED_BY, &answer_of, &*world.group())?;
        line[format!("maj@{}", args.n)] = json!(Estimate::of(&majority));
    }
    print_first(&world, line)
}

/// What `generate` and `eval` sample from.
struct Service {
    served: Served,
    tokenizer: Arc<Tokenizer>,
    max_model_length: usize,
}

/// An engine with the weights of a model folder, or of adapters and their base.
fn serve(args: &SourceArgs, sampling: &SamplingArgs, world: &Arc<World>, kinds: (Kind, Kind)) -> Result<Service> {
    let device = world.device();
    phase::on_fill(move |left_bytes| memory::fill(device, left_bytes));
    phase::arm_fault(sampling.fault.clone(), world.rank());
    phase::scope(Phase::Load, || load(args, sampling, world, kinds))
}

fn load(
    args: &SourceArgs,
    sampling: &SamplingArgs,
    world: &Arc<World>,
    (kind, residual): (Kind, Kind),
) -> Result<Service> {
    let source = ModelSource::new(&args.model, args.base_model.as_deref())?;
    let folder = &source.base;
    let spec = Arc::new(ModelSpec::from_folder(folder)?);
    let tp_size = sampling.tensor_parallel_size;
    spec.validate_tp(tp_size)?;
    let tokenizer = Arc::new(Tokenizer::from_folder(folder)?);
    tokenizer.check_against(spec.vocab_size, &spec.eos_token_ids)?;
    let mesh = world.mesh(tp_size, world.size())?;
    let device = world.device();
    let max_model_length = sampling.max_model_length.unwrap_or(usize::MAX).min(spec.max_position_embeddings);
    let longest_blocks = max_model_length.div_ceil(KV_BLOCK_SIZE);
    let available = match device.is_cuda() {
        true => cuda::available_bytes()?.saturating_sub(spec.num_params() * kind.elt_size_in_bytes()),
        false => memory::available_host_bytes()? / world.local_size(),
    };
    let block_bytes = kv_block_bytes(&spec, tp_size, KV_BLOCK_SIZE, kind);
    let options = EngineOptions {
        kv_cache_bytes: (MAX_NUM_SEQS * longest_blocks * block_bytes).min(available / 4),
        block_size: KV_BLOCK_SIZE,
        max_num_seqs: MAX_NUM_SEQS,
        max_num_batched_tokens: 8192,
        max_model_length,
        kind,
        residual,
        device,
        strict: false,
    };
    let engine = Engine::new(spec.clone(), tokenizer.clone(), options, mesh.tp.clone())?;
    let files = WeightFiles::open(folder, spec.clone())?;
    let table = Arc::new(ParamTable::new(spec.clone(), 1));
    let read = |layout: &UnitLayout| {
        phase::beat();
        files.read_unit(layout, kind)
    };
    let mut served = Served::new(world.clone(), &mesh, table, engine, &read)?;
    if let Some(folder) = &source.adapters {
        let files = AdapterFiles::open(folder, spec)?;
        served = served.with_adapters(files.lora().clone(), &|layout| files.read_unit(layout, kind))?;
    }
    Ok(Service { served, tokenizer, max_model_length })
}

fn sampling(args: &SamplingArgs, n: usize) -> SamplingParams {
    SamplingParams {
        num_generations: n,
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        min_p: Some(args.min_p).filter(|least| *least > 0.0),
        stop: args.stop.clone(),
        max_completion_length: args.max_completion_length,
        spread_lengths: None,
        seed: args.seed,
        ..SamplingParams::default()
    }
}
