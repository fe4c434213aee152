//! Forward, log-probabilities of the completions, backward, clipping and AdamW on packed random sequences; or the forward
//! alone.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::{MEMORY_BYTES_PER_S, PEAK_FLOP_PER_S, PRODUCT_FLOP_PER_S, SEED, median, synchronize, token};
use crate::config::{GradientCheckpointing, Quantization, TargetModule};
use crate::cuda::{Family, Work, profile};
use crate::dist::{ReduceOp, World, all_reduce_f64};
use crate::error::Result;
use crate::model::{LoraSpec, ModelSpec, ParamTable, UnitLayout, init_unit_on};
use crate::torch;
use crate::train::{
    ActivationBytes, AdamOptions, GradientOptions, MicroBatch, NetworkOptions, OptimizerHome, PackOptions, Policy,
    PolicyOptions, PolicyStart, Sequence, TokenGradients, TrainBytes, WORKSPACE_BYTES, pack,
};

/// Untimed: the first compiles and allocates, the second plans attention for shapes that come again.
const WARM_UP_STEPS: usize = 2;

/// What is run.
#[derive(Debug, Clone)]
pub struct TrainBench {
    /// Name in the output.
    pub model: String,
    /// The model.
    pub spec: Arc<ModelSpec>,
    /// Type of weights and activations.
    pub kind: Kind,
    /// Sequences per rank and step.
    pub sequences: usize,
    /// Tokens per prompt.
    pub prompt_len: usize,
    /// Tokens per completion, all of them scored.
    pub completion_len: usize,
    /// Neighbouring sequences that have one prompt.
    pub group: usize,
    /// Run the prompt of a group once.
    pub share_prompts: bool,
    /// Token budget of a micro-batch.
    pub max_tokens_per_micro_batch: usize,
    /// ZeRO stage.
    pub zero_stage: u8,
    /// How gradients are added up.
    pub gradients: GradientOptions,
    /// Rank of adapters on every linear projection; `None` trains all weights.
    pub lora_r: Option<usize>,
    /// How the adapters' base is stored.
    pub quantization: Quantization,
    /// Recomputation.
    pub gradient_checkpointing: GradientCheckpointing,
    /// Scores alone: no backward, no step.
    pub score: bool,
    /// Times of one step's operations by family.
    pub profile: bool,
    /// Timed steps.
    pub steps: usize,
}

impl TrainBench {
    fn lora(&self) -> Option<LoraSpec> {
        let targets = TargetModule::ALL.to_vec();
        self.lora_r.map(|r| LoraSpec { r, alpha: 32.0, dropout: 0.0, targets })
    }
}

/// Runs it; collective over the world.
///
/// # Errors
/// Out of memory, or a sharding that does not fit.
pub fn bench_train(bench: &TrainBench, world: &World) -> Result<Value> {
    let mesh = world.mesh(1, world.size())?;
    let table = Arc::new(ParamTable::new(bench.spec.clone(), mesh.shard.size()));
    let (kind, device) = (bench.kind, world.device());
    let options = PolicyOptions {
        stage: bench.zero_stage,
        network: NetworkOptions { kind, device },
        gradient_checkpointing: bench.gradient_checkpointing,
        adam: AdamOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 },
        gradients: bench.gradients,
    };
    let start = PolicyStart { lora: bench.lora(), quantization: bench.quantization, seed: SEED, adapters: None };
    let source = |layout: &UnitLayout| init_unit_on(layout, SEED, kind, device);
    let mut policy = Policy::start(table.clone(), &mesh, options, OptimizerHome::Resident, &source, start)?;
    let sequences: Vec<Sequence> = (0..bench.sequences).map(|index| sequence(bench, index)).collect();
    let (max_tokens, share_prompts) = (bench.max_tokens_per_micro_batch, bench.share_prompts);
    let micro_batches = pack(&sequences, &PackOptions { max_tokens, share_prompts, device })?;
    let predicted = predicted_bytes(bench, &table, &micro_batches);
    let (mut times, mut exposed) = (Vec::with_capacity(bench.steps), Vec::with_capacity(bench.steps));
    for step in 0..WARM_UP_STEPS + bench.steps {
        let start = Instant::now();
        run_step(&mut policy, &micro_batches, bench.score)?;
        let exposed_s = policy.take_exposed_communication()?.as_secs_f64();
        synchronize(device)?;
        let mut seconds = [start.elapsed().as_secs_f64(), exposed_s];
        all_reduce_f64(&*world.group(), &mut seconds, ReduceOp::Max)?;
        if step < WARM_UP_STEPS {
            torch::reset_peak_memory(device)?;
        } else {
            times.push(seconds[0]);
            exposed.push(seconds[1]);
        }
    }
    let memory = torch::device_memory(device)?;
    let families = match device {
        Device::Cuda(ordinal) if bench.profile => {
            profile(ordinal, || run_step(&mut policy, &micro_batches, bench.score))?
        }
        _ => Vec::new(),
    };
    let step_s = median(times);
    let sequence_len = bench.prompt_len + bench.completion_len;
    let tokens = bench.sequences * sequence_len * world.size();
    let flop_per_s = bench.sequences as f64 * model_flop(bench, sequence_len as f64) / step_s;
    Ok(json!({
        "benchmark": if bench.score { "score" } else { "train" },
        "model": bench.model,
        "num_params": bench.spec.num_params(),
        "device": if device.is_cuda() { "cuda" } else { "cpu" },
        "dtype": if kind == Kind::BFloat16 { "bfloat16" } else { "float32" },
        "world_size": world.size(),
        "threads_per_rank": tch::get_num_threads(),
        "zero_stage": bench.zero_stage,
        "lora_r": bench.lora_r,
        "quantization": bench.quantization.name(),
        "num_trained_params": policy.trained_table().num_params(),
        "gradient_checkpointing": bench.gradient_checkpointing.name(),
        "sequences": bench.sequences,
        "sequence_len": sequence_len,
        "prompt_len": bench.prompt_len,
        "group": bench.group,
        "share_prompts": bench.share_prompts,
        "tokens_run": micro_batches.iter().map(MicroBatch::num_tokens).sum::<usize>() * world.size(),
        "step_s": step_s,
        "exposed_communication_s": median(exposed),
        "tokens_per_second": tokens as f64 / step_s,
        "predicted_peak_bytes": memory.map(|_| predicted),
        "tflop_per_second_per_rank": flop_per_s / 1e12,
        "mfu": device.is_cuda().then_some(flop_per_s / PEAK_FLOP_PER_S),
        "profile_ms_and_floor": bench.profile.then(|| by_family(&families)),
        "peak_allocated_bytes": memory.map(|memory| memory.peak_allocated),
        "fragmentation_bytes": memory.map(|memory| memory.peak_reserved - memory.peak_allocated),
    }))
}

