//! Decode steps over synthetic batches: the time of a step and of each of its operations, from graph replays, compared with the theoretical minimum.
#![allow(unsafe_code)]

use std::iter::Sum;
use std::ops::Add;

use serde_json::{Value, json};
use tch::Device;

use super::generate::GenerateBench;
use super::launches::{self, StepLaunches};
use super::limits::GpuLimits;
use crate::console;
use crate::cuda::{EnergyMeter, Graph, Sustained, record_launches};
use crate::error::{Error, Result};
use crate::model::{BlockParams, LinearSpec, Lora, Mlp, StepCost, TpSplit};
use crate::ranks::{ReduceOp, World, all_reduce_f64};
use crate::rollout::{DecoderOp, EngineWeights, TrialBatch, TrialStep, state_page_bytes};
use crate::serve::Served;

/// Number of replays of one operation; the median is used.
const REPLAYS: usize = 20;
/// Number of replays of a whole step: enough for the GPU to reach the clock of a long run.
const STEP_REPLAYS: usize = 150;
/// Replays of a whole step whose launches are recorded.
const RECORDED_REPLAYS: usize = 5;
/// Number of GEMMs of a routed expert; those of the shared expert follow in [`ExpertsSpec::linears`](crate::model::ExpertsSpec::linears).
const EXPERT_PRODUCTS: usize = 2;

const OPS: [DecoderOp; 18] = [
    DecoderOp::Embed,
    DecoderOp::Norm,
    DecoderOp::Qkv,
    DecoderOp::RopeWriteKv,
    DecoderOp::AttentionPlan,
    DecoderOp::Attention,
    DecoderOp::DeltaNet,
    DecoderOp::O,
    DecoderOp::Router,
    DecoderOp::GateUp,
    DecoderOp::SiluMul,
    DecoderOp::Round,
    DecoderOp::Down,
    DecoderOp::Combine,
    DecoderOp::Adapters,
    DecoderOp::AllReduce,
    DecoderOp::Head,
    DecoderOp::Sample,
];

/// The times of one decode step.
struct StepProfile {
    whole: Timing,
    ops: Vec<OpProfile>,
}

/// The time of some work.
#[derive(Clone, Copy)]
struct Timing {
    /// Time in microseconds.
    us: f64,
    /// Time and energy when repeated for half a second, if requested.
    sustained: Option<Sustained>,
}

/// The time of one operation in all layers together.
struct OpProfile {
    op: DecoderOp,
    timing: Timing,
    work: OpWork,
}

/// The minimum work of an operation.
#[derive(Clone, Copy, Default)]
struct OpWork {
    /// Bytes that it must read and write; mostly weights and cache.
    bytes: f64,
    /// FLOPs, at the rate of unquantized GEMMs.
    flop: f64,
}

impl GenerateBench {
    /// Measures decode steps by batch size, at the mean context: microseconds, and the theoretical minimum as a share of them.
    pub(super) fn decode_steps(&self, world: &World, served: &mut Served, limits: &GpuLimits) -> Result<Value> {
        let most = self.max_num_seqs().min(self.num_sequences());
        let context = self.prompt_len + self.longest() / 2;
        let batches: Vec<usize> = (0..).map(|power| 1 << power).take_while(|&batch| batch < most).collect();
        let mut rows = Vec::new();
        let batch_of = |sequences: usize| {
            let group = if sequences.is_multiple_of(self.group) { self.group } else { 1 };
            TrialBatch { sequences, group, prompt_len: self.prompt_len, context }
        };
        let batches: Vec<TrialBatch> = batches.into_iter().chain([most]).map(batch_of).collect();
        for &batch in &batches {
            let sequences = batch.sequences;
            let sustains = self.profile && sequences == most;
            let profile =
                served.with_engine(|rollout| rollout.try_step(batch, |step| self.profile(batch, step, sustains)))?;
            rows.push(report(batch, &profile, self.profile || sequences == most, limits));
        }
        if self.profile {
            let steps = record_steps(served, &batches)?;
            rows.iter_mut().zip(&steps).for_each(|(row, step)| row["launches"] = step.to_json());
            if world.rank() == 0 && !steps.is_empty() {
                console::say(launches::table(&steps));
            }
        }
        Ok(Value::Array(rows))
    }

