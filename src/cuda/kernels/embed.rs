//! Embedding lookup.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, kinds_name, launch_early, ordinal, row_len, width};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::EMBED;
pub(super) const NAMES: &[&str] =
    &["embed_f32_x1", "embed_f32_x4", "embed_bf16_x1", "embed_bf16_x8", "embed_f32_bf16_x1", "embed_f32_bf16_x8"];

/// Copies the table's rows for `token_ids` to x. Ids that are not in the table, which starts at `first_row`, give zeros; so the sum over a
/// vocabulary's shards is the embedding. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn embed(
    token_ids: &Tensor, // [T] i32
    table: &Tensor,     // [rows, D] f32 or bf16
    first_row: usize,   // id of the table's first row
    x: &mut Tensor,     // [T, D], like table; f32 beside a table of bf16, too
) -> Result<()> {
    const OP: &str = "embed";
    let (gpu, kind, tokens, dim) = (ordinal(OP, table)?, table.kind(), token_ids.numel(), row_len(OP, table)?);
    let arguments = [
        address(OP, token_ids, Kind::Int, tokens, gpu)?,
        address(OP, table, kind, table.numel(), gpu)?,
        address(OP, x, x.kind(), tokens * dim, gpu)?,
        Argument::Count((table.numel() / dim) as i64),
        Argument::Count(dim as i64),
        Argument::Count(first_row as i64),
    ];
    let width = width(dim, &[table, x]);
    let threads = (dim / width).next_multiple_of(32).min(512) as u32;
    let name = format!("embed_{}_x{width}", kinds_name(OP, x, table)?);
    // SAFETY: the kernel's parameters in order; one block a row, ids held to the table's rows.
    unsafe { launch_early(SOURCE, &name, gpu, (tokens as u32, threads, 0), &arguments) }
}
