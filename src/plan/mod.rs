//! MemoryPlan: bytes of every class in every phase, from the formulas that train, rollout and colocate export, known before
//! anything is allocated.

mod choices;
#[cfg(test)]
mod tests;

use std::fmt;

use tch::{Device, Kind};

use choices::Choices;

use crate::config::{Config, GradientCheckpointing, OptimizerResidency, ReferenceResidency};
use crate::cuda::{self, Placement};
use crate::error::{Error, Result};
use crate::memory;
use crate::model::{LoraSpec, ModelSpec, ParamTable};
use crate::rollout::{EngineOptions, engine_buffer_bytes, kv_block_bytes};
use crate::train::{ActivationBytes, GradientOptions, MicroBatchShape, ReferenceBytes, TrainBytes, WORKSPACE_BYTES};

/// Share of a CPU's free memory that the KV cache takes at most where its size is left to the plan.
const MAX_KV_SHARE: f64 = 0.5;

/// The class that micro-batches and recomputation change.
const ACTIVATIONS: &str = "activations";

/// Bytes of one class on one rank.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ClassBytes {
    /// What it is.
    pub class: &'static str,
    /// While training.
    pub train_bytes: usize,
    /// While generating.
    pub rollout_bytes: usize,
    /// On the host, where it can go there.
    pub host_bytes: usize,
}

/// What a run will hold on each rank.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct MemoryPlan {
    /// By class.
    pub classes: Vec<ClassBytes>,
    /// Where optimizer state lives.
    pub optimizer: OptimizerResidency,
    /// Where reference weights live.
    pub reference: ReferenceResidency,
    /// Why both were chosen.
    pub reason: String,
    /// What is recomputed in backward.
    pub gradient_checkpointing: GradientCheckpointing,
    /// Bytes a parameter and a token, as they are counted by hand.
    pub formula: String,
    /// Most tokens of a micro-batch that this memory has room for, all of them scored.
    pub largest_micro_batch: usize,
    /// Size of the KV cache on each rank.
    pub kv_cache_bytes: usize,
    /// KV blocks on each rank.
    pub num_kv_blocks: usize,
    /// Tokens per KV block.
    pub kv_block_size: usize,
    /// Longest prompt and completion together.
    pub max_model_length: usize,
    /// What the rank has.
    pub room: Room,
}

/// Memory of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Room {
    /// Of the device, for this rank.
    pub available_bytes: usize,
    /// Of the host beside that, for what is swapped; `None` on a CPU, where it is one memory.
    pub swap_bytes: Option<usize>,
}

impl Room {
    /// What a process has that shares this machine with others, `local_world_size` in all.
    ///
    /// # Errors
    /// [`Error::Environment`] where it cannot be told; [`Error::Cuda`].
    pub fn available(placement: Placement, local_world_size: usize) -> Result<Self> {
        let host_bytes = memory::available_host_bytes()? / local_world_size;
        Ok(match placement.on_cuda {
            true => Self { available_bytes: cuda::available_bytes()?, swap_bytes: Some(host_bytes) },
            false => Self { available_bytes: host_bytes, swap_bytes: None },
        })
    }
}

/// What the plan needs to know of a run beside its configuration.
#[derive(Debug, Clone, Copy)]
pub struct PlanInput<'a> {
    /// The run.
    pub config: &'a Config,
    /// The layout of its weights, for its shard group.
    pub table: &'a ParamTable,
    /// Type of weights and activations.
    pub kind: Kind,
    /// Completions that this rank trains on in one update.
    pub completions_per_update: usize,
    /// Bytes of the engine's gathered weight slices; 0 where it reads in place.
    pub engine_weight_bytes: usize,
    /// What this rank has.
    pub room: Room,
}

impl MemoryPlan {
    /// Adds up the classes, picks the residencies and sizes the KV cache.
    ///
    /// `auto` keeps optimizer and reference on the device unless the run does not fit then, or the KV cache would not have all
    /// the blocks that it can use; of the others it takes what moves least. On a CPU moving frees nothing. Recomputation gives
    /// way to them: beside what was chosen, the least of it that leaves a tenth of the memory free.
    ///
    /// # Errors
    /// [`Error::Environment`] for a run that cannot fit, with the smallest change that would help.
    pub fn new(input: &PlanInput<'_>) -> Result<Self> {
        choices::choose(input)
    }

