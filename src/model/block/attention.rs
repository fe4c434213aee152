//! Softmax attention, forward and backward: O(attention(rope(Q x), rope(K x), V x)), with norms of queries and keys if the model has them.
//!
//! T tokens, D hidden, H query heads, Hkv key/value heads, G = H / Hkv, hd head width. In a tensor-parallel slice H and Hkv count this rank's heads.
//! With sequence parallelism T counts this rank's tokens before and after the attention scores, and all tokens in between.

use tch::Tensor;

use super::attention_parts::own_sinks;
use super::context::BlockContext;
use super::gate;
use super::linear::part;
use super::packed::{PackedMixer, SequenceMixer};
use super::params::BlockParams;
use crate::cuda::{OpCost, kernels, timed};
use crate::error::Result;
use crate::model::format::Rows;
use crate::model::spec::{AttentionSpec, MIXER_NORMS as NORMS, Matrix, ParamName, QkNorm};
use crate::ops::attention::{Attended, QkvGradients, SavedAttention, packed_backward, sinks};
use crate::ops::heads::{self, HeadGradients, HeadNormWeights, Heads, OtherHeads};
use crate::ops::{exact, linear};

/// Activations of an attention forward that its backward reads.
#[derive(Debug)]
pub(super) struct AttentionOutput {
    heads: Heads,
    /// The gate of the output, before its sigmoid.
    gate: Option<Tensor>, // [T, H, hd]
    o: Tensor,                      // [T, H, hd]
    pub(super) lse: Option<Tensor>, // [T, H]
    /// The output before the norm that follows it, if there is one.
    output: Option<Tensor>, // [T, D]
}

impl AttentionOutput {
    /// Attention's output and log-sum-exp, if the forward computed one.
    pub(super) fn attended(&self) -> Option<Attended> {
        let lse = self.lse.as_ref()?.shallow_clone();
        Some(Attended { o: self.o.shallow_clone(), lse })
    }
}

impl AttentionSpec {
    /// Returns the residual stream after attention [T, D], and the activations that backward needs.
    pub(super) fn forward(
        self,
        ctx: &BlockContext<'_>,
        layer: usize,
        w: &BlockParams,
        (x, attended): (&Tensor, Option<Attended>), // [T, D]
        mixer: &dyn SequenceMixer,
    ) -> Result<(Tensor, AttentionOutput)> {
        let (heads, gate) = self.project(ctx, w, &ctx.enter_rows(w, NORMS, x, &[Matrix::Qkv])?)?;
        let heads = self.split(mixer.exchange(), heads)?;
        let (o, lse) = match attended {
            Some(Attended { o, lse }) => (o, Some(lse)),
            None => {
                let (o, lse) = self.attend(layer, w, mixer, &heads)?;
                (self.join(mixer.exchange(), o, self.num_heads)?, lse)
            }
        };
        let gated = gate::forward(&o, gate.as_ref())?;
        let (h, output) = ctx.leave(w, NORMS, w.linear(Matrix::O), &gated.f_flatten(1, 2)?.into(), x)?;
        Ok((h, AttentionOutput { heads, gate, o, lse, output }))
    }

