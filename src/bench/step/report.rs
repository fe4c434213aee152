//! The report of timed steps: a JSON object and a table.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use super::StepBench;
use crate::bench::limits::GpuLimits;
use crate::config::{Config, Mode, Roles};
use crate::metrics::MetricValues;
use crate::phase::Phase;
use crate::plan::MemoryPlan;
use crate::ranks::World;

/// The phases around the rollout, measured by host time. Overlapped copies are reported as `transition/hidden_share`.
const TRANSITIONS: [Phase; 5] = [Phase::Offload, Phase::Gather, Phase::Wake, Phase::Sleep, Phase::Reload];

/// Phases of ranks that generate, in split mode.
const OF_GENERATORS: [Phase; 6] =
    [Phase::Wake, Phase::Generate, Phase::Prefill, Phase::Decode, Phase::Sleep, Phase::Reward];

/// The medians of the timed steps.
pub(super) struct StepTimesReport<'a> {
    pub(super) bench: &'a StepBench,
    pub(super) config: &'a Config,
    pub(super) plan: &'a MemoryPlan,
    pub(super) world: &'a World,
    pub(super) medians: &'a BTreeMap<String, f64>,
    pub(super) floors: BTreeMap<Phase, f64>,
    pub(super) limits: Option<&'a GpuLimits>,
}

impl StepTimesReport<'_> {
    /// The report as JSON.
    pub(super) fn result(&self, roles: Roles) -> Value {
        let Self { bench, config, plan, world, medians, ref floors, limits } = *self;
        let step_s = medians["step_time"];
        let transition_s = self.sum(&TRANSITIONS);
        let completions = bench.prompts * bench.group;
        let generated = medians["tokens/generated"];
        let tokens = (completions * bench.prompt_len) as f64 + completions as f64 * medians["completions/mean_length"];
        let train_s = self.sum(&[Phase::Pack, Phase::ForwardBackward, Phase::Optimizer]);
        let num_params = bench.spec.num_params();
        let computed = medians["tokens/trained"]; // fewer where completions share their prompt
        let train_tflops = (6 * bench.spec.num_active_params() + bench.spec.training_flop_per_token()) as f64
            * computed
            / train_s
            / roles.num_trainers as f64
            / 1e12;
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
            "pipeline_parallel_size": config.pipeline_parallel_size,
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
            "phases_s": phases(medians),
            "floors_s": floors.iter().map(|(phase, seconds)| (phase.name(), *seconds)).collect::<BTreeMap<_, _>>(),
            "unphased_s": self.unphased(),
            "transition_s": transition_s,
            "transition_percent": 100.0 * transition_s / step_s,
            "tokens_per_second": tokens / step_s,
            "generation_tokens_per_second": generated / self.sum(&[Phase::Generate]),
            "train_tokens_per_second": tokens / train_s,
            "tokens_computed_in_training": computed,
            "train_tflops_per_gpu": train_tflops,
            "train_mfu_percent": limits.map(|limits| 100.0 * limits.utilisation(train_tflops * 1e12)),
            "gpu": limits.map(GpuLimits::to_json),
            "metrics": other,
        })
    }

    /// The report as a table for people.
    pub(super) fn table(&self) -> String {
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

    fn seconds(&self, phase: Phase) -> Option<f64> {
        seconds(self.medians, phase)
    }

    fn sum(&self, phases: &[Phase]) -> f64 {
        phases.iter().filter_map(|phase| self.seconds(*phase)).sum()
    }

    /// The time outside of phases: waiting for the GPU, counting. `None` in split mode, where phases overlap and their sum has no meaning.
    fn unphased(&self) -> Option<f64> {
        (self.config.mode == Mode::Colocated).then(|| self.medians["step_time"] - self.sum(Phase::ALL))
    }
}

/// Seconds of each phase of a step.
pub(super) fn phases(values: &MetricValues) -> BTreeMap<&'static str, f64> {
    Phase::ALL.iter().filter_map(|phase| Some((phase.name(), seconds(values, *phase)?))).collect()
}

fn seconds(values: &MetricValues, phase: Phase) -> Option<f64> {
    values.get(&format!("timing_s/{}", phase.name())).copied()
}
