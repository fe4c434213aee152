//! Lists the visible GPUs and the memory available on them.
#![allow(unsafe_code)]

use cudarc::driver::{result, sys};

use super::capability::Capability;
use crate::error::{Error, Result};

/// Approximate GPU memory of a context with cuBLAS and NCCL, in bytes.
const LIBRARY_BYTES: usize = 1 << 30;

/// Describes each visible GPU in one line, in the driver's order: `0: NVIDIA H200, 143771 MiB`. Empty if there is no driver. Creates no context.
///
/// # Errors
/// [`Error::Environment`] if there is a driver but it does not work.
pub fn devices() -> Result<Vec<String>> {
    // SAFETY: opens the driver's library, whose initialisers are its vendor's.
    if !unsafe { sys::is_culib_present() } {
        return Ok(Vec::new());
    }
    match result::init() {
        Err(result::DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(Vec::new()),
        outcome => outcome.map_err(failed)?,
    }
    let count = result::device::get_count().map_err(failed)?;
    (0..count)
        .map(|ordinal| {
            let device = result::device::get(ordinal).map_err(failed)?;
            let name = result::device::get_name(device).map_err(failed)?;
            // SAFETY: the device came from the driver just now.
            let bytes = unsafe { result::device::total_mem(device) }.map_err(failed)?;
            Ok(format!("{ordinal}: {name}, {} MiB", bytes >> 20))
        })
        .collect()
}

/// A visible GPU's name and compute capability.
#[derive(Debug)]
pub(super) struct NamedGpu {
    pub name: String,
    pub capability: Capability,
}

/// All visible GPUs, in the driver's order. Empty if there is no driver. Creates no context.
///
/// # Errors
/// [`Error::Environment`] if there is a driver but it does not work.
pub(super) fn capabilities() -> Result<Vec<NamedGpu>> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let count = i32::try_from(devices()?.len()).unwrap_or(i32::MAX);
    (0..count)
        .map(|ordinal| {
            let device = result::device::get(ordinal).map_err(failed)?;
            // SAFETY: the device came from the driver just now.
            let ask = |which| unsafe { result::device::get_attribute(device, which) }.map_err(failed);
            let name = result::device::get_name(device).map_err(failed)?;
            Ok(NamedGpu { name, capability: Capability::new(ask(MAJOR)?, ask(MINOR)?) })
        })
        .collect()
}

/// Name of the first visible GPU, as the driver reports it; `None` without a GPU.
///
/// # Errors
/// [`Error::Environment`] if there is a driver but it does not work.
pub fn first_name() -> Result<Option<String>> {
    Ok(capabilities()?.into_iter().next().map(|gpu| gpu.name))
}

/// Bytes of GPU memory that this process can still allocate. If the calling thread has a context, this is its GPU's free memory; otherwise the total
/// memory of the smallest visible GPU, less an estimate for contexts and libraries.
///
/// # Errors
/// [`Error::Environment`] if there is no driver, or it does not answer.
pub fn available_bytes() -> Result<usize> {
    if devices()?.is_empty() {
        return Err(Error::Environment { message: "no GPU is visible".to_owned() });
    }
    if result::ctx::get_current().map_err(failed)?.is_some() {
        return Ok(result::mem_get_info().map_err(failed)?.0);
    }
    let mut smallest = usize::MAX;
    for ordinal in 0..result::device::get_count().map_err(failed)? {
        let device = result::device::get(ordinal).map_err(failed)?;
        // SAFETY: the device came from the driver just now.
        smallest = smallest.min(unsafe { result::device::total_mem(device) }.map_err(failed)?);
    }
    Ok(smallest.saturating_sub(LIBRARY_BYTES))
}

/// Converts an error of the driver that occurred before a context existed.
pub(super) fn failed(error: result::DriverError) -> Error {
    Error::Environment { message: format!("CUDA driver: {:?}", error.0) }
}
