//! One transformer block: h = x + O(attention(rope(Q(norm(x))), rope(K(..)), V(..))), y = h + D(silu(G(norm(h))) * U(norm(h))).
//!
//! Forward and explicit backward. What the backward needs is kept or computed again by choice ([`SavedBlock`]); either way
//! it computes with the same bits. Norms and the activation cost a reading of memory and are always computed again.
//!
//! T tokens, D hidden, H query heads, Hkv key/value heads, G = H / Hkv, hd head width, F MLP width. In a tensor-parallel slice
//! H, Hkv and F are this rank's share. The residual stream (x, h and y) has a kind of its own, all else that of the weights.

use tch::{Device, Tensor};

use super::block_gradients::BlockGradients;
use super::lora::{self, Gradient, Lora, Matrix};
use super::spec::ModelSpec;
use super::views::{BlockParams, Qkv};
use crate::config::GradientCheckpointing;
use crate::cuda::{Work, timed};
use crate::dist::{Collective, ReduceOp};
use crate::error::{Error, Result};
use crate::ops::attention::{Bounds, PackedLayout, SavedAttention, packed_backward, packed_forward};
use crate::ops::heads::{self, HeadGradients, HeadNormWeights, Heads};
use crate::ops::rope::RopeRows;
use crate::ops::swiglu::GateUp;
use crate::ops::{linear, rms_norm, try_map};

/// What all blocks share in one pass over a batch of tokens.
#[derive(Debug, Clone, Copy)]
pub struct BlockContext<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Rotations of the tokens' positions.
    pub rope: &'a RopeRows,
    /// The ranks whose slices together make the block; forward only.
    pub tp: Option<&'a dyn Collective>,
}

/// Attention over what a token may see: packed sequences in training, a paged cache in generation.
pub trait Attention {
    /// Attention output [T, H, hd] and, where a backward may follow, the log-sum-exp of the scores [T, H].
    ///
    /// # Errors
    /// What the implementation meets, [`Error::OutOfMemory`] among it.
    fn forward(
        &mut self,
        layer: usize,
        q: &Tensor, // [T, H, hd]
        k: &Tensor, // [T, Hkv, hd]
        v: &Tensor, // [T, Hkv, hd]
    ) -> Result<(Tensor, Option<Tensor>)>;
}

/// Causal attention within each sequence of a packed micro-batch.
#[derive(Debug)]
pub struct PackedAttention {
    layout: PackedLayout,
    scale: f64,
}

impl PackedAttention {
    /// For sequences `cu_seqlens[n]..cu_seqlens[n + 1]` of a whole model (all key/value heads).
    pub fn new(spec: &ModelSpec, cu_seqlens: &[i64], device: Device) -> Self {
        let layout = PackedLayout::new(cu_seqlens, spec.num_kv_heads, spec.sliding_window, device);
        Self { layout, scale: attention_scale(spec) }
    }

    /// The same for a micro-batch, whose completions may share prompts.
    pub fn of(spec: &ModelSpec, bounds: &Bounds, device: Device) -> Self {
        let layout = PackedLayout::of(bounds, spec.num_kv_heads, spec.sliding_window, device);
        Self { layout, scale: attention_scale(spec) }
    }

    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Attended> {
        let run = || packed_forward(q, k, v, &self.layout, self.scale);
        let (o, lse) = timed("attention", Work::default, run)?;
        Ok(Attended { o, lse })
    }
}

/// What scores are multiplied with: 1 / sqrt(hd).
pub fn attention_scale(spec: &ModelSpec) -> f64 {
    (spec.head_dim as f64).powf(-0.5)
}

impl Attention for PackedAttention {
    fn forward(&mut self, _layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let Attended { o, lse } = self.attend(q, k, v)?;
        Ok((o, Some(lse)))
    }
}

/// What [`block_backward`] needs of the forward. `full` keeps the block's input alone; `selective` all but the MLP's first
/// product, the largest of a block by memory; `none` that too.
#[derive(Debug)]
pub struct SavedBlock {
    x: Tensor, // [T, D]
    attention: Option<AttentionHalf>,
    gate_up: Option<GateUp>,
}

impl SavedBlock {
    /// Elements a token that are kept, of the residual stream's kind and of the weights'; attention's log-sum-exps (H numbers
    /// of the accumulation kind) come on top except under `full`.
    pub fn elements_per_token(spec: &ModelSpec, keep: GradientCheckpointing) -> [usize; 2] {
        let [hidden, width, mlp] = [spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size];
        let qkv = width + 2 * spec.num_kv_heads * spec.head_dim;
        let raw = if spec.qk_norm { qkv } else { 0 };
        match keep {
            GradientCheckpointing::Full => [hidden, 0],
            GradientCheckpointing::Selective => [2 * hidden, raw + qkv + width],
            GradientCheckpointing::None => [2 * hidden, raw + qkv + width + 2 * mlp],
        }
    }
}

