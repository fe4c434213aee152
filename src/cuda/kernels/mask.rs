//! Masks rows of a batch: inner products of adapters that a row does not use, and token ids that its output structure forbids.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, blocks, invalid, kind_name, launch_early, ordinal, strided};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::MASK;
pub(super) const NAMES: &[&str] = &["mask_low_f32", "mask_low_bf16", "mask_logits"];

const THREADS: usize = 256;
/// Most blocks per row of logits.
const MOST_PARTS: usize = 64;

/// Sets a row's inner products with adapters other than its own to zero. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn mask_low(
    low: &Tensor,      // [T, k] f32 or bf16
    owners: &Tensor,   // [k] i32, the adapter of each column
    adapters: &Tensor, // [T] i32, the adapter of each row, -1: none
) -> Result<()> {
    const OP: &str = "mask_low";
    let gpu = ordinal(OP, low)?;
    let &[rows, columns] = &low.size()[..] else { return Err(invalid(OP, "a tensor [T, k]", low.size())) };
    let arguments = [
        address(OP, low, low.kind(), (rows * columns) as usize, gpu)?,
        address(OP, owners, Kind::Int, columns as usize, gpu)?,
        address(OP, adapters, Kind::Int, rows as usize, gpu)?,
        Argument::Count(rows),
        Argument::Count(columns),
    ];
    let grid = blocks((rows * columns) as usize, THREADS, usize::MAX);
    let name = format!("{OP}_{}", kind_name(OP, low)?);
    // SAFETY: the kernel's parameters in order; a thread an element.
    unsafe { launch_early(SOURCE, &name, gpu, (grid, THREADS as u32, 0), &arguments) }
}

/// Sets the logits of ids that a row's mask forbids to minus infinity, in place. Allocates nothing.
///
/// # Errors
/// The errors of [`mask_low`].
pub fn mask_logits(
    logits: &Tensor, // [S, V of this rank] f32, rows of stride 1
    first_id: usize, // id of the first column
    places: &Tensor, // [S] i32, the mask of each row, -1: all ids are allowed
    masks: &Tensor,  // [masks, at least V / 32] i32, bits by id
) -> Result<()> {
    const OP: &str = "mask_logits";
    let gpu = ordinal(OP, logits)?;
    let (&[rows, vocab], &[num_masks, words]) = (&logits.size()[..], &masks.size()[..]) else {
        return Err(invalid(OP, "logits [S, V] and masks [masks, words]", (logits.size(), masks.size())));
    };
    if logits.stride()[1] != 1 || 32 * words < first_id as i64 + vocab {
        let expected = format!("contiguous rows and a mask bit for each of {} token ids", first_id as i64 + vocab);
        return Err(invalid(OP, expected, (logits.stride(), masks.size())));
    }
    let parts = (vocab as usize).div_ceil(THREADS).clamp(1, MOST_PARTS);
    let arguments = [
        strided(OP, logits, Kind::Float, &[rows, vocab], gpu)?,
        address(OP, places, Kind::Int, rows as usize, gpu)?,
        address(OP, masks, Kind::Int, (num_masks * words) as usize, gpu)?,
        Argument::Count(vocab),
        Argument::Count(logits.stride()[0]),
        Argument::Count(first_id as i64),
        Argument::Count(words),
        Argument::Count(parts as i64),
    ];
    // SAFETY: the kernel's parameters in order; `parts` blocks a row. Places are the caller's.
    unsafe { launch_early(SOURCE, OP, gpu, ((rows as usize * parts) as u32, THREADS as u32, 0), &arguments) }
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
