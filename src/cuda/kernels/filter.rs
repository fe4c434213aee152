//! min-p, top-k and top-p filtering on the GPU.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, invalid, launch_early, ordinal};
use super::sample::Draws;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::FILTER;
pub(super) const NAMES: &[&str] = &["filter"];

const THREADS: u32 = 1024;

/// min-p, top-k and top-p for every draw; each may be off.
#[derive(Debug, Clone, Copy)]
pub struct Filters<'a> {
    /// Values of min-p; 0 is off. `[S]` f32
    pub min_p: &'a Tensor,
    /// Values of top-k; 0 is off. `[S]` i32
    pub top_k: &'a Tensor,
    /// Values of top-p; 1 is off. `[S]` f32
    pub top_p: &'a Tensor,
}

/// Filters whole rows of logits, after penalty and temperature, by min-p, then top-k, then top-p, like the CPU sampler. Greedy draws keep all ids.
/// With tensor parallelism an all-to-all first collects the shards of each row, so that each rank filters its own rows: the draws from `first` on.
/// Allocates nothing.
///
/// # Errors
/// The errors of `sample` for the same tensors.
pub fn filter(
    logits: &Tensor, // [shards, R, at least V / shards] f32
    vocab: usize,    // V; shard k of n has the ids V k / n .. V (k + 1) / n
    first: usize,    // the draw of row 0
    draws: &Draws,   // S; `cuts` is not read
    filters: &Filters,
    cuts: &mut Tensor, // [R, 2] i32
) -> Result<()> {
    const OP: &str = "filter";
    let (gpu, num_draws) = (ordinal(OP, logits)?, draws.positions.numel());
    let &[shards, rows, stride] = &logits.size()[..] else {
        return Err(invalid(OP, "logits [shards, R, V / shards]", logits.size()));
    };
    if shards == 0 || stride < (vocab as i64 + shards - 1) / shards {
        return Err(invalid(OP, format!("shards of {vocab} ids"), logits.size()));
    }
    let ([penalties, seen], words) = draws.penalty_arguments(OP, vocab, gpu)?;
    let arguments = [
        address(OP, logits, Kind::Float, (shards * rows * stride) as usize, gpu)?,
        address(OP, draws.positions, Kind::Int, num_draws, gpu)?,
        address(OP, draws.temperatures, Kind::Float, num_draws, gpu)?,
        penalties,
        seen,
        address(OP, filters.min_p, Kind::Float, num_draws, gpu)?,
        address(OP, filters.top_k, Kind::Int, num_draws, gpu)?,
        address(OP, filters.top_p, Kind::Float, num_draws, gpu)?,
        address(OP, cuts, Kind::Int, 2 * rows as usize, gpu)?,
        Argument::Count(first as i64),
        Argument::Count(rows),
        Argument::Count(stride),
        Argument::Count(vocab as i64),
        Argument::Count(shards),
        Argument::Count(words as i64),
    ];
    let blocks = num_draws.saturating_sub(first).min(rows as usize) as u32;
    // SAFETY: the kernel's parameters in order; one block a row that has a draw.
    unsafe { launch_early(SOURCE, OP, gpu, (blocks, THREADS, 0), &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("THREADS", THREADS as usize)]);
    }
}