    /// Times one decode step and each of its operations. If `sustains`, they are also repeated for half a second to measure energy. Collective over
    /// the tensor-parallel group.
    fn profile(&self, batch: TrialBatch, mut step: TrialStep<'_>, sustains: bool) -> Result<StepProfile> {
        let meter = match step.tp.device() {
            Device::Cuda(ordinal) if sustains => Some(EnergyMeter::new(ordinal)?),
            _ => None,
        };
        let spec = &self.spec;
        let is_done = |op: &DecoderOp| match op {
            DecoderOp::AllReduce => step.tp.size() > 1,
            DecoderOp::Adapters => self.lora_r.is_some(),
            DecoderOp::Router | DecoderOp::Combine => spec.num_expert_layers() > 0,
            DecoderOp::SiluMul => spec.num_expert_layers() < spec.num_layers(),
            DecoderOp::Round => self.quantization.format().rounds(),
            DecoderOp::DeltaNet => spec.delta_net().is_some(),
            _ => true,
        };
        let done: Vec<DecoderOp> = OPS.into_iter().filter(is_done).collect();
        let whole = time(&mut step, None, meter.as_ref())?;
        let work = DecodeWork { bench: self, batch, step: &step };
        let work: Vec<OpWork> = done.iter().map(|&op| work.of(op)).collect();
        let ops = done.into_iter().zip(work).map(|(op, work)| {
            let timing = time(&mut step, Some(op), meter.as_ref())?;
            Ok(OpProfile { op, timing, work })
        });
        Ok(StepProfile { whole, ops: ops.collect::<Result<_>>()? })
    }
}

/// Times a step or one of its operations; with a meter also in sustained operation.
fn time(step: &mut TrialStep<'_>, op: Option<DecoderOp>, meter: Option<&EnergyMeter>) -> Result<Timing> {
    let TrialStep { run, stream, tp, .. } = step;
    let mut run = || DecoderOp::only(op, &mut **run);
    run()?;
    let mut graph = Graph::capture(stream, run)?;
    let replays = if op.is_none() { STEP_REPLAYS } else { REPLAYS };
    // SAFETY: recorded just now, over memory that stays as long as the engine is awake.
    let us = unsafe { graph.median_time(stream, replays)? }.as_secs_f64() * 1e6;
    let Some(meter) = meter else { return Ok(Timing { us, sustained: None }) };
    let mut longest_us = [us];
    all_reduce_f64(*tp, &mut longest_us, ReduceOp::Max)?; // all ranks of an engine must run equally many replays
    // SAFETY: as above.
    let replay = || unsafe { graph.replay(stream) };
    Ok(Timing { us, sustained: Some(Sustained::measure(meter, stream, longest_us[0], replay)?) })
}

/// Records the launches of each step; none, and a warning, where they cannot be recorded. To be called last: times after a recording may be
/// longer.
fn record_steps(served: &mut Served, batches: &[TrialBatch]) -> Result<Vec<StepLaunches>> {
    let record =
        |&batch: &TrialBatch| served.with_engine(|rollout| rollout.try_step(batch, |step| record(batch, step)));
    match batches.iter().map(record).collect() {
        Err(Error::Environment { message }) => {
            console::say(format_args!("warning: launches are not shown: {message}"));
            Ok(Vec::new())
        }
        steps => steps,
    }
}

/// Records the launches of a step: of several replays those of the one that takes the median time.
fn record(batch: TrialBatch, step: TrialStep<'_>) -> Result<StepLaunches> {
    let TrialStep { run, stream, .. } = step;
    let mut run = || DecoderOp::only(None, &mut *run);
    run()?;
    let mut graph = Graph::capture(stream, run)?;
    // SAFETY: recorded just now, over memory that stays as long as the engine is awake.
    let step_us = unsafe { graph.median_time(stream, REPLAYS)? }.as_secs_f64() * 1e6;
    let mut record = || {
        // SAFETY: as above.
        let launches = record_launches(stream.context(), || unsafe { graph.replay(stream) })?;
        Ok(StepLaunches::new(batch.sequences, step_us, &launches))
    };
    let mut recorded = (0..RECORDED_REPLAYS).map(|_| record()).collect::<Result<Vec<_>>>()?;
    recorded.sort_by(|a, b| a.span_us().total_cmp(&b.span_us()));
    Ok(recorded.swap_remove(RECORDED_REPLAYS / 2))
}

