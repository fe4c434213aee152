//! Log-probabilities of given tokens, and entropies, from the language model head. It is computed in chunks of tokens, or in backward in slices of
//! the vocabulary, so that [C, V] is never in memory beyond one chunk. Logits are kept in the accumulation type: in bfloat16 a logit near 20 would be
//! off by up to 0.06.

mod slices;

use crate::cuda::kernels::{self, HeadRows};
use crate::cuda::{OpCost, timed};
use crate::error::Result;
use crate::ops::linear::{self, Onto};
use crate::ops::{exact, try_map};
use crate::torch::{accumulation_kind, scalar};
use tch::{Device, Kind, Tensor};

/// Tokens that are scored in each row in addition to its target.
#[derive(Debug, Clone, Copy)]
pub enum TopTokens<'a> {
    /// No additional tokens.
    Nothing,
    /// The given number of most probable tokens, the most probable first.
    MostProbable(usize),
    /// The tokens with these ids, each at most once per row. `[C, K]` i64
    At(&'a Tensor),
}

/// Log-probabilities of several tokens of each row.
#[derive(Debug)]
pub struct TopScores {
    /// Ids of the tokens. `[C, K]` i64
    pub ids: Tensor,
    /// Log-probabilities of `ids` in nats at the temperature. `[C, K]`, accumulation kind
    pub logprobs: Tensor,
}

/// Results of [`forward`].
#[derive(Debug)]
pub struct HeadOutput {
    /// Log-probability of each target in nats at the temperature. `[C]`, accumulation kind
    pub logprobs: Tensor,
    /// Entropy of each distribution in nats at the temperature. `[C]`, accumulation kind
    pub entropy: Tensor,
    /// Scores of the additional tokens, if any were requested.
    pub top: Option<TopScores>,
    /// Data for the backward.
    pub saved: HeadSaved,
}

/// Data that [`backward`] needs. Logits are kept if there was only one chunk; otherwise they are recomputed.
#[derive(Debug)]
pub struct HeadSaved {
    logits: Option<Tensor>, // [C, V], accumulation kind; on a CPU their log-softmax
    lse: Tensor,            // [C], of the logits over the temperature
    entropy: Tensor,        // [C]
    chunk_tokens: i64,
}

/// Memory for the table's gradient, and how to write it.
#[derive(Debug)]
pub struct TableSum<'a> {
    /// The gradient that is written or added to.
    pub sum: &'a mut Tensor, // [V, D]
    /// Whether to overwrite `sum` or to add to it.
    pub onto: Onto,
}

/// Computes log softmax(hidden weight^T / temperature) at the targets and at the `top` tokens, and its entropy. `keep` states whether a backward will
/// follow.
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; the errors of the kernel.
pub fn forward(
    hidden: &Tensor,  // [C, D]
    weight: &Tensor,  // [V, D]
    targets: &Tensor, // [C] i64
    temperature: f64,
    top: TopTokens<'_>,
    chunk_tokens: usize,
    keep: bool,
) -> Result<HeadOutput> {
    let logits = |rows: &Tensor| linear::forward_wide(rows, weight);
    forward_with(hidden, weight, targets, temperature, top, HeadSizes { chunk_tokens, keep }, &logits, false)
}

/// Computes [`forward`] with log-probabilities that equal the sampler's bit for bit. `temperature` includes the model's divisor of logits as a
/// factor.
///
/// # Errors
/// The errors of [`forward`] and of [`exact::product`].
pub fn forward_exactly(
    hidden: &Tensor,  // [C, D]
    weight: &Tensor,  // [V, D]
    targets: &Tensor, // [C] i64
    temperature: f64,
    divisor: f64,
    top: TopTokens<'_>,
    sizes: HeadSizes,
) -> Result<HeadOutput> {
    let logits = |rows: &Tensor| exact::logits(rows, weight, divisor);
    // Divided logits differ from those that the backward would recompute.
    let sizes = HeadSizes { keep: sizes.keep && divisor == 1.0, ..sizes };
    forward_with(hidden, weight, targets, temperature / divisor, top, sizes, &logits, true)
}

