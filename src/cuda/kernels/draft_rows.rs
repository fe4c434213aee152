//! Kernels for the draft head: they prepare its inputs, and store hidden states and draft tokens.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::add_rms_norm::NormOptions;
use super::launch::{Argument, address, blocks, kind_name, kinds_name, launch_early, ordinal, row_len, width};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::DRAFT_ROWS;
pub(super) const NAMES: &[&str] = &[
    "draft_input_f32_x1",
    "draft_input_f32_x4",
    "draft_input_bf16_x1",
    "draft_input_bf16_x8",
    "draft_input_f32_bf16_x1",
    "draft_input_f32_bf16_x8",
    "keep_rows_f32_x1",
    "keep_rows_f32_x4",
    "keep_rows_bf16_x1",
    "keep_rows_bf16_x8",
    "keep_drafts",
];

const THREADS: usize = 256;

/// Inputs of the draft head for R rows, before its norms.
#[derive(Debug, Clone, Copy)]
pub struct DraftInputs<'a> {
    /// Embeddings of the tokens.
    pub embedded: &'a Tensor, // [R, D] f32 or bf16
    /// Hidden states that are stored in state pages.
    pub kept: &'a Tensor, // [.., D]
    /// Hidden states that this step computed.
    pub own: &'a Tensor, // [.., D]
    /// For each row, where the hidden state at the previous token is: the index of a row of `kept`, or the bitwise complement of the index of a row
    /// of `own`.
    pub before: &'a Tensor, // [R] i32
}

/// Computes out = [norm(embedded), norm(hidden state)] for each row; `weights` are those of the two norms. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn draft_input(
    inputs: DraftInputs,
    weights: [&Tensor; 2], // [D] each
    norm: NormOptions,
    out: &mut Tensor, // [R, 2 D]
) -> Result<()> {
    const OP: &str = "draft_input";
    let DraftInputs { embedded, kept, own, before } = inputs;
    let (gpu, kind, dim, rows) = (ordinal(OP, embedded)?, out.kind(), row_len(OP, embedded)?, before.numel());
    let [of_embedded, of_hidden] = weights;
    let arguments = [
        address(OP, embedded, embedded.kind(), rows * dim, gpu)?,
        address(OP, kept, kind, kept.numel(), gpu)?,
        address(OP, own, kind, own.numel(), gpu)?,
        address(OP, before, Kind::Int, rows, gpu)?,
        address(OP, of_embedded, kind, dim, gpu)?,
        address(OP, of_hidden, kind, dim, gpu)?,
        address(OP, out, kind, rows * 2 * dim, gpu)?,
        Argument::Count(dim as i64),
        Argument::Float(norm.eps as f32),
        Argument::Float(if norm.zero_centred { 1.0 } else { 0.0 }),
    ];
    let width = width(dim, &[embedded, kept, own, of_embedded, of_hidden, out]);
    let threads = (dim / width).next_multiple_of(32).min(512) as u32;
    let name = format!("draft_input_{}_x{width}", kinds_name(OP, embedded, out)?);
    // SAFETY: the arguments are in the order of the kernel's parameters; each row has two blocks; the caller ensures that `before` names existing
    // rows.
    unsafe { launch_early(SOURCE, &name, gpu, (2 * rows as u32, threads, 0), &arguments) }
}

/// Sets `to[places[r]] = rows[r]`; rows with a negative place are skipped. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn keep_rows(
    rows: &Tensor,   /* [R, D] */
    places: &Tensor, /* [R] i32 */
    to: &Tensor,     /* [.., D] */
) -> Result<()> {
    const OP: &str = "keep_rows";
    let (gpu, kind, dim, count) = (ordinal(OP, rows)?, rows.kind(), row_len(OP, rows)?, places.numel());
    let arguments = [
        address(OP, rows, kind, count * dim, gpu)?,
        address(OP, places, Kind::Int, count, gpu)?,
        address(OP, to, kind, to.numel(), gpu)?,
        Argument::Count(dim as i64),
    ];
    let width = width(dim, &[rows, to]);
    let threads = (dim / width).next_multiple_of(32).min(512) as u32;
    let name = format!("keep_rows_{}_x{width}", kind_name(OP, rows)?);
    // SAFETY: the arguments are in the order of the kernel's parameters; each row has one block; the caller ensures that places are within `to`.
    unsafe { launch_early(SOURCE, &name, gpu, (count as u32, threads, 0), &arguments) }
}

/// Sets `to[places[r]] = ids[r]`, or 0 if the id is negative; rows with a negative place are skipped. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn keep_drafts(
    ids: &Tensor,    /* [R] i32 */
    places: &Tensor, /* [R] i32 */
    to: &Tensor,     /* i32 */
) -> Result<()> {
    const OP: &str = "keep_drafts";
    let (gpu, count) = (ordinal(OP, ids)?, places.numel());
    let arguments = [
        address(OP, ids, Kind::Int, count, gpu)?,
        address(OP, places, Kind::Int, count, gpu)?,
        address(OP, to, Kind::Int, to.numel(), gpu)?,
        Argument::Count(count as i64),
    ];
    let grid = blocks(count, THREADS, usize::MAX);
    // SAFETY: the arguments are in the order of the kernel's parameters; the caller ensures that places are within `to`.
    unsafe { launch_early(SOURCE, OP, gpu, (grid, THREADS as u32, 0), &arguments) }
}
