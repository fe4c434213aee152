//! Predicts the seconds of a step before launch, from what generation, training and the transitions between them read, multiply, launch and exchange.
//! The rates were fitted to half of the steps measured in docs/benchmarks (`tests/golden/recorded_steps.jsonl`); a test compares predictions with the
//! other half.

mod lengths;
mod rates;
#[cfg(test)]
mod tests;
mod train;

use std::fmt;

use tch::{Device, Kind};

pub use lengths::{CompletionLengths, ExpectedLengths};
pub use rates::Gpu;
use rates::{ALL_REDUCE_BYTE_S, ALL_REDUCE_S, DECODE, TRAIN, TRANSITIONS};

use crate::config::{
    Config, DynamicSampling, GradientCheckpointing, KvCacheDtype, Mode, OptimizerResidency, Quantization, Roles,
    RolloutQuantization,
};
use crate::model::ModelSpec;
use crate::ops::mxfp4::WEIGHT_BYTES;
use crate::rollout::state_page_bytes;

/// Bytes of an element of bfloat16.
const ELEMENT_BYTES: f64 = 2.0;

/// A step whose seconds are predicted.
#[derive(Debug, Clone, Copy)]
pub struct PlannedStep<'a> {
    /// The run's configuration.
    pub config: &'a Config,
    /// The model.
    pub spec: &'a ModelSpec,
    /// Number of ranks that train and of ranks that generate.
    pub roles: Roles,
    /// Number of prompts of a generation batch, over all ranks.
    pub num_prompts: usize,
    /// Number of completions per prompt.
    pub group: usize,
    /// Number of optimizer updates in one pass over the batch.
    pub updates: usize,
    /// Lengths of prompts and completions.
    pub lengths: ExpectedLengths,
    /// Recomputation in the backward pass.
    pub keep: GradientCheckpointing,
    /// Where optimizer state is stored.
    pub residency: OptimizerResidency,
    /// Bytes of optimizer state per rank.
    pub state_bytes: usize,
    /// Bytes of device memory that an optimizer step reads and writes per rank.
    pub optimizer_step_bytes: usize,
}

/// Seconds of a generation batch, which is a step if it makes one update, and of its parts, for the slowest rank.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct StepSeconds {
    /// Seconds for sampling all completions.
    pub generate_s: f64,
    /// Seconds for reference scores, forward, backward and optimizer.
    pub train_s: f64,
    /// Seconds for moving weights and optimizer state, and mapping the KV cache.
    pub transitions_s: f64,
    /// Seconds for all of it, including an assumed constant for rewards and packing.
    pub step_s: f64,
    /// Updates that a generation batch makes, each of which is a step of `max_steps`.
    pub num_updates: usize,
}

impl StepSeconds {
    /// Predicts the step on GPUs of this kind on one host.
    ///
    /// # Errors
    /// The feature of the run that no measured step had.
    pub fn predict(work: &PlannedStep<'_>, gpu: Gpu) -> Result<Self, &'static str> {
        work.check()?;
        let (generate_s, train_s) = (work.generate_s(gpu), work.update_s(gpu) * (1.0 + TRAIN.whole_step));
        let transitions_s = work.transitions_s();
        let step_s = match (work.config.mode, work.config.split.async_steps) {
            (Mode::Split, 1..) => generate_s.max(train_s) + transitions_s,
            _ => generate_s + train_s + transitions_s + TRANSITIONS.rewards_s,
        };
        Ok(Self { generate_s, train_s, transitions_s, step_s, num_updates: work.updates * work.config.num_iterations })
    }
}

impl fmt::Display for StepSeconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { generate_s, train_s, transitions_s, step_s, num_updates } = self;
        match num_updates {
            0 | 1 => write!(f, "a step: {step_s:.2} s")?,
            _ => write!(f, "a generation batch of {num_updates} steps: {step_s:.2} s")?,
        }
        let rest = step_s - generate_s - train_s - transitions_s;
        write!(f, " (generate {generate_s:.2}, train {train_s:.2}, transitions {transitions_s:.2}")?;
        // Sampling ahead overlaps with training.
        if rest > 0.0 { write!(f, ", rewards {rest:.2})") } else { write!(f, ")") }
    }
}

