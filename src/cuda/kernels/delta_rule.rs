//! The gated delta rule in training, over chunks of 64 tokens. bfloat16, heads of 128; states and sums in float32.
//!
//! T tokens, N sequences, B chunks of all sequences, H value heads, C channels.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::delta_mix::{DIM, DeltaLayout, DeltaSizes};
use super::{address, address_or_null, invalid, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::{Error, Result};

pub(super) const SOURCE: &KernelSource = &nvrtc::DELTA_RULE;
pub(super) const NAMES: &[&str] = &["delta_prepare", "delta_scan_2", "delta_scan_4", "delta_scan_8"];
pub(super) const GRADIENTS: &KernelSource = &nvrtc::DELTA_GRADIENTS;
pub(super) const GRADIENTS_NAMES: &[&str] =
    &["delta_reverse_2", "delta_reverse_4", "delta_reverse_8", "delta_gradients"];

const CHUNK: i64 = 64;
/// Bytes of a chunk's rows, of its pairs of tokens, and of a state, each of one head in bfloat16.
const ROWS_BYTES: u32 = (CHUNK * DIM * 2) as u32;
const PAIRS_BYTES: u32 = (CHUNK * CHUNK * 2) as u32;
const STATE_BYTES: u32 = (DIM * DIM * 2) as u32;
/// Tiles in shared memory begin at multiples of it.
const ALIGNMENT: u32 = 128;
/// Words of float32 of a chunk's gates.
const GATES: i64 = 5 * CHUNK;
/// Blocks of a scan that fill a GPU: where sequences and heads are fewer, a block has fewer columns of the state. The bits do not
/// depend on it.
const MANY_BLOCKS: i64 = 100;

/// Tensors of chunks that need no state.
#[derive(Debug)]
pub struct DeltaPrepared {
    u: Tensor,         // [B, H, CHUNK, DIM] bf16
    w: Tensor,         // [B, H, CHUNK, DIM] bf16
    p: Tensor,         // [B, H, CHUNK, CHUNK] bf16
    t: Option<Tensor>, // [B, H, CHUNK, CHUNK] bf16, for a backward
    gates: Tensor,     // [B, H, GATES] words
}

/// Chunks by themselves: decays and the inverse of their systems.
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
    let shared_bytes = 2 * ROWS_BYTES + CHUNK as u32 * (CHUNK as u32 + 4) * 4 + ALIGNMENT;
    let grid = (layout.num_chunks() * sizes.heads) as u32;
    // SAFETY: the kernel's parameters in order; a block for every head of every chunk, and the shared memory that it divides.
    unsafe { launch(SOURCE, OP, gpu, (grid, 128, shared_bytes), &arguments)? };
    Ok(prepared)
}

/// Results of [`delta_scan`].
#[derive(Debug)]
pub struct DeltaScan {
    /// Outputs of the rule.
    pub o: Tensor, // [T, H, DIM] bf16
    /// States behind the last tokens.
    pub last: Tensor, // [N, H, DIM, DIM] f32
    /// States before chunks, transposed, and what chunks wrote; for a backward.
    pub kept: Option<[Tensor; 2]>, // [B, H, DIM, DIM], [B, H, CHUNK, DIM] bf16
}

