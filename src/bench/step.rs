//! Whole GRPO steps, as the trainer makes them, on random weights, prompts and rewards.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tch::Device;

use super::floor::StepWork;
use super::memory::{MemoryWatch, predicted_tensor_bytes};
use super::{PEAK_FLOP_PER_S, SEED, STREAM, median, synchronize, token};
use crate::config::{Config, Mode, OptimizerResidency, ReferenceResidency, Roles};
use crate::dist::World;
use crate::error::Result;
use crate::metrics::MetricValues;
use crate::model::ModelSpec;
use crate::ops::random::RandomKey;
use crate::phase::Phase;
use crate::plan::MemoryPlan;
use crate::reward::RewardInput;
use crate::train::{MicroBatch, PackOptions, Sequence, TrainedModel, UpdateCourse, pack, reference_bytes};
use crate::trainer::Trainer;
use crate::types::{LengthSpread, Prompt};

/// What enters and leaves the rollout: the time that the host spends there. Copies that go on beside other work are told by
/// `transition/hidden_share`.
const TRANSITIONS: [Phase; 5] = [Phase::Offload, Phase::Gather, Phase::Wake, Phase::Sleep, Phase::Reload];

/// Of halves that run apart, the phases of ranks that generate.
const OF_GENERATORS: [Phase; 6] =
    [Phase::Wake, Phase::Generate, Phase::Prefill, Phase::Decode, Phase::Sleep, Phase::Reward];

/// Steps beside the timed ones: one that warms up, and one that is not made, whose batch engines of their own sample during the
/// last step.
const EXTRA_STEPS: usize = 2;

