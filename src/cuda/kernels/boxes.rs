//! Tensor maps (TMA descriptors) by which Hopper kernels copy boxes of bfloat16, e4m3 or int8 matrices to shared memory.
#![allow(unsafe_code)]

use cudarc::driver::sys;
use tch::{Kind, Tensor};

use super::launch::{Argument, is_aligned};
use crate::cuda::context::check;
use crate::error::Result;

/// Bytes along K that are copied at once, swizzled as the tensor cores read them.
const STEP_BYTES: usize = 128;

/// A tensor map that no kernel reads.
pub(super) const NO_BOXES: Argument = Argument::TensorMap(sys::CUtensorMap { opaque: [0; 16] });

/// Elements along K that are copied at once.
pub(super) fn step(kind: Kind) -> usize {
    STEP_BYTES / kind.elt_size_in_bytes()
}

/// Whether a bf16, e4m3 or int8 tensor is a row, or a matrix whose rows start at multiples of 16 bytes.
pub(super) fn lies_well(tensor: &Tensor) -> bool {
    let kind = tensor.kind();
    let pack = 16 / kind.elt_size_in_bytes() as i64;
    let are_rows = matches!(tensor.stride()[..], [1]) || matches!(tensor.stride()[..], [down, 1] if down % pack == 0);
    matches!(kind, Kind::BFloat16 | Kind::Float8e4m3fn | Kind::Int8) && are_rows && is_aligned(tensor)
}

/// A tensor map for boxes of `box_rows` rows of a matrix [rows, columns] that satisfies [`lies_well`].
pub(super) fn rows_boxes(matrix: &Tensor, box_rows: usize) -> Result<Argument> {
    let (size, row_bytes) = (matrix.size(), row_bytes(matrix));
    boxes(matrix, &[size[1] as u64, size[0] as u64], &[row_bytes], &[box_rows as u32])
}

/// A tensor map for boxes of interleaved rows g0 u0 g1 u1 .., a multiple of 16. In the box, each group of sixteen rows is reordered to have its eight
/// gate rows first.
pub(super) fn pairs_boxes(matrix: &Tensor, box_rows: usize) -> Result<Argument> {
    let (size, row_bytes) = (matrix.size(), row_bytes(matrix));
    let (sizes, strides) = ([size[1] as u64, 8, 2, size[0] as u64 / 16], [2 * row_bytes, row_bytes, 16 * row_bytes]);
    boxes(matrix, &sizes, &strides, &[8, 2, box_rows as u32 / 16])
}

/// Bytes from one row of a matrix to the next.
fn row_bytes(matrix: &Tensor) -> u64 {
    (matrix.kind().elt_size_in_bytes() as i64 * matrix.stride()[0]) as u64
}

/// Encodes a tensor map. `sizes` are in elements. `strides` (in bytes) and `lens` (of a box) are for all dimensions except the first. Elements
/// outside the matrix read as zeros.
fn boxes(matrix: &Tensor, sizes: &[u64], strides: &[u64], lens: &[u32]) -> Result<Argument> {
    use sys::CUtensorMapDataType as DataType;
    let lens = [&[step(matrix.kind()) as u32], lens].concat();
    let data_type = match matrix.kind() {
        Kind::Float8e4m3fn | Kind::Int8 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        _ => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the map is written; sizes, strides and lengths, of as many dimensions, are read before the call returns.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            data_type,
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
    fn tma_needs_rows_aligned_to_16_bytes() {
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
        let bytes = Tensor::zeros([4, 32], (Kind::Float8e4m3fn, Device::Cpu));
        assert!(lies_well(&bytes.narrow(1, 16, 9)) && !lies_well(&bytes.narrow(1, 8, 9)));
        assert_eq!([Kind::BFloat16, Kind::Float8e4m3fn].map(step), [64, 128]);
    }
}