/// y [T, D]; and what `keep` asks for, if a backward will follow.
///
/// # Errors
/// Those of `attention` and of the tensor-parallel group; [`Error::OutOfMemory`]; [`Error::InvalidArgument`] if a backward is to follow an
/// attention that gives no log-sum-exp.
pub fn block_forward(
    ctx: &BlockContext<'_>,
    layer: usize,
    w: &BlockParams,
    x: &Tensor, // [T, D], of the residual stream's kind
    attention: &mut dyn Attention,
    keep: Option<GradientCheckpointing>,
) -> Result<(Tensor, Option<SavedBlock>)> {
    let heads = project(ctx, w, &input_norm(ctx, w, x)?.0)?;
    let (o, lse) = attention.forward(layer, &heads.q, &heads.k, &heads.v)?;
    let h = row_parallel(ctx, &o.f_flatten(1, 2)?, &w.o, w.lora.o.as_ref(), x)?;
    let gate_up = lora::gate_up(w.lora.gate_up.as_ref(), &post_norm(ctx, w, &h)?.0, &w.gate_up)?;
    let y = row_parallel(ctx, &gate_up.activate()?, &w.down, w.lora.down.as_ref(), &h)?;
    let Some(keep) = keep else { return Ok((y, None)) };
    let attention = match (keep, lse) {
        (GradientCheckpointing::Full, _) => None,
        (_, Some(lse)) => Some(AttentionHalf { heads, o, lse, h }),
        (_, None) => return Err(invalid("an attention with log-sum-exp", "one without")),
    };
    let gate_up = (keep == GradientCheckpointing::None).then_some(gate_up);
    Ok((y, Some(SavedBlock { x: x.shallow_clone(), attention, gate_up })))
}

/// dx [T, D]; the gradients of the weights, or of the adapters alone, are added to `grads`, in place.
///
/// # Errors
/// [`Error::OutOfMemory`]; [`Error::InvalidArgument`] on a tensor-parallel slice: only whole blocks train.
pub fn block_backward(
    ctx: &BlockContext<'_>,
    w: &BlockParams,
    dy: &Tensor, // [T, D]
    saved: SavedBlock,
    packed: &PackedAttention,
    grads: &mut BlockGradients,
) -> Result<Tensor> {
    if ctx.tp.is_some_and(|tp| tp.size() > 1) {
        return Err(invalid("a whole block", "a tensor-parallel slice"));
    }
    let x = saved.x;
    let half = match saved.attention {
        Some(half) => half,
        None => AttentionHalf::forward(ctx, w, &x, packed)?,
    };
    let dh = mlp_backward(ctx, w, dy, &half.h, saved.gate_up, grads)?;
    half.backward(ctx, w, &x, &dh, packed, grads)
}

/// The block up to the residual stream after attention.
#[derive(Debug)]
struct AttentionHalf {
    heads: Heads,
    o: Tensor,   // [T, H, hd]
    lse: Tensor, // [T, H]
    h: Tensor,   // [T, D]
}

impl AttentionHalf {
    fn forward(ctx: &BlockContext<'_>, w: &BlockParams, x: &Tensor, packed: &PackedAttention) -> Result<Self> {
        let heads = project(ctx, w, &input_norm(ctx, w, x)?.0)?;
        let Attended { o, lse } = packed.attend(&heads.q, &heads.k, &heads.v)?;
        let h = row_parallel(ctx, &o.f_flatten(1, 2)?, &w.o, w.lora.o.as_ref(), x)?;
        Ok(Self { heads, o, lse, h })
    }

    /// dx, from the gradient of the residual stream after attention.
    fn backward(
        self,
        ctx: &BlockContext<'_>,
        w: &BlockParams,
        x: &Tensor,
        dh: &Tensor,
        packed: &PackedAttention,
        grads: &mut BlockGradients,
    ) -> Result<Tensor> {
        let Qkv::Grouped { weight, .. } = &w.qkv else { return Err(invalid("grouped qkv weights", "split ones")) };
        let Self { heads, o, lse, .. } = self;
        let d_o = lora::backward(dh, &o.f_flatten(1, 2)?, &w.o, grads.of(w, Matrix::O))?.view_as(&o);
        let saved = SavedAttention { q: &heads.q, k: &heads.k, v: &heads.v, o: &o, lse: &lse };
        let attention = || packed_backward(&d_o, saved, &packed.layout, packed.scale);
        let (dq, dk, dv) = timed("attention, backward", Work::default, attention)?;
        let norms = head_norms(ctx, w);
        let mut d_norms = match norms {
            Some(norms) => Some([
                grads.norm(norms.q, |grads| grads.q_norm.as_ref())?,
                grads.norm(norms.k, |grads| grads.k_norm.as_ref())?,
            ]),
            None => None,
        };
        let mut d_bias = grads.qkv_bias();
        let into = HeadGradients { bias: d_bias.as_mut(), norms: d_norms.as_mut().map(|[q, k]| [q, k]) };
        let d_qkv = heads::backward([&dq, &dk, &dv], &heads, norms, ctx.rope, into)?;
        let (normed, rstd) = input_norm(ctx, w, x)?;
        let d_normed = lora::backward(&d_qkv, &normed, weight, grads.of(w, Matrix::Qkv))?;
        let mut d_norm = grads.norm(&w.input_norm, |grads| Some(&grads.input_norm))?;
        rms_norm::backward(&d_normed, x, &w.input_norm, &rstd, Some(dh), &mut d_norm)
    }
}

