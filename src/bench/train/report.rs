//! The report of a training benchmark: rates, FLOPs, times by family of operations, offloaded bytes.

use serde_json::{Value, json};

use super::{Timed, TimedRun, TrainBench};
use crate::bench::limits::GpuLimits;
use crate::bench::{device_name, dtype_name, median};
use crate::cuda::{OpCost, OpFamily};
use crate::ranks::World;
use crate::train::MicroBatch;

impl TimedRun<'_> {
    pub(super) fn report(&self, world: &World, steps: &[Timed], limits: Option<&GpuLimits>) -> Value {
        let Self { bench, sequence_lens, .. } = self;
        let of = |number: fn(&Timed) -> f64| median(steps.iter().map(number).collect());
        let (step_s, exposed_s) = (of(|step| step.seconds), of(|step| step.exposed_s));
        let exchange_s = of(|step| step.exchange_s.unwrap_or(f64::NAN));
        let sharers = bench.sequence_parallel_size;
        let tokens_per_s = of(|step| step.tokens as f64 / step.seconds) * (world.size() / sharers) as f64;
        let flop_per_s = of(|step| step.flop / step.seconds) / sharers as f64;
        json!({
            "benchmark": if bench.score { "score" } else { "train" },
            "model": bench.model,
            "num_params": bench.spec.num_params(),
            "num_active_params": bench.spec.num_active_params(),
            "num_layers": bench.spec.num_layers(),
            "device": device_name(world.device()),
            "dtype": dtype_name(bench.kind),
            "residual_dtype": dtype_name(bench.residual),
            "world_size": world.size(),
            "threads_per_rank": tch::get_num_threads(),
            "zero_stage": bench.zero_stage,
            "shard_group_size": self.table.shards,
            "sequence_parallel_size": sharers,
            "lora_r": bench.lora_r,
            "quantization": bench.quantization.name(),
            "mixed_precision": bench.mixed_precision.name(),
            "optim": bench.optim.name(),
            "num_trained_params": self.policy.trained_table().num_params(),
            "routing": bench.routing.name(),
            "busiest_expert_share": self.busiest_expert_share,
            "gradient_checkpointing": bench.gradient_checkpointing.name(),
            "activation_offload": bench.activation_offload,
            "sequences": bench.sequences,
            "completion_spread": bench.completion_spread,
            "redraw": bench.redraw,
            "longest_sequence": sequence_lens.iter().max(),
            "prompt_len": bench.prompt_len,
            "group": bench.group,
            "share_prompts": bench.shares_prompts(),
            "micro_batches": self.micro_batches.len(),
            "tokens_run": self.micro_batches.iter().map(MicroBatch::num_tokens).sum::<usize>() * world.size() / sharers,
            "step_s": step_s,
            "exposed_communication_s": exposed_s,
            "exposed_exchange_s": exchange_s.is_finite().then_some(exchange_s),
            "offloaded": offloaded(steps),
            "step_times": steps.iter().map(|step| step.seconds).collect::<Vec<_>>(),
            "tokens_per_second": tokens_per_s,
            "tokens_per_second_per_rank": tokens_per_s / world.size() as f64,
            "tflop_per_second_per_rank": flop_per_s / 1e12,
            "mfu": limits.map(|limits| limits.utilisation(flop_per_s)),
            "gpu": limits.map(GpuLimits::to_json),
        })
    }
}

/// FLOPs of one sequence as counted for model FLOP utilisation: 6 per token and active parameter; 12 for every pair of tokens, layer and element of
/// the queries' width in causal attention; 21 for every token, layer and element of a gated delta net's state. Without a backward, a third of this.
/// Recomputation is not counted.
pub(super) fn model_flop(bench: &TrainBench, len: f64) -> f64 {
    let spec = &bench.spec;
    let attention = spec.training_flop_per_pair() as f64 * len * len / 2.0;
    let of_token = (6 * spec.num_active_params() + spec.training_flop_per_token()) as f64;
    let whole = of_token * len + attention;
    if bench.score { whole / 3.0 } else { whole }
}

/// [calls, milliseconds, theoretical minimum in milliseconds] by family of operations, the longest first.
pub(super) fn by_family(families: &[OpFamily], limits: &GpuLimits) -> Value {
    let rounded = |ms: f64| (ms * 100.0).round() / 100.0;
    let floor_ms = |work: &OpCost| 1e3 * limits.floor_s(work.bytes, work.flop);
    let rows = families.iter().map(|family| {
        let floor_ms: f64 = family.work.iter().map(floor_ms).sum();
        (family.name.to_owned(), json!([family.calls, rounded(family.ms), rounded(floor_ms)]))
    });
    Value::Object(rows.collect())
}

/// Bytes of offloaded tensors copied to the host and back in the last step, their rate, and the seconds in which computation waited for them; null if
/// there were none.
pub(super) fn offloaded(steps: &[Timed]) -> Value {
    let Some(moved) = steps.last().map(|step| step.offloaded).filter(|moved| moved.bytes > 0) else {
        return Value::Null;
    };
    let copying_s = moved.copying.as_secs_f64();
    json!({
        "bytes": moved.bytes,
        "gb_per_s": moved.bytes as f64 / 1e9 / copying_s,
        "copying_s": copying_s,
        "exposed_s": moved.exposed.as_secs_f64(),
    })
}