    /// Returns dx, given the gradient of the residual stream after attention.
    ///
    /// # Panics
    /// If the forward computed no log-sum-exp; `block_forward` refuses that case.
    pub(super) fn backward(
        self,
        ctx: &BlockContext<'_>,
        w: &BlockParams,
        (x, dh): (&Tensor, &Tensor), // [T, D]
        attended: AttentionOutput,
        packed: &PackedMixer,
        grads: &mut BlockParams,
    ) -> Result<Tensor> {
        let AttentionOutput { heads, gate, mut o, lse: Some(lse), output } = attended else {
            panic!("an attention without log-sum-exp")
        };
        let d_output = ctx.leave_backward(w, NORMS, dh, output.as_ref(), grads)?;
        let into_o = gate::forward(&o, gate.as_ref())?.f_flatten(1, 2)?;
        let d_o = w.linear(Matrix::O).backward(&d_output, &into_o, grads.linear_mut(Matrix::O))?;
        if let Some(d_bias) = grads.linear_mut(Matrix::O).bias_mut() {
            linear::accumulate_bias(&d_output, d_bias)?;
        }
        let mut d_o = d_o.view_as(&o);
        drop((d_output, output, into_o));
        let d_gate = gate.map(|gate| gate::backward(&mut d_o, &o, &gate)).transpose()?;
        let exchange = packed.exchange();
        if let Some(ranks) = exchange {
            o = ranks.split(&o, self.queries(ranks))?;
            d_o = ranks.split(&d_o, self.queries(ranks))?;
        }
        if let (Some(sinks), Some(d_sinks)) = (w.norm(ParamName::Sinks), grads.norm(ParamName::Sinks)) {
            let [sinks, mut d_sinks] = [sinks, d_sinks].map(|all| own_sinks(exchange, all));
            sinks::accumulate(&d_o, [&o, &lse], &sinks, &mut d_sinks)?;
        }
        let saved = SavedAttention { q: &heads.q, k: &heads.k, v: &heads.v, o: &o, lse: &lse };
        let attention = || packed_backward(&d_o, saved, packed.layouts.of(self.window), self.scale);
        let QkvGradients { dq, dk, dv } = timed("attention, backward", OpCost::default, attention)?;
        drop((o, d_o));
        let dq = self.join(exchange, dq, self.num_heads)?;
        let [dk, dv] = [self.join(exchange, dk, self.num_kv_heads)?, self.join(exchange, dv, self.num_kv_heads)?];
        let d_qkv = self.heads_backward(ctx, w, [dq, dk, dv], heads, grads)?;
        let d_qkv = gate::join(d_qkv, d_gate, self.num_kv_heads)?;
        let (normed, rstd) = ctx.enter(w, NORMS, x)?;
        let d_normed = w.linear(Matrix::Qkv).backward(&d_qkv, &normed, grads.linear_mut(Matrix::Qkv))?;
        ctx.enter_backward(w, NORMS, &d_normed, (x, dh), rstd.as_ref(), grads)
    }

    /// Computes attention for this rank's heads, with their sinks.
    fn attend(
        self,
        layer: usize,
        w: &BlockParams,
        mixer: &dyn SequenceMixer,
        heads: &Heads,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (o, lse) = mixer.attention(layer, self, [&heads.q, &heads.k, &heads.v])?;
        let Some(all) = w.norm(ParamName::Sinks) else { return Ok((o, lse)) };
        let attended = Attended { o, lse: lse.expect("attention with sinks has its log-sum-exp") };
        let Attended { o, lse } = sinks::join(attended, &own_sinks(mixer.exchange(), all))?;
        Ok((o, Some(lse)))
    }

    /// Returns the rotated queries, the rotated keys, the values, and the gates [T, H, hd] if there are any.
    fn project(
        self,
        ctx: &BlockContext<'_>,
        w: &BlockParams,
        normed: &Rows, // [T, D]
    ) -> Result<(Heads, Option<Tensor>)> {
        let qkv = w.linear(Matrix::Qkv);
        let slots = (self.num_heads / self.num_kv_heads * self.rows_per_query()) as i64 + 2;
        let groups = if qkv.pieces.len() == 1 { [-1, slots] } else { [1, -1] };
        let shape = [normed.num_rows(), groups[0], groups[1], self.head_dim as i64];
        let qkv = qkv.forward(normed)?.view(shape);
        let (qkv, gate) = if self.output_gate { gate::split(&qkv)? } else { (qkv, None) };
        let norms = norm_weights(ctx, w)?;
        let transform = if ctx.exact { exact::heads } else { heads::forward };
        let heads = match (self.qk_norm, norms.as_ref().map(|norms| norms.of(ctx))) {
            (Some(QkNorm::All), Some(norms)) => {
                let sum = |squares: &mut Tensor| ctx.sum_over_heads(self, squares);
                let is_split = ctx.tp.is_some_and(|tp| tp.size() > 1);
                let others = is_split.then(|| OtherHeads { widths: self.widths(), sum: &sum });
                let normed =
                    if ctx.exact { exact::norm_all(&qkv, norms)? } else { heads::norm_all(&qkv, norms, others)? };
                Heads { qkv: Some(qkv), ..transform(normed, None, ctx.ropes.of(self.rope))? }
            }
            (_, norms) => transform(qkv, norms, ctx.ropes.of(self.rope))?,
        };
        Ok((heads, gate))
    }

