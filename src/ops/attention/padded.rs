//! Buckets of runs of similar length, padded on the right to the longest, for kernels that need runs of equal length.

use std::cmp::Reverse;

use tch::{Device, Kind, Tensor};

use super::runs::Sees;
use crate::error::Result;
use crate::torch;

/// The queries or the keys of a bucket.
#[derive(Debug)]
pub(super) struct Side {
    /// Length to which runs are padded.
    pub len: i64,
    /// For each entry of the padded [runs, Hkv, len], the index of its row in [T * Hkv, ..]. Padding repeats the run's last row.
    rows: Tensor,
    /// Indices of the entries of `rows` that are padding.
    pub padding: Tensor,
}

/// A bucket of runs of similar length. B = runs * Hkv, L padded length of the queries, Lk of the keys.
#[derive(Debug)]
pub(super) struct LengthBucket {
    pub q: Side,
    pub k: Side,
    sees: Sees,
}

/// All runs, in buckets.
#[derive(Debug)]
pub(super) struct Padded {
    pub buckets: Vec<LengthBucket>,
    /// For each row of [T, Hkv], the index of its padded row, counted over all buckets in order.
    pub unpad_q: Tensor,
    pub unpad_k: Tensor,
}

/// A run's queries and keys, each as (first row, length).
#[derive(Debug, Clone, Copy)]
struct PaddedRun {
    q: (i64, i64),
    k: (i64, i64),
}

impl Padded {
    pub(super) fn new(q: &[i64], k: &[i64], sees: Sees, heads: i64, device: Device) -> Result<Self> {
        let spans = |bounds: &[i64]| bounds.windows(2).map(|w| (w[0], w[1] - w[0])).collect::<Vec<_>>();
        let mut runs: Vec<PaddedRun> = spans(q).into_iter().zip(spans(k)).map(|(q, k)| PaddedRun { q, k }).collect();
        runs.retain(|run| run.q.1 > 0);
        runs.sort_by_key(|run| (Reverse(run.q.1), run.q.0));
        let num_rows = |bounds: &[i64]| (bounds.last().copied().unwrap_or(0) * heads) as usize;
        let (mut unpad_q, mut unpad_k) = (Unpad::new(num_rows(q)), Unpad::new(num_rows(k)));
        let mut buckets = Vec::new();
        for members in runs.chunk_by(same_bucket(&runs)) {
            let side = |run: fn(&PaddedRun) -> (i64, i64), unpad: &mut Unpad| {
                Side::new(&members.iter().map(run).collect::<Vec<_>>(), heads, device, unpad)
            };
            let (q, k) = (side(|run| run.q, &mut unpad_q)?, side(|run| run.k, &mut unpad_k)?);
            buckets.push(LengthBucket { q, k, sees });
        }
        let [unpad_q, unpad_k] = [torch::tensor_on(&unpad_q.rows, device)?, torch::tensor_on(&unpad_k.rows, device)?];
        Ok(Self { buckets, unpad_q, unpad_k })
    }
}

/// Positions of the rows of [T * Hkv] among the padded rows of all buckets.
struct Unpad {
    rows: Vec<i64>,
    num_padded: i64,
}

impl Unpad {
    fn new(num_rows: usize) -> Self {
        Self { rows: vec![0; num_rows], num_padded: 0 }
    }
}

/// Decides whether a run joins the bucket of the run before it. Runs are sorted by queries, longest first.
fn same_bucket(runs: &[PaddedRun]) -> impl FnMut(&PaddedRun, &PaddedRun) -> bool {
    let mut first = runs.first().copied();
    move |_, run| {
        let joins = first.is_some_and(|first| similar(first.q.1, run.q.1) && similar(first.k.1, run.k.1));
        if !joins {
            first = Some(*run);
        }
        joins
    }
}

/// Whether the longer of two lengths exceeds the shorter one by at most a third, or by at most 16 tokens.
fn similar(a: i64, b: i64) -> bool {
    let (short, long) = (a.min(b), a.max(b));
    short * 4 >= long * 3 || long - short <= 16
}

