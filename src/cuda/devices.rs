//! Which GPUs are visible.
#![allow(unsafe_code)]

use cudarc::driver::{result, sys};

use crate::error::{Error, Result};

/// One line per visible GPU, in the driver's order: `0: NVIDIA H200, 143771 MiB`. Empty where there is no driver. Creates no
/// context.
///
/// # Errors
/// [`Error::Environment`] if the driver is there but does not work.
pub fn devices() -> Result<Vec<String>> {
    // SAFETY: opens the driver's library, whose initialisers are its vendor's.
    if !unsafe { sys::is_culib_present() } {
        return Ok(Vec::new());
    }
    let failed = |error: result::DriverError| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => None,
        code => Some(Error::Environment { message: format!("CUDA driver: {code:?}") }),
    };
    if let Err(error) = result::init() {
        return failed(error).map_or(Ok(Vec::new()), Err);
    }
    let environment = |error| failed(error).unwrap_or(Error::Environment { message: "CUDA driver".to_owned() });
    let count = result::device::get_count().map_err(environment)?;
    (0..count)
        .map(|ordinal| {
            let device = result::device::get(ordinal).map_err(environment)?;
            let name = result::device::get_name(device).map_err(environment)?;
            // SAFETY: the device came from the driver just now.
            let bytes = unsafe { result::device::total_mem(device) }.map_err(environment)?;
            Ok(format!("{ordinal}: {name}, {} MiB", bytes >> 20))
        })
        .collect()
}
