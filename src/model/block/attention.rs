//! Softmax attention, forward and backward: O(attention(rope(Q x), rope(K x), V x)), with norms of queries and keys if the model has them.
//!
//! T tokens, D hidden, H query heads, Hkv key/value heads, G = H / Hkv, hd head width. In a tensor-parallel slice H and Hkv count this rank's heads.
//! With sequence parallelism T counts this rank's tokens before and after the attention scores, and all tokens in between.

use tch::Tensor;

use super::context::BlockContext;
use super::exchange::{Arriving, TokenExchange};
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
    /// The projection, if the backward of the norms needs it.
    qkv: Option<Tensor>, // [T, Hkv, G + 2, hd]
    heads: SavedHeads,
    /// The gate of the output, before its sigmoid.
    gate: Option<Tensor>, // [T, H, hd]
    o: Tensor,                      // [T, H, hd]
    pub(super) lse: Option<Tensor>, // [T, H]
    /// The output before the norm that follows it, if there is one.
    output: Option<Tensor>, // [T, D]
}

/// Rotated queries and keys, and the values. [T, H, hd], [T, Hkv, hd] twice
#[derive(Debug)]
enum SavedHeads {
    /// This rank's rows of all heads, if attention was computed before.
    Rows([Tensor; 3]),
    /// All rows of each part of this rank's heads.
    Own(Vec<[Tensor; 3]>),
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
        let (Heads { q, k, v, qkv }, gate) = self.project(ctx, w, &ctx.enter_rows(w, NORMS, x, &[Matrix::Qkv])?)?;
        let exchange = mixer.exchange();
        let (heads, o, lse) = match attended {
            Some(Attended { o, lse }) => (SavedHeads::Rows([q, k, v]), o, Some(lse)),
            None => {
                let (mut own, mut sums) = (Vec::new(), Vec::new());
                let rows = [(q, self.num_heads), (k, self.num_kv_heads), (v, self.num_kv_heads)];
                let mut arriving = self.split(exchange, rows)?.into_iter();
                let outputs = self.by_parts(exchange, [self.num_heads], |index| {
                    let heads = arriving.next().expect("as many as parts").finish()?;
                    let (o, lse) = self.attend(layer, w, mixer, (index, heads.each_ref()))?;
                    own.push(heads);
                    sums.extend(lse);
                    Ok([o])
                })?;
                let lse = if sums.len() > 1 { Some(Tensor::f_cat(&sums, 1)?) } else { sums.pop() };
                let [o] = outputs.finish()?;
                (SavedHeads::Own(own), o, lse)
            }
        };
        let gated = gate::forward(&o, gate.as_ref())?;
        let (h, output) = ctx.leave(w, NORMS, w.linear(Matrix::O), &gated.f_flatten(1, 2)?.into(), x)?;
        Ok((h, AttentionOutput { qkv, heads, gate, o, lse, output }))
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
        let AttentionOutput { qkv, heads, gate, o, lse: Some(lse), output } = attended else {
            panic!("an attention without log-sum-exp")
        };
        let exchange = packed.exchange();
        let d_output = ctx.leave_backward(w, NORMS, dh, output.as_ref(), grads)?;
        let into_o = gate::forward(&o, gate.as_ref())?.f_flatten(1, 2)?;
        let d_o = w.linear(Matrix::O).backward(&d_output, &into_o, grads.linear_mut(Matrix::O))?;
        if let Some(d_bias) = grads.linear_mut(Matrix::O).bias_mut() {
            linear::accumulate_bias(&d_output, d_bias)?;
        }
        let mut d_o = d_o.view_as(&o);
        drop((d_output, output, into_o));
        let d_gate = gate.map(|gate| gate::backward(&mut d_o, &o, &gate)).transpose()?;
        let mut parts = self.split_saved(exchange, heads, [o, d_o])?;
        let (sinks, mut first) = (w.norm(ParamName::Sinks).zip(grads.norm(ParamName::Sinks)), 0);
        let numbers = [self.num_heads, self.num_kv_heads, self.num_kv_heads];
        let d_heads = self.by_parts(exchange, numbers, |index| {
            let [q, k, v, o, d_o] = parts.next().expect("as many as parts")?;
            let own_lse = lse.narrow(1, first, o.size()[1]);
            first += o.size()[1];
            if let Some((sinks, d_sinks)) = sinks {
                let [sinks, mut d_sinks] = [sinks, d_sinks].map(|all| self.own_sinks(exchange, index, all));
                sinks::accumulate(&d_o, [&o, &own_lse], &sinks, &mut d_sinks)?;
            }
            let saved = SavedAttention { q: &q, k: &k, v: &v, o: &o, lse: &own_lse };
            let attention = || packed_backward(&d_o, saved, packed.layouts.of(self.window), self.scale);
            let QkvGradients { dq, dk, dv } = timed("attention, backward", OpCost::default, attention)?;
            Ok([dq, dk, dv])
        })?;
        drop(parts);
        let (normed, rstd) = ctx.enter(w, NORMS, x)?;
        let d_qkv = self.heads_backward(ctx, w, d_heads.finish()?, qkv.as_ref(), grads)?;
        let d_qkv = gate::join(d_qkv, d_gate, self.num_kv_heads)?;
        let d_normed = w.linear(Matrix::Qkv).backward(&d_qkv, &normed, grads.linear_mut(Matrix::Qkv))?;
        ctx.enter_backward(w, NORMS, &d_normed, (x, dh), rstd.as_ref(), grads)
    }

    /// Queries, keys, values, outputs and their gradients of each part of this rank's heads. [T, own heads, hd] each
    fn split_saved(
        self,
        exchange: Option<&TokenExchange>,
        heads: SavedHeads,
        [o, d_o]: [Tensor; 2], // [T, H, hd]
    ) -> Result<Box<dyn Iterator<Item = Result<[Tensor; 5]>>>> {
        let (num_heads, num_kv_heads) = (self.num_heads, self.num_kv_heads);
        let outputs = [(o, num_heads), (d_o, num_heads)];
        Ok(match heads {
            SavedHeads::Own(own) => {
                let part = |([q, k, v], outputs): ([Tensor; 3], Arriving<2>)| {
                    let [o, d_o] = outputs.finish()?;
                    Ok([q, k, v, o, d_o])
                };
                Box::new(own.into_iter().zip(self.split(exchange, outputs)?).map(part))
            }
            SavedHeads::Rows([q, k, v]) => {
                let [o, d_o] = outputs;
                let all = [(q, num_heads), (k, num_kv_heads), (v, num_kv_heads), o, d_o];
                Box::new(self.split(exchange, all)?.into_iter().map(Arriving::finish))
            }
        })
    }

    /// Computes attention for a part of this rank's heads, with their sinks.
    fn attend(
        self,
        layer: usize,
        w: &BlockParams,
        mixer: &dyn SequenceMixer,
        (index, heads): (usize, [&Tensor; 3]), // [T, H, hd], [T, Hkv, hd] twice
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (o, lse) = mixer.attention(layer, self, heads)?;
        let Some(all) = w.norm(ParamName::Sinks) else { return Ok((o, lse)) };
        let attended = Attended { o, lse: lse.expect("attention with sinks has its log-sum-exp") };
        let Attended { o, lse } = sinks::join(attended, &self.own_sinks(mixer.exchange(), index, all))?;
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
        let (qkv, gate) = if self.output_gate { gate::split(qkv)? } else { (qkv, None) };
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
        qkv: Option<&Tensor>, // [T, Hkv, G + 2, hd]
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
            return heads::backward([dq, dk, dv], qkv, norms, ctx.ropes.of(self.rope), into);
        };
        let into = HeadGradients { bias: None, norms: None };
        let d_qkv = heads::backward([dq, dk, dv], None, None, ctx.ropes.of(self.rope), into)?;
        drop(d_heads);
        let raw = qkv.expect("kept for its norm");
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
