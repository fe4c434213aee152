//! Forward, log-probabilities of the completions, backward, clipping and AdamW on packed random sequences; or the forward
//! alone.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::memory::predicted_tensor_bytes;
use super::{
    MEMORY_BYTES_PER_S, PEAK_FLOP_PER_S, PRODUCT_FLOP_PER_S, SEED, STREAM, adapters, device_name, dtype_name, median,
    synchronize, token,
};
use crate::config::{GradientCheckpointing, Quantization};
use crate::cuda::{Family, Work, profile};
use crate::dist::{ReduceOp, World, all_reduce_f64};
use crate::error::Result;
use crate::model::{ModelSpec, ParamTable, UnitLayout, init_unit_on};
use crate::ops::random::RandomKey;
use crate::torch;
use crate::train::{
    AdamOptions, GradientOptions, MicroBatch, NetworkOptions, OptimizerHome, PackOptions, Policy, PolicyOptions,
    PolicyStart, Sequence, TokenGradients, TrainedModel, UpdateCourse, pack,
};
use crate::types::LengthSpread;

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
    /// Type of the residual stream.
    pub residual: Kind,
    /// Sequences per rank and step.
    pub sequences: usize,
    /// Tokens per prompt.
    pub prompt_len: usize,
    /// Tokens per completion, all of them scored.
    pub completion_len: usize,
    /// Tokens of each completion, drawn one by one, instead.
    pub completion_spread: Option<LengthSpread>,
    /// Neighbouring sequences that have one prompt.
    pub group: usize,
    /// Run the prompt of a group once.
    pub share_prompts: bool,
    /// Token budget of a micro-batch.
    pub max_tokens_per_micro_batch: usize,
    /// ZeRO stage.
    pub zero_stage: u8,
    /// Ranks that share one copy of what the stage shards; all where it is `None`.
    pub shard_group_size: Option<usize>,
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
    /// Neighbours of a group have one prompt; all other tokens are their own.
    fn all_sequences(&self) -> Vec<Sequence> {
        let longest = self.completion_spread.map_or(self.completion_len, |spread| spread.longest);
        let (prompt_len, stride) = (self.prompt_len, self.prompt_len + longest);
        let sequence = |index: usize| {
            let (first, first_of_group) = (index * stride, index / self.group * self.group * stride);
            let completion_len = match self.completion_spread {
                Some(spread) => spread.length(RandomKey::new(SEED, STREAM).word(1, index as u64)),
                None => self.completion_len,
            };
            let prompt = first_of_group..first_of_group + prompt_len;
            let completion = first + prompt_len..first + prompt_len + completion_len;
            let token_ids = prompt.chain(completion).map(|at| token(at, self.spec.vocab_size)).collect();
            Sequence::of_tokens(token_ids, prompt_len)
        };
        (0..self.sequences).map(sequence).collect()
    }
}

/// Runs it; collective over the world.
///
/// # Errors
/// Out of memory, or a sharding that does not fit.
pub fn bench_train(bench: &TrainBench, world: &World) -> Result<Value> {
    let device = world.device();
    let mut run = Run::new(bench, world)?;
    for _ in 0..WARM_UP_STEPS {
        run.timed_step(world)?;
    }
    torch::reset_peak_memory(device)?;
    let steps: Vec<[f64; 2]> = (0..bench.steps).map(|_| run.timed_step(world)).collect::<Result<_>>()?;
    let memory = torch::device_memory(device)?;
    let mut result = run.report(world, &steps);
    result["predicted_peak_bytes"] = json!(memory.map(|_| run.predicted_bytes()));
    result["peak_allocated_bytes"] = json!(memory.map(|memory| memory.peak_allocated));
    result["fragmentation_bytes"] = json!(memory.map(|memory| memory.peak_reserved - memory.peak_allocated));
    if let (Device::Cuda(ordinal), true) = (device, bench.profile) {
        result["profile_ms_and_floor"] = by_family(&profile(ordinal, || run.step())?);
    }
    Ok(result)
}

/// What is timed.
struct Run<'a> {
    bench: &'a TrainBench,
    table: Arc<ParamTable>,
    policy: Policy,
    sequence_lens: Vec<usize>,
    micro_batches: Vec<MicroBatch>,
}

