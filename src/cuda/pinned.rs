//! Pinned host memory, which the GPU copies from and to while the host continues.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{result, sys};
use tch::{Device, Tensor};

use super::context::{Context, check};
use super::stream::CudaEvent;
use crate::error::{Error, Result};
use crate::torch;

/// Pinned 32-bit words that are copied on libtorch's current stream. Accessing the words waits for a copy that is still running.
#[derive(Debug)]
pub struct PinnedWords {
    context: Arc<Context>,
    address: *mut i32,
    len: usize,
    copied: Option<CudaEvent>,
}

// SAFETY: plain memory of the process, owned by this alone.
unsafe impl Send for PinnedWords {}

impl PinnedWords {
    /// Allocates `len` zeroed words.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the system does not permit pinning this much memory.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        context.make_current()?;
        let bytes = len.max(1) * size_of::<i32>();
        // SAFETY: freed by drop alone.
        let address: *mut i32 = check("cuMemHostAlloc", unsafe { result::malloc_host(bytes, 0) })?.cast();
        // SAFETY: allocated just now, aligned to a page.
        unsafe { address.write_bytes(0, len) };
        Ok(Self { context: context.clone(), address, len, copied: None })
    }

    /// Returns the words once the last copy is done. Until then it calls `waiting` repeatedly, which may abort with an error.
    ///
    /// # Errors
    /// [`Error::Cuda`], including failures of work queued before the copy; the errors of `waiting`.
    pub fn words(&mut self, waiting: &mut dyn FnMut() -> Result<()>) -> Result<&mut [i32]> {
        if let Some(copied) = &self.copied {
            while !copied.is_done()? {
                waiting()?;
            }
            self.copied = None;
        }
        // SAFETY: allocated with this length; no copy is under way.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address, self.len) })
    }

    /// Queues a copy of the first words into `tensor`, filling it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a tensor that is longer, or not contiguous 32-bit numbers on the GPU; [`Error::Cuda`].
    pub fn upload(&mut self, tensor: &Tensor) -> Result<()> {
        let (device, bytes) = self.span(tensor)?;
        self.queue("cuMemcpyHtoDAsync", |host, stream| {
            // SAFETY: both sides span the bytes; the event tells when the host side may be accessed again.
            unsafe { sys::cuMemcpyHtoDAsync_v2(device, host.cast(), bytes, stream) }
        })
    }

    /// Queues a copy of all of `tensor` into the first words.
    ///
    /// # Errors
    /// The errors of [`PinnedWords::upload`].
    pub fn download(&mut self, tensor: &Tensor) -> Result<()> {
        let (device, bytes) = self.span(tensor)?;
        self.queue("cuMemcpyDtoHAsync", |host, stream| {
            // SAFETY: as in `upload`.
            unsafe { sys::cuMemcpyDtoHAsync_v2(host.cast(), device, bytes, stream) }
        })
    }

    fn queue(&mut self, op: &'static str, copy: impl FnOnce(*mut i32, sys::CUstream) -> sys::CUresult) -> Result<()> {
        if let Some(copied) = self.copied.take() {
            copied.synchronize()?;
        }
        let stream: sys::CUstream = torch::current_cuda_stream(self.context.ordinal())?.cast();
        check(op, copy(self.address, stream).result())?;
        self.copied = Some(CudaEvent::record(&self.context, stream)?);
        Ok(())
    }

    fn span(&self, tensor: &Tensor) -> Result<(sys::CUdeviceptr, usize)> {
        let fits = tensor.device() == Device::Cuda(self.context.ordinal())
            && tensor.kind().elt_size_in_bytes() == size_of::<i32>()
            && tensor.is_contiguous()
            && tensor.numel() <= self.len;
        if !fits {
            let got = format!("{:?} {:?} on {:?}", tensor.size(), tensor.kind(), tensor.device());
            let expected = format!("at most {} contiguous 32-bit numbers on the GPU", self.len);
            return Err(Error::InvalidArgument { op: "PinnedWords", expected, got });
        }
        Ok((tensor.data_ptr() as sys::CUdeviceptr, tensor.numel() * size_of::<i32>()))
    }
}

impl Drop for PinnedWords {
    fn drop(&mut self) {
        if let Some(copied) = self.copied.take() {
            let _ = copied.synchronize(); // the memory must outlive a running copy
        }
        // SAFETY: allocated by `new` and not used after this.
        let _ = unsafe { result::free_host(self.address.cast()) };
    }
}