impl Side {
    fn new(spans: &[(i64, i64)], heads: i64, device: Device, unpad: &mut Unpad) -> Result<Self> {
        let len = spans.iter().map(|&(_, len)| len).max().unwrap_or(0);
        let (mut rows, mut padding) = (Vec::new(), Vec::new());
        for &(start, own_len) in spans {
            for head in 0..heads {
                for position in 0..len {
                    let padded = rows.len() as i64;
                    let row = (start + position.min(own_len - 1)) * heads + head;
                    rows.push(row);
                    if position < own_len {
                        unpad.rows[row as usize] = unpad.num_padded + padded;
                    } else {
                        padding.push(padded);
                    }
                }
            }
        }
        unpad.num_padded += rows.len() as i64;
        Ok(Self { len, rows: torch::tensor_on(&rows, device)?, padding: torch::tensor_on(&padding, device)? })
    }

    /// Copies [T, heads, hd] into padded form [B, len, heads / Hkv, hd].
    pub(super) fn gather(&self, t: &Tensor, num_kv_heads: i64) -> Result<Tensor> {
        let size = t.size();
        let group = size[1] / num_kv_heads;
        let rows = t.f_reshape([size[0] * num_kv_heads, group * size[2]])?;
        Ok(rows.f_index_select(0, &self.rows)?.view([-1, self.len, group, size[2]]))
    }
}

impl LengthBucket {
    /// Whether libtorch's flash attention needs no mask other than its own causal one.
    pub(super) fn is_plain(&self) -> bool {
        match self.sees {
            Sees::Before { window } => window.is_none_or(|window| window >= self.q.len),
            Sees::All => self.k.padding.numel() == 0,
        }
    }

    pub(super) fn is_causal(&self) -> bool {
        self.sees != Sees::All
    }

    /// The mask to add to the scores, broadcastable to [B, L, G, Lk]: 0 if a query attends to a key, else -inf.
    pub(super) fn mask(&self, options: (Kind, Device)) -> Result<Tensor> {
        let hidden = |shape: &[i64]| torch::full(shape, f64::NEG_INFINITY, options);
        let len = self.q.len;
        Ok(match self.sees {
            Sees::Before { window: Some(window) } if window < len => {
                let future = hidden(&[len, len])?.f_triu(1)?;
                future.f_add(&hidden(&[len, len])?.f_tril(-window)?)?.view([1, len, 1, len])
            }
            Sees::Before { .. } => hidden(&[len, len])?.f_triu(1)?.view([1, len, 1, len]),
            Sees::All => {
                let mut seen = Tensor::f_zeros([self.k.rows.numel() as i64], options)?;
                seen.f_index_fill_(0, &self.k.padding, f64::NEG_INFINITY)?.view([-1, 1, 1, self.k.len])
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: Sees = Sees::Before { window: None };

    #[test]
    fn padded_attention_rows_map_back_to_packed_rows() {
        let bounds = [0, 5, 5, 45, 48, 90];
        let padded = Padded::new(&bounds, &bounds, BEFORE, 2, Device::Cpu).unwrap();
        assert_eq!(padded.buckets.iter().map(|b| (b.q.len, b.k.len)).collect::<Vec<_>>(), [(42, 42), (5, 5)]);
        let rows: Vec<_> = padded.buckets.iter().map(|b| &b.q.rows).collect();
        let found = Tensor::cat(&rows, 0).index_select(0, &padded.unpad_q);
        assert!(found.equal(&Tensor::arange(180, (Kind::Int64, Device::Cpu))));
        let num_padding: usize = padded.buckets.iter().map(|b| b.q.padding.numel()).sum();
        assert_eq!(num_padding, 2 * (2 + 2));
    }

    #[test]
    fn padded_runs_are_bucketed_by_query_and_key_length() {
        let padded = Padded::new(&[0, 60, 120, 180], &[0, 40, 100, 101], Sees::All, 1, Device::Cpu).unwrap();
        assert_eq!(
            padded.buckets.iter().map(|b| (b.q.len, b.k.len)).collect::<Vec<_>>(),
            [(60, 40), (60, 60), (60, 1)]
        );
        let padded = Padded::new(&[0, 60, 120], &[0, 10, 18], Sees::All, 1, Device::Cpu).unwrap();
        let [bucket] = &padded.buckets[..] else { panic!("{padded:?}") };
        let mask = bucket.mask((Kind::Float, Device::Cpu)).unwrap();
        assert_eq!((mask.size(), bucket.is_plain()), (vec![2, 1, 1, 10], false));
        assert_eq!(mask.isinf().sum(Kind::Int64).int64_value(&[]), 2);
    }
}
