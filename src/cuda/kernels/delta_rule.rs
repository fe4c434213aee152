//! Training kernels of the gated delta rule, over chunks of 64 tokens. bfloat16, heads of width 128; states and sums in float32.
//!
//! T tokens, N sequences, B chunks of all sequences, H value heads, C channels.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::delta_mix::{DIM, DeltaLayout, DeltaSizes};
use super::launch::{Argument, address, address_or_null, blocks, launch, ordinal};
use crate::cuda::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::{Error, Result};

pub(super) const SOURCE: &KernelSource = &nvrtc::DELTA_RULE;
pub(super) const NAMES: &[&str] = &["delta_prepare", "delta_scan_4", "delta_scan_8"];
pub(super) const GRADIENTS: &KernelSource = &nvrtc::DELTA_GRADIENTS;
pub(super) const GRADIENTS_NAMES: &[&str] = &["delta_reverse_4", "delta_reverse_8", "delta_gradients"];

const CHUNK: i64 = 64;
/// Bytes in bfloat16, per head, of a chunk's rows, of its pairs of tokens, and of a state.
const ROWS_BYTES: u32 = (CHUNK * DIM * 2) as u32;
const PAIRS_BYTES: u32 = (CHUNK * CHUNK * 2) as u32;
const STATE_BYTES: u32 = (DIM * DIM * 2) as u32;
/// Alignment in bytes of tiles in shared memory; tiles that Hopper's wgmma reads need `SWIZZLED`.
const ALIGNMENT: u32 = 128;
const SWIZZLED: u32 = 1024;
/// 32-bit words of a chunk's gates per head.
const GATES: i64 = 5 * CHUNK;
/// Number of blocks of a scan that fill a GPU. With fewer sequences and heads, each block processes fewer columns of the state. The result's bits do
/// not depend on it.
const MANY_BLOCKS: i64 = 100;
/// Threads per block of the prepare and the gradient kernels.
const PREPARE_THREADS: u32 = 128;
const GRADIENTS_THREADS: u32 = 512;
/// Dynamic shared memory of each kernel: tiles of two chunks in flight, their gates, and results on their way to memory.
const PREPARE_BYTES: u32 = 2 * ROWS_BYTES + CHUNK as u32 * (CHUNK as u32 + 4) * 4 + ALIGNMENT;
const SCAN_BYTES: u32 = 2 * (4 * ROWS_BYTES + PAIRS_BYTES + SWIZZLED) + 2 * ROWS_BYTES + SWIZZLED;
const REVERSE_BYTES: u32 = 2 * (4 * ROWS_BYTES + 2 * PAIRS_BYTES + SWIZZLED) + ROWS_BYTES + SWIZZLED;
const GRADIENTS_BYTES: u32 = 7 * ROWS_BYTES + 2 * STATE_BYTES + 3 * PAIRS_BYTES + ALIGNMENT;

/// Tensors of chunks that do not depend on states.
#[derive(Debug)]
pub struct DeltaPrepared {
    u: Tensor,         // [B, H, CHUNK, DIM] bf16
    w: Tensor,         // [B, H, CHUNK, DIM] bf16
    p: Tensor,         // [B, H, CHUNK, CHUNK] bf16
    t: Option<Tensor>, // [B, H, CHUNK, CHUNK] bf16, for a backward
    gates: Tensor,     // [B, H, GATES] words
}

