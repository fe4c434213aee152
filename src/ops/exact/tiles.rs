//! Tiles of consecutive rows, for the kernel that reads a context once for all rows of a tile: rows of a micro-batch, or of prompts whose keys and
//! values are in an engine's cache.

use tch::{Device, Kind, Tensor};

use crate::cuda::kernels::{self, AttentionBlocks, RowTile};
use crate::error::Result;
use crate::ops::attention::{Bounds, SharedBounds};
use crate::torch::{Attended, tensor_on};

use super::gpu::SPLIT_TOKENS;

/// Tokens of a unit: the splits of a row's context start at a multiple of this.
const UNIT: i32 = 16;
/// How many times longer a tile takes for a split than a single row (7B on H200: 14.5 and 7.7 us); a tile occupies a whole multiprocessor.
const TILE_COST: usize = 2;

const _: () = assert!(RowTile::SPLIT_TOKENS == SPLIT_TOKENS, "one order of sums");

/// The tiles of a micro-batch.
#[derive(Debug)]
pub(super) struct TiledRows {
    window: Option<usize>,
    tiles: Tensor, // [N, 8] i32
}

impl TiledRows {
    pub(super) fn new(bounds: &Bounds, window: Option<usize>, device: Device) -> Result<Self> {
        Ok(Self { window, tiles: on_device(&tiles_of(bounds, window), device)? })
    }

    /// Computes softmax(scale q k^T) v for each row over its context.
    pub(super) fn attend(&self, [q, k, v]: [&Tensor; 3], scale: f64) -> Result<Attended> {
        let [tokens, heads, _] = q.size()[..] else { panic!("queries [T, H, hd], not {:?}", q.size()) };
        let (q, k, v) = (q.f_contiguous()?, k.f_contiguous()?, v.f_contiguous()?);
        let mut o = q.f_empty_like()?;
        let mut lse = Tensor::f_empty([heads, tokens], (Kind::Float, q.device()))?;
        kernels::tiled_attention([&q, &k, &v], &self.tiles, self.window, scale, &mut o, &mut lse)?;
        Ok(Attended { o, lse: lse.tr() })
    }
}

/// Tiles (groups of query rows) for attention over a paged KV cache. Each run of rows belongs to one sequence.
#[derive(Debug)]
pub struct CachedTiles {
    window: Option<usize>,
    tiles: Tensor, // [N, 8] i32
}

impl CachedTiles {
    /// Creates tiles for consecutive runs of (tokens before the first row, rows). Returns `None` if processing rows one by one would be faster with
    /// these thread blocks, two per multiprocessor: that is so if few rows have long contexts.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(
        runs: &[(usize, usize)],
        window: Option<usize>,
        AttentionBlocks { columns, num_blocks }: AttentionBlocks,
        device: Device,
    ) -> Result<Option<Self>> {
        let (mut tiles, mut row) = (Vec::new(), 0);
        for (own, &(before, count)) in (0..).zip(runs) {
            let of_run = cut(row, row + count as i32, before as i32, window);
            tiles.extend(of_run.map(|(first, count, len)| RowTile {
                first,
                count,
                len,
                prompt: 0,
                prompt_len: 0,
                own,
            }));
            row += count as i32;
        }
        let splits = |tile: &RowTile| splits_of(tile, window);
        let longest = tiles.iter().map(splits).max().unwrap_or(0);
        let of_tiles = (2 * columns * tiles.iter().map(splits).sum::<usize>()).div_ceil(num_blocks).max(longest);
        let of_rows =
            (columns * tiles.iter().map(|tile| tile.count as usize * splits(tile)).sum::<usize>()) / num_blocks;
        if tiles.is_empty() || TILE_COST * of_tiles > of_rows {
            return Ok(None);
        }
        longest_first(&mut tiles, window);
        Ok(Some(Self { window, tiles: on_device(&tiles, device)? }))
    }

    /// Computes softmax(scale q k^T) v for each row over its context.
    ///
    /// # Errors
    /// The errors of [`kernels::tiled_attention_cached`].
    pub fn attend(
        &self,
        q: &Tensor,            // [T, H, hd]
        cache: [&Tensor; 2],   // [num_blocks, Hkv, block_size, hd]
        block_tables: &Tensor, // [B, max_blocks] i32, of the runs
        scale: f64,
        o: &mut Tensor, // like q
    ) -> Result<()> {
        kernels::tiled_attention_cached(q, cache, block_tables, &self.tiles, self.window, scale, o)
    }
}

fn on_device(tiles: &[RowTile], device: Device) -> Result<Tensor> {
    let words: Vec<i32> = tiles.iter().flat_map(RowTile::words).collect();
    tensor_on(&words, device)
}

/// The unit at which the splits of a context of `len` tokens start.
fn first_unit(len: i32, window: Option<usize>) -> i32 {
    window.map_or(0, |window| (len - i32::try_from(window).unwrap_or(i32::MAX)).max(0) / UNIT)
}

/// Divides rows from..to of a sequence with `before` earlier tokens into tiles: (first row, rows, tokens that the first row attends to).
fn cut(from: i32, to: i32, before: i32, window: Option<usize>) -> impl Iterator<Item = (i32, i32, i32)> {
    let len_of = move |row: i32| before + row - from + 1;
    let unit_of = move |row: i32| first_unit(len_of(row), window);
    let mut first = from;
    std::iter::from_fn(move || {
        let start = first;
        let most = (start..to).take(RowTile::MOST_ROWS);
        let count = most.take_while(|&row| unit_of(row) == unit_of(start)).count() as i32;
        first += count;
        (count > 0).then(|| (start, count, len_of(start)))
    })
}

