//! Predicted seconds of a planned run's step.

use tch::Kind;

use super::preflight::Preflight;
use crate::config::Config;
use crate::plan::{ExpectedLengths, Gpu, PlannedStep, StepSeconds};
use crate::train::TrainedModel;

/// The GPU and the lengths for which seconds are predicted.
#[derive(Debug, Clone, Copy)]
pub struct ExpectedStep {
    /// The GPU model.
    pub gpu: Gpu,
    /// Expected lengths of prompts and completions.
    pub lengths: ExpectedLengths,
}

/// Predicts the seconds of a step of the run that `config` and `preflight` describe.
pub(super) fn seconds(
    config: &Config,
    preflight: &Preflight,
    ExpectedStep { gpu, lengths }: ExpectedStep,
) -> std::result::Result<StepSeconds, &'static str> {
    if preflight.kind != Kind::BFloat16 {
        return Err("weights other than bfloat16");
    }
    let config = &config.sharing(preflight.plan.sequence_parallel_size);
    let model = TrainedModel::of(config, &preflight.table, preflight.kind);
    let work = PlannedStep {
        config,
        spec: &preflight.spec,
        roles: preflight.batch.roles,
        num_prompts: preflight.batch.num_prompts,
        group: config.num_generations,
        updates: preflight.batch.updates_per_generation,
        lengths,
        keep: preflight.plan.gradient_checkpointing,
        residency: preflight.plan.optimizer,
        state_bytes: model.bytes().optimizer,
        optimizer_step_bytes: model.optimizer_step_bytes(),
    };
    StepSeconds::predict(&work, gpu)
}
