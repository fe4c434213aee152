//! The decoder network over the engine's buffers: kernels and cuBLASLt GEMMs, from token ids to hidden states. It allocates nothing itself, so a
//! decode step can be captured as a CUDA graph. The caller supplies the attention.

use tch::{Kind, Tensor};

use super::buffers::DecodeBuffers;
use super::inputs::DraftedInputs;
use super::masks::TokenMasks;
use super::op::DecoderOp;
use super::processing::Processing;
use crate::cuda::kernels::{self, AllReduceMethod, HeadTransform, NormOptions, QkvViews, RowSums};
use crate::cuda::{Products, Tuning};
use crate::error::Result;
use crate::model::{
    AttentionSpec, BlockParams, ByRope, Format, Lora, MIXER_NORMS, MLP_NORMS, Matrix, Mixer, Mlp, ModelSpec,
    OwnProducts, ParamName, Plain, QkNorm, Stage, StoredBlock,
};
use crate::ranks::{Collective, ReduceOp};
use crate::rollout::state_pages::SequenceMemory;
use crate::rollout::weights::EngineWeights;

/// The decoder network of an awake engine; all steps use it.
#[derive(Debug, Clone, Copy)]
pub(super) struct DecoderNetwork<'a> {
    pub(super) spec: &'a ModelSpec, // with only the stage's layers
    pub(super) stage: &'a Stage,
    pub(super) weights: &'a EngineWeights<'a>,
    pub(super) memory: SequenceMemory<'a>,
    pub(super) tp: &'a dyn Collective,
    pub(super) products: &'a Products,
    pub(super) buffers: &'a DecodeBuffers,
    pub(super) ropes: &'a ByRope<Tensor>, // [positions, rotated columns] f32, cosines, then sines
    pub(super) low: Option<&'a Tensor>,   // flat buffer for x A^T of adapters
    /// All-reduces row-parallel GEMMs over the group; `None` if NCCL does.
    pub(super) sums: Option<&'a RowSums>,
    pub(super) tuning: Tuning,
    /// The GEMMs that use this crate's kernels, a subset of [`DecoderNetwork::may_own_products`].
    pub(super) own_products: OwnProducts,
    pub(super) processing: Processing,
    /// Adapter number of each row, if requests choose among several LoRA adapters. [T] i32
    pub(super) adapters: Option<&'a Tensor>,
    /// Token masks of the step's draws, if any draw has one.
    pub(super) masks: Option<&'a TokenMasks>,
    /// The layer of the cache that the first layer's keys and values are in: those of a draft head are behind the model's.
    pub(super) first_cache_layer: usize,
    /// Whether the experts of tokens are recorded.
    pub(super) records_experts: bool,
}

/// The T tokens of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepTokens<'a> {
    pub(super) ids: &'a Tensor,       // [T] i32
    pub(super) positions: &'a Tensor, // [T] i32
    pub(super) slots: &'a Tensor,     // [T] i32, -1 for padding
    /// Recorded experts of an earlier computation, over all layers with experts; -1 where none was recorded.
    pub(super) recorded: Option<&'a Tensor>, // flat, i16, token by token
    /// State page of each sequence; the tokens of a sequence are contiguous.
    pub(super) state_pages: &'a Tensor, // [B] i32
    /// Start of each sequence's tokens; `None` if each has one token.
    pub(super) bounds: Option<&'a Tensor>, // [B + 1] i32
    /// Of a decode step whose sequences have drafts, or states that take some in; the pages are theirs then.
    pub(super) drafts: Option<&'a DraftedInputs>,
}

/// Inputs of one layer's attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepHeads<'a> {
    pub(super) q: &'a Tensor, // [T, H, hd]
    /// Output of the QKV projection. Its keys and values are also in the cache.
    pub(super) qkv: &'a QkvViews,
    pub(super) sinks: Option<&'a Tensor>, // [H]
}

/// Attention of one layer, called with the layer's number, its shape and its inputs. Returns [T, H hd].
pub(super) type Attend<'a> = dyn FnMut(usize, AttentionSpec, StepHeads<'_>) -> Result<Tensor> + 'a;