    fn with(choices: Choices, input: &PlanInput<'_>) -> Result<Self> {
        let Choices { optimizer, reference, gradient_checkpointing } = choices;
        let PlanInput { config, table, kind, .. } = *input;
        let spec = &table.spec;
        let gradients = GradientOptions::new(config.zero.grad_accum_dtype, config.zero.reduce_dtype);
        let lora = LoraSpec::new(&config.lora);
        let train = TrainBytes::of(table, (lora.as_ref(), config.quantization), config.zero.stage, kind, gradients);
        let (state, buckets) = (train.optimizer, train.optimizer_buckets);
        let (state_train, state_rollout, state_host) = match optimizer {
            OptimizerResidency::Resident => (state, state, 0),
            OptimizerResidency::Swap => (state, 0, state),
            OptimizerResidency::Stream => (buckets, 0, state),
        };
        let class = |class, train_bytes, rollout_bytes, host_bytes| ClassBytes {
            class,
            train_bytes,
            rollout_bytes,
            host_bytes,
        };
        let activations = activation_bytes(input, gradient_checkpointing);
        let mut classes = vec![
            class("policy weights", train.weights + train.gathered, train.weights, 0),
            class("master weights, Adam m and v", state_train, state_rollout, state_host),
            class("gradients", train.gradients + train.gradient_scratch, 0, 0),
            class(ACTIVATIONS, activations.peak(), 0, 0),
        ];
        // A frozen base is its own reference.
        if config.beta > 0.0 && lora.is_none() {
            let on_host = reference == ReferenceResidency::Host;
            let ReferenceBytes { weights, gathered } = ReferenceBytes::new(table, kind, on_host);
            let [device, host] = if on_host { [0, weights] } else { [weights, 0] };
            classes.push(class("reference weights", device + gathered, device, host));
        }
        if input.engine_weight_bytes > 0 {
            classes.push(class("engine weights (gathered slices)", 0, input.engine_weight_bytes, 0));
        }
        let max_model_length = config.max_model_length.unwrap_or(spec.max_position_embeddings);
        if input.room.swap_bytes.is_some() {
            let options = EngineOptions {
                kv_cache_bytes: 0,
                block_size: config.kv_block_size,
                max_num_seqs: config.max_num_seqs,
                max_num_batched_tokens: config.max_num_batched_tokens,
                max_model_length,
                kind,
                device: Device::Cpu,
                strict: false,
            };
            let bytes = engine_buffer_bytes(spec, &options, config.tensor_parallel_size);
            classes.push(class("engine buffers", 0, bytes, 0));
            classes.push(class("workspace of products", WORKSPACE_BYTES, WORKSPACE_BYTES, 0));
        }
        let mut plan = Self {
            classes,
            optimizer,
            reference,
            reason: String::new(),
            gradient_checkpointing,
            formula: formula(input, &train, &activations),
            largest_micro_batch: 0,
            kv_cache_bytes: 0,
            num_kv_blocks: 0,
            kv_block_size: config.kv_block_size,
            max_model_length,
            room: input.room,
        };
        plan.size_kv_cache(config, spec, kind)?;
        plan.largest_micro_batch = plan.largest_micro_batch(input, gradient_checkpointing);
        plan.check(input)?;
        Ok(plan)
    }

    /// The largest sum over the phases; on a CPU host memory included, as it is one memory.
    pub fn peak_bytes(&self) -> usize {
        let rollout = self.host_bytes_of_device() + self.sum(|class| class.rollout_bytes);
        self.train_bytes().max(rollout)
    }

    /// While training, as [`Self::peak_bytes`] counts.
    fn train_bytes(&self) -> usize {
        self.host_bytes_of_device() + self.sum(|class| class.train_bytes)
    }

