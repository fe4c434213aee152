//! Decode attention over the paged cache.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::{Argument, address, invalid, kind_name, launch, ordinal};
use crate::cuda::nvrtc::{self, Source};
use crate::error::Result;

pub(super) const SOURCE: &Source = &nvrtc::PAGED_ATTENTION;
pub(super) const NAMES: &[&str] = &["paged_attention_any_f32", "paged_attention_any_bf16"];

/// Threads of a block, and most columns of a head over it.
const THREADS: usize = 128;
const MOST_COLUMNS: usize = 4 * THREADS;

/// One layer's attention on one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// H
    pub num_heads: usize,
    /// Hkv, divides H
    pub num_kv_heads: usize,
    /// hd
    pub head_dim: usize,
    /// Tokens of a block, a multiple of 16.
    pub block_size: usize,
    /// Most tokens that one sees, itself included.
    pub sliding_window: Option<usize>,
    /// What scores are multiplied with.
    pub scale: f64,
}

/// Rows whose contexts begin with the same blocks, which are then read once for all of them.
#[derive(Debug, Clone, Copy)]
pub struct SharedPrefixes<'a> {
    /// Rows with the same number 0 .. S share; -1: with none. [S] i32
    pub groups: &'a Tensor,
    /// Leading entries of the block table that are the same in all rows of the group, each wholly filled. [S] i32
    pub num_shared_blocks: &'a Tensor,
}

/// Who reads which part of which context: made once a step for all layers, by [`AttentionPlan::update`] on the device.
#[derive(Debug)]
pub struct AttentionPlan {
    shape: AttentionShape,
    max_rows: usize,
}

impl AttentionPlan {
    /// Room for up to `max_rows` rows with block tables of `max_blocks`. `split_tokens` fixes the part of a context that is
    /// summed at once, so that a row's bits do not depend on the rows beside it (shared prefixes must then be left out); by
    /// default it is chosen on the device so that all its processors have work.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a shape that no kernel serves.
    pub fn new(
        shape: AttentionShape,
        max_rows: usize,
        max_blocks: usize,
        split_tokens: Option<usize>,
        device: Device,
    ) -> Result<Self> {
        const OP: &str = "attention_plan";
        let _ = (max_blocks, split_tokens, device);
        let fits = shape.num_kv_heads > 0
            && shape.num_heads.is_multiple_of(shape.num_kv_heads)
            && (1..=MOST_COLUMNS).contains(&shape.head_dim)
            && shape.block_size > 0
            && shape.block_size.is_multiple_of(16);
        if !fits {
            let expected =
                format!("heads in whole groups, at most {MOST_COLUMNS} columns, blocks of 16 tokens' multiples");
            return Err(invalid(OP, expected, shape));
        }
        Ok(Self { shape, max_rows })
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        0
    }

    /// Plans the attention of all layers of a step. Allocates nothing.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
    pub fn update(
        &mut self,
        context_lens: &Tensor, // [S] i32, the new token included; 0: no sequence
        prefixes: Option<SharedPrefixes>,
    ) -> Result<()> {
        let _ = prefixes;
        if context_lens.numel() > self.max_rows {
            return Err(invalid("attention_plan", format!("at most {} rows", self.max_rows), context_lens.size()));
        }
        Ok(())
    }
}

/// o = softmax(scale q k^T) v of one new token per row over its context, whose last entry is the token itself; zeros for rows
/// without a sequence. The plan is that of these context lengths. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn paged_attention(
    plan: &AttentionPlan,
    q: &Tensor,            // [S, H, hd] f32 or bf16
    k_cache: &Tensor,      // [num_blocks, Hkv, block_size, hd]
    v_cache: &Tensor,      // like k_cache
    block_tables: &Tensor, // [S, max_blocks] i32
    context_lens: &Tensor, // [S] i32
    o: &mut Tensor,        // like q
) -> Result<()> {
    const OP: &str = "paged_attention";
    let AttentionShape { num_heads, num_kv_heads, head_dim, block_size, sliding_window, scale } = plan.shape;
    let (gpu, kind, rows) = (ordinal(OP, q)?, q.kind(), context_lens.numel());
    let block_len = num_kv_heads * block_size * head_dim;
    let cache_len = k_cache.numel() / block_len * block_len;
    let max_blocks = block_tables.numel() / rows.max(1);
    let arguments = [
        address(OP, q, kind, rows * num_heads * head_dim, gpu)?,
        address(OP, k_cache, kind, cache_len, gpu)?,
        address(OP, v_cache, kind, cache_len, gpu)?,
        address(OP, block_tables, Kind::Int, rows * max_blocks, gpu)?,
        address(OP, context_lens, Kind::Int, rows, gpu)?,
        address(OP, o, kind, rows * num_heads * head_dim, gpu)?,
        Argument::Count(num_heads as i64),
        Argument::Count(num_kv_heads as i64),
        Argument::Count(head_dim as i64),
        Argument::Count(block_size as i64),
        Argument::Count(max_blocks as i64),
        Argument::Count(sliding_window.unwrap_or(0) as i64),
        Argument::Float(scale as f32),
    ];
    let name = format!("paged_attention_any_{}", kind_name(OP, q)?);
    let grid = (rows * num_heads) as u32;
    // SAFETY: the kernel's parameters in order; one block a query head of a row, blocks of contexts are the caller's.
    unsafe { launch(SOURCE, &name, gpu, (grid, THREADS as u32, 4 * head_dim as u32), &arguments) }
}
