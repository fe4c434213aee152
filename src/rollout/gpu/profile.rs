//! The time of a decode step and of each of its operations, from graph replays over a made-up batch.
#![allow(unsafe_code)]

use std::sync::Arc;

use tch::Device;

use super::experts::mlp_work;
use super::graphs::replay_times;
use super::inputs::Packing;
use super::network::{DecoderOp, adapters};
use super::runner::GpuRunner;
use crate::config::StateDtype;
use crate::cuda::{EnergyMeter, Graph, Sustained};
use crate::error::{Error, Result};
use crate::model::{Mlp, TpSplit, product_work};
use crate::ranks::{ReduceOp, all_reduce_f64};
use crate::rollout::engine::{Engine, RolloutEngine};
use crate::rollout::sampler::Draw;
use crate::rollout::scheduler::{Step, TokenRun};
use crate::rollout::sequence::EngineSequence;
use crate::rollout::state_pages::{StatePages, state_page_bytes};
use crate::types::SamplingParams;

/// Replays of one operation; the median counts.
const REPLAYS: usize = 20;
/// Replays of a whole step: long enough that the chip clocks as in a long run.
const STEP_REPLAYS: usize = 150;

/// One decode step's times.
#[derive(Debug, Clone)]
pub struct StepProfile {
    /// The whole step, in microseconds.
    pub step_us: f64,
    /// Cost of the whole step when repeated for half a second, where that was asked for.
    pub sustained: Option<Sustained>,
    /// The step's operations.
    pub ops: Vec<OpTime>,
}

/// One operation's time in all layers together.
#[derive(Debug, Clone)]
pub struct OpTime {
    /// The operation's name.
    pub op: String,
    /// Microseconds.
    pub us: f64,
    /// Repeated for half a second, where that was asked for.
    pub sustained: Option<Sustained>,
    /// Bytes that it must read and write, of weights and cache where those are most.
    pub bytes: f64,
    /// Floating-point operations.
    pub flop: f64,
}

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

/// Times one decode step of `batch` sequences of `context` tokens, and each of its operations. `shape` is (batch, group, shared):
/// each `group` of sequences shares all full blocks of its first `shared` tokens. Where it `sustains` them, each is repeated for half a
/// second, with its energy. What it writes into the cache is no sequence's. On a GPU only, of an engine of one stage; collective over the tensor-parallel group.
///
/// # Errors
/// [`Error::InvalidArgument`] on a CPU, of several stages, or if the cache does not hold the batch; [`Error::Environment`] where the GPU does not
/// tell its energy.
pub fn profile_step(
    rollout: &mut RolloutEngine<'_>,
    shape: (usize, usize, usize),
    context: usize,
    sustains: bool,
) -> Result<StepProfile> {
    rollout.engine.drop_kept(); // blocks are written at random
    let RolloutEngine { engine, weights, stats, .. } = rollout;
    if engine.ranks().stages.count() > 1 {
        return Err(Error::InvalidArgument {
            op: "profile_step",
            expected: "an engine of one stage".into(),
            got: format!("{} stages", engine.ranks().stages.count()),
        });
    }
    let Engine { spec, gpu: Some(gpu), kv_cache, states, options, ranks, .. } = &mut **engine else {
        return Err(Error::InvalidArgument {
            op: "profile_step",
            expected: "an engine on a GPU".into(),
            got: "one on a CPU".into(),
        });
    };
    if shape.0 > options.max_num_seqs {
        return Err(Error::InvalidArgument {
            op: "profile_step",
            expected: format!("at most max_num_seqs = {} sequences", options.max_num_seqs),
            got: shape.0.to_string(),
        });
    }
    let mut runner = GpuRunner::new(gpu, (spec, weights), (kv_cache, states.as_ref()), ranks)?;
    runner.profile(shape, context, stats.num_blocks, sustains)
}