impl PlannedStep<'_> {
    /// Refuses features that no measured step had.
    fn check(&self) -> Result<(), &'static str> {
        let config = self.config;
        let unknown = [
            (config.quantization != Quantization::None, "quantization other than none"),
            (config.pipeline_parallel_size > 1, "engines in stages"),
            (config.has_teacher(), "a teacher"),
            (config.tools.takes_turns(), "tools, environments or agents"),
            (config.exact, "exact = true"),
            (config.strict, "strict = true"),
            (config.full_determinism, "full_determinism = true"),
            (config.dynamic_sampling == DynamicSampling::Replace, "dynamic_sampling = replace"),
        ];
        unknown.into_iter().find(|(is_so, _)| *is_so).map_or(Ok(()), |(_, what)| Err(what))
    }

    /// Seconds of generation: prefill of each prompt once per group, then decode steps while sequences end; in waves if the engine decodes fewer at
    /// once.
    fn generate_s(&self, gpu: Gpu) -> f64 {
        let (config, tp) = (self.config, self.config.tensor_parallel_size as f64);
        let num_engines = (self.roles.num_generators / config.tensor_parallel_size).max(1);
        let all_groups = self.num_prompts.div_ceil(num_engines) as f64;
        let waves = (all_groups * self.group as f64 / config.max_num_seqs as f64).max(1.0);
        let (groups, rows) = (all_groups / waves, all_groups / waves * self.group as f64);
        let prompt_tokens = groups * self.lengths.prompt;
        let rate = gpu.product_flop_per_s * DECODE.prefill_share(config.rollout_quantization, self.has_experts());
        let sums_s = self.exchange_s(prompt_tokens) - self.exchange_s(0.0);
        let mut seconds = 2.0 * self.block_params() * prompt_tokens / tp / rate + sums_s;
        let lengths = self.lengths.completion.quantiles();
        let mut done = 1.0; // prefill samples the first token
        for (index, &length) in lengths.iter().enumerate() {
            let alive = rows * (lengths.len() - index) as f64 / lengths.len() as f64;
            let cached = groups.min(alive) * self.lengths.prompt + alive * (done + length) / 2.0;
            seconds += (length - done).max(0.0) * self.decode_s(gpu, alive, cached);
            done = length.max(done);
        }
        waves * seconds
    }

    /// Seconds of a decode step of `rows` sequences whose cache holds `cached` tokens, counting shared prompts once.
    fn decode_s(&self, gpu: Gpu, rows: f64, cached: f64) -> f64 {
        let Self { config, spec, .. } = *self;
        let (tp_size, quantization) = (config.tensor_parallel_size, config.rollout_quantization);
        let is_fp8 = matches!(quantization, RolloutQuantization::Fp8 | RolloutQuantization::Int8);
        let (tp, layers) = (tp_size as f64, spec.num_layers() as f64);
        let (blocks, head) = (self.block_params(), self.head_params());
        let read = blocks + spec.num_params_hit(rows.max(1.0)) - spec.num_active_params() as f64;
        let element_bytes = if is_fp8 { 1.0 } else { ELEMENT_BYTES };
        let saved_bytes = match quantization {
            RolloutQuantization::Mxfp4 => (ELEMENT_BYTES - WEIGHT_BYTES) * self.expert_params_hit(rows.max(1.0)),
            _ => 0.0,
        };
        let read_bytes = element_bytes * read + ELEMENT_BYTES * head - saved_bytes;
        let read_s = read_bytes / tp / (gpu.memory_bytes_per_s * DECODE.weights);
        let block_flop = blocks / if is_fp8 { DECODE.fp8_gain } else { 1.0 };
        let multiply_s = 2.0 * rows * (block_flop + head) / tp / (gpu.product_flop_per_s * DECODE.products);
        let narrow = if config.kv_cache_dtype == KvCacheDtype::Auto { 1.0 } else { DECODE.fp8_cache };
        let cache_s = cached * ELEMENT_BYTES * spec.cached_elements(tp_size) as f64 * narrow / DECODE.cache_bytes_per_s;
        let page = state_page_bytes(spec, tp_size, Kind::BFloat16, config.mamba_ssm_cache_dtype, Device::Cpu) as f64;
        let states_s = 2.0 * rows * page / (gpu.memory_bytes_per_s * DECODE.states);
        let launches_s = layers * if is_fp8 { DECODE.fp8_layer_s } else { DECODE.layer_s } + DECODE.step_s;
        let sampling_s = DECODE.logit_bytes * rows * spec.vocab_size as f64 / tp / gpu.memory_bytes_per_s;
        let experts_s = spec.num_expert_layers() as f64 * DECODE.experts_s;
        let adapters_s = match config.lora.r {
            Some(_) => layers * (DECODE.adapters_s + DECODE.adapters_row_s * rows),
            None => 0.0,
        };
        let products_s = read_s.hypot(multiply_s);
        products_s + cache_s + states_s + launches_s + sampling_s + experts_s + adapters_s + self.exchange_s(rows)
    }

    /// Seconds of the all-reduces over a tensor-parallel group for this many rows, two per layer.
    fn exchange_s(&self, rows: f64) -> f64 {
        if self.config.tensor_parallel_size == 1 {
            return 0.0;
        }
        let bytes = rows * ELEMENT_BYTES * self.spec.hidden_size as f64;
        2.0 * self.spec.num_layers() as f64 * (ALL_REDUCE_S + bytes * ALL_REDUCE_BYTE_S)
    }

    /// Seconds for mapping the cache, gathering sharded weights, and copying state to the host; the copy back is overlapped.
    fn transitions_s(&self) -> f64 {
        if self.config.mode == Mode::Split {
            return 2.0 * TRANSITIONS.fixed_s;
        }
        let trainers = self.roles.num_trainers as f64;
        let gathered = if self.config.zero.stage == 3 { ELEMENT_BYTES * self.spec.num_params() as f64 } else { 0.0 };
        let gather_s = gathered * (trainers - 1.0) / trainers * TRANSITIONS.gather_byte_s;
        let swapped = if self.residency == OptimizerResidency::Swap { self.state_bytes as f64 } else { 0.0 };
        TRANSITIONS.fixed_s + gather_s + swapped / TRANSITIONS.host_bytes_per_s
    }

    /// Number of block weights that a token is multiplied with.
    fn block_params(&self) -> f64 {
        let embedded = if self.spec.tie_word_embeddings { 1.0 } else { 2.0 };
        self.spec.num_active_params() as f64 - embedded * self.head_params()
    }

    /// Expected number of experts' weights that a batch is multiplied with.
    fn expert_params_hit(&self, tokens: f64) -> f64 {
        let linears = self.spec.layers.iter().flat_map(|block| block.linears());
        let all: usize = linears.map(|linear| linear.experts.unwrap_or(0) * linear.rows() * linear.columns).sum();
        all as f64 + self.spec.num_params_hit(tokens) - self.spec.num_params() as f64
    }

    fn head_params(&self) -> f64 {
        (self.spec.vocab_size * self.spec.hidden_size) as f64
    }

    fn has_experts(&self) -> bool {
        self.spec.num_expert_layers() > 0
    }
}
