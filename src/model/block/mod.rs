//! One transformer block: h = x + post(mixer(pre(x))), y = h + post(mlp(pre(h))); each norm `pre` or `post` may be absent.
//!
//! The file of a sublayer has its forward and its explicit backward; its parameters, bytes and operations are in `spec`. The activations that
//! backward needs are kept or recomputed, as configured ([`SavedBlock`]); both give the same bits. Norms and activation functions are always
//! recomputed, since that only costs one read of memory.
//!
//! T tokens, D hidden. The residual stream (x, h and y) has its own type; all other tensors have the weights' type.
//!
//! `residual_dtype = float32` halves the difference between sampler and trainer: in bfloat16 the stream is rounded after every sublayer, which causes
//! most of the error on both sides. It needs more memory, so `auto` follows transformers and vLLM.

mod attention;
mod attention_parts;
mod columns;
mod context;
mod delta_net;
mod dense;
mod draft_head;
mod exchange;
mod expanded;
mod experts;
mod gate;
mod linear;
mod matrices;
mod mixer;
mod mlp;
mod packed;
mod params;
mod shared;

use tch::Tensor;

use crate::config::GradientCheckpointing;
use crate::error::{Error, Result};
use crate::ops::attention::Attended;
use mixer::MixerOutput;
use mlp::SavedMlp;

pub use context::{BlockContext, Routes};
pub use draft_head::{draft_input, draft_input_backward};
pub use exchange::TokenExchange;
pub use linear::Linear;
pub use matrices::BlockMatrix;
pub use packed::{PackedMixer, SequenceMixer};
pub use params::BlockParams;

/// Activations of the forward that [`block_backward`] needs. `full` keeps only the block's input; `keep_attention` also attention's output and
/// log-sum-exp; `selective` everything except the outputs of gate and up, the block's largest; `none` those as well; `keep_chunks` also a gated delta
/// net's intermediate results per chunk.
#[derive(Debug)]
pub struct SavedBlock {
    layer: usize,
    x: Tensor, // [T, D]
    attended: Option<Attended>,
    /// The residual stream after the first sublayer, and the activations of that sublayer.
    mixed: Option<(Tensor, MixerOutput)>,
    mlp: SavedMlp,
}

impl SavedBlock {
    /// The tensors that may be moved to other memory until backward, and are undefined meanwhile: the block's input, and attention's output if it is
    /// kept.
    pub(crate) fn movable(&mut self) -> impl Iterator<Item = &mut Tensor> {
        [Some(&mut self.x), self.attended.as_mut().map(|attended| &mut attended.o)].into_iter().flatten()
    }
}

/// Returns y [T, D] and, if a backward will follow, the activations that `keep` keeps.
///
/// # Errors
/// The errors of `mixer` and of the tensor-parallel group; [`Error::OutOfMemory`]; [`Error::InvalidArgument`] if a backward is requested of an
/// attention that returns no log-sum-exp.
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

/// Returns dx [T, D], and adds the gradients of the weights, or only of the adapters, to `grads` in place.
///
/// # Errors
/// [`Error::OutOfMemory`]; [`Error::InvalidArgument`] for a tensor-parallel slice: only whole blocks can be trained.
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
    assert!(!grads.is_unwritten(), "backward left a matrix of layer {layer} without a gradient");
    Ok(dx)
}

fn invalid(expected: &str, got: &str) -> Error {
    Error::InvalidArgument { op: "block_backward", expected: expected.to_owned(), got: got.to_owned() }
}
