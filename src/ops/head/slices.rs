//! The head's backward in slices of the vocabulary, for many tokens at once. The weight's gradient is as large as the logits of thousands of tokens.
//! Slices read and write it once in total; chunks of tokens would read and write it once per chunk.

use tch::{Kind, Tensor};

use super::{HeadSaved, chunks, d_logits};
use crate::cuda::kernels::{self, HeadRows};
use crate::cuda::{OpCost, timed};
use crate::error::Result;
use crate::ops::linear::{self, Onto};
use crate::torch::scalar;

/// Slices are multiples of this many columns, so that GEMMs have whole tiles.
const TILE: i64 = 128;

/// Numbers of tokens and columns that are computed at once, such that their float32 logits, and the sums of the tokens' gradients [tokens, D], need
/// no more memory than a chunk of tokens with all of its logits.
fn shape([count, hidden, vocabulary]: [i64; 3], chunk_tokens: i64) -> (i64, i64) {
    let elements = chunk_tokens * vocabulary;
    let most = (elements / (3 * hidden)).max(1); // the sums take at most a third
    let tokens = (count as u64).div_ceil((count as u64).div_ceil(most as u64)) as i64; // groups of about equal size
    let width = ((elements - tokens * hidden) / tokens).clamp(1, vocabulary);
    (tokens, if width > TILE { width / TILE * TILE } else { width })
}

/// Computes [`super::backward`] for targets only, including d_weight.
///
/// # Errors
/// The errors of [`super::backward`].
pub(super) fn backward(
    [hidden, weight, targets]: [&Tensor; 3], // [C, D], [V, D], [C] i64
    temperature: f64,
    saved: &HeadSaved,
    (dlogprobs, dentropy): (&Tensor, Option<&Tensor>), // [C] each
    (dweight, mut onto): (&mut Tensor, Onto),          // [V, D]
) -> Result<Tensor> {
    let d_hidden = hidden.f_empty_like()?;
    let (size, vocabulary) = (hidden.size(), weight.size()[0]);
    let (tokens, width) = shape([size[0], size[1], vocabulary], saved.chunk_tokens);
    for (start, len) in chunks(size[0], tokens) {
        let rows = |t: &Tensor| t.narrow(0, start, len);
        let [hidden, targets, lse, entropy, dlogprobs] =
            [hidden, targets, &saved.lse, &saved.entropy, dlogprobs].map(rows);
        let dentropy = dentropy.map(rows);
        let mut sums = Tensor::f_zeros(hidden.size(), (saved.entropy.kind(), hidden.device()))?; // [tokens, D]
        for (first, columns) in chunks(vocabulary, width) {
            let weight = weight.narrow(0, first, columns);
            // A target in another slice matches no column of this one.
            let targets = targets.f_sub_scalar(first)?;
            let of = HeadRows {
                targets: &targets,
                lse: &lse,
                entropy: &entropy,
                dlogprobs: &dlogprobs,
                dentropy: dentropy.as_ref(),
            };
            let logits = linear::forward_wide(&hidden, &weight)?;
            let d_logits = gradient(logits, temperature, &of, weight.kind())?;
            linear::accumulate_input(&d_logits, &weight, &mut sums)?;
            linear::weight_gradient(&d_logits, &hidden, &mut dweight.narrow(0, first, columns), onto)?;
        }
        onto = Onto::Sum;
        rows(&d_hidden).f_copy_(&sums)?;
    }
    Ok(d_hidden)
}

/// The gradient of some columns of the logits.
fn gradient(logits: Tensor /* [c, W] */, temperature: f64, of: &HeadRows<'_>, kind: Kind) -> Result<Tensor> {
    if kernels::serve(&logits) {
        let bytes = 1.5 * OpCost::pass(&[&logits]).bytes;
        let run = || kernels::head_backward(logits, temperature, of, kind);
        return timed("head, backward", || OpCost { bytes, flop: 0.0 }, run);
    }
    let columns = logits.size()[1];
    let log_p = logits.f_mul_scalar(1.0 / temperature)?.f_sub(&of.lse.f_unsqueeze(1)?)?;
    let is_inside = of.targets.f_ge(0)?.f_logical_and(&of.targets.f_lt(columns)?)?;
    let own = of.dlogprobs.f_div(&scalar(temperature))?.f_mul(&is_inside)?;
    let at = of.targets.f_clamp(0, columns - 1)?;
    let d = d_logits(log_p, temperature, of)?.f_scatter_add_(1, &at.f_unsqueeze(1)?, &own.f_unsqueeze(1)?)?;
    Ok(d.f_to_kind(kind)?)
}

#[cfg(test)]
mod tests {
    use super::super::{TableSum, TopTokens, forward};
    use super::*;
    use crate::ops::testing::rand;

    /// Covers one chunk, slices, chunks with several tokens per row, and no scored tokens.
    #[test]
    fn head_gradient_written_equals_added_to_zeros() {
        for (count, chunk, with_top) in [(70, 100, false), (70, 9, false), (70, 9, true), (0, 9, false)] {
            for kind in [Kind::Float, Kind::BFloat16] {
                let [hidden, weight] = [[count, 24], [90, 24]].map(|size| rand(&size).to_kind(kind));
                let [targets, ids] =
                    [&[count][..], &[count, 1]].map(|size| Tensor::randint(90, size, (Kind::Int64, tch::Device::Cpu)));
                let [d, d_top] = [&[count][..], &[count, 1]].map(rand);
                let gradient = |fill: f64, onto| {
                    let score = forward(&hidden, &weight, &targets, 0.7, TopTokens::Nothing, chunk, true).unwrap();
                    let mut dw = Tensor::full([90, 24], fill, (Kind::Float, tch::Device::Cpu));
                    let (top, into) = (with_top.then_some([&ids, &d_top]), Some(TableSum { sum: &mut dw, onto }));
                    drop(super::super::backward(&hidden, &weight, &targets, 0.7, score.saved, &d, Some(&d), top, into));
                    dw
                };
                let [added, written] = [gradient(0.0, Onto::Sum), gradient(f64::NAN, Onto::Nothing)];
                assert!(added.equal(&written), "{count} {chunk} {with_top} {kind:?}");
                assert_eq!(added.abs().max().double_value(&[]) > 0.0, count > 0);
            }
        }
    }

    #[test]
    fn head_slices_need_at_most_one_chunk_of_memory() {
        // Qwen2.5-7B and 0.5B with chunks of 768 tokens; the last case has too few tokens for a whole tile.
        assert_eq!(shape([8192, 3584, 152_064], 768), (8192, 10_624));
        assert_eq!(shape([16_384, 3584, 152_064], 768), (8192, 10_624));
        assert_eq!(shape([8192, 896, 151_936], 768), (8192, 13_312));
        assert_eq!(shape([7, 4, 9], 1), (1, 5));
        assert_eq!(shape([7, 4, 9], 4), (3, 8));
        for [count, hidden, vocabulary, chunk] in
            [[8192, 3584, 152_064, 768], [100_000, 8192, 128_256, 1024], [4096, 64, 512, 100], [7, 4, 9, 3]]
        {
            let (tokens, width) = shape([count, hidden, vocabulary], chunk);
            assert!(tokens * (hidden + width) <= chunk * vocabulary && width >= 1, "{count} {tokens} {width}");
        }
    }
}
