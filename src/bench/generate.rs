//! The generation engine on random weights and prompts, with completions of one exact length or a range of lengths, and the times of decode steps
//! compared with the GPU's theoretical minimum.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tch::{Kind, Tensor};

use super::limits::GpuLimits;
use super::{LengthSpread, SEED, adapters, device_name, dtype_name, median, token};
use crate::config::{EngineShape, KvCacheDtype, RolloutQuantization, StateDtype};
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::model::{ModelSpec, ParamTable, Stages, UnitLayout, init_unit_on};
use crate::ranks::{Mesh, ReduceOp, World, all_gather_f64, all_reduce_f64};
use crate::rollout::{
    DraftInjection, Engine, EngineOptions, EngineRanks, SpeculationOptions, StageTimes, cache_kind, fullest_stage,
    kv_block_bytes,
};
use crate::serve::Served;
use crate::types::{Prompt, SamplingParams};

/// Tokens per block of the KV cache.
const BLOCK_SIZE: usize = 16;
/// Maximum tokens per completion in the untimed warm-up run, which loads every library and touches all memory once.
const WARM_UP_TOKENS: usize = 64;

/// The benchmark of generation.
#[derive(Debug, Clone)]
pub struct GenerateBench {
    /// Name of the model in the output.
    pub model: String,
    /// The model; its end-of-sequence ids are ignored.
    pub spec: Arc<ModelSpec>,
    /// Dtype of weights, activations and cache.
    pub kind: Kind,
    /// Dtype of the residual stream.
    pub residual: Kind,
    /// Format of the blocks' weights in GEMMs.
    pub quantization: RolloutQuantization,
    /// Dtype of keys and values in the cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Dtype of the states of gated delta nets.
    pub state_dtype: StateDtype,
    /// Prompts per rank.
    pub prompts: usize,
    /// Completions per prompt.
    pub group: usize,
    /// Tokens per prompt.
    pub prompt_len: usize,
    /// Tokens per completion.
    pub completion_len: usize,
    /// Random completion lengths, instead of `completion_len`.
    pub completion_spread: Option<LengthSpread>,
    /// Maximum number of sequences decoded at once; 0 means all.
    pub max_num_seqs: usize,
    /// Numbers of ranks and stages of one engine.
    pub engine: EngineShape,
    /// Number of layers in each pipeline stage; if empty, split by predicted time.
    pub pipeline_partition: Vec<usize>,
    /// Rank of LoRA adapters on every linear projection, if any.
    pub lora_r: Option<usize>,
    /// Whether GEMMs and attention use one algorithm for every batch size.
    pub strict: bool,
    /// Whether rows have the same bits as in training; the engine is strict, too.
    pub exact: bool,
    /// Source and number of draft tokens.
    pub speculation: SpeculationOptions,
    /// Share of draft tokens that count as accepted, to simulate a run with this acceptance rate.
    pub replayed_acceptance: Option<f64>,
    /// Whether to time each operation of a decode step, and to measure the energy of the largest step.
    pub profile: bool,
    /// Whether to run only decode steps over synthetic batches, so that long contexts need no prefill.
    pub steps_only: bool,
    /// Number of timed repetitions.
    pub repeats: usize,
}

