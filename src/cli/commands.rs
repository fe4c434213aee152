//! The subcommands.

use std::path::Path;
use std::sync::Arc;

use clap::CommandFactory;
use tch::Kind;

use super::args::{Cli, Command, ExportArgs, InitArgs, LaunchArgs, PlanArgs, RunArgs, SamplingArgs, SourceArgs};
use super::evaluation::{EvalRows, Evaluation};
use super::process::{Supervision, distributed, heartbeat, prepared};
use super::reference::{reference_page, reference_toml};
use super::seconds::{check_lengths, expected, gpu_of_plan, tell_seconds};
use super::{bench, card, endpoint, fetch, import, private, sample, verify, watch};
use crate::checkpoint::{check_space, refuse_within_checkpoint, write_new};
use crate::config::{Config, Quantization, SftConfig};
use crate::console::{self, parts_progress};
use crate::cuda::{self, Placement};
use crate::error::{Error, ExitCode, Result};
use crate::launch::{OnStop, quoted};
use crate::memory;
use crate::metrics::{self, Services};
use crate::model::{AdapterFiles, ExportOptions, ModelSource, ModelSpec, export_folder, init_folder};
use crate::phase;
use crate::plan::{NetworkPlan, Room, human};
use crate::ranks::WorkerEnv;
use crate::reward::{self, RewardPool};
use crate::serve::EngineDivision;
use crate::sft::Sft;
use crate::tools::{self, ToolProcess};
use crate::torch;
use crate::trainer::{PlannedRun, Trainer};

/// Runs one command and returns its exit code.
pub(super) fn dispatch(command: Command) -> Result<ExitCode> {
    match command {
        Command::Train(args) => train(&args),
        Command::Sft(args) => sft(&args),
        Command::Plan(args) => plan(&args),
        Command::PackageKernels { output, chips } => {
            for chip in chips {
                let bytes = cuda::write_kernels(&output, chip)?;
                console::say(format_args!("{}: {} for compute capability {chip}", output.display(), human(bytes)));
            }
            Ok(ExitCode::Done)
        }
        Command::Generate(args) => {
            let Placement { on_cuda, kind } = Placement::new(args.place.device, args.place.dtype)?;
            check_sampling(&args.own.source, &args.own.sampling, &args.launch, on_cuda)?;
            distributed(&args.launch, (&args.own.sampling).into(), on_cuda, |world| {
                sample::generate(&args.own, world, kind)
            })
        }
        Command::Eval(args) => {
            args.own.check()?;
            let Placement { on_cuda, kind } = Placement::new(args.place.device, args.place.dtype)?;
            check_sampling(&args.own.source, &args.own.sampling, &args.launch, on_cuda)?;
            let rows = EvalRows::find(&args.own)?;
            if private::checks_here()? {
                private::check_evaluation(&args.own, rows.config())?;
            }
            let start = || Evaluation::new(&args.own, rows);
            prepared(&args.launch, (&args.own.sampling).into(), on_cuda, start, |world, evaluation| {
                sample::evaluate(&args.own, evaluation, world, kind)
            })
        }
        Command::Verify(args) => verify::verify(&args),
        Command::Import(args) => import::import(&args),
        Command::Serve(args) => {
            let Placement { on_cuda, kind } = Placement::new(args.place.device, args.place.dtype)?;
            check_model(&args.own.source, args.own.division(num_ranks(&args.launch)?)?, on_cuda)?;
            let watch = Supervision { on_stop: OnStop::Answer, ..heartbeat(args.own.supervision.heartbeat_timeout_s) };
            prepared(
                &args.launch,
                watch,
                on_cuda,
                || endpoint::Door::open(&args.own),
                |world, door| endpoint::serve(&args.own, world, kind, door),
            )
        }
        Command::Chat(args) => {
            let Placement { on_cuda, kind } = Placement::new(args.place.device, args.place.dtype)?;
            check_sampling(&args.source, &args.sampling, &LaunchArgs::alone(), on_cuda)?;
            let watch = (&args.sampling).into();
            distributed(&LaunchArgs::alone(), watch, on_cuda, |world| endpoint::chat(&args, world, kind))
        }
        Command::Init(args) => init(&args),
        Command::Export(args) => export(&args),
        Command::Config(args) => {
            console::print(if args.markdown { reference_page() } else { reference_toml(args.sft) })?;
            Ok(ExitCode::Done)
        }
        Command::Report(args) => {
            console::print_saved(metrics::write_report(&args.output_dir)?.display());
            Ok(ExitCode::Done)
        }
        Command::Watch(args) => watch::watch(args).map(|()| ExitCode::Done),
        Command::Completions(args) => {
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut Cli::command(), "colo-grpo", &mut script);
            console::print(String::from_utf8_lossy(&script))?;
            Ok(ExitCode::Done)
        }
        Command::PythonWorker { settings } => tools::serve_python(&settings).map(|()| ExitCode::Done),
        Command::SandboxWorker { settings } => reward::code::serve(&settings).map(|()| ExitCode::Done),
        Command::Bench(command) => bench::dispatch(command),
    }
}