/// What libtorch will hold at most: everything but the optimizer's state, which lies in an arena of its own.
fn predicted_bytes(bench: &TrainBench, table: &ParamTable, micro_batches: &[MicroBatch]) -> usize {
    let lora = bench.lora();
    let trained = (lora.as_ref(), bench.quantization);
    let train = TrainBytes::of(table, trained, bench.zero_stage, bench.kind, bench.gradients);
    let activations = micro_batches.iter().map(|micro_batch| {
        let (keep, shape) = (bench.gradient_checkpointing, micro_batch.shape());
        ActivationBytes::new(&bench.spec, bench.kind, keep, shape).peak()
    });
    let held = train.weights + train.gathered + train.gradients + train.gradient_scratch;
    held + activations.max().unwrap_or(0) + WORKSPACE_BYTES
}

/// Forward and backward of all micro-batches and the optimizer's step; or their scores alone.
fn run_step(policy: &mut Policy, micro_batches: &[MicroBatch], score: bool) -> Result<()> {
    for (index, micro_batch) in micro_batches.iter().enumerate() {
        if score {
            let _scores = policy.forward_logprobs(micro_batch, 1.0)?;
            continue;
        }
        if index + 1 == micro_batches.len() {
            policy.finish_gradients_with_next_backward();
        }
        policy.forward_backward(micro_batch, 1.0, &mut |scores| {
            let dlogprobs = Tensor::full_like(&scores.logprobs, -1.0 / scores.logprobs.numel() as f64);
            Ok(TokenGradients { dlogprobs, dentropy: None })
        })?;
    }
    if !score {
        let _timed = policy.optimizer_step(1e-4, 1.0)?; // whether it was skipped or not
    }
    Ok(())
}

/// Operations of one sequence, as model FLOP utilisation counts them: 6 a parameter and token, and 12 for every pair of tokens,
/// layer and element of the queries' width that causal attention needs; a third of both without a backward. Recomputation
/// is not counted.
fn model_flop(bench: &TrainBench, len: f64) -> f64 {
    let spec = &bench.spec;
    let pairs = len * len / 2.0 * (spec.num_layers * spec.num_heads * spec.head_dim) as f64;
    let whole = 6.0 * spec.num_params() as f64 * len + 12.0 * pairs;
    if bench.score { whole / 3.0 } else { whole }
}

/// [calls, milliseconds, the same at the speed of memory and products] by family, the longest first.
fn by_family(families: &[Family]) -> Value {
    let rounded = |ms: f64| (ms * 100.0).round() / 100.0;
    let floor_ms = |work: &Work| 1e3 * (work.bytes / MEMORY_BYTES_PER_S).max(work.flop / PRODUCT_FLOP_PER_S);
    let rows = families.iter().map(|family| {
        let floor_ms: f64 = family.work.iter().map(floor_ms).sum();
        (family.name.to_owned(), json!([family.calls, rounded(family.ms), rounded(floor_ms)]))
    });
    Value::Object(rows.collect())
}

fn sequence(bench: &TrainBench, index: usize) -> Sequence {
    let (prompt_len, len) = (bench.prompt_len, bench.prompt_len + bench.completion_len);
    let first_of_group = index / bench.group * bench.group * len;
    let places = (first_of_group..first_of_group + prompt_len).chain(index * len + prompt_len..(index + 1) * len);
    Sequence {
        token_ids: places.map(|at| token(at, bench.spec.vocab_size)).collect(),
        prompt_len,
        advantage: 0.0,
        masked: false,
        rollout_logprobs: None,
        old_logprobs: None,
        ref_logprobs: None,
    }
}
