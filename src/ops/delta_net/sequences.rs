//! Positions of the sequences of a packed batch, for the convolution and for the delta rule.

use tch::{Device, Kind, Tensor};

use crate::cuda::kernels::DeltaLayout;

/// Tokens that the delta rule computes together.
pub(super) const CHUNK: i64 = 64;

/// Sequences of a packed batch of T rows: sequence n has the rows `cu_seqlens[n]..cu_seqlens[n + 1]`. Created once and used by all layers.
#[derive(Debug)]
pub struct Sequences {
    /// For every distance, the row that precedes each row by that distance in its sequence. Rows from T on are those of the tails: `width - 1` per
    /// sequence.
    pub(super) earlier: Vec<Tensor>, // width times [T] int64
    /// Indices of the last `width - 1` rows of every sequence, tails included.
    pub(super) tails: Tensor, // [N (width - 1)] int64
    pub(super) chunks: Chunks,
    /// The chunks in the form that the CUDA kernels read.
    pub(super) layout: DeltaLayout,
    pub(super) num_sequences: i64,
}

/// Sequences divided into chunks of [`CHUNK`] tokens, the last one padded. Chunks are ordered by their index within the sequence, so that the first
/// chunks of all sequences come first, and within an index by length of the sequence, longest first. So a step of the scan over chunks reads a
/// contiguous range.
#[derive(Debug)]
pub(super) struct Chunks {
    /// The position of every row in [chunks, CHUNK].
    pub(super) places: Tensor, // [T] int64
    /// The number of sequences that have a first, second, .. chunk.
    pub(super) active: Vec<i64>,
    /// Indices of the sequences, those with the most chunks first.
    pub(super) order: Tensor, // [N] int64
    /// The position of every sequence in `order`.
    pub(super) rank: Tensor, // [N] int64
}

impl Sequences {
    /// Creates the tables for a convolution over `width` tokens. `cu_seqlens` [N + 1] starts with 0 and does not decrease; a sequence may be empty.
    pub fn new(cu_seqlens: &[i64], width: i64, device: Device) -> Self {
        let num_tokens = cu_seqlens.last().copied().unwrap_or(0);
        let tail = width - 1;
        let row = |n: usize, at: i64| match at {
            0.. => cu_seqlens[n] + at,
            before => num_tokens + (n as i64 + 1) * tail + before,
        };
        let lens: Vec<i64> = cu_seqlens.windows(2).map(|bounds| bounds[1] - bounds[0]).collect();
        let tokens = || lens.iter().enumerate().flat_map(|(n, &len)| (0..len).map(move |at| (n, at)));
        let earlier = (0..width).map(|distance| tokens().map(|(n, at)| row(n, at - distance)).collect::<Vec<_>>());
        let last = lens.iter().enumerate().flat_map(|(n, &len)| (len - tail..len).map(move |at| (n, at)));
        let last: Vec<_> = last.map(|(n, at)| row(n, at)).collect();
        Self {
            earlier: earlier.map(|rows| Tensor::from_slice(&rows).to_device(device)).collect(),
            tails: Tensor::from_slice(&last).to_device(device),
            chunks: Chunks::new(&lens, device),
            layout: layout(&lens, device),
            num_sequences: lens.len() as i64,
        }
    }
}

fn layout(lens: &[i64], device: Device) -> DeltaLayout {
    let (mut chunks, mut sequences, mut first) = (Vec::new(), Vec::new(), 0);
    for (n, &len) in lens.iter().enumerate() {
        let (index, begin) = (n as i64, chunks.len() as i64);
        let starts = (0..len).step_by(CHUNK as usize);
        chunks.extend(starts.map(|at| [first + at, (len - at).min(CHUNK), index, at]));
        sequences.push([index, begin, chunks.len() as i64 - begin, len]);
        first += len;
    }
    sequences.sort_by_key(|[_, _, count, _]| std::cmp::Reverse(*count));
    let table =
        |rows: &[i64], width: i64| Tensor::from_slice(rows).to_kind(Kind::Int).view([-1, width]).to_device(device);
    DeltaLayout {
        chunks: table(&chunks.concat(), 4),
        sequences: table(&sequences.concat(), 4),
        lengths: table(lens, 1),
        num_tokens: first,
    }
}

impl Chunks {
    fn new(lens: &[i64], device: Device) -> Self {
        let num_chunks = |n: usize| (lens[n] + CHUNK - 1) / CHUNK;
        let mut order: Vec<usize> = (0..lens.len()).collect();
        order.sort_by_key(|&n| std::cmp::Reverse(num_chunks(n)));
        let mut rank = vec![0; lens.len()];
        order.iter().enumerate().for_each(|(place, &n)| rank[n] = place as i64);
        let steps = order.first().map_or(0, |&n| num_chunks(n));
        let active: Vec<i64> =
            (0..steps).map(|step| order.iter().filter(|&&n| num_chunks(n) > step).count() as i64).collect();
        let first = |step: i64| active[..step as usize].iter().sum::<i64>();
        let places = lens.iter().enumerate().flat_map(|(n, &len)| {
            let chunk = move |step: i64| (step, (len - step * CHUNK).min(CHUNK));
            (0..num_chunks(n)).map(chunk).map(move |(step, tokens)| (n, step, tokens))
        });
        let places = places.flat_map(|(n, step, tokens)| {
            let start = (first(step) + rank[n]) * CHUNK;
            start..start + tokens
        });
        let places: Vec<i64> = places.collect();
        let order: Vec<i64> = order.into_iter().map(|n| n as i64).collect();
        let tensor = |values: &[i64]| Tensor::from_slice(values).to_device(device);
        Self { places: tensor(&places), order: tensor(&order), rank: tensor(&rank), active }
    }

    /// Number of chunks of all sequences.
    pub(super) fn count(&self) -> i64 {
        self.active.iter().sum()
    }

    /// For every step of the scan: its first chunk, and its number of sequences.
    pub(super) fn steps(&self) -> impl DoubleEndedIterator<Item = (i64, i64)> {
        let mut first = 0;
        let steps = self.active.iter().map(|&count| {
            first += count;
            (first - count, count)
        });
        steps.collect::<Vec<_>>().into_iter()
    }
}
