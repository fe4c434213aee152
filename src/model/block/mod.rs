//! One transformer block: h = x + post(mixer(pre(x))), y = h + post(mlp(pre(h))), where a norm before or behind may be absent.
//!
//! A sublayer's file describes all of it: its parameters and how ranks share them, forward and explicit backward, and the bytes and
//! operations of both. What the backward needs is kept or computed again by choice ([`SavedBlock`]); either way
//! it computes with the same bits. Norms and the activation cost a reading of memory and are always computed again.
//!
//! T tokens, D hidden. The residual stream (x, h and y) has a kind of its own, all else that of the weights.
//!
//! `residual_dtype = float32` halves the difference between sampler and trainer: in bfloat16 the stream is rounded after every
//! sublayer, which is most of the error of both. It costs the bytes of a wider stream, so `auto` follows transformers and vLLM.

mod attention;
mod attention_parts;
mod bytes;
pub(super) mod correction;
mod delta_net;
mod dense;
mod draft_head;
mod exchange;
mod experts;
mod gate;
mod linear;
mod matrices;
mod matrix;
mod mixer;
mod mlp;
mod packed;
mod params;
mod served;
mod shared;

use tch::Tensor;

use super::distinct::ByRope;
use super::params::{ParamName, Shapes};
use super::spec::ModelSpec;
use crate::config::GradientCheckpointing;
use crate::error::{Error, Result};
use crate::model::format::Rows;
use crate::ops::attention::Attended;
use crate::ops::exact;
use crate::ops::rope::RopeRows;
use crate::ranks::{Collective, ReduceOp};
use mixer::MixerOutput;
use mlp::{Expanded, SavedMlp};

pub use attention::{AttentionSpec, QkNorm};
pub use bytes::ElementBytes;
pub use delta_net::DeltaNetSpec;
pub use dense::DenseSpec;
pub use draft_head::{draft_input, draft_input_backward};
pub use exchange::TokenExchange;
pub use experts::{ExpertsSpec, Routes};
pub use linear::{Linear, LinearSpec, Matrix, Projection, TpSplit};
pub use matrices::BlockMatrix;
pub use mixer::Mixer;
pub use mlp::Mlp;
pub use packed::{PackedMixer, SequenceMixer};
pub use params::{BlockParams, NormNames};
pub(crate) use params::{MIXER_NORMS, MLP_NORMS};
pub use shared::SharedExpertSpec;

/// Where the norms of a sublayer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormPlaces {
    /// Before it: of what it reads.
    pub pre: bool,
    /// Behind it: of what it adds to the residual stream.
    pub post: bool,
}

impl NormPlaces {
    /// Before each sublayer alone, as in most families.
    pub const PRE: Self = Self { pre: true, post: false };
    /// Behind each sublayer alone, as in OLMo 2.
    pub const POST: Self = Self { pre: false, post: true };
    /// Before and behind each sublayer, as in Gemma 3.
    pub const BOTH: Self = Self { pre: true, post: true };
}

/// The description of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// The first sublayer.
    pub mixer: Mixer,
    /// The second sublayer.
    pub mlp: Mlp,
    /// Norms of both.
    pub norms: NormPlaces,
    /// Factor of what each sublayer adds to the residual stream.
    pub residual_scale: f64,
}

impl BlockSpec {
    /// A block of attention and a dense MLP of this width, with SiLU.
    pub fn dense(attention: AttentionSpec, intermediate: usize, norms: NormPlaces) -> Self {
        let hidden = attention.hidden;
        let mlp = Mlp::Dense(DenseSpec::new(hidden, intermediate));
        Self { hidden, mixer: Mixer::Attention(attention), mlp, norms, residual_scale: 1.0 }
    }