/// Refuses impossible sampling options before any process starts.
fn check_sampling(source: &SourceArgs, sampling: &SamplingArgs, launch: &LaunchArgs, on_cuda: bool) -> Result<()> {
    sampling.engine_shape().check_divides(num_ranks(launch)?, "generate")?;
    check_model(source, sampling.division(), on_cuda)
}

/// Downloads a model from the Hub, and refuses a division among ranks that its shape does not allow.
fn check_model(source: &SourceArgs, division: EngineDivision<'_>, on_cuda: bool) -> Result<()> {
    let source = fetch::model(&source.model, source.base_model.as_deref())?;
    division.of_model(&source.base, on_cuda).map(drop)
}

/// Number of ranks in all, whether this program or another one launches them.
fn num_ranks(launch: &LaunchArgs) -> Result<usize> {
    Ok(WorkerEnv::from_env()?.map_or(launch.num_ranks(), |env| env.world_size))
}

fn train(args: &RunArgs) -> Result<ExitCode> {
    let missing = fetch::missing(args.config.as_deref(), &args.overrides);
    let is_first = WorkerEnv::from_env()?.is_none();
    let mut notices = Vec::new();
    let located = |error| Config::located(args.config.as_deref(), &args.overrides, error);
    let config = checked_together(read_config(args.config.as_deref(), &args.overrides), missing, |config| {
        if !is_first {
            return Vec::new();
        }
        let found = [
            config.validate_world(args.launch.num_ranks()).map(drop),
            RewardPool::new(config).map(drop),
            check_output_dir(&config.output.output_dir),
            Services::of(&config.report, &config.output.output_dir, &config.reward.python).check(&mut notices),
        ];
        found.into_iter().map(|found| found.map_err(located)).collect()
    })?;
    say_once(&notices)?;
    if private::checks_here()? {
        private::check_run(&config, args.config.as_deref())?;
    }
    let placement = Placement::new(config.model.device, config.model.dtype)?;
    if is_first {
        let room = Room::available(placement, args.launch.nproc)?;
        let planned = PlannedRun::with_rows(&config, placement);
        planned.and_then(|it| it.preflight(placement, args.launch.world_size(), room)).map_err(located)?;
    }
    let watch = Supervision::of_run(&config.supervision, &config.output.output_dir, config.compared());
    let start_processes = || {
        let tools = ToolProcess::start(&config)?;
        let classes = tools.as_ref().map(ToolProcess::rewarding_classes).unwrap_or_default();
        let rewards = RewardPool::new(&config.clone().with_environment_rewards(&classes)?)?;
        rewards.start()?;
        Ok((rewards, tools))
    };
    prepared(&args.launch, watch, placement.on_cuda, start_processes, |world, (rewards, tools)| {
        let builder = Trainer::builder(config.clone(), world.clone()).reward_pool(rewards).tool_process(tools);
        let summary = builder.build()?.run()?;
        if world.rank() == 0 {
            if let (Some(before), Some(after)) = (summary.eval_reward_before, summary.eval_reward_after) {
                console::print_outcome(format_args!("held-out mean reward: {before:.3} before, {after:.3} after"));
            }
            console::print_outcome(format_args!("model: {}", summary.model_dir.display()));
            if let Some(report) = summary.report {
                console::print_outcome(format_args!("report: {}", report.display()));
            }
        }
        Ok(())
    })
}

