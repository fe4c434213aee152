//! Quantizes a matrix whose rows are sorted by group to e4m3 and transposes it, with one scale per group and column. A grouped GEMM for weight
//! gradients sums over the rows of a group; in the transpose these are contiguous, and padded with zeros to whole tiles.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::fp8::{ScaledRows, fp8_trains};
use super::fp8_columns::{SOURCE, THREADS, TILE_COLUMNS, TILE_ROWS};
use super::launch::{Argument, address, address_or_null, invalid, is_aligned, launch, launch_early, ordinal};
use crate::error::Result;

/// Number of 32-bit words that describe a tile: its group, its first row, its number of rows, and whether it is the group's first tile.
const TILE_WORDS: usize = 4;

/// Tiles of a matrix whose rows are sorted by group. Each tile has up to 128 rows of one group.
#[derive(Debug)]
pub struct GroupTiles {
    /// Number of tiles before each group, followed by the number of all tiles.
    pub(super) starts: Tensor, // [E + 1] i32
    tiles: Tensor, // [most, 4] i32
    rows: usize,
}

impl GroupTiles {
    /// Cuts `rows` rows into tiles, on the device; the host knows only the maximum number of tiles. The rows of a group begin at the end of the
    /// previous group and end at the group's own entry of `ends`.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for ends of another dtype; [`crate::Error::OutOfMemory`]; [`crate::Error::Cuda`].
    pub fn new(ends: &Tensor /* [E] i32, never falling, the last is `rows` */, rows: usize) -> Result<Self> {
        const OP: &str = "fp8_group_tiles";
        let (gpu, groups) = (ordinal(OP, ends)?, ends.numel());
        let most = most_tiles(groups, rows);
        let ints = |numel: usize| Tensor::f_empty([numel as i64], (Kind::Int, ends.device()));
        let (starts, tiles) = (ints(groups + 1)?, ints(TILE_WORDS * most)?);
        let arguments = [
            address(OP, ends, Kind::Int, groups, gpu)?,
            address(OP, &starts, Kind::Int, groups + 1, gpu)?,
            address(OP, &tiles, Kind::Int, TILE_WORDS * most, gpu)?,
            Argument::Count(groups as i64),
            Argument::Count(most as i64),
        ];
        // SAFETY: the arguments are in the order of the kernel's parameters; the caller promises that no end exceeds `rows`, so there are at most
        // `most` tiles.
        unsafe { launch(SOURCE, OP, gpu, (1, THREADS as u32, 0), &arguments)? };
        Ok(Self { starts, tiles, rows })
    }

    fn most(&self) -> usize {
        self.tiles.numel() / TILE_WORDS
    }

    /// Number of elements of a row of the transposed matrix, with padding.
    pub(super) fn pitch(&self) -> usize {
        self.most() * TILE_ROWS
    }

    /// Number of groups.
    pub(super) fn groups(&self) -> usize {
        self.starts.numel() - 1
    }
}

/// Maximum number of tiles: all full tiles, and one partial tile for each group that has rows.
fn most_tiles(groups: usize, rows: usize) -> usize {
    rows / TILE_ROWS + groups.min(rows)
}

/// Quantizes x to e4m3 and transposes it: values [K, pitch] and scales [E K]. The scale of a group's part of a column comes from its largest absolute
/// value; values are rounded to nearest. If `tokens` is given, x has one row per token, and row r of the matrix is row `tokens[r]` of x. The scales
/// of groups without rows are not written. Needs sm_89 or later.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit, [`crate::Error::OutOfMemory`]; [`crate::Error::Cuda`].
pub fn fp8_group_columns(
    x: &Tensor,              // [R, K] bf16, or [T, K]
    tokens: Option<&Tensor>, // [R] i64
    tiles: &GroupTiles,
) -> Result<ScaledRows> {
    const OP: &str = "fp8_group_columns";
    let gpu = ordinal(OP, x)?;
    let &[rows, columns] = &x.size()[..] else { return Err(invalid(OP, "rows", x.size())) };
    let columns = columns as usize;
    if !fp8_trains([16, columns]) || !is_aligned(x) || (tokens.is_none() && rows != tiles.rows as i64) {
        return Err(invalid(OP, format!("{} rows of a multiple of 16", tiles.rows), x.size()));
    }
    let (groups, pitch) = (tiles.groups(), tiles.pitch());
    let make = |shape: &[i64], kind| Tensor::f_empty(shape, (kind, x.device()));
    let all = groups * columns;
    let values = make(&[columns as i64, pitch as i64], Kind::Float8e4m3fn)?;
    let to = ScaledRows { values, scales: make(&[all as i64], Kind::Float)? };
    if tiles.most() == 0 {
        return Ok(to);
    }
    let peaks = Tensor::f_zeros([all as i64], (Kind::Int, x.device()))?; // [E K]
    let from = [
        address(OP, x, Kind::BFloat16, x.numel(), gpu)?,
        address_or_null(OP, tokens, Kind::Int64, tiles.rows, gpu)?,
        address(OP, &tiles.tiles, Kind::Int, TILE_WORDS * tiles.most(), gpu)?,
        address(OP, &peaks, Kind::Int, all, gpu)?,
    ];
    let (width, threads) = (Argument::Count(columns as i64), THREADS as u32);
    let across = columns.div_ceil(THREADS);
    let sizes = [width, Argument::Count(across as i64)];
    let shape = ((tiles.most() * across) as u32, threads, 0);
    // SAFETY: the arguments are in the order of the kernel's parameters; each block has THREADS columns of a tile. Stream order zeroes the peaks
    // before.
    unsafe { launch(SOURCE, "fp8_group_peaks", gpu, shape, &[&from[..], &sizes].concat())? };
    let across = columns.div_ceil(TILE_COLUMNS);
    let out = [
        address(OP, &to.values, Kind::Float8e4m3fn, columns * pitch, gpu)?,
        address(OP, &to.scales, Kind::Float, all, gpu)?,
        width,
        Argument::Count(across as i64),
        Argument::Count(pitch as i64),
    ];
    let shape = ((tiles.most() * across) as u32, threads, 0);
    // SAFETY: the arguments are in the order of the kernel's parameters; each block has TILE_COLUMNS columns of a tile. The peaks are freed in stream
    // order.
    unsafe { launch_early(SOURCE, OP, gpu, shape, &[&from[..], &out].concat())? };
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_room_however_rows_are_spread() {
        let tiles = |sizes: &[usize]| sizes.iter().map(|size| size.div_ceil(TILE_ROWS)).sum::<usize>();
        for sizes in [&[0, 0][..], &[1, 1, 1], &[128, 128], &[129, 127, 0], &[1, 129, 257], &[1000], &[0, 1]] {
            assert!(tiles(sizes) <= most_tiles(sizes.len(), sizes.iter().sum()), "{sizes:?}");
        }
        assert_eq!(most_tiles(128, 131_072), 1024 + 128);
        assert_eq!(most_tiles(128, 0), 0);
    }
}
