//! The memory plan: bytes of every class in every phase, from formulas exported by train, rollout and colocate, known before anything is allocated.
//! Also the predicted seconds of a step, from rates fitted to measured steps.

mod advice;
mod choices;
mod classes;
mod display;
mod fit;
mod network;
mod role;
mod seconds;
mod shortage;
#[cfg(test)]
mod tests;

use tch::{Device, Kind};

use choices::Choices;
pub use network::NetworkPlan;
pub use role::Role;
pub use seconds::{CompletionLengths, ExpectedLengths, Gpu, PlannedStep, StepSeconds};
use shortage::MemoryShortage;

use crate::config::{
    BatchPlan, Config, GradientCheckpointing, OptimizerResidency, ReferenceResidency, RouterReplay, WorldSize,
};
use crate::cuda::{self, Placement, residual_kind};
use crate::error::{Error, Result};
use crate::memory;
use crate::model::{Format, ModelSpec, ParamTable, Plain};
use crate::ranks::{ReduceOp, World, all_reduce_f64};
use crate::rollout::{EngineOptions, SpeculationOptions};
use crate::train::{MicroBatchShape, Moment, TrainedModel, UpdateCourse, fullest_of_reference};

/// Bytes of one class of memory on one rank.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ClassBytes {
    /// The name of the class.
    pub class: &'static str,
    /// Bytes on the device while training.
    pub train_bytes: usize,
    /// Bytes on the device while generating.
    pub rollout_bytes: usize,
    /// Bytes on the host, if the class can be there.
    pub host_bytes: usize,
}

/// The memory that a run will hold on each rank.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct MemoryPlan {
    /// The role of the ranks that the plan is for.
    pub role: Role,
    /// Bytes by class of memory.
    pub classes: Vec<ClassBytes>,
    /// Where optimizer state is stored.
    pub optimizer: OptimizerResidency,
    /// Where reference weights are stored.
    pub reference: ReferenceResidency,
    /// Why these residencies were chosen.
    pub reason: String,
    /// Which activations backward recomputes.
    pub gradient_checkpointing: GradientCheckpointing,
    /// Number of ranks that share each micro-batch.
    pub sequence_parallel_size: usize,
    /// Bytes per parameter and per token, as text for a check by hand.
    pub formula: String,
    /// Maximum tokens of a micro-batch, all of them scored, that leaves a tenth of the memory free.
    pub largest_micro_batch: usize,
    /// How many all-gathers larger micro-batches would save, if they fit and weights are gathered for each; else empty.
    pub micro_batch_advice: String,
    /// Bytes of the KV cache on each rank.
    pub kv_cache_bytes: usize,
    /// Number of KV blocks on each rank.
    pub num_kv_blocks: usize,
    /// Tokens per block of the KV cache.
    pub kv_block_size: usize,
    /// Maximum length of prompt and completion together, in tokens.
    pub max_model_length: usize,
    /// Number of sequences of a generation batch that one engine decodes at once.
    pub num_seqs: usize,
    /// Training's peak, which the classes include.
    pub fullest: Moment,
    /// The memory that the rank has.
    pub room: Room,
}

/// The memory available to one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Room {
    /// Bytes of device memory available to this rank.
    pub available_bytes: usize,
    /// Bytes of host memory for swapped state; `None` on a CPU, where device and host are the same memory.
    pub swap_bytes: Option<usize>,
}

impl Room {
    /// The memory available to a process that shares this machine with others, `local_world_size` in total.
    ///
    /// # Errors
    /// [`Environment`](crate::Error::Environment) if it cannot be determined; [`Cuda`](crate::Error::Cuda).
    pub fn available(placement: Placement, local_world_size: usize) -> Result<Self> {
        let host_bytes = memory::available_host_bytes()? / local_world_size;
        Ok(match placement.on_cuda {
            true => Self { available_bytes: cuda::available_bytes()?, swap_bytes: Some(host_bytes) },
            false => Self { available_bytes: host_bytes, swap_bytes: None },
        })
    }

    /// The minimum of the available memory over the ranks, so that all make the same plan; collective over the world.
    ///
    /// # Errors
    /// The errors of [`Room::available`] and of [`Collective`](crate::ranks::Collective).
    pub fn common(placement: Placement, world: &World) -> Result<Self> {
        let Self { available_bytes, swap_bytes } = Self::available(placement, world.local_size())?;
        let mut least = [available_bytes as f64, swap_bytes.unwrap_or(0) as f64]; // exact below 2^53 bytes
        all_reduce_f64(&*world.group(), &mut least, ReduceOp::Min)?;
        let [available_bytes, common_swap_bytes] = least.map(|bytes| bytes as usize);
        Ok(Self { available_bytes, swap_bytes: swap_bytes.map(|_| common_swap_bytes) })
    }
}