fn read_config(file: Option<&Path>, overrides: &[String]) -> Result<Config> {
    let mut notices = Vec::new();
    let config = Config::load_noting(file, overrides, &mut notices)?;
    say_once(&notices)?;
    Ok(config)
}

/// Prints notices in one process of a run: the launcher, or rank 0 if another program launched the ranks.
fn say_once(notices: &[String]) -> Result<()> {
    let speaks = WorkerEnv::from_env()?.is_none_or(|env| env.rank == 0 && !phase::is_watched());
    notices.iter().filter(|_| speaks).for_each(|notice| tracing::warn!("{notice}"));
    Ok(())
}

fn sft(args: &RunArgs) -> Result<ExitCode> {
    let mut notices = Vec::new();
    let missing = fetch::missing(args.config.as_deref(), &args.overrides);
    let is_first = WorkerEnv::from_env()?.is_none();
    let config = checked_together(
        SftConfig::load_noting(args.config.as_deref(), &args.overrides, &mut notices),
        missing,
        |config| {
            if is_first { vec![check_output_dir(&config.output.output_dir)] } else { Vec::new() }
        },
    )?;
    say_once(&notices)?;
    let placement = Placement::new(config.model.device, config.model.dtype)?;
    let watch = Supervision::of_run(&config.supervision, &config.output.output_dir, config.compared());
    distributed(&args.launch, watch, placement.on_cuda, |world| {
        let summary = Sft::new(config, world.clone())?.run()?;
        if world.rank() == 0 {
            let held_out = summary.eval_loss.map(|loss| format!(", held-out {loss:.4}")).unwrap_or_default();
            console::print_outcome(format_args!("loss: {:.4}{held_out}", summary.loss));
            console::print_outcome(format_args!("model: {}", summary.model_dir.display()));
        }
        Ok(())
    })
}

