//! One transformer block: h = x + O(attention(rope(Q(norm(x))), rope(K(..)), V(..))), y = h + D(silu(G(norm(h))) * U(norm(h))).
//!
//! Forward and explicit backward. What the backward needs is kept or computed again by choice; either way it computes with
//! the same bits. T tokens, D hidden, H query heads, Hkv key/value heads, G = H / Hkv, hd head width, F MLP width. In a
//! tensor-parallel slice H, Hkv and F are this rank's share.

use tch::{Device, Tensor};

use super::block_gradients::BlockGradients;
use super::lora::{self, Lora, Matrix};
use super::spec::ModelSpec;
use super::views::{BlockParams, Qkv};
use crate::config::GradientCheckpointing;
use crate::dist::{Collective, ReduceOp};
use crate::error::{Error, Result};
use crate::ops::attention::{Bounds, PackedLayout, packed_backward, packed_forward};
use crate::ops::rope::{self, RopeRows};
use crate::ops::{linear, rms_norm, swiglu};

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
    /// What the implementation meets; libtorch's own failures on these shapes are bugs and panic.
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

    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Attended {
        let (o, lse) = packed_forward(q, k, v, &self.layout, self.scale);
        Attended { o, lse }
    }
}

/// What scores are multiplied with: 1 / sqrt(hd).
pub fn attention_scale(spec: &ModelSpec) -> f64 {
    (spec.head_dim as f64).powf(-0.5)
}

impl Attention for PackedAttention {
    fn forward(&mut self, _layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let Attended { o, lse } = self.attend(q, k, v);
        Ok((o, Some(lse)))
    }
}

/// What [`block_backward`] needs of the forward; all but the block's input may have been dropped.
#[derive(Debug)]
pub struct SavedBlock {
    x: Tensor, // [T, D]
    projected: Option<Projected>,
    attended: Option<Attended>,
    mlp: Option<Mlp>,
}

/// y [T, D]; and what `keep` asks for, if a backward will follow.
///
/// # Errors
/// Those of `attention` and of the tensor-parallel group; [`Error::InvalidArgument`] if a backward is to follow an
/// attention that gives no log-sum-exp.
pub fn block_forward(
    ctx: &BlockContext<'_>,
    layer: usize,
    w: &BlockParams,
    x: &Tensor, // [T, D]
    attention: &mut dyn Attention,
    keep: Option<GradientCheckpointing>,
) -> Result<(Tensor, Option<SavedBlock>)> {
    let projected = Projected::forward(ctx, w, x);
    let (o, lse) = attention.forward(layer, &projected.q, &projected.k, &projected.v)?;
    let h = row_parallel(ctx, &o.flatten(1, 2), &w.o, w.lora.o.as_ref(), x)?;
    let mlp = Mlp::forward(ctx, w, h);
    let y = row_parallel(ctx, &mlp.act, &w.down, w.lora.down.as_ref(), &mlp.h)?;
    let Some(keep) = keep else { return Ok((y, None)) };
    let all = keep == GradientCheckpointing::None;
    let attended = match (keep, lse) {
        (GradientCheckpointing::Full, _) => None,
        (_, Some(lse)) => Some(Attended { o, lse }),
        (_, None) => return Err(invalid("an attention with log-sum-exp", "one without")),
    };
    let (projected, mlp) = (all.then_some(projected), all.then_some(mlp));
    Ok((y, Some(SavedBlock { x: x.shallow_clone(), projected, attended, mlp })))
}

/// dx [T, D]; the gradients of the weights, or of the adapters alone, are added to `grads`, in place.
///
/// # Errors
/// [`Error::InvalidArgument`] on a tensor-parallel slice: only whole blocks train.
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
    let projected = saved.projected.unwrap_or_else(|| Projected::forward(ctx, w, &x));
    let attended = saved.attended.unwrap_or_else(|| packed.attend(&projected.q, &projected.k, &projected.v));
    let o = attended.o.flatten(1, 2); // [T, H hd]
    let mlp = match saved.mlp {
        Some(mlp) => mlp,
        None => Mlp::forward(ctx, w, row_parallel(ctx, &o, &w.o, w.lora.o.as_ref(), &x)?),
    };
    let dh = mlp.backward(w, dy, grads);
    let d_o = lora::backward(&dh, &o, &w.o, grads.of(w, Matrix::O)).view_as(&attended.o);
    let Projected { q, k, v, .. } = &projected;
    let d_qkv = packed_backward(&d_o, q, k, v, &attended.o, &attended.lse, &packed.layout, packed.scale);
    projected.backward(ctx, w, &x, &dh, d_qkv, grads)
}