    /// What counts as the device's because the host's memory is the device's.
    fn host_bytes_of_device(&self) -> usize {
        if self.room.swap_bytes.is_none() { self.sum(|class| class.host_bytes) } else { 0 }
    }

    fn sum(&self, bytes: impl Fn(&ClassBytes) -> usize) -> usize {
        self.classes.iter().map(bytes).sum()
    }

    /// As many blocks as all sequences at their longest can use, within the share of what the rest leaves; or what the
    /// configuration says.
    fn size_kv_cache(&mut self, config: &Config, spec: &ModelSpec, kind: Kind) -> Result<()> {
        let block_bytes = kv_block_bytes(spec, config.tensor_parallel_size, config.kv_block_size, kind);
        // A GPU is the run's alone; a CPU's memory is not, and its pages are taken for good.
        let (taken, share) = match self.room.swap_bytes {
            Some(_) => (self.sum(|class| class.rollout_bytes), 1.0),
            None => (self.peak_bytes(), MAX_KV_SHARE),
        };
        let free = self.room.available_bytes.saturating_sub(taken) as f64;
        let longest_blocks = self.max_model_length.div_ceil(config.kv_block_size);
        let useful = config.max_num_seqs.saturating_mul(longest_blocks).saturating_mul(block_bytes);
        let affordable = (free * share * config.gpu_memory_utilization) as usize;
        // The least is asked for in any case: `check` says what it lacks.
        let least = longest_blocks * block_bytes;
        let bytes = config.kv_cache_bytes.unwrap_or(useful.min(affordable).max(least));
        self.num_kv_blocks = bytes / block_bytes;
        self.kv_cache_bytes = self.num_kv_blocks * block_bytes;
        if self.num_kv_blocks < longest_blocks {
            return Err(Error::invalid_value(
                "kv_cache_bytes",
                bytes,
                format!(
                    "at least {least} bytes: {longest_blocks} blocks of {} tokens for one sequence of max_model_length {}",
                    config.kv_block_size, self.max_model_length
                ),
            ));
        }
        let class = "KV cache";
        self.classes.push(ClassBytes { class, train_bytes: 0, rollout_bytes: self.kv_cache_bytes, host_bytes: 0 });
        Ok(())
    }

    /// Most tokens whose activations fit beside what else training holds.
    fn largest_micro_batch(&self, input: &PlanInput<'_>, keep: GradientCheckpointing) -> usize {
        let room = self.room.available_bytes.saturating_sub(self.train_bytes_without_activations());
        ActivationBytes::largest_micro_batch(&input.table.spec, input.kind, keep, input.config.share_prompts, room)
    }

    fn train_bytes_without_activations(&self) -> usize {
        let of_activations = |class: &ClassBytes| if class.class == ACTIVATIONS { class.train_bytes } else { 0 };
        self.train_bytes() - self.sum(of_activations)
    }

    fn check(&self, input: &PlanInput<'_>) -> Result<()> {
        let swapped = self.sum(|class| class.host_bytes);
        if let Some(host) = self.room.swap_bytes.filter(|host| *host < swapped) {
            let message = format!(
                "residency.optimizer = {} and residency.reference = {} need {} of host memory per rank and {} are \
                 available; set resident",
                self.optimizer.name(),
                self.reference.name(),
                human(swapped),
                human(host)
            );
            return Err(Error::Environment { message });
        }
        let peak = self.peak_bytes();
        if peak <= self.room.available_bytes {
            return Ok(());
        }
        Err(Error::Environment {
            message: format!(
                "this run needs {} per rank and {} are available; {}, or use a smaller model\n{self}",
                human(peak),
                human(self.room.available_bytes),
                self.smallest_change(input)
            ),
        })
    }

