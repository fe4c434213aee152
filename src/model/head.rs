//! The output head: from the last block's output to log-probabilities of selected tokens, through the final norm.

use tch::{Kind, Tensor};

use super::views::HeadParams;
use crate::error::Result;
use crate::ops::exact;
use crate::ops::head::{self, HeadSaved, HeadSizes, TableSum, TopScores, TopTokens};
use crate::ops::linear::{self, Onto};
use crate::ops::rms_norm::NormOptions;
use crate::torch::accumulation_kind;

/// Number of rows whose logits are computed at once: on a GPU about half a gigabyte of float32 logits, in whole GEMM tiles; on a CPU as many as fit
/// its cache.
pub fn head_chunk_tokens(vocab_size: usize, on_cuda: bool) -> usize {
    let logits = if on_cuda { 1 << 27 } else { 1 << 25 };
    let rows = logits / vocab_size.max(1);
    if on_cuda && rows > 128 { rows / 128 * 128 } else { rows.max(1) }
}

/// The tokens that rows of the last block's output are scored for, and the temperature.
#[derive(Debug, Clone, Copy)]
pub struct Scoring<'a> {
    /// The token to score for each row. `[C]` i64
    pub targets: &'a Tensor,
    /// Additional tokens to score in each row, such as the most probable ones.
    pub top: TopTokens<'a>,
    /// Softmax temperature.
    pub temperature: f64,
    /// Epsilon and weight convention of the final norm.
    pub norm: NormOptions,
    /// If set, log-probabilities equal the sampler's bit for bit. The value is the model's logits divisor, which `temperature` includes as a factor.
    pub exact: Option<f64>,
}

/// Log-probabilities and entropies of scored tokens, in nats, at the given temperature.
#[derive(Debug)]
pub struct ScoredTokens {
    /// Log-probability of each target token. `[C]`, accumulation type
    pub logprobs: Tensor,
    /// Entropy of each row's distribution. `[C]`, accumulation type
    pub entropy: Tensor,
    /// Scores of the additional tokens, if any were requested.
    pub top: Option<TopScores>,
    /// Activations for the backward.
    pub saved: SavedHead,
}

/// Activations of the forward that [`head_backward`] needs.
#[derive(Debug)]
pub struct SavedHead {
    hidden: Tensor, // [C, D]
    normed: Tensor, // [C, D]
    rstd: Tensor,   // [C, 1]
    head: HeadSaved,
}

/// Computes `log softmax(norm(x) table^T / temperature)` at the targets. `keep` states whether a backward will follow.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn head_forward(
    w: &HeadParams,
    table: &Tensor, // [V, D], the head's own or the embedding's
    x: &Tensor,     // [C, D], the rows of the last block's output before the targets
    scoring: &Scoring<'_>,
    keep: bool,
) -> Result<ScoredTokens> {
    let (mut normed, rstd) = scoring.norm.forward(x, &w.final_norm)?;
    if scoring.exact.is_some() {
        normed = exact::rms_norm(x, &w.final_norm, scoring.norm)?;
    }
    let chunk_tokens = head_chunk_tokens(table.size()[0] as usize, table.device().is_cuda());
    let Scoring { targets, top, temperature, .. } = *scoring;
    let sizes = HeadSizes { chunk_tokens, keep };
    let out = match scoring.exact {
        None => head::forward(&normed, table, targets, temperature, top, chunk_tokens, keep)?,
        Some(divisor) => head::forward_exactly(&normed, table, targets, temperature, divisor, top, sizes)?,
    };
    let saved = SavedHead { hidden: x.shallow_clone(), normed, rstd, head: out.saved };
    Ok(ScoredTokens { logprobs: out.logprobs, entropy: out.entropy, top: out.top, saved })
}

/// Computes `norm(x) table^T` in float32: all logits of the rows at once, which training never holds in memory.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn head_logits(
    w: &HeadParams,
    table: &Tensor, // [V, D], the head's own or the embedding's
    x: &Tensor,     // [C, D]
    norm: NormOptions,
) -> Result<Tensor /* [C, V] f32 */> {
    let (normed, _) = norm.forward(x, &w.final_norm)?;
    Ok(linear::forward(&normed, table, None)?.f_to_kind(Kind::Float)?)
}

/// Where [`head_backward`] writes its gradients.
#[derive(Debug)]
pub struct HeadSums<'a> {
    /// The gradient of the final norm is added to this. `[D]`
    pub final_norm: &'a mut Tensor,
    /// The gradient of the output table: the head's own or, if tied, the embedding's; `None` if it is frozen. `[V, D]`
    pub table: Option<&'a mut Tensor>,
    /// Whether the table's gradient is overwritten or added to.
    pub onto: Onto,
}

/// Returns dx `[C, D]` in the weights' type, given the gradients of log-probabilities and, optionally, of entropies and of the
/// log-probabilities of the tokens that `scoring.top` lists by id. Gradients of the norm and of the table go to `sums`, unless both are frozen.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
#[allow(clippy::too_many_arguments)]
pub fn head_backward(
    w: &HeadParams,
    table: &Tensor, // [V, D]
    scoring: &Scoring<'_>,
    saved: SavedHead,
    dlogprobs: &Tensor,        // [C]
    dentropy: Option<&Tensor>, // [C]
    dtop: Option<&Tensor>,     // [C, K]
    sums: Option<HeadSums<'_>>,
) -> Result<Tensor> {
    let SavedHead { hidden, normed, rstd, head } = saved;
    let (targets, temperature) = (scoring.targets, scoring.temperature);
    let mut unread = Tensor::f_zeros(w.final_norm.size(), (accumulation_kind(hidden.kind()), hidden.device()))?;
    let (d_final_norm, d_table) = match sums {
        Some(HeadSums { final_norm, table, onto }) => (final_norm, table.map(|sum| TableSum { sum, onto })),
        None => (&mut unread, None),
    };
    let top = match scoring.top {
        TopTokens::At(ids) => dtop.map(|dtop| [ids, dtop]),
        TopTokens::Nothing | TopTokens::MostProbable(_) => None,
    };
    let d_normed = head::backward(&normed, table, targets, temperature, head, dlogprobs, dentropy, top, d_table)?;
    scoring.norm.backward(&d_normed, &hidden, &w.final_norm, &rstd, None, d_final_norm)
}
