//! Optimizer state on the host that is streamed through device buckets during a step (`stream`): while one bucket is computed, the next arrives and
//! the previous one is copied back.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::state_layout::{Cells, StateForm, StateLayout, StatePart, StateRun};
use crate::error::{Error, Result};
use crate::memory::{HostPool, PendingCopy};

/// Elements of a bucket: large enough to hide the start-up time of a copy. A multiple of the block size of 8-bit moments.
pub(super) const BUCKET_LEN: usize = 16 << 20;
/// Number of buckets: one for each copy direction and one for the step.
pub(super) const NUM_BUCKETS: usize = 3;
/// Alignment of tensors in a bucket, in bytes.
const ALIGNMENT_BYTES: usize = 256;

/// The pass of a unit's step in which a piece is processed. Muon needs the momentum of whole matrices before it updates their master weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StatePass {
    Moments,
    Master,
}

/// The optimizer state of consecutive elements of this rank's part of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StatePiece {
    pub index: usize, // index of the unit
    pub pass: StatePass,
    pub form: StateForm,
    pub elements: Range<usize>, // within this rank's part
    pub cells: Vec<Cells>,      // one for every part that the pass needs
}

/// A function that steps one piece, given its tensors.
pub(super) type StepPiece<'a> = dyn FnMut(&StatePiece, Vec<Tensor>) -> Result<()> + 'a;

/// The stream of one update's pieces through the buckets. Pieces must be stepped in order until it is finished.
#[derive(Debug)]
pub(super) struct StateStream {
    pieces: Vec<StatePiece>,
    next: usize,     // next piece to step
    arriving: usize, // next piece to fetch
    buckets: Vec<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    memory: Tensor,           // [bytes] u8
    copies: Vec<PendingCopy>, // copies under way: in before the step, out after it
}

impl StateStream {
    /// Creates the stream and starts copying the first pieces.
    pub(super) fn start(pool: &HostPool, layout: &StateLayout, bucket_len: usize, device: Device) -> Result<Self> {
        let pieces: Vec<StatePiece> =
            (0..layout.num_units()).flat_map(|index| pieces(layout, index, bucket_len)).collect();
        let bytes = pieces.iter().map(StatePiece::bytes).max().unwrap_or(0) as i64;
        let bucket = || Ok(Bucket { memory: Tensor::f_empty([bytes], (Kind::Uint8, device))?, copies: Vec::new() });
        let buckets = (0..NUM_BUCKETS).map(|_| bucket()).collect::<Result<_>>()?;
        let mut flow = Self { pieces, next: 0, arriving: 0, buckets };
        for _ in 1..NUM_BUCKETS {
            flow.fetch(pool)?;
        }
        Ok(flow)
    }

    /// Calls `step` on every piece of one pass over unit `index`.
    pub(super) fn step(
        &mut self,
        pool: &mut HostPool,
        (index, pass): (usize, StatePass),
        step: &mut StepPiece<'_>,
    ) -> Result<()> {
        while self.pieces.get(self.next).is_some_and(|piece| (piece.index, piece.pass) == (index, pass)) {
            let piece = self.pieces[self.next].clone();
            let bucket = &mut self.buckets[self.next % NUM_BUCKETS];
            bucket.copies.drain(..).try_for_each(PendingCopy::hold_libtorch)?;
            let tensors = bucket.tensors(&piece);
            step(&piece, tensors.iter().map(Tensor::shallow_clone).collect())?;
            for (cells, tensor) in piece.cells.iter().zip(&tensors) {
                bucket.copies.push(pool.copy_from_async(cells.bytes.start, tensor)?);
            }
            self.next += 1;
            self.fetch(pool)?;
        }
        match self.pieces.get(self.next) {
            Some(piece) if (piece.index, piece.pass) < (index, pass) => Err(Error::InvalidArgument {
                op: "Optimizer::step",
                expected: format!("unit {} next, as streamed optimizer state is processed in order", piece.index),
                got: format!("unit {index}"),
            }),
            _ => Ok(()),
        }
    }

    /// Makes libtorch's stream, and with it every later copy, wait for the copies to the host.
    pub(super) fn finish(self) -> Result<()> {
        self.buckets.into_iter().flat_map(|bucket| bucket.copies).try_for_each(PendingCopy::hold_libtorch)
    }

    /// Starts copying the next piece into the bucket whose previous piece has been copied back.
    fn fetch(&mut self, pool: &HostPool) -> Result<()> {
        let Some(piece) = self.pieces.get(self.arriving) else { return Ok(()) };
        let bucket = &mut self.buckets[self.arriving % NUM_BUCKETS];
        bucket.copies.drain(..).try_for_each(PendingCopy::hold_libtorch)?; // copies in start after what libtorch waits for
        for (cells, mut tensor) in piece.cells.iter().zip(bucket.tensors(piece)) {
            bucket.copies.push(pool.copy_to_async(cells.bytes.start, &mut tensor)?);
        }
        self.arriving += 1;
        Ok(())
    }
}

