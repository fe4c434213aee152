//! One transformer block: h = x + post(attention(pre(x))), y = h + post(mlp(pre(h))), where a norm before or behind may be absent.
//!
//! A sublayer's file describes all of it: its parameters and how ranks share them, forward and explicit backward, and the bytes and
//! operations of both. What the backward needs is kept or computed again by choice ([`SavedBlock`]); either way
//! it computes with the same bits. Norms and the activation cost a reading of memory and are always computed again.
//!
//! T tokens, D hidden. The residual stream (x, h and y) has a kind of its own, all else that of the weights.

mod attention;
mod dense;
mod linear;

use tch::{Kind, Tensor};

use super::lora::BlockLora;
use super::params::{ParamName, Shapes, UnitLayout};
use super::spec::ModelSpec;
use crate::config::GradientCheckpointing;
use crate::dist::{Collective, ReduceOp};
use crate::error::{Error, Result};
use crate::ops::rms_norm;
use crate::ops::rope::RopeRows;
use crate::ops::swiglu::GateUp;
use crate::torch::accumulation_kind;
use attention::Attended;

pub use attention::{Attention, AttentionParams, AttentionSpec, PackedAttention, QkNorm, attention_scale};
pub use dense::{DenseParams, DenseSpec};
pub use linear::{Linear, LinearSpec, Matrix, Piece, Split, product_work};

/// What mixes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Full attention, or within a window.
    Attention(AttentionSpec),
}

/// What treats every token by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mlp {
    /// One MLP for all tokens.
    Dense(DenseSpec),
}

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
}

/// The description of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// The first sublayer.
    pub mixer: Mixer,
    /// The second sublayer.
    pub mlp: Mlp,
    /// Norms of both.
    pub norms: NormPlaces,
}

/// Bytes of an element of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementBytes {
    /// Weights and activations.
    pub narrow: usize,
    /// The accumulation kind.
    pub wide: usize,
    /// The residual stream.
    pub residual: usize,
}

impl ElementBytes {
    /// For weights of `kind`.
    pub fn new(kind: Kind, residual: Kind) -> Self {
        let [narrow, wide, residual] = [kind, accumulation_kind(kind), residual].map(|kind| kind.elt_size_in_bytes());
        Self { narrow, wide, residual }
    }
}

