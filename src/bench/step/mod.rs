//! Whole GRPO steps, as the trainer makes them, on random weights, prompts and rewards.

mod report;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tch::Device;

use self::report::StepTimesReport;
use super::floor::TheoreticalStep;
use super::limits::GpuLimits;
use super::memory::{MemoryWatch, predicted_tensor_bytes};
use super::{SEED, STREAM, median, synchronize, token};
use crate::config::{Config, OptimizerResidency, ReferenceResidency};
use crate::console;
use crate::error::Result;
use crate::metrics::MetricValues;
use crate::model::ModelSpec;
use crate::ops::random::RandomKey;
use crate::phase::Phase;
use crate::plan::MemoryPlan;
use crate::ranks::World;
use crate::reward::RewardInput;
use crate::train::{MicroBatch, PackOptions, Sequence, TrainedModel, UpdateCourse, pack, reference_bytes};
use crate::trainer::Trainer;
use crate::types::{LengthSpread, Prompt};

/// Steps beside the timed ones: one that warms up, and one that is not made, whose batch engines of their own sample during the
/// last step.
const EXTRA_STEPS: usize = 2;

/// The benchmark of whole steps.
#[derive(Debug, Clone)]
pub struct StepBench {
    /// Name in the output.
    pub model: String,
    /// The model; its end-of-sequence ids are ignored.
    pub spec: Arc<ModelSpec>,
    /// Prompts per step, over all ranks.
    pub prompts: usize,
    /// Completions per prompt.
    pub group: usize,
    /// Tokens per prompt.
    pub prompt_len: usize,
    /// Tokens per completion, exactly.
    pub completion_len: usize,
    /// Tokens of each completion, drawn one by one by prompt and sample, instead.
    pub completion_spread: Option<LengthSpread>,
    /// Timed steps.
    pub steps: usize,
    /// Configuration keys over those that follow from the above, `key=value`.
    pub overrides: Vec<String>,
}

impl StepBench {
    /// The run that is timed.
    ///
    /// # Errors
    /// The errors of an override.
    pub fn config(&self, world_size: usize) -> Result<Config> {
        let Self { prompts, group, prompt_len, .. } = self;
        let longest = self.completion_spread.map_or(self.completion_len, |spread| spread.longest);
        let keys = [
            ("model_name_or_path", self.model.clone()),
            ("train_file", "random".into()),
            ("reward_funcs", "[\"random\"]".into()),
            ("shuffle_dataset", "false".into()),
            ("num_generations", group.to_string()),
            ("generation_batch_size", (prompts * group).to_string()),
            ("per_device_train_batch_size", (prompts * group / world_size).max(1).to_string()),
            ("max_completion_length", longest.to_string()),
            ("max_model_length", (prompt_len + longest).to_string()),
        ];
        let keys = keys.into_iter().map(|(key, value)| format!("{key}={value}"));
        Config::load(None, &keys.chain(self.overrides.iter().cloned()).collect::<Vec<_>>())
    }

    /// Bytes that libtorch will hold at most: in the micro-batches of the rank with most prompts, where all completions have one
    /// length and make one update.
    fn predicted_bytes(&self, config: &Config, trainer: &Trainer, world_size: usize) -> Result<Option<usize>> {
        let updates = config.validate_world(world_size)?.updates_per_generation * config.num_iterations;
        if self.completion_spread.is_some() || updates > 1 {
            return Ok(None);
        }
        let Some(policy) = trainer.policy() else { return Ok(None) };
        let own_prompts = self.prompts.div_ceil(policy.num_ranks());
        let sequence = |index: usize| {
            let token_ids = vec![(index / self.group) as u32; self.prompt_len + self.completion_len];
            Sequence::of_tokens(token_ids, self.prompt_len)
        };
        let sequences: Vec<Sequence> = (0..own_prompts * self.group).map(sequence).collect();
        let (max_tokens, share_prompts) = (config.max_tokens_per_micro_batch, config.share_prompts);
        let micro_batches = pack(&sequences, &PackOptions { max_tokens, share_prompts, device: Device::Cpu })?;
        let shapes: Vec<_> = micro_batches.iter().map(MicroBatch::shape).collect();
        let (table, kind) = (policy.table(), policy.kind());
        let model = TrainedModel::of(config, table, kind);
        let MemoryPlan { gradient_checkpointing, optimizer, reference, .. } = *trainer.plan();
        let streams = optimizer == OptimizerResidency::Stream;
        let course = UpdateCourse { keep: gradient_checkpointing, micro_batches: &shapes, is_warm: false, streams };
        let has_reference = config.has_reference() && reference == ReferenceResidency::Resident;
        let reference = if has_reference { reference_bytes(table, kind) } else { 0 };
        let tokens = shapes.iter().map(|shape| shape.tokens).sum();
        let recorded = model.recorded_bytes(config.objective.router_replay, tokens);
        let at_once = model.fullest(&course).total() + recorded;
        Ok(Some(predicted_tensor_bytes(&model, at_once) + model.bytes().engine_adapters + reference))
    }

