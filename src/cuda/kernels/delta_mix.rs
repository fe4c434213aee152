//! Training kernels of gated delta nets around the delta rule: the convolution over four tokens, and the gated norm. bfloat16, heads of width 128.
//!
//! T tokens, N sequences, B chunks of all sequences, Hk key heads, H value heads, C = (2 Hk + H) 128 channels.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::launch::{Argument, address, address_or_null, blocks, launch, ordinal};
use super::sums::add_columns;
use crate::cuda::abilities::gpu_has_wide_shared_memory;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::DELTA_MIX;
pub(super) const NAMES: &[&str] = &["delta_mix", "delta_mix_backward", "delta_norm", "delta_norm_backward"];

pub(super) const DIM: i64 = 128;
const WIDTH: i64 = 4;
/// Threads per block of the convolution, and of the gated norm; a team of threads processes one head.
const MIX_THREADS: u32 = 128;
const NORM_THREADS: u32 = 256;
const TEAM: u32 = DIM as u32 / 4;
/// Blocks of the gated norm's backward, each with its own partial sums.
const NORM_BLOCKS: usize = 132 * 8;

/// Numbers of heads of a gated delta net on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaSizes {
    /// Number of query and key heads.
    pub key_heads: i64,
    /// Number of value heads.
    pub heads: i64,
}

impl DeltaSizes {
    pub(super) fn channels(self) -> i64 {
        (2 * self.key_heads + self.heads) * DIM
    }

    pub(super) fn arguments(self) -> [Argument; 3] {
        [self.heads, self.key_heads, self.channels()].map(Argument::Count)
    }

    /// Number of elements of a tensor with `of_head` elements per chunk and head.
    pub(super) fn elements(self, layout: &DeltaLayout, of_head: i64) -> usize {
        (layout.num_chunks() * self.heads * of_head) as usize
    }
}

/// Device tables that describe packed sequences and their chunks.
#[derive(Debug)]
pub struct DeltaLayout {
    /// For every chunk, sequence by sequence: first row, number of tokens, sequence, and position in the sequence.
    pub chunks: Tensor, // [B, 4] i32
    /// For every sequence: index, first chunk, number of chunks and number of tokens. Sequences with the most chunks come first.
    pub sequences: Tensor, // [N, 4] i32
    /// Number of tokens in every sequence.
    pub lengths: Tensor, // [N] i32
    /// Number of tokens in all sequences.
    pub num_tokens: i64,
}

impl DeltaLayout {
    pub(super) fn num_chunks(&self) -> i64 {
        self.chunks.size()[0]
    }

    pub(super) fn num_sequences(&self) -> i64 {
        self.sequences.size()[0]
    }

    pub(super) fn address(&self, op: &'static str, table: &Tensor, gpu: usize) -> Result<Argument> {
        address(op, table, Kind::Int, table.numel(), gpu)
    }
}

/// Whether the kernels support heads of these widths and this convolution width.
pub fn delta_fits([key_dim, value_dim, conv_width]: [usize; 3]) -> bool {
    [key_dim as i64, value_dim as i64, conv_width as i64] == [DIM, DIM, WIDTH]
}

/// Whether the kernels can process rows like `rows`, with heads of these widths.
pub fn delta_serves(rows: &Tensor, widths: [usize; 3]) -> bool {
    let Device::Cuda(ordinal) = rows.device() else { return false };
    delta_fits(widths) && rows.kind() == Kind::BFloat16 && gpu_has_wide_shared_memory(ordinal)
}

