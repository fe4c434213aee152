//! Collectives that overlap computation.
//!
//! A unit's gradients are reduced during the next unit's backward, a sharded unit is gathered while the previous one computes, and new weights are
//! sent during the next unit's AdamW step. The metric `timing_s/exposed_communication` is the time that computation nevertheless waited. Ranks that
//! share micro-batches exchange heads during attention over other heads; `timing_s/exposed_exchange` counts the waits for these.

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
    queue: Arc<LaneQueue>,
    state: Mutex<LaneState>,
}

/// What lanes with one stream share.
#[derive(Debug, Default)]
struct LaneQueue {
    stream: Option<TorchStream>,
    newest: Mutex<Option<Arc<CudaEvent>>>, // end of the work that libtorch has not joined yet
}

#[derive(Debug, Default)]
struct LaneState {
    waits: VecDeque<(CudaEvent, Arc<CudaEvent>)>, // where libtorch started to wait, and for what
    exposed: Duration,                            // time of the waits already read
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
    pub(crate) fn immediate() -> Arc<Self> {
        Self::with_queue(Arc::default())
    }

    /// A lane with a stream on GPU `ordinal`.
    pub(super) fn of_gpu(ordinal: usize) -> Result<Arc<Self>> {
        let stream = Some(TorchStream::urgent(&Context::retain(ordinal)?)?);
        Ok(Self::with_queue(Arc::new(LaneQueue { stream, newest: Mutex::default() })))
    }

    fn with_queue(queue: Arc<LaneQueue>) -> Arc<Self> {
        Arc::new(Self { queue, state: Mutex::default() })
    }

    /// A lane with the same stream that counts the waits for its own work, which this lane then does not count.
    pub fn counted_apart(&self) -> Arc<Self> {
        Self::with_queue(self.queue.clone())
    }

    /// Queues the libtorch operations and collectives in `work`; they start after everything that libtorch has queued so far. During `work` the lane
    /// is libtorch's current stream. Tensors created there may be used later, because their memory is reused only by later work of the lane, which
    /// starts after all uses queued by then.
    ///
    /// # Errors
    /// The errors of `work`; [`crate::Error::Cuda`].
    pub fn run(self: &Arc<Self>, held: Vec<Tensor>, work: impl FnOnce() -> Result<()>) -> Result<Work> {
        let Some(stream) = &self.queue.stream else {
            let start = Instant::now();
            let outcome = work();
            self.lock().exposed += start.elapsed();
            return outcome.map(|()| Work { lane: self.clone(), end: None, _held: held });
        };
        let current = stream.make_current()?;
        let outcome = work();
        let end = Arc::new(stream.record_timed()?);
        current.leave();
        *self.queue.newest() = Some(end.clone());
        let work = Work { lane: self.clone(), end: Some(end), _held: held };
        outcome.map(|()| work)
    }

    /// Makes everything that libtorch queues from now on wait for all work so far.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn join(&self) -> Result<()> {
        let newest = self.queue.newest().take();
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
        let Some(stream) = &self.queue.stream else { return Ok(()) };
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

impl LaneQueue {
    fn newest(&self) -> MutexGuard<'_, Option<Arc<CudaEvent>>> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_counts_only_the_waits_for_its_own_work() {
        let lane = Lane::immediate();
        let (apart, piece) = (lane.counted_apart(), Duration::from_millis(2));
        let sleep = || {
            std::thread::sleep(piece);
            Ok(())
        };
        apart.run(Vec::new(), sleep).unwrap().hold_libtorch().unwrap();
        assert_eq!(lane.take_exposed().unwrap(), Duration::ZERO);
        lane.run(Vec::new(), sleep).unwrap().hold_libtorch().unwrap();
        for lane in [lane, apart] {
            assert!(lane.take_exposed().unwrap() >= piece);
            assert_eq!(lane.take_exposed().unwrap(), Duration::ZERO);
        }
    }
}