    /// The least time of phases on GPUs; the copies of optimizer state that lives on the host are left out, with their floor.
    fn floors(
        &self,
        config: &Config,
        trainer: &Trainer,
        medians: &BTreeMap<String, f64>,
        (world, limits): (&World, Option<&GpuLimits>),
    ) -> Result<BTreeMap<Phase, f64>> {
        let (Some(policy), Some(limits)) = (trainer.policy(), limits) else { return Ok(BTreeMap::new()) };
        let model = TrainedModel::of(config, policy.table(), policy.kind());
        let streams = trainer.plan().optimizer == OptimizerResidency::Stream;
        let work = TheoreticalStep {
            spec: &self.spec,
            prompts: self.prompts,
            group: self.group,
            prompt_len: self.prompt_len,
            completion_len: medians["completions/mean_length"],
            roles: config.roles(world.size())?,
            tensor_parallel_size: config.tensor_parallel_size,
            state_dtype: config.mamba_ssm_cache_dtype,
            num_iterations: config.num_iterations,
            trained_tokens: medians["tokens/trained"],
            adapter_params: policy.lora().map(|_| policy.trained_table().num_params()),
            optimizer_bytes: (!streams).then(|| model.optimizer_step_bytes()),
            rates: limits.rates,
        };
        Ok(work.floors(self.completion_spread.is_some()))
    }

    /// Prompts of all steps, no two alike; `num_begun` of each.
    fn prompts(&self, num_begun: usize) -> Vec<Prompt> {
        let prompt = |id: usize| {
            let first = id * self.prompt_len;
            let token_ids = (first..first + self.prompt_len).map(|at| token(at, self.spec.vocab_size)).collect();
            Prompt { id: id as u64, text: String::new(), token_ids, columns: Arc::default() }
        };
        (0..num_begun * (self.steps + EXTRA_STEPS)).map(prompt).collect()
    }
}

/// Runs it; collective over the world. The first rank also writes a table to stderr. The trainer comes back too, as giving its
/// pinned memory back takes a while: a caller tells the result first.
///
/// # Errors
/// What the plan refuses; out of memory.
pub fn bench_step(bench: &StepBench, world: Arc<World>) -> Result<(Value, Trainer)> {
    let spec = Arc::new(ModelSpec { eos_token_ids: Vec::new(), ..(*bench.spec).clone() });
    let config = bench.config(world.size())?;
    let limits = GpuLimits::of(world.device())?;
    let start = Instant::now();
    let mut trainer = Trainer::on_random(
        config.clone(),
        spec,
        bench.prompts(config.validate_world(world.size())?.num_begun),
        bench.completion_spread,
        &[("random", Arc::new(random_reward))],
        world.clone(),
    )?;
    let load_s = start.elapsed().as_secs_f64();
    let mut steps: Vec<MetricValues> = Vec::with_capacity(bench.steps);
    one_step(&mut trainer, &world)?; // warms up
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
    Ok((result, trainer))
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

/// The step's metrics, its time until the GPU is done among them.
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

/// 0 or 1, drawn by the completion's tokens.
fn random_reward(input: &RewardInput<'_>) -> Result<f32> {
    let key = input.token_ids.iter().fold(RandomKey::new(SEED, STREAM), |key, &id| key.fold(u64::from(id)));
    Ok((key.word(0, 0) & 1) as f32)
}

fn medians(steps: &[MetricValues]) -> BTreeMap<String, f64> {
    let of = |name: &String| median(steps.iter().filter_map(|values| values.get(name).copied()).collect());
    steps.last().map(|values| values.keys().map(|name| (name.clone(), of(name))).collect()).unwrap_or_default()
}