impl Bucket {
    /// The tensors of a piece, concatenated in its bucket.
    fn tensors(&self, piece: &StatePiece) -> Vec<Tensor> {
        let mut start = 0;
        let views = piece.cells.iter().map(|cells| {
            let place = Cells { kind: cells.kind, bytes: start..start + cells.bytes.len() };
            start = place.bytes.end.next_multiple_of(ALIGNMENT_BYTES);
            place.view(&self.memory)
        });
        views.collect()
    }
}

impl StatePiece {
    /// The piece of at most `len` elements of a run that begins with element `first`.
    fn new(layout: &StateLayout, (index, run): (usize, &StateRun), pass: StatePass, first: usize, len: usize) -> Self {
        let elements = first..run.elements.end.min(first.saturating_add(len));
        let parts = match (run.form, pass) {
            (StateForm::Muon, StatePass::Moments) => &[StatePart::M],
            (StateForm::Muon, StatePass::Master) => &[StatePart::Master],
            (StateForm::Adam | StateForm::Adam8bit, _) => run.form.parts(),
        };
        let cells = parts.iter().map(|&part| layout.cells(run, &elements, part)).collect();
        Self { index, pass, form: run.form, elements, cells }
    }

    /// Bytes of the piece in a bucket.
    fn bytes(&self) -> usize {
        self.cells.iter().map(|cells| cells.bytes.len().next_multiple_of(ALIGNMENT_BYTES)).sum()
    }
}

/// Splits a unit's state into pieces of at most `len` elements, in stepping order.
pub(super) fn pieces(layout: &StateLayout, index: usize, len: usize) -> Vec<StatePiece> {
    let pass = |pass: StatePass| {
        let runs = layout.runs(index).iter();
        let runs = runs.filter(move |run| pass == StatePass::Moments || run.form == StateForm::Muon);
        runs.flat_map(move |run| {
            let firsts = run.elements.clone().step_by(len);
            firsts.map(move |first| StatePiece::new(layout, (index, run), pass, first, len))
        })
    };
    pass(StatePass::Moments).chain(pass(StatePass::Master)).collect()
}

/// Bytes of all buckets on the device. No piece of a run is larger than its first one.
pub(super) fn bucket_bytes(layout: &StateLayout) -> usize {
    let first = |index: usize, run: &StateRun| {
        let passes = [StatePass::Moments, StatePass::Master];
        let piece = |pass| StatePiece::new(layout, (index, run), pass, run.elements.start, BUCKET_LEN);
        passes.map(|pass| piece(pass).bytes()).into_iter().max()
    };
    let units = (0..layout.num_units()).flat_map(|index| layout.runs(index).iter().map(move |run| first(index, run)));
    NUM_BUCKETS * units.max().flatten().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::MuonConfig;
    use crate::config::OptimizerName;
    use crate::model::{ModelSpec, ParamTable};
    use crate::train::Optim;

    fn layouts() -> impl Iterator<Item = StateLayout> {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("micro").unwrap()), 2);
        let optims = OptimizerName::ALL.iter().map(|&name| Optim::new(name, &MuonConfig::default()));
        optims.map(move |optim| StateLayout::new(&table, optim, Kind::Float, |len| len / 2..len))
    }

    fn pool(layout: &StateLayout) -> HostPool {
        HostPool::new("flow_test", layout.bytes(), Device::Cpu, &mut |_, _| ()).unwrap()
    }

    #[test]
    fn streamed_optimizer_state_passes_once_and_in_order() {
        for (layout, bucket_len) in
            layouts().flat_map(|layout| [256, 1024, BUCKET_LEN].map(|len| (layout.clone(), len)))
        {
            let mut pool = pool(&layout);
            let state = Tensor::randint(256, [layout.bytes() as i64], (Kind::Uint8, Device::Cpu));
            pool.copy_from(0, &state).unwrap();
            let mut flow = StateStream::start(&pool, &layout, bucket_len, Device::Cpu).unwrap();
            for (index, pass) in
                (0..layout.num_units()).flat_map(|index| [(index, StatePass::Moments), (index, StatePass::Master)])
            {
                let mut step = |piece: &StatePiece, tensors: Vec<Tensor>| {
                    assert!(piece.elements.len() <= bucket_len && tensors.len() == piece.cells.len());
                    for (tensor, cells) in tensors.iter().zip(&piece.cells) {
                        assert_eq!((tensor.kind(), tensor.numel()), (cells.kind, cells.num_values()));
                        let _ = tensor.view_dtype(Kind::Uint8).bitwise_not_();
                    }
                    Ok(())
                };
                flow.step(&mut pool, (index, pass), &mut step).unwrap();
            }
            flow.finish().unwrap();
            let mut after = state.zeros_like();
            pool.copy_to(0, &mut after).unwrap();
            assert!(after.equal(&state.bitwise_not()), "buckets of {bucket_len}");
        }
    }

    #[test]
    fn streaming_refuses_units_out_of_order() {
        for layout in layouts() {
            let mut pool = pool(&layout);
            let mut flow = StateStream::start(&pool, &layout, 1024, Device::Cpu).unwrap();
            assert!(flow.step(&mut pool, (1, StatePass::Moments), &mut |_, _| Ok(())).is_err());
        }
    }
}
