//! What each subcommand does, on top of the rooms below.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tch::Kind;

use super::args::{
    BenchCommand, BenchGenerateArgs, BenchKernelsArgs, BenchStepArgs, BenchTrainArgs, Command, EvalArgs, ExportArgs,
    GenerateArgs, InitArgs, LaunchArgs, ModelArgs, PlaceArgs, RunArgs, SamplingArgs, SourceArgs,
};
use crate::bench::{
    CollectivesBench, GenerateBench, KernelsBench, SleepWakeBench, StepBench, TrainBench, bench_collectives,
    bench_generate, bench_kernels, bench_sleep_wake, bench_step, bench_train, compare,
};
use crate::colocate::Served;
use crate::config::{Config, HeartbeatConfig, Quantization, SftConfig};
use crate::cuda::{self, Placement};
use crate::data::{Dataset, DatasetOptions, Message, Tokenizer};
use crate::dist::{Backend, WorkerEnv, World, WorldOptions, all_gather_bytes};
use crate::error::{Error, ExitCode, Result, panic_message};
use crate::eval::{self, Estimate};
use crate::launch::{self, LaunchOptions};
use crate::memory;
use crate::metrics;
use crate::model::{
    AdapterFiles, ModelSource, ModelSpec, PRESETS, ParamTable, UnitLayout, WeightFiles, export_folder, init_folder,
};
use crate::phase::{self, Limits, Phase};
use crate::plan::Room;
use crate::reward::{self, RewardPool};
use crate::rollout::{Engine, EngineOptions, kv_block_bytes};
use crate::sft::Sft;
use crate::train::GradientOptions;
use crate::trainer::{Preflight, Trainer};
use crate::types::{Completion, Prompt, RolloutGroup, SamplingParams};

/// Tokens per KV block of `generate` and `eval`.
const KV_BLOCK_SIZE: usize = 16;
/// Most sequences that `generate` and `eval` decode at once.
const MAX_NUM_SEQS: usize = 256;

/// Runs one command to its exit code.
pub(super) fn dispatch(command: Command) -> Result<ExitCode> {
    match command {
        Command::Train(args) => train(&args),
        Command::Sft(args) => sft(&args),
        Command::Plan(args) => plan(&args),
        Command::Generate(args) => {
            placed(&args.launch, args.place, (&args.sampling).into(), |world, kind| generate(&args, world, kind))
        }
        Command::Eval(args) => {
            placed(&args.launch, args.place, (&args.sampling).into(), |world, kind| evaluate(&args, world, kind))
        }
        Command::Init(args) => init(&args),
        Command::Export(args) => export(&args),
        Command::Report(args) => {
            println!("{}", metrics::write_report(&args.output_dir)?.display());
            Ok(ExitCode::Done)
        }
        Command::SandboxWorker { settings } => reward::code::serve(&settings).map(|()| ExitCode::Done),
        Command::Bench(BenchCommand::Train(args)) => {
            bench(&args.launch, args.place, |world, kind| print_first(&world, train_bench(&args, &world, kind)?))
        }
        Command::Bench(BenchCommand::Generate(args)) => bench(&args.launch, args.place, |world, kind| {
            let result = generate_bench(&args, world.clone(), kind)?;
            print_first(&world, result)
        }),
        Command::Bench(BenchCommand::Kernels(args)) => kernels_bench(&args),
        Command::Bench(BenchCommand::Step(args)) => step_bench(&args),
        Command::Bench(BenchCommand::SleepWake(args)) => bench(&args.launch, args.place, |world, _| {
            let bytes = |gib: f64| (gib * f64::from(1 << 30)) as usize;
            let (bytes, offload_bytes) = (bytes(args.gib), bytes(args.offload_gib));
            let result = bench_sleep_wake(&SleepWakeBench { bytes, offload_bytes, cycles: args.cycles }, &world)?;
            print_first(&world, result)
        }),
        Command::Bench(BenchCommand::Compare(args)) => {
            print!("{}", compare(&args.results, &args.output, &args.curves)?);
            Ok(ExitCode::Done)
        }
        Command::Bench(BenchCommand::Collectives(args)) => bench(&args.launch, args.place, |world, _| {
            let result = bench_collectives(&CollectivesBench { max_bytes: args.max_mib << 20 }, &world)?;
            print_first(&world, result)
        }),
    }
}

