//! Log-probabilities of given tokens, and entropies, of the language-model head; chunked over tokens so that [C, V] never
//! exists beyond one chunk. Logits are kept in the accumulation kind: a bfloat16 one near 20 is off by up to 0.06.

use crate::cuda::kernels::{self, HeadRows};
use crate::cuda::{OpCost, timed};
use crate::error::Result;
use crate::ops::{linear, try_map};
use crate::torch::{accumulation_kind, scalar};
use tch::{Kind, Tensor};

/// Results of [`forward`].
#[derive(Debug)]
pub struct HeadOutput {
    /// Log-probability of each target in nats at the temperature. `[C]`, accumulation kind
    pub logprobs: Tensor,
    /// Entropy of each distribution in nats at the temperature. `[C]`, accumulation kind
    pub entropy: Tensor,
    /// For the backward.
    pub saved: HeadSaved,
}

/// Results that [`backward`] needs: the logits where they were one chunk, else they are computed again.
#[derive(Debug)]
pub struct HeadSaved {
    logits: Option<Tensor>, // [C, V], accumulation kind; on a CPU their log-softmax
    lse: Tensor,            // [C], of the logits over the temperature; on a GPU only
    entropy: Tensor,        // [C]
    chunk_tokens: i64,
}

/// log softmax(hidden weight^T / temperature) at the targets, and its entropy. `keep` says whether a backward will follow.
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; those of the kernel.
pub fn forward(
    hidden: &Tensor,  // [C, D]
    weight: &Tensor,  // [V, D]
    targets: &Tensor, // [C] i64
    temperature: f64,
    chunk_tokens: usize,
    keep: bool,
) -> Result<HeadOutput> {
    let count = hidden.size()[0];
    let chunk_tokens = (chunk_tokens as i64).max(1);
    let options = (accumulation_kind(hidden.kind()), hidden.device());
    let [logprobs, entropy, lse] = try_map([(); 3], |()| Ok(Tensor::f_empty([count], options)?))?;
    let mut kept = None;
    for (start, len) in chunks(count, chunk_tokens) {
        let rows = |t: &Tensor| t.narrow(0, start, len);
        let mut chunk = linear::forward_wide(&rows(hidden), weight)?; // [c, V]
        if kernels::serve(hidden) {
            let outputs = [&rows(&logprobs), &rows(&entropy), &rows(&lse)];
            let run = || kernels::head_forward(&chunk, &rows(targets), temperature, outputs);
            timed("head", || OpCost::pass(&[&chunk]), run)?;
        } else {
            chunk = log_softmax(chunk, temperature)?;
            rows(&logprobs).f_copy_(&chunk.f_gather(1, &rows(targets).unsqueeze(1), false)?.squeeze_dim(1))?;
            let terms = chunk.f_exp()?.f_mul_(&chunk)?;
            rows(&entropy).f_copy_(&terms.f_sum_dim_intlist(1, false, None)?.f_neg()?)?;
        }
        kept = (keep && len == count).then_some(chunk);
    }
    let saved = HeadSaved { logits: kept, lse, entropy: entropy.shallow_clone(), chunk_tokens };
    Ok(HeadOutput { logprobs, entropy, saved })
}

/// d_hidden, and d_weight added in place unless the weight is frozen, from the gradients of the log-probabilities and, where
/// given, the entropies: d_logits = (dlogprobs * (onehot - p) - dentropy * p * (log p + entropy)) / temperature.
///
/// # Errors
/// As [`forward`].
#[allow(clippy::too_many_arguments)]
pub fn backward(
    hidden: &Tensor,  // [C, D]
    weight: &Tensor,  // [V, D]
    targets: &Tensor, // [C] i64
    temperature: f64,
    saved: HeadSaved,
    dlogprobs: &Tensor,               // [C]
    dentropy: Option<&Tensor>,        // [C]
    mut dweight: Option<&mut Tensor>, // [V, D]
) -> Result<Tensor> {
    let (count, kind) = (hidden.size()[0], saved.entropy.kind());
    let d_hidden = hidden.f_empty_like()?;
    let (dlogprobs, dentropy) = (dlogprobs.f_to_kind(kind)?, dentropy.map(|d| d.f_to_kind(kind)).transpose()?);
    let mut kept = saved.logits;
    for (start, len) in chunks(count, saved.chunk_tokens) {
        let rows = |t: &Tensor| t.narrow(0, start, len);
        let [targets, lse, entropy, dlogprobs] = [targets, &saved.lse, &saved.entropy, &dlogprobs].map(rows);
        let dentropy = dentropy.as_ref().map(rows);
        let of = HeadRows {
            targets: &targets,
            lse: &lse,
            entropy: &entropy,
            dlogprobs: &dlogprobs,
            dentropy: dentropy.as_ref(),
        };
        let logits = || linear::forward_wide(&rows(hidden), weight);
        let d_logits = if kernels::serve(hidden) {
            let chunk = kept.take().map_or_else(logits, Ok)?;
            let bytes = 1.5 * OpCost::pass(&[&chunk]).bytes;
            let run = || kernels::head_backward(chunk, temperature, &of, weight.kind());
            timed("head, backward", || OpCost { bytes, flop: 0.0 }, run)?
        } else {
            let chunk = kept.take().map_or_else(|| log_softmax(logits()?, temperature), Ok)?;
            d_logits(chunk, temperature, &of)?.f_to_kind(weight.kind())?
        };
        linear::backward_input_into(&d_logits, weight, &rows(&d_hidden))?;
        if let Some(dweight) = &mut dweight {
            linear::accumulate_weight(&d_logits, &rows(hidden), dweight)?;
        }
    }
    Ok(d_hidden)
}

