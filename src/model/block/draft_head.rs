//! The head that drafts tokens for speculative decoding (`mtp.*` in checkpoints of Qwen3.5 and Qwen3-Next). It reads the embedding of a token and the
//! model's final hidden state at the token before, and returns a hidden state. From that, the model's own output table predicts the next token:
//!
//! ```text
//! x = P [norm_e(embedding), norm_h(hidden)];   hidden' = norm(block(x));   logits = table hidden'
//! ```
//!
//! To draft a further token, hidden' takes the place of the model's hidden state. The block attends to the rows of earlier tokens. A sequence's first
//! token has no row, because there is no hidden state before it.
//!
//! T rows, D hidden.

use tch::Tensor;

use super::params::BlockParams;
use crate::error::Result;
use crate::model::spec::{DRAFT_NORMS as NORMS, ModelSpec, ParamName};
use crate::ops::linear;

/// Activations of [`draft_input`] that its backward reads.
#[derive(Debug)]
pub struct SavedDraftInput {
    parts: [Tensor; 2], // [T, D], embedding and hidden state
    rstd: [Tensor; 2],  // [T, 1]
    joined: Tensor,     // [T, 2 D]
}

/// Returns the input of the draft head's block [T, D], in the weights' type.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
///
/// # Panics
/// If `w` is not the draft head's parameters.
pub fn draft_input(
    spec: &ModelSpec,
    w: &BlockParams,
    embedding: &Tensor, // [T, D]
    hidden: &Tensor,    // [T, D]
) -> Result<(Tensor, SavedDraftInput)> {
    let norm = |x: &Tensor, name| spec.norm().forward(x, w.norm(name).expect("a norm of the draft head"));
    let ((embedded, of_embedding), (normed, of_hidden)) = (norm(embedding, NORMS[0])?, norm(hidden, NORMS[1])?);
    let joined = Tensor::f_cat(&[embedded, normed], 1)?;
    let x = linear::forward(&joined, projection(w), None)?;
    let parts = [embedding.shallow_clone(), hidden.shallow_clone()];
    Ok((x, SavedDraftInput { parts, rstd: [of_embedding, of_hidden], joined }))
}

/// Adds the gradients of the draft head's projection and of its norms. No gradient flows to the embedding or to the model's hidden state: training
/// the head does not change the model.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
///
/// # Panics
/// If `w` is not the draft head's parameters.
pub fn draft_input_backward(
    spec: &ModelSpec,
    w: &BlockParams,
    dx: &Tensor, // [T, D]
    saved: SavedDraftInput,
    grads: &BlockParams,
) -> Result<()> {
    let SavedDraftInput { parts, rstd, joined } = saved;
    let dx = dx.f_to_kind(joined.kind())?;
    linear::accumulate_weight(&dx, &joined, &mut grads.gradient_of(w, ParamName::DraftProjection)?)?;
    let d_joined = linear::backward_input(&dx, projection(w))?;
    for (d, ((x, rstd), name)) in d_joined.f_chunk(2, 1)?.iter().zip(parts.iter().zip(&rstd).zip(NORMS)) {
        let weight = w.norm(name).expect("a norm of the draft head");
        let _ = spec.norm().backward(&d.f_contiguous()?, x, weight, rstd, None, &mut grads.gradient_of(w, name)?)?;
    }
    Ok(())
}

fn projection(w: &BlockParams) -> &Tensor {
    w.norm(ParamName::DraftProjection).expect("the projection of the draft head")
}