fn train(args: &RunArgs) -> Result<ExitCode> {
    let config = Config::load(args.config.as_deref(), &args.overrides)?;
    let placement = Placement::new(config.device, config.dtype)?;
    if WorkerEnv::from_env()?.is_none() {
        preflight(&config, placement, args.launch.nproc)?;
        RewardPool::new(&config)?;
    }
    let watch = Supervision {
        max_restarts: config.max_restarts,
        output_dir: Some(config.output_dir.clone()),
        ..Supervision::new(config.collective_timeout_s, &config.heartbeat)
    };
    let start_rewards = || RewardPool::new(&config).and_then(|rewards| rewards.start().map(|()| rewards));
    prepared(&args.launch, watch, placement.on_cuda, start_rewards, |world, rewards| {
        let summary = Trainer::with_pool(config.clone(), world.clone(), rewards)?.run()?;
        if world.rank() == 0 {
            if let (Some(before), Some(after)) = (summary.eval_reward_before, summary.eval_reward_after) {
                println!("held-out mean reward: {before:.3} before, {after:.3} after");
            }
            println!("model: {}", summary.model_dir.display());
            if let Some(report) = summary.report {
                println!("report: {}", report.display());
            }
        }
        Ok(())
    })
}

fn sft(args: &RunArgs) -> Result<ExitCode> {
    let config = SftConfig::load(args.config.as_deref(), &args.overrides)?;
    let watch = Supervision::new(config.collective_timeout_s, &config.heartbeat);
    distributed(&args.launch, watch, Placement::new(config.device, config.dtype)?.on_cuda, |world| {
        let summary = Sft::new(config, world.clone())?.run()?;
        if world.rank() == 0 {
            let held_out = summary.eval_loss.map(|loss| format!(", held-out {loss:.4}")).unwrap_or_default();
            println!("loss: {:.4}{held_out}", summary.loss);
            println!("model: {}", summary.model_dir.display());
        }
        Ok(())
    })
}

fn plan(args: &RunArgs) -> Result<ExitCode> {
    let config = Config::load(args.config.as_deref(), &args.overrides)?;
    let placement = Placement::new(config.device, config.dtype)?;
    println!("{}", preflight(&config, placement, args.launch.nproc)?);
    Ok(ExitCode::Done)
}

/// What can be checked before any process starts.
fn preflight(config: &Config, placement: Placement, nproc: usize) -> Result<Preflight> {
    Preflight::new(config, placement, nproc, Room::available(placement, nproc)?)
}

fn init(args: &InitArgs) -> Result<ExitCode> {
    if args.output.join("config.json").exists() && !args.overwrite {
        let expected = "a folder without a model, or --overwrite";
        return Err(Error::invalid_value("--output", args.output.display(), expected));
    }
    let spec = Arc::new(spec_of(&args.model)?);
    init_folder(&spec, &args.output, args.seed, args.tokenizer.as_deref())?;
    println!("{}: {} parameters", args.output.display(), spec.num_params());
    Ok(ExitCode::Done)
}

fn export(args: &ExportArgs) -> Result<ExitCode> {
    if args.output.join("config.json").exists() || args.output.join("adapter_config.json").exists() {
        let expected = "a folder without a model or adapters";
        return Err(Error::invalid_value("--output", args.output.display(), expected));
    }
    let source = ModelSource::new(&args.source.model, args.source.base_model.as_deref())?;
    export_folder(&source, &args.output, args.merge)?;
    println!("{}", args.output.display());
    Ok(ExitCode::Done)
}