/// Runs the benchmark; collective over the world.
///
/// # Errors
/// Errors of insufficient memory, or a model that cannot be split this way.
pub fn bench_generate(bench: &GenerateBench, world: Arc<World>) -> Result<Value> {
    let num_stages = bench.engine.pipeline_parallel_size;
    if bench.profile && num_stages > 1 {
        return Err(Error::invalid_value("--profile", true, "false when --pipeline_parallel_size is above 1"));
    }
    // The cost of strict and exact modes is measured against an engine without them, which is dropped before the other is created.
    let is_strict = bench.strict || bench.exact;
    let mesh = world.mesh(bench.engine, world.size())?;
    if bench.steps_only {
        return bench.steps_alone(&world, &mesh);
    }
    let limits = GpuLimits::of(world.device())?;
    let free = if is_strict { Some(bench.measure(&world, &mesh, false)?.0) } else { None };
    let (run, mut served) = bench.measure(&world, &mesh, is_strict)?;
    let (device, num_prompts) = (world.device(), bench.prompts * world.size());
    let mut result = json!({
        "benchmark": "generate",
        "model": bench.model,
        "num_params": bench.spec.num_params(),
        "device": device_name(device),
        "dtype": dtype_name(bench.kind),
        "residual_dtype": dtype_name(bench.residual),
        "rollout_quantization": bench.quantization.name(),
        "kv_cache_dtype": bench.kv_cache_dtype.name(),
        "mamba_ssm_cache_dtype": bench.state_dtype.name(),
        "world_size": world.size(),
        "tensor_parallel_size": bench.engine.tensor_parallel_size,
        "pipeline_parallel_size": bench.engine.pipeline_parallel_size,
        "enable_expert_parallel": bench.spec.experts().is_some_and(|experts| experts.is_parallel),
        "threads_per_rank": tch::get_num_threads(),
        "lora_r": bench.lora_r,
        "strict": is_strict,
        "exact": bench.exact,
        "prompts": num_prompts,
        "group": bench.group,
        "prompt_len": bench.prompt_len,
        "completion_len": bench.completion_len,
        "completion_spread": bench.completion_spread,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens / run.seconds,
        "decode_tokens_per_second":
            (run.tokens - (num_prompts * bench.group) as f64) / (run.seconds - run.prefill_seconds),
        "prefill_seconds": run.prefill_seconds,
        "prefill_tokens_per_second": (num_prompts * bench.prompt_len) as f64 / run.prefill_seconds,
        "step_ms": run.steps.medians(),
    });
    if bench.speculation.most_drafts() > 0 {
        let drafts = served.engine().take_draft_counts();
        result["speculation"] = json!({
            "method": bench.speculation.method.name(),
            "replayed_acceptance": bench.replayed_acceptance,
            "draft_tokens": drafts.computed,
            "accepted_tokens": drafts.accepted,
        });
    }
    if let Some(shares) = run.idle_shares {
        result["idle_share"] = json!(shares);
    }
    if let Some(free) = free {
        result["strict_cost"] = json!({
            "seconds": run.seconds / free.seconds - 1.0,
            "prefill_seconds": run.prefill_seconds / free.prefill_seconds - 1.0,
            "tokens_per_second_without": free.tokens / free.seconds,
        });
    }
    if let Some(limits) = &limits {
        result["gpu"] = limits.to_json();
    }
    if let Some(limits) = limits.filter(|_| num_stages == 1) {
        result["decode"] = bench.decode_steps(&world, &mut served, &limits)?;
    }
    Ok(result)
}

/// The times of one engine's generations.
struct EngineTimes {
    /// Median seconds of the slowest rank.
    seconds: f64,
    /// Median seconds of the slowest rank until the first token of every completion.
    prefill_seconds: f64,
    /// Number of tokens on all ranks.
    tokens: f64,
    steps: Steps,
    /// For each rank of an engine with stages, the share of time that it waited.
    idle_shares: Option<Vec<f64>>,
}

/// The share of time that each rank's stage waited for others, rounded to a thousandth. Collective.
fn idle_shares(world: &World, own: StageTimes) -> Result<Vec<f64>> {
    let own = [own.waiting, own.computing + own.waiting].map(|time| time.as_secs_f64());
    let all = all_gather_f64(&*world.group(), &own)?;
    Ok(all.iter().map(|times| (1e3 * times[0] / times[1]).round() / 1e3).collect())
}

impl GenerateBench {
    /// Creates an engine, measures its tokens per second, and returns both.
    pub(super) fn rate(&self, world: &Arc<World>) -> Result<(f64, Served)> {
        let mesh = world.mesh(self.engine, world.size())?;
        let (run, served) = self.measure(world, &mesh, self.strict || self.exact)?;
        Ok((run.tokens / run.seconds, served))
    }

