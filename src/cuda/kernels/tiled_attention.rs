//! Attention of consecutive rows with the same bits as decode attention: for packed micro-batches in training, and for prompts in an engine.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, invalid, is_aligned, launch_early, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::TILED_ATTENTION;
pub(super) const NAMES: &[&str] = &[
    "tiled_attention_bf16_64",
    "tiled_attention_bf16_128",
    "tiled_attention_cached_bf16_64",
    "tiled_attention_cached_bf16_128",
];

const WARPS: usize = 8;
/// Rows per warp.
const MEMBERS: usize = 2;
/// Query heads that one block processes.
const BLOCK_HEADS: usize = 8;

/// A tile of at most [`RowTile::MOST_ROWS`] consecutive rows of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowTile {
    /// Index of the first row.
    pub first: i32,
    /// Number of rows.
    pub count: i32,
    /// Number of tokens that the first row attends to without a window, including itself; each further row attends to one more.
    pub len: i32,
    /// Index of the sequence's first row, in the prompt if sequences share one.
    pub prompt: i32,
    /// Number of rows of the shared prompt.
    pub prompt_len: i32,
    /// Index of the first row after the prompt; the sequence continues from there. For a paged cache: row of the sequence's block table.
    pub own: i32,
}

impl RowTile {
    /// Largest number of rows in a tile.
    pub const MOST_ROWS: usize = WARPS * MEMBERS;
    /// Number of tokens of a context that are summed in one piece.
    pub const SPLIT_TOKENS: usize = 256;
    /// 32-bit words of a tile on the GPU.
    pub const WORDS: usize = 8;

    /// The tile as words, in the order in which the kernel reads them.
    pub fn words(&self) -> [i32; Self::WORDS] {
        [self.first, self.count, self.len, self.prompt, self.prompt_len, self.own, 0, 0]
    }
}

/// Whether [`tiled_attention`] supports queries of this type and head width. Heads of width 256 would need more shared memory than there is.
pub fn tiled_attention_serves(kind: Kind, head_dim: i64) -> bool {
    kind == Kind::BFloat16 && matches!(head_dim, 64 | 128)
}

/// Computes o = softmax(scale q k^T) v for each row, over its sequence's tokens up to its own, of which it attends to the last `window`; also the
/// log-sum-exp of the scores. A row has the same bits as in `paged_attention` with plans of a fixed split of 256 tokens. Every row must be in one
/// tile. With a window, the first tokens that the rows of a tile attend to must be in the same aligned group of 16.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn tiled_attention(
    [q, k, v]: [&Tensor; 3], // [T, H, hd], [T, Hkv, hd] twice, bf16
    tiles: &Tensor,          // [N, 8] i32, `RowTile::words`
    window: Option<usize>,
    scale: f64,
    o: &mut Tensor,   // like q
    lse: &mut Tensor, // [H, T] f32
) -> Result<()> {
    const OP: &str = "tiled_attention";
    let TileShape { gpu, tokens, heads, kv_heads, head_dim } = TileShape::of(OP, [q, k, v, o])?;
    let of_kv_heads = (tokens * kv_heads * head_dim) as usize;
    let arguments = [
        address(OP, q, Kind::BFloat16, (tokens * heads * head_dim) as usize, gpu)?,
        address(OP, k, Kind::BFloat16, of_kv_heads, gpu)?,
        address(OP, v, Kind::BFloat16, of_kv_heads, gpu)?,
        address(OP, tiles, Kind::Int, tiles.numel(), gpu)?,
        address(OP, o, Kind::BFloat16, q.numel(), gpu)?,
        address(OP, lse, Kind::Float, (heads * tokens) as usize, gpu)?,
        Argument::Count(tokens),
        Argument::Count(kv_heads),
        Argument::Count(heads / kv_heads),
        Argument::Count(window.unwrap_or(0) as i64),
        Argument::Float(scale as f32),
    ];
    let grid = grid(tiles, heads, kv_heads, head_dim);
    // SAFETY: the kernel's parameters in order, a block a tile and column; rows of tiles are the caller's.
    unsafe { launch_early(SOURCE, &format!("tiled_attention_bf16_{head_dim}"), gpu, grid, &arguments) }
}

