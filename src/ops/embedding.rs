//! Rows of the embedding table.

use tch::Tensor;

/// The table's row of each id.
pub fn forward(
    ids: &Tensor,   // [T] i64
    table: &Tensor, // [V, D]
) -> Tensor {
    table.index_select(0, ids) // [T, D]
}

/// dtable[ids[t]] += dy[t], summed in token order.
pub fn accumulate(
    dy: &Tensor,         // [T, D]
    ids: &Tensor,        // [T] i64
    dtable: &mut Tensor, // [V, D]
) {
    let index = ids.unsqueeze(1).expand_as(dy);
    let _ = dtable.scatter_add_(0, &index, &dy.to_kind(dtable.kind()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn matches_autograd_with_repeated_ids() {
        let (table, ids, dy) = (leaf(&rand(&[6, 4])), Tensor::from_slice(&[3i64, 0, 3, 5, 3]), rand(&[5, 4]));
        let reference = Tensor::embedding(&table, &ids, -1, false, false);
        let grads = Tensor::run_backward(&[(&reference * &dy).sum(None)], &[&table], false, false);
        assert_close(&forward(&ids, &table.detach()), &reference);
        let mut dtable = rand(&[6, 4]);
        let before = dtable.copy();
        accumulate(&dy, &ids, &mut dtable);
        assert_close(&dtable, &(before + &grads[0]));
    }
}
