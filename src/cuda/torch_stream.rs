//! Streams of libtorch's pool: its operations, this crate's kernels and NCCL's collectives go to the one that is current.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::{Context, check};
use super::stream::CudaEvent;
use crate::error::Result;
use crate::torch;

/// A stream that can be made libtorch's. Unlike libtorch's first one, what is queued on it can be captured in a graph. It
/// lives as long as the process.
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
    /// The next stream of libtorch's pool, which holds 32 a GPU and then begins again.
    ///
    /// # Errors
    /// [`crate::Error::Environment`] if libtorch's CUDA half is not loaded.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        Self::of_pool(context, false)
    }

    /// A stream of the pool whose blocks the GPU starts before those of other streams.
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

    /// Sends this thread's libtorch operations here until the result is dropped. They start after what was queued on the
    /// stream that was current before, and what is queued there afterwards starts after them: tensors may cross both ways.
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

    /// The `CUstream`, for calls of the driver and of libraries.
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// The GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// An event that is done when all that is queued here by now is.
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

    /// Waits, on the host, for all that is queued.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`], also for work that failed before.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives as long as the process.
        check("cuStreamSynchronize", unsafe { result::stream::synchronize(self.raw) })
    }
}

/// Puts the outer stream back when dropped.
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
    /// Puts the outer stream back, which does not wait: what was queued here runs beside what is queued there, until an event
    /// orders them.
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

/// Lets `second` go on after what `first` has queued by now.
fn order(context: &Arc<Context>, first: sys::CUstream, second: sys::CUstream) -> Result<()> {
    if first == second {
        return Ok(());
    }
    CudaEvent::record(context, first)?.hold(second)
}