fn generate(args: &GenerateArgs, world: Arc<World>, kind: Kind) -> Result<()> {
    let Service { mut served, tokenizer, max_model_length } = serve(&args.source, &args.sampling, &world, kind)?;
    let prompts: Vec<Prompt> = (args.prompt.iter().enumerate().skip(world.rank()).step_by(world.size()))
        .map(|(index, text)| prompt(args, &tokenizer, max_model_length, index, text))
        .collect::<Result<_>>()?;
    let params = sampling(&args.sampling, args.n);
    let groups =
        served.with_engine(|rollout| phase::scope(Phase::Generate, || rollout.generate(&prompts, &params, |_| ())))?;
    let own: Vec<(u64, String)> = groups.iter().map(|group| (group.prompt.id, lines(group))).collect();
    let own = serde_json::to_vec(&own).expect("numbers and text");
    let mut all: Vec<(u64, String)> = all_gather_bytes(&*world.group(), &own)?
        .iter()
        .flat_map(|bytes| serde_json::from_slice::<Vec<_>>(bytes).expect("written above"))
        .collect();
    all.sort(); // as the prompts were given
    if world.rank() == 0 {
        all.iter().for_each(|(_, lines)| print!("{lines}"));
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
    let text = match args.chat {
        true => tokenizer.apply_chat_template(&[Message::user(text)], true)?,
        false => text.to_owned(),
    };
    let token_ids = tokenizer.encode(&text, !args.chat)?;
    if token_ids.is_empty() || token_ids.len() >= max_model_length {
        let expected = format!("1 to {} tokens (the context less one), not {}", max_model_length - 1, token_ids.len());
        return Err(Error::invalid_value("--prompt", format!("'{text}'"), expected));
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

fn evaluate(args: &EvalArgs, world: Arc<World>, kind: Kind) -> Result<()> {
    let Service { mut served, tokenizer, max_model_length } = serve(&args.source, &args.sampling, &world, kind)?;
    let mut rewards = RewardPool::single(&args.reward, &args.reward_config())?;
    let options = DatasetOptions {
        required_columns: rewards.required_columns(),
        max_model_length: Some(max_model_length),
        max_completion_length: 1, // shorter ones are cut by the context and count as they are
        ..DatasetOptions::default()
    };
    let dataset = phase::scope(Phase::Load, || Dataset::from_jsonl(&args.data, &tokenizer, &options))?;
    let prompts = eval::share_of(&dataset, &world);
    let params = SamplingParams { step: eval::SAMPLING_STEP, ..sampling(&args.sampling, args.n) };
    let mut groups = served.with_engine(|rollout| {
        phase::scope(Phase::Generate, || rollout.generate(&prompts, &params, |done| rewards.submit(done)))
    })?;
    phase::scope(Phase::Reward, || rewards.wait(&mut groups))?;
    let outcome = eval::Outcome::of(&groups, &*world.group())?;
    let average = Estimate::of(&outcome.problems);
    if average.mean == 0.0 && world.rank() == 0 {
        eprintln!("warning: no sample was right; does --answer_pattern fit what the model writes?");
    }
    let pass: serde_json::Map<_, _> =
        outcome.pass.iter().map(|(k, stats)| (format!("pass@{k}"), json!(Estimate::of(stats)))).collect();
    let mut line = json!({
        "model": args.source.model.display().to_string(),
        "problems": outcome.problems.count as u64,
        "prompts_over_context": dataset.counts().over_context,
        "n": args.n,
    });
    line[format!("avg@{}", args.n)] = json!(average);
    line.as_object_mut().expect("made as an object").extend(pass);
    if let Some(answer_of) = reward::answer_reader(&args.reward, &args.reward_config())? {
        let majority = eval::majority(&groups, &answer_of, &*world.group())?;
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
fn serve(args: &SourceArgs, sampling: &SamplingArgs, world: &Arc<World>, kind: Kind) -> Result<Service> {
    phase::arm_fault(sampling.fault.clone(), world.rank());
    phase::scope(Phase::Load, || load(args, sampling, world, kind))
}

fn load(args: &SourceArgs, sampling: &SamplingArgs, world: &Arc<World>, kind: Kind) -> Result<Service> {
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
        served = served.with_adapters(&AdapterFiles::open(folder, spec)?)?;
    }
    Ok(Service { served, tokenizer, max_model_length })
}

fn sampling(args: &SamplingArgs, n: usize) -> SamplingParams {
    SamplingParams {
        num_generations: n,
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        max_completion_length: args.max_completion_length,
        spread_lengths: None,
        seed: args.seed,
        ..SamplingParams::default()
    }
}

fn train_bench(args: &BenchTrainArgs, world: &World, kind: Kind) -> Result<serde_json::Value> {
    if args.quantization != Quantization::None && args.lora_r.is_none() {
        let expected = "none, or --lora_r: a quantised base is frozen";
        return Err(Error::invalid_value("--quantization", args.quantization.name(), expected));
    }
    let mut spec = spec_of(&args.model)?;
    spec.num_layers = args.layers.unwrap_or(spec.num_layers);
    let bench = TrainBench {
        model: args.model.name(),
        spec: Arc::new(spec),
        kind,
        sequences: args.sequences,
        prompt_len: args.prompt_len.unwrap_or(args.sequence_len / 2),
        completion_len: args.completion_len.unwrap_or(args.sequence_len.div_ceil(2)),
        completion_spread: args.completion_spread,
        group: args.group,
        share_prompts: args.share_prompts,
        max_tokens_per_micro_batch: args.max_tokens_per_micro_batch,
        zero_stage: args.zero_stage,
        shard_group_size: args.shard_group_size,
        gradients: GradientOptions::new(args.grad_accum_dtype, args.reduce_dtype),
        lora_r: args.lora_r,
        quantization: args.quantization,
        gradient_checkpointing: args.gradient_checkpointing,
        score: args.score,
        profile: args.profile,
        steps: args.steps,
    };
    bench_train(&bench, world)
}

fn generate_bench(args: &BenchGenerateArgs, world: Arc<World>, kind: Kind) -> Result<serde_json::Value> {
    let bench = GenerateBench {
        model: args.model.name(),
        spec: Arc::new(spec_of(&args.model)?),
        kind,
        prompts: args.prompts,
        group: args.group,
        prompt_len: args.prompt_len,
        completion_len: args.completion_len,
        completion_spread: args.completion_spread,
        max_num_seqs: args.max_num_seqs,
        strict: args.strict,
        profile: args.profile,
        tensor_parallel_size: args.tensor_parallel_size,
        repeats: args.repeats,
    };
    bench_generate(&bench, world)
}

fn kernels_bench(args: &BenchKernelsArgs) -> Result<ExitCode> {
    let Placement { on_cuda, kind } = Placement::new(args.place.device, args.place.dtype)?;
    let bench = KernelsBench {
        model: args.model.name(),
        spec: Arc::new(spec_of(&args.model)?),
        kind,
        rows: args.rows,
        context: args.context,
        group: args.group,
        prompt_len: args.prompt_len,
    };
    let device = if on_cuda { tch::Device::Cuda(0) } else { tch::Device::Cpu };
    bench_kernels(&bench, device)?.iter().for_each(|result| println!("{result}"));
    Ok(ExitCode::Done)
}

fn step_bench(args: &BenchStepArgs) -> Result<ExitCode> {
    let bench = StepBench {
        model: args.model.name(),
        spec: Arc::new(spec_of(&args.model)?),
        prompts: args.prompts,
        group: args.group,
        prompt_len: args.prompt_len,
        completion_len: args.completion_len,
        completion_spread: args.completion_spread,
        steps: args.steps,
        overrides: args.overrides.clone(),
    };
    let config = bench.config(args.launch.nproc)?;
    let placement = Placement::new(config.device, config.dtype)?;
    let watch = Supervision::new(config.collective_timeout_s, &config.heartbeat);
    distributed(&args.launch, watch, placement.on_cuda, |world| {
        let result = bench_step(&bench, world.clone())?;
        print_first(&world, result)
    })
}

fn spec_of(args: &ModelArgs) -> Result<ModelSpec> {
    match (&args.config_json, &args.preset) {
        (Some(path), _) => ModelSpec::from_config_json(path),
        (None, preset) => {
            let name = preset.as_deref().unwrap_or("tiny");
            ModelSpec::preset(name)
                .ok_or_else(|| Error::invalid_value("--model_preset", name, format!("one of {}", PRESETS.join(", "))))
        }
    }
}

/// [`placed`] for a benchmark: only its collectives have a time limit.
fn bench(launch: &LaunchArgs, place: PlaceArgs, work: impl FnOnce(Arc<World>, Kind) -> Result<()>) -> Result<ExitCode> {
    let (timeout, limits) = (WorldOptions::default().timeout, Limits::none());
    placed(launch, place, Supervision { timeout, limits, max_restarts: 0, output_dir: None }, work)
}

/// [`distributed`] for a command whose arguments say where to compute; `work` also gets the kind.
fn placed(
    launch: &LaunchArgs,
    place: PlaceArgs,
    watch: Supervision,
    work: impl FnOnce(Arc<World>, Kind) -> Result<()>,
) -> Result<ExitCode> {
    let Placement { on_cuda, kind } = Placement::new(place.device, place.dtype)?;
    distributed(launch, watch, on_cuda, |world| work(world, kind))
}

/// How the ranks of a command are watched, and what becomes of them when one dies.
struct Supervision {
    /// Longest wait in a collective.
    timeout: Duration,
    limits: Limits,
    max_restarts: usize,
    /// Where a restarted run finds its checkpoints.
    output_dir: Option<PathBuf>,
}

impl Supervision {
    /// Of a command that is not started again.
    fn new(collective_timeout_s: f64, heartbeat: &HeartbeatConfig) -> Self {
        let timeout = Duration::from_secs_f64(collective_timeout_s);
        Self { timeout, limits: heartbeat.limits(), max_restarts: 0, output_dir: None }
    }
}

/// Of a command that samples.
impl From<&SamplingArgs> for Supervision {
    fn from(args: &SamplingArgs) -> Self {
        let mut heartbeat = HeartbeatConfig::default();
        heartbeat.timeout_s = args.heartbeat_timeout_s;
        Self::new(WorldOptions::default().timeout.as_secs_f64(), &heartbeat)
    }
}

/// [`prepared`] with nothing to prepare.
fn distributed(
    args: &LaunchArgs,
    watch: Supervision,
    on_cuda: bool,
    work: impl FnOnce(Arc<World>) -> Result<()>,
) -> Result<ExitCode> {
    prepared(args, watch, on_cuda, || Ok(()), |world, ()| work(world))
}

/// Runs `work` on `nproc` ranks: as a worker where the environment says so, in this process where one is enough, else as the
/// launcher of workers. A process that works prepares itself with `before`, while it has no GPU context yet.
fn prepared<T>(
    args: &LaunchArgs,
    watch: Supervision,
    on_cuda: bool,
    before: impl FnOnce() -> Result<T>,
    work: impl FnOnce(Arc<World>, T) -> Result<()>,
) -> Result<ExitCode> {
    let Supervision { timeout, limits, max_restarts, output_dir } = watch;
    let env = WorkerEnv::from_env()?;
    if env.is_none() && (args.nproc > 1 || max_restarts > 0) {
        let own_args = std::env::args_os().skip(1).collect();
        let (master_addr, master_port, needs_cuda) = (args.master_addr.clone(), args.master_port, on_cuda);
        let options = LaunchOptions::new(args.nproc, own_args)?;
        return Ok(launch::run(&LaunchOptions {
            master_addr,
            master_port,
            needs_cuda,
            limits,
            max_restarts,
            output_dir,
            ..options
        }));
    }
    launch::stop_on_signals();
    if !phase::is_watched() {
        launch::watch_self(env.as_ref().map_or(0, |env| env.rank), &limits, timeout)?;
    }
    let prepared = before()?;
    let backend = if on_cuda { Backend::Nccl } else { Backend::Shm };
    let world = match env {
        Some(env) => World::join(&env, WorldOptions { timeout, backend, ..WorldOptions::default() })?,
        None => World::single_on(backend)?,
    };
    let world = Arc::new(world);
    let outcome = catch_unwind(AssertUnwindSafe(|| work(world.clone(), prepared)));
    let outcome = outcome.unwrap_or_else(|panic| Err(Error::of_panic("the program", panic_message(&*panic))));
    if let Err(error) = &outcome {
        world.post_failure(error);
    }
    outcome.map(|()| ExitCode::Done)
}

fn print_first(world: &World, value: serde_json::Value) -> Result<()> {
    if world.rank() == 0 {
        println!("{value}");
    }
    Ok(())
}
