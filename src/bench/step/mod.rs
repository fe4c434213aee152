//! Whole GRPO steps as the trainer runs them, on random weights, prompts and rewards.

mod report;
mod run;

use std::collections::BTreeMap;
use std::sync::Arc;

use tch::Device;

pub use self::run::{BenchedSteps, bench_step};
use super::floor::TheoreticalStep;
use super::limits::GpuLimits;
use super::memory::predicted_tensor_bytes;
use super::{LengthSpread, token};
use crate::config::{Config, OptimizerResidency, ReferenceResidency};
use crate::error::Result;
use crate::model::ModelSpec;
use crate::phase::Phase;
use crate::plan::MemoryPlan;
use crate::ranks::World;
use crate::train::{MicroBatch, PackOptions, Sequence, TrainedModel, UpdateCourse, pack, reference_bytes};
use crate::trainer::Trainer;
use crate::types::Prompt;

/// Untimed steps before the timed ones. Libraries load in the first, and the second allocates the block that training's tensors are cut from
/// ([`Policy::keep_block_for`](crate::train::Policy::keep_block_for)).
const WARM_UP_STEPS: usize = 2;
/// Steps in addition to the timed ones: the warm-up, and one that is not run, whose batch is sampled ahead in split mode during the last step.
const EXTRA_STEPS: usize = WARM_UP_STEPS + 1;

/// The benchmark of whole steps.
#[derive(Debug, Clone)]
pub struct StepBench {
    /// Name of the model in the output.
    pub model: String,
    /// The model; its end-of-sequence ids are ignored.
    pub spec: Arc<ModelSpec>,
    /// Prompts per step, over all ranks.
    pub prompts: usize,
    /// Completions per prompt.
    pub group: usize,
    /// Tokens per prompt.
    pub prompt_len: usize,
    /// Exact number of tokens per completion.
    pub completion_len: usize,
    /// Random completion lengths by prompt and sample, instead of `completion_len`.
    pub completion_spread: Option<LengthSpread>,
    /// Number of timed steps.
    pub steps: usize,
    /// Most tokens of a completion in the untimed first steps.
    pub warm_up_len: Option<usize>,
    /// Configuration keys (`key=value`) that override those from the other fields.
    pub overrides: Vec<String>,
}

impl StepBench {
    /// The configuration of the timed run.
    ///
    /// # Errors
    /// Errors of the overrides.
    pub fn config(&self, world_size: usize) -> Result<Config> {
        let Self { prompts, group, prompt_len, .. } = self;
        let longest = self.lengths().longest;
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

    /// The lengths of completions; a single one where no spread is given.
    fn lengths(&self) -> LengthSpread {
        let only = LengthSpread { shortest: self.completion_len, longest: self.completion_len, long_tailed: false };
        self.completion_spread.unwrap_or(only)
    }

    /// Predicted maximum bytes of libtorch's tensors, for the micro-batches of the rank with the most prompts; `None` unless all completions have one
    /// length and make one update.
    fn predicted_bytes(&self, config: &Config, trainer: &Trainer, world_size: usize) -> Result<Option<usize>> {
        let updates = config.validate_world(world_size)?.updates_per_generation * config.num_iterations;
        if self.completion_spread.is_some() || updates > 1 {
            return Ok(None);
        }
        let Some(policy) = trainer.policy() else { return Ok(None) };
        let own_prompts = self.prompts.div_ceil(policy.num_ranks() / trainer.plan().sequence_parallel_size);
        let sequence = |index: usize| {
            let token_ids = vec![(index / self.group) as u32; self.prompt_len + self.completion_len];
            Sequence::of_tokens(token_ids, self.prompt_len)
        };
        let sequences: Vec<Sequence> = (0..own_prompts * self.group).map(sequence).collect();
        let max_tokens = config.max_tokens_per_micro_batch;
        let share_prompts = config.share_prompts && self.spec.can_share_prompts();
        let micro_batches = pack(&sequences, &PackOptions { max_tokens, share_prompts, device: Device::Cpu })?;
        let shapes: Vec<_> = micro_batches.iter().map(MicroBatch::shape).collect();
        let (table, kind) = (policy.table(), policy.kind());
        let model = TrainedModel::of(&config.sharing(trainer.plan().sequence_parallel_size), table, kind);
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

    /// Theoretical minimum times of phases on GPUs. The optimizer is left out if its state is on the host.
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

    /// Prompts for all steps, all different, `num_begun` per step.
    fn prompts(&self, num_begun: usize) -> Vec<Prompt> {
        let prompt = |id: usize| {
            let first = id * self.prompt_len;
            let token_ids = (first..first + self.prompt_len).map(|at| token(at, self.spec.vocab_size)).collect();
            Prompt { id: id as u64, text: String::new(), token_ids, columns: Arc::default() }
        };
        (0..num_begun * (self.steps + EXTRA_STEPS)).map(prompt).collect()
    }
}
