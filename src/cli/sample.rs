//! `generate` and `eval`: sampling from a model folder.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use tch::Kind;

use super::args::{EvalArgs, GenerateArgs, GenerationArgs, SamplingArgs, SourceArgs};
use super::evaluation::Evaluation;
use super::process::print_first;
use crate::config::{Config, EngineShape};
use crate::console::{self, Progress, rows_progress};
use crate::cuda::residual_kind;
use crate::data::{Dataset, DatasetOptions, Message, Tokenizer, TurnModel};
use crate::error::{Error, Result};
use crate::eval::{self, Estimate};
use crate::memory;
use crate::metrics::{StepMetrics, gather_completions, write_completions};
use crate::model::ModelSource;
use crate::phase::{self, Fault, Phase};
use crate::ranks::{World, all_gather_json, first_text};
use crate::rollout::SampledGroups;
use crate::serve::{ModelService, NamedAdapter, SamplingDefaults, ServeOptions};
use crate::tools::ToolProcess;
use crate::trainer::{self, RunTurns};
use crate::types::{Prompt, RolloutGroup, Trajectory};

/// Runs `generate`; collective over the world.
pub(super) fn generate(args: &GenerateArgs, world: Arc<World>, kind: Kind) -> Result<()> {
    let kinds = (kind, residual_kind(args.residual.residual_dtype, kind));
    let defaults = own_sampling(&args.generation, &args.source, &world)?;
    let ModelService { mut served, tokenizer, max_model_length, .. } =
        serve((&args.source, &[]), &args.sampling, &Map::new(), &world, kinds)?;
    let prompts: Vec<Prompt> = (args.prompt.iter().enumerate().skip(world.rank()).step_by(world.size()))
        .map(|(index, text)| prompt(args, &tokenizer, max_model_length, index, text))
        .collect::<Result<_>>()?;
    let params = args.sampling.params(args.n, &defaults);
    let (progress, mut num_done) = (Progress::new("generate", "prompts").without_lines(), 0);
    progress.tell(num_done, prompts.len() as u64);
    let completed = |_: &RolloutGroup| {
        num_done += 1;
        progress.tell(num_done, prompts.len() as u64);
    };
    let groups = served
        .with_engine(|rollout| phase::scope(Phase::Generate, || rollout.generate(&prompts, &params, completed)))?;
    let own: Vec<(u64, String)> = groups.iter().map(|group| (group.prompt.id, lines(group))).collect();
    let of_ranks: Vec<Vec<(u64, String)>> = all_gather_json(&*world.group(), "gather completions", &own)?;
    let mut all = of_ranks.concat();
    all.sort(); // as the prompts were given
    if world.rank() == 0 {
        all.iter().try_for_each(|(_, lines)| console::print(lines))?;
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
        let expected = format!("1 to {} tokens (one less than the context length), got {length}", max_model_length - 1);
        Error::invalid_value("--prompt", format!("'{}'", text.chars().take(80).collect::<String>()), expected)
    };
    if text.len() > tokenizer.max_bytes(max_model_length) {
        return Err(too_long(&format!("{} bytes", text.len())));
    }
    let text = match args.chat {
        true => {
            let system = args.system_prompt.iter().map(|text| Message::new("system", text));
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
    let line = |completion: &Trajectory| {
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

/// Runs `eval`; collective over the world.
pub(super) fn evaluate(args: &EvalArgs, evaluation: Evaluation, world: Arc<World>, kind: Kind) -> Result<()> {
    let kinds = (kind, residual_kind(args.residual.residual_dtype, kind));
    let limits = SamplingArgs { max_model_length: evaluation.max_model_length, ..args.sampling.clone() };
    let ModelService { mut served, tokenizer, max_model_length, eos_token_ids } =
        serve((&args.source, &[]), &limits, &evaluation.variables, &world, kinds)?;
    let options = DatasetOptions { max_model_length: Some(max_model_length), ..evaluation.dataset.clone() };
    let mut told = rows_progress("load");
    let read = || Dataset::read_with(&evaluation.rows.sources, &tokenizer, &options, &mut told);
    let dataset = phase::scope(Phase::Load, read)?;
    if world.rank() == 0 {
        dataset.counts().notices().iter().for_each(console::say);
    }
    evaluation.rewards.check_columns(&args.rows(), dataset.prompts())?;
    let notice = eval::unreadable_notice(&args.rows(), &dataset, &evaluation.rewards, &world)?;
    notice.filter(|_| world.rank() == 0).iter().for_each(console::say);
    let were_chosen = args.config.is_none(); // by --reward
    let doubt = evaluation.rewards.doubt_of_solving(&evaluation.solved_by, were_chosen);
    if let Some(doubt) = doubt.filter(|_| world.rank() == 0) {
        console::say(format_args!("warning: {doubt}"));
    }
    let prompts = eval::share_of(&dataset, &world);
    let answer_of = evaluation.answer_reader()?;
    let Evaluation { mut rewards, solved_by, params, tools, .. } = evaluation;
    let model = TurnModel { tokenizer: Arc::clone(&tokenizer), eos_token_ids, max_model_length };
    let mut turns = tools.map(|tools| turns(tools, args, &world, options, &model)).transpose()?;
    let (progress, mut num_done) = (Progress::new("eval", "problems"), 0);
    progress.tell(num_done, prompts.len() as u64);
    let submit = |group: &RolloutGroup| {
        let ticket = rewards.submit(group);
        num_done += 1;
        progress.tell(num_done, prompts.len() as u64);
        ticket
    };
    let sampled = served.with_engine(|rollout| {
        phase::scope(Phase::Generate, || trainer::generate(turns.as_mut(), rollout, &prompts, &params, submit))
    })?;
    let SampledGroups { complete: mut groups, done: tickets, open: _ } = sampled; // none is: all prompts were awaited
    phase::scope(Phase::Reward, || rewards.wait(&mut groups, &tickets))?;
    if let Some(path) = &args.output {
        let rows =
            gather_completions(0, rewards.names(), &groups, turns.is_some().then_some(&*tokenizer), &*world.group())?;
        world.agree(if world.rank() == 0 { write_completions(path, rewards.names(), &rows) } else { Ok(()) })?;
    }
    let outcome = eval::EvalOutcome::of(&groups, &solved_by, &*world.group())?;
    let lost = turns.as_mut().and_then(RunTurns::take_loss);
    let cause = first_text(&*world.group(), rewards.take_cause().or(lost))?;
    if outcome.reward.count == 0.0 {
        let message = cause.unwrap_or_else(|| format!("{} applies to no sample", rewards.names().join(", ")));
        return Err(Error::NoScore { place: format!("of {}", args.rows()), message });
    }
    let (num_samples, num_scored) = (outcome.lengths.count, outcome.reward.count);
    if let Some(cause) = cause.filter(|_| num_scored < num_samples && world.rank() == 0) {
        let num_failed = num_samples - num_scored;
        console::say(format_args!("warning: {num_failed} of {num_samples} samples have no reward: {cause}"));
    }
    let average = Estimate::of(&outcome.problems);
    if average.mean == 0.0 && world.rank() == 0 {
        let pattern = if args.config.is_some() { "reward.answer_pattern" } else { "--answer_pattern" };
        console::say(format_args!(
            "warning: no sample was solved; check that {pattern} matches the format of the model's answers"
        ));
    }
    let pass: serde_json::Map<_, _> =
        outcome.pass.iter().map(|(k, stats)| (format!("pass@{k}"), json!(Estimate::of(stats)))).collect();
    let n = params.num_generations;
    let mut line = json!({
        "model": args.source.model.display().to_string(),
        "problems": outcome.problems.count as u64,
        "prompts_over_context": dataset.counts().over_context,
        "n": n,
        "solved_by": solved_by.iter().map(|&index| &rewards.names()[index]).collect::<Vec<_>>(),
    });
    line[format!("avg@{n}")] = json!(average);
    line.as_object_mut().expect("made as an object").extend(pass);
    if let Some(answer_of) = answer_of {
        let majority = eval::majority(&groups, &solved_by, &answer_of, &*world.group())?;
        line[format!("maj@{n}")] = json!(Estimate::of(&majority));
    }
    if let Some(turns) = &mut turns {
        let mut metrics = StepMetrics::default();
        turns.add_metrics(&mut metrics);
        let values = metrics.reduce(&*world.group())?;
        line.as_object_mut()
            .expect("made as an object")
            .extend(values.into_iter().map(|(name, value)| (name, json!(value))));
    }
    print_first(&world, line)
}

/// The tools or the agent of a run's configuration for the engine of `eval`; collective over the world.
fn turns(
    (config, process): (Config, ToolProcess),
    args: &EvalArgs,
    world: &World,
    options: DatasetOptions,
    model: &TurnModel,
) -> Result<RunTurns> {
    let EngineShape { tensor_parallel_size, pipeline_parallel_size } = args.sampling.engine_shape();
    let config = Config { tensor_parallel_size, pipeline_parallel_size, ..config };
    RunTurns::new(&config, world, world.size(), process, options, model)
}

/// The model's own sampling parameters, if they are to be used; prints them.
pub(super) fn own_sampling(
    generation: &GenerationArgs,
    source: &SourceArgs,
    world: &World,
) -> Result<SamplingDefaults> {
    let (defaults, told) = generation.defaults(&ModelSource::new(&source.model, source.base_model.as_deref())?)?;
    told.filter(|_| world.rank() == 0).iter().for_each(console::say);
    Ok(defaults)
}

/// Loads the model for `generate`, `eval` and `chat`.
pub(super) fn serve(
    (args, adapters): (&SourceArgs, &[NamedAdapter]),
    sampling: &SamplingArgs,
    variables: &Map<String, Value>,
    world: &Arc<World>,
    kinds: (Kind, Kind),
) -> Result<ModelService> {
    let options = ServeOptions {
        model: &args.model,
        base_model: args.base_model.as_deref(),
        adapters,
        quantization: args.quantization,
        template_variables: variables,
        division: sampling.division(),
        max_model_length: sampling.max_model_length,
        kind: kinds.0,
        residual: kinds.1,
        formats: sampling.formats.formats(),
        speculation: sampling.speculation.options(),
    };
    load(&options, sampling.supervision.fault.clone(), world)
}

/// Loads a model for sampling, with a fault injected by tests; collective over the world.
pub(super) fn load(options: &ServeOptions<'_>, fault: Option<Fault>, world: &Arc<World>) -> Result<ModelService> {
    let device = world.device();
    phase::on_fill(move |left_bytes| memory::fill(device, left_bytes));
    phase::arm_fault(fault, world.rank());
    phase::scope(Phase::Load, || ModelService::load(options, world))
}