/// log softmax(logits / temperature), from logits that are not needed any more.
fn log_softmax(mut logits: Tensor /* [c, V] */, temperature: f64) -> Result<Tensor> {
    if temperature != 1.0 {
        let _ = logits.f_mul_scalar_(1.0 / temperature)?;
    }
    Ok(logits.f_log_softmax(-1, None::<Kind>)?) // [c, V]
}

/// The gradient of the logits, in the memory of their log-softmax.
fn d_logits(mut log_p: Tensor /* [c, V] */, temperature: f64, of: &HeadRows<'_>) -> Result<Tensor> {
    let scale = of.dlogprobs.unsqueeze(1).f_div(&scalar(temperature))?; // [c, 1]
    let mut d_logits = match of.dentropy {
        None => log_p.f_exp_()?.f_mul_(&scale.f_neg()?)?,
        Some(dentropy) => {
            let slope = dentropy.unsqueeze(1).f_div(&scalar(-temperature))?; // [c, 1]
            let shift = of.entropy.unsqueeze(1).f_mul(&slope)?.f_sub(&scale)?;
            log_p.f_mul(&slope)?.f_add_(&shift)?.f_mul_(&log_p.f_exp()?)?
        }
    };
    Ok(d_logits.f_scatter_add_(1, &of.targets.unsqueeze(1), &scale)?)
}

/// (start, length) of each chunk; one empty chunk never.
fn chunks(count: i64, chunk_tokens: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..count).step_by(chunk_tokens as usize).map(move |start| (start, chunk_tokens.min(count - start)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    const TEMPERATURE: f64 = 0.7;

    fn reference(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> (Tensor, Tensor) {
        let logits = hidden.matmul(&weight.transpose(0, 1)) / TEMPERATURE;
        let log_p = &logits - logits.logsumexp([-1i64], true);
        let entropy = -(log_p.exp() * &log_p).sum_dim_intlist(-1, false, None);
        (log_p.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1), entropy)
    }

    #[test]
    fn chunked_and_whole_match_autograd() {
        let (hidden, weight) = (leaf(&rand(&[7, 4])), leaf(&rand(&[9, 4])));
        let targets = Tensor::from_slice(&[0i64, 8, 3, 3, 1, 0, 5]);
        let (logprobs, entropy) = reference(&hidden, &weight, &targets);
        let (d_logprobs, d_entropy) = (rand(&[7]), rand(&[7]));
        for dentropy in [None, Some(&d_entropy)] {
            let scalar =
                (&logprobs * &d_logprobs).sum(None) + dentropy.map_or(Tensor::from(0.0), |d| (&entropy * d).sum(None));
            let grads = Tensor::run_backward(&[scalar], &[&hidden, &weight], true, false);
            for (chunk, keep) in [(100, true), (7, false), (3, true), (1, false)] {
                let (hidden, weight) = (hidden.detach(), weight.detach());
                let out = forward(&hidden, &weight, &targets, TEMPERATURE, chunk, keep).unwrap();
                assert_close(&out.logprobs, &logprobs);
                assert_close(&out.entropy, &entropy);
                let mut dweight = rand(&[9, 4]);
                let before = dweight.copy();
                let d = backward(
                    &hidden,
                    &weight,
                    &targets,
                    TEMPERATURE,
                    out.saved,
                    &d_logprobs,
                    dentropy,
                    Some(&mut dweight),
                )
                .unwrap();
                assert_close(&d, &grads[0]);
                assert_close(&dweight, &(before + &grads[1]));
            }
        }
    }

    #[test]
    fn no_scored_tokens() {
        let (hidden, weight, targets) =
            (rand(&[0, 4]), rand(&[9, 4]), Tensor::zeros([0], (Kind::Int64, tch::Device::Cpu)));
        let out = forward(&hidden, &weight, &targets, 1.0, 8, true).unwrap();
        let mut dweight = rand(&[9, 4]);
        let before = dweight.copy();
        let d = backward(&hidden, &weight, &targets, 1.0, out.saved, &out.logprobs, None, Some(&mut dweight)).unwrap();
        assert_eq!(d.size(), [0, 4]);
        assert!(dweight.equal(&before));
    }

    #[test]
    fn statistics_of_bfloat16_are_float() {
        let hidden = rand(&[2, 4]).to_kind(Kind::BFloat16);
        let out = forward(&hidden, &hidden, &Tensor::from_slice(&[0i64, 1]), 1.0, 8, true).unwrap();
        assert_eq!(out.logprobs.kind(), Kind::Float);
        let mut dweight = Tensor::zeros([2, 4], (Kind::Float, tch::Device::Cpu));
        let d = backward(
            &hidden,
            &hidden,
            &Tensor::from_slice(&[0i64, 1]),
            1.0,
            out.saved,
            &out.logprobs,
            None,
            Some(&mut dweight),
        )
        .unwrap();
        assert_eq!(d.kind(), Kind::BFloat16);
    }
}
