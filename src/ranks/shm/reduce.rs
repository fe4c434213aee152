//! Element-wise reduction over the slots of several ranks, in rank order.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ranks::ReduceOp;

/// Computes `output[i] = op(sources[0][i], sources[1][i], ..)` for `count` elements of a reducible `kind`. bfloat16 is reduced in float32 and rounded
/// once. Maximum and minimum propagate NaN.
///
/// # Safety
/// Every source holds `count` initialised elements and `output` has space for as many; all are aligned for `kind`. `output` overlaps no source.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) unsafe fn reduce(
    kind: Kind,
    op: ReduceOp,
    sources: &[*const u8],
    output: *mut u8,
    count: usize,
) -> Result<()> {
    let view = |address: *const u8| {
        // SAFETY: the caller's promise; views end with this call, and those of sources are only read.
        unsafe { Tensor::f_from_blob(address, &[count as i64], &[1], kind, Device::Cpu) }
    };
    let mut output = view(output)?;
    let mut sum = match kind {
        Kind::BFloat16 => output.f_empty_like()?.f_to_kind(Kind::Float)?,
        _ => output.shallow_clone(),
    };
    for (rank, &source) in sources.iter().enumerate() {
        let source = view(source)?;
        match rank {
            0 => sum.f_copy_(&source)?,
            _ => accumulate(op, &mut sum, &source)?,
        }
    }
    if kind == Kind::BFloat16 {
        output.f_copy_(&sum)?;
    }
    Ok(())
}

/// Computes `sum = op(sum, source)` element by element; the sum may have a wider dtype.
///
/// # Errors
/// Returns libtorch's errors.
pub(in crate::ranks) fn accumulate(op: ReduceOp, sum: &mut Tensor, source: &Tensor) -> Result<()> {
    match op {
        ReduceOp::Sum => drop(sum.f_add_(source)?),
        ReduceOp::Max => drop(sum.f_clamp_min_tensor_(source)?),
        ReduceOp::Min => drop(sum.f_clamp_max_tensor_(source)?),
    }
    Ok(())
}