impl GpuRunner<'_> {
    fn profile(
        &mut self,
        (batch, group, shared): (usize, usize, usize),
        context: usize,
        num_blocks: usize,
        sustains: bool,
    ) -> Result<StepProfile> {
        let sequences = self.sequences((batch, group, shared), context, num_blocks)?;
        let run = |index: usize| TokenRun { sequence: index, tokens: context - 1..context, samples: index..index + 1 };
        let runs = (0..batch).map(run).collect();
        let step = Step { is_decode: true, runs, copies: Vec::new(), state_copies: Vec::new() };
        let draws = sequences.iter().enumerate().map(|(row, EngineSequence { params, token_ids, .. })| Draw {
            row,
            params,
            step: 0,
            prompt_id: 0,
            sample: row,
            token_ids,
            allowed: None,
        });
        let draws: Vec<Draw> = draws.collect();
        let block_size = self.kv_cache.block_size();
        let packing = Packing {
            step: &step,
            draws: &draws,
            sequences: &sequences,
            block_size,
            has_adapters: self.weights.num_adapters > 0,
        };
        let meter = if sustains { Some(self.energy_meter()?) } else { None };
        let (step_us, sustained) = self.time(&packing, None, meter.as_ref())?;
        let has_experts = self.spec.num_expert_layers() > 0;
        let has_dense = self.spec.num_expert_layers() < self.spec.num_layers();
        let mut ops = Vec::with_capacity(OPS.len());
        for op in OPS {
            let is_done = match op {
                DecoderOp::AllReduce => self.tp.size() > 1,
                DecoderOp::Adapters => self.state.low.is_some(),
                DecoderOp::Router | DecoderOp::Combine => has_experts,
                DecoderOp::SiluMul => has_dense,
                DecoderOp::Round => self.weights.format().rounds(),
                DecoderOp::DeltaNet => self.states.is_some(),
                _ => true,
            };
            if !is_done {
                continue;
            }
            let (us, sustained) = self.time(&packing, Some(op), meter.as_ref())?;
            let (bytes, flop) = self.work(op, batch as f64, (batch * context) as f64);
            ops.push(OpTime { op: format!("{op:?}"), us, sustained, bytes, flop });
        }
        Ok(StepProfile { step_us, sustained, ops })
    }

    fn sequences(
        &self,
        (batch, group, shared): (usize, usize, usize),
        context: usize,
        num_blocks: usize,
    ) -> Result<Vec<EngineSequence>> {
        let block_size = self.kv_cache.block_size();
        let (num_shared, longest) = (shared / block_size, context.div_ceil(block_size));
        let mut free = 0..num_blocks as u32;
        let (params, mut sequences) = (Arc::<SamplingParams>::default(), Vec::<EngineSequence>::with_capacity(batch));
        for index in 0..batch {
            let mut sequence =
                EngineSequence::new(index / group, params.clone(), &vec![1; shared.clamp(1, context)], context);
            // Rows that differ: equal ones take less power, and the chip clocks higher.
            let last = 1 + index * (self.spec.vocab_size - 1) / batch;
            sequence.token_ids.resize(context, last as u32);
            sequence.state_page = self.states.map(|_| index as u32);
            sequence.block_table = match index % group {
                0 => free.by_ref().take(num_shared).collect(),
                member => sequences[index - member].block_table.clone(),
            };
            sequences.push(sequence);
        }
        // Sequences grow side by side: neighbours in time are neighbours in memory.
        for _ in num_shared..longest {
            sequences.iter_mut().zip(free.by_ref()).for_each(|(sequence, block)| sequence.block_table.push(block));
        }
        if sequences.iter().any(|sequence| sequence.block_table.len() < longest) {
            return Err(Error::InvalidArgument {
                op: "profile_step",
                expected: format!("a batch that {num_blocks} KV blocks hold"),
                got: format!("{batch} sequences of {context} tokens"),
            });
        }
        Ok(sequences)
    }

    fn energy_meter(&self) -> Result<EnergyMeter> {
        let Device::Cuda(ordinal) = self.tp.device() else { unreachable!("an engine on a GPU") };
        EnergyMeter::new(ordinal)
    }

    /// Microseconds of a step, or of one of its operations; with a meter also what it takes in the long run.
    fn time(
        &mut self,
        packing: &Packing,
        only: Option<DecoderOp>,
        meter: Option<&EnergyMeter>,
    ) -> Result<(f64, Option<Sustained>)> {
        let tp = self.tp;
        self.prepare_decode(packing, only, |stream, step| {
            step()?;
            let mut graph = Graph::capture(stream, step)?;
            let replays = if only.is_none() { STEP_REPLAYS } else { REPLAYS };
            // SAFETY: recorded just now, over memory that stays as long as the engine is awake.
            let us = unsafe { replay_times(&mut graph, stream, replays)? }[replays / 2].as_secs_f64() * 1e6;
            let Some(meter) = meter else { return Ok((us, None)) };
            let mut longest_us = [us];
            all_reduce_f64(tp, &mut longest_us, ReduceOp::Max)?; // ranks of one engine make equally many replays
            // SAFETY: as above.
            let replay = || unsafe { graph.replay(stream) };
            Ok((us, Some(Sustained::measure(meter, stream, longest_us[0], replay)?)))
        })
    }

    /// (bytes, floating-point operations) of one operation in all layers, for S rows and all their context tokens.
    fn work(&self, op: DecoderOp, rows: f64, context_tokens: f64) -> (f64, f64) {
        let (spec, tp_size) = (self.spec, self.tp.size());
        let attention = spec.attention().tp_slice(tp_size);
        let [qkv, o] = attention.linears();
        let (hidden, layers) = (spec.hidden_size as f64, spec.num_layers() as f64);
        let vocab = (spec.vocab_size / self.tp.size()) as f64;
        let size = self.weights.embedding.kind().elt_size_in_bytes() as f64;
        let buffers = self.state.buffers.as_ref().expect("the engine is awake");
        let residual = buffers.x.kind().elt_size_in_bytes() as f64;
        let sums = self.state.sums.as_ref().is_some_and(|sums| rows <= sums.rows() as f64);
        let of_layers = |(bytes, flop): (f64, f64)| (layers * bytes, layers * flop);
        let (product_size, rate) = self.weights.format().step_cost(size);
        // Of the first sublayers: of what they read, or of what they add to the residual stream.
        let mixer_products = |reads: bool| {
            let linears = spec.layers.iter().flat_map(|block| block.tp_slice(tp_size).mixer.linears());
            let linears = linears.filter(|linear| (linear.split != TpSplit::Columns) == reads);
            let (bytes, flop) = linears.fold((0.0, 0.0), |sum, linear| {
                let (bytes, flop) = linear.work(rows, product_size);
                (sum.0 + bytes, sum.1 + flop)
            });
            (bytes, flop / rate)
        };
        let with_attention = spec.attention_layers().count() as f64;
        let of_attentions = |(bytes, flop): (f64, f64)| (with_attention * bytes, with_attention * flop);
        let of_mlps = |work: &dyn Fn(Mlp) -> (f64, f64)| {
            let layers = spec.layers.iter().map(|block| work(block.tp_slice(tp_size).mlp));
            layers.fold((0.0, 0.0), |sum, (bytes, flop)| (sum.0 + bytes, sum.1 + flop))
        };
        let of_mlp_products = |index: usize| {
            let (bytes, flop) = of_mlps(&|mlp| mlp_work(mlp, index, rows, product_size));
            (bytes, flop / rate)
        };
        let cached_bytes = self.kv_cache.token_bytes();
        match op {
            DecoderOp::Embed => ((size + residual) * rows * hidden, 0.0),
            DecoderOp::Norm if sums => ((size + residual) * rows * hidden, 0.0), // the others are in the sums
            DecoderOp::Norm => ((size + residual) * rows * hidden * 2.0 * (2.0 * layers + 1.0), 0.0),
            DecoderOp::Qkv => mixer_products(true),
            DecoderOp::RopeWriteKv => of_attentions((2.0 * size * rows * qkv.rows() as f64, 0.0)),
            DecoderOp::AttentionPlan => (0.0, 0.0),
            DecoderOp::Attention => {
                let (_, flop) = of_attentions((0.0, attention.flop_per_pair() as f64 * context_tokens));
                (cached_bytes * context_tokens, flop)
            }
            DecoderOp::DeltaNet => {
                let kinds = (self.weights.embedding.kind(), self.states.map_or(StateDtype::Float32, StatePages::dtype));
                let pages = state_page_bytes(spec, tp_size, kinds, self.tp.device());
                let flop = spec.layers.iter().map(|block| block.tp_slice(tp_size).mixer.flop_per_token());
                (2.0 * rows * pages as f64, rows * flop.sum::<usize>() as f64)
            }
            DecoderOp::O => mixer_products(false),
            DecoderOp::Router => of_mlps(&|mlp| match mlp {
                Mlp::Dense(_) => (0.0, 0.0),
                Mlp::Experts(experts) => {
                    product_work(&[experts.num_experts as i64, spec.hidden_size as i64], rows, size)
                }
            }),
            DecoderOp::GateUp => of_mlp_products(0),
            DecoderOp::SiluMul => of_mlps(&|mlp| match mlp {
                Mlp::Dense(dense) => (size * rows * 3.0 * dense.intermediate as f64, 0.0),
                Mlp::Experts(_) => (0.0, 0.0),
            }),
            DecoderOp::Round => of_layers((3.0 * rows * o.columns as f64, 0.0)), // elsewhere other operations do it
            DecoderOp::Down => of_mlp_products(1),
            DecoderOp::Combine => of_mlps(&|mlp| match mlp {
                Mlp::Dense(_) => (0.0, 0.0),
                Mlp::Experts(experts) => (size * rows * hidden * (experts.router.num_experts_per_tok + 1) as f64, 0.0),
            }),
            DecoderOp::Adapters => adapters(self.weights).fold((0.0, 0.0), |(bytes, flop), lora| {
                let [a, b] = [&lora.a, &lora.b].map(|factor| product_work(&factor.size(), rows, size));
                (bytes + a.0 + b.0, flop + a.1 + b.1)
            }),
            DecoderOp::AllReduce => of_layers((2.0 * (size + residual) * rows * hidden, 0.0)),
            DecoderOp::Head => (size * (vocab + rows) * hidden + 4.0 * rows * vocab, 2.0 * rows * vocab * hidden),
            DecoderOp::Sample => (4.0 * rows * vocab, 0.0),
        }
    }
}
