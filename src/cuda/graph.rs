//! CUDA graphs: work that is captured once and replayed with one call.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};

use super::context::{Context, check};
use super::torch_stream::TorchStream;
use crate::error::Result;

/// A captured sequence of kernels, copies and collectives, including the addresses they used.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    _context: Arc<Context>, // outlives the graph
}

// SAFETY: the driver lets any one thread at a time use a graph; a replay takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the work that `work` queues on `stream`, which is libtorch's current stream meanwhile. Nothing runs yet.
    ///
    /// `work` must not wait for the GPU, read from it or allocate memory on it. Its buffers must exist before and stay allocated, because libtorch's
    /// allocator would reuse the memory of tensors created inside. Libraries and communicators must have run once before on this stream.
    ///
    /// # Errors
    /// The errors of `work`; [`crate::Error::Cuda`] for operations that cannot be captured.
    pub fn capture(stream: &TorchStream, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let _current = stream.make_current()?;
        let raw = stream.raw().cast();
        // In this mode only calls of this thread can invalidate the capture, so NCCL's watchdog thread does not interfere.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the process.
        check("cuStreamBeginCapture", unsafe { result::stream::begin_capture(raw, mode) })?;
        let capture = Capture(raw);
        work()?;
        let graph = capture.end()?;
        // SAFETY: captured just now.
        let instance = unsafe { result::graph::instantiate(graph, INSTANTIATE) };
        // SAFETY: not used after this; the instance has its own copy.
        let destroyed = unsafe { result::graph::destroy(graph) };
        let graph = Self { raw: check("cuGraphInstantiate", instance)?, _context: stream.context().clone() };
        check("cuGraphDestroy", destroyed)?;
        Ok(graph)
    }

    /// Queues the captured work on `stream`.
    ///
    /// # Safety
    /// Every captured address must be backed by suitable memory until the stream has passed the work. The memory may have been unmapped and mapped
    /// again in between, as an arena's is.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub unsafe fn replay(&mut self, stream: &TorchStream) -> Result<()> {
        stream.context().make_current()?;
        // SAFETY: the graph is alive; the caller guarantees the rest.
        check("cuGraphLaunch", unsafe { result::graph::launch(self.raw, stream.raw().cast()) })
    }

    /// Replays the captured work `replays` times, waits for it, and returns the median time on the GPU.
    ///
    /// # Safety
    /// The caller must guarantee the same as for [`Graph::replay`].
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub unsafe fn median_time(&mut self, stream: &TorchStream, replays: usize) -> Result<Duration> {
        let mut times = Vec::with_capacity(replays);
        for _ in 0..replays {
            let start = stream.record_timed()?;
            // SAFETY: guaranteed by the caller.
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

/// A stream in capture mode. Dropping it without [`Capture::end`], also in a panic, ends the capture.
struct Capture(sys::CUstream);

impl Capture {
    fn end(self) -> Result<sys::CUgraph> {
        let stream = self.0;
        std::mem::forget(self);
        // SAFETY: the stream has been capturing since this was created.
        check("cuStreamEndCapture", unsafe { result::stream::end_capture(stream) })
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let mut graph = std::ptr::null_mut();
        // SAFETY: as in `end`; the graph is null if queued work made the capture invalid.
        unsafe {
            if sys::cuStreamEndCapture(self.0, &raw mut graph).result().is_ok() && !graph.is_null() {
                let _ = result::graph::destroy(graph);
            }
        }
    }
}