    /// Returns the gradient of the QKV projection's output, without gates [T, (H + 2 Hkv) hd].
    fn heads_backward(
        self,
        ctx: &BlockContext<'_>,
        w: &BlockParams,
        d_heads: [Tensor; 3], // [T, H, hd], [T, Hkv, hd] twice
        heads: Heads,
        grads: &mut BlockParams,
    ) -> Result<Tensor> {
        let norms = norm_weights(ctx, w)?;
        let norms = norms.as_ref().map(|norms| norms.of(ctx));
        let mut d_norms = match norms {
            Some(_) => Some([grads.gradient_of(w, ParamName::QNorm)?, grads.gradient_of(w, ParamName::KNorm)?]),
            None => None,
        };
        let d_bias = grads.linear_mut(Matrix::Qkv).bias_mut();
        let [dq, dk, dv] = &d_heads;
        let (Some(QkNorm::All), Some(norms), Some([d_q, d_k])) = (self.qk_norm, norms, &mut d_norms) else {
            let into = HeadGradients { bias: d_bias, norms: d_norms.as_mut().map(|[q, k]| [q, k]) };
            return heads::backward([dq, dk, dv], &heads, norms, ctx.ropes.of(self.rope), into);
        };
        let into = HeadGradients { bias: None, norms: None };
        let d_qkv = heads::backward([dq, dk, dv], &heads, None, ctx.ropes.of(self.rope), into)?;
        drop(d_heads);
        let raw = heads.qkv.as_ref().expect("kept for its norm");
        heads::norm_all_backward(&d_qkv.view_as(raw), raw, norms, [d_q, d_k])?;
        if let Some(d_bias) = d_bias {
            linear::accumulate_bias(&d_qkv, d_bias)?;
        }
        Ok(d_qkv)
    }

    /// A rank's slice of a head norm's weight or of the sinks. Ranks that hold the same key/value head hold the same slice of the key norm.
    pub(super) fn own_norm(self, name: ParamName, weight: &Tensor, tp_rank: usize, tp_size: usize) -> Tensor {
        let ranks = match name {
            ParamName::Sinks => return part(weight, 0, tp_rank, tp_size),
            ParamName::QNorm => 1,
            ParamName::KNorm => (tp_size / self.num_kv_heads).max(1),
            _ => return weight.shallow_clone(),
        };
        match self.qk_norm {
            Some(QkNorm::All) => part(weight, 0, tp_rank / ranks, tp_size / ranks),
            _ => weight.shallow_clone(),
        }
    }
}

/// The weights by which the norms of queries and keys scale.
struct NormScales {
    q: Tensor,
    k: Tensor,
    /// The norms multiply by 1 + weight; kernels add the 1.
    zero_centred: bool,
}

impl NormScales {
    fn of(&self, ctx: &BlockContext<'_>) -> HeadNormWeights<'_> {
        HeadNormWeights { q: &self.q, k: &self.k, eps: ctx.spec.rms_norm_eps, zero_centred: self.zero_centred }
    }
}

fn norm_weights(ctx: &BlockContext<'_>, w: &BlockParams) -> Result<Option<NormScales>> {
    let Some((q, k)) = w.norm(ParamName::QNorm).zip(w.norm(ParamName::KNorm)) else { return Ok(None) };
    let norm = ctx.spec.norm();
    if norm.zero_centred && kernels::serve(q) {
        return Ok(Some(NormScales { q: q.shallow_clone(), k: k.shallow_clone(), zero_centred: true }));
    }
    Ok(Some(NormScales { q: norm.scale(q)?, k: norm.scale(k)?, zero_centred: false }))
}
