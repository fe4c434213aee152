//! The network over the engine's buffers: kernels and cuBLASLt's products, from token ids to hidden states. Allocates nothing
//! itself, so that a decode step can be recorded; attention is the caller's.

use tch::{Kind, Tensor};

use super::buffers::DecodeBuffers;
use super::sampling::Processing;
use crate::cuda::kernels::{self, HeadTransform, QkvViews, RowSums};
use crate::cuda::{Products, Tuning};
use crate::dist::{Collective, ReduceOp};
use crate::error::Result;
use crate::model::{
    BlockParams, Linear, Lora, MIXER_NORMS, MLP_NORMS, Matrix, Mixer, ModelSpec, ParamName, Piece, QkNorm,
    QuantizedBlock,
};
use crate::rollout::kv_cache::KvCache;
use crate::rollout::weights::EngineWeights;

/// The decoder network of an engine that is awake, which all its steps share.
#[derive(Debug, Clone, Copy)]
pub(super) struct DecoderNetwork<'a> {
    pub(super) spec: &'a ModelSpec,
    pub(super) weights: &'a EngineWeights<'a>,
    pub(super) kv_cache: &'a KvCache,
    pub(super) tp: &'a dyn Collective,
    pub(super) products: &'a Products,
    pub(super) buffers: &'a DecodeBuffers,
    pub(super) rope: &'a Tensor,        // [positions, hd] f32, cosines, then sines
    pub(super) low: Option<&'a Tensor>, // where adapters' inner products go, flat
    /// Sums row-parallel products over the group; NCCL does where it is `None`.
    pub(super) sums: Option<&'a RowSums>,
    pub(super) tuning: Tuning,
    /// At most what [`DecoderNetwork::may_own_products`] allows.
    pub(super) own_products: OwnProducts,
    pub(super) processing: Processing,
    /// Leaves all other operations out, for their times.
    pub(super) only: Option<DecoderOp>,
}

/// Products of blocks by the crate's own kernels, where cuBLASLt's are slower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OwnProducts {
    None,
    /// Gate and up with SwiGLU, by `kernels::gate_up`.
    GateUp,
    /// All, by `kernels::product`.
    All,
}

/// The operations of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DecoderOp {
    Embed,
    Norm,
    Qkv,
    RopeWriteKv,
    AttentionPlan,
    Attention,
    O,
    GateUp,
    SiluMul,
    Down,
    Adapters,
    AllReduce,
    Head,
    Sample,
}

/// T tokens of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub(super) ids: &'a Tensor,       // [T] i32
    pub(super) positions: &'a Tensor, // [T] i32
    pub(super) slots: &'a Tensor,     // [T] i32, -1: padding
}

/// One layer's attention: its number, queries [T, H, hd], and the product that holds keys and values, which are in the cache,
/// too. Returns [T, H hd].
pub(super) type Attend<'a> = dyn FnMut(usize, &Tensor, &QkvViews) -> Result<Tensor> + 'a;