/// How many rows are scored at once, and whether their logits are kept for a backward.
#[derive(Debug, Clone, Copy)]
pub struct HeadSizes {
    /// Rows in a chunk.
    pub chunk_tokens: usize,
    /// Whether a backward will follow.
    pub keep: bool,
}

#[allow(clippy::too_many_arguments)]
fn forward_with(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    temperature: f64,
    top: TopTokens<'_>,
    HeadSizes { chunk_tokens, keep }: HeadSizes,
    logits: &dyn Fn(&Tensor) -> Result<Tensor>,
    is_exact: bool,
) -> Result<HeadOutput> {
    let count = hidden.size()[0];
    let chunk_tokens = (chunk_tokens as i64).max(1);
    let options = (accumulation_kind(hidden.kind()), hidden.device());
    let [logprobs, entropy, lse] = try_map([(); 3], |()| Ok(Tensor::f_empty([count], options)?))?;
    let (mut kept, mut top_parts) = (None, TopParts::new(top, weight.size()[0], options)?);
    for (start, len) in chunks(count, chunk_tokens) {
        let rows = |t: &Tensor| t.narrow(0, start, len);
        let mut chunk = logits(&rows(hidden))?; // [c, V]
        let exact = is_exact.then(|| exact::logprobs(&chunk, &rows(targets), temperature)).transpose()?;
        if kernels::serve(hidden) {
            let outputs = [&rows(&logprobs), &rows(&entropy), &rows(&lse)];
            let run = || kernels::head_forward(&chunk, &rows(targets), temperature, outputs);
            timed("head", || OpCost::pass(&[&chunk]), run)?;
            let norm = rows(&lse).unsqueeze(1);
            let normalized = |logits: Tensor| Ok(logits.f_mul_scalar(1.0 / temperature)?.f_sub(&norm)?);
            top_parts.add(top, &chunk, (start, len), &normalized)?;
        } else {
            let at_targets = |values: &Tensor| values.f_gather(1, &rows(targets).unsqueeze(1), false)?.f_squeeze_dim(1);
            let scaled = at_targets(&chunk)?.f_mul_scalar(1.0 / temperature)?;
            chunk = log_softmax(chunk, temperature)?;
            rows(&logprobs).f_copy_(&at_targets(&chunk)?)?;
            rows(&lse).f_copy_(&scaled.f_sub(&rows(&logprobs))?)?;
            let terms = chunk.f_exp()?.f_mul_(&chunk)?;
            rows(&entropy).f_copy_(&terms.f_sum_dim_intlist(1, false, None)?.f_neg()?)?;
            top_parts.add(top, &chunk, (start, len), &Ok)?;
        }
        if let Some(exact) = exact {
            rows(&logprobs).f_copy_(&exact)?;
        }
        kept = (keep && len == count).then_some(chunk);
    }
    let saved = HeadSaved { logits: kept, lse, entropy: entropy.shallow_clone(), chunk_tokens };
    Ok(HeadOutput { logprobs, entropy, top: top_parts.join(top)?, saved })
}

/// The [`TopScores`] of the chunks so far.
struct TopParts {
    ids: Vec<Tensor>,
    logprobs: Vec<Tensor>,
}

impl TopParts {
    /// Creates an empty part of the right shape.
    fn new(top: TopTokens<'_>, vocab_size: i64, (kind, device): (Kind, Device)) -> Result<Self> {
        let count = match top {
            TopTokens::Nothing => return Ok(Self { ids: Vec::new(), logprobs: Vec::new() }),
            TopTokens::MostProbable(count) => (count as i64).min(vocab_size),
            TopTokens::At(ids) => ids.size()[1],
        };
        let ids = vec![Tensor::f_empty([0, count], (Kind::Int64, device))?];
        Ok(Self { ids, logprobs: vec![Tensor::f_empty([0, count], (kind, device))?] })
    }

