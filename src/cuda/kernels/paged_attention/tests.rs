use super::*;
use crate::cuda::kernels::launch::assert_declared;

#[test]
fn the_source_has_the_same_constants() {
    assert_declared(PLAN, &[("PLANNERS", PLANNERS as usize)]);
    assert_declared(ANY, &[("THREADS", THREADS), ("MOST", MOST_COLUMNS / THREADS)]);
    assert_declared(SOURCE, &[("COLUMNS", ITEM_HEADS), ("WARPS", THREADS / 32)]);
}

#[test]
fn prefixes_are_told_of_where_that_was_measured_to_be_faster() {
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
        assert_eq!(rows * shared_by_a_row >= least_shared_tokens(rows, columns, 264), pays, "{rows} {columns}");
    }
}