    /// Measures decode steps of a new engine over synthetic batches.
    fn steps_alone(&self, world: &Arc<World>, mesh: &Mesh) -> Result<Value> {
        let limits = GpuLimits::of(world.device())?.filter(|_| self.engine.pipeline_parallel_size == 1);
        let Some(limits) = limits else {
            return Err(Error::invalid_value(
                "--steps_only",
                true,
                "false on a CPU or with --pipeline_parallel_size above 1",
            ));
        };
        let mut served = self.served(world, mesh, self.strict || self.exact)?;
        Ok(json!({
            "benchmark": "decode",
            "model": self.model,
            "device": device_name(world.device()),
            "dtype": dtype_name(self.kind),
            "rollout_quantization": self.quantization.name(),
            "kv_cache_dtype": self.kv_cache_dtype.name(),
            "tensor_parallel_size": self.engine.tensor_parallel_size,
            "prompt_len": self.prompt_len,
            "completion_len": self.completion_len,
            "gpu": limits.to_json(),
            "decode": self.decode_steps(world, &mut served, &limits)?,
        }))
    }

    /// Creates an engine.
    fn served(&self, world: &Arc<World>, mesh: &Mesh, strict: bool) -> Result<Served> {
        let spec = Arc::new(ModelSpec { eos_token_ids: Vec::new(), ..(*self.spec).clone() });
        let (kind, device) = (self.kind, world.device());
        let tokenizer = Arc::new(Tokenizer::of_ids(spec.vocab_size)?);
        let stages = Stages::new(&self.spec, self.engine.pipeline_parallel_size, &self.pipeline_partition)?;
        let options = EngineOptions { strict, exact: strict && self.exact, ..self.options(world, &stages) };
        let mut engine = Engine::in_stages(spec.clone(), tokenizer, options, EngineRanks::new(mesh, stages))?;
        if let Some(spread) = self.completion_spread {
            engine.limit_completions(spread.limit());
        }
        if let Some(acceptance) = self.replayed_acceptance {
            engine.inject_drafts(DraftInjection::replaying(acceptance));
        }
        let source = |layout: &_| init_unit_on(layout, SEED, kind, device);
        let table = Arc::new(ParamTable::new(spec, 1));
        let mut served = Served::new(world.clone(), table, engine, &source)?;
        if let Some(r) = self.lora_r {
            // Random values everywhere, because B of new adapters would be 0.
            let source = |layout: &UnitLayout| {
                tch::manual_seed(SEED as i64);
                Ok(Tensor::f_randn([layout.len as i64], (kind, device))?.f_mul_scalar(0.02)?)
            };
            served = served.with_adapters(adapters(r), &source)?;
        }
        Ok(served)
    }

    /// Creates an engine, measures its times, and returns both.
    fn measure(&self, world: &Arc<World>, mesh: &Mesh, strict: bool) -> Result<(EngineTimes, Served)> {
        let mut served = self.served(world, mesh, strict)?;
        let (mut seconds, mut prefill_seconds, mut tokens) = (Vec::new(), Vec::new(), 0.0);
        let (mut steps, mut times) = (Steps::default(), StageTimes::default());
        for repeat in 0..=self.repeats {
            let (prefill, _, _) = self.run(world, &mut served, repeat, 1)?;
            if repeat == 0 {
                self.run(world, &mut served, repeat, self.longest().min(WARM_UP_TOKENS))?;
                continue;
            }
            served.engine().take_stage_times();
            let (whole, generated, of_steps) = self.run(world, &mut served, repeat, self.longest())?;
            times += served.engine().take_stage_times();
            tokens = generated;
            seconds.push(whole);
            prefill_seconds.push(prefill);
            steps.add(&of_steps);
        }
        let has_stages = self.engine.pipeline_parallel_size > 1;
        let idle_shares = has_stages.then(|| idle_shares(world, times)).transpose()?;
        let times = EngineTimes {
            seconds: median(seconds),
            prefill_seconds: median(prefill_seconds),
            tokens,
            steps,
            idle_shares,
        };
        Ok((times, served))
    }

    pub(super) fn longest(&self) -> usize {
        self.completion_spread.map_or(self.completion_len, |spread| spread.longest)
    }