impl DecoderNetwork<'_> {
    /// Final hidden states, after the norm. [T, D] The first stage starts from token ids, later stages from the buffer `x`. On all stages but the
    /// last, `x` then holds the input of the next stage.
    ///
    /// `kernels::product`, `gate_up`, `adapt`, `experts_low` and `route` read weights while the previous operation still runs. This is safe because
    /// no operation before them writes weights. The policy's weights are complete before the step begins, since the engine's stream waits for its
    /// caller's. A block that `prepare` writes is first followed by a norm, which waits for `prepare`. An operation that a benchmark times alone
    /// lacks this norm, but its output is not used. `kernels::product` and kernels of a quantized format let the next kernel start before they have
    /// waited themselves. That is safe, too: prepared weights are not written within a step, and blocks that `prepare` writes are followed by norms that wait.
    pub(super) fn hidden(&self, tokens: &StepTokens, attend: &mut Attend) -> Result<Tensor> {
        let rows = tokens.ids.size()[0];
        let first = |buffer: &Tensor| buffer.narrow(0, 0, rows);
        let (mut x, gate_up, mut act) =
            (first(&self.buffers.x), first(&self.buffers.gate_up), first(&self.buffers.act));
        // Outputs of attention and of the MLP before the all-reduce. With NCCL both use one buffer.
        let (mut normed, mut parts) = match self.sums {
            Some(sums) => (first(&sums.normed()?), [first(&sums.part(0)?), first(&sums.part(1)?)]),
            None => (first(&self.buffers.normed), [first(&self.buffers.delta), first(&self.buffers.delta)]),
        };
        if self.stage.is_first() {
            self.embed_scaled(tokens.ids, &mut x)?;
        }
        if self.processing.penalises {
            DecoderOp::Sample.run(|| kernels::note_tokens(tokens.ids, tokens.slots, &self.buffers.history.view(-1)))?;
        }
        self.weights.prepare(0)?;
        let format = self.format();
        self.enter(&mut x, self.weights.blocks[0].norm(MIXER_NORMS.pre), &mut normed, format)?;
        for (layer, (w, block)) in self.weights.blocks.iter().zip(&self.spec.layers).enumerate() {
            let (attended, last) = match block.mixer {
                Mixer::Attention(attention) => {
                    (self.attention((layer, attention), w, &normed, tokens, attend)?, Matrix::O)
                }
                Mixer::DeltaNet(delta_net) => (self.delta_net(layer, delta_net, w, &normed, tokens)?, Matrix::DeltaOut),
            };
            self.round(&attended, format)?;
            self.linear(DecoderOp::O, &attended, w.linear(last), &parts[0])?;
            let norms = (w.norm(MIXER_NORMS.post), w.norm(MLP_NORMS.pre));
            self.leave((0, block.residual_scale), &mut parts, &mut x, norms, (&mut normed, format))?;
            match block.mlp {
                Mlp::Dense(dense) => {
                    self.gate_up(dense.activation, w.linear(Matrix::GateUp), &normed, &gate_up, &mut act)?;
                    self.linear(DecoderOp::Down, &act, w.linear(Matrix::Down), &parts[1])?;
                }
                Mlp::Experts(experts) => self.experts(layer, experts, w, &normed, tokens, &parts[1])?,
            }
            let next = match self.weights.blocks.get(layer + 1) {
                Some(next) => {
                    self.weights.prepare(layer + 1)?;
                    next.norm(MIXER_NORMS.pre)
                }
                None if self.stage.is_last() => Some(&self.weights.final_norm),
                None => self.weights.blocks[0].norm(MIXER_NORMS.pre), // only the sum is needed, but the kernel computes a norm with it
            };
            let is_last = layer + 1 == self.weights.blocks.len();
            let next_format: &dyn Format = if is_last { &Plain } else { format }; // the head reads unquantized rows
            let norms = (w.norm(MLP_NORMS.post), next);
            self.leave((1, block.residual_scale), &mut parts, &mut x, norms, (&mut normed, next_format))?;
        }
        Ok(normed)
    }

    /// x = the rows of the embedding where the residual stream begins.
    pub(super) fn embed_scaled(&self, ids: &Tensor /* [T] */, x: &mut Tensor /* [T, D] */) -> Result<()> {
        DecoderOp::Embed.run(|| {
            self.embed(ids, x)?;
            scale(x, self.spec.embedding_multiplier_in(self.weights.embedding.kind()))
        })
    }

    fn embed(&self, ids: &Tensor, x: &mut Tensor) -> Result<()> {
        let table = &self.weights.embedding;
        if table.size()[0] == self.spec.vocab_size as i64 {
            return kernels::embed(ids, table, 0, x);
        }
        let first_row = self.spec.vocab_range(self.tp.rank(), self.tp.size()).start;
        kernels::embed(ids, table, first_row, x)?;
        self.tp.all_reduce(x, ReduceOp::Sum)
    }

    fn attention(
        &self,
        (layer, spec): (usize, AttentionSpec),
        w: &BlockParams,
        normed: &Tensor, // [T, D]
        tokens: &StepTokens,
        attend: &mut Attend,
    ) -> Result<Tensor> {
        let rows = normed.size()[0];
        let qkv = self.project(spec, w.linear(Matrix::Qkv), normed)?;
        let mut q = self.buffers.q.narrow(0, 0, rows).view([rows, -1, spec.head_dim as i64]);
        let norms = w.norm(ParamName::QNorm).zip(w.norm(ParamName::KNorm));
        let mut norms = norms.map(|(q, k)| (q, k, self.spec.norm()));
        if spec.qk_norm == Some(QkNorm::All) {
            self.norm_all_heads(spec, &qkv, norms.take())?;
        }
        let transform = HeadTransform { norms, rope: self.ropes.of(spec.rope) };
        let StepTokens { positions, slots, .. } = *tokens;
        let cache = self.memory.kv_cache.layer(self.first_cache_layer + layer);
        DecoderOp::RopeWriteKv.run(|| cache.write(&qkv, &transform, (positions, slots), &mut q))?;
        let mut attended = attend(layer, spec, StepHeads { q: &q, qkv: &qkv, sinks: w.norm(ParamName::Sinks) })?;
        if let Some(gate) = &qkv.gate {
            DecoderOp::Attention.run(|| kernels::gate(&mut attended, gate))?;
        }
        Ok(attended)
    }

    /// Applies one RMSNorm over all query heads and one over all key heads, in place, across the ranks that hold them.
    fn norm_all_heads(
        &self,
        attention: AttentionSpec,
        qkv: &QkvViews,
        norms: Option<(&Tensor, &Tensor, NormOptions)>,
    ) -> Result<()> {
        let Some((q, k, NormOptions { eps, .. })) = norms else { return Ok(()) };
        let rows = qkv.q.size()[0];
        // Use the memory of the MLP's activation, free at this point, as scratch: 8 bytes per row.
        let scratch = self.buffers.act.view(-1).narrow(0, 0, 4 * rows).view_dtype(Kind::Float);
        let mut sums = scratch.narrow(0, 0, 2 * rows).view([rows, 2]);
        let counts_k = attention.has_first_of_key(self.tp.rank(), self.tp.size());
        DecoderOp::Norm.run(|| kernels::qk_squares(qkv, counts_k, &mut sums))?;
        if self.tp.size() > 1 {
            DecoderOp::AllReduce.run(|| self.tp.all_reduce(&mut sums, ReduceOp::Sum))?;
        }
        DecoderOp::Norm.run(|| kernels::qk_scale(qkv, [q, k], &sums, attention.widths(), eps))
    }

    /// Computes normed = pre(x), or a copy of x without `pre`, in the format of the next GEMM.
    fn enter(&self, x: &mut Tensor, pre: Option<&Tensor>, normed: &mut Tensor, format: &dyn Format) -> Result<()> {
        let Some(weight) = pre else {
            DecoderOp::Norm.run(|| Ok(normed.f_copy_(x)?))?;
            return self.round(normed, format);
        };
        DecoderOp::Norm.run(|| self.norm(x, None, weight, (normed, format)))
    }

    /// Computes x += delta and normed = norm(x), quantized if `format` is.
    fn norm(
        &self,
        x: &mut Tensor,                               // [T, D]
        delta: Option<&Tensor>,                       // [T, D]
        weight: &Tensor,                              // [D]
        (normed, format): (&mut Tensor, &dyn Format), // [T, D]
    ) -> Result<()> {
        format.step_norm(x, delta, weight, self.output(normed, format)?, self.spec.norm())
    }

    /// Computes x += factor * post(all-reduced output of a row-parallel GEMM), then normed = pre(x) for the next sublayer.
    fn leave(
        &self,
        (turn, factor): (usize, f64),
        parts: &mut [Tensor; 2],                         // [T, D]
        x: &mut Tensor,                                  // [T, D]
        (post, pre): (Option<&Tensor>, Option<&Tensor>), // [D]
        (normed, format): (&mut Tensor, &dyn Format),    // [T, D]
    ) -> Result<()> {
        if post.is_none() {
            DecoderOp::Norm.run(|| scale(&mut parts[turn], factor))?;
        }
        if let (None, Some(weight)) = (post, pre) {
            return self.add_rms_norm(turn, parts, x, weight, (normed, format));
        }
        let part = &mut parts[turn];
        if self.tp.size() > 1 {
            DecoderOp::AllReduce.run(|| self.tp.all_reduce(part, ReduceOp::Sum))?;
        }
        DecoderOp::Norm.run(|| {
            if let Some(weight) = post {
                kernels::add_rms_norm(part, None, weight, normed, self.spec.norm())?;
                scale(normed, factor)?;
            }
            let _ = x.f_add_(if post.is_some() { &*normed } else { &*part })?;
            Ok(())
        })?;
        self.enter(x, pre, normed, format)
    }

    /// All-reduces the output of a row-parallel GEMM and adds it to x; normed is the RMSNorm of x. Calls alternate between the two `parts`.
    fn add_rms_norm(
        &self,
        turn: usize,
        parts: &mut [Tensor; 2],                      // [T, D]
        x: &mut Tensor,                               // [T, D]
        weight: &Tensor,                              // [D]
        (normed, format): (&mut Tensor, &dyn Format), // [T, D]
    ) -> Result<()> {
        let part = &mut parts[turn];
        if let Some(sums) = self.sums {
            let way = match self.stage.is_last() {
                true => sums.way(part.size()[0] as usize),
                false => AllReduceMethod::Read, // every rank sends all rows
            };
            let leaves = format.step_sums(self.reads_plain());
            return DecoderOp::AllReduce.run(|| sums.add_rms_norm(way, turn, x, weight, self.spec.norm(), leaves));
        }
        if self.tp.size() > 1 {
            DecoderOp::AllReduce.run(|| self.tp.all_reduce(part, ReduceOp::Sum))?;
        }
        DecoderOp::Norm.run(|| self.norm(x, Some(part), weight, (normed, format)))
    }
}

