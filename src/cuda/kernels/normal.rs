//! Counter-based normal random numbers and dropout masks. They equal the CPU's, except for rounding of logarithm, sine and cosine.
#![allow(unsafe_code)]

use tch::Tensor;

use super::launch::{Argument, address, blocks, invalid, kind_name, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::NORMAL;
pub(super) const NAMES: &[&str] = &["normal_f32", "normal_bf16", "dropout_f32", "dropout_bf16"];

const THREADS: usize = 256;
const MOST_BLOCKS: usize = 1 << 14;

/// Fills `target` with `scale` times the numbers that `RandomKey::fill_normal` draws from entry 0 of row 0 on, for the key with these two words.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for a tensor that does not fit; [`crate::Error::Cuda`].
pub fn fill_normal(
    target: &mut Tensor, // [..] f32 or bf16, contiguous
    key: [u32; 2],
    scale: f32,
) -> Result<()> {
    const OP: &str = "fill_normal";
    let (gpu, n) = (ordinal(OP, target)?, target.numel());
    let name = format!("normal_{}", kind_name(OP, target)?);
    let key = u64::from(key[0]) | u64::from(key[1]) << 32;
    let arguments = [
        address(OP, target, target.kind(), n, gpu)?,
        Argument::Count(n as i64),
        Argument::Count(key as i64), // the same bits
        Argument::Float(scale),
    ];
    let grid = blocks(n.div_ceil(4), THREADS, MOST_BLOCKS);
    // SAFETY: the kernel's parameters in order; it writes the n elements of the target.
    unsafe { launch(SOURCE, &name, gpu, (grid, THREADS as u32, 0), &arguments) }
}

/// Applies dropout: x * scale, or 0 if the word that `RandomKey::fill_dropout` draws for the element's row and column is below `threshold`.
///
/// # Errors
/// The errors of [`fill_normal`].
pub fn dropout(
    x: &Tensor, // [T, K] f32 or bf16, contiguous
    key: [u32; 2],
    threshold: u32,
    scale: f32,
) -> Result<Tensor> {
    const OP: &str = "dropout";
    let (gpu, n, y) = (ordinal(OP, x)?, x.numel(), x.f_empty_like()?);
    let &[rows, columns] = &x.size()[..] else { return Err(invalid(OP, "a matrix", x.size())) };
    let key = u64::from(key[0]) | u64::from(key[1]) << 32;
    let arguments = [
        address(OP, x, x.kind(), n, gpu)?,
        address(OP, &y, x.kind(), n, gpu)?,
        Argument::Count(rows),
        Argument::Count(columns),
        Argument::Count(key as i64), // the same bits
        Argument::Count(i64::from(threshold)),
        Argument::Float(scale),
    ];
    let name = format!("{OP}_{}", kind_name(OP, x)?);
    let grid = blocks(n.div_ceil(4), THREADS, MOST_BLOCKS);
    // SAFETY: the kernel's parameters in order; it reads and writes rows * columns = n elements of x and y.
    unsafe { launch(SOURCE, &name, gpu, (grid, THREADS as u32, 0), &arguments) }?;
    Ok(y) // [T, K]
}