    pub(super) fn num_sequences(&self) -> usize {
        self.prompts * self.group * self.engine.num_ranks()
    }

    pub(super) fn max_num_seqs(&self) -> usize {
        if self.max_num_seqs == 0 { self.num_sequences() } else { self.max_num_seqs }
    }

    fn options(&self, world: &World, stages: &Stages) -> EngineOptions {
        let max_model_length = self.prompt_len + self.longest();
        let blocks = self.max_num_seqs() * max_model_length.div_ceil(BLOCK_SIZE);
        let cache_kind = cache_kind(self.kv_cache_dtype, self.kind);
        let fullest = fullest_stage(&self.spec, stages);
        let block_bytes = kv_block_bytes(&fullest, self.engine.tensor_parallel_size, BLOCK_SIZE, cache_kind);
        EngineOptions {
            kv_cache_bytes: blocks * block_bytes,
            block_size: BLOCK_SIZE,
            max_num_seqs: self.max_num_seqs(),
            max_num_batched_tokens: 8192,
            max_model_length,
            kind: self.kind,
            residual: self.residual,
            quantization: self.quantization,
            kv_cache_dtype: self.kv_cache_dtype,
            state_dtype: self.state_dtype,
            device: world.device(),
            strict: self.strict,
            exact: false,
            records_experts: false,
            speculation: self.speculation,
        }
    }

    /// Runs one generation: returns the slowest rank's seconds, the tokens of all ranks, and this rank's steps.
    fn run(&self, world: &World, served: &mut Served, repeat: usize, longest: usize) -> Result<(f64, f64, Steps)> {
        let prompts: Vec<Prompt> = (0..self.prompts).map(|index| prompt(self, world, index)).collect();
        let params = SamplingParams {
            num_generations: self.group,
            max_completion_length: longest,
            step: repeat as u64,
            ..SamplingParams::default()
        };
        let steps = Rc::new(RefCell::new(Steps::default()));
        let of_steps = steps.clone();
        let (mut seconds, generated) = served.with_engine(move |rollout| {
            let (start, mut last) = (Instant::now(), (Instant::now(), 0));
            rollout.on_progress(move |stats| {
                let (before, generated) = std::mem::replace(&mut last, (Instant::now(), stats.num_generated_tokens));
                let batch = stats.num_generated_tokens - generated;
                of_steps.borrow_mut().0.entry(batch).or_default().push(before.elapsed().as_secs_f64() * 1e3);
            });
            let groups = rollout.generate(&prompts, &params, |_| ())?;
            let completions = groups.iter().flat_map(|group| &group.completions);
            let generated: usize = completions.map(|completion| completion.token_ids.len()).sum();
            Ok(([start.elapsed().as_secs_f64()], generated as f64))
        })?;
        all_reduce_f64(&*world.group(), &mut seconds, ReduceOp::Max)?;
        let mut generated = [generated];
        all_reduce_f64(&*world.group(), &mut generated, ReduceOp::Sum)?;
        let steps = steps.take();
        Ok((seconds[0], generated[0], steps))
    }
}

/// Milliseconds between the results of successive steps, by the number of tokens of the later step.
#[derive(Debug, Default)]
struct Steps(BTreeMap<usize, Vec<f64>>);

impl Steps {
    fn add(&mut self, other: &Self) {
        for (&batch, times) in &other.0 {
            self.0.entry(batch).or_default().extend(times);
        }
    }

    /// Median times of the batch sizes that occurred at least ten times.
    fn medians(&self) -> BTreeMap<usize, f64> {
        let often = self.0.iter().filter(|(_, times)| times.len() >= 10);
        often.map(|(&batch, times)| (batch, median(times.clone()))).collect()
    }
}

fn prompt(bench: &GenerateBench, world: &World, index: usize) -> Prompt {
    let id = world.rank() * bench.prompts + index;
    let first = id * bench.prompt_len;
    let token_ids = (first..first + bench.prompt_len).map(|at| token(at, bench.spec.vocab_size)).collect();
    Prompt { id: id as u64, text: String::new(), token_ids, columns: Arc::default() }
}