    /// The share of a rank.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        Self { mixer: self.mixer.tp_slice(tp_size), mlp: self.mlp.tp_slice(tp_size), ..self }
    }

    /// Whether so many ranks can have slices without copies.
    pub fn can_slice(self, tp_size: usize) -> bool {
        tp_size > 0 && self.mixer.can_slice(tp_size) && self.mlp.can_slice(tp_size)
    }

    /// Whether the second sublayer has experts.
    pub fn has_experts(self) -> bool {
        matches!(self.mlp, Mlp::Experts(_))
    }

    /// The matrices of the block, in the order of their parameters.
    pub fn linears(self) -> Vec<LinearSpec> {
        self.mixer.linears().into_iter().chain(self.mlp.linears()).collect()
    }

    /// Names and shapes of the block's parameters, in the layout's order.
    pub(super) fn shapes(self) -> Shapes {
        let norm = |present: bool, name| present.then(|| (name, vec![self.hidden as i64]));
        let NormNames { pre, post } = MIXER_NORMS;
        let mixer = norm(self.norms.pre, pre).into_iter().chain(self.mixer.shapes()).chain(norm(self.norms.post, post));
        let NormNames { pre, post } = MLP_NORMS;
        let mlp = norm(self.norms.pre, pre).into_iter().chain(self.mlp.other_shapes());
        let mlp = mlp.chain(self.mlp.linears().into_iter().flat_map(|linear| linear.params()));
        mixer.chain(mlp).chain(norm(self.norms.post, post)).collect()
    }
}

/// Inputs that all blocks share in one pass over a batch of tokens.
#[derive(Debug, Clone, Copy)]
pub struct BlockContext<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Rotations of the tokens' positions.
    pub ropes: &'a ByRope<RopeRows>,
    /// The ranks whose slices together make the block; forward only.
    pub tp: Option<&'a dyn Collective>,
    /// Who sees which experts tokens go to, and what the loss makes of it.
    pub routes: Option<&'a dyn Routes>,
    /// Whether the forward computes by [`crate::ops::exact`].
    exact: bool,
    /// Factor of what a sublayer of the block at hand adds to the residual stream.
    residual_scale: f64,
}

impl<'a> BlockContext<'a> {
    /// Makes the context of whole blocks, or with `tp` of their slices.
    pub fn new(
        spec: &'a ModelSpec,
        ropes: &'a ByRope<RopeRows>,
        tp: Option<&'a dyn Collective>,
        routes: Option<&'a dyn Routes>,
    ) -> Self {
        Self { spec, ropes, tp, routes, exact: false, residual_scale: 1.0 }
    }

    /// With a forward of which a token has the same bits in the engine and in training. Rotations are those of
    /// [`Ropes::exact_rows`](crate::model::Ropes::exact_rows), and blocks are in the format [`Exact`](crate::model::Exact).
    pub fn exactly(self, exact: bool) -> Self {
        Self { exact, ..self }
    }

    fn of_block(self, block: &BlockSpec) -> Self {
        Self { residual_scale: block.residual_scale, ..self }
    }

    /// Adds up what ranks have of all heads' queries and keys; a key that ranks share counts once.
    fn sum_over_heads(&self, attention: AttentionSpec, squares: &mut Tensor /* [T, 2] */) -> Result<()> {
        let Some(tp) = self.tp else { return Ok(()) };
        if !attention.has_first_of_key(tp.rank(), tp.size()) {
            let _ = squares.narrow(1, 1, 1).f_zero_()?;
        }
        tp.all_reduce(squares, ReduceOp::Sum)
    }

    /// The input of a sublayer [T, D], of the weights' type, and the norm's rstd.
    fn enter(&self, w: &BlockParams, norms: NormNames, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let Some(weight) = w.norm(norms.pre) else { return Ok((x.f_to_kind(w.kind())?, None)) };
        let (normed, rstd) = self.spec.norm().forward(x, weight)?;
        Ok((if self.exact { exact::rms_norm(x, weight, self.spec.norm())? } else { normed }, Some(rstd)))
    }

