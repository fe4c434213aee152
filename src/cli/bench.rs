//! The subcommands of `bench`.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tch::Kind;

use super::args::{
    BenchCollectivesArgs, BenchCommand, BenchGenerateArgs, BenchKernelsArgs, BenchServeArgs, BenchSleepWakeArgs,
    BenchSpeculationArgs, BenchStepArgs, BenchTrainArgs, Placed,
};
use super::process::{Supervision, distributed, placed, print_first};
use crate::bench::{
    BenchedSteps, CollectivesBench, GenerateBench, KernelsBench, ServeBench, SleepWakeBench, SpeculationBench,
    StepBench, TrainBench, bench_collectives, bench_generate, bench_kernels, bench_serve, bench_sleep_wake,
    bench_speculation, bench_step, bench_train, compare,
};
use crate::config::Speculation;
use crate::console;
use crate::cuda::{Placement, residual_kind};
use crate::error::{Error, ExitCode, Result};
use crate::phase::HeartbeatLimits;
use crate::ranks::World;
use crate::train::GradientOptions;

/// Runs one benchmark and returns its exit code.
pub(super) fn dispatch(command: BenchCommand) -> Result<ExitCode> {
    match command {
        BenchCommand::Train(args) => bench(&args, train_bench),
        BenchCommand::Generate(args) => bench(&args, generate_bench),
        BenchCommand::Serve(args) => bench(&args, serve_bench),
        BenchCommand::Kernels(args) => kernels_bench(&args),
        BenchCommand::Step(args) => step_bench(&args),
        BenchCommand::SleepWake(args) => bench(&args, sleep_wake_bench),
        BenchCommand::Speculation(args) => bench(&args, speculation_bench),
        BenchCommand::Collectives(args) => bench(&args, collectives_bench),
        BenchCommand::Compare(args) => {
            console::print(compare(&args.results, &args.output, &args.curves)?)?;
            Ok(ExitCode::Done)
        }
    }
}

/// Runs a benchmark like [`placed`], and rank 0 prints its one line; only collectives have a time limit.
fn bench<T: Args>(
    args: &Placed<T>,
    work: impl FnOnce(&T, Arc<World>, Kind) -> Result<serde_json::Value>,
) -> Result<ExitCode> {
    placed(args, Supervision::within(HeartbeatLimits::none()), |own, world, kind| {
        let result = work(own, world.clone(), kind)?;
        print_first(&world, result)
    })
}

fn train_bench(args: &BenchTrainArgs, world: Arc<World>, kind: Kind) -> Result<serde_json::Value> {
    let spec = args.model.spec()?;
    let spec = match args.layers {
        Some(num_layers) => spec.with_num_layers(num_layers),
        None => spec,
    };
    args.routing.check(&spec)?;
    let bench = TrainBench {
        model: args.model.name(),
        spec: Arc::new(spec),
        kind,
        residual: residual_kind(args.residual.residual_dtype, kind),
        sequences: args.sequences,
        prompt_len: args.prompt_len.unwrap_or(args.sequence_len / 2),
        completion_len: args.completion_len.unwrap_or(args.sequence_len.div_ceil(2)),
        completion_spread: args.completion_spread,
        redraw: args.redraw,
        group: args.group,
        share_prompts: args.share_prompts,
        max_tokens_per_micro_batch: args.max_tokens_per_micro_batch,
        zero_stage: args.zero_stage,
        shard_group_size: args.shard_group_size,
        sequence_parallel_size: args.sequence_parallel_size,
        gradients: GradientOptions::new(args.grad_accum_dtype, args.reduce_dtype),
        optim: args.optim,
        lora_r: args.lora_r,
        quantization: args.quantization,
        mixed_precision: args.mixed_precision,
        routing: args.routing,
        gradient_checkpointing: args.gradient_checkpointing,
        activation_offload: args.activation_offload,
        score: args.score,
        profile: args.profile,
        steps: args.steps,
    };
    bench_train(&bench, &world)
}

