use super::*;
use crate::cuda::kernels::launch::assert_declared;

#[test]
fn rust_constants_match_the_kernel_source() {
    assert_declared(PLAN, &[("PLANNERS", PLANNERS as usize)]);
    assert_declared(ANY, &[("THREADS", THREADS), ("MOST", MOST_COLUMNS / THREADS)]);
    assert_declared(SOURCE, &[("COLUMNS", ITEM_HEADS), ("WARPS", THREADS / 32)]);
    assert_declared(RINGED, &[("SHARED_BYTES", RINGED_BYTES), ("UNIT", UNIT_TOKENS)]);
}

#[test]
fn shared_prefixes_are_used_only_where_measured_faster() {
    for (rows, columns, shared_by_a_row, pays) in [
        (8, 4, 512, false),
        (64, 4, 512, false),
        (96, 4, 512, true),
        (256, 4, 512, true),
        (256, 4, 256, true),
        (128, 2, 512, false),
        (256, 2, 512, true),
        (32, 4, 2048, false),
        (64, 4, 2048, true),
    ] {
        let least = least_shared_tokens(rows, false, columns, 264);
        assert_eq!(rows * shared_by_a_row >= least, pays, "{rows} {columns}");
    }
}

#[test]
fn fixed_splits_share_prefixes_among_more_rows() {
    // Qwen2.5-7B with 8 and 256 sequences, and 1.5B with 256 and 512.
    for (rows, columns, pays) in [(8, 4, false), (256, 4, true), (256, 2, false), (512, 2, true)] {
        assert_eq!(rows * 512 >= least_shared_tokens(rows, true, columns, 264), pays, "{rows} {columns}");
    }
}
