//! Training on packed random sequences: forward, log-probabilities of the completions, backward, clipping and optimizer; or only the forward.

mod report;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::limits::GpuLimits;
use super::memory::{TrainingNeeds, predicted_tensor_bytes};
use super::routing::{BenchRouting, busiest_expert_share};
use super::{LengthSpread, SEED, STREAM, adapters, synchronize, token};
use crate::config::{GradientCheckpointing, MixedPrecision, MuonConfig, OptimizerName, Quantization};
use crate::cuda::{Placement, profile};
use crate::error::Result;
use crate::memory::{HostPool, explain_out_of_memory};
use crate::model::{ModelSpec, ParamTable, UnitLayout, Use, init_unit_on};
use crate::ops::random::RandomKey;
use crate::phase::{self, Phase};
use crate::ranks::{ReduceOp, World, all_reduce_f64};
use crate::torch;
use crate::train::{
    AdamOptions, GradientOptions, MicroBatch, MicroBatchShape, NetworkOptions, Optim, OptimizerHome, PackOptions,
    Policy, PolicyOptions, PolicyStart, Sequence, TokenGradients, TrainedModel, Transitions, UpdateCourse, pack,
};

/// Untimed steps: the first compiles and allocates, the second plans attention for recurring shapes.
const WARM_UP_STEPS: usize = 2;

/// The benchmark of training.
#[derive(Debug, Clone)]
pub struct TrainBench {
    /// Name of the model in the output.
    pub model: String,
    /// The model.
    pub spec: Arc<ModelSpec>,
    /// Dtype of weights and activations.
    pub kind: Kind,
    /// Dtype of the residual stream.
    pub residual: Kind,
    /// Number of sequences per step, per rank or per group of ranks that share micro-batches.
    pub sequences: usize,
    /// Tokens per prompt.
    pub prompt_len: usize,
    /// Tokens per completion; all are scored.
    pub completion_len: usize,
    /// Random completion lengths, instead of `completion_len`.
    pub completion_spread: Option<LengthSpread>,
    /// Whether to choose new lengths for every step, and to drop gradients before it, as in a GRPO step.
    pub redraw: bool,
    /// Number of neighbouring sequences that share a prompt.
    pub group: usize,
    /// Whether the prompt of a group is computed once.
    pub share_prompts: bool,
    /// Token budget of a micro-batch.
    pub max_tokens_per_micro_batch: usize,
    /// ZeRO stage.
    pub zero_stage: u8,
    /// Number of ranks that together hold one copy of the sharded state; `None` means all.
    pub shard_group_size: Option<usize>,
    /// Number of ranks that share each micro-batch.
    pub sequence_parallel_size: usize,
    /// Dtypes for accumulating and reducing gradients.
    pub gradients: GradientOptions,
    /// The optimizer.
    pub optim: OptimizerName,
    /// Rank of LoRA adapters on every linear projection; `None` trains all weights.
    pub lora_r: Option<usize>,
    /// Storage format of the base under adapters.
    pub quantization: Quantization,
    /// The precision of the blocks' GEMMs.
    pub mixed_precision: MixedPrecision,
    /// How tokens choose experts.
    pub routing: BenchRouting,
    /// Which activations backward recomputes.
    pub gradient_checkpointing: GradientCheckpointing,
    /// Whether tensors that blocks keep for backward are offloaded to the host.
    pub activation_offload: bool,
    /// Whether to only score, without backward and optimizer step.
    pub score: bool,
    /// Whether to report the times of one step's operations by family.
    pub profile: bool,
    /// Number of timed steps.
    pub steps: usize,
}

impl TrainBench {
    fn optim(&self) -> Optim {
        Optim::new(self.optim, &MuonConfig::default())
    }

