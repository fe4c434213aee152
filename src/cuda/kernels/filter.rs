//! Kernels that filter logits by min-p, top-k and top-p.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, invalid, launch_early, ordinal};
use super::sample::Draws;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::FILTER;
pub(super) const NAMES: &[&str] = &["filter_heads", "filter"];

const THREADS: u32 = 512;
/// Number of token ids that a thread processes at once.
const RUN: usize = 8;
/// Maximum number of parts of a row.
const MOST_PARTS: usize = 16;
/// Number of thread blocks that fill the largest supported GPU.
const FILLING_BLOCKS: usize = 264;
/// Number of 64-bit words of one part's intermediate result: its best ids, their number and its probability mass.
pub const FILTER_HEAD_WORDS: i64 = 258;

/// Number of parts that [`filter`] should split each row into, so that even a few rows fill the GPU.
pub fn filter_parts(rows: usize, vocab: usize) -> usize {
    let most = vocab.div_ceil(RUN * THREADS as usize).clamp(1, MOST_PARTS);
    (FILLING_BLOCKS / rows.max(1)).clamp(1, most)
}

/// Maximum number of parts of all rows together, if there are at most `rows` rows.
pub fn most_filter_parts(rows: usize) -> usize {
    rows.max(FILLING_BLOCKS.min(MOST_PARTS * rows))
}

/// The values of min-p, top-k and top-p for every draw; each filter may be off.
#[derive(Debug, Clone, Copy)]
pub struct Filters<'a> {
    /// Values of min-p; 0 is off. `[S]` f32
    pub min_p: &'a Tensor,
    /// Values of top-k; 0 is off. `[S]` i32
    pub top_k: &'a Tensor,
    /// Values of top-p; 1 is off. `[S]` f32
    pub top_p: &'a Tensor,
}

/// Filters whole rows of logits, after penalty and temperature: by min-p, then top-k, then top-p, like the sampler on a CPU. Greedy draws keep all
/// ids. With tensor parallelism an all-to-all first gathers the shards of each row on one rank; this rank then has the rows of draws `first ..`, of
/// which some may be padding. Ids at minus infinity are not counted. If a top-p filter needs the mass of a whole row, the number of parts may change
/// the last bits of that mass. Allocates nothing.
///
/// # Errors
/// The errors of `sample` for the same tensors.
pub fn filter(
    logits: &Tensor, // [shards, R, at least V / shards] f32
    vocab: usize,    // V; shard k of n has the ids V k / n .. V (k + 1) / n
    first: usize,    // the draw of row 0
    draws: &Draws,   // S; `cuts` is not read
    filters: &Filters,
    heads: &mut Tensor, // [R, parts, FILTER_HEAD_WORDS] i64
    cuts: &mut Tensor,  // [R, 2] i32
) -> Result<()> {
    const OP: &str = "filter";
    let (gpu, num_draws) = (ordinal(OP, logits)?, draws.positions.numel());
    let &[shards, rows, stride] = &logits.size()[..] else {
        return Err(invalid(OP, "logits [shards, R, V / shards]", logits.size()));
    };
    if shards == 0 || stride < (vocab as i64 + shards - 1) / shards {
        return Err(invalid(OP, format!("shards of {vocab} ids"), logits.size()));
    }
    let parts = match heads.size()[..] {
        [_, parts, FILTER_HEAD_WORDS] if (1..=MOST_PARTS as i64).contains(&parts) => parts,
        _ => return Err(invalid(OP, "heads [R, parts, FILTER_HEAD_WORDS] of at most 16 parts", heads.size())),
    };
    let ([penalties, seen], words) = draws.penalty_arguments(OP, vocab, gpu)?;
    let inputs = [
        address(OP, logits, Kind::Float, (shards * rows * stride) as usize, gpu)?,
        address(OP, draws.positions, Kind::Int, num_draws, gpu)?,
        address(OP, draws.temperatures, Kind::Float, num_draws, gpu)?,
        penalties,
        seen,
        address(OP, filters.min_p, Kind::Float, num_draws, gpu)?,
        address(OP, filters.top_k, Kind::Int, num_draws, gpu)?,
        address(OP, filters.top_p, Kind::Float, num_draws, gpu)?,
        address(OP, heads, Kind::Int64, (rows * parts * FILTER_HEAD_WORDS) as usize, gpu)?,
    ];
    let cuts = address(OP, cuts, Kind::Int, 2 * rows as usize, gpu)?;
    let sizes = [parts, first as i64, rows, stride, vocab as i64, shards, words as i64].map(Argument::Count);
    let blocks = num_draws.saturating_sub(first).min(rows as usize) as u32;
    // SAFETY: the arguments are in the order of the kernel's parameters; each part of a row with a draw has one block.
    unsafe {
        let shape = (blocks * parts as u32, THREADS, 0);
        launch_early(SOURCE, "filter_heads", gpu, shape, &[&inputs[..], &sizes].concat())?;
    }
    // SAFETY: the arguments are in the order of the kernel's parameters; each row with a draw has one block.
    unsafe { launch_early(SOURCE, OP, gpu, (blocks, THREADS, 0), &[&inputs[..], &[cuts], &sizes].concat()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        let constants = [
            ("THREADS", THREADS as usize),
            ("RUN", RUN),
            ("MOST_PARTS", MOST_PARTS),
            ("HEAD_WORDS", FILTER_HEAD_WORDS as usize),
        ];
        assert_declared(SOURCE, &constants);
    }

    #[test]
    fn parts_of_fewer_rows_fit_where_those_of_more_do() {
        for most in [1, 7, 16, 17, 100, 256, 264, 265, 1000] {
            let room = most_filter_parts(most);
            assert!((1..=most).all(|rows| rows * filter_parts(rows, 152_064) <= room), "{most}");
        }
        assert_eq!([1, 17, 64, 256, 1000].map(|rows| filter_parts(rows, 152_064)), [16, 15, 4, 1, 1]);
        assert_eq!(filter_parts(1, 63), 1);
    }
}