fn generate_bench(args: &BenchGenerateArgs, world: Arc<World>, kind: Kind) -> Result<serde_json::Value> {
    let speculation = args.speculation.options();
    if let Some(acceptance) = args.replayed_acceptance.filter(|_| speculation.most_drafts() == 0) {
        let expected = "none, as there are no draft tokens without --speculation ngram, mtp or auto";
        return Err(Error::invalid_value("--replayed_acceptance", acceptance, expected));
    }
    let spec = args.model.spec()?.with_expert_parallel(args.enable_expert_parallel)?;
    let bench = GenerateBench {
        model: args.model.name(),
        spec: Arc::new(if speculation.method == Speculation::Mtp { spec.with_draft_head() } else { spec }),
        kind,
        residual: residual_kind(args.residual.residual_dtype, kind),
        prompts: args.prompts,
        group: args.group,
        prompt_len: args.lengths.prompt_len,
        completion_len: args.lengths.completion_len,
        completion_spread: args.lengths.completion_spread,
        max_num_seqs: args.max_num_seqs,
        lora_r: args.lora_r,
        quantization: args.formats.rollout_quantization,
        kv_cache_dtype: args.formats.kv_cache_dtype,
        state_dtype: args.formats.state_dtype,
        strict: args.strict,
        exact: args.exact,
        speculation,
        replayed_acceptance: args.replayed_acceptance,
        steps_only: args.steps_only,
        profile: args.profile,
        engine: args.pipeline.engine_shape(args.tensor_parallel_size),
        pipeline_partition: args.pipeline.sizes().to_vec(),
        repeats: args.repeats,
    };
    bench_generate(&bench, world)
}

fn speculation_bench(args: &BenchSpeculationArgs, world: Arc<World>, kind: Kind) -> Result<serde_json::Value> {
    let bench = SpeculationBench {
        model: args.model.clone(),
        rows: args.rows.clone(),
        kind,
        residual: residual_kind(args.residual.residual_dtype, kind),
        methods: args.methods.clone(),
        num_tokens: args.num_speculative_tokens,
        sequences: args.sequences.clone(),
        group: args.group,
        max_completion_length: args.max_completion_length,
        temperature: args.temperature,
        same_rows: args.same_rows,
        repeats: args.repeats,
    };
    bench_speculation(&bench, &world)
}

fn serve_bench(args: &BenchServeArgs, world: Arc<World>, kind: Kind) -> Result<serde_json::Value> {
    let bench = ServeBench {
        model: args.model.name(),
        spec: Arc::new(args.model.spec()?),
        kind,
        residual: residual_kind(args.residual.residual_dtype, kind),
        streams: args.streams.clone(),
        prompt_len: args.prompt_len,
        completion_len: args.completion_len,
        repeats: args.repeats,
    };
    bench_serve(&bench, world)
}

fn sleep_wake_bench(args: &BenchSleepWakeArgs, world: Arc<World>, _: Kind) -> Result<serde_json::Value> {
    let bytes = |gib: f64| (gib * f64::from(1 << 30)) as usize;
    let (bytes, offload_bytes) = (bytes(args.gib), bytes(args.offload_gib));
    let rest = Duration::from_millis(args.rest_ms);
    bench_sleep_wake(&SleepWakeBench { bytes, offload_bytes, cycles: args.cycles, rest }, &world)
}

fn collectives_bench(args: &BenchCollectivesArgs, world: Arc<World>, _: Kind) -> Result<serde_json::Value> {
    bench_collectives(&CollectivesBench { max_bytes: args.max_mib << 20 }, &world)
}

fn kernels_bench(args: &BenchKernelsArgs) -> Result<ExitCode> {
    let Placement { on_cuda, kind } = Placement::new(args.place.device, args.place.dtype)?;
    let bench = KernelsBench {
        model: args.model.name(),
        spec: Arc::new(args.model.spec()?),
        kind,
        rows: args.rows,
        context: args.context,
        group: args.group,
        prompt_len: args.prompt_len,
    };
    let device = if on_cuda { tch::Device::Cuda(0) } else { tch::Device::Cpu };
    bench_kernels(&bench, device)?.iter().try_for_each(|result| console::print(format_args!("{result}\n")))?;
    Ok(ExitCode::Done)
}

fn step_bench(args: &BenchStepArgs) -> Result<ExitCode> {
    let bench = StepBench {
        model: args.model.name(),
        spec: Arc::new(args.model.spec()?),
        prompts: args.prompts,
        group: args.group,
        prompt_len: args.lengths.prompt_len,
        completion_len: args.lengths.completion_len,
        completion_spread: args.lengths.completion_spread,
        steps: args.steps,
        warm_up_len: args.warm_up_len,
        overrides: args.overrides.clone(),
    };
    let config = bench.config(args.launch.num_ranks())?;
    let placement = Placement::new(config.model.device, config.model.dtype)?;
    let timeout = Duration::from_secs_f64(config.supervision.collective_timeout_s);
    let watch = Supervision { timeout, ..Supervision::within(config.supervision.heartbeat.limits()) };
    distributed(&args.launch, watch, placement.on_cuda, |world| {
        let BenchedSteps { result, trainer: _trainer } = bench_step(&bench, world.clone())?;
        print_first(&world, result)
    })
}