    /// The sequences of a step. Neighbours of a group share one prompt; all other tokens differ.
    fn all_sequences(&self, step: u64) -> Vec<Sequence> {
        let longest = self.completion_spread.map_or(self.completion_len, |spread| spread.longest);
        let (prompt_len, stride) = (self.prompt_len, self.prompt_len + longest);
        let sequence = |index: usize| {
            let (first, first_of_group) = (index * stride, index / self.group * self.group * stride);
            let completion_len = match self.completion_spread {
                Some(spread) => spread.length(RandomKey::new(SEED, STREAM).word(1 + step, index as u64)),
                None => self.completion_len,
            };
            let prompt = first_of_group..first_of_group + prompt_len;
            let completion = first + prompt_len..first + prompt_len + completion_len;
            let tokens = prompt.chain(completion);
            let token_ids = tokens.clone().map(|at| token(at, self.spec.vocab_size)).collect();
            let routed_experts = self.routing.of_tokens(&self.spec, tokens);
            Sequence { routed_experts, ..Sequence::of_tokens(token_ids, prompt_len) }
        };
        (0..self.sequences).map(sequence).collect()
    }

    fn pack(&self, sequences: &[Sequence], device: Device) -> Result<Vec<MicroBatch>> {
        let (max_tokens, share_prompts) = (self.max_tokens_per_micro_batch, self.shares_prompts());
        pack(sequences, &PackOptions { max_tokens, share_prompts, device })
    }

    pub(super) fn shares_prompts(&self) -> bool {
        self.share_prompts && self.spec.can_share_prompts()
    }

    /// Predicted peak of libtorch's tensors, in bytes. Whole gradients keep their memory between steps unless they are dropped.
    fn predicted_bytes(&self, table: &ParamTable, micro_batches: &[MicroBatch]) -> usize {
        let shapes: Vec<_> = micro_batches.iter().map(MicroBatch::shape).collect();
        let recorded = micro_batches.iter().filter_map(|micro_batch| micro_batch.routed_experts.as_ref());
        let recorded = recorded.map(|experts| experts.numel() * experts.kind().elt_size_in_bytes()).sum::<usize>();
        self.bytes_at_most(table, &shapes) + recorded
    }

    /// Predicted peak if all micro-batches fill their budget and all tokens are scored, as a run's memory plan assumes.
    fn planned_bytes(&self, table: &ParamTable, num_micro_batches: usize) -> usize {
        let tokens = self.max_tokens_per_micro_batch;
        let shares_prompts = self.shares_prompts() && self.group > 1;
        let num_sequences = self.sequences + if shares_prompts { self.sequences.div_ceil(self.group) } else { 0 };
        let full = MicroBatchShape { tokens, scored_tokens: tokens, num_sequences, shares_prompts, num_top: 0 };
        self.bytes_at_most(table, &vec![full; num_micro_batches.min(2)])
    }

    fn bytes_at_most(&self, table: &ParamTable, shapes: &[MicroBatchShape]) -> usize {
        let model = self.trained(table);
        if self.score {
            let scores = shapes.iter().map(|shape| model.fullest_of_scores(*shape).total());
            return predicted_tensor_bytes(&model, scores.max().unwrap_or(0));
        }
        let keep = self.gradient_checkpointing;
        let course = UpdateCourse { keep, micro_batches: shapes, is_warm: !self.redraw, streams: false };
        predicted_tensor_bytes(&model, model.fullest(&course).total())
    }

    /// Host bytes for offloaded tensors of the largest micro-batch.
    fn offloaded_bytes(&self, table: &ParamTable) -> usize {
        let longest = self.prompt_len + self.completion_spread.map_or(self.completion_len, |spread| spread.longest);
        let tokens = self.max_tokens_per_micro_batch.max(longest);
        self.trained(table).offloaded_bytes(self.gradient_checkpointing, tokens)
    }

    /// Memory that a rank needs to train on these micro-batches.
    fn needs(&self, table: &ParamTable, micro_batches: &[MicroBatch]) -> TrainingNeeds {
        let optimizer_bytes = self.trained(table).bytes().optimizer;
        TrainingNeeds { tensor_bytes: self.predicted_bytes(table, micro_batches), optimizer_bytes }
    }

    fn trained<'a>(&self, table: &'a ParamTable) -> TrainedModel<'a> {
        TrainedModel {
            lora: self.lora_r.map(adapters),
            quantization: self.quantization,
            residual: self.residual,
            format: self.mixed_precision.format(),
            optim: self.optim(),
            sharers: self.sequence_parallel_size,
            offloads: self.activation_offload,
            ..TrainedModel::whole(table, self.zero_stage, self.kind, self.gradients)
        }
    }
}