/// Computes for each chunk its decays and the inverse of its triangular system.
///
/// # Errors
/// The errors of [`super::delta_mix()`].
pub fn delta_prepare(
    mixed: &Tensor,                 // [T, C] bf16
    [a, b]: [&Tensor; 2],           // [T, H] bf16
    [a_log, dt_bias]: [&Tensor; 2], // [H] bf16
    layout: &DeltaLayout,
    sizes: DeltaSizes,
    for_backward: bool,
) -> Result<DeltaPrepared> {
    const OP: &str = "delta_prepare";
    let (gpu, bf16) = (ordinal(OP, mixed)?, Kind::BFloat16);
    let room = |shape: [i64; 2]| {
        Tensor::f_empty([layout.num_chunks(), sizes.heads, shape[0], shape[1]], (bf16, mixed.device()))
    };
    let prepared = DeltaPrepared {
        u: room([CHUNK, DIM])?,
        w: room([CHUNK, DIM])?,
        p: room([CHUNK, CHUNK])?,
        t: for_backward.then(|| room([CHUNK, CHUNK])).transpose()?,
        gates: Tensor::f_empty([layout.num_chunks(), sizes.heads, GATES], (Kind::Float, mixed.device()))?,
    };
    let (rows, pairs) = (sizes.elements(layout, CHUNK * DIM), sizes.elements(layout, CHUNK * CHUNK));
    let of_tokens = (layout.num_tokens * sizes.heads) as usize;
    let mut arguments = vec![address(OP, mixed, bf16, (layout.num_tokens * sizes.channels()) as usize, gpu)?];
    for (t, count) in [(a, of_tokens), (b, of_tokens), (a_log, sizes.heads as usize), (dt_bias, sizes.heads as usize)] {
        arguments.push(address(OP, t, bf16, count, gpu)?);
    }
    arguments.push(layout.address(OP, &layout.chunks, gpu)?);
    for (t, count) in [(&prepared.u, rows), (&prepared.w, rows), (&prepared.p, pairs)] {
        arguments.push(address(OP, t, bf16, count, gpu)?);
    }
    arguments.push(address_or_null(OP, prepared.t.as_ref(), bf16, pairs, gpu)?);
    arguments.push(address(OP, &prepared.gates, Kind::Float, prepared.gates.numel(), gpu)?);
    arguments.extend(sizes.arguments());
    let grid = (layout.num_chunks() * sizes.heads) as u32;
    // SAFETY: the kernel's parameters in order; a block for every head of every chunk, and the shared memory that it divides.
    unsafe { launch(SOURCE, OP, gpu, (grid, PREPARE_THREADS, PREPARE_BYTES), &arguments)? };
    Ok(prepared)
}

/// Results of [`delta_scan`].
#[derive(Debug)]
pub struct DeltaScan {
    /// The delta rule's outputs.
    pub o: Tensor, // [T, H, DIM] bf16
    /// The states after the last tokens.
    pub last: Tensor, // [N, H, DIM, DIM] f32
    /// Chunk tensors for the backward, if chunks were prepared for one.
    pub kept: Option<DeltaKept>,
}

/// Chunk tensors that the backward reads.
#[derive(Debug)]
pub struct DeltaKept {
    w: Tensor,      // [B, H, CHUNK, DIM] bf16
    p: Tensor,      // [B, H, CHUNK, CHUNK] bf16
    t: Tensor,      // [B, H, CHUNK, CHUNK] bf16
    gates: Tensor,  // [B, H, GATES] words
    states: Tensor, // [B, H, DIM, DIM] bf16: states before chunks, in the tiled layout of `delta.cuh`
    news: Tensor,   // [B, H, CHUNK, DIM] bf16: values written by chunks
}

