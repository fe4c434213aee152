//! Own CUDA streams, apart from libtorch's, and events that order work between streams.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};

use super::context::{Context, check};
use crate::error::Result;
use crate::torch;

/// A CUDA stream of this program. It waits for other streams only when told to.
#[derive(Debug)]
pub struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: the driver's functions may be called with one stream from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a non-blocking stream.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        context.make_current()?;
        let raw = check("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Self { raw, context: context.clone() })
    }

    /// The raw `CUstream`, for calls to the driver and to libraries.
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Makes work queued from now on start after `event`.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn wait(&self, event: &CudaEvent) -> Result<()> {
        // SAFETY: both are alive.
        check("cuStreamWaitEvent", unsafe { result::stream::wait_event(self.raw, event.raw, WAIT) })
    }

    /// Makes work queued from now on start after everything that libtorch has queued on its current stream of this GPU.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn wait_for_libtorch(&self) -> Result<()> {
        let stream = torch::current_cuda_stream(self.context.ordinal())?;
        self.wait(&CudaEvent::record(&self.context, stream.cast())?)
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

    /// Records an event like [`Stream::record`]; threads that wait for it sleep instead of spinning.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn record_sleeping(&self) -> Result<CudaEvent> {
        CudaEvent::record_sleeping(&self.context, self.raw)
    }

    /// The context of the stream's GPU.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits on the host until all queued work has completed.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`], including failures of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { result::stream::synchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `new` and not used after this; work still queued runs on.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}

const WAIT: sys::CUevent_wait_flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;

/// A recorded CUDA event: a point in a stream.
#[derive(Debug)]
pub struct CudaEvent {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver's functions may be called with one event from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Makes work that libtorch queues from now on, on its current stream of this GPU, start after this event. The host does not wait.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn hold_libtorch(&self) -> Result<()> {
        self.hold(torch::current_cuda_stream(self.context.ordinal())?.cast())
    }

    /// Makes work queued from now on, on one of libtorch's streams, start after this event.
    pub(super) fn hold(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: libtorch's streams live as long as the process; the event is alive.
        check("cuStreamWaitEvent", unsafe { result::stream::wait_event(stream, self.raw, WAIT) })
    }

    /// Waits for the event on the host.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`], including failures of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { result::event::synchronize(self.raw) })
    }

    /// Whether the stream has passed this event.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`], including failures of earlier work.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            answer => check("cuEventQuery", answer).map(|()| true),
        }
    }

    /// Records a timed event that completes when everything that libtorch has queued on its current stream has completed.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn record_libtorch(context: &Arc<Context>) -> Result<Self> {
        Self::record_timed(context, torch::current_cuda_stream(context.ordinal())?.cast())
    }

    /// Time from this event to a later one; zero if that one came first. Both must be timed events. Waits for both.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`], including failures of earlier work.
    pub fn time_until(&self, later: &Self) -> Result<Duration> {
        self.synchronize()?;
        later.synchronize()?;
        // SAFETY: both events are alive.
        let elapsed_ms = check("cuEventElapsedTime", unsafe { result::event::elapsed(self.raw, later.raw) })?;
        Ok(Duration::from_secs_f32(elapsed_ms.max(0.0) / 1e3))
    }

    pub(super) fn record(context: &Arc<Context>, stream: sys::CUstream) -> Result<Self> {
        Self::with_flags(context, stream, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    pub(super) fn record_timed(context: &Arc<Context>, stream: sys::CUstream) -> Result<Self> {
        Self::with_flags(context, stream, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn record_sleeping(context: &Arc<Context>, stream: sys::CUstream) -> Result<Self> {
        Self::with_flags(context, stream, sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC)
    }

    fn with_flags(context: &Arc<Context>, stream: sys::CUstream, flags: sys::CUevent_flags) -> Result<Self> {
        context.make_current()?;
        let raw = check("cuEventCreate", result::event::create(flags))?;
        let event = Self { raw, context: context.clone() };
        // SAFETY: event and stream are alive and of this context.
        check("cuEventRecord", unsafe { result::event::record(raw, stream) })?;
        Ok(event)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: created by `record` and not used after this; the driver keeps it until the stream has passed it.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}
