//! Where the optimizer state is stored: on the device, in one arena range that can be copied to the host and back as a whole, or on the host.
//!
//! The copy to the host is waited for before the KV cache is mapped. Mapping the cache in parts would require all ranks of an engine to agree on each
//! new part between steps. It would hide at most 0.4 s (7B on 4 GPUs), which `auto` avoids wherever everything fits.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use super::state_layout::Cells;
use crate::error::{Error, Result};
use crate::memory::{Arena, Direction, HostPool, Mark, MarkedCopy, Paced, PendingCopy};

/// Bytes per copied piece: its device memory is freed when its copy is done, in whole chunks of an arena.
const PIECE_BYTES: usize = 1 << 30;

/// Where master weights and moments are stored.
#[derive(Debug)]
pub enum OptimizerHome {
    /// Always on the device.
    Resident,
    /// On the device while training, and in this host pool during rollout.
    Swap(HostPool),
    /// Always in this host pool; the state is streamed through the device during a step.
    Stream(HostPool),
}

/// Time and bytes of copies between device and host.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Transitions {
    /// Bytes copied, in both directions.
    pub bytes: usize,
    /// Total time of the copies.
    pub copying: Duration,
    /// Time that host or device waited for copies.
    pub exposed: Duration,
}

impl Transitions {
    /// Share of the copies' time during which nothing waited.
    pub fn hidden_share(&self) -> f64 {
        (1.0 - self.exposed.as_secs_f64() / self.copying.as_secs_f64()).max(0.0)
    }
}

/// The optimizer state, with equal layout on device and host, and its copies between the two.
#[derive(Debug)]
pub(super) struct Residence {
    bytes: usize,
    streams: bool,
    place: StateLocation,
    host_is_current: bool, // whether the pool has the same contents as the device
    passages: Vec<Transfer>,
    pool: Option<HostPool>,
    arena: Arena, // dropped after its views
}

#[derive(Debug)]
enum StateLocation {
    Here(Tensor),                                      // [bytes] u8, a view of the arena
    Leaving(VecDeque<(usize, PendingCopy)>, Transfer), // (bytes of the arena before a piece, copy of the piece)
    OnHost,
    Returning(Tensor, Paced, Reloading),
}

/// A copy back to the device whose end time is not known yet.
#[derive(Debug)]
struct Reloading {
    began: Mark,
    waited: Duration, // waiting time of the host
}

/// One copy of the state between device and host.
#[derive(Debug)]
struct Transfer {
    bytes: usize,
    began: Mark,
    ended: Mark,
    waited: Duration,   // waiting time of the host
    came: Option<Mark>, // where the device started to wait
}

impl Residence {
    /// Allocates zeroed memory for the state on the device, or none if it is streamed.
    pub(super) fn new(bytes: usize, device: Device, home: OptimizerHome) -> Result<Self> {
        let (pool, streams) = match home {
            OptimizerHome::Resident => (None, false),
            OptimizerHome::Swap(pool) => (Some(pool), false),
            OptimizerHome::Stream(pool) => (Some(pool), true),
        };
        if let Some(pool) = pool.as_ref().filter(|pool| pool.len_bytes() < bytes) {
            let expected = format!("a host pool of {bytes} bytes");
            return Err(Error::InvalidArgument { op: "Policy::new", expected, got: format!("{}", pool.len_bytes()) });
        }
        let arena = Arena::reserve("optimizer", if streams { 0 } else { bytes }, device)?;
        let (place, passages) = (StateLocation::OnHost, Vec::new());
        let mut residence = Self { bytes, streams, place, host_is_current: false, passages, pool, arena };
        if !streams {
            residence.place = StateLocation::Here(residence.map()?);
        }
        Ok(residence)
    }

    /// Bytes of the state.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Device bytes that [`Residence::come_back`] will take.
    pub(super) fn absent_bytes(&self) -> usize {
        let comes = !self.streams && matches!(self.place, StateLocation::Leaving(..) | StateLocation::OnHost);
        if comes { self.bytes } else { 0 }
    }

    /// The host pool, if the state is streamed.
    pub(super) fn streamed(&mut self) -> Option<&mut HostPool> {
        self.pool.as_mut().filter(|_| self.streams)
    }

    /// Starts copying the state to the host pool. Does nothing if it is always on the device or is already being copied.
    pub(super) fn leave(&mut self) -> Result<()> {
        if self.pool.is_none() || !matches!(self.place, StateLocation::Here(_) | StateLocation::Returning(..)) {
            return Ok(());
        }
        let start = Instant::now();
        let state = self.arrived()?;
        if self.host_is_current {
            drop(state);
            self.place = StateLocation::OnHost;
            self.arena.unmap();
            return Ok(());
        }
        let pool = self.pool.as_mut().expect("asked for above");
        let began = pool.mark(Direction::Out)?;
        let pieces = queue_from_the_end(self.bytes, PIECE_BYTES, &mut |piece| {
            pool.copy_from_async(piece.start, &state.narrow(0, piece.start as i64, piece.len() as i64))
        })?;
        let ended = pool.mark(Direction::Out)?;
        let passage = Transfer { bytes: self.bytes, began, ended, waited: start.elapsed(), came: None };
        self.place = StateLocation::Leaving(pieces, passage);
        Ok(())
    }

