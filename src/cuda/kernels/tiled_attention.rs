//! Attention of the rows of a packed micro-batch with the bits of decode attention.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, invalid, is_aligned, launch_early, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::TILED_ATTENTION;
pub(super) const NAMES: &[&str] = &["tiled_attention_bf16_64", "tiled_attention_bf16_128"];

const WARPS: usize = 8;
/// Rows of a warp.
const MEMBERS: usize = 2;
/// Query heads that one block serves.
const BLOCK_HEADS: usize = 8;

/// Neighbouring rows of one sequence, at most [`RowTile::MOST_ROWS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowTile {
    /// The first row.
    pub first: i32,
    /// Rows.
    pub count: i32,
    /// Tokens that the first row sees, itself included and without a window; the next one sees one more.
    pub len: i32,
    /// The row of the sequence's first token where that is in a prompt that sequences share.
    pub prompt: i32,
    /// Rows of that prompt.
    pub prompt_len: i32,
    /// The row of the token behind them; the others follow.
    pub own: i32,
}

impl RowTile {
    /// Most rows of one.
    pub const MOST_ROWS: usize = WARPS * MEMBERS;
    /// Tokens of a context that are summed at once.
    pub const SPLIT_TOKENS: usize = 256;
    /// i32 words of one on the device.
    pub const WORDS: usize = 8;

    /// The tile as words of the device, in the order in which the kernel reads them.
    pub fn words(&self) -> [i32; Self::WORDS] {
        [self.first, self.count, self.len, self.prompt, self.prompt_len, self.own, 0, 0]
    }
}

/// Whether [`tiled_attention`] serves queries of that kind and width of heads. One of 256 columns would need more shared memory than
/// there is.
pub fn tiled_attention_serves(kind: Kind, head_dim: i64) -> bool {
    kind == Kind::BFloat16 && matches!(head_dim, 64 | 128)
}

/// o = softmax(scale q k^T) v of each row over the tokens of its sequence up to its own, of which it sees the last `window`, and the
/// natural logarithm of the softmax's sum. A row has the bits that `paged_attention` gives it with plans of a fixed split of 256 tokens.
/// Every row must be in one tile, and with a window the first tokens that the rows of a tile see must stand in the same 16 from a
/// multiple on.
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
    let (gpu, sizes) = (ordinal(OP, q)?, (q.size(), k.size()));
    let ([tokens, heads, head_dim], [_, kv_heads, _]) = (&sizes.0[..], &sizes.1[..]) else {
        return Err(invalid(OP, "queries [T, H, hd] and keys [T, Hkv, hd]", sizes));
    };
    let (tokens, heads, head_dim, kv_heads) = (*tokens, *heads, *head_dim, *kv_heads);
    if !tiled_attention_serves(q.kind(), head_dim) || kv_heads == 0 || heads % kv_heads != 0 {
        return Err(invalid(OP, "bfloat16, heads in whole groups of 64 or 128 columns", (q.kind(), sizes)));
    }
    if ![q, k, v, o].into_iter().all(is_aligned) {
        return Err(invalid(OP, "tensors on multiples of 16 bytes", "others"));
    }
    let num_tiles = tiles.numel() / RowTile::WORDS;
    let of_kv_heads = (tokens * kv_heads * head_dim) as usize;
    let arguments = [
        address(OP, q, Kind::BFloat16, (tokens * heads * head_dim) as usize, gpu)?,
        address(OP, k, Kind::BFloat16, of_kv_heads, gpu)?,
        address(OP, v, Kind::BFloat16, of_kv_heads, gpu)?,
        address(OP, tiles, Kind::Int, num_tiles * RowTile::WORDS, gpu)?,
        address(OP, o, Kind::BFloat16, q.numel(), gpu)?,
        address(OP, lse, Kind::Float, (heads * tokens) as usize, gpu)?,
        Argument::Count(tokens),
        Argument::Count(kv_heads),
        Argument::Count(heads / kv_heads),
        Argument::Count(window.unwrap_or(0) as i64),
        Argument::Float(scale as f32),
    ];
    let columns = kv_heads as usize * ((heads / kv_heads) as usize).div_ceil(BLOCK_HEADS);
    let grid = ((num_tiles * columns) as u32, 32 * WARPS as u32, shared_bytes(head_dim as usize) as u32);
    // SAFETY: the kernel's parameters in order, a block a tile and column; rows of tiles are the caller's.
    unsafe { launch_early(SOURCE, &format!("tiled_attention_bf16_{head_dim}"), gpu, grid, &arguments) }
}

/// Keys and values of a split, and each row's outputs so far of 8 heads in float32.
fn shared_bytes(head_dim: usize) -> usize {
    2 * 2 * RowTile::SPLIT_TOKENS * head_dim + 4 * RowTile::MOST_ROWS * BLOCK_HEADS * head_dim
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn the_source_has_the_same_constants() {
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