/// The inputs of a plan.
#[derive(Debug, Clone, Copy)]
pub struct PlanInput<'a> {
    /// The run's configuration.
    pub config: &'a Config,
    /// The layout of the model's weights, for its shard group.
    pub table: &'a ParamTable,
    /// The layout of a teacher's weights, if there is one.
    pub teacher: Option<&'a ParamTable>,
    /// Dtype of weights and activations.
    pub kind: Kind,
    /// The role of the rank.
    pub role: Role,
    /// How a generation batch is distributed over ranks.
    pub batch: BatchPlan,
    /// Number of ranks in total and on each node.
    pub world_size: WorldSize,
    /// The layers on a rank of an engine. With several stages, those of the stage with the most memory for keys and values.
    pub engine_layers: &'a ModelSpec,
    /// Bytes of the engine's gathered weight slices; 0 if it reads the policy's weights in place.
    pub engine_weight_bytes: usize,
    /// Number of parameters that a generation-only rank holds whole: all or, with several stages, those of the largest stage.
    pub generator_params: usize,
    /// Whether the run starts from existing adapters instead of only a model.
    pub starts_from_adapters: bool,
    /// The memory available to this rank.
    pub room: Room,
}

impl MemoryPlan {
    /// Sums the classes, chooses the residencies and sizes the KV cache.
    ///
    /// `auto` keeps optimizer state and reference weights on the device, unless training would then not leave a tenth of the memory free, or the KV
    /// cache would have fewer blocks than a generation batch can fill. Otherwise it chooses the residency that moves the least data. On a CPU moving
    /// frees nothing. Recomputation is chosen after the residencies: the least that leaves a tenth of the memory free.
    ///
    /// `engine_weights` returns `engine_weight_bytes` for other configurations, which are tried if this one does not fit.
    ///
    /// # Errors
    /// [`Environment`](crate::Error::Environment) for a run that does not fit, with the smallest change that would help.
    pub fn new(input: &PlanInput<'_>, engine_weights: &dyn Fn(&Config) -> Result<usize>) -> Result<Self> {
        choices::choose(input).map_err(|refusal| refusal.explain(input, engine_weights))
    }

    /// Like [`MemoryPlan::new`], but does not search for a change that would help.
    ///
    /// # Errors
    /// [`Environment`](crate::Error::Environment) for a run that does not fit, with the bytes that it needs.
    pub fn without_advice(input: &PlanInput<'_>) -> Result<Self> {
        choices::choose(input).map_err(|refusal| match refusal {
            MemoryShortage::Value(error) => error,
            MemoryShortage::Memory(plan) => {
                let (needed, available) = (human(plan.peak_bytes()), human(plan.room.available_bytes));
                let host = human(plan.swapped_bytes());
                let message = format!("needs {needed} of {available} on the device and {host} of the host");
                Error::Environment { message }
            }
        })
    }

    /// The plan for fixed choices, without the search for the largest micro-batch.
    fn with(choices: Choices, input: &PlanInput<'_>) -> Result<Self, MemoryShortage> {
        let fullest = match input.role {
            Role::Generates => Moment::default(),
            Role::Both | Role::Trains => input.fullest(choices, input.micro_batch_tokens()),
        };
        let mut plan = Self {
            role: input.role,
            classes: classes::classes(choices, fullest, input),
            optimizer: choices.optimizer,
            reference: choices.reference,
            reason: String::new(),
            gradient_checkpointing: choices.gradient_checkpointing,
            sequence_parallel_size: input.config.num_sharers(),
            formula: classes::formula(choices.gradient_checkpointing, fullest, input),
            largest_micro_batch: 0,
            micro_batch_advice: String::new(),
            kv_cache_bytes: 0,
            num_kv_blocks: 0,
            kv_block_size: input.config.kv_block_size,
            max_model_length: input.max_model_length(),
            num_seqs: input.num_seqs(),
            fullest,
            room: input.room,
        };
        if input.role != Role::Trains {
            plan.size_kv_cache(input)?;
        }
        if plan.is_enough() { Ok(plan) } else { Err(MemoryShortage::Memory(Box::new(plan))) }
    }

    /// The maximum over the phases of device bytes. On a CPU this includes host memory, which is the same memory.
    pub fn peak_bytes(&self) -> usize {
        self.train_bytes().max(self.rollout_bytes())
    }

    /// Bytes while generating, counted like [`Self::peak_bytes`].
    fn rollout_bytes(&self) -> usize {
        self.host_bytes_of_device() + self.sum(|class| class.rollout_bytes)
    }

    /// Bytes while training, counted like [`Self::peak_bytes`].
    fn train_bytes(&self) -> usize {
        self.host_bytes_of_device() + self.sum(|class| class.train_bytes)
    }

    /// Host bytes that count as device bytes, because both are the same memory.
    fn host_bytes_of_device(&self) -> usize {
        if self.room.swap_bytes.is_none() { self.sum(|class| class.host_bytes) } else { 0 }
    }

    fn sum(&self, bytes: impl Fn(&ClassBytes) -> usize) -> usize {
        self.classes.iter().map(bytes).sum()
    }
}

