//! The step from sampled tokens to the next step's inputs.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::{Argument, address, address_or_null, invalid, launch_early, ordinal};
use crate::cuda::nvrtc::{self, Source};
use crate::error::Result;

pub(super) const SOURCE: &Source = &nvrtc::ADVANCE;
pub(super) const NAMES: &[&str] = &["advance"];

/// What became of a row in a step, third word of its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowStatus {
    /// It goes on (or holds no sequence: its token is -1).
    Running,
    /// The token ends the sequence.
    Eos,
    /// The sequence has as many tokens as its limit.
    Length,
    /// The logits were not finite; the token is -1.
    NonFinite,
    /// The next token has no block; the token is good, the sequence can be taken up again.
    NoBlock,
}

impl RowStatus {
    /// From the word that the kernel writes.
    pub fn from_word(word: i32) -> Option<Self> {
        [Self::Running, Self::Eos, Self::Length, Self::NonFinite, Self::NoBlock]
            .get(usize::try_from(word).ok()?)
            .copied()
    }
}

/// Device state of a bucket of S rows. A row with context length 0 holds no sequence and keeps still.
#[derive(Debug)]
pub struct DecodeRows<'a> {
    /// Next input. [S] i32
    pub token_ids: &'a Tensor,
    /// Its position. [S] i32
    pub positions: &'a Tensor,
    /// Tokens that it sees, itself included. [S] i32
    pub context_lens: &'a Tensor,
    /// Where its key and value go, -1: nowhere. [S] i32
    pub slot_mapping: &'a Tensor,
    /// [S, max_blocks] i32, -1: none
    pub block_tables: &'a Tensor,
    /// Tokens of prompt and completion together at which a sequence ends. [S] i32
    pub limits: &'a Tensor,
    /// Ids that end a sequence. [E] i32
    pub eos_token_ids: &'a Tensor,
    /// Bit `id` of row s: the id stands in the sequence. [S, ceil(V / 32)] i32
    pub seen: Option<&'a Tensor>,
}

/// Takes the sampled tokens in: writes row `step % ring` of `output`, turns each running row to its next token and stops rows
/// that end (context length 0, slot -1). `step` grows by one. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn advance(
    sampled: &Tensor,  // [S] i32, -1: logits were not finite
    logprobs: &Tensor, // [S] f32
    rows: &DecodeRows,
    block_size: usize,
    output: &mut Tensor, // [ring, S, 4] i32: token or -1, log-prob's bits, RowStatus, tokens so far
    step: &mut Tensor,   // [1] i64
) -> Result<()> {
    const OP: &str = "advance";
    let (gpu, num_rows) = (ordinal(OP, sampled)?, sampled.numel());
    if num_rows == 0 || output.numel() == 0 {
        return Err(invalid(OP, "at least one row and one output", (num_rows, output.size())));
    }
    let words = rows.seen.map_or(0, |seen| seen.numel() / num_rows);
    let (max_blocks, ring) = (rows.block_tables.numel() / num_rows, output.numel() / (4 * num_rows));
    let int = |tensor: &Tensor, numel| address(OP, tensor, Kind::Int, numel, gpu);
    let arguments = [
        int(sampled, num_rows)?,
        address(OP, logprobs, Kind::Float, num_rows, gpu)?,
        int(rows.token_ids, num_rows)?,
        int(rows.positions, num_rows)?,
        int(rows.context_lens, num_rows)?,
        int(rows.slot_mapping, num_rows)?,
        int(rows.block_tables, num_rows * max_blocks)?,
        int(rows.limits, num_rows)?,
        int(rows.eos_token_ids, rows.eos_token_ids.numel())?,
        address_or_null(OP, rows.seen, Kind::Int, num_rows * words, gpu)?,
        int(output, ring * num_rows * 4)?,
        address(OP, step, Kind::Int64, 1, gpu)?,
        Argument::Count(num_rows as i64),
        Argument::Count(max_blocks as i64),
        Argument::Count(block_size as i64),
        Argument::Count(rows.eos_token_ids.numel() as i64),
        Argument::Count(words as i64),
        Argument::Count(ring as i64),
    ];
    let threads = num_rows.next_multiple_of(32).min(1024) as u32;
    // SAFETY: the kernel's parameters in order; one block, as the step's counter needs.
    unsafe { launch_early(SOURCE, OP, gpu, (1, threads, 0), &arguments) }
}