impl BlockSpec {
    /// The share of a rank.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        let (Mixer::Attention(attention), Mlp::Dense(dense)) = (self.mixer, self.mlp);
        let mixer = Mixer::Attention(attention.tp_slice(tp_size));
        Self { mixer, mlp: Mlp::Dense(dense.tp_slice(tp_size)), ..self }
    }

    /// Its matrices, in the order of their parameters.
    pub fn linears(self) -> Vec<LinearSpec> {
        let (Mixer::Attention(attention), Mlp::Dense(dense)) = (self.mixer, self.mlp);
        attention.linears().into_iter().chain(dense.linears()).collect()
    }

    /// Its parameters, in the layout's order.
    pub(super) fn shapes(self) -> Shapes {
        let (Mixer::Attention(attention), Mlp::Dense(dense)) = (self.mixer, self.mlp);
        let ([qkv, o], [gate_up, down]) = (attention.linears(), dense.linears());
        let norm = |present: bool, name| present.then(|| (name, vec![self.hidden as i64]));
        let matrix = |linear: &LinearSpec| {
            let weight = (linear.matrix.params()[0], vec![linear.rows() as i64, linear.columns as i64]);
            std::iter::once(weight).chain(linear.bias.map(|bias| (bias, vec![linear.rows() as i64])))
        };
        let [pre, post] = MIXER_NORMS;
        let mixer = norm(self.norms.pre, pre).into_iter().chain(matrix(&qkv)).chain(attention.norm_shapes());
        let mixer = mixer.chain(matrix(&o)).chain(norm(self.norms.post, post));
        let [pre, post] = MLP_NORMS;
        let mlp = norm(self.norms.pre, pre).into_iter().chain(matrix(&gate_up)).chain(matrix(&down));
        mixer.chain(mlp).chain(norm(self.norms.post, post)).collect()
    }

    /// Bytes a token of what [`SavedBlock`] keeps.
    pub fn saved_bytes(self, bytes: ElementBytes, keep: GradientCheckpointing) -> usize {
        let x = bytes.residual * self.hidden;
        let Mlp::Dense(dense) = self.mlp;
        match keep {
            GradientCheckpointing::Full => x,
            GradientCheckpointing::Selective => x + self.half_bytes(bytes) + self.output_bytes(bytes),
            GradientCheckpointing::None => {
                x + self.half_bytes(bytes) + self.output_bytes(bytes) + dense.kept_bytes(bytes)
            }
        }
    }

    /// Bytes a token of the fullest moment of a forward that no backward follows: its input, the block up to the residual stream
    /// after attention, and the MLP's.
    pub fn forward_bytes(self, bytes: ElementBytes) -> usize {
        let Mlp::Dense(dense) = self.mlp;
        let x = bytes.residual * self.hidden;
        x + self.half_bytes(bytes) + dense.forward_bytes(bytes) + 2 * self.output_bytes(bytes)
    }

    /// Bytes a token of the fullest moment of a backward, beside what all blocks saved.
    pub fn backward_bytes(
        self,
        bytes: ElementBytes,
        keep: GradientCheckpointing,
        shares_prompts: bool,
        drops: bool,
    ) -> usize {
        let (Mixer::Attention(attention), Mlp::Dense(dense)) = (self.mixer, self.mlp);
        let keeps_gate_up = keep == GradientCheckpointing::None;
        let recomputed = if keep == GradientCheckpointing::Full { self.half_bytes(bytes) } else { 0 };
        // Gate and up are gone when attention's backward begins.
        let gone = if keeps_gate_up { dense.kept_bytes(bytes) } else { 0 };
        let of_mlp = dense.backward_bytes(bytes, keeps_gate_up, drops) + self.output_bytes(bytes);
        recomputed + of_mlp.max(attention.backward_bytes(bytes, shares_prompts).saturating_sub(gone))
    }

    /// Of the block up to the residual stream after attention.
    fn half_bytes(self, bytes: ElementBytes) -> usize {
        let Mixer::Attention(attention) = self.mixer;
        bytes.residual * self.hidden + attention.kept_bytes(bytes) + self.output_bytes(bytes)
    }

    /// Of a sublayer's output, where a norm is behind it.
    fn output_bytes(self, bytes: ElementBytes) -> usize {
        if self.norms.post { bytes.narrow * self.hidden } else { 0 }
    }
}

/// Norms before and behind attention.
const MIXER_NORMS: [ParamName; 2] = [ParamName::InputNorm, ParamName::MixerPostNorm];
/// Norms before and behind the MLP.
const MLP_NORMS: [ParamName; 2] = [ParamName::PostNorm, ParamName::MlpPostNorm];

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

impl BlockContext<'_> {
    /// Adds up what ranks have of all heads' queries and keys; a key that ranks share counts once.
    fn sum_over_heads(&self, squares: &mut Tensor /* [T, 2] */) -> Result<()> {
        let Some(tp) = self.tp else { return Ok(()) };
        if !self.spec.has_first_of_key(tp.rank(), tp.size()) {
            let _ = squares.narrow(1, 1, 1).f_zero_()?;
        }
        tp.all_reduce(squares, ReduceOp::Sum)
    }
}

/// Norms around a sublayer, or their gradients.
#[derive(Debug, Default)]
pub struct Norms {
    /// Of what it reads.
    pub pre: Option<Tensor>, // [D]
    /// Of what it adds to the residual stream.
    pub post: Option<Tensor>, // [D]
}

impl Norms {
    fn view(names: [ParamName; 2], layout: &UnitLayout, flat: &Tensor) -> Self {
        let [pre, post] = names.map(|name| layout.view(name, flat));
        Self { pre, post }
    }