fn plan(args: &PlanArgs) -> Result<ExitCode> {
    let PlanArgs { run, gpu_memory_gib, host_memory_gib, network_gb_s, model, compare, gpu, .. } = args;
    run.launch.check_node()?;
    let mut overrides = run.overrides.clone();
    if model.is_given() {
        // A shape alone is enough: what a run needs beside it takes no memory.
        let mut unread =
            vec!["model_name_or_path=unread", "reward_funcs=[\"format\"]", "reward_weights=[]", "eval_solved_by=[]"];
        let has_rows = Config::sources(run.config.as_deref(), &run.overrides).is_some();
        unread.extend((!has_rows).then_some("train_file=unread"));
        overrides.splice(..0, unread.into_iter().map(str::to_owned));
    }
    let config = read_config(run.config.as_deref(), &overrides)?;
    let (nproc, world_size) = (run.launch.nproc, run.launch.world_size());
    let bytes = |gib: f64| (gib * f64::from(1 << 30)) as usize;
    let (placement, room) = match gpu_memory_gib.or(gpu.map(|gpu| gpu.free_gib)) {
        Some(gib) => {
            let host_bytes = host_memory_gib.map_or(usize::MAX, bytes);
            let room = Room { available_bytes: bytes(gib), swap_bytes: Some(host_bytes / nproc) };
            (Placement::on_other_gpus(config.model.dtype), room)
        }
        None => {
            let placement = Placement::new(config.model.device, config.model.dtype)?;
            (placement, Room::available(placement, nproc)?)
        }
    };
    let planned = match model.is_given() {
        true => PlannedRun::of_shape(&config, &model.spec()?, placement),
        false if fetch::has_rows(&config) => PlannedRun::with_rows(&config, placement),
        false => {
            console::say("notice: no training rows on this machine; the plan assumes prompts of the maximum length");
            PlannedRun::without_rows(&config, placement)
        }
    };
    let told = |error| match error {
        Error::Environment { message } if !placement.on_cuda => Error::Environment {
            message: format!("planned for the CPU of this machine; {FOR_GPUS}. On the CPU {message}"),
        },
        Error::Hub { repo, message } if !model.is_given() => Error::Hub {
            repo,
            message: format!("{message}; --model_preset NAME or --config_json FILE plans without the model's files"),
        },
        other => other,
    };
    let planned = planned.map_err(told)?;
    check_lengths(args, planned.context_len())?;
    let located = |error| Config::located(run.config.as_deref(), &overrides, error);
    let preflight = planned.advised_preflight(placement, world_size, room).map_err(located);
    let gpu = gpu_of_plan(args, placement)?;
    let expected = expected(args, gpu, &planned);
    // What lacks memory is refused below the table, which shows what would have it; any other fault, above it.
    if *compare && matches!(preflight, Ok(_) | Err(Error::Environment { .. })) {
        console::print(format_args!("{}\n\n", planned.compare(placement, world_size, room, expected)?))?;
        console::print(format_args!("{}\n\n", planned.compare_training(placement, world_size, room, expected)))?;
        if let Some(sharing) = planned.compare_sharing(placement, world_size, room, expected)? {
            console::print(format_args!("{sharing}\n\n"))?;
        }
    }
    let preflight = preflight.map_err(told)?;
    if !placement.on_cuda {
        console::say(format_args!("this is a plan for the host memory of this machine (CPU); {FOR_GPUS}"));
    }
    console::print(format_args!("{preflight}\n"))?;
    tell_seconds(args, gpu, expected.map(|expected| planned.seconds(&preflight, expected)))?;
    if !placement.on_cuda {
        console::say(format_args!(
            "each process also needs {} for the program, its libraries and the tokenizer, and up to {} for freed memory that its allocator keeps",
            human(memory::resident_bytes()?),
            human(torch::KEPT_BYTES),
        ));
    }
    let kind_bytes = preflight.kind.elt_size_in_bytes();
    let roles = preflight.batch.roles;
    let network = NetworkPlan::new(&config, &preflight.table, world_size, roles, kind_bytes, *network_gb_s);
    if let Some(network) = network {
        console::print(format_args!("{network}\n"))?;
    }
    Ok(ExitCode::Done)
}

/// Tip that says how to plan for GPUs of another machine.
const FOR_GPUS: &str =
    "to plan for GPUs add --gpu h100 or --gpu h200, or the free memory of each with --gpu_memory_gib";

/// Loads a configuration and runs `check`; errors of both and of missing files are reported together.
fn checked_together<T>(
    loaded: Result<T>,
    mut wrong: Vec<Error>,
    check: impl FnOnce(&T) -> Vec<Result<()>>,
) -> Result<T> {
    match loaded {
        Ok(config) => {
            wrong.splice(..0, check(&config).into_iter().filter_map(Result::err));
            Error::of_all(wrong).map_or(Ok(config), Err)
        }
        Err(error) => {
            wrong.insert(0, error);
            Err(Error::of_all(wrong).expect("there is one"))
        }
    }
}