    /// The first change with which this run fits, from the one that costs least time; tried, where activations alone change.
    fn smallest_change(&self, input: &PlanInput<'_>) -> String {
        use GradientCheckpointing::{Full, None, Selective};
        let (config, keep) = (input.config, self.gradient_checkpointing);
        let others = self.train_bytes_without_activations();
        if self.sum(|class| class.rollout_bytes) > self.room.available_bytes {
            let (length, cache) = (self.max_model_length, self.kv_cache_bytes);
            return format!("lower max_model_length (is {length}) or kv_cache_bytes ({cache})");
        }
        let more: &[GradientCheckpointing] = match keep {
            None => &[Selective, Full],
            Selective => &[Full],
            Full => &[],
        };
        let fits = |keep: &&GradientCheckpointing| {
            others + activation_bytes(input, **keep).peak() <= self.room.available_bytes
        };
        if let Some(keep) = more.iter().find(fits) {
            return format!("set gradient_checkpointing = {}", keep.name());
        }
        let (tokens, stage) = (self.largest_micro_batch(input, Full), config.zero.stage);
        if tokens > config.max_completion_length {
            let recompute = if keep == Full { "" } else { "gradient_checkpointing = full and " };
            return format!("set {recompute}max_tokens_per_micro_batch = {tokens}");
        }
        if input.table.shards > 1 && stage < 3 {
            return format!("raise zero.stage from {stage} to {}", stage + 1);
        }
        "use more GPUs or ones with more memory".to_owned()
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<34} {:>11} {:>11} {:>11}", "memory per rank", "train", "rollout", "host")?;
        for class in &self.classes {
            let [train, rollout, host] = [class.train_bytes, class.rollout_bytes, class.host_bytes].map(human);
            writeln!(f, "{:<34} {train:>11} {rollout:>11} {host:>11}", class.class)?;
        }
        let sum = |bytes: fn(&ClassBytes) -> usize| human(self.sum(bytes));
        let (train, rollout) = (sum(|class| class.train_bytes), sum(|class| class.rollout_bytes));
        writeln!(f, "{:<34} {train:>11} {rollout:>11} {:>11}", "sum", sum(|class| class.host_bytes))?;
        writeln!(f, "peak {} of {} available", human(self.peak_bytes()), human(self.room.available_bytes))?;
        let (blocks, size) = (self.num_kv_blocks, self.kv_block_size);
        writeln!(
            f,
            "KV cache: {blocks} blocks of {size} tokens; largest micro-batch: {} tokens",
            self.largest_micro_batch
        )?;
        writeln!(f, "{}", self.formula)?;
        let (optimizer, reference) = (self.optimizer.name(), self.reference.name());
        writeln!(f, "residency: optimizer state {optimizer}, reference weights {reference}: {}", self.reason)?;
        write!(f, "gradient_checkpointing: {}", self.gradient_checkpointing.name())
    }
}

/// Of the largest micro-batch, with every token scored: none holds more than this rank's share of an update at its longest.
fn activation_bytes(input: &PlanInput<'_>, keep: GradientCheckpointing) -> ActivationBytes {
    let PlanInput { config, table, kind, .. } = *input;
    let longest = config.max_model_length.unwrap_or(table.spec.max_position_embeddings);
    let tokens = config.max_tokens_per_micro_batch.min(input.completions_per_update * longest);
    let shape = MicroBatchShape { tokens, scored_tokens: tokens, shares_prompts: config.share_prompts };
    ActivationBytes::new(&table.spec, kind, keep, shape)
}

/// What each parameter and each token costs this rank between uses.
fn formula(input: &PlanInput<'_>, train: &TrainBytes, activations: &ActivationBytes) -> String {
    let (parameters, tokens) = (input.table.total as f64, activations.tokens.max(1) as f64);
    let each = |bytes: usize| bytes as f64 / parameters;
    format!(
        "bytes a parameter: {:.2} weights + {:.2} gradients + {:.2} optimizer, x {:.1} M parameters; bytes a token: {:.0} kept \
         + {:.0} at once, x {tokens} tokens",
        each(train.weights),
        each(train.gradients),
        each(train.optimizer),
        parameters / 1e6,
        activations.saved as f64 / tokens,
        activations.transient as f64 / tokens,
    )
}

/// Bytes in the largest unit that leaves a number of at least 1.
pub fn human(bytes: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}
