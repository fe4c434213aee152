//! Work recorded once and replayed with one call.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};

use super::context::{Context, check};
use super::torch_stream::TorchStream;
use crate::error::Result;

/// A recorded sequence of kernels, copies and collectives, with the addresses they had.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    _context: Arc<Context>, // outlives the graph
}

// SAFETY: the driver lets any one thread at a time use a graph; a replay takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` queues on `stream`, which is libtorch's current one meanwhile; nothing runs yet.
    ///
    /// `work` may not wait for the GPU, read from it or allocate on it: buffers come from outside and stay, libraries and
    /// communicators have run once before on this stream. libtorch's cache would hand out the memory of tensors made inside
    /// again.
    ///
    /// # Errors
    /// What `work` returns; [`crate::Error::Cuda`] for what cannot be recorded.
    pub fn capture(stream: &TorchStream, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let _current = stream.make_current()?;
        let raw = stream.raw().cast();
        // Calls that cannot be recorded fail in this thread alone: those of NCCL's watcher are none of the graph's.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the process.
        check("cuStreamBeginCapture", unsafe { result::stream::begin_capture(raw, mode) })?;
        let capture = Capture(raw);
        work()?;
        let graph = capture.end()?;
        // SAFETY: recorded just now.
        let instance = unsafe { result::graph::instantiate(graph, INSTANTIATE) };
        // SAFETY: not used after this; the instance has its own copy.
        let destroyed = unsafe { result::graph::destroy(graph) };
        let graph = Self { raw: check("cuGraphInstantiate", instance)?, _context: stream.context().clone() };
        check("cuGraphDestroy", destroyed)?;
        Ok(graph)
    }

    /// Queues the recorded work on `stream`.
    ///
    /// # Safety
    /// Every address that was recorded has memory for what the work does there, until the stream has passed it. The memory
    /// may have gone and come back in between, as an arena's does.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub unsafe fn replay(&mut self, stream: &TorchStream) -> Result<()> {
        stream.context().make_current()?;
        // SAFETY: the graph is alive; the rest is the caller's promise.
        check("cuGraphLaunch", unsafe { result::graph::launch(self.raw, stream.raw().cast()) })
    }

    /// Replays the recorded work `replays` times and returns the median time on the GPU; waits for it.
    ///
    /// # Safety
    /// The promise of [`Graph::replay`].
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub unsafe fn median_time(&mut self, stream: &TorchStream, replays: usize) -> Result<Duration> {
        let mut times = Vec::with_capacity(replays);
        for _ in 0..replays {
            let start = stream.record_timed()?;
            // SAFETY: the caller's promise.
            unsafe { self.replay(stream)? };
            times.push(start.time_until(&stream.record_timed()?)?);
        }
        times.sort_unstable();
        Ok(times[replays / 2])
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `capture` and not used after this; a replay under way runs on.
        let _ = unsafe { result::graph::exec_destroy(self.raw) };
    }
}

const INSTANTIATE: sys::CUgraphInstantiate_flags = sys::CUgraphInstantiate_flags(0);

/// A stream that records; dropped without [`Capture::end`], also by a panic, it records no more.
struct Capture(sys::CUstream);

impl Capture {
    fn end(self) -> Result<sys::CUgraph> {
        let stream = self.0;
        std::mem::forget(self);
        // SAFETY: the stream records since this was made.
        check("cuStreamEndCapture", unsafe { result::stream::end_capture(stream) })
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let mut graph = std::ptr::null_mut();
        // SAFETY: as in `end`; the graph is null if what was queued made the recording invalid.
        unsafe {
            if sys::cuStreamEndCapture(self.0, &raw mut graph).result().is_ok() && !graph.is_null() {
                let _ = result::graph::destroy(graph);
            }
        }
    }
}