/// The rule over the chunks of all sequences.
///
/// # Errors
/// The errors of [`super::delta_mix()`].
pub fn delta_scan(
    mixed: &Tensor, // [T, C] bf16
    prepared: &DeltaPrepared,
    initial: Option<&Tensor>, // [N, H, DIM, DIM] f32
    layout: &DeltaLayout,
    sizes: DeltaSizes,
    for_backward: bool,
) -> Result<DeltaScan> {
    const OP: &str = "delta_scan";
    let (gpu, bf16, device) = (ordinal(OP, mixed)?, Kind::BFloat16, mixed.device());
    let DeltaPrepared { u, w, p, gates, .. } = prepared;
    let states = || Tensor::f_empty([layout.num_chunks(), sizes.heads, DIM, DIM], (bf16, device));
    let kept = for_backward.then(|| Ok::<_, Error>([states()?, u.f_empty_like()?])).transpose()?;
    let o = Tensor::f_empty([layout.num_tokens, sizes.heads, DIM], (bf16, device))?;
    let last = Tensor::f_empty([layout.num_sequences(), sizes.heads, DIM, DIM], (Kind::Float, device))?;
    let rows = sizes.elements(layout, CHUNK * DIM);
    let mut arguments = vec![address(OP, mixed, bf16, (layout.num_tokens * sizes.channels()) as usize, gpu)?];
    for (t, count) in [(u, rows), (w, rows), (p, sizes.elements(layout, CHUNK * CHUNK))] {
        arguments.push(address(OP, t, bf16, count, gpu)?);
    }
    arguments.push(address(OP, gates, Kind::Float, sizes.elements(layout, GATES), gpu)?);
    arguments.push(layout.address(OP, &layout.chunks, gpu)?);
    arguments.push(layout.address(OP, &layout.sequences, gpu)?);
    arguments.push(address_or_null(OP, initial, Kind::Float, last.numel(), gpu)?);
    arguments.push(address(OP, &o, bf16, o.numel(), gpu)?);
    arguments.push(address(OP, &last, Kind::Float, last.numel(), gpu)?);
    let [states, news] = kept.as_ref().map_or([None, None], |[states, news]| [Some(states), Some(news)]);
    arguments.push(address_or_null(OP, states, bf16, sizes.elements(layout, DIM * DIM), gpu)?);
    arguments.push(address_or_null(OP, news, bf16, rows, gpu)?);
    arguments.extend(sizes.arguments());
    let shared_bytes = 2 * (4 * ROWS_BYTES + PAIRS_BYTES + 2 * 4 * CHUNK as u32) + ALIGNMENT;
    let (warps, grid) = scan_grid(layout, sizes);
    // SAFETY: the kernel's parameters in order; warps for all columns of every head's state of every sequence.
    unsafe {
        let name = format!("{OP}_{warps}");
        launch(SOURCE, &name, gpu, (grid, 32 * warps, shared_bytes), &arguments)?;
    }
    Ok(DeltaScan { o, last, kept })
}

/// Warps of a block, each with 16 columns of a state, and blocks.
fn scan_grid(layout: &DeltaLayout, sizes: DeltaSizes) -> (u32, u32) {
    let all = layout.num_sequences() * sizes.heads;
    let warps = [8, 4].into_iter().find(|warps| all * 8 / warps >= MANY_BLOCKS).unwrap_or(2);
    (warps as u32, (all * 8 / warps) as u32)
}

/// Gradients of a chunk's tokens.
#[derive(Debug)]
pub struct DeltaGradients {
    /// Of queries of unit length, of every value head.
    pub q: Tensor, // [T, H, DIM] bf16
    /// Of keys of unit length, of every value head.
    pub k: Tensor, // [T, H, DIM] bf16
    /// Of values.
    pub v: Tensor, // [T, H, DIM] bf16
    /// Of the logarithms of decays.
    pub g: Tensor, // [T, H] f32
    /// Of write strengths.
    pub beta: Tensor, // [T, H] f32
    /// Of the states before the first tokens.
    pub initial: Tensor, // [N, H, DIM, DIM] f32
}

