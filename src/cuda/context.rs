//! The device's primary CUDA context. libtorch uses the same one, so addresses and streams can be exchanged with it.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::abilities::has_fp8_products;
use super::capability::Capability;
use super::library;
use crate::error::{Error, Result};

/// Free and total memory of one GPU.
#[derive(Debug, Clone, Copy)]
pub struct FreeMemory {
    /// Bytes that no process uses.
    pub free_bytes: usize,
    /// Total bytes.
    pub total_bytes: usize,
}

/// A reference to one GPU's primary context, released when dropped.
#[derive(Debug)]
pub struct Context {
    ordinal: usize,
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: the driver's functions may be called with one context from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of GPU `ordinal` and makes it current in this thread.
    ///
    /// # Errors
    /// [`Error::Environment`] without a driver, a GPU or libtorch's CUDA libraries; [`Error::Cuda`] if there is no such GPU.
    pub fn retain(ordinal: usize) -> Result<Arc<Self>> {
        library::require()?;
        let number = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let device = check("cuDeviceGet", result::device::get(number))?;
        // SAFETY: the device came from the driver just now.
        let raw = check("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        let context = Self { ordinal, device, raw };
        context.make_current()?;
        Ok(Arc::new(context))
    }

    /// The index of the GPU.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Makes this context and its GPU current in this thread, also for libtorch's operations.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: retained until drop.
        check("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.raw) })
    }

    /// Waits for all work that this process has queued on the GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`], including failures of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        self.make_current()?;
        check("cuCtxSynchronize", result::ctx::synchronize())
    }

    /// The GPU's free and total memory; free memory takes all processes into account.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn memory(&self) -> Result<FreeMemory> {
        self.make_current()?;
        let (free_bytes, total_bytes) = check("cuMemGetInfo", result::mem_get_info())?;
        Ok(FreeMemory { free_bytes, total_bytes })
    }

    /// The GPU's PCI address, such as `0000:0f:00.0`, in the form of /sys/bus/pci/devices.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn pci_address(&self) -> Result<String> {
        let mut text = [0u8; 16];
        // SAFETY: the text outlives the call, which writes at most its length, NUL included.
        let asked = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, self.device) };
        check("cuDeviceGetPCIBusId", asked.result())?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().to_lowercase())
    }

    /// The GPU's name.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn name(&self) -> Result<String> {
        check("cuDeviceGetName", result::device::get_name(self.device))
    }

    /// Reads the GPU's compute capability.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn compute_capability(&self) -> Result<Capability> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        Ok(Capability::new(self.attribute(MAJOR)?, self.attribute(MINOR)?))
    }

    /// Whether this program runs FP8 GEMMs on the GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn has_fp8_products(&self) -> Result<bool> {
        Ok(has_fp8_products(self.compute_capability()?))
    }

    /// The reason why this program does not run FP8 GEMMs on the GPU; `None` if it does.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn fp8_refusal(&self) -> Result<Option<String>> {
        if self.has_fp8_products()? {
            return Ok(None);
        }
        let (capability, name) = (self.compute_capability()?, self.name()?);
        Ok(Some(format!("it needs a GPU of compute capability 9.0 (H100, H200), and {name} has {capability}")))
    }

    /// Number of streaming multiprocessors of the GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn num_processors(&self) -> Result<usize> {
        let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        self.attribute(which).map(|count| count as usize)
    }

    fn attribute(&self, which: sys::CUdevice_attribute) -> Result<i32> {
        // SAFETY: the device came from the driver.
        check("cuDeviceGetAttribute", unsafe { result::device::get_attribute(self.device, which) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`. At process exit the driver may be gone already; the error is then ignored.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// The code of an [`Error::Cuda`] when GPU memory, or pinned host memory, is exhausted.
pub(crate) const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

/// Converts the driver's result of `op` into the crate's result.
pub(crate) fn check<T>(op: &'static str, answer: std::result::Result<T, result::DriverError>) -> Result<T> {
    answer.map_err(|error| {
        let text = error.error_string().map_or("".into(), CStr::to_string_lossy);
        Error::Cuda { op, code: error.0 as u32, message: format!("{:?}: {text}", error.0) }
    })
}