    /// Waits until the copy to the host pool is complete. The device memory of each piece is freed as soon as its copy is done, while later pieces
    /// are still copied.
    pub(super) fn left(&mut self) -> Result<()> {
        let start = Instant::now();
        let StateLocation::Leaving(pieces, _) = &mut self.place else { return Ok(()) };
        // If a piece fails to be copied, the state stays `Leaving`, because the pool does not hold all of it.
        while let Some((before, copy)) = pieces.front_mut() {
            copy.wait()?;
            self.arena.shrink(*before);
            pieces.pop_front();
        }
        self.host_is_current = true;
        if let StateLocation::Leaving(_, mut passage) = std::mem::replace(&mut self.place, StateLocation::OnHost) {
            passage.waited += start.elapsed();
            self.passages.push(passage);
        }
        Ok(())
    }

    /// Starts copying the state back from the pool. Does nothing if it is on the device or is stored in the pool permanently.
    pub(super) fn come_back(&mut self) -> Result<()> {
        self.left()?;
        let start = Instant::now();
        if self.streams || !matches!(self.place, StateLocation::OnHost) {
            return Ok(());
        }
        let mut state = self.map()?;
        let Some(pool) = &self.pool else { return Ok(()) };
        let began = pool.mark(Direction::In)?;
        // Paced, because packing the next batch needs copies of its own meanwhile.
        let copy = pool.copy_to_paced(0, &mut state)?;
        self.place = StateLocation::Returning(state, copy, Reloading { began, waited: start.elapsed() });
        Ok(())
    }

    /// The state on the device [bytes] u8, for modification. If it is being copied back, libtorch's stream waits for the copy.
    ///
    /// # Errors
    /// `InvalidArgument` while it is not on the device.
    pub(super) fn stepped(&mut self) -> Result<Tensor> {
        let state = self.arrived()?;
        self.host_is_current = false;
        Ok(state)
    }

    fn arrived(&mut self) -> Result<Tensor> {
        match std::mem::replace(&mut self.place, StateLocation::OnHost) {
            StateLocation::Returning(state, copy, Reloading { began, waited }) => {
                let came = self.pool.as_ref().map(HostPool::mark_libtorch).transpose()?;
                let MarkedCopy { copy, end: ended } = copy.queued()?;
                copy.hold_libtorch()?;
                self.passages.push(Transfer { bytes: self.bytes, began, ended, waited, came });
                self.place = StateLocation::Here(state);
            }
            other => self.place = other,
        }
        match &self.place {
            StateLocation::Here(state) => Ok(state.shallow_clone()),
            StateLocation::Returning(..) | StateLocation::Leaving(..) | StateLocation::OnHost => Err(offloaded()),
        }
    }

    /// Whether all parts of a copy back to the device are queued.
    pub(super) fn is_queued(&self) -> bool {
        if let StateLocation::Returning(_, copy, _) = &self.place { copy.is_queued() } else { true }
    }

    /// Whether the state is being copied back to the device.
    pub(super) fn is_returning(&self) -> bool {
        matches!(self.place, StateLocation::Returning(..))
    }

    /// Checks that the state can be stepped, without waiting for a copy back to the device.
    pub(super) fn check_here(&self) -> Result<()> {
        let is_away = !self.streams && matches!(self.place, StateLocation::Leaving(..) | StateLocation::OnHost);
        if is_away { Err(offloaded()) } else { Ok(()) }
    }

    /// Copies values to `device`, wherever the state is stored.
    pub(super) fn read(&mut self, cells: &[Cells], device: Device) -> Result<Vec<Tensor>> {
        let on_host = matches!(self.place, StateLocation::Leaving(..) | StateLocation::OnHost);
        let state = if on_host && self.pool.is_some() { None } else { Some(self.arrived()?) };
        let read = |cells: &Cells| {
            let mut copy = Tensor::f_empty([cells.num_values() as i64], (cells.kind, device))?;
            match (&state, &self.pool) {
                (Some(state), _) => copy.f_copy_(&cells.view(state))?,
                (None, Some(pool)) => pool.copy_to(cells.bytes.start, &mut copy)?,
                (None, None) => return Err(offloaded()),
            }
            Ok::<_, Error>(copy)
        };
        cells.iter().map(read).collect()
    }

