//! The rotation of int8 rows.

use tch::Kind;

use super::launch::Argument;

/// Most columns of a Hadamard matrix: those that a warp has in its registers.
const MOST_BLOCK: usize = 256;

/// Columns of the Hadamard matrices by which int8 rows [K = `columns`] are multiplied before they are rounded, so that columns with large values do
/// not cost the others their precision: the largest power of two that divides K, at most 256.
pub fn int8_row_block(columns: usize) -> usize {
    1 << columns.trailing_zeros().min(MOST_BLOCK.trailing_zeros())
}

/// A kernel's argument for the rotation of rows: 0 for those in e4m3, which are not rotated.
pub(super) fn block_argument(kind: Kind, columns: usize) -> Argument {
    Argument::Count(if kind == Kind::Int8 { int8_row_block(columns) as i64 } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hadamard_blocks_of_rows_divide_them() {
        for (columns, block) in [(3584, 256), (18_944, 256), (896, 128), (576, 64), (48, 16), (16, 16), (4096, 256)] {
            assert_eq!(int8_row_block(columns), block, "{columns}");
        }
    }
}
