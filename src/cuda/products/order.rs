//! The order in which an algorithm sums over K.
#![allow(unsafe_code)]

use cudarc::cublaslt::sys;
use cudarc::cublaslt::sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
use cudarc::cublaslt::sys::cublasLtReductionScheme_t as Scheme;

use super::status::status;
use crate::error::Result;

/// The properties of an algorithm that determine the order of its sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    family: u32,
    parts: u32,  // of K
    scheme: u32, // how partial sums are added
}

impl Order {
    pub(super) fn of(algorithm: &sys::cublasLtMatmulAlgo_t) -> Result<Self> {
        Ok(Self {
            family: get(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_ID)?,
            parts: get(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM)?,
            scheme: get(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)?,
        })
    }

    /// The order with K split into `parts`, whose sums are added in a fixed order in float32.
    pub(super) fn in_parts(self, parts: u32) -> Self {
        let scheme = match parts {
            1 => Scheme::CUBLASLT_REDUCTION_SCHEME_NONE,
            _ => Scheme::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
        };
        Self { parts, scheme: scheme as u32, ..self }
    }

    /// Sets this order on an algorithm of the same family; `None` for another family. `Descriptors::accept` then decides whether the result is valid.
    pub(super) fn impose(self, mut algorithm: sys::cublasLtMatmulAlgo_t) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        if Self::of(&algorithm)?.family != self.family {
            return Ok(None);
        }
        let takes = set(&mut algorithm, Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, self.parts)
            && set(&mut algorithm, Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, self.scheme);
        Ok(takes.then_some(algorithm))
    }
}

/// Describes an algorithm by the attributes that distinguish it from others.
pub(super) fn describe(algorithm: &sys::cublasLtMatmulAlgo_t) -> Result<String> {
    let Order { family, parts, scheme } = Order::of(algorithm)?;
    let tile = get(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID)?;
    let stages = get(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID)?;
    Ok(format!("family {family} tile {tile} stages {stages} parts {parts} scheme {scheme}"))
}

fn get(algorithm: &sys::cublasLtMatmulAlgo_t, attribute: Attribute) -> Result<u32> {
    let (mut value, mut written) = (0u32, 0);
    // SAFETY: the attributes asked for are of 4 bytes; both numbers outlive the call.
    let code = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            attribute,
            (&raw mut value).cast(),
            size_of::<u32>(),
            &raw mut written,
        )
    };
    status("cublasLtMatmulAlgoConfigGetAttribute", code).map(|()| value)
}

/// Sets an attribute; returns false if the algorithm does not have it.
fn set(algorithm: &mut sys::cublasLtMatmulAlgo_t, attribute: Attribute, value: u32) -> bool {
    // SAFETY: the attributes set are of 4 bytes; the value is copied by the call.
    let code = unsafe {
        sys::cublasLtMatmulAlgoConfigSetAttribute(algorithm, attribute, (&raw const value).cast(), size_of::<u32>())
    };
    code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
}
