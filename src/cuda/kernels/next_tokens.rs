//! Input tokens of a step that follows one whose results the host has not yet read.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, blocks, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::NEXT_TOKENS;
pub(super) const NAMES: &[&str] = &["next_tokens"];

const THREADS: usize = 256;

/// Fills token_ids from `from`: a non-negative entry is a token id; the bitwise complement of a row index stands for the token that this row has
/// sampled. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn next_tokens(
    from: &Tensor,          // [S] i32
    sampled: &Tensor,       // [rows] i32, rows that `from` names
    token_ids: &mut Tensor, // [S] i32
) -> Result<()> {
    const OP: &str = "next_tokens";
    let (gpu, count) = (ordinal(OP, from)?, from.numel());
    let arguments = [
        address(OP, from, Kind::Int, count, gpu)?,
        address(OP, sampled, Kind::Int, sampled.numel(), gpu)?,
        address(OP, token_ids, Kind::Int, count, gpu)?,
        Argument::Count(count as i64),
    ];
    let grid = blocks(count, THREADS, usize::MAX);
    // SAFETY: the kernel's parameters in order; rows are the caller's.
    unsafe { launch(SOURCE, OP, gpu, (grid, THREADS as u32, 0), &arguments) }
}