    /// Adds the tokens of one chunk, from its values `[c, V]`; `normalized` converts values to log-probabilities.
    fn add(
        &mut self,
        top: TopTokens<'_>,
        values: &Tensor,
        (start, len): (i64, i64),
        normalized: &dyn Fn(Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let (chosen, ids) = match top {
            TopTokens::Nothing => return Ok(()),
            TopTokens::MostProbable(_) => values.f_topk(self.ids[0].size()[1], 1, true, true)?,
            TopTokens::At(ids) => {
                let ids = ids.narrow(0, start, len);
                (values.f_gather(1, &ids, false)?, ids)
            }
        };
        self.logprobs.push(normalized(chosen)?);
        self.ids.push(ids);
        Ok(())
    }

    fn join(self, top: TopTokens<'_>) -> Result<Option<TopScores>> {
        Ok(match top {
            TopTokens::Nothing => None,
            _ => Some(TopScores { ids: Tensor::f_cat(&self.ids, 0)?, logprobs: Tensor::f_cat(&self.logprobs, 0)? }),
        })
    }
}

/// Returns d_hidden, and writes or adds d_weight in place unless the weight is frozen. Inputs are the gradients of the log-probabilities and,
/// optionally, of the entropies and of the `top` tokens (ids, and gradients of their log-probabilities). d_logits = (sum over tokens of dlogprob *
/// (onehot - p) - dentropy * p * (log p + entropy)) / temperature.
///
/// # Errors
/// The errors of [`forward`].
#[allow(clippy::too_many_arguments)]
pub fn backward(
    hidden: &Tensor,  // [C, D]
    weight: &Tensor,  // [V, D]
    targets: &Tensor, // [C] i64
    temperature: f64,
    saved: HeadSaved,
    dlogprobs: &Tensor,        // [C]
    dentropy: Option<&Tensor>, // [C]
    top: Option<[&Tensor; 2]>, // [C, K] i64, [C, K]
    mut dweight: Option<TableSum<'_>>,
) -> Result<Tensor> {
    let (count, kind) = (hidden.size()[0], saved.entropy.kind());
    let (dlogprobs, dentropy) = (dlogprobs.f_to_kind(kind)?, dentropy.map(|d| d.f_to_kind(kind)).transpose()?);
    let dtop = top.map(|[_, dtop]| dtop.f_to_kind(kind)).transpose()?; // [C, K]
    // The sum over all tokens of a row, for the part of the gradient that does not depend on the token.
    let sums = match &dtop {
        Some(dtop) => dlogprobs.f_add(&dtop.f_sum_dim_intlist(1, false, None)?)?,
        None => dlogprobs.shallow_clone(),
    };
    // A weight's gradient is large, and every chunk of tokens would read and write it.
    if let (None, None, Some(TableSum { sum, onto })) = (&saved.logits, top, &mut dweight)
        && count > saved.chunk_tokens
    {
        let gradients = (&dlogprobs, dentropy.as_ref());
        return slices::backward([hidden, weight, targets], temperature, &saved, gradients, (sum, *onto));
    }
    if let (0, Some(TableSum { sum, onto: Onto::Nothing })) = (count, &mut dweight) {
        let _ = sum.f_zero_()?;
    }
    let d_hidden = hidden.f_empty_like()?;
    let mut kept = saved.logits;
    for (start, len) in chunks(count, saved.chunk_tokens) {
        let rows = |t: &Tensor| t.narrow(0, start, len);
        let [targets, lse, entropy, sums, dlogprobs] =
            [targets, &saved.lse, &saved.entropy, &sums, &dlogprobs].map(rows);
        let dentropy = dentropy.as_ref().map(rows);
        // With several tokens per row the kernel gets no targets; each token's own part is added afterwards.
        let kernel_targets = if top.is_some() { targets.f_full_like(-1)? } else { targets.shallow_clone() };
        let of = HeadRows {
            targets: &kernel_targets,
            lse: &lse,
            entropy: &entropy,
            dlogprobs: &sums,
            dentropy: dentropy.as_ref(),
        };
        let at_targets = || -> Result<(Tensor, Tensor)> {
            Ok((targets.unsqueeze(1), dlogprobs.unsqueeze(1).f_div(&scalar(temperature))?))
        };
        let logits = || linear::forward_wide(&rows(hidden), weight);
        let d_logits = if kernels::serve(hidden) {
            let chunk = kept.take().map_or_else(logits, Ok)?;
            let bytes = 1.5 * OpCost::pass(&[&chunk]).bytes;
            let run = || kernels::head_backward(chunk, temperature, &of, weight.kind());
            let d_logits = timed("head, backward", || OpCost { bytes, flop: 0.0 }, run)?;
            if top.is_some() {
                let (ids, own) = at_targets()?;
                add_at(&d_logits, &ids, &own)?;
            }
            d_logits
        } else {
            let chunk = kept.take().map_or_else(|| log_softmax(logits()?, temperature), Ok)?;
            let (ids, own) = at_targets()?;
            d_logits(chunk, temperature, &of)?.f_scatter_add_(1, &ids, &own)?
        };
        if let (Some([ids, _]), Some(dtop)) = (top, &dtop) {
            add_at(&d_logits, &rows(ids), &rows(dtop).f_div(&scalar(temperature))?)?;
        }
        let d_logits = d_logits.f_to_kind(weight.kind())?;
        linear::backward_input_into(&d_logits, weight, &rows(&d_hidden))?;
        if let Some(TableSum { sum, onto }) = &mut dweight {
            linear::weight_gradient(&d_logits, &rows(hidden), sum, *onto)?;
            *onto = Onto::Sum;
        }
    }
    Ok(d_hidden)
}

/// Computes log softmax(logits / temperature), reusing the logits' memory.
fn log_softmax(mut logits: Tensor /* [c, V] */, temperature: f64) -> Result<Tensor> {
    if temperature != 1.0 {
        let _ = logits.f_mul_scalar_(1.0 / temperature)?;
    }
    Ok(logits.f_log_softmax(-1, None::<Kind>)?) // [c, V]
}

/// Adds `values` [c, K] to `d_logits` [c, V] at `ids` [c, K]. Ids must be unique within a row, so that no element is added to twice at once.
fn add_at(d_logits: &Tensor, ids: &Tensor, values: &Tensor) -> Result<()> {
    let sums = d_logits.f_gather(1, ids, false)?.f_to_kind(values.kind())?.f_add(values)?;
    let _ = d_logits.shallow_clone().f_scatter_(1, ids, &sums.f_to_kind(d_logits.kind())?)?;
    Ok(())
}

/// The part of the logits' gradient that does not depend on the target tokens, plus that of the entropy, in the memory of the log-softmax.
fn d_logits(mut log_p: Tensor /* [c, V] */, temperature: f64, of: &HeadRows<'_>) -> Result<Tensor> {
    let scale = of.dlogprobs.unsqueeze(1).f_div(&scalar(temperature))?; // [c, 1]
    Ok(match of.dentropy {
        None => log_p.f_exp_()?.f_mul_(&scale.f_neg()?)?,
        Some(dentropy) => {
            let slope = dentropy.unsqueeze(1).f_div(&scalar(-temperature))?; // [c, 1]
            let shift = of.entropy.unsqueeze(1).f_mul(&slope)?.f_sub(&scale)?;
            log_p.f_mul(&slope)?.f_add_(&shift)?.f_mul_(&log_p.f_exp()?)?
        }
    })
}

/// (start, length) of each chunk; there are no empty chunks.
fn chunks(count: i64, chunk_tokens: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..count).step_by(chunk_tokens as usize).map(move |start| (start, chunk_tokens.min(count - start)))
}

#[cfg(test)]
mod tests;