impl DecoderNetwork<'_> {
    /// Does `work`, unless only another operation is asked for.
    pub(super) fn op(&self, op: DecoderOp, work: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.only.is_none_or(|only| only == op) { work() } else { Ok(()) }
    }

    /// The products for which there are own kernels in all blocks. They have been found to pay with one rank an engine only; and ranks
    /// of one engine could not each decide by their own clock, as what is timed holds their sums.
    pub(super) fn may_own_products(&self, rows: usize) -> Result<OwnProducts> {
        if self.tuning != Tuning::Timed || self.tp.size() > 1 {
            return Ok(OwnProducts::None);
        }
        let (mut all, mut gate_up) = (true, true);
        for w in &self.weights.blocks {
            let is_adapted = w.linears().any(|(_, linear)| linear.lora.is_some());
            all &= !is_adapted
                && match &w.linear(Matrix::Qkv).pieces[..] {
                    [Piece { weight, bias }] => {
                        let others = [Matrix::O, Matrix::GateUp, Matrix::Down].map(|matrix| w.linear(matrix).weight());
                        let weights: Vec<&Tensor> = [weight].into_iter().chain(others).collect();
                        kernels::product_serves(rows, &weights, bias.as_ref())?
                    }
                    _ => false,
                };
            let linear = w.linear(Matrix::GateUp);
            gate_up &= linear.lora.is_none() && kernels::gate_up_serves(rows, linear.weight())?;
        }
        Ok(match (all, gate_up) {
            (true, _) => OwnProducts::All,
            (_, true) => OwnProducts::GateUp,
            _ => OwnProducts::None,
        })
    }

    /// Final hidden states, normed. [T, D]
    ///
    /// `kernels::product`, `gate_up` and `adapt` read weights while the operation before them runs. None of those writes weights: the
    /// policy's are complete before the step begins, as the engine's stream waits for its caller's; and between `prepare`, which
    /// writes a block's, and their first reader stands a norm, which has waited for it. An operation that is timed alone lacks the
    /// norm, but nobody reads what comes out.
    pub(super) fn hidden(&self, tokens: &Tokens, attend: &mut Attend) -> Result<Tensor> {
        let rows = tokens.ids.size()[0];
        let first = |buffer: &Tensor| buffer.narrow(0, 0, rows);
        let (mut x, gate_up, mut act) =
            (first(&self.buffers.x), first(&self.buffers.gate_up), first(&self.buffers.act));
        // What products give before it is summed over the group, of attention and of the MLP; one place serves both in NCCL.
        let (mut normed, mut parts) = match self.sums {
            Some(sums) => (first(&sums.normed()?), [first(&sums.part(0)?), first(&sums.part(1)?)]),
            None => (first(&self.buffers.normed), [first(&self.buffers.delta), first(&self.buffers.delta)]),
        };
        self.op(DecoderOp::Embed, || self.embed(tokens.ids, &mut x))?;
        if self.processing.penalises {
            self.op(DecoderOp::Sample, || {
                kernels::note_tokens(tokens.ids, tokens.slots, &self.buffers.history.view(-1))
            })?;
        }
        self.weights.prepare(0)?;
        self.enter(&mut x, self.weights.blocks[0].norm(MIXER_NORMS.pre), &mut normed)?;
        for (layer, w) in self.weights.blocks.iter().enumerate() {
            let attended = self.attention(layer, w, &normed, tokens, attend)?;
            self.linear(DecoderOp::O, &attended, w.linear(Matrix::O), &parts[0])?;
            self.leave(0, &mut parts, &mut x, (w.norm(MIXER_NORMS.post), w.norm(MLP_NORMS.pre)), &mut normed)?;
            self.gate_up(w.linear(Matrix::GateUp), &normed, &gate_up, &mut act)?;
            self.linear(DecoderOp::Down, &act, w.linear(Matrix::Down), &parts[1])?;
            let next = match self.weights.blocks.get(layer + 1) {
                Some(next) => {
                    self.weights.prepare(layer + 1)?;
                    next.norm(MIXER_NORMS.pre)
                }
                None => Some(&self.weights.final_norm),
            };
            self.leave(1, &mut parts, &mut x, (w.norm(MLP_NORMS.post), next), &mut normed)?;
        }
        Ok(normed)
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
        layer: usize,
        w: &BlockParams,
        normed: &Tensor, // [T, D]
        tokens: &Tokens,
        attend: &mut Attend,
    ) -> Result<Tensor> {
        let rows = normed.size()[0];
        let qkv = self.project(w.linear(Matrix::Qkv), normed)?;
        let mut q = self.buffers.q.narrow(0, 0, rows).view([rows, -1, self.spec.head_dim as i64]);
        let (k_cache, v_cache) = self.kv_cache.layer(layer);
        let norms = w.norm(ParamName::QNorm).zip(w.norm(ParamName::KNorm));
        let mut norms = norms.map(|(q, k)| (q, k, self.spec.rms_norm_eps));
        if self.spec.qk_norm == Some(QkNorm::All) {
            self.norm_all_heads(&qkv, norms.take())?;
        }
        let transform = HeadTransform { norms, rope: self.rope };
        let Tokens { positions, slots, .. } = *tokens;
        self.op(DecoderOp::RopeWriteKv, || {
            kernels::rope_write_kv(&qkv, &transform, positions, slots, &mut q, &k_cache, &v_cache)
        })?;
        attend(layer, &q, &qkv)
    }

    /// One norm over all query heads and one over all key heads, in place, whichever rank has them.
    fn norm_all_heads(&self, qkv: &QkvViews, norms: Option<(&Tensor, &Tensor, f64)>) -> Result<()> {
        let Some((q, k, eps)) = norms else { return Ok(()) };
        let Mixer::Attention(attention) = self.spec.block(0).mixer;
        let rows = qkv.q.size()[0];
        // The MLP's activation has no use for its memory now: 8 bytes a row.
        let scratch = self.buffers.act.view(-1).narrow(0, 0, 4 * rows).view_dtype(Kind::Float);
        let mut sums = scratch.narrow(0, 0, 2 * rows).view([rows, 2]);
        let counts_k = self.spec.has_first_of_key(self.tp.rank(), self.tp.size());
        self.op(DecoderOp::Norm, || kernels::qk_squares(qkv, counts_k, &mut sums))?;
        if self.tp.size() > 1 {
            self.op(DecoderOp::AllReduce, || self.tp.all_reduce(&mut sums, ReduceOp::Sum))?;
        }
        self.op(DecoderOp::Norm, || kernels::qk_scale(qkv, [q, k], &sums, attention.widths(), eps))
    }

    /// act = silu(gate) * up
    fn gate_up(
        &self,
        w: &Linear,
        normed: &Tensor,  // [T, D]
        gate_up: &Tensor, // [T, 2 F]
        act: &mut Tensor, // [T, F]
    ) -> Result<()> {
        match self.own_products {
            OwnProducts::All => self.op(DecoderOp::GateUp, || kernels::product_silu_mul(normed, w.weight(), act)),
            OwnProducts::GateUp => self.op(DecoderOp::GateUp, || kernels::gate_up(normed, w.weight(), act)),
            OwnProducts::None => {
                self.linear(DecoderOp::GateUp, normed, w, gate_up)?;
                self.op(DecoderOp::SiluMul, || kernels::silu_mul(gate_up, act))
            }
        }
    }

    /// Queries, keys and values with their biases, as views of the buffer that the products fill.
    fn project(&self, w: &Linear, normed: &Tensor) -> Result<QkvViews> {
        let out = self.buffers.qkv.narrow(0, 0, normed.size()[0]); // [T, (H + 2 Hkv) hd]
        let (heads, kv_heads) = self.spec.tp_heads(self.tp.size());
        let views = match &w.pieces[..] {
            [whole] => {
                self.product(DecoderOp::Qkv, normed, &whole.weight, whole.bias.as_ref(), &out)?;
                QkvViews::grouped(&out, kv_heads, self.spec.heads_per_group())
            }
            pieces => {
                let columns: Vec<i64> = pieces.iter().map(|piece| piece.weight.size()[0]).collect();
                let parts = out.split_with_sizes(columns.as_slice(), 1);
                for (piece, part) in pieces.iter().zip(&parts) {
                    self.product(DecoderOp::Qkv, normed, &piece.weight, piece.bias.as_ref(), part)?;
                }
                QkvViews::split(&parts[0], &parts[1], heads)
            }
        };
        self.adapt(normed, w.lora.as_ref(), &out)?;
        Ok(views)
    }

    /// normed = pre(x), or x itself.
    fn enter(&self, x: &mut Tensor, pre: Option<&Tensor>, normed: &mut Tensor) -> Result<()> {
        self.op(DecoderOp::Norm, || match pre {
            Some(weight) => kernels::add_rms_norm(x, None, weight, normed, self.spec.rms_norm_eps),
            None => Ok(normed.f_copy_(x)?),
        })
    }

    /// x += post(the sum over the group of what a row-parallel product gave); normed = pre(x), for the next sublayer.
    fn leave(
        &self,
        turn: usize,
        parts: &mut [Tensor; 2],                         // [T, D]
        x: &mut Tensor,                                  // [T, D]
        (post, pre): (Option<&Tensor>, Option<&Tensor>), // [D]
        normed: &mut Tensor,                             // [T, D]
    ) -> Result<()> {
        if let (None, Some(weight)) = (post, pre) {
            return self.add_rms_norm(turn, parts, x, weight, normed);
        }
        let part = &mut parts[turn];
        if self.tp.size() > 1 {
            self.op(DecoderOp::AllReduce, || self.tp.all_reduce(part, ReduceOp::Sum))?;
        }
        self.op(DecoderOp::Norm, || {
            if let Some(weight) = post {
                kernels::add_rms_norm(part, None, weight, normed, self.spec.rms_norm_eps)?;
            }
            let _ = x.f_add_(if post.is_some() { &*normed } else { &*part })?;
            Ok(())
        })?;
        self.enter(x, pre, normed)
    }

    /// x += the sum over the group of what a row-parallel product gave, where ranks have column ranges of the weight; normed is
    /// the norm of x. Calls take turns at `parts`.
    fn add_rms_norm(
        &self,
        turn: usize,
        parts: &mut [Tensor; 2], // [T, D]
        x: &mut Tensor,          // [T, D]
        weight: &Tensor,         // [D]
        normed: &mut Tensor,     // [T, D]
    ) -> Result<()> {
        let (part, eps) = (&mut parts[turn], self.spec.rms_norm_eps);
        if let Some(sums) = self.sums {
            let way = sums.way(part.size()[0] as usize);
            return self.op(DecoderOp::AllReduce, || sums.add_rms_norm(way, turn, x, weight, eps));
        }
        if self.tp.size() > 1 {
            self.op(DecoderOp::AllReduce, || self.tp.all_reduce(part, ReduceOp::Sum))?;
        }
        self.op(DecoderOp::Norm, || kernels::add_rms_norm(x, Some(part), weight, normed, eps))
    }

    /// out = x w^T, with the adapter's part.
    fn linear(&self, op: DecoderOp, x: &Tensor, w: &Linear, out: &Tensor) -> Result<()> {
        self.product(op, x, w.weight(), None, out)?;
        self.adapt(x, w.lora.as_ref(), out)
    }

    /// out = x w^T + bias
    pub(super) fn product(
        &self,
        op: DecoderOp,
        x: &Tensor,            // [T, K]
        w: &Tensor,            // [N, K]
        bias: Option<&Tensor>, // [N]
        out: &Tensor,          // [T, N]
    ) -> Result<()> {
        self.op(op, || match self.own_products {
            OwnProducts::All => kernels::product(x, w, bias, out),
            _ => self.products.run(x, &w.tr(), bias, out, 0.0, self.tuning),
        })
    }

    /// out += (x A^T) B^T
    fn adapt(&self, x: &Tensor, lora: Option<&Lora>, out: &Tensor) -> Result<()> {
        let (Some(Lora { a, b, .. }), Some(low)) = (lora, self.low) else { return Ok(()) };
        let shape = [x.size()[0], a.size()[0]];
        let low = low.narrow(0, 0, shape[0] * shape[1]).view(shape); // [T, k]
        // Where a row's bits must not depend on the rows beside it, they come from one kernel for all numbers of rows.
        let is_own = self.tuning == Tuning::Fixed || kernels::adapt_pays(x, out);
        self.op(DecoderOp::Adapters, || {
            if is_own && kernels::adapt_serves(x, a, b, out) {
                return kernels::adapt(x, a, b, &low, out);
            }
            self.products.run(x, &a.tr(), None, &low, 0.0, self.tuning)?;
            self.products.run(&low, &b.tr(), None, out, 1.0, self.tuning)
        })
    }
}

