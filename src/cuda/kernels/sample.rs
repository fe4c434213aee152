//! Sampling on the device: the best id of every part of the vocabulary, then the best of all parts.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, address_or_null, invalid, is_aligned, launch_early, ordinal, strided};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::SAMPLE;
pub(super) const NAMES: &[&str] = &["sample_x1", "sample_x8", "sample_processed_x1", "sample_processed_x8", "combine"];

const THREADS: u32 = 512;
/// Ids that a thread takes at once.
const RUN: usize = 8;
/// Blocks that fill the largest GPU served.
const FILLING_BLOCKS: usize = 264;
/// Doubles of a candidate: perturbed value, logit / temperature, log-sum-exp of the part, id (-1: none).
pub const CANDIDATE_WORDS: i64 = 4;

/// The S draws of one step, each from a row of logits.
#[derive(Debug, Clone, Copy)]
pub struct Draws<'a> {
    /// [`crate::ops::random::RandomKey::words`] of (seed, stream, step, prompt, sample). [S, 2] i32
    pub keys: &'a Tensor,
    /// Tokens so far, the position drawn for; 0: nothing is drawn. `[S]` i32
    pub positions: &'a Tensor,
    /// 0 is greedy. `[S]` f32
    pub temperatures: &'a Tensor,
    /// Repetition penalties `[S]` f32 and the ids seen, as [`super::mark_seen`] leaves them.
    pub penalties: Option<(&'a Tensor, &'a Tensor)>,
    /// Cuts that `filter` made of the same logits. [S, 2] i32
    pub cuts: Option<&'a Tensor>,
}

/// Parts that [`sample`] should split a row of logits into, so that few rows fill the GPU, too.
pub fn sample_parts(draws: usize, vocab_len: usize) -> usize {
    let most = vocab_len.div_ceil(RUN * THREADS as usize).max(1);
    (FILLING_BLOCKS / draws.max(1)).clamp(1, most)
}

/// Per part of this rank's vocabulary and draw: the best (logit / temperature + Gumbel noise), ties to the lowest id, and the
/// log-sum-exp of logits / temperature. Noise, penalty and temperature as the host's sampler has them. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn sample(
    logits: &Tensor,         // [S, V of this rank] f32, rows of stride 1
    first_id: usize,         // id of the first column
    draws: &Draws,           // S
    candidates: &mut Tensor, // [parts, S, 4] f64
) -> Result<()> {
    const OP: &str = "sample";
    let (gpu, num_draws) = (ordinal(OP, logits)?, draws.positions.numel());
    let (&[rows, vocab], &[parts, _, CANDIDATE_WORDS]) = (&logits.size()[..], &candidates.size()[..]) else {
        return Err(invalid(OP, "logits [S, V] and candidates [parts, S, 4]", (logits.size(), candidates.size())));
    };
    let &[row_stride, column_stride] = &logits.stride()[..] else { unreachable!("a matrix has two strides") };
    if vocab == 0 || rows != num_draws as i64 || column_stride != 1 {
        return Err(invalid(OP, format!("{num_draws} rows of logits"), (logits.size(), logits.stride())));
    }
    let ([penalties, seen], words) = draws.penalty_arguments(OP, first_id + vocab as usize, gpu)?;
    let arguments = [
        strided(OP, logits, Kind::Float, &[rows, vocab], gpu)?,
        address(OP, draws.keys, Kind::Int, 2 * num_draws, gpu)?,
        address(OP, draws.positions, Kind::Int, num_draws, gpu)?,
        address(OP, draws.temperatures, Kind::Float, num_draws, gpu)?,
        penalties,
        seen,
        address_or_null(OP, draws.cuts, Kind::Int, 2 * num_draws, gpu)?,
        address(OP, candidates, Kind::Double, parts as usize * num_draws * 4, gpu)?,
        Argument::Count(num_draws as i64),
        Argument::Count(vocab),
        Argument::Count(row_stride),
        Argument::Count(first_id as i64),
        Argument::Count(parts),
        Argument::Count(words as i64),
    ];
    let is_aligned =
        [first_id, vocab as usize, row_stride as usize].iter().all(|len| len.is_multiple_of(RUN)) && is_aligned(logits);
    let processed = if draws.penalties.is_some() || draws.cuts.is_some() { "_processed" } else { "" };
    let name = format!("sample{processed}_x{}", if is_aligned { RUN } else { 1 });
    // SAFETY: the kernel's parameters in order; one block a part of a draw.
    unsafe { launch_early(SOURCE, &name, gpu, ((parts as usize * num_draws) as u32, THREADS, 0), &arguments) }
}

impl Draws<'_> {
    /// Penalties and the ids seen, or nulls; and how many words of 32 ids a draw has, enough for `num_ids`.
    pub(super) fn penalty_arguments(
        &self,
        op: &'static str,
        num_ids: usize,
        gpu: usize,
    ) -> Result<([Argument; 2], usize)> {
        let Some((penalties, seen)) = self.penalties else {
            return Ok(([Argument::NULL; 2], 0));
        };
        let num_draws = self.positions.numel();
        let words = seen.numel() / num_draws.max(1);
        if 32 * words < num_ids {
            return Err(invalid(op, format!("a bit for each of {num_ids} ids"), 32 * words));
        }
        let penalties = address(op, penalties, Kind::Float, num_draws, gpu)?;
        Ok(([penalties, address(op, seen, Kind::Int, num_draws * words, gpu)?], words))
    }
}

/// The winner of every draw among the candidates of all parts and ranks, and ln softmax(logits / temperature) of it before
/// penalty and filters, temperature 0 counting as 1. Where the log-sum-exp is not finite the id is -1 and the log-probability
/// not a number. Allocates nothing.
///
/// # Errors
/// The errors of [`sample`].
pub fn combine(
    candidates: &Tensor,    // [parts of all ranks, S, 4] f64
    token_ids: &mut Tensor, // [S] i32
    logprobs: &mut Tensor,  // [S] f32
) -> Result<()> {
    const OP: &str = "combine";
    let (gpu, draws) = (ordinal(OP, candidates)?, token_ids.numel());
    let parts = candidates.numel() / (4 * draws.max(1));
    let arguments = [
        address(OP, candidates, Kind::Double, parts * draws * 4, gpu)?,
        address(OP, token_ids, Kind::Int, draws, gpu)?,
        address(OP, logprobs, Kind::Float, draws, gpu)?,
        Argument::Count(draws as i64),
        Argument::Count(parts as i64),
    ];
    // SAFETY: the kernel's parameters in order; a warp a draw.
    unsafe { launch_early(SOURCE, OP, gpu, (draws as u32, 32, 0), &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("THREADS", THREADS as usize), ("RUN", RUN)]);
    }
}
