//! The rows of a micro-batch in tiles of neighbours, for the kernel that reads a context once for all rows of a tile.

use tch::{Device, Kind, Tensor};

use crate::cuda::kernels::{self, RowTile};
use crate::error::Result;
use crate::ops::attention::{Bounds, SharedBounds};
use crate::torch::{Attended, tensor_on};

use super::gpu::SPLIT_TOKENS;

/// Tokens of a unit: a row's splits begin at a multiple of them.
const UNIT: i32 = 16;

const _: () = assert!(RowTile::SPLIT_TOKENS == SPLIT_TOKENS, "one order of sums");

/// The tiles of a micro-batch.
#[derive(Debug)]
pub(super) struct TiledRows {
    window: Option<usize>,
    tiles: Tensor, // [N, 8] i32
}

impl TiledRows {
    pub(super) fn new(bounds: &Bounds, window: Option<usize>, device: Device) -> Result<Self> {
        let words: Vec<i32> = tiles_of(bounds, window).iter().flat_map(RowTile::words).collect();
        Ok(Self { window, tiles: tensor_on(&words, device)? })
    }

    /// softmax(scale q k^T) v of each row over its context.
    pub(super) fn attend(&self, [q, k, v]: [&Tensor; 3], scale: f64) -> Result<Attended> {
        let [tokens, heads, _] = q.size()[..] else { panic!("queries [T, H, hd], not {:?}", q.size()) };
        let (q, k, v) = (q.f_contiguous()?, k.f_contiguous()?, v.f_contiguous()?);
        let mut o = q.f_empty_like()?;
        let mut lse = Tensor::f_empty([heads, tokens], (Kind::Float, q.device()))?;
        kernels::tiled_attention([&q, &k, &v], &self.tiles, self.window, scale, &mut o, &mut lse)?;
        Ok(Attended { o, lse: lse.tr() })
    }
}

/// Splits of a context of `len` tokens begin at this unit.
fn first_unit(len: i32, window: Option<usize>) -> i32 {
    window.map_or(0, |window| (len - i32::try_from(window).unwrap_or(i32::MAX)).max(0) / UNIT)
}

/// Those that read most first, so that the blocks end together.
fn tiles_of(bounds: &Bounds, window: Option<usize>) -> Vec<RowTile> {
    let mut tiles = Vec::new();
    let mut add = |rows: &[i64], prompt: Option<&[i64]>| {
        let [from, to] = [rows[0], rows[1]].map(|row| row as i32);
        let (prompt, prompt_len) = prompt.map_or((0, 0), |rows| (rows[0] as i32, (rows[1] - rows[0]) as i32));
        let unit_of = |row: i32| first_unit(prompt_len + row - from + 1, window);
        let mut first = from;
        while first < to {
            let most = (first..to).take(RowTile::MOST_ROWS);
            let count = most.take_while(|&row| unit_of(row) == unit_of(first)).count() as i32;
            tiles.push(RowTile { first, count, len: prompt_len + first - from + 1, prompt, prompt_len, own: from });
            first += count;
        }
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
    let splits = |tile: &RowTile| {
        let read = tile.len + tile.count - 1 - first_unit(tile.len, window) * UNIT;
        (read as usize).div_ceil(SPLIT_TOKENS)
    };
    tiles.sort_by_key(|tile| std::cmp::Reverse(splits(tile)));
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts of 20 and 16 tokens, completions of 3 and 20 behind the first and of 2 behind the second.
    fn shared() -> Bounds {
        Bounds::Shared(SharedBounds {
            prompts: vec![0, 20, 36],
            groups: vec![36, 59, 61],
            completions: vec![36, 39, 59, 61],
        })
    }

    #[test]
    fn completions_see_their_prompts_rows() {
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
    fn longest_tiles_come_first() {
        let lens: Vec<i32> = tiles_of(&Bounds::Separate(vec![0, 100, 700]), None).iter().map(|tile| tile.len).collect();
        assert_eq!((lens[0], lens.len()), (513, 7 + 38));
        assert!(lens.iter().map(|len| (len + 14) / 256).is_sorted_by(|a, b| a >= b), "{lens:?}");
    }

    /// Every row is in one tile, and the rows of a tile begin to read at the same unit.
    #[test]
    fn windows_cut_tiles() {
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
}