    /// Normalised rows [T, D], without what a backward needs.
    fn norm(&self, w: &BlockParams, name: ParamName, x: &Tensor) -> Result<Tensor> {
        let weight = w.norm(name).expect("a norm of the block");
        if self.exact {
            exact::rms_norm(x, weight, self.spec.norm())
        } else {
            Ok(self.spec.norm().forward(x, weight)?.0)
        }
    }

    /// The input of a sublayer for the products of some matrices, rounded by the norm where a format has a kernel for that. [T, D]
    fn enter_rows(&self, w: &BlockParams, norms: NormNames, x: &Tensor, matrices: &[Matrix]) -> Result<Rows> {
        let mut linears = matrices.iter().map(|&matrix| w.linear(matrix));
        let rounding = linears.clone().find(|linear| linear.format.rounds());
        match w.norm(norms.pre).zip(rounding) {
            Some((weight, linear)) => linear.format.norm(self.spec.norm(), x, weight, linears.any(Linear::reads_plain)),
            None if self.exact && w.norm(norms.pre).is_some() => Ok(self.norm(w, norms.pre, x)?.into()),
            None => Ok(self.enter(w, norms, x)?.0.into()),
        }
    }

    /// dx, from the gradient of what the sublayer reads and that of the residual stream behind it.
    fn enter_backward(
        &self,
        w: &BlockParams,
        norms: NormNames,
        d_normed: &Tensor,           // [T, D]
        (x, dy): (&Tensor, &Tensor), // [T, D]
        rstd: Option<&Tensor>,       // [T, 1]
        grads: &BlockParams,
    ) -> Result<Tensor> {
        let (Some(weight), Some(rstd)) = (w.norm(norms.pre), rstd) else { return Ok(d_normed.f_add(dy)?) };
        self.spec.norm().backward(d_normed, x, weight, rstd, Some(dy), &mut grads.gradient_of(w, norms.pre)?)
    }

    /// residual + the sublayer's output [T, D], whose last product is that of `linear` and x; and the output before its norm.
    fn leave(
        &self,
        w: &BlockParams,
        norms: NormNames,
        linear: &Linear,
        x: &Rows,          // [T, K]
        residual: &Tensor, // [T, D]
    ) -> Result<(Tensor, Option<Tensor>)> {
        if w.norm(norms.post).is_none() && self.residual_scale == 1.0 {
            return Ok((linear.forward_summed(x, Some(residual), self.tp)?, None));
        }
        self.add(w, norms, linear.forward_summed(x, None, self.tp)?, residual)
    }

    /// residual + the sublayer's output [T, D], of which every rank has a part; and the output before its norm, of the weights' kind.
    fn leave_with(
        &self,
        w: &BlockParams,
        norms: NormNames,
        mut output: Tensor, // [T, D]
        residual: &Tensor,  // [T, D]
    ) -> Result<(Tensor, Option<Tensor>)> {
        if let Some(tp) = self.tp.filter(|tp| tp.size() > 1) {
            tp.all_reduce(&mut output, ReduceOp::Sum)?;
        }
        if w.norm(norms.post).is_some() {
            output = output.f_to_kind(w.kind())?;
        }
        self.add(w, norms, output, residual)
    }

    /// residual + scale * norm(output) [T, D], where there is a norm; and the output, which its backward reads.
    fn add(
        &self,
        w: &BlockParams,
        norms: NormNames,
        output: Tensor,    // [T, D]
        residual: &Tensor, // [T, D]
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (mut added, output) = match w.norm(norms.post) {
            Some(_) => (self.norm(w, norms.post, &output)?, Some(output)),
            None => (output, None),
        };
        if self.residual_scale != 1.0 {
            let _ = added.f_mul_scalar_(self.residual_scale)?;
        }
        Ok((residual.f_add(&added)?.f_to_kind(residual.kind())?, output))
    }