/// Refuses an output folder that cannot be created or written to. A folder created for this check is removed again, as the run may still be refused.
fn check_output_dir(folder: &Path) -> Result<()> {
    refuse_within_checkpoint("output_dir", folder)?;
    let missing: Vec<&Path> = folder.ancestors().take_while(|folder| !folder.exists()).collect();
    let tried = std::fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
    for made in missing {
        let _ = std::fs::remove_dir(made); // what another process has filled meanwhile stays
    }
    let expected = |error| format!("a folder that can be created and written to: {error}");
    tried.map(|_| ()).map_err(|error| Error::invalid_value("output_dir", folder.display(), expected(error)))
}

fn init(args: &InitArgs) -> Result<ExitCode> {
    let spec = Arc::new(args.spec()?);
    if let Some(path) = args.model.config_json.as_ref().filter(|_| spec.is_text_part) {
        let message = "this describes a vision-language model, which init cannot create: expected the config.json of a text model, for example the \
                       contents of its text_config with \"architectures\" added";
        return Err(Error::bad_file(path, message));
    }
    let (tokenizer, mut progress) = (args.tokenizer.as_deref(), parts_progress("init"));
    let bytes = (spec.num_params() as u64).saturating_mul(spec.dtype.elt_size_in_bytes() as u64);
    write_new("--output", &args.output, |folder| {
        check_space(folder, bytes)?;
        init_folder(&spec, folder, args.seed, tokenizer, &mut progress)
    })?;
    console::print_saved(format_args!("{}: {} parameters", args.output.display(), spec.num_params()));
    Ok(ExitCode::Done)
}

/// How the base is quantized before adapters are merged into it, and a notice about the result.
fn merging(source: &ModelSource, asked: Option<Quantization>) -> Result<(Quantization, Option<String>)> {
    let spec = Arc::new(ModelSpec::from_folder(&source.base)?);
    let adapters = source.adapters.as_ref().map(|folder| AdapterFiles::open(folder, spec.clone())).transpose()?;
    let trained = adapters.map_or(Quantization::None, |adapters| adapters.base_quantization());
    let quantization = asked.unwrap_or(trained);
    let beside = match (trained, quantization) {
        (Quantization::None, Quantization::None) => String::new(),
        (stored, Quantization::None) => {
            let name = stored.name().to_uppercase();
            format!(". The base weights are used as stored, although the adapters were trained on a base in {name}")
        }
        (_, stored) => {
            let name = stored.name().to_uppercase();
            format!(". The base weights were rounded to {name} first, as in the QLoRA training of these adapters")
        }
    };
    let rounded = match spec.dtype {
        Kind::Float => String::new(),
        kind => {
            let kind = format!("{kind:?}").to_lowercase();
            format!(
                ". The sums were rounded to {kind}, the dtype of the base's files, so probabilities change slightly"
            )
        }
    };
    let told = format!("the adapters were merged into the weights in float32{beside}{rounded}");
    Ok((quantization, Some(told)))
}

fn export(args: &ExportArgs) -> Result<ExitCode> {
    let source = fetch::model(&args.source.model, args.source.base_model.as_deref())?;
    args.check(source.adapters.is_some())?;
    let (quantization, told) = match args.merge {
        true => merging(&source, args.source.quantization)?,
        false => (Quantization::None, None),
    };
    let options = ExportOptions { merge: args.merge, quantization, fp8: args.fp8 };
    let mut progress = parts_progress("export");
    let trained = source.adapters.as_ref().unwrap_or(&source.base);
    write_new("--output", &args.output, |folder| {
        export_folder(&source, folder, options, &mut progress)?;
        card::write(folder, trained, source.adapters.is_some() && !args.merge)
    })?;
    console::print_saved(args.output.display());
    told.iter().for_each(console::say);
    let name = args.output.file_name().unwrap_or_default().to_string_lossy();
    let output = quoted(&args.output.to_string_lossy());
    console::say(format_args!("to publish it: hf upload {} {output} .", quoted(&format!("YOUR_NAME/{name}"))));
    Ok(ExitCode::Done)
}
