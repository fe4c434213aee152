//! Optimizer state that lives on the host and flows through the device in buckets while it is stepped (`stream`): one
//! arrives, one is computed on and one leaves at the same time.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::residence::Columns;
use crate::error::{Error, Result};
use crate::memory::{HostPool, PendingCopy};

/// Elements of a bucket: long enough that a copy is not felt to start.
pub(super) const BUCKET_LEN: usize = 16 << 20;
/// One for each direction and one for the step.
pub(super) const NUM_BUCKETS: usize = 3;

/// Some consecutive elements of what this rank owns of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub index: usize,        // of the unit
    pub range: Range<usize>, // of the owned part
    start: usize,            // in the state's columns
}

/// Steps a part of this rank's slice of a unit, given its master weights, m and v.
pub(super) type StepPiece<'a> = dyn FnMut(&Range<usize>, [Tensor; 3]) -> Result<()> + 'a;

/// An update's way through the buckets. Until it is finished, its pieces are stepped in order.
#[derive(Debug)]
pub(super) struct Flow {
    pieces: Vec<Piece>,
    next: usize,     // piece to step
    arriving: usize, // piece to fetch
    buckets: Vec<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    state: Tensor,            // [3, BUCKET_LEN]
    copies: Vec<PendingCopy>, // under way: in before the step, out after it
}

impl Flow {
    /// Starts the first pieces on their way. `owned` are the units' columns of the state.
    pub(super) fn start(
        pool: &HostPool,
        columns: Columns,
        owned: impl Iterator<Item = Range<usize>>,
        bucket_len: usize,
        device: Device,
    ) -> Result<Self> {
        let pieces: Vec<Piece> = owned.enumerate().flat_map(|(index, unit)| pieces(index, unit, bucket_len)).collect();
        let longest = pieces.iter().map(|piece| piece.range.len()).max().unwrap_or(0) as i64;
        let bucket =
            || Ok(Bucket { state: Tensor::f_empty([3, longest], (columns.kind, device))?, copies: Vec::new() });
        let buckets = (0..NUM_BUCKETS).map(|_| bucket()).collect::<Result<_>>()?;
        let mut flow = Self { pieces, next: 0, arriving: 0, buckets };
        for _ in 1..NUM_BUCKETS {
            flow.fetch(pool, columns)?;
        }
        Ok(flow)
    }

    /// Steps every piece of unit `index` with `step`, which is given master weights, m and v.
    pub(super) fn step(
        &mut self,
        pool: &mut HostPool,
        columns: Columns,
        index: usize,
        step: &mut StepPiece<'_>,
    ) -> Result<()> {
        while self.pieces.get(self.next).is_some_and(|piece| piece.index == index) {
            let piece = self.pieces[self.next].clone();
            let bucket = &mut self.buckets[self.next % NUM_BUCKETS];
            bucket.copies.drain(..).try_for_each(PendingCopy::hold_libtorch)?;
            let rows = bucket.rows(&piece);
            step(&piece.range, rows.each_ref().map(Tensor::shallow_clone))?;
            for (row, tensor) in rows.iter().enumerate() {
                bucket.copies.push(pool.copy_from_async(columns.byte_offset(row, piece.start), tensor)?);
            }
            self.next += 1;
            self.fetch(pool, columns)?;
        }
        match self.pieces.get(self.next) {
            Some(piece) if piece.index < index => Err(Error::InvalidArgument {
                op: "Optimizer::step",
                expected: format!("unit {} next: streamed state comes in order", piece.index),
                got: format!("unit {index}"),
            }),
            _ => Ok(()),
        }
    }

    /// Lets libtorch, and with it every later copy, wait for what still leaves.
    pub(super) fn finish(self) -> Result<()> {
        self.buckets.into_iter().flat_map(|bucket| bucket.copies).try_for_each(PendingCopy::hold_libtorch)
    }

    /// Starts the next piece on its way into the bucket whose last one has left.
    fn fetch(&mut self, pool: &HostPool, columns: Columns) -> Result<()> {
        let Some(piece) = self.pieces.get(self.arriving) else { return Ok(()) };
        let bucket = &mut self.buckets[self.arriving % NUM_BUCKETS];
        bucket.copies.drain(..).try_for_each(PendingCopy::hold_libtorch)?; // copies in start after what libtorch waits for
        for (row, mut tensor) in bucket.rows(piece).into_iter().enumerate() {
            bucket.copies.push(pool.copy_to_async(columns.byte_offset(row, piece.start), &mut tensor)?);
        }
        self.arriving += 1;
        Ok(())
    }
}

impl Bucket {
    /// Master weights, m and v of a piece.
    fn rows(&self, piece: &Piece) -> [Tensor; 3] {
        [0, 1, 2].map(|row| self.state.get(row).narrow(0, 0, piece.range.len() as i64))
    }
}

/// A unit's columns in pieces of at most `len`.
fn pieces(index: usize, unit: Range<usize>, len: usize) -> impl Iterator<Item = Piece> {
    let first = unit.start;
    unit.clone().step_by(len.max(1)).map(move |start| {
        let end = unit.end.min(start + len);
        Piece { index, range: start - first..end - first, start }
    })
}

/// Bytes of the buckets on the device.
pub(super) fn bucket_bytes(longest_owned: usize, kind: Kind) -> usize {
    NUM_BUCKETS * 3 * longest_owned.min(BUCKET_LEN) * kind.elt_size_in_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: Columns = Columns { count: 23, kind: Kind::Float };

    #[test]
    fn pieces_of_every_unit_pass_once_and_in_order() {
        let mut pool = HostPool::new("flow_test", COLUMNS.bytes(), Device::Cpu, &mut |_, _| ()).unwrap();
        let state = Tensor::arange(69, (Kind::Float, Device::Cpu)).view([3, 23]);
        for bucket_len in [1, 4, 5, 100] {
            pool.copy_from(0, &state).unwrap();
            let units = [0..10, 10..11, 11..11, 11..23];
            let mut flow = Flow::start(&pool, COLUMNS, units.iter().cloned(), bucket_len, Device::Cpu).unwrap();
            for (index, unit) in units.iter().enumerate() {
                let mut seen = 0;
                let mut step = |part: &Range<usize>, [mut master, m, mut v]: [Tensor; 3]| {
                    assert!(part.start == seen && part.len() <= bucket_len, "{part:?}");
                    seen = part.end;
                    master += m;
                    let _ = v.neg_();
                    Ok(())
                };
                flow.step(&mut pool, COLUMNS, index, &mut step).unwrap();
                assert_eq!(seen, unit.len());
            }
            flow.finish().unwrap();
            let mut after = state.zeros_like();
            pool.copy_to(0, &mut after).unwrap();
            let expected = Tensor::stack(&[state.get(0) + state.get(1), state.get(1), -state.get(2)], 0);
            assert_eq!(after, expected, "buckets of {bucket_len}");
        }
    }

    #[test]
    fn units_out_of_order_are_refused() {
        let mut pool = HostPool::new("flow_order_test", COLUMNS.bytes(), Device::Cpu, &mut |_, _| ()).unwrap();
        let mut flow = Flow::start(&pool, COLUMNS, [0..10, 10..23].into_iter(), 4, Device::Cpu).unwrap();
        assert!(flow.step(&mut pool, COLUMNS, 1, &mut |_, _| Ok(())).is_err());
    }
}