/// Runs the benchmark; collective over the world.
///
/// # Errors
/// An error before anything is allocated if the memory is less than predicted; errors of insufficient memory, or of a sharding that does not fit.
pub fn bench_train(bench: &TrainBench, world: &World) -> Result<Value> {
    let device = world.device();
    let limits = GpuLimits::of(device)?;
    let mut run = TimedRun::new(bench, world)?;
    for _ in 0..WARM_UP_STEPS {
        run.timed_step(world)?;
    }
    torch::reset_peak_memory(device)?;
    let steps: Vec<Timed> = (0..bench.steps).map(|_| run.timed_step(world)).collect::<Result<_>>()?;
    let memory = torch::device_memory(device)?;
    let mut result = run.report(world, &steps, limits.as_ref());
    let predicted = steps.iter().map(|step| step.predicted_bytes).max();
    result["first_grad_norm"] = json!(run.first_grad_norm);
    result["predicted_peak_bytes"] = json!(memory.and(predicted));
    result["planned_peak_bytes"] = json!(memory.map(|_| bench.planned_bytes(&run.table, run.micro_batches.len())));
    result["peak_allocated_bytes"] = json!(memory.map(|memory| memory.peak_allocated));
    result["peak_reserved_bytes"] = json!(memory.map(|memory| memory.peak_reserved));
    result["fragmentation_bytes"] = json!(memory.map(|memory| memory.peak_reserved - memory.peak_allocated));
    if let (Device::Cuda(ordinal), Some(limits), true) = (device, limits, bench.profile) {
        result["profile_ms_and_floor"] = report::by_family(&profile(ordinal, || run.step())?, &limits);
    }
    Ok(result)
}

/// The parts of a timed training run.
struct TimedRun<'a> {
    bench: &'a TrainBench,
    table: Arc<ParamTable>,
    policy: Policy,
    sequence_lens: Vec<usize>,
    busiest_expert_share: Option<f64>,
    micro_batches: Vec<MicroBatch>,
    num_steps: u64,
    /// Norm of the gradients of the first step, by which runs with the same tokens can be compared.
    first_grad_norm: Option<f64>,
}

/// Measurements of one step.
struct Timed {
    /// Seconds on the slowest rank.
    seconds: f64,
    /// Seconds of the step in which computation waited for collectives.
    exposed_s: f64,
    /// Seconds in which it waited for the exchange of heads, if ranks share micro-batches.
    exchange_s: Option<f64>,
    /// Offloaded tensors copied to the host and back.
    offloaded: Transitions,
    /// Number of tokens of this rank's sequences.
    tokens: usize,
    /// FLOPs of these tokens, as counted for model FLOP utilisation.
    flop: f64,
    /// Predicted peak of libtorch's tensors, in bytes.
    predicted_bytes: usize,
}

