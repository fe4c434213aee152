//! Sampling on the GPU: finds the best id in every part of the vocabulary, then the best of all parts.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, address_or_null, invalid, is_aligned, launch_early, ordinal, strided};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::SAMPLE;
pub(super) const NAMES: &[&str] = &["sample_x1", "sample_x8", "sample_processed_x1", "sample_processed_x8", "combine"];

const THREADS: u32 = 512;
/// Ids that a thread processes at once.
const RUN: usize = 8;
/// Number of blocks that fill the largest supported GPU.
const FILLING_BLOCKS: usize = 264;
/// Numbers (f64) per candidate: perturbed value, logit / temperature, log-sum-exp of the part, and id (-1: none).
pub const CANDIDATE_WORDS: i64 = 4;

/// Parameters of the S draws of one step, each from one row of logits.
#[derive(Debug, Clone, Copy)]
pub struct Draws<'a> {
    /// Random keys: [`crate::ops::random::RandomKey::words`] of (seed, stream, step, prompt, sample). [S, 2] i32
    pub keys: &'a Tensor,
    /// Number of tokens so far, which is the position to sample; 0 draws nothing. `[S]` i32
    pub positions: &'a Tensor,
    /// Sampling temperatures; 0 is greedy. `[S]` f32
    pub temperatures: &'a Tensor,
    /// Repetition penalties `[S]` f32, and the ids seen so far, from [`super::mark_seen`].
    pub penalties: Option<(&'a Tensor, &'a Tensor)>,
    /// Results of `filter` for the same logits. [S, 2] i32
    pub cuts: Option<&'a Tensor>,
}

/// Number of parts into which [`sample`] should split a row of logits, so that few rows also fill the GPU.
pub fn sample_parts(draws: usize, vocab_len: usize) -> usize {
    let most = vocab_len.div_ceil(RUN * THREADS as usize).max(1);
    (FILLING_BLOCKS / draws.max(1)).clamp(1, most)
}

/// Finds, for each part of this rank's vocabulary and each draw, the id with the largest logit / temperature + Gumbel noise (ties go to the lowest
/// id), and the log-sum-exp of logits / temperature. Noise, penalty and temperature equal those of the CPU sampler. Allocates nothing.
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
        return Err(invalid(
            OP,
            format!("{num_draws} contiguous rows of logits, one per sampled token"),
            (logits.size(), logits.stride()),
        ));
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
    /// Kernel arguments for penalties and seen ids (null if there are none), and the number of 32-bit words per draw, enough for `num_ids`.
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
            return Err(invalid(op, format!("a bit for each of {num_ids} token ids"), 32 * words));
        }
        let penalties = address(op, penalties, Kind::Float, num_draws, gpu)?;
        Ok(([penalties, address(op, seen, Kind::Int, num_draws * words, gpu)?], words))
    }
}

/// Selects for every draw the best candidate of all parts and ranks. Also returns its ln softmax(logits / temperature), before penalty and filters; a
/// temperature of 0 counts as 1. If the log-sum-exp is not finite, the id is -1 and the log-probability NaN. Allocates nothing.
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
