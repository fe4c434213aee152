//! Streams of libtorch's pool. libtorch's operations, this crate's kernels and NCCL's collectives are queued on the current one.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::{Context, check};
use super::stream::CudaEvent;
use crate::error::Result;
use crate::torch;

/// A stream that can be made libtorch's current stream. Unlike libtorch's default stream, its work can be captured in a CUDA graph. It lives as long
/// as the process.
#[derive(Debug)]
pub struct TorchStream {
    id: i64,
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: the driver's functions may be called with one stream from any thread.
unsafe impl Send for TorchStream {}
// SAFETY: as above.
unsafe impl Sync for TorchStream {}

impl TorchStream {
    /// Takes the next stream of libtorch's pool, which has 32 streams per GPU and reuses them in turn.
    ///
    /// # Errors
    /// [`crate::Error::Environment`] if libtorch's CUDA libraries are not loaded.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        Self::of_pool(context, false)
    }

    /// Takes a high-priority stream of the pool; the GPU schedules its blocks before those of other streams.
    ///
    /// # Errors
    /// The errors of [`TorchStream::new`].
    pub fn urgent(context: &Arc<Context>) -> Result<Self> {
        Self::of_pool(context, true)
    }

    fn of_pool(context: &Arc<Context>, urgent: bool) -> Result<Self> {
        let stream = torch::pool_cuda_stream(context.ordinal(), urgent)?;
        Ok(Self { id: stream.id, raw: stream.raw.cast(), context: context.clone() })
    }

    /// Makes this libtorch's current stream in this thread until the result is dropped. Its work starts after all work queued on the previous stream;
    /// work queued there afterwards starts after the work here. So tensors may be used on both.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn make_current(&self) -> Result<CurrentStream> {
        let outer: sys::CUstream = torch::current_cuda_stream(self.context.ordinal())?.cast();
        order(&self.context, outer, self.raw)?;
        let outer_id = torch::exchange_cuda_stream(self.context.ordinal(), self.id)?;
        let context = self.context.clone();
        Ok(CurrentStream { context, inner: self.raw, outer, outer_id, of_this_thread: PhantomData })
    }

    /// The raw `CUstream`, for calls to the driver and to libraries.
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// The context of the stream's GPU.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Records an event that completes when all work queued on the stream so far has completed.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn record(&self) -> Result<CudaEvent> {
        CudaEvent::record(&self.context, self.raw)
    }

    /// Records an event whose time can be read, for [`CudaEvent::time_until`].
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn record_timed(&self) -> Result<CudaEvent> {
        CudaEvent::record_timed(&self.context, self.raw)
    }

    /// Waits on the host until all queued work has completed.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`], including failures of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives as long as the process.
        check("cuStreamSynchronize", unsafe { result::stream::synchronize(self.raw) })
    }
}

/// Restores the previous current stream when dropped.
#[derive(Debug)]
#[must_use = "the stream is current until this is dropped"]
pub struct CurrentStream {
    context: Arc<Context>,
    inner: sys::CUstream,
    outer: sys::CUstream,
    outer_id: i64,
    of_this_thread: PhantomData<*const ()>,
}

impl CurrentStream {
    /// Restores the previous current stream without making it wait. Work on both streams then runs concurrently until an event orders it.
    pub fn leave(mut self) {
        self.inner = self.outer;
    }
}

impl Drop for CurrentStream {
    fn drop(&mut self) {
        let restored = torch::exchange_cuda_stream(self.context.ordinal(), self.outer_id);
        if let Err(error) = restored.and_then(|_| order(&self.context, self.inner, self.outer)) {
            tracing::error!("cannot restore the previous CUDA stream, which may run ahead of unfinished work: {error}");
        }
    }
}

/// Makes `second` wait for all work that `first` has queued so far.
fn order(context: &Arc<Context>, first: sys::CUstream, second: sys::CUstream) -> Result<()> {
    if first == second {
        return Ok(());
    }
    CudaEvent::record(context, first)?.hold(second)
}