impl PlanInput<'_> {
    fn model(&self) -> TrainedModel<'_> {
        TrainedModel::of(self.config, self.table, self.kind)
    }

    /// The models that only score, with their classes: the reference and a teacher.
    fn frozen(&self) -> impl Iterator<Item = (&'static str, &ParamTable)> {
        let reference = self.config.has_reference().then_some((classes::REFERENCE, self.table));
        reference.into_iter().chain(self.teacher.map(|table| (classes::TEACHER, table)))
    }

    /// The maximum sequence length: as configured or the model's, but at most that of the longest prompt and completion.
    fn max_model_length(&self) -> usize {
        let Config { max_model_length, max_prompt_length, max_completion_length, .. } = *self.config;
        let context = max_model_length.unwrap_or(self.table.spec.max_position_embeddings);
        // A policy that is its own teacher scores completions with longer prompts.
        let teachers = if self.config.teaches_itself() { self.config.distillation.max_reprompt_len } else { 0 };
        max_prompt_length.map_or(context, |prompt| context.min(prompt.max(teachers) + max_completion_length))
    }

    /// Number of sequences of a generation batch that one engine decodes at once.
    fn num_seqs(&self) -> usize {
        let config = self.config;
        let groups = self.batch.num_begun.div_ceil(self.batch.roles.num_generators);
        let of_engine = groups.saturating_mul(config.num_generations).saturating_mul(config.engine_shape().num_ranks());
        of_engine.min(config.max_num_seqs)
    }

    /// Number of completions of an update on this rank, together with the ranks that share its micro-batches.
    fn update_completions(&self) -> usize {
        let BatchPlan { generation_batch_size, roles, updates_per_generation, .. } = self.batch;
        let shares = roles.num_trainers / self.config.num_sharers();
        generation_batch_size / shares / updates_per_generation
    }

    /// Maximum tokens of an update on this rank, together with the ranks that share its micro-batches.
    fn update_tokens(&self) -> usize {
        self.update_completions() * self.max_model_length()
    }

    /// Bytes of the recorded experts for all tokens of an update.
    fn recorded_bytes(&self) -> usize {
        let trains = self.role != Role::Generates;
        if trains { self.model().recorded_bytes(self.config.objective.router_replay, self.update_tokens()) } else { 0 }
    }

    /// Tokens of the largest micro-batch: the budget, or one longer sequence.
    fn micro_batch_tokens(&self) -> usize {
        let longest = self.config.max_prompt_length.map_or(0, |_| self.max_model_length());
        self.config.max_tokens_per_micro_batch.max(longest).min(self.update_tokens())
    }

    fn micro_batch(&self, tokens: usize) -> MicroBatchShape {
        let shares_prompts = self.config.share_prompts && self.table.spec.can_share_prompts();
        MicroBatchShape {
            tokens,
            scored_tokens: tokens,
            num_sequences: self.update_completions() * (1 + usize::from(shares_prompts)),
            shares_prompts,
            num_top: self.config.distillation.num_top().unwrap_or(0),
        }
    }

    /// The peak of scoring and training with micro-batches of `tokens` tokens, all of them scored.
    fn fullest(&self, choices: Choices, tokens: usize) -> Moment {
        let (model, several) = (self.model(), [self.micro_batch(tokens); 2]);
        let update = model.fullest(&UpdateCourse {
            keep: choices.gradient_checkpointing,
            micro_batches: if tokens < self.update_tokens() { &several } else { &several[..1] },
            is_warm: self.batch.updates_per_generation * self.config.num_iterations > 1,
            streams: choices.optimizer == OptimizerResidency::Stream,
        });
        let on_host = choices.reference == ReferenceResidency::Host;
        let frozen = self.frozen().map(|(class, table)| {
            let format: &'static dyn Format = if class == classes::REFERENCE { model.format } else { &Plain }; // a teacher is not quantized
            fullest_of_reference(table, &model, format, on_host, several[0])
        });
        frozen
            .chain([model.fullest_of_scores(several[0])])
            .fold(update, |a, b| if b.total() > a.total() { b } else { a })
    }
}

/// The options of a run's engine.
pub(crate) fn engine_options(
    config: &Config,
    max_model_length: usize,
    kv_cache_bytes: usize,
    kind: Kind,
    device: Device,
) -> EngineOptions {
    EngineOptions {
        kv_cache_bytes,
        block_size: config.kv_block_size,
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_model_length,
        kind,
        residual: residual_kind(config.model.residual_dtype, kind),
        quantization: config.rollout_quantization,
        kv_cache_dtype: config.kv_cache_dtype,
        state_dtype: config.mamba_ssm_cache_dtype,
        device,
        strict: config.strict || config.exact && device.is_cuda(),
        exact: config.exact,
        records_experts: config.objective.router_replay == RouterReplay::R3,
        speculation: SpeculationOptions { method: config.speculation, num_tokens: config.num_speculative_tokens },
    }
}

/// Formats bytes in the largest unit in which the number is at least 1.
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