/// Runs the delta rule over the chunks of all sequences.
///
/// # Errors
/// The errors of [`super::delta_mix()`].
pub fn delta_scan(
    mixed: &Tensor, // [T, C] bf16
    prepared: DeltaPrepared,
    initial: Option<&Tensor>, // [N, H, DIM, DIM] f32
    layout: &DeltaLayout,
    sizes: DeltaSizes,
) -> Result<DeltaScan> {
    const OP: &str = "delta_scan";
    let (gpu, bf16, device) = (ordinal(OP, mixed)?, Kind::BFloat16, mixed.device());
    let DeltaPrepared { u, w, p, t, gates } = prepared;
    let states = || Tensor::f_empty([layout.num_chunks(), sizes.heads, DIM, DIM], (bf16, device));
    let written = t.is_some().then(|| Ok::<_, Error>([states()?, u.f_empty_like()?])).transpose()?;
    let o = Tensor::f_empty([layout.num_tokens, sizes.heads, DIM], (bf16, device))?;
    let last = Tensor::f_empty([layout.num_sequences(), sizes.heads, DIM, DIM], (Kind::Float, device))?;
    let rows = sizes.elements(layout, CHUNK * DIM);
    let mut arguments = vec![address(OP, mixed, bf16, (layout.num_tokens * sizes.channels()) as usize, gpu)?];
    for (t, count) in [(&u, rows), (&w, rows), (&p, sizes.elements(layout, CHUNK * CHUNK))] {
        arguments.push(address(OP, t, bf16, count, gpu)?);
    }
    arguments.push(address(OP, &gates, Kind::Float, sizes.elements(layout, GATES), gpu)?);
    arguments.push(layout.address(OP, &layout.chunks, gpu)?);
    arguments.push(layout.address(OP, &layout.sequences, gpu)?);
    arguments.push(address_or_null(OP, initial, Kind::Float, last.numel(), gpu)?);
    arguments.push(address(OP, &o, bf16, o.numel(), gpu)?);
    arguments.push(address(OP, &last, Kind::Float, last.numel(), gpu)?);
    let [states, news] = written.as_ref().map_or([None, None], |[states, news]| [Some(states), Some(news)]);
    arguments.push(address_or_null(OP, states, bf16, sizes.elements(layout, DIM * DIM), gpu)?);
    arguments.push(address_or_null(OP, news, bf16, rows, gpu)?);
    arguments.extend(sizes.arguments());
    let (warps, grid) = scan_grid(layout, sizes);
    // SAFETY: the kernel's parameters in order; warps for all columns of every head's state of every sequence.
    unsafe {
        let name = format!("{OP}_{warps}");
        launch(SOURCE, &name, gpu, (grid, 32 * warps, SCAN_BYTES), &arguments)?;
    }
    let kept = t.zip(written).map(|(t, [states, news])| DeltaKept { w, p, t, gates, states, news });
    Ok(DeltaScan { o, last, kept })
}

/// Number of warps per block, each with 16 columns of a state, and number of blocks.
fn scan_grid(layout: &DeltaLayout, sizes: DeltaSizes) -> (u32, u32) {
    let all = layout.num_sequences() * sizes.heads;
    let warps = if all >= MANY_BLOCKS { 8 } else { 4 };
    (warps as u32, (all * 8 / warps) as u32)
}

/// Gradients of the delta rule's inputs.
#[derive(Debug)]
pub struct DeltaGradients {
    /// Gradients of the normalized queries and keys, and of the values.
    pub mixed: Tensor, // [T, C] bf16
    /// The gradient of `a`, which determines the decays.
    pub a: Tensor, // [T, H] bf16
    /// The gradient of `b`, whose sigmoid is the write strength.
    pub b: Tensor, // [T, H] bf16
    /// Gradients of A_log and dt_bias, one partial sum per chunk.
    pub of_heads: Tensor, // [2, B, H] f32
    /// The gradient of the states before the first tokens.
    pub initial: Tensor, // [N, H, DIM, DIM] f32
}

/// Tensors of the forward that [`delta_backward`] reads.
#[derive(Debug)]
pub struct DeltaSaved<'a> {
    /// Normalized queries and keys, and values.
    pub mixed: &'a Tensor, // [T, C] bf16
    /// The chunk tensors that [`delta_scan`] kept.
    pub kept: &'a DeltaKept,
    /// The rows that determine the decays.
    pub a: &'a Tensor, // [T, H] bf16
    /// The parameters A_log and dt_bias.
    pub of_heads: [&'a Tensor; 2], // [H] bf16
}