/// Adapters of all blocks.
pub(super) fn adapters<'a>(weights: &'a EngineWeights) -> impl Iterator<Item = &'a Lora> {
    weights.blocks.iter().flat_map(BlockParams::linears).filter_map(|(_, linear)| linear.lora.as_ref())
}

/// Room for the inner products of the largest adapter over `rows`, none where nothing is adapted.
pub(super) fn low_rank_buffer(weights: &EngineWeights, rows: i64) -> Result<Option<Tensor>> {
    let widest = adapters(weights).map(|lora| lora.a.size()[0]).max();
    let options = (weights.embedding.kind(), weights.embedding.device());
    widest.map(|widest| Ok(Tensor::f_empty([rows * widest], options)?)).transpose()
}

/// The addresses and strides of weights and cache that a CUDA graph has baked in; if they change, capture again.
pub(super) fn fingerprint(weights: &EngineWeights, kv_cache: &KvCache, low: Option<&Tensor>) -> Result<Vec<usize>> {
    let mut addresses = Vec::new();
    let mut note = |tensor: &Tensor| {
        addresses.push(tensor.data_ptr() as usize);
        addresses.extend(tensor.stride().iter().map(|&stride| stride as usize));
    };
    [&weights.embedding, &weights.final_norm, &weights.lm_head].into_iter().chain(low).for_each(&mut note);
    let quantized = weights.quantized.iter().flat_map(|quantized| quantized.blocks);
    quantized.flat_map(QuantizedBlock::tensors).for_each(&mut note);
    for (layer, w) in weights.blocks.iter().enumerate() {
        let (k_cache, v_cache) = kv_cache.layer(layer);
        [&k_cache, &v_cache].into_iter().for_each(&mut note);
        w.try_map(&mut |tensor| {
            note(tensor);
            Ok(tensor.shallow_clone())
        })?;
    }
    adapters(weights).flat_map(|lora| [&lora.a, &lora.b]).for_each(&mut note);
    Ok(addresses)
}