impl<'a> TimedRun<'a> {
    fn new(bench: &'a TrainBench, world: &World) -> Result<Self> {
        bench.spec.validate_sequence_parallel(bench.sequence_parallel_size)?;
        let mesh = world.mesh(1, bench.shard_group_size.unwrap_or(world.size()))?;
        let mesh = mesh.with_sequence_groups(world, world.size(), bench.sequence_parallel_size)?;
        let table = Arc::new(ParamTable::new(bench.spec.clone(), mesh.shard.size()));
        let (kind, device) = (bench.kind, world.device());
        let placement = Placement { on_cuda: device.is_cuda(), kind };
        let settings = [
            ("optim", bench.optim.name().into()),
            ("quantization", bench.quantization.name().into()),
            ("mixed_precision", bench.mixed_precision.name().into()),
            ("gradient_checkpointing", bench.gradient_checkpointing.name().into()),
            ("activation_offload", bench.activation_offload.into()),
            ("lora.r", bench.lora_r.map_or_else(|| "none".into(), Value::from)),
        ];
        bench.spec.check_with(settings.into_iter().chain(placement.settings()))?;
        let format = bench.mixed_precision.format();
        format.check(Use::Training, &bench.spec, placement.on_cuda)?;
        bench.needs(&table, &bench.pack(&bench.all_sequences(0), Device::Cpu)?).check(kind, world)?;
        let options = PolicyOptions {
            stage: bench.zero_stage,
            network: NetworkOptions { kind, residual: bench.residual, device, format },
            gradient_checkpointing: bench.gradient_checkpointing,
            optim: bench.optim(),
            adam: AdamOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 },
            gradients: bench.gradients,
        };
        let start = PolicyStart {
            lora: bench.lora_r.map(adapters),
            quantization: bench.quantization,
            seed: SEED,
            adapters: None,
            keeps_initial: false,
        };
        let source = |layout: &UnitLayout| init_unit_on(layout, SEED, kind, device);
        let home = OptimizerHome::Resident;
        let load = || Policy::start(table.clone(), &mesh, options, home, &source, start);
        let mut policy = phase::scope(Phase::Load, load)?;
        if bench.activation_offload {
            let bytes = bench.offloaded_bytes(&table).max(1);
            let pool = HostPool::new("activations_host", bytes, device, &mut |_, _| ())?;
            policy = policy.with_activation_offload(pool);
        }
        let mut run = Self {
            bench,
            table,
            policy,
            sequence_lens: Vec::new(),
            busiest_expert_share: None,
            micro_batches: Vec::new(),
            num_steps: 0,
            first_grad_norm: None,
        };
        run.draw(device)?;
        Ok(run)
    }

    /// Prepares the next step's sequences, equal on all ranks.
    fn draw(&mut self, device: Device) -> Result<()> {
        let sequences = self.bench.all_sequences(self.num_steps);
        self.micro_batches = self.bench.pack(&sequences, device)?;
        self.sequence_lens = sequences.iter().map(|sequence| sequence.token_ids.len()).collect();
        let routed = sequences.iter().map(|sequence| &sequence.routed_experts);
        self.busiest_expert_share = busiest_expert_share(&self.bench.spec, routed);
        Ok(())
    }

    /// Runs forward and backward of all micro-batches and the optimizer step; or only scores. If memory is insufficient, the message lists who holds
    /// it, which includes the policy.
    fn step(&mut self) -> Result<()> {
        let scores = self.bench.score;
        let pass = phase::scope(if scores { Phase::Score } else { Phase::ForwardBackward }, || self.pass());
        let update = |()| match scores {
            true => Ok(()),
            false => phase::scope(Phase::Optimizer, || {
                let outcome = self.policy.optimizer_step(1e-4, 1.0)?; // even if the step is skipped
                self.first_grad_norm.get_or_insert(outcome.grad_norm);
                Ok(())
            }),
        };
        pass.and_then(update).map_err(explain_out_of_memory)
    }

    /// Runs forward and backward of all micro-batches, or only scores them.
    fn pass(&mut self) -> Result<()> {
        if self.bench.redraw {
            self.policy.drop_gradients();
            self.policy.keep_block_for(&self.micro_batches, self.bench.max_tokens_per_micro_batch)?;
        }
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
                Ok(TokenGradients { dlogprobs, dentropy: None, dtop: None, daux_loss: 0.0 })
            })?;
        }
        Ok(())
    }

    fn timed_step(&mut self, world: &World) -> Result<Timed> {
        if self.bench.redraw {
            self.draw(world.device())?;
        }
        let start = Instant::now();
        self.step()?;
        let exposed_s = self.policy.take_exposed_communication()?.as_secs_f64();
        let exchange_s = self.policy.take_exposed_exchange()?.map(|exposed| exposed.as_secs_f64());
        let offloaded = self.policy.take_offloaded()?;
        synchronize(world.device())?;
        let mut seconds = [start.elapsed().as_secs_f64(), exposed_s];
        all_reduce_f64(&*world.group(), &mut seconds, ReduceOp::Max)?;
        self.num_steps += 1;
        let [seconds, exposed_s] = seconds;
        let tokens = self.sequence_lens.iter().sum();
        let flop = self.sequence_lens.iter().map(|&len| report::model_flop(self.bench, len as f64)).sum();
        let predicted_bytes = self.bench.predicted_bytes(&self.table, &self.micro_batches);
        Ok(Timed { seconds, exposed_s, exchange_s, offloaded, tokens, flop, predicted_bytes })
    }
}