/// Computes the convolution followed by SiLU; queries and keys are then normalized to length 1. [T, C]
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn delta_mix(
    x: &Tensor,             // [T, C] bf16
    weight: &Tensor,        // [C, 4] bf16
    tails: Option<&Tensor>, // [N, 3, C] bf16
    layout: &DeltaLayout,
    sizes: DeltaSizes,
) -> Result<Tensor> {
    const OP: &str = "delta_mix";
    let (gpu, y) = (ordinal(OP, x)?, x.f_empty_like()?);
    let [x, weight, tails, chunks] = mix_arguments(OP, (x, weight, tails), layout, sizes)?;
    let y_argument = address(OP, &y, Kind::BFloat16, y.numel(), gpu)?;
    let (counts, grid) = mix_items(layout, sizes);
    let mut arguments = vec![x, weight, tails, chunks, y_argument];
    arguments.extend(counts);
    // SAFETY: the kernel's parameters in order; a team for 128 channels of every chunk.
    unsafe { launch(SOURCE, OP, gpu, (grid, MIX_THREADS, 0), &arguments)? };
    Ok(y)
}

/// Kernel arguments (number of channels, number of query and key heads, number of teams), and the number of blocks.
fn mix_items(layout: &DeltaLayout, sizes: DeltaSizes) -> ([Argument; 3], u32) {
    let items = layout.num_chunks() * sizes.channels() / DIM;
    let counts = [sizes.channels(), 2 * sizes.key_heads, items].map(Argument::Count);
    (counts, (items as u32 * TEAM).div_ceil(MIX_THREADS))
}

fn mix_arguments(
    op: &'static str,
    (x, weight, tails): (&Tensor, &Tensor, Option<&Tensor>),
    layout: &DeltaLayout,
    sizes: DeltaSizes,
) -> Result<[Argument; 4]> {
    let (gpu, channels, bf16) = (ordinal(op, x)?, sizes.channels(), Kind::BFloat16);
    let of_tails = (layout.num_sequences() * (WIDTH - 1) * channels) as usize;
    Ok([
        address(op, x, bf16, (layout.num_tokens * channels) as usize, gpu)?,
        address(op, weight, bf16, (channels * WIDTH) as usize, gpu)?,
        address_or_null(op, tails, bf16, of_tails, gpu)?,
        layout.address(op, &layout.chunks, gpu)?,
    ])
}

/// Returns the gradients of the convolution's input [T, C] and tails [N, 3, C] f32. The weight's gradient is added in place, in a fixed order.
///
/// # Errors
/// The errors of [`delta_mix`].
pub fn delta_mix_backward(
    d_y: &Tensor,              // [T, C] bf16
    [x, weight]: [&Tensor; 2], // as in delta_mix
    tails: Option<&Tensor>,    // as in delta_mix
    layout: &DeltaLayout,
    sizes: DeltaSizes,
    d_weight: &mut Tensor, // [C, 4]
) -> Result<[Tensor; 2]> {
    const OP: &str = "delta_mix_backward";
    let (gpu, channels) = (ordinal(OP, x)?, sizes.channels());
    let d_x = x.f_empty_like()?;
    let single = (Kind::Float, x.device());
    let d_tails = Tensor::f_zeros([layout.num_sequences(), WIDTH - 1, channels], single)?;
    let sums = Tensor::f_empty([layout.num_chunks(), channels * WIDTH], single)?;
    let mut arguments = mix_arguments(OP, (x, weight, tails), layout, sizes)?.to_vec();
    arguments.push(layout.address(OP, &layout.lengths, gpu)?);
    arguments.push(address(OP, d_y, Kind::BFloat16, d_x.numel(), gpu)?);
    arguments.push(address(OP, &d_x, Kind::BFloat16, d_x.numel(), gpu)?);
    arguments.push(address(OP, &d_tails, Kind::Float, d_tails.numel(), gpu)?);
    arguments.push(address(OP, &sums, Kind::Float, sums.numel(), gpu)?);
    let (counts, grid) = mix_items(layout, sizes);
    arguments.extend(counts);
    // SAFETY: the kernel's parameters in order; a team for 128 channels of every chunk.
    unsafe { launch(SOURCE, OP, gpu, (grid, MIX_THREADS, 0), &arguments)? };
    if layout.num_chunks() > 0 {
        add_columns(&sums, &mut d_weight.view([channels * WIDTH]))?;
    }
    Ok([d_x, d_tails])
}