fn report(batch: TrialBatch, profile: &StepProfile, with_ops: bool, limits: &GpuLimits) -> Value {
    let floor_s = |op: &OpProfile| limits.floor_s(op.work.bytes, op.work.flop);
    let floor_us: f64 = 1e6 * profile.ops.iter().map(floor_s).sum::<f64>();
    let step_us = profile.whole.us;
    let mut row = json!({
        "batch": batch.sequences,
        "context": batch.context,
        "step_us": step_us.round(),
        "floor_us": floor_us.round(),
        "share_of_floor": (1e3 * floor_us / step_us).round() / 1e3,
        "tokens_per_second": (1e6 * batch.sequences as f64 / step_us).round(),
    });
    if with_ops {
        let of = |op: &OpProfile| json!([op.timing.us.round(), (1e6 * floor_s(op)).round()]);
        row["ops_us_and_floor"] = profile.ops.iter().map(|op| (format!("{:?}", op.op), of(op))).collect();
    }
    if let Some(step) = profile.whole.sustained {
        let of = |it: Sustained| json!({"us": it.us.round(), "joules": (1e4 * it.joules).round() / 1e4});
        let ops = profile.ops.iter().filter_map(|op| Some((format!("{:?}", op.op), of(op.timing.sustained?))));
        row["sustained"] = ops.chain([("Step".to_owned(), of(step))]).collect();
    }
    row
}

impl OpWork {
    fn bytes(bytes: f64) -> Self {
        Self { bytes, flop: 0.0 }
    }

    /// The GEMM of `rows` rows with a weight [n, k], which reads both operands and writes the result.
    fn product([n, k]: [f64; 2], rows: f64, element_bytes: f64) -> Self {
        Self { bytes: element_bytes * (n * k + rows * (n + k)), flop: 2.0 * rows * n * k }
    }

    /// A GEMM of a block. Operations are counted as if all GEMMs had the throughput of plain ones.
    fn linear(linear: &LinearSpec, rows: f64, cost: StepCost) -> Self {
        Self::of_matrices([linear.rows() as f64, linear.columns as f64], [1.0, rows], cost)
    }

    /// GEMMs of `rows` rows in all with `hit` matrices.
    fn of_matrices([n, k]: [f64; 2], [hit, rows]: [f64; 2], cost: StepCost) -> Self {
        let bytes = cost.weight_bytes * hit * n * k + cost.row_bytes * rows * (n + k);
        Self { bytes, flop: 2.0 * rows * n * k / cost.speedup }
    }

    /// One GEMM of an MLP. For experts, it reads those that are hit if tokens choose uniformly.
    fn mlp_product(mlp: Mlp, product: usize, rows: f64, cost: &dyn Fn(bool) -> StepCost) -> Self {
        match mlp {
            Mlp::Dense(dense) => Self::linear(&dense.linears()[product], rows, cost(false)),
            Mlp::Experts(experts) => {
                let linears = experts.linears();
                let (all, k) = (experts.num_experts as f64, experts.router.num_experts_per_tok as f64);
                let own = experts.own as f64 / all;
                let (hit, k) = (own * all * (1.0 - (1.0 - k / all).powf(rows)), own * k);
                let (n, columns) = (linears[product].rows() as f64, linears[product].columns as f64);
                let routed = Self::of_matrices([n, columns], [hit, rows * k], cost(true));
                let shared = linears.get(EXPERT_PRODUCTS + product);
                routed + shared.map_or_else(Self::default, |linear| Self::linear(linear, rows, cost(false)))
            }
        }
    }
}

impl Add for OpWork {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, flop: self.flop + other.flop }
    }
}

