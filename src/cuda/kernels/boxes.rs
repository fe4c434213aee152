//! How Hopper's kernels copy boxes of matrices in bfloat16 to shared memory.
#![allow(unsafe_code)]

use cudarc::driver::sys;
use tch::{Kind, Tensor};

use super::{Argument, is_aligned};
use crate::cuda::context::check;
use crate::error::Result;

/// Elements of K that are copied at once: rows of 128 bytes, swizzled as the tensor cores read them.
pub(super) const STEP: usize = 64;

/// A row of bf16, or several, that begin at multiples of 16 bytes.
pub(super) fn lies_well(tensor: &Tensor) -> bool {
    let are_rows = matches!(tensor.stride()[..], [1]) || matches!(tensor.stride()[..], [down, 1] if down % 8 == 0);
    tensor.kind() == Kind::BFloat16 && are_rows && is_aligned(tensor)
}

/// Boxes of `box_rows` rows of a matrix [rows, columns] that lies well.
pub(super) fn rows_boxes(matrix: &Tensor, box_rows: usize) -> Result<Argument> {
    let (size, row_bytes) = (matrix.size(), 2 * matrix.stride()[0] as u64);
    boxes(matrix, &[size[1] as u64, size[0] as u64], &[row_bytes], &[STEP as u32, box_rows as u32])
}

/// Boxes of rows g0 u0 g1 u1 .., a multiple of 16: of each sixteen in a box, and in the matrix, the eight g come first.
pub(super) fn pairs_boxes(matrix: &Tensor, box_rows: usize) -> Result<Argument> {
    let (size, row_bytes) = (matrix.size(), 2 * matrix.stride()[0] as u64);
    let (sizes, strides) = ([size[1] as u64, 8, 2, size[0] as u64 / 16], [2 * row_bytes, row_bytes, 16 * row_bytes]);
    boxes(matrix, &sizes, &strides, &[STEP as u32, 8, 2, box_rows as u32 / 16])
}

/// `sizes` and `lens` of a box in elements, `strides` of all dimensions but the first in bytes; what is outside reads as zeros.
fn boxes(matrix: &Tensor, sizes: &[u64], strides: &[u64], lens: &[u32]) -> Result<Argument> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the map is written; sizes, strides and lengths, of as many dimensions, are read before the call returns.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            sizes.len() as u32,
            matrix.data_ptr(),
            sizes.as_ptr(),
            strides.as_ptr(),
            lens.as_ptr(),
            [1; 5].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check("cuTensorMapEncodeTiled", code.result())?;
    Ok(Argument::TensorMap(map))
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn rows_lie_well_at_multiples_of_16_bytes() {
        let matrix = Tensor::zeros([4, 24], (Kind::BFloat16, Device::Cpu));
        let row = matrix.view(-1);
        for tensor in [&matrix, &matrix.narrow(1, 8, 9), &row, &row.narrow(0, 16, 3)] {
            assert!(lies_well(tensor), "{:?} at {:?}", tensor.stride(), tensor.data_ptr());
        }
        let narrow = Tensor::zeros([4, 20], (Kind::BFloat16, Device::Cpu));
        for tensor in [&matrix.narrow(1, 4, 8), &matrix.tr(), &narrow, &row.narrow(0, 4, 8), &row.to_kind(Kind::Float)]
        {
            assert!(!lies_well(tensor), "{:?} at {:?}", tensor.stride(), tensor.data_ptr());
        }
    }
}
