//! Full attention: O(attention(rope(Q x), rope(K x), V x)), with norms of queries and keys where the model has them.
//!
//! T tokens, D hidden, H query heads, Hkv key/value heads, G = H / Hkv, hd head width. In a tensor-parallel slice H and Hkv are
//! this rank's share. Where ranks share the rows, T are a rank's before and behind the scores, and all of them between.

use tch::Tensor;

use super::attention_parts::own_sinks;
use super::linear::Projection::Module;
use super::linear::{LinearSpec, Matrix, TpSplit, part};
use super::{BlockContext, BlockParams, ElementBytes, MIXER_NORMS as NORMS, PackedMixer, SequenceMixer, gate};
use crate::config::TargetModule::{KProj, OProj, QProj, VProj};
use crate::cuda::{OpCost, kernels, timed};
use crate::error::Result;
use crate::model::distinct::RopeSpec;
use crate::model::format::Rows;
use crate::model::params::{ParamName, Shapes};
use crate::ops::attention::{Attended, QkvGradients, SavedAttention, packed_backward, sinks};
use crate::ops::heads::{self, HeadGradients, HeadNormWeights, Heads, OtherHeads};
use crate::ops::{exact, linear};

/// The norm of queries and keys before rope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Every head by itself.
    Head,
    /// All heads of a token together.
    All,
}

/// The shape of an attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
    /// The projection behind attention has a bias.
    pub o_bias: bool,
    /// Every query head has a sink: a logit that takes part in the softmax with the value 0.
    pub sinks: bool,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Every query has a gate beside it, whose sigmoid its output is multiplied by.
    pub output_gate: bool,
    /// The rotation of queries and keys; `None` turns nothing.
    pub rope: Option<RopeSpec>,
    /// A token sees itself and the `window - 1` before it; `None` sees all.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f64,
}

impl AttentionSpec {
    /// The usual factor of the scores, 1 / sqrt(hd).
    pub fn usual_scale(head_dim: usize) -> f64 {
        (head_dim as f64).powf(-0.5)
    }

    /// The window and the factor of scores: what attention over the cache is planned by.
    pub fn sight(self) -> (Option<usize>, f64) {
        (self.window, self.scale)
    }

    /// Query heads that share one key and value head.
    pub fn heads_per_group(self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Whether so many ranks can have slices without copies.
    pub(super) fn can_slice(self, tp_size: usize) -> bool {
        self.num_heads.is_multiple_of(tp_size)
            && (self.num_kv_heads.is_multiple_of(tp_size) || tp_size.is_multiple_of(self.num_kv_heads))
    }

    /// Whether a rank is the first of those that share its key/value heads.
    pub fn has_first_of_key(self, tp_rank: usize, tp_size: usize) -> bool {
        tp_rank.is_multiple_of((tp_size / self.num_kv_heads).max(1))
    }

    /// The share of a rank. Ranks share key/value heads when there are fewer heads than ranks.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        let num_kv_heads = (self.num_kv_heads / tp_size).max(1);
        Self { num_heads: self.num_heads / tp_size, num_kv_heads, ..self }
    }

    /// Elements of a token's queries, and of its keys.
    pub fn widths(self) -> [usize; 2] {
        [self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim]
    }

    /// Elements that the cache has of a token.
    pub fn cached_elements(self) -> usize {
        2 * self.num_kv_heads * self.head_dim
    }

    /// Floating-point operations of a forward for every pair of a query and a key that it sees.
    pub fn flop_per_pair(self) -> usize {
        4 * self.num_heads * self.head_dim
    }

    /// The matrices of attention.
    pub fn linears(self) -> [LinearSpec; 2] {
        let Self { hidden, num_heads, num_kv_heads, head_dim, .. } = self;
        let queries = num_heads / num_kv_heads * self.rows_per_query();
        let qkv = LinearSpec {
            matrix: Matrix::Qkv,
            groups: num_kv_heads,
            inner: head_dim,
            columns: hidden,
            projections: vec![(Module(QProj), queries), (Module(KProj), 1), (Module(VProj), 1)],
            split: TpSplit::Rows,
            bias: self.qkv_bias.then_some(ParamName::QkvBias),
            experts: None,
        };
        let o = LinearSpec {
            matrix: Matrix::O,
            groups: 1,
            inner: hidden,
            columns: num_heads * head_dim,
            projections: vec![(Module(OProj), 1)],
            split: TpSplit::Columns,
            bias: self.o_bias.then_some(ParamName::OBias),
            experts: None,
        };
        [qkv, o]
    }