/// Computes [`tiled_attention`] over a paged cache, which must already contain the rows' keys and values. Allocates nothing.
///
/// # Errors
/// The errors of [`tiled_attention`].
pub fn tiled_attention_cached(
    q: &Tensor,                       // [T, H, hd] bf16
    [k_cache, v_cache]: [&Tensor; 2], // [num_blocks, Hkv, block_size, hd] bf16, block_size a power of two
    block_tables: &Tensor,            // [B, max_blocks] i32
    tiles: &Tensor,                   // [N, 8] i32, `RowTile::words`
    window: Option<usize>,
    scale: f64,
    o: &mut Tensor, // like q
) -> Result<()> {
    const OP: &str = "tiled_attention_cached";
    let TileShape { gpu, tokens, heads, kv_heads, head_dim } = TileShape::of(OP, [q, k_cache, v_cache, o])?;
    let (&[_, _, block_size, _], &[_, max_blocks]) = (&k_cache.size()[..], &block_tables.size()[..]) else {
        return Err(invalid(OP, "a cache of blocks and tables [B, max_blocks]", (k_cache.size(), block_tables.size())));
    };
    if !(block_size as u64).is_power_of_two() || v_cache.size() != k_cache.size() {
        return Err(invalid(OP, "keys and values in blocks of a power of two", (k_cache.size(), v_cache.size())));
    }
    let arguments = [
        address(OP, q, Kind::BFloat16, q.numel(), gpu)?,
        address(OP, k_cache, Kind::BFloat16, k_cache.numel(), gpu)?,
        address(OP, v_cache, Kind::BFloat16, v_cache.numel(), gpu)?,
        address(OP, block_tables, Kind::Int, block_tables.numel(), gpu)?,
        address(OP, tiles, Kind::Int, tiles.numel(), gpu)?,
        address(OP, o, Kind::BFloat16, q.numel(), gpu)?,
        Argument::Count(tokens),
        Argument::Count(kv_heads),
        Argument::Count(heads / kv_heads),
        Argument::Count(i64::from(block_size.trailing_zeros())),
        Argument::Count(max_blocks),
        Argument::Count(window.unwrap_or(0) as i64),
        Argument::Float(scale as f32),
    ];
    let grid = grid(tiles, heads, kv_heads, head_dim);
    // SAFETY: as above; blocks of contexts are the caller's.
    unsafe { launch_early(SOURCE, &format!("tiled_attention_cached_bf16_{head_dim}"), gpu, grid, &arguments) }
}

/// Sizes that the tensors of a launch have in common.
struct TileShape {
    gpu: usize,
    tokens: i64,
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
}

impl TileShape {
    fn of(op: &'static str, [q, k, v, o]: [&Tensor; 4]) -> Result<Self> {
        let (gpu, sizes) = (ordinal(op, q)?, (q.size(), k.size()));
        let (&[tokens, heads, head_dim], Some(&kv_heads)) = (&sizes.0[..], sizes.1.get(1)) else {
            return Err(invalid(op, "queries [T, H, hd] and keys [.., Hkv, .., hd]", sizes));
        };
        let fits = kv_heads > 0 && heads % kv_heads == 0 && sizes.1.last() == Some(&head_dim);
        if !tiled_attention_serves(q.kind(), head_dim) || !fits {
            return Err(invalid(
                op,
                "bfloat16, heads of 64 or 128 columns, and the same number of query heads for every key/value head",
                (q.kind(), sizes),
            ));
        }
        if ![q, k, v, o].into_iter().all(is_aligned) {
            return Err(invalid(op, "tensors at addresses that are multiples of 16 bytes", "others"));
        }
        Ok(Self { gpu, tokens, heads, kv_heads, head_dim })
    }
}

/// Number of blocks, threads and bytes of shared memory of a launch.
fn grid(tiles: &Tensor, heads: i64, kv_heads: i64, head_dim: i64) -> (u32, u32, u32) {
    let columns = kv_heads as usize * ((heads / kv_heads) as usize).div_ceil(BLOCK_HEADS);
    let blocks = tiles.numel() / RowTile::WORDS * columns;
    (blocks as u32, 32 * WARPS as u32, shared_bytes(head_dim as usize) as u32)
}

/// Bytes of shared memory: keys and values of a split, and each row's partial outputs for 8 heads in float32.
fn shared_bytes(head_dim: usize) -> usize {
    2 * 2 * RowTile::SPLIT_TOKENS * head_dim + 4 * RowTile::MOST_ROWS * BLOCK_HEADS * head_dim
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        let own = [
            ("TILE_WARPS", WARPS),
            ("TILE_MEMBERS", MEMBERS),
            ("SPLIT", RowTile::SPLIT_TOKENS),
            ("COLUMNS", BLOCK_HEADS),
        ];
        assert_declared(SOURCE, &own);
        assert_eq!([64, 128].map(shared_bytes), [98_304, 196_608]);
    }
}