    /// Replaces values, wherever the state is stored.
    pub(super) fn write(&mut self, cells: &[Cells], values: &[Tensor]) -> Result<()> {
        self.left()?;
        if let (StateLocation::OnHost, Some(pool)) = (&self.place, &mut self.pool) {
            for (cells, values) in cells.iter().zip(values) {
                let values = values.f_to_kind(cells.kind)?.f_to_device(Device::Cpu)?;
                pool.copy_from(cells.bytes.start, &values)?;
            }
            return Ok(());
        }
        let state = self.stepped()?;
        for (cells, values) in cells.iter().zip(values) {
            cells.view(&state).f_copy_(values)?;
        }
        Ok(())
    }

    /// Time and bytes of copies since the last call. Waits until these copies have finished.
    pub(super) fn take_transitions(&mut self) -> Result<Transitions> {
        let mut total = Transitions::default();
        for Transfer { bytes, began, ended, waited, came } in self.passages.drain(..) {
            let stood = came.map_or(Ok(Duration::ZERO), |came| came.until(&ended))?;
            total.bytes += bytes;
            total.copying += began.until(&ended)?;
            total.exposed += waited + stood;
        }
        Ok(total)
    }

    fn map(&mut self) -> Result<Tensor> {
        self.arena.map(self.bytes)?;
        // SAFETY: the view and all views of it stay in this module or in one call on it. `place` drops it before the range behind it is freed, and
        // freeing waits for work queued on it: copies by their events, the rest by `unmap`.
        unsafe { self.arena.tensor(0, &[self.bytes as i64], Kind::Uint8) }
    }
}

/// Queues a copy of every piece, the last one first, because memory is freed from its end. Returns the copies in the order in which they were queued,
/// each with the number of bytes before its piece.
fn queue_from_the_end<C>(
    bytes: usize,
    piece_bytes: usize,
    copy: &mut dyn FnMut(Range<usize>) -> Result<C>,
) -> Result<VecDeque<(usize, C)>> {
    let starts = (0..bytes).step_by(piece_bytes).rev();
    starts.map(|start| Ok((start, copy(start..bytes.min(start + piece_bytes))?))).collect()
}

fn offloaded() -> Error {
    Error::InvalidArgument {
        op: "optimizer state",
        expected: "optimizer state on the device (reload it first)".into(),
        got: "offloaded".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 12 << 10;

    #[test]
    fn optimizer_state_is_copied_in_order_of_use() {
        let mut queued = Vec::new();
        let mut waited = queue_from_the_end(10, 4, &mut |piece| {
            queued.push(piece.clone());
            Ok(piece)
        })
        .unwrap();
        assert_eq!(queued, [8..10, 4..8, 0..4]);
        for piece in queued {
            assert_eq!(waited.pop_front(), Some((piece.start, piece)), "in the order of the copies, from the end");
        }
    }

    #[test]
    fn optimizer_state_is_offloaded_piece_by_piece() {
        const PAGE: usize = 4096;
        let mut pool = HostPool::new("residence_piece_test", 3 * PAGE, Device::Cpu, &mut |_, _| ()).unwrap();
        let mut arena = Arena::reserve("residence_piece_test", 3 * PAGE, Device::Cpu).unwrap();
        arena.map(3 * PAGE).unwrap();
        // SAFETY: each part of it is read before its memory goes.
        let state = unsafe { arena.tensor(0, &[3 * PAGE as i64], Kind::Uint8) }.unwrap();
        let copies = queue_from_the_end(3 * PAGE, PAGE, &mut |piece| {
            pool.copy_from_async(piece.start, &state.narrow(0, piece.start as i64, piece.len() as i64))
        });
        let mut copies = copies.unwrap();
        drop(state);
        while let Some((before, mut copy)) = copies.pop_front() {
            copy.wait().unwrap();
            drop(copy);
            arena.shrink(before);
            assert_eq!(arena.mapped_bytes(), copies.len() * PAGE);
        }
    }

    #[test]
    fn optimizer_state_returns_from_the_host_bit_for_bit() {
        let pool = HostPool::new("residence_test", BYTES, Device::Cpu, &mut |_, _| ()).unwrap();
        let mut residence = Residence::new(BYTES, Device::Cpu, OptimizerHome::Swap(pool)).unwrap();
        let values = Tensor::randint(256, [BYTES as i64], (Kind::Uint8, Device::Cpu));
        residence.stepped().unwrap().copy_(&values);
        for _ in 0..2 {
            residence.leave().unwrap();
            residence.left().unwrap();
            assert_eq!((residence.arena.mapped_bytes(), residence.absent_bytes()), (0, BYTES));
            residence.come_back().unwrap();
            assert_eq!(residence.stepped().unwrap(), values);
        }
        assert_eq!(residence.take_transitions().unwrap().bytes, 4 * BYTES);
    }
}