    /// Heads of the projection for one query: itself, and its gate.
    fn rows_per_query(self) -> usize {
        1 + usize::from(self.output_gate)
    }

    /// Weights of the norms of queries and keys, and the sinks.
    pub(super) fn other_shapes(self) -> Shapes {
        let shape = |[q, k]: [usize; 2]| vec![(ParamName::QNorm, vec![q as i64]), (ParamName::KNorm, vec![k as i64])];
        let norms = match self.qk_norm {
            None => Vec::new(),
            Some(QkNorm::Head) => shape([self.head_dim; 2]),
            Some(QkNorm::All) => shape(self.widths()),
        };
        norms.into_iter().chain(self.sinks.then(|| (ParamName::Sinks, vec![self.num_heads as i64]))).collect()
    }

    /// Bytes a token that backward reads of the forward: heads before their norm and after, attention's output and log-sum-exp.
    pub(super) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        let [queries, keys] = self.widths();
        let qkv = queries + 2 * keys;
        let raw = if self.qk_norm.is_some() { qkv } else { 0 };
        let gated = if self.output_gate { 2 * queries } else { 0 };
        bytes.narrow * (raw + qkv + gated) + self.attended_bytes(bytes)
    }

    /// Bytes a token of attention's output and log-sum-exp.
    pub(super) fn attended_bytes(self, bytes: ElementBytes) -> usize {
        bytes.narrow * self.widths()[0] + bytes.wide * self.num_heads
    }

    /// Bytes a token of the fullest moment of backward: the gradients of the block's output, of the residual stream after attention and
    /// of attention's output; dq, dk and dv; the kernel's float32 sums of dq and, where queries share a key, dk and dv of every
    /// query head; what completions gave to their prompt, which waits for what they gave to themselves. Or, behind it, the
    /// gradient of heads and four more rows of the queries for a norm over all of them.
    pub(super) fn backward_bytes(self, bytes: ElementBytes, shares_prompts: bool) -> usize {
        let [queries, keys] = self.widths().map(|elements| bytes.narrow * elements);
        let (hidden, lse) = (bytes.narrow * self.hidden, bytes.wide * self.num_heads);
        let per_query_head = if self.num_heads > self.num_kv_heads { 2 * queries } else { 0 };
        let kernel = queries + 2 * keys + bytes.wide * self.widths()[0] + per_query_head + 2 * lse;
        let waiting = if shares_prompts { queries } else { 0 };
        let norm = if self.qk_norm == Some(QkNorm::All) { 4 * queries + 2 * keys } else { 0 };
        let gate = if self.output_gate { 3 * queries } else { 0 };
        2 * hidden + gate + (queries + kernel + waiting).max(queries + norm)
    }
}

/// Results of an attention that its backward reads.
#[derive(Debug)]
pub(super) struct AttentionOutput {
    heads: Heads,
    /// The output's gate, before its sigmoid.
    gate: Option<Tensor>, // [T, H, hd]
    o: Tensor,                      // [T, H, hd]
    pub(super) lse: Option<Tensor>, // [T, H]
    /// Before the norm behind it, if there is one.
    output: Option<Tensor>, // [T, D]
}

impl AttentionOutput {
    /// Its output and log-sum-exp, if it gave one.
    pub(super) fn attended(&self) -> Option<Attended> {
        let lse = self.lse.as_ref()?.shallow_clone();
        Some(Attended { o: self.o.shallow_clone(), lse })
    }
}

impl AttentionSpec {
    /// The residual stream after it [T, D], and what a backward needs.
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

    /// dx, from the gradient of the residual stream after it.
    ///
    /// # Panics
    /// If the attention gave no log-sum-exp, which `block_forward` refuses.
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
            sinks::accumulate(&d_o, (&o, &lse), &sinks, &mut d_sinks)?;
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

    /// Attention of this rank's heads, with their sinks.
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

    /// Rotated queries, keys and values, and the gates [T, H, hd] where there are some.
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

    /// The gradient of the projection without gates [T, (H + 2 Hkv) hd].
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

    /// A rank's part of a norm's weight, or of the sinks; ranks that share a key/value head share its norm.
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

/// Factors of the norms of queries and keys.
struct NormScales {
    q: Tensor,
    k: Tensor,
    /// These are the weights, to which kernels add 1.
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