/// The first half up to attention.
#[derive(Debug)]
struct Projected {
    normed: Tensor, // [T, D]
    rstd: Tensor,   // [T, 1]
    /// Queries and keys before their norms, and the norms' statistics.
    raw: Option<[(Tensor, Tensor); 2]>,
    q: Tensor, // [T, H, hd]
    k: Tensor, // [T, Hkv, hd]
    v: Tensor, // [T, Hkv, hd]
}

impl Projected {
    fn forward(ctx: &BlockContext<'_>, w: &BlockParams, x: &Tensor) -> Self {
        let (normed, rstd) = rms_norm::forward(x, &w.input_norm, ctx.spec.rms_norm_eps);
        let (tokens, head_dim) = (x.size()[0], ctx.spec.head_dim as i64);
        let [q, k, v] = project(ctx.spec, w, &normed); // [T, Hkv, G, hd], [T, Hkv, hd] twice, views
        let norm = |t: &Tensor, weight: &Option<Tensor>| {
            weight.as_ref().map(|weight| rms_norm::forward(t, weight, ctx.spec.rms_norm_eps))
        };
        let heads = |t: &Tensor| rope::forward(t, ctx.rope).view([tokens, -1, head_dim]);
        let (q, k, raw) = match (norm(&q, &w.q_norm), norm(&k, &w.k_norm)) {
            (Some((q_normed, q_rstd)), Some((k_normed, k_rstd))) => {
                (heads(&q_normed), heads(&k_normed), Some([(q, q_rstd), (k, k_rstd)]))
            }
            _ => (heads(&q), heads(&k), None),
        };
        // A copy lets go of the fused projection where nothing else holds it.
        Self { normed, rstd, raw, q, k, v: v.contiguous() }
    }

    /// dx, from the gradients of q, k, v and of the residual stream after attention.
    fn backward(
        self,
        ctx: &BlockContext<'_>,
        w: &BlockParams,
        x: &Tensor,
        dh: &Tensor,
        (dq, dk, dv): (Tensor, Tensor, Tensor),
        grads: &mut BlockGradients,
    ) -> Result<Tensor> {
        let Qkv::Grouped { weight, .. } = &w.qkv else { return Err(invalid("grouped qkv weights", "split ones")) };
        let kv_size = dv.size(); // [T, Hkv, hd]
        let (tokens, kv_heads, head_dim) = (kv_size[0], kv_size[1], kv_size[2]);
        let group = dq.size()[1] / kv_heads;
        let d_qkv = Tensor::empty([tokens, kv_heads, group + 2, head_dim], (dq.kind(), dq.device()));
        let (mut d_q, mut d_k) = (d_qkv.narrow(2, 0, group), d_qkv.select(2, group));
        rope::backward_into(&dq.view([tokens, kv_heads, group, head_dim]), ctx.rope, &mut d_q);
        rope::backward_into(&dk, ctx.rope, &mut d_k);
        if let Some([(q, q_rstd), (k, k_rstd)]) = &self.raw {
            norm_backward(&mut d_q, q, q_rstd, &w.q_norm, grads, |grads| &grads.q_norm);
            norm_backward(&mut d_k, k, k_rstd, &w.k_norm, grads, |grads| &grads.k_norm);
        }
        d_qkv.select(2, group + 1).copy_(&dv);
        let d_qkv = d_qkv.flatten(1, 3);
        if let Some(mut d_bias) = grads.qkv_bias() {
            linear::accumulate_bias(&d_qkv, &mut d_bias);
        }
        let d_normed = lora::backward(&d_qkv, &self.normed, weight, grads.of(w, Matrix::Qkv));
        let mut d_norm = grads.norm(&w.input_norm, |grads| Some(&grads.input_norm));
        let mut dx = rms_norm::backward(&d_normed, x, &w.input_norm, &self.rstd, &mut d_norm);
        Ok(dx.g_add_(dh))
    }
}

/// Queries [T, Hkv, G, hd], keys and values [T, Hkv, hd]: views of the products.
fn project(spec: &ModelSpec, w: &BlockParams, normed: &Tensor) -> [Tensor; 3] {
    let (tokens, head_dim) = (normed.size()[0], spec.head_dim as i64);
    let lora = w.lora.qkv.as_ref();
    match &w.qkv {
        Qkv::Grouped { weight, bias } => {
            let group = spec.heads_per_group() as i64;
            let qkv = lora::add(lora, normed, linear::forward(normed, weight, bias.as_ref()));
            let qkv = qkv.view([tokens, -1, group + 2, head_dim]);
            [qkv.narrow(2, 0, group), qkv.select(2, group), qkv.select(2, group + 1)]
        }
        Qkv::Split { q, kv } => {
            let rows = [0, q.0.size()[0], q.0.size()[0] + kv.0.size()[0]];
            let product = |index: usize, (weight, bias): &(Tensor, Option<Tensor>)| {
                let lora = lora.map(|lora| lora.rows(rows[index], rows[index + 1] - rows[index]));
                lora::add(lora.as_ref(), normed, linear::forward(normed, weight, bias.as_ref()))
            };
            let q = product(0, q).view([tokens, 1, -1, head_dim]);
            let kv = product(1, kv).view([tokens, 1, 2, head_dim]);
            [q, kv.select(2, 0), kv.select(2, 1)]
        }
    }
}

