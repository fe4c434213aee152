//! Qwen3-Next's tensors for a gated delta net's projections. `in_proj_qkvz` groups rows by key head: its query, its key, and its value heads' values
//! and gates. `in_proj_ba` groups write strengths and decays in the same way.

use std::ops::Range;

use crate::model::spec::Matrix;
use crate::ops::delta_net::DeltaHeads;

/// Consecutive rows of one of our matrices that are also consecutive in a checkpoint's tensor.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct InterleavedRows {
    /// Name of the tensor within its block.
    pub tensor: &'static str,
    /// Number of rows of the tensor.
    pub num_rows: usize,
    /// Index of the piece's first row in the tensor.
    pub first: usize,
    /// Indices of the piece's rows in our matrix.
    pub rows: Range<usize>,
}

/// The pieces of a matrix, in its order of rows; empty if the checkpoint stores the matrix as one tensor.
pub(super) fn pieces(matrix: Matrix, heads: DeltaHeads) -> Vec<InterleavedRows> {
    let DeltaHeads { num_key_heads, num_value_heads, key_dim, value_dim, .. } = heads;
    let of_key = num_value_heads / num_key_heads;
    let (values, keys) = (of_key * value_dim, num_key_heads * key_dim);
    // For every section of the matrix: its first row, its rows per key head, and the offset of these among the key head's rows of the tensor.
    let (tensor, of_head, sections) = match matrix {
        Matrix::DeltaQkv => {
            let sections = vec![(0, key_dim, 0), (keys, key_dim, key_dim), (2 * keys, values, 2 * key_dim)];
            (QKVZ, 2 * (key_dim + values), sections)
        }
        Matrix::DeltaZ => (QKVZ, 2 * (key_dim + values), vec![(0, values, 2 * key_dim + values)]),
        Matrix::DeltaB => (BA, 2 * of_key, vec![(0, of_key, 0)]),
        Matrix::DeltaA => (BA, 2 * of_key, vec![(0, of_key, of_key)]),
        _ => return Vec::new(),
    };
    let of_section = |(start, len, place): (usize, usize, usize)| {
        (0..num_key_heads).map(move |head| {
            let first = start + head * len;
            InterleavedRows {
                tensor,
                num_rows: num_key_heads * of_head,
                first: head * of_head + place,
                rows: first..first + len,
            }
        })
    };
    sections.into_iter().flat_map(of_section).collect()
}

const QKVZ: &str = "linear_attn.in_proj_qkvz.weight";
const BA: &str = "linear_attn.in_proj_ba.weight";