    fn shallow_clone(&self) -> Self {
        let [pre, post] = [&self.pre, &self.post].map(|weight| weight.as_ref().map(Tensor::shallow_clone));
        Self { pre, post }
    }

    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let pre = self.pre.as_ref().map(&mut *f).transpose()?;
        Ok(Self { pre, post: self.post.as_ref().map(f).transpose()? })
    }

    /// What the sublayer reads [T, D], of `kind`, and the norm's rstd.
    fn enter(&self, ctx: &BlockContext<'_>, x: &Tensor, kind: Kind) -> Result<(Tensor, Option<Tensor>)> {
        let Some(weight) = &self.pre else { return Ok((x.f_to_kind(kind)?, None)) };
        let (normed, rstd) = rms_norm::forward(x, weight, ctx.spec.rms_norm_eps)?;
        Ok((normed, Some(rstd)))
    }

    /// dx, from the gradient of what the sublayer reads and that of the residual stream behind it.
    fn enter_backward(
        &self,
        d_normed: &Tensor,     // [T, D]
        dy: &Tensor,           // [T, D]
        x: &Tensor,            // [T, D]
        rstd: Option<&Tensor>, // [T, 1]
        grads: &Norms,
    ) -> Result<Tensor> {
        let (Some(weight), Some(rstd)) = (&self.pre, rstd) else { return Ok(d_normed.f_add(dy)?) };
        let mut d_weight = d_norm(weight, grads.pre.as_ref())?;
        rms_norm::backward(d_normed, x, weight, rstd, Some(dy), &mut d_weight)
    }

    /// residual + the sublayer's output [T, D], whose last product is that of `linear` and x; and the output before its norm.
    fn leave(
        &self,
        ctx: &BlockContext<'_>,
        linear: &Linear,
        x: &Tensor,        // [T, K]
        residual: &Tensor, // [T, D]
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Some(weight) = &self.post else { return Ok((linear.forward_summed(x, Some(residual), ctx.tp)?, None)) };
        let output = linear.forward_summed(x, None, ctx.tp)?;
        let (normed, _) = rms_norm::forward(&output, weight, ctx.spec.rms_norm_eps)?;
        Ok((residual.f_add(&normed)?, Some(output)))
    }

    /// The gradient of the output before its norm.
    fn leave_backward(
        &self,
        ctx: &BlockContext<'_>,
        dy: &Tensor,             // [T, D]
        output: Option<&Tensor>, // [T, D]
        grads: &Norms,
    ) -> Result<Tensor> {
        let (Some(weight), Some(output)) = (&self.post, output) else { return Ok(dy.shallow_clone()) };
        let (_, rstd) = rms_norm::forward(output, weight, ctx.spec.rms_norm_eps)?;
        let mut d_weight = d_norm(weight, grads.post.as_ref())?;
        rms_norm::backward(dy, output, weight, &rstd, None, &mut d_weight)
    }
}

/// The gradient of a norm's weight; of a frozen one, a tensor that nobody reads.
fn d_norm(weight: &Tensor, gradient: Option<&Tensor>) -> Result<Tensor> {
    match gradient {
        Some(gradient) => Ok(gradient.shallow_clone()),
        None => Ok(Tensor::f_zeros(weight.size(), (accumulation_kind(weight.kind()), weight.device()))?),
    }
}

/// A block's parameters, or their gradients, in which those of frozen ones are left out. Shapes are those of the whole block; a
/// tensor-parallel slice has its share of heads and of the MLP.
#[derive(Debug, Default)]
pub struct BlockParams {
    /// The first sublayer.
    pub attention: AttentionParams,
    /// The second sublayer.
    pub mlp: DenseParams,
}

impl BlockParams {
    /// Views of a block's flat tensor [layout.len].
    ///
    /// # Panics
    /// If `layout` is not a block's of this model.
    pub fn view(spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor) -> Self {
        let (Mixer::Attention(attention), Mlp::Dense(dense)) = (spec.block().mixer, spec.block().mlp);
        let [mixer_norms, mlp_norms] = [MIXER_NORMS, MLP_NORMS].map(|names| Norms::view(names, layout, flat));
        Self {
            attention: AttentionParams::view(attention, mixer_norms, layout, flat),
            mlp: DenseParams::view(dense, mlp_norms, layout, flat),
        }
    }

