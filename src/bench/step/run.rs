//! Creates the trainer, runs the steps and times them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::report::{self, StepTimesReport};
use super::{StepBench, WARM_UP_STEPS};
use crate::bench::limits::GpuLimits;
use crate::bench::memory::MemoryWatch;
use crate::bench::{SEED, STREAM, median, synchronize};
use crate::config::Config;
use crate::console;
use crate::cuda::Placement;
use crate::data::Dataset;
use crate::error::Result;
use crate::metrics::MetricValues;
use crate::model::{ModelSource, ModelSpec, init_unit_on};
use crate::ops::random::RandomKey;
use crate::plan::{MemoryPlan, Room};
use crate::ranks::World;
use crate::reward::{RewardInput, RewardPool};
use crate::trainer::{PlannedRun, Trainer, TrainerParts, TrainingRows, assemble};
use crate::types::Prompt;

/// Results of [`bench_step`].
#[derive(Debug)]
pub struct BenchedSteps {
    /// The measured results.
    pub result: Value,
    /// The trainer that ran the steps, which still holds GPU and pinned memory.
    pub trainer: Trainer,
}

/// Runs the benchmark; collective over the world. Rank 0 also writes a table to stderr. The trainer is returned, too, because freeing its pinned
/// memory takes a while: print the result first.
///
/// # Errors
/// Errors of the memory plan; errors of insufficient memory.
pub fn bench_step(bench: &StepBench, world: Arc<World>) -> Result<BenchedSteps> {
    let spec = Arc::new(ModelSpec { eos_token_ids: Vec::new(), ..(*bench.spec).clone() });
    let config = bench.config(world.size())?;
    let limits = GpuLimits::of(world.device())?;
    let start = Instant::now();
    let prompts = bench.prompts(config.validate_world(world.size())?.num_begun);
    let mut trainer = trainer_on_random(config.clone(), &spec, prompts, &world)?;
    let load_s = start.elapsed().as_secs_f64();
    let mut steps: Vec<MetricValues> = Vec::with_capacity(bench.steps);
    let lengths = bench.lengths();
    if bench.completion_spread.is_some() || bench.warm_up_len.is_some() {
        trainer.limit_completions(lengths.up_to(bench.warm_up_len.unwrap_or(lengths.longest)).limit());
    }
    for _ in 0..WARM_UP_STEPS {
        one_step(&mut trainer, &world)?;
    }
    if bench.warm_up_len.is_some() {
        trainer.limit_completions(lengths.limit());
    }
    let watch = MemoryWatch::start(world.device())?;
    for _ in 0..bench.steps {
        steps.push(one_step(&mut trainer, &world)?);
    }
    trainer.finish_trace()?;
    let peaks = watch.of_all(&*world.group())?;
    let medians = medians(&steps);
    let limits = limits.as_ref();
    let floors = bench.floors(&config, &trainer, &medians, (&world, limits))?;
    let plan = trainer.plan();
    let report = StepTimesReport { bench, config: &config, plan, world: &world, medians: &medians, floors, limits };
    if world.rank() == 0 {
        console::say(report.table().trim_end());
    }
    let mut result = report.result(config.roles(world.size())?);
    result["load_s"] = json!(load_s);
    result["step_times"] = json!(steps.iter().map(|values| values["step_time"]).collect::<Vec<_>>());
    result["phases_by_step_s"] = json!(steps.iter().map(report::phases).collect::<Vec<_>>());
    result["peak_by_rank"] = json!(peaks);
    result["plan"] = plan_of(trainer.plan());
    result["predicted_tensor_bytes"] = json!(bench.predicted_bytes(&config, &trainer, world.size())?);
    Ok(BenchedSteps { result, trainer })
}

/// Creates a trainer with random weights that writes no files. The model's tokens are numbers. Collective over the world.
fn trainer_on_random(config: Config, spec: &ModelSpec, prompts: Vec<Prompt>, world: &Arc<World>) -> Result<Trainer> {
    let placement = Placement::in_world(config.model.device, config.model.dtype, world.device())?;
    let room = Room::common(placement, world)?;
    let preflight = PlannedRun::of_shape(&config, spec, placement)?.preflight(placement, world.world_size(), room)?;
    let (seed, kind, device) = (config.seed, preflight.kind, world.device());
    let parts = TrainerParts {
        preflight,
        weights: &|layout| init_unit_on(layout, seed, kind, device),
        rewards: RewardPool::with_functions(&config, &[("random", Arc::new(random_reward))])?,
        tools: None,
        rows: TrainingRows::made(Dataset::new(prompts)),
        source: ModelSource { base: config.model.model_name_or_path.clone(), adapters: None },
        checkpoint: None,
        claim: None,
        writes_files: false,
    };
    let assembled = assemble(config, world.clone(), parts);
    world.agree(assembled)
}

fn plan_of(plan: &MemoryPlan) -> Value {
    json!({
        "peak_gb": plan.peak_bytes() as f64 / 1e9,
        "num_kv_blocks": plan.num_kv_blocks,
        "kv_block_size": plan.kv_block_size,
        "kv_cache_gb": plan.kv_cache_bytes as f64 / 1e9,
        "optimizer": plan.optimizer,
    })
}

/// Runs a step and returns its metrics, including its time until the GPU is done.
fn one_step(trainer: &mut Trainer, world: &World) -> Result<MetricValues> {
    world.group().barrier()?;
    let start = Instant::now();
    let metrics = trainer.train_step()?;
    synchronize(world.device())?;
    let seconds = start.elapsed().as_secs_f64();
    let mut values = metrics.reduce(&*world.group())?;
    values.insert("step_time".to_owned(), seconds);
    Ok(values)
}

/// A reward of 0 or 1, pseudo-random by the completion's tokens.
fn random_reward(input: &RewardInput<'_>) -> Result<f32> {
    let key = input.token_ids.iter().fold(RandomKey::new(SEED, STREAM), |key, &id| key.fold(u64::from(id)));
    Ok((key.word(0, 0) & 1) as f32)
}

fn medians(steps: &[MetricValues]) -> BTreeMap<String, f64> {
    let of = |name: &String| median(steps.iter().filter_map(|values| values.get(name).copied()).collect());
    steps.last().map(|values| values.keys().map(|name| (name.clone(), of(name))).collect()).unwrap_or_default()
}