/// dh, the gradient of the residual stream after attention, from that of the block's output.
fn mlp_backward(
    ctx: &BlockContext<'_>,
    w: &BlockParams,
    dy: &Tensor, // [T, D]
    h: &Tensor,  // [T, D]
    gate_up: Option<GateUp>,
    grads: &mut BlockGradients,
) -> Result<Tensor> {
    let (normed, rstd) = post_norm(ctx, w, h)?;
    let gate_up = gate_up.map_or_else(|| lora::gate_up(w.lora.gate_up.as_ref(), &normed, &w.gate_up), Ok)?;
    let d_gate_up = match grads.of(w, Matrix::Down) {
        Gradient::Weight(dw) => {
            let (d_gate_up, act) = gate_up.backward(&linear::backward_input(dy, &w.down)?)?;
            linear::accumulate_weight(dy, &act, dw)?;
            d_gate_up
        }
        // An adapter adds to the activation's gradient, and needs the activation for that.
        adapter => {
            let d_act = lora::backward(dy, &gate_up.activate()?, &w.down, adapter)?;
            gate_up.backward(&d_act)?.0
        }
    };
    let d_normed = lora::gate_up_backward(&d_gate_up, &normed, &w.gate_up, grads.of(w, Matrix::GateUp))?;
    let mut d_norm = grads.norm(&w.post_norm, |grads| Some(&grads.post_norm))?;
    rms_norm::backward(&d_normed, h, &w.post_norm, &rstd, Some(dy), &mut d_norm)
}

/// (normalised rows [T, D], rstd).
fn input_norm(ctx: &BlockContext<'_>, w: &BlockParams, x: &Tensor) -> Result<(Tensor, Tensor)> {
    rms_norm::forward(x, &w.input_norm, ctx.spec.rms_norm_eps)
}

/// (normalised rows [T, D], rstd).
fn post_norm(ctx: &BlockContext<'_>, w: &BlockParams, h: &Tensor) -> Result<(Tensor, Tensor)> {
    rms_norm::forward(h, &w.post_norm, ctx.spec.rms_norm_eps)
}

fn head_norms<'a>(ctx: &BlockContext<'_>, w: &'a BlockParams) -> Option<HeadNormWeights<'a>> {
    let (q, k) = w.q_norm.as_ref().zip(w.k_norm.as_ref())?;
    Some(HeadNormWeights { q, k, eps: ctx.spec.rms_norm_eps })
}

/// Rotated queries, keys and values.
fn project(ctx: &BlockContext<'_>, w: &BlockParams, normed: &Tensor /* [T, D] */) -> Result<Heads> {
    let (tokens, head_dim) = (normed.size()[0], ctx.spec.head_dim as i64);
    let (slots, lora) = (ctx.spec.heads_per_group() as i64 + 2, w.lora.qkv.as_ref());
    let qkv = match &w.qkv {
        Qkv::Grouped { weight, bias } => {
            let qkv = lora::add(lora, normed, linear::forward(normed, weight, bias.as_ref())?)?;
            qkv.view([tokens, -1, slots, head_dim])
        }
        Qkv::Split { q, kv } => {
            let [q, kv] = try_map([q, kv], |(weight, bias)| linear::forward(normed, weight, bias.as_ref()))?;
            lora::add(lora, normed, Tensor::f_cat(&[q, kv], 1)?)?.view([tokens, 1, -1, head_dim])
        }
    };
    heads::forward(qkv, head_norms(ctx, w), ctx.rope)
}

/// Attention's output and the log-sum-exp of its scores.
#[derive(Debug)]
struct Attended {
    o: Tensor,   // [T, H, hd]
    lse: Tensor, // [T, H]
}

/// residual + x w^T, where each rank of the tensor-parallel group has a column range of `w` and the columns of `x` with it.
fn row_parallel(
    ctx: &BlockContext<'_>,
    x: &Tensor,
    w: &Tensor,
    lora: Option<&Lora>,
    residual: &Tensor,
) -> Result<Tensor> {
    match ctx.tp.filter(|tp| tp.size() > 1) {
        None => lora::add(lora, x, linear::forward_onto(residual, x, w)?),
        Some(tp) => {
            let mut partial = lora::add(lora, x, linear::forward(x, w, None)?)?;
            tp.all_reduce(&mut partial, ReduceOp::Sum)?;
            Ok(partial.f_add(residual)?)
        }
    }
}

fn invalid(expected: &str, got: &str) -> Error {
    Error::InvalidArgument { op: "block_backward", expected: expected.to_owned(), got: got.to_owned() }
}