/// Number of splits that a tile's last row reads.
fn splits_of(tile: &RowTile, window: Option<usize>) -> usize {
    let read = tile.len + tile.count - 1 - first_unit(tile.len, window) * UNIT;
    (read as usize).div_ceil(SPLIT_TOKENS)
}

/// Sorts tiles by the amount they read, largest first, so that the thread blocks end at about the same time.
fn longest_first(tiles: &mut [RowTile], window: Option<usize>) {
    tiles.sort_by_key(|tile| std::cmp::Reverse(splits_of(tile, window)));
}

fn tiles_of(bounds: &Bounds, window: Option<usize>) -> Vec<RowTile> {
    let mut tiles = Vec::new();
    let mut add = |rows: &[i64], prompt: Option<&[i64]>| {
        let [own, to] = [rows[0], rows[1]].map(|row| row as i32);
        let (prompt, prompt_len) = prompt.map_or((0, 0), |rows| (rows[0] as i32, (rows[1] - rows[0]) as i32));
        let of_sequence = cut(own, to, prompt_len, window);
        tiles.extend(of_sequence.map(|(first, count, len)| RowTile { first, count, len, prompt, prompt_len, own }));
    };
    match bounds {
        Bounds::Separate(bounds) => bounds.windows(2).for_each(|rows| add(rows, None)),
        Bounds::Shared(SharedBounds { prompts, groups, completions }) => {
            prompts.windows(2).for_each(|rows| add(rows, None));
            for rows in completions.windows(2) {
                let group = groups.windows(2).position(|own| (own[0]..own[1]).contains(&rows[0]));
                add(rows, group.map(|group| &prompts[group..group + 2]));
            }
        }
    }
    longest_first(&mut tiles, window);
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts of 20 and 16 tokens; completions of 3 and 20 tokens for the first and of 2 for the second.
    fn shared() -> Bounds {
        Bounds::Shared(SharedBounds {
            prompts: vec![0, 20, 36],
            groups: vec![36, 59, 61],
            completions: vec![36, 39, 59, 61],
        })
    }

    #[test]
    fn tiles_let_completions_attend_to_their_prompt() {
        let tile = |first, count, len, prompt, prompt_len, own| RowTile { first, count, len, prompt, prompt_len, own };
        assert_eq!(
            tiles_of(&shared(), None),
            [
                tile(0, 16, 1, 0, 0, 0),
                tile(16, 4, 17, 0, 0, 0),
                tile(20, 16, 1, 0, 0, 20),
                tile(36, 3, 21, 0, 20, 36),
                tile(39, 16, 21, 0, 20, 39),
                tile(55, 4, 37, 0, 20, 39),
                tile(59, 2, 17, 20, 16, 59),
            ]
        );
    }

    #[test]
    fn the_longest_attention_tiles_come_first() {
        let lens: Vec<i32> = tiles_of(&Bounds::Separate(vec![0, 100, 700]), None).iter().map(|tile| tile.len).collect();
        assert_eq!((lens[0], lens.len()), (513, 7 + 38));
        assert!(lens.iter().map(|len| (len + 14) / 256).is_sorted_by(|a, b| a >= b), "{lens:?}");
    }

    /// Every row must be in one tile, and the rows of a tile must start reading at the same unit.
    #[test]
    fn sliding_windows_shorten_attention_tiles() {
        for window in [1, 5, 16, 17, 30, 1000] {
            for bounds in [shared(), Bounds::Separate(vec![0, 100, 101, 161])] {
                let mut seen = vec![0; if matches!(bounds, Bounds::Shared(_)) { 61 } else { 161 }];
                for RowTile { first, count, len, .. } in tiles_of(&bounds, Some(window)) {
                    (first..first + count).for_each(|row| seen[row as usize] += 1);
                    let unit = |len: i32| (len - window as i32).max(0) / 16;
                    assert_eq!(unit(len), unit(len + count - 1), "{window}: {first}");
                    assert!((1..=16).contains(&count));
                }
                assert!(seen.iter().all(|&times| times == 1), "{window}: {seen:?}");
            }
        }
    }

    /// Tiling pays for prompts of 512 tokens, but not for a few rows with long contexts.
    #[test]
    fn tiled_attention_is_used_only_where_it_is_faster() {
        let pays = |runs: &[(usize, usize)]| {
            CachedTiles::new(runs, None, AttentionBlocks { columns: 4, num_blocks: 264 }, Device::Cpu).unwrap()
        };
        let tiles = pays(&[(0, 512), (300, 40)]).unwrap().tiles.view([-1, 8]);
        assert_eq!(tiles.size()[0], 32 + 3);
        let own = tiles.select(1, 5);
        assert_eq!(own.eq(1).sum(Kind::Int64).int64_value(&[]), 3);
        assert_eq!(Vec::<i32>::try_from(tiles.get(0)).unwrap(), [256, 16, 257, 0, 0, 0, 0, 0], "of two splits");
        for runs in [&[(0, 17)][..], &[(4000, 8)], &[]] {
            assert!(pays(runs).is_none(), "{runs:?}");
        }
    }
}
