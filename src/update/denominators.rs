//! Denominators of the token losses in an update.
//!
//! A completion without any reward is excluded from every denominator: the others train as if it had not been sampled, and an outage of a reward
//! server does not shrink the gradient. TRL 1.16 instead gives it the advantage 0 and counts it in the numbers of tokens and sequences and in the KL
//! term. A truncated completion that `mask_truncated_completions` masks counts as in TRL: no tokens, but one sequence.

use crate::config::LossType;
use crate::grpo::Denominators;
use crate::train::Sequence;

/// The denominators of each update's token losses, from the sequences of all ranks.
pub(super) fn denominators(slices: &[Vec<Sequence>], loss_type: LossType) -> Vec<Denominators> {
    let tokens = |slice: &Vec<Sequence>| -> usize {
        slice.iter().filter(|sequence| !sequence.masked).map(Sequence::num_scored).sum()
    };
    let whole = |slice: &Vec<Sequence>| -> usize {
        slice.iter().filter(|sequence| !sequence.masked).map(|sequence| sequence.token_ids.len()).sum()
    };
    let total_tokens: usize = slices.iter().map(tokens).sum();
    let of_slice = |slice: &Vec<Sequence>| Denominators {
        num_sequences: slice.len() as f64,
        num_tokens: match loss_type {
            LossType::Dapo | LossType::Cispo | LossType::Vespo => total_tokens as f64 / slices.len() as f64,
            LossType::Grpo | LossType::DrGrpo | LossType::Bnpo | LossType::Sapo | LossType::Luspo => {
                tokens(slice) as f64
            }
        },
        num_update_tokens: tokens(slice) as f64,
        num_sequence_tokens: whole(slice) as f64,
    };
    slices.iter().map(of_slice).collect()
}

/// Divides an update's sequences, in order, into batches of `batch_size`, or into batches of almost equal size if that does not divide them. The loss
/// is the mean over batches of the mean over each batch's tokens.
pub(super) fn set_bnpo_divisors(slice: &mut [Sequence], batch_size: usize) {
    let (num_sequences, num_batches) = (slice.len(), slice.len().div_ceil(batch_size));
    let end = |batch: usize| (batch + 1) * num_sequences / num_batches;
    let mut rest = slice;
    for batch in 0..num_batches {
        let size = end(batch) - (num_sequences - rest.len());
        let (own, others) = rest.split_at_mut(size);
        let num_tokens: usize = own.iter().filter(|sequence| !sequence.masked).map(Sequence::num_scored).sum();
        let divisor = (num_tokens.max(1) * num_batches) as f64;
        own.iter_mut().for_each(|sequence| sequence.bnpo_divisor = Some(divisor));
        rest = others;
    }
}