    /// The adapters alone: gradients of a block whose weights are frozen.
    pub fn of_adapters(lora: BlockLora) -> Self {
        Self::default().with_adapters(lora)
    }

    /// With these adapters beside its matrices.
    pub fn with_adapters(mut self, mut lora: BlockLora) -> Self {
        let Self { attention: AttentionParams { qkv, o, .. }, mlp: DenseParams { gate_up, down, .. } } = &mut self;
        let linears = [(Matrix::Qkv, qkv), (Matrix::O, o), (Matrix::GateUp, gate_up), (Matrix::Down, down)];
        linears.into_iter().for_each(|(matrix, linear)| linear.lora = lora.take(matrix));
        self
    }

    /// Its matrices.
    pub fn linears(&self) -> [(Matrix, &Linear); 4] {
        let Self { attention, mlp } = self;
        [
            (Matrix::Qkv, &attention.qkv),
            (Matrix::O, &attention.o),
            (Matrix::GateUp, &mlp.gate_up),
            (Matrix::Down, &mlp.down),
        ]
    }

    /// What rank `tp_rank` of `tp_size` computes with, as views of `self` (a whole block). `tp_size` must have passed
    /// [`ModelSpec::validate_tp`].
    ///
    /// # Errors
    /// As [`BlockLora::tp_slice`].
    pub fn tp_slice(&self, spec: &ModelSpec, tp_rank: usize, tp_size: usize) -> Result<Self> {
        let (Mixer::Attention(attention), Mlp::Dense(dense)) = (spec.block().mixer, spec.block().mlp);
        Ok(Self {
            attention: self.attention.tp_slice(attention, tp_rank, tp_size)?,
            mlp: self.mlp.tp_slice(dense, tp_rank, tp_size)?,
        })
    }

    /// With every tensor but the adapters' replaced by `f` of it, in a fixed order.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { attention: self.attention.try_map(f)?, mlp: self.mlp.try_map(f)? })
    }
}

/// What [`block_backward`] needs of the forward. `full` keeps the block's input alone; `selective` all but the MLP's first
/// product, the largest of a block by memory; `none` that too.
#[derive(Debug)]
pub struct SavedBlock {
    x: Tensor, // [T, D]
    /// Up to the residual stream after attention, and that.
    attention: Option<(Attended, Tensor)>,
    gate_up: Option<GateUp>,
    /// The MLP's output before the norm behind it.
    output: Option<Tensor>, // [T, D]
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
    attention: &dyn Attention,
    keep: Option<GradientCheckpointing>,
) -> Result<(Tensor, Option<SavedBlock>)> {
    let (h, attended) = w.attention.forward(ctx, layer, x, attention)?;
    let (y, gate_up, output) = w.mlp.forward(ctx, &h)?;
    let Some(keep) = keep else { return Ok((y, None)) };
    if keep != GradientCheckpointing::Full && !attended.has_lse() {
        return Err(invalid("an attention with log-sum-exp", "one without"));
    }
    let is_full = keep == GradientCheckpointing::Full;
    let saved = SavedBlock {
        x: x.shallow_clone(),
        attention: (!is_full).then_some((attended, h)),
        gate_up: (keep == GradientCheckpointing::None).then_some(gate_up),
        output: output.filter(|_| !is_full),
    };
    Ok((y, Some(saved)))
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
    grads: &mut BlockParams,
) -> Result<Tensor> {
    if ctx.tp.is_some_and(|tp| tp.size() > 1) {
        return Err(invalid("a whole block", "a tensor-parallel slice"));
    }
    let SavedBlock { x, attention, gate_up, output } = saved;
    let (attended, h) = match attention {
        Some(kept) => kept,
        None => {
            let (h, attended) = w.attention.forward(ctx, 0, &x, packed)?;
            (attended, h)
        }
    };
    let dh = w.mlp.backward(ctx, dy, &h, (gate_up, output), &mut grads.mlp)?;
    w.attention.backward(ctx, &x, &dh, attended, packed, &mut grads.attention)
}

fn invalid(expected: &str, got: &str) -> Error {
    Error::InvalidArgument { op: "block_backward", expected: expected.to_owned(), got: got.to_owned() }
}
