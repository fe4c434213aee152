//! Where the sequences of a packed micro-batch lie; made once, shared by all layers, forward and backward.

use std::cell::OnceCell;
use std::cmp::Reverse;

use tch::{Device, Kind, Tensor};

use crate::torch::Packed;

/// Sequences of similar length, padded to the longest on the right: under a causal mask no real row sees the padding.
#[derive(Debug)]
pub(super) struct Bucket {
    pub sequences: i64,
    pub len: i64,
    /// Row of [T * Hkv, ..] behind each of [sequences, Hkv, len]; padding repeats its sequence's last row.
    pub rows: Tensor,
    /// Entries of `rows` that are padding.
    pub padding: Tensor,
}

/// All sequences in buckets.
#[derive(Debug)]
pub(super) struct Padded {
    pub buckets: Vec<Bucket>,
    /// Row of the buckets' padded rows, one bucket after the other, behind each of [T, Hkv].
    pub unpad: Tensor,
}

/// The layout of a packed micro-batch for attention. What a kernel needs of it is made on first use.
#[derive(Debug)]
pub struct PackedLayout {
    cu_seqlens: Vec<i64>,
    device: Device,
    padded: OnceCell<Padded>,
    packed: OnceCell<Packed>,
    pub(super) num_tokens: i64,
    pub(super) num_kv_heads: i64,
    pub(super) sliding_window: Option<i64>,
}

impl PackedLayout {
    /// `cu_seqlens` [N + 1] begins with 0 and does not decrease; sequence n has rows `cu_seqlens[n]..cu_seqlens[n + 1]`.
    /// A token sees itself and the `sliding_window - 1` before it, or all before it.
    pub fn new(cu_seqlens: &[i64], num_kv_heads: usize, sliding_window: Option<usize>, device: Device) -> Self {
        Self {
            num_tokens: cu_seqlens.last().copied().unwrap_or(0),
            cu_seqlens: cu_seqlens.to_vec(),
            device,
            padded: OnceCell::new(),
            packed: OnceCell::new(),
            num_kv_heads: num_kv_heads as i64,
            sliding_window: sliding_window.map(|window| window as i64),
        }
    }

    /// For attention by buckets.
    pub(super) fn padded(&self) -> &Padded {
        self.padded.get_or_init(|| Padded::new(&self.cu_seqlens, self.num_kv_heads, self.device))
    }

    /// For attention that reads packed sequences as they lie.
    pub(super) fn packed(&self) -> &Packed {
        self.packed.get_or_init(|| {
            let bounds: Vec<i32> = self.cu_seqlens.iter().map(|&bound| bound as i32).collect();
            Packed {
                cu_seqlens: Tensor::from_slice(&bounds).to_device(self.device),
                max_len: self.cu_seqlens.windows(2).map(|bounds| bounds[1] - bounds[0]).max().unwrap_or(0),
                window: self.sliding_window,
            }
        })
    }
}

impl Padded {
    fn new(cu_seqlens: &[i64], heads: i64, device: Device) -> Self {
        let mut sequences: Vec<(i64, i64)> = cu_seqlens.windows(2).map(|w| (w[0], w[1] - w[0])).collect();
        sequences.retain(|&(_, len)| len > 0);
        sequences.sort_by_key(|&(start, len)| (Reverse(len), start));
        let mut unpad = vec![0; (cu_seqlens.last().copied().unwrap_or(0) * heads) as usize];
        let mut padded_rows = 0;
        let mut buckets = Vec::new();
        for members in sequences.chunk_by(same_bucket(&sequences)) {
            let bucket = Bucket::new(members, heads, device, |row, padded| unpad[row] = padded_rows + padded);
            padded_rows += bucket.sequences * heads * bucket.len;
            buckets.push(bucket);
        }
        Self { buckets, unpad: Tensor::from_slice(&unpad).to_device(device) }
    }
}

/// Whether a sequence joins the bucket of the one before it (they come longest first): its bucket's longest is at most a
/// third longer, or 16 tokens.
fn same_bucket(sequences: &[(i64, i64)]) -> impl FnMut(&(i64, i64), &(i64, i64)) -> bool {
    let mut longest = sequences.first().map_or(0, |&(_, len)| len);
    move |_, &(_, len)| {
        let joins = len * 4 >= longest * 3 || longest - len <= 16;
        if !joins {
            longest = len;
        }
        joins
    }
}

impl Bucket {
    /// `place` is told where each row of [T * Hkv] goes among this bucket's padded rows.
    fn new(members: &[(i64, i64)], heads: i64, device: Device, mut place: impl FnMut(usize, i64)) -> Self {
        let (sequences, len) = (members.len() as i64, members[0].1);
        let mut rows = Vec::with_capacity((sequences * heads * len) as usize);
        let mut padding = Vec::new();
        for &(start, own_len) in members {
            for head in 0..heads {
                for position in 0..len {
                    let padded = rows.len() as i64;
                    let row = (start + position.min(own_len - 1)) * heads + head;
                    rows.push(row);
                    if position < own_len {
                        place(row as usize, padded);
                    } else {
                        padding.push(padded);
                    }
                }
            }
        }
        let tensor = |indexes: &[i64]| Tensor::from_slice(indexes).to_device(device).to_kind(Kind::Int64);
        Self { sequences, len, rows: tensor(&rows), padding: tensor(&padding) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_found_again() {
        let layout = Padded::new(&[0, 5, 5, 45, 48, 90], 2, Device::Cpu);
        assert_eq!(layout.buckets.iter().map(|b| (b.sequences, b.len)).collect::<Vec<_>>(), [(2, 42), (2, 5)]);
        let rows: Vec<_> = layout.buckets.iter().map(|b| &b.rows).collect();
        let found = Tensor::cat(&rows, 0).index_select(0, &layout.unpad);
        assert!(found.equal(&Tensor::arange(180, (Kind::Int64, Device::Cpu))));
        let padding: i64 = layout.buckets.iter().map(|b| b.padding.size()[0]).sum();
        assert_eq!(padding, 2 * (2 + 2));
    }
}