/// Computes the delta rule's backward, given the gradients of its outputs and of the last states. All sums have a fixed order.
///
/// # Errors
/// The errors of [`super::delta_mix()`].
pub fn delta_backward(
    d_o: &Tensor,            // [T, H, DIM] bf16
    d_last: Option<&Tensor>, // [N, H, DIM, DIM] f32
    saved: &DeltaSaved<'_>,
    layout: &DeltaLayout,
    sizes: DeltaSizes,
) -> Result<DeltaGradients> {
    let reverse = delta_reverse(d_o, d_last, saved, layout, sizes)?;
    delta_gradients(d_o, saved, reverse, layout, sizes)
}

/// Results of the backward pass over chunks, from the last to the first.
struct Reverse {
    ends: Tensor,    // [B, H, DIM, DIM] bf16
    solved: Tensor,  // [B, H, CHUNK, DIM] bf16
    initial: Tensor, // [N, H, DIM, DIM] f32
}

fn delta_reverse(
    d_o: &Tensor,
    d_last: Option<&Tensor>,
    saved: &DeltaSaved<'_>,
    layout: &DeltaLayout,
    sizes: DeltaSizes,
) -> Result<Reverse> {
    const OP: &str = "delta_reverse";
    let (gpu, bf16, device) = (ordinal(OP, d_o)?, Kind::BFloat16, d_o.device());
    let DeltaSaved { mixed, kept: DeltaKept { w, p, t, gates, states, news }, .. } = saved;
    let initial = Tensor::f_empty([layout.num_sequences(), sizes.heads, DIM, DIM], (Kind::Float, device))?;
    let reverse = Reverse { ends: states.f_empty_like()?, solved: news.f_empty_like()?, initial };
    let (rows, pairs) = (sizes.elements(layout, CHUNK * DIM), sizes.elements(layout, CHUNK * CHUNK));
    let mut arguments = vec![
        address(OP, mixed, bf16, (layout.num_tokens * sizes.channels()) as usize, gpu)?,
        address(OP, w, bf16, rows, gpu)?,
        address(OP, p, bf16, pairs, gpu)?,
        address(OP, t, bf16, pairs, gpu)?,
        address(OP, d_o, bf16, (layout.num_tokens * sizes.heads * DIM) as usize, gpu)?,
        address(OP, gates, Kind::Float, sizes.elements(layout, GATES), gpu)?,
        layout.address(OP, &layout.chunks, gpu)?,
        layout.address(OP, &layout.sequences, gpu)?,
        address_or_null(OP, d_last, Kind::Float, reverse.initial.numel(), gpu)?,
        address(OP, &reverse.ends, bf16, sizes.elements(layout, DIM * DIM), gpu)?,
        address(OP, &reverse.solved, bf16, rows, gpu)?,
        address(OP, &reverse.initial, Kind::Float, reverse.initial.numel(), gpu)?,
    ];
    arguments.extend(sizes.arguments());
    let (warps, grid) = scan_grid(layout, sizes);
    // SAFETY: the kernel's parameters in order; warps for all columns of every head's state of every sequence.
    unsafe {
        let name = format!("{OP}_{warps}");
        launch(GRADIENTS, &name, gpu, (grid, 32 * warps, REVERSE_BYTES), &arguments)?;
    }
    Ok(reverse)
}

