//! Keeps track of the ids that precede every draw, for repetition penalties.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, blocks, invalid, launch_early, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::SEEN;
pub(super) const NAMES: &[&str] = &["note_tokens", "mark_seen"];

const THREADS: usize = 512;

/// Writes `history[slots] = token_ids`: a step's tokens, at the slots of their keys and values. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn note_tokens(
    token_ids: &Tensor, // [T] i32
    slots: &Tensor,     // [T] i32, -1: padding
    history: &Tensor,   // [slots] i32
) -> Result<()> {
    const OP: &str = "note_tokens";
    let (gpu, count) = (ordinal(OP, token_ids)?, token_ids.numel());
    let arguments = [
        address(OP, token_ids, Kind::Int, count, gpu)?,
        address(OP, slots, Kind::Int, count, gpu)?,
        address(OP, history, Kind::Int, history.numel(), gpu)?,
        Argument::Count(count as i64),
    ];
    let grid = blocks(count, THREADS, usize::MAX);
    // SAFETY: the kernel's parameters in order; slots are the caller's.
    unsafe { launch_early(SOURCE, OP, gpu, (grid, THREADS as u32, 0), &arguments) }
}

/// Sets bit `id` of row s if the sequence of draw s contains `id` so far. Allocates nothing.
///
/// # Errors
/// The errors of [`note_tokens`].
pub fn mark_seen(
    history: &Tensor,      // [num_blocks, block_size] i32, filled by `note_tokens`
    block_tables: &Tensor, // [S, max_blocks] i32
    lens: &Tensor,         // [S] i32, tokens so far
    seen: &mut Tensor,     // [S, at least V / 32] i32
) -> Result<()> {
    const OP: &str = "mark_seen";
    let (gpu, draws) = (ordinal(OP, history)?, lens.numel());
    let (&[_, block_size], &[_, max_blocks], &[_, words]) =
        (&history.size()[..], &block_tables.size()[..], &seen.size()[..])
    else {
        let got = (history.size(), block_tables.size(), seen.size());
        return Err(invalid(
            OP,
            "history [num_blocks, block_size], block tables [S, max_blocks] and seen bits [S, words]",
            got,
        ));
    };
    let arguments = [
        address(OP, history, Kind::Int, history.numel(), gpu)?,
        address(OP, block_tables, Kind::Int, draws * max_blocks as usize, gpu)?,
        address(OP, lens, Kind::Int, draws, gpu)?,
        address(OP, seen, Kind::Int, draws * words as usize, gpu)?,
        Argument::Count(max_blocks),
        Argument::Count(block_size),
        Argument::Count(words),
    ];
    // SAFETY: the kernel's parameters in order; one block a draw. Blocks and ids are the caller's.
    unsafe { launch_early(SOURCE, OP, gpu, (draws as u32, THREADS as u32, 0), &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("THREADS", THREADS)]);
    }
}
