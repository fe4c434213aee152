//! Qwen3-Next's tensors of a gated delta net's projections: `in_proj_qkvz`, with the rows of each key head together, those of its query,
//! of its key, of its value heads' values and of their gates; and `in_proj_ba`, with its value heads' write strengths and decays.

use std::ops::Range;

use crate::model::spec::Matrix;
use crate::ops::delta_net::DeltaHeads;

/// Rows of a matrix that lie together in a tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct InterleavedRows {
    /// The tensor's name within its block.
    pub tensor: &'static str,
    /// All rows of the tensor.
    pub num_rows: usize,
    /// The first of them that is this piece's.
    pub first: usize,
    /// The rows of the matrix.
    pub rows: Range<usize>,
}

/// The pieces of a matrix, in its order of rows; none of a matrix that is a tensor by itself.
pub(super) fn pieces(matrix: Matrix, heads: DeltaHeads) -> Vec<InterleavedRows> {
    let DeltaHeads { num_key_heads, num_value_heads, key_dim, value_dim, .. } = heads;
    let of_key = num_value_heads / num_key_heads;
    let (values, keys) = (of_key * value_dim, num_key_heads * key_dim);
    // Of every section of the matrix: its first row, rows of a key head, and where these begin among the key head's rows of the tensor.
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