/// What is run.
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
    /// Those of an override.
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

    /// What libtorch will hold at most: in the micro-batches of the rank with most prompts, where all completions have one
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
        let at_once = model.fullest(&course).total();
        Ok(Some(predicted_tensor_bytes(&model, at_once) + model.bytes().engine_adapters + reference))
    }

    /// What phases on GPUs take at least; of optimizer state that lives on the host its way there is left out, with its floor.
    fn floors(
        &self,
        config: &Config,
        trainer: &Trainer,
        medians: &BTreeMap<String, f64>,
        world: &World,
    ) -> Result<BTreeMap<Phase, f64>> {
        let Some(policy) = trainer.policy().filter(|_| world.device().is_cuda()) else { return Ok(BTreeMap::new()) };
        let model = TrainedModel::of(config, policy.table(), policy.kind());
        let streams = trainer.plan().optimizer == OptimizerResidency::Stream;
        let work = StepWork {
            spec: &self.spec,
            prompts: self.prompts,
            group: self.group,
            prompt_len: self.prompt_len,
            completion_len: medians["completions/mean_length"],
            roles: config.roles(world.size())?,
            tensor_parallel_size: config.tensor_parallel_size,
            num_iterations: config.num_iterations,
            trained_tokens: medians["tokens/trained"],
            adapter_params: policy.lora().map(|_| policy.trained_table().num_params()),
            optimizer_bytes: (!streams).then(|| model.optimizer_step_bytes()),
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

/// Runs it; collective over the world. The first rank also writes a table to stderr.
///
/// # Errors
/// What the plan refuses; out of memory.
pub fn bench_step(bench: &StepBench, world: Arc<World>) -> Result<Value> {
    let spec = Arc::new(ModelSpec { eos_token_ids: Vec::new(), ..(*bench.spec).clone() });
    let config = bench.config(world.size())?;
    let start = Instant::now();
    let mut trainer = Trainer::on_random(
        config.clone(),
        spec,
        bench.prompts(config.validate_world(world.size())?.num_begun),
        &[("random", Arc::new(random_reward))],
        world.clone(),
    )?;
    trainer.spread_lengths(bench.completion_spread);
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
    let floors = bench.floors(&config, &trainer, &medians, &world)?;
    let report = Report { bench, config: &config, plan: trainer.plan(), world: &world, medians: &medians, floors };
    if world.rank() == 0 {
        eprint!("{}", report.table());
    }
    let mut result = report.result(config.roles(world.size())?);
    result["load_s"] = json!(load_s);
    result["step_times"] = json!(steps.iter().map(|values| values["step_time"]).collect::<Vec<_>>());
    result["peak_by_rank"] = json!(peaks);
    result["plan"] = plan_of(trainer.plan());
    result["predicted_tensor_bytes"] = json!(bench.predicted_bytes(&config, &trainer, world.size())?);
    Ok(result)
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

struct Report<'a> {
    bench: &'a StepBench,
    config: &'a Config,
    plan: &'a MemoryPlan,
    world: &'a World,
    medians: &'a BTreeMap<String, f64>,
    floors: BTreeMap<Phase, f64>,
}

impl Report<'_> {
    fn seconds(&self, phase: Phase) -> Option<f64> {
        self.medians.get(&format!("timing_s/{}", phase.name())).copied()
    }

    fn sum(&self, phases: &[Phase]) -> f64 {
        phases.iter().filter_map(|phase| self.seconds(*phase)).sum()
    }

    /// What no phase has: waiting for the GPU, counting. Phases of halves that run apart lie beside one another, and their sum
    /// means nothing.
    fn unphased(&self) -> Option<f64> {
        (self.config.mode == Mode::Colocated).then(|| self.medians["step_time"] - self.sum(Phase::ALL))
    }

    fn result(&self, roles: Roles) -> Value {
        let Self { bench, config, plan, world, medians, ref floors } = *self;
        let step_s = medians["step_time"];
        let transition_s = self.sum(&TRANSITIONS);
        let completions = bench.prompts * bench.group;
        let generated = medians["tokens/generated"];
        let tokens = (completions * bench.prompt_len) as f64 + completions as f64 * medians["completions/mean_length"];
        let train_s = self.sum(&[Phase::Pack, Phase::ForwardBackward, Phase::Optimizer]);
        let num_params = bench.spec.num_params();
        let computed = medians["tokens/trained"]; // fewer where completions share their prompt
        let train_tflops = 6.0 * num_params as f64 * computed / train_s / roles.num_trainers as f64 / 1e12;
        let phases: BTreeMap<&str, f64> =
            Phase::ALL.iter().filter_map(|phase| Some((phase.name(), self.seconds(*phase)?))).collect();
        let other: BTreeMap<&String, f64> = (medians.iter())
            .filter(|(name, _)| {
                ["transition/", "perf/", "timing_s/exposed", "timing_s/idle_", "partial_rollout/"]
                    .iter()
                    .any(|kind| name.starts_with(kind))
            })
            .map(|(name, value)| (name, *value))
            .collect();
        json!({
            "benchmark": "step",
            "model": bench.model,
            "num_params": num_params,
            "device": if world.device().is_cuda() { "cuda" } else { "cpu" },
            "world_size": world.size(),
            "mode": config.mode,
            "num_trainers": roles.num_trainers,
            "num_generators": roles.num_generators,
            "async_steps": config.split.async_steps,
            "tensor_parallel_size": config.tensor_parallel_size,
            "oversample": config.oversample,
            "carried_kv": config.carried_kv,
            "zero_stage": config.zero.stage,
            "gradient_checkpointing": plan.gradient_checkpointing.name(),
            "max_tokens_per_micro_batch": config.max_tokens_per_micro_batch,
            "beta": config.beta,
            "prompts": bench.prompts,
            "group": bench.group,
            "prompt_len": bench.prompt_len,
            "completion_len": bench.completion_len,
            "completion_spread": bench.completion_spread,
            "overrides": bench.overrides,
            "step_s": step_s,
            "phases_s": phases,
            "floors_s": floors.iter().map(|(phase, seconds)| (phase.name(), *seconds)).collect::<BTreeMap<_, _>>(),
            "unphased_s": self.unphased(),
            "transition_s": transition_s,
            "transition_percent": 100.0 * transition_s / step_s,
            "tokens_per_second": tokens / step_s,
            "generation_tokens_per_second": generated / self.sum(&[Phase::Generate]),
            "train_tokens_per_second": tokens / train_s,
            "tokens_computed_in_training": computed,
            "train_tflops_per_gpu": train_tflops,
            "train_mfu_percent": world.device().is_cuda().then_some(100.0 * train_tflops * 1e12 / PEAK_FLOP_PER_S),
            "metrics": other,
        })
    }

    fn table(&self) -> String {
        let step_s = self.medians["step_time"];
        let mut text = format!("{:<34} {:>11} {:>8} {:>11}\n", "phase", "took", "of step", "floor");
        let mut line = |name: &str, seconds: f64, floor_s: Option<f64>| {
            let floor = floor_s.map_or_else(|| "-".to_owned(), |floor_s| format!("{floor_s:.3} s"));
            let _ = writeln!(text, "{name:<34} {seconds:>9.3} s {:>6.1} % {floor:>11}", 100.0 * seconds / step_s);
        };
        for phase in Phase::ALL {
            let is_apart = self.config.mode == Mode::Split && OF_GENERATORS.contains(phase);
            let whose = if is_apart { " (generators)" } else { "" };
            if let Some(seconds) = self.seconds(*phase) {
                line(&format!("{}{whose}", phase.name()), seconds, self.floors.get(phase).copied());
            }
        }
        if let Some(seconds) = self.unphased() {
            line("rest: waiting for the GPU, counting", seconds, None);
        }
        line("step", step_s, None);
        line("of it entering and leaving rollout", self.sum(&TRANSITIONS), None);
        text
    }
}