    /// The gradient of the output before its norm.
    fn leave_backward(
        &self,
        w: &BlockParams,
        norms: NormNames,
        dy: &Tensor,             // [T, D]
        output: Option<&Tensor>, // [T, D]
        grads: &BlockParams,
    ) -> Result<Tensor> {
        let dy = match self.residual_scale {
            1.0 => dy.shallow_clone(),
            scale => dy.f_mul_scalar(scale)?,
        };
        let (Some(weight), Some(output)) = (w.norm(norms.post), output) else { return Ok(dy) };
        let norm = self.spec.norm();
        let (_, rstd) = norm.forward(output, weight)?;
        norm.backward(&dy, output, weight, &rstd, None, &mut grads.gradient_of(w, norms.post)?)
    }
}

/// Results of the forward that [`block_backward`] needs. `full` keeps the block's input alone; `keep_attention` attention's output and
/// log-sum-exp, too; `selective` all but the MLP's first product, the largest of a block by memory; `none` that too, and `keep_chunks` what a
/// gated delta net computes of chunks.
#[derive(Debug)]
pub struct SavedBlock {
    layer: usize,
    x: Tensor, // [T, D]
    attended: Option<Attended>,
    /// The residual stream after the first sublayer, and what leads to it.
    mixed: Option<(Tensor, MixerOutput)>,
    mlp: SavedMlp,
}

impl SavedBlock {
    /// The tensors that may be elsewhere until backward, undefined meanwhile: the block's input, and attention's output where it is kept.
    pub(crate) fn movable(&mut self) -> impl Iterator<Item = &mut Tensor> {
        [Some(&mut self.x), self.attended.as_mut().map(|attended| &mut attended.o)].into_iter().flatten()
    }
}

/// y [T, D]; and what `keep` asks for, if a backward will follow.
///
/// # Errors
/// The errors of `mixer` and of the tensor-parallel group; [`Error::OutOfMemory`]; [`Error::InvalidArgument`] if a
/// backward is to follow an attention that gives no log-sum-exp.
pub fn block_forward(
    ctx: &BlockContext<'_>,
    layer: usize,
    w: &BlockParams,
    x: &Tensor, // [T, D], of the residual stream's kind
    mixer: &dyn SequenceMixer,
    keep: Option<GradientCheckpointing>,
) -> Result<(Tensor, Option<SavedBlock>)> {
    let block = ctx.spec.layers[layer];
    let ctx = &ctx.of_block(&block);
    let (h, mixed) =
        block.mixer.forward(ctx, layer, w, (x, None), mixer, keep.is_some_and(|keep| keep.keeps_chunks()))?;
    let (y, expanded) = block.mlp.forward(ctx, layer, w, &h)?;
    let Some(keep) = keep else { return Ok((y, None)) };
    if keep != GradientCheckpointing::Full && !mixed.can_go_back() {
        return Err(invalid("an attention with log-sum-exp", "one without"));
    }
    let attended = if keep.keeps_attention() { mixed.attended() } else { None };
    let mixed = (!keep.recomputes_blocks()).then_some((h, mixed));
    Ok((y, Some(SavedBlock { layer, x: x.shallow_clone(), attended, mixed, mlp: expanded.kept(keep) })))
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
    packed: &PackedMixer,
    grads: &mut BlockParams,
) -> Result<Tensor> {
    if ctx.tp.is_some_and(|tp| tp.size() > 1) {
        return Err(invalid("a whole block", "a tensor-parallel slice"));
    }
    let SavedBlock { layer, x, attended, mixed, mlp } = saved;
    let block = ctx.spec.layers[layer];
    let (ctx, mixer) = (&ctx.of_block(&block), block.mixer);
    let (h, mixed) = mixed.map_or_else(|| mixer.forward(ctx, layer, w, (&x, attended), packed, false), Ok)?;
    let dh = mlp.backward(ctx, layer, w, (&h, dy), grads)?;
    let dx = mixer.backward(ctx, w, (&x, &dh), mixed, packed, grads)?;
    assert!(!grads.is_unwritten(), "a matrix of layer {layer} without a gradient");
    Ok(dx)
}

fn invalid(expected: &str, got: &str) -> Error {
    Error::InvalidArgument { op: "block_backward", expected: expected.to_owned(), got: got.to_owned() }
}