/// Computes x *= factor; queues nothing if the factor is 1.
pub(super) fn scale(x: &mut Tensor, factor: f64) -> Result<()> {
    if factor != 1.0 {
        let _ = x.f_mul_scalar_(factor)?;
    }
    Ok(())
}

/// LoRA adapters of all blocks.
pub(super) fn adapters<'a>(weights: &'a EngineWeights) -> impl Iterator<Item = &'a Lora> {
    weights.blocks.iter().flat_map(BlockParams::linears).filter_map(|(_, linear)| linear.lora.as_ref())
}

/// Allocates the buffer for x A^T of the largest LoRA adapter over `rows`; `None` without adapters. In an expert layer each of a row's `choices` has
/// its own x A^T.
pub(super) fn low_rank_buffer(weights: &EngineWeights, rows: i64, choices: i64) -> Result<Option<Tensor>> {
    let width = |lora: &Lora| match lora.a.size()[..] {
        [_, inner, _] => choices * inner,
        _ => lora.a.size()[0],
    };
    let widest = adapters(weights).map(width).max();
    let options = (weights.embedding.kind(), weights.embedding.device());
    widest.map(|widest| Ok(Tensor::f_empty([rows * widest], options)?)).transpose()
}

/// The addresses and strides of weights and cache that a CUDA graph has baked in; if they change, capture again.
pub(super) fn fingerprint(
    weights: &EngineWeights,
    SequenceMemory { kv_cache, states }: SequenceMemory<'_>,
    low: Option<&Tensor>,
) -> Result<Vec<usize>> {
    let mut addresses = Vec::new();
    let mut note = |tensor: &Tensor| {
        addresses.push(tensor.data_ptr() as usize);
        addresses.extend(tensor.stride().iter().map(|&stride| stride as usize));
    };
    [&weights.embedding, &weights.final_norm, &weights.lm_head].into_iter().chain(low).for_each(&mut note);
    let stored = weights.stored.iter().flat_map(|stored| stored.blocks);
    stored.flat_map(StoredBlock::tensors).for_each(&mut note);
    states.iter().flat_map(|states| states.tensors()).for_each(&mut note);
    for (layer, w) in weights.blocks.iter().chain(&weights.draft_head).enumerate() {
        if states.is_none_or(|states| states.find(layer).is_none()) {
            kv_cache.layer(layer).tensors().into_iter().for_each(&mut note);
        }
        w.try_map(&mut |tensor| {
            note(tensor);
            Ok(tensor.shallow_clone())
        })?;
    }
    let pieces = weights.blocks.iter().flat_map(BlockParams::linears).flat_map(|(_, linear)| &linear.pieces);
    let prepared = pieces.filter_map(|piece| piece.prepared.as_ref());
    prepared.flat_map(|rows| [&rows.values, &rows.scales]).for_each(&mut note);
    adapters(weights).flat_map(|lora| [&lora.a, &lora.b].into_iter().chain(&lora.owners)).for_each(&mut note);
    Ok(addresses)
}