fn delta_gradients(
    d_o: &Tensor,
    saved: &DeltaSaved<'_>,
    reverse: Reverse,
    layout: &DeltaLayout,
    sizes: DeltaSizes,
) -> Result<DeltaGradients> {
    const OP: &str = "delta_gradients";
    let (gpu, bf16, device) = (ordinal(OP, d_o)?, Kind::BFloat16, d_o.device());
    let DeltaSaved { mixed, kept: DeltaKept { gates, states, news, .. }, a, of_heads: [a_log, dt_bias] } = saved;
    let Reverse { ends, solved, initial } = reverse;
    let of_rows = || Tensor::f_empty([layout.num_tokens, sizes.heads], (bf16, device));
    let d = DeltaGradients {
        mixed: mixed.f_empty_like()?,
        a: of_rows()?,
        b: of_rows()?,
        of_heads: Tensor::f_empty([2, layout.num_chunks(), sizes.heads], (Kind::Float, device))?,
        initial,
    };
    let (heads, of_tokens) = (sizes.heads as usize, (layout.num_tokens * sizes.heads) as usize);
    let (rows, of_states) = (sizes.elements(layout, CHUNK * DIM), sizes.elements(layout, DIM * DIM));
    let mut arguments = Vec::new();
    for (t, count) in [
        (*mixed, d.mixed.numel()),
        (d_o, of_tokens * DIM as usize),
        (states, of_states),
        (news, rows),
        (&ends, of_states),
        (&solved, rows),
        (*a, of_tokens),
        (*a_log, heads),
        (*dt_bias, heads),
    ] {
        arguments.push(address(OP, t, bf16, count, gpu)?);
    }
    arguments.push(address(OP, gates, Kind::Float, sizes.elements(layout, GATES), gpu)?);
    arguments.push(layout.address(OP, &layout.chunks, gpu)?);
    for (t, kind) in [(&d.mixed, bf16), (&d.a, bf16), (&d.b, bf16), (&d.of_heads, Kind::Float)] {
        arguments.push(address(OP, t, kind, t.numel(), gpu)?);
    }
    arguments.extend(sizes.arguments());
    let pairs = layout.num_chunks() * sizes.key_heads;
    arguments.push(Argument::Count(pairs));
    // Only one block fits on a multiprocessor; the result's bits do not depend on the number of blocks.
    let grid = blocks(pairs as usize, 1, Context::retain(gpu)?.num_processors()?);
    // SAFETY: the kernel's parameters in order; blocks stride over the key heads of all chunks, and have the shared memory that they divide.
    unsafe { launch(GRADIENTS, OP, gpu, (grid, GRADIENTS_THREADS, GRADIENTS_BYTES), &arguments)? };
    Ok(d)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::capability::Capability;
    use crate::cuda::image::{HOPPER_SHARED_BYTES, limits};
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn tiles_fit_into_shared_memory_with_static_arrays() {
        tch::set_num_threads(1); // links libtorch, beside which NVRTC is found
        let [forward, backward] =
            [SOURCE, GRADIENTS].map(|source| limits(&nvrtc::cubin(source, Capability::HOPPER).unwrap()));
        for (of, name, block, shared_bytes) in [
            (&forward, "delta_prepare", PREPARE_THREADS, PREPARE_BYTES),
            (&forward, "delta_scan_4", 128, SCAN_BYTES),
            (&forward, "delta_scan_8", 256, SCAN_BYTES),
            (&backward, "delta_reverse_4", 128, REVERSE_BYTES),
            (&backward, "delta_reverse_8", 256, REVERSE_BYTES),
            (&backward, "delta_gradients", GRADIENTS_THREADS, GRADIENTS_BYTES),
        ] {
            let kernel = of[name];
            assert_eq!(kernel.threads, block as usize, "{name}");
            assert!(kernel.static_bytes + shared_bytes as usize <= HOPPER_SHARED_BYTES, "{name}: {kernel:?}");
        }
    }

    #[test]
    fn tile_sizes_match_the_kernel_sources() {
        let declared = |source, text: &str| assert!(nvrtc::texts(source).any(|own| own.contains(text)), "{text}");
        for source in [SOURCE, GRADIENTS] {
            declared(source, &format!("constexpr int CHUNK = {CHUNK}, DIM = {DIM};"));
            assert_declared(source, &[("SWIZZLED", SWIZZLED as usize)]);
        }
        declared(SOURCE, &format!("__launch_bounds__({PREPARE_THREADS}, 4) delta_prepare("));
        declared(GRADIENTS, &format!("__launch_bounds__({GRADIENTS_THREADS}, 1) delta_gradients("));
    }
}
