//! Measures how long selected work keeps libtorch's stream busy, summed over a step, with two events around each piece.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tch::Device;

use super::context::Context;
use super::stream::CudaEvent;
use crate::error::Result;

/// Sums the time of pieces of work on libtorch's current stream of a GPU, or on the CPU.
#[derive(Debug)]
pub struct Stopwatch {
    context: Option<Arc<Context>>, // None on a CPU
    state: Mutex<StopwatchState>,
}

#[derive(Debug, Default)]
struct StopwatchState {
    spans: VecDeque<[CudaEvent; 2]>, // begin and end of work that is not yet added
    total: Duration,
}

impl Stopwatch {
    /// Creates a stopwatch for work on a device.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn new(device: Device) -> Result<Self> {
        let context = match device {
            Device::Cuda(ordinal) => Some(Context::retain(ordinal)?),
            _ => None,
        };
        Ok(Self { context, state: Mutex::default() })
    }

    /// Calls `work` and adds the time of the operations that it queues.
    ///
    /// # Errors
    /// The errors of `work`; [`crate::Error::Cuda`].
    pub fn time<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(context) = &self.context else {
            let start = Instant::now();
            let outcome = work();
            self.lock().total += start.elapsed();
            return outcome;
        };
        let begin = CudaEvent::record_libtorch(context)?;
        let outcome = work()?;
        let end = CudaEvent::record_libtorch(context)?;
        let mut state = self.lock();
        state.spans.push_back([begin, end]);
        state.read_finished()?;
        Ok(outcome)
    }

    /// Returns the time summed since the last call. Waits for the GPU.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn take(&self) -> Result<Duration> {
        let mut state = self.lock();
        if let Some([_, end]) = state.spans.back() {
            end.synchronize()?;
        }
        state.read_finished()?;
        Ok(std::mem::take(&mut state.total))
    }

    fn lock(&self) -> MutexGuard<'_, StopwatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StopwatchState {
    /// Adds the finished spans, oldest first.
    fn read_finished(&mut self) -> Result<()> {
        while let Some([begin, end]) = self.spans.front()
            && end.is_done()?
        {
            self.total += begin.time_until(end)?;
            self.spans.pop_front();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stopwatch_accumulates_until_it_is_read() {
        let watch = Stopwatch::new(Device::Cpu).unwrap();
        let piece = Duration::from_millis(2);
        let sleep = || {
            std::thread::sleep(piece);
            Ok(7)
        };
        assert_eq!((watch.time(sleep).unwrap(), watch.time(sleep).unwrap()), (7, 7));
        assert!(watch.take().unwrap() >= 2 * piece);
        assert_eq!(watch.take().unwrap(), Duration::ZERO);
    }
}