/// Replaces the gradient of normalised heads by that of the heads, in place.
fn norm_backward(
    d: &mut Tensor,
    x: &Tensor,
    rstd: &Tensor,
    weight: &Option<Tensor>,
    grads: &BlockGradients,
    gradient: fn(&BlockParams) -> &Option<Tensor>,
) {
    if let Some(weight) = weight {
        let mut d_weight = grads.norm(weight, |grads| gradient(grads).as_ref());
        d.copy_(&rms_norm::backward(d, x, weight, rstd, &mut d_weight));
    }
}

/// Attention's output and the log-sum-exp of its scores.
#[derive(Debug)]
struct Attended {
    o: Tensor,   // [T, H, hd]
    lse: Tensor, // [T, H]
}

/// The second half up to the last product.
#[derive(Debug)]
struct Mlp {
    h: Tensor,      // [T, D]
    normed: Tensor, // [T, D]
    rstd: Tensor,   // [T, 1]
    gate: Tensor,   // [T, F]
    up: Tensor,     // [T, F]
    act: Tensor,    // [T, F]
}

impl Mlp {
    fn forward(ctx: &BlockContext<'_>, w: &BlockParams, h: Tensor) -> Self {
        let (normed, rstd) = rms_norm::forward(&h, &w.post_norm, ctx.spec.rms_norm_eps);
        let lora = w.lora.gate_up.as_ref().map(Lora::every_second_row);
        let [gate, up] = gate_and_up(&w.gate_up).map(|weight| linear::forward(&normed, &weight, None));
        let [gate, up] = match &lora {
            None => [gate, up],
            Some([lora_gate, lora_up]) => {
                [lora::add(Some(lora_gate), &normed, gate), lora::add(Some(lora_up), &normed, up)]
            }
        };
        let act = swiglu::forward(&gate, &up);
        Self { h, normed, rstd, gate, up, act }
    }

    /// dh, the residual's part included.
    fn backward(self, w: &BlockParams, dy: &Tensor, grads: &mut BlockGradients) -> Tensor {
        let d_act = lora::backward(dy, &self.act, &w.down, grads.of(w, Matrix::Down));
        let (d_gate, d_up) = swiglu::backward(&d_act, &self.gate, self.up);
        let [w_gate, w_up] = gate_and_up(&w.gate_up);
        let mut d_normed = linear::backward_input(&d_gate, &w_gate);
        linear::accumulate_input(&d_up, &w_up, &mut d_normed);
        match grads {
            BlockGradients::Weights(grads) => {
                let [mut dw_gate, mut dw_up] = gate_and_up(&grads.gate_up);
                linear::accumulate_weight(&d_gate, &self.normed, &mut dw_gate);
                linear::accumulate_weight(&d_up, &self.normed, &mut dw_up);
            }
            BlockGradients::Adapters(grads) => {
                if let (Some(lora), Some(grads)) = (&w.lora.gate_up, &grads.gate_up) {
                    let (lora, grads) = (lora.every_second_row(), grads.every_second_row());
                    for ((d, lora), mut grads) in [&d_gate, &d_up].into_iter().zip(&lora).zip(grads) {
                        lora.backward(d, &self.normed, &mut d_normed, &mut grads);
                    }
                }
            }
        }
        let mut d_norm = grads.norm(&w.post_norm, |grads| Some(&grads.post_norm));
        let mut dh = rms_norm::backward(&d_normed, &self.h, &w.post_norm, &self.rstd, &mut d_norm);
        dh.g_add_(dy)
    }
}

/// Every second row of the interleaved weight [2 F, D]: two strided views [F, D].
fn gate_and_up(weight: &Tensor) -> [Tensor; 2] {
    let pairs = weight.view([-1, 2, weight.size()[1]]);
    [pairs.select(1, 0), pairs.select(1, 1)]
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
        None => Ok(lora::add(lora, x, linear::forward(x, w, Some(residual)))),
        Some(tp) => {
            let mut partial = lora::add(lora, x, linear::forward(x, w, None));
            tp.all_reduce(&mut partial, ReduceOp::Sum)?;
            Ok(partial.g_add_(residual))
        }
    }
}

fn invalid(expected: &str, got: &str) -> Error {
    Error::InvalidArgument { op: "block_backward", expected: expected.to_owned(), got: got.to_owned() }
}
