//! cuBLASLt's workspace size and errors.

use cudarc::cublaslt::sys;

use crate::error::{Error, Result};

/// Bytes of workspace that cuBLAS recommends for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// Converts cuBLASLt's status into a result.
pub(super) fn status(op: &'static str, code: sys::cublasStatus_t) -> Result<()> {
    match code {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => {
            Err(Error::OutOfMemory { owner: op.to_owned(), requested_bytes: 0 })
        }
        code => Err(failed(op, code as u32, &format!("{code:?}"))),
    }
}

/// Creates an error of cuBLASLt.
pub(super) fn failed(op: &'static str, code: u32, message: &str) -> Error {
    Error::Cuda { op, code, message: message.to_owned() }
}