/// The rule's backward, from the gradients of its outputs and of the last states. `scan` was computed for a backward.
///
/// # Errors
/// The errors of [`super::delta_mix()`]; [`crate::Error::InvalidArgument`] where something was not computed for a backward.
pub fn delta_backward(
    d_o: &Tensor,            // [T, H, DIM] bf16
    d_last: Option<&Tensor>, // [N, H, DIM, DIM] f32
    (mixed, prepared, kept): (&Tensor, &DeltaPrepared, &[Tensor; 2]),
    layout: &DeltaLayout,
    sizes: DeltaSizes,
) -> Result<DeltaGradients> {
    const OP: &str = "delta_reverse";
    let (gpu, bf16, device) = (ordinal(OP, mixed)?, Kind::BFloat16, mixed.device());
    let [states, news] = kept;
    let (ends, solved) = (states.f_empty_like()?, news.f_empty_like()?);
    let initial = Tensor::f_empty([layout.num_sequences(), sizes.heads, DIM, DIM], (Kind::Float, device))?;
    let of_tokens = (layout.num_tokens * sizes.heads * DIM) as usize;
    let (rows, pairs) = (sizes.elements(layout, CHUNK * DIM), sizes.elements(layout, CHUNK * CHUNK));
    let of_states = sizes.elements(layout, DIM * DIM);
    let Some(t) = &prepared.t else { return Err(invalid(OP, "chunks prepared for a backward", "none")) };
    let mixed_argument = address(OP, mixed, bf16, (layout.num_tokens * sizes.channels()) as usize, gpu)?;
    let d_o_argument = address(OP, d_o, bf16, of_tokens, gpu)?;
    let gates = address(OP, &prepared.gates, Kind::Float, sizes.elements(layout, GATES), gpu)?;
    let chunks = layout.address(OP, &layout.chunks, gpu)?;
    let mut arguments = vec![
        mixed_argument,
        address(OP, &prepared.w, bf16, rows, gpu)?,
        address(OP, &prepared.p, bf16, pairs, gpu)?,
        address(OP, t, bf16, pairs, gpu)?,
        d_o_argument,
        gates,
        chunks,
        layout.address(OP, &layout.sequences, gpu)?,
        address_or_null(OP, d_last, Kind::Float, initial.numel(), gpu)?,
        address(OP, &ends, bf16, of_states, gpu)?,
        address(OP, &solved, bf16, rows, gpu)?,
        address(OP, &initial, Kind::Float, initial.numel(), gpu)?,
    ];
    arguments.extend(sizes.arguments());
    let shared_bytes = 2 * (4 * ROWS_BYTES + 2 * PAIRS_BYTES + 2 * 4 * CHUNK as u32) + ALIGNMENT;
    let (warps, grid) = scan_grid(layout, sizes);
    // SAFETY: the kernel's parameters in order; warps for all columns of every head's state of every sequence.
    unsafe {
        let name = format!("{OP}_{warps}");
        launch(GRADIENTS, &name, gpu, (grid, 32 * warps, shared_bytes), &arguments)?;
    }

    let wide = || Tensor::f_empty([layout.num_tokens, sizes.heads, DIM], (bf16, device));
    let narrow = || Tensor::f_empty([layout.num_tokens, sizes.heads], (Kind::Float, device));
    let d = DeltaGradients { q: wide()?, k: wide()?, v: wide()?, g: narrow()?, beta: narrow()?, initial };
    let mut arguments = vec![mixed_argument, d_o_argument];
    for (t, count) in [(states, of_states), (news, rows), (&ends, of_states), (&solved, rows)] {
        arguments.push(address(OP, t, bf16, count, gpu)?);
    }
    arguments.extend([gates, chunks]);
    for (t, kind) in [(&d.q, bf16), (&d.k, bf16), (&d.v, bf16), (&d.g, Kind::Float), (&d.beta, Kind::Float)] {
        arguments.push(address(OP, t, kind, t.numel(), gpu)?);
    }
    arguments.extend(sizes.arguments());
    let shared_bytes = 5 * ROWS_BYTES + 2 * STATE_BYTES + 3 * PAIRS_BYTES + ALIGNMENT;
    let grid = (layout.num_chunks() * sizes.heads) as u32;
    // SAFETY: the kernel's parameters in order; a block for every head of every chunk, and the shared memory that it divides.
    unsafe { launch(GRADIENTS, "delta_gradients", gpu, (grid, 512, shared_bytes), &arguments)? };
    Ok(d)
}
