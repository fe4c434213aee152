//! Embedding lookup and its gradient.

use tch::Tensor;

use crate::cuda::{OpCost, kernels, timed};
use crate::error::Result;
use crate::torch::scalar;

/// Returns the table's row for each id.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn forward(
    ids: &Tensor,   // [T] i64
    table: &Tensor, // [V, D]
) -> Result<Tensor> {
    Ok(table.f_index_select(0, ids)?) // [T, D]
}

/// Returns rows from a shard of a table, whose first row has the id `first_row`. Ids outside of it give zeros, so that the sum over the ranks that
/// split a table is the whole table's row.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn forward_shard(
    ids: &Tensor,   // [T] i64
    table: &Tensor, // [rows, D]
    first_row: i64,
) -> Result<Tensor> {
    let (first, last) = (scalar(0i64), scalar(table.size()[0] - 1));
    let local = ids.f_sub(&scalar(first_row))?;
    let inside = local.f_ge_tensor(&first)?.f_logical_and(&local.f_le_tensor(&last)?)?.unsqueeze(1); // [T, 1]
    Ok(forward(&local.f_clamp_tensor(Some(&first), Some(&last))?, table)?.f_mul(&inside)?) // [T, D]
}

/// Accumulates the table's gradient in token order: `dtable[ids[t]] += dy[t]`.
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; the errors of the kernel.
pub fn accumulate(
    dy: &Tensor,         // [T, D]
    ids: &Tensor,        // [T] i64
    dtable: &mut Tensor, // [V, D]
) -> Result<()> {
    if kernels::serve(dy) {
        let work = || OpCost::pass(&[dy, dy, dy, dy, dy]);
        return timed("rows added", work, || kernels::add_rows(dy, ids, dtable));
    }
    let index = ids.unsqueeze(1).expand_as(dy);
    let _ = dtable.f_scatter_add_(0, &index, &dy.f_to_kind(dtable.kind())?)?;
    Ok(())
}

/// Returns the gradient [R, D] of R rows of which those at `ids` were selected, in the type of `dy`: [`accumulate`] onto zeros.
///
/// # Errors
/// The errors of [`accumulate`].
pub fn select_backward(
    dy: &Tensor,  // [T, D]
    ids: &Tensor, // [T] i64
    num_rows: i64,
) -> Result<Tensor> {
    let mut sum = Tensor::f_zeros([num_rows, dy.size()[1]], (dy.kind(), dy.device()))?;
    accumulate(dy, ids, &mut sum)?;
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn embedding_shards_sum_to_the_whole_table() {
        let (table, ids) = (rand(&[7, 4]), Tensor::from_slice(&[0i64, 6, 3, 4, 2]));
        let shards =
            [(0, 3), (3, 4)].map(|(first, rows)| forward_shard(&ids, &table.narrow(0, first, rows), first).unwrap());
        assert_eq!(&shards[0] + &shards[1], forward(&ids, &table).unwrap());
    }

    #[test]
    fn embedding_gradient_matches_autograd_with_repeated_ids() {
        let (table, ids, dy) = (leaf(&rand(&[6, 4])), Tensor::from_slice(&[3i64, 0, 3, 5, 3]), rand(&[5, 4]));
        let reference = Tensor::embedding(&table, &ids, -1, false, false);
        let grads = Tensor::run_backward(&[(&reference * &dy).sum(None)], &[&table], false, false);
        assert_close(&forward(&ids, &table.detach()).unwrap(), &reference);
        let mut dtable = rand(&[6, 4]);
        let before = dtable.copy();
        accumulate(&dy, &ids, &mut dtable).unwrap();
        assert_close(&dtable, &(before + &grads[0]));
    }
}
