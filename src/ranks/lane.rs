//! Collectives that overlap computation.
//!
//! A unit's gradients are reduced during the next unit's backward, a sharded unit is gathered while the previous one computes, and new weights are
//! sent during the next unit's AdamW step. The metric `timing_s/exposed_communication` is the time that computation nevertheless waited.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tch::Tensor;

use crate::cuda::{Context, CudaEvent, TorchStream};
use crate::error::Result;

/// The CUDA stream of this process's collectives, separate from libtorch's compute stream. It is shared by all groups: work runs in the order in
/// which it was queued, which is the same on every rank, and a collective on libtorch's own stream waits for it ([`Lane::join`]). So two
/// communicators never run at once, which could deadlock when each waits for the other's share of the GPU. On a CPU there is no stream: work is done
/// when [`Lane::run`] returns.
#[derive(Debug)]
pub struct Lane {
    stream: Option<TorchStream>,
    state: Mutex<LaneState>,
}

#[derive(Debug, Default)]
struct LaneState {
    newest: Option<Arc<CudaEvent>>, // end of the work that libtorch has not joined yet
    waits: VecDeque<(CudaEvent, Arc<CudaEvent>)>, // where libtorch started to wait, and for what
    exposed: Duration,              // time of the waits already read
}

/// Work under way, with the tensors that it uses. libtorch's allocator does not know of the work, so the tensors may not be freed, read or written
/// before [`Work::hold_libtorch`]. Dropping the value calls it, too.
#[derive(Debug)]
#[must_use = "libtorch waits for the work when this is dropped: keep it while other work goes on"]
pub struct Work {
    lane: Arc<Lane>,
    end: Option<Arc<CudaEvent>>, // None if the work is done
    _held: Vec<Tensor>,
}

impl Lane {
    /// A lane without a stream: work runs at once.
    pub(super) fn immediate() -> Arc<Self> {
        Arc::new(Self { stream: None, state: Mutex::default() })
    }

    /// A lane with a stream on GPU `ordinal`.
    pub(super) fn of_gpu(ordinal: usize) -> Result<Arc<Self>> {
        let stream = TorchStream::urgent(&Context::retain(ordinal)?)?;
        Ok(Arc::new(Self { stream: Some(stream), state: Mutex::default() }))
    }

    /// Queues the libtorch operations and collectives in `work`; they start after everything that libtorch has queued so far. During `work` the lane
    /// is libtorch's current stream. Tensors created there may be used later, because their memory is reused only by later work of the lane, which
    /// starts after all uses queued by then.
    ///
    /// # Errors
    /// The errors of `work`; [`crate::Error::Cuda`].
    pub fn run(self: &Arc<Self>, held: Vec<Tensor>, work: impl FnOnce() -> Result<()>) -> Result<Work> {
        let Some(stream) = &self.stream else {
            let start = Instant::now();
            let outcome = work();
            self.lock().exposed += start.elapsed();
            return outcome.map(|()| Work { lane: self.clone(), end: None, _held: held });
        };
        let current = stream.make_current()?;
        let outcome = work();
        let end = Arc::new(stream.record_timed()?);
        current.leave();
        self.lock().newest = Some(end.clone());
        let work = Work { lane: self.clone(), end: Some(end), _held: held };
        outcome.map(|()| work)
    }

    /// Makes everything that libtorch queues from now on wait for all work so far.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn join(&self) -> Result<()> {
        let newest = self.lock().newest.take();
        newest.map_or(Ok(()), |newest| self.wait(&newest))
    }

    /// How long libtorch's stream has waited for work since the last call, which is communication that no computation overlapped. Waits for the GPU.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn take_exposed(&self) -> Result<Duration> {
        let mut state = self.lock();
        if let Some((came, end)) = state.waits.back() {
            came.synchronize()?;
            end.synchronize()?;
        }
        state.read_waits()?;
        Ok(std::mem::take(&mut state.exposed))
    }

    fn wait(&self, end: &Arc<CudaEvent>) -> Result<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        let came = CudaEvent::record_libtorch(stream.context())?;
        end.hold_libtorch()?;
        let mut state = self.lock();
        state.waits.push_back((came, end.clone()));
        state.read_waits()
    }

    fn lock(&self) -> MutexGuard<'_, LaneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LaneState {
    /// Adds up the finished waits, the oldest first.
    fn read_waits(&mut self) -> Result<()> {
        while let Some((came, end)) = self.waits.front()
            && came.is_done()?
            && end.is_done()?
        {
            self.exposed += came.time_until(end)?;
            self.waits.pop_front();
        }
        Ok(())
    }
}

impl Work {
    /// Makes everything that libtorch queues from now on wait for the work, without blocking the host.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn hold_libtorch(mut self) -> Result<()> {
        self.end.take().map_or(Ok(()), |end| self.lane.wait(&end))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // The next use of the GPU reports the error.
        let _ = self.end.take().map(|end| self.lane.wait(&end));
    }
}
