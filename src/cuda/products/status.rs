//! cuBLASLt's workspace and its errors.

use cudarc::cublaslt::sys;

use crate::error::{Error, Result};

/// The workspace that cuBLAS advises for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The error of a call, if it failed.
pub(super) fn status(op: &'static str, code: sys::cublasStatus_t) -> Result<()> {
    match code {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => {
            Err(Error::OutOfMemory { owner: op.to_owned(), requested_bytes: 0 })
        }
        code => Err(failed(op, code as u32, &format!("{code:?}"))),
    }
}

/// An error of cuBLASLt.
pub(super) fn failed(op: &'static str, code: u32, message: &str) -> Error {
    Error::Cuda { op, code, message: message.to_owned() }
}