/// Computes rms_norm(x) weight silu(z) for every head.
///
/// # Errors
/// The errors of [`delta_mix`].
pub fn delta_norm(
    x: &Tensor,      // [T, H, DIM] bf16
    z: &Tensor,      // [T, H DIM] bf16
    weight: &Tensor, // [DIM] bf16
    eps: f64,
) -> Result<Tensor> {
    const OP: &str = "delta_norm";
    let (gpu, y) = (ordinal(OP, x)?, x.f_empty_like()?);
    let mut arguments = norm_arguments(OP, [x, z], weight)?;
    arguments.push(address(OP, &y, Kind::BFloat16, y.numel(), gpu)?);
    arguments.extend([Argument::Count(x.numel() as i64 / DIM), Argument::Float(eps as f32)]);
    let grid = norm_blocks(x, 2 * NORM_BLOCKS);
    // SAFETY: the kernel's parameters in order; teams stride over all rows.
    unsafe { launch(SOURCE, OP, gpu, (grid, NORM_THREADS, 0), &arguments)? };
    Ok(y)
}

/// Returns dx and dz of [`delta_norm`]. The weight's gradient is added in place, in a fixed order.
///
/// # Errors
/// The errors of [`delta_mix`].
pub fn delta_norm_backward(
    dy: &Tensor,          // [T, H DIM] bf16
    [x, z]: [&Tensor; 2], // as in delta_norm
    weight: &Tensor,      // [DIM] bf16
    eps: f64,
    d_weight: &mut Tensor, // [DIM]
) -> Result<[Tensor; 2]> {
    const OP: &str = "delta_norm_backward";
    let (gpu, dx, dz) = (ordinal(OP, x)?, x.f_empty_like()?, z.f_empty_like()?);
    let grid = norm_blocks(x, NORM_BLOCKS);
    let sums = Tensor::f_empty([i64::from(grid), DIM], (Kind::Float, x.device()))?;
    let mut arguments = vec![address(OP, dy, Kind::BFloat16, x.numel(), gpu)?];
    arguments.extend(norm_arguments(OP, [x, z], weight)?);
    arguments.push(address(OP, &dx, Kind::BFloat16, x.numel(), gpu)?);
    arguments.push(address(OP, &dz, Kind::BFloat16, x.numel(), gpu)?);
    arguments.push(address(OP, &sums, Kind::Float, sums.numel(), gpu)?);
    arguments.extend([Argument::Count(x.numel() as i64 / DIM), Argument::Float(eps as f32)]);
    // SAFETY: the kernel's parameters in order; a row of sums for every block.
    unsafe { launch(SOURCE, OP, gpu, (grid, NORM_THREADS, 0), &arguments)? };
    add_columns(&sums, d_weight)?;
    Ok([dx, dz])
}

fn norm_blocks(x: &Tensor, most: usize) -> u32 {
    blocks(x.numel() / DIM as usize, (NORM_THREADS / TEAM) as usize, most)
}

fn norm_arguments(op: &'static str, [x, z]: [&Tensor; 2], weight: &Tensor) -> Result<Vec<Argument>> {
    let (gpu, bf16) = (ordinal(op, x)?, Kind::BFloat16);
    Ok(vec![
        address(op, x, bf16, x.numel(), gpu)?,
        address(op, z, bf16, x.numel(), gpu)?,
        address(op, weight, bf16, DIM as usize, gpu)?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        let sizes =
            [("WIDTH", WIDTH as usize), ("MIX_THREADS", MIX_THREADS as usize), ("NORM_THREADS", NORM_THREADS as usize)];
        assert_declared(SOURCE, &sizes);
        assert_declared(SOURCE, &[("CHANNELS", DIM as usize / TEAM as usize)]);
    }
}