impl<'a> Run<'a> {
    fn new(bench: &'a TrainBench, world: &World) -> Result<Self> {
        let mesh = world.mesh(1, bench.shard_group_size.unwrap_or(world.size()))?;
        let table = Arc::new(ParamTable::new(bench.spec.clone(), mesh.shard.size()));
        let (kind, device) = (bench.kind, world.device());
        let options = PolicyOptions {
            stage: bench.zero_stage,
            network: NetworkOptions { kind, residual: bench.residual, device },
            gradient_checkpointing: bench.gradient_checkpointing,
            adam: AdamOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 },
            gradients: bench.gradients,
        };
        let start = PolicyStart {
            lora: bench.lora_r.map(adapters),
            quantization: bench.quantization,
            seed: SEED,
            adapters: None,
        };
        let source = |layout: &UnitLayout| init_unit_on(layout, SEED, kind, device);
        let policy = Policy::start(table.clone(), &mesh, options, OptimizerHome::Resident, &source, start)?;
        let sequences = bench.all_sequences();
        let (max_tokens, share_prompts) = (bench.max_tokens_per_micro_batch, bench.share_prompts);
        let micro_batches = pack(&sequences, &PackOptions { max_tokens, share_prompts, device })?;
        let sequence_lens = sequences.iter().map(|sequence| sequence.token_ids.len()).collect();
        Ok(Self { bench, table, policy, sequence_lens, micro_batches })
    }

    /// Forward and backward of all micro-batches and the optimizer's step; or their scores alone.
    fn step(&mut self) -> Result<()> {
        for (index, micro_batch) in self.micro_batches.iter().enumerate() {
            if self.bench.score {
                let _scores = self.policy.forward_logprobs(micro_batch, 1.0)?;
                continue;
            }
            if index + 1 == self.micro_batches.len() {
                self.policy.finish_gradients_with_next_backward();
            }
            self.policy.forward_backward(micro_batch, 1.0, &mut |scores| {
                let dlogprobs = Tensor::full_like(&scores.logprobs, -1.0 / scores.logprobs.numel() as f64);
                Ok(TokenGradients { dlogprobs, dentropy: None })
            })?;
        }
        if !self.bench.score {
            let _timed = self.policy.optimizer_step(1e-4, 1.0)?; // whether it was skipped or not
        }
        Ok(())
    }

    /// Seconds of a step, and of them those that computation stood waiting for collectives; of the slowest rank.
    fn timed_step(&mut self, world: &World) -> Result<[f64; 2]> {
        let start = Instant::now();
        self.step()?;
        let exposed_s = self.policy.take_exposed_communication()?.as_secs_f64();
        synchronize(world.device())?;
        let mut seconds = [start.elapsed().as_secs_f64(), exposed_s];
        all_reduce_f64(&*world.group(), &mut seconds, ReduceOp::Max)?;
        Ok(seconds)
    }

    /// What libtorch will hold at most. Whole gradients keep their memory from step to step.
    fn predicted_bytes(&self) -> usize {
        let Self { bench, table, .. } = self;
        let model = TrainedModel {
            lora: bench.lora_r.map(adapters),
            quantization: bench.quantization,
            residual: bench.residual,
            ..TrainedModel::whole(table, bench.zero_stage, bench.kind, bench.gradients)
        };
        let shapes: Vec<_> = self.micro_batches.iter().map(MicroBatch::shape).collect();
        if bench.score {
            let scores = shapes.iter().map(|shape| model.fullest_of_scores(*shape).total());
            return predicted_tensor_bytes(&model, scores.max().unwrap_or(0));
        }
        let keep = bench.gradient_checkpointing;
        let course = UpdateCourse { keep, micro_batches: &shapes, is_warm: true, streams: false };
        predicted_tensor_bytes(&model, model.fullest(&course).total())
    }

    fn report(&self, world: &World, steps: &[[f64; 2]]) -> Value {
        let Self { bench, sequence_lens, .. } = self;
        let [step_s, exposed_s] = [0, 1].map(|index| median(steps.iter().map(|step| step[index]).collect()));
        let tokens = sequence_lens.iter().sum::<usize>() * world.size();
        let flop_per_s = sequence_lens.iter().map(|&len| model_flop(bench, len as f64)).sum::<f64>() / step_s;
        json!({
            "benchmark": if bench.score { "score" } else { "train" },
            "model": bench.model,
            "num_params": bench.spec.num_params(),
            "num_layers": bench.spec.num_layers,
            "device": device_name(world.device()),
            "dtype": dtype_name(bench.kind),
            "residual_dtype": dtype_name(bench.residual),
            "world_size": world.size(),
            "threads_per_rank": tch::get_num_threads(),
            "zero_stage": bench.zero_stage,
            "shard_group_size": self.table.shards,
            "lora_r": bench.lora_r,
            "quantization": bench.quantization.name(),
            "num_trained_params": self.policy.trained_table().num_params(),
            "gradient_checkpointing": bench.gradient_checkpointing.name(),
            "sequences": bench.sequences,
            "longest_sequence": sequence_lens.iter().max(),
            "prompt_len": bench.prompt_len,
            "group": bench.group,
            "share_prompts": bench.share_prompts,
            "micro_batches": self.micro_batches.len(),
            "tokens_run": self.micro_batches.iter().map(MicroBatch::num_tokens).sum::<usize>() * world.size(),
            "step_s": step_s,
            "exposed_communication_s": exposed_s,
            "tokens_per_second": tokens as f64 / step_s,
            "tokens_per_second_per_rank": tokens as f64 / step_s / world.size() as f64,
            "tflop_per_second_per_rank": flop_per_s / 1e12,
            "mfu": world.device().is_cuda().then_some(flop_per_s / PEAK_FLOP_PER_S),
        })
    }
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