impl Sum for OpWork {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

/// The sizes that determine the work of a step's operations.
struct DecodeWork<'a, 's> {
    bench: &'a GenerateBench,
    batch: TrialBatch,
    step: &'a TrialStep<'s>,
}

impl DecodeWork<'_, '_> {
    /// The work of one operation in all layers, on one rank.
    fn of(&self, op: DecoderOp) -> OpWork {
        let Self { bench: GenerateBench { spec, kind, residual, quantization, state_dtype, .. }, step, .. } = *self;
        let (tp_size, rows) = (step.tp.size(), self.batch.sequences as f64);
        let context_tokens = (self.batch.sequences * self.batch.context) as f64;
        let attention = spec.attention().tp_slice(tp_size);
        let [qkv, o] = attention.linears();
        let (hidden, layers) = (spec.hidden_size as f64, spec.num_layers() as f64);
        let vocab = (spec.vocab_size / tp_size) as f64;
        let [size, residual] = [kind, residual].map(|kind| kind.elt_size_in_bytes() as f64);
        let cost = |of_experts| quantization.format().step_cost(size, of_experts);
        let blocks = || spec.layers.iter().map(|block| block.tp_slice(tp_size));
        // GEMMs of the first sublayers: those that read the residual stream, or those that add to it.
        let mixer_products = |reads: bool| {
            let linears = blocks().flat_map(|block| block.mixer.linears());
            let linears = linears.filter(|linear| (linear.split != TpSplit::Columns) == reads);
            linears.map(|linear| OpWork::linear(&linear, rows, cost(false))).sum()
        };
        let mlp_products =
            |product: usize| blocks().map(|block| OpWork::mlp_product(block.mlp, product, rows, &cost)).sum();
        let dense = || blocks().filter_map(|block| if let Mlp::Dense(dense) = block.mlp { Some(dense) } else { None });
        let experts =
            || blocks().filter_map(|block| if let Mlp::Experts(experts) = block.mlp { Some(experts) } else { None });
        let with_attention = spec.attention_layers().count() as f64;
        match op {
            DecoderOp::Embed => OpWork::bytes((size + residual) * rows * hidden),
            DecoderOp::Norm if step.sums_have_norms => OpWork::bytes((size + residual) * rows * hidden), // only that of the first layer
            DecoderOp::Norm => OpWork::bytes((size + residual) * rows * hidden * 2.0 * (2.0 * layers + 1.0)),
            DecoderOp::Qkv => mixer_products(true),
            DecoderOp::RopeWriteKv => OpWork::bytes(with_attention * 2.0 * size * rows * qkv.rows() as f64),
            DecoderOp::AttentionPlan => OpWork::default(),
            DecoderOp::Attention => OpWork {
                bytes: step.cached_token_bytes * context_tokens,
                flop: with_attention * attention.flop_per_pair() as f64 * context_tokens,
            },
            DecoderOp::DeltaNet => {
                let page_bytes = state_page_bytes(spec, tp_size, *kind, *state_dtype, step.tp.device());
                let flop: usize = blocks().map(|block| block.mixer.flop_per_token()).sum();
                OpWork { bytes: 2.0 * rows * page_bytes as f64, flop: rows * flop as f64 }
            }
            DecoderOp::O => mixer_products(false),
            DecoderOp::Router => experts().map(|it| OpWork::product([it.num_experts as f64, hidden], rows, size)).sum(),
            DecoderOp::GateUp => mlp_products(0),
            DecoderOp::SiluMul => dense().map(|it| OpWork::bytes(size * rows * 3.0 * it.intermediate as f64)).sum(),
            DecoderOp::Round => {
                OpWork::bytes(3.0 * rows * layers * o.columns as f64) // otherwise other operations include it
            }
            DecoderOp::Down => mlp_products(1),
            DecoderOp::Combine => experts()
                .map(|it| OpWork::bytes(size * rows * hidden * (it.router.num_experts_per_tok + 1) as f64))
                .sum(),
            DecoderOp::Adapters => adapters(step.weights)
                .flat_map(|lora| [&lora.a, &lora.b])
                .map(|factor| OpWork::product([factor.size()[0] as f64, factor.size()[1] as f64], rows, size))
                .sum(),
            DecoderOp::AllReduce => OpWork::bytes(layers * 2.0 * (size + residual) * rows * hidden),
            DecoderOp::Head => {
                OpWork { bytes: size * (vocab + rows) * hidden + 4.0 * rows * vocab, flop: 2.0 * rows * vocab * hidden }
            }
            DecoderOp::Sample => OpWork::bytes(4.0 * rows * vocab),
        }
    }
}

/// LoRA adapters of all blocks.
fn adapters<'a>(weights: &'a EngineWeights<'_>) -> impl Iterator<Item = &'a Lora> {
    weights.blocks.iter().flat_map(BlockParams::linears).filter_map(|(_, linear)| linear.lora.as_ref())
}
