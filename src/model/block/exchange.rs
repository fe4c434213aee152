//! The all-to-all of sequence parallelism (Ulysses, arXiv 2309.14509): it exchanges rows for heads before a mixer, and heads for rows after it.
//!
//! Each of n ranks has T / n rows, in order. Before a mixer each rank sends the others their heads of its rows, so that every rank has all T rows of
//! its own heads; after the mixer the rows return to their ranks. If there are fewer heads than ranks, or the ranks do not divide them, a head goes
//! to every rank whose queries read it, and its gradients are summed.

use std::sync::Arc;
use std::time::Duration;

use tch::Tensor;

use crate::cuda::{OpCost, Stopwatch, timed};
use crate::error::{Error, Result};
use crate::model::spec::{HeadRun, SharedHeads};
use crate::ranks::Collective;

/// The ranks of a sequence-parallel group, each of which has some of a micro-batch's rows.
#[derive(Debug, Clone)]
pub struct TokenExchange {
    group: Arc<dyn Collective>,
    watch: Arc<Stopwatch>,
}

/// A run of `len` columns, from `head` on in the model and from `slot` on in a rank's tensor.
struct ColumnRun {
    slot: i64,
    head: i64,
    len: i64,
}

impl TokenExchange {
    /// The exchange within a group; `None` for a group of one rank.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn of(group: &Arc<dyn Collective>) -> Result<Option<Self>> {
        if group.size() == 1 {
            return Ok(None);
        }
        Ok(Some(Self { group: group.clone(), watch: Arc::new(Stopwatch::new(group.device())?) }))
    }

    /// Returns how long computation waited for exchanges since the last call, including the copies around them. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn take_exposed(&self) -> Result<Duration> {
        self.watch.take()
    }

    /// The group of sequence-parallel ranks.
    pub fn group(&self) -> &dyn Collective {
        &*self.group
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Turns this rank's rows of all heads into all rows of this rank's heads. Collective. [T, columns of its own]
    pub(super) fn to_heads(
        &self,
        rows: &Tensor, /* [T / n, columns] */
        sections: &[SharedHeads],
    ) -> Result<Tensor> {
        self.watch.time(|| self.rows_to_heads(rows, sections))
    }

    fn rows_to_heads(&self, rows: &Tensor, sections: &[SharedHeads]) -> Result<Tensor> {
        let [num_rows, _] = rows.size()[..] else { return Err(not_rows(rows)) };
        let size = self.size();
        let width: i64 = sections.iter().map(|section| (section.own * section.width) as i64).sum();
        let sent = Tensor::f_empty([size as i64, num_rows, width], (rows.kind(), rows.device()))?;
        for rank in 0..size {
            let of_rank = sent.select(0, rank as i64);
            for ColumnRun { slot, head, len } in self.columns(sections, rank) {
                of_rank.narrow(1, slot, len).f_copy_(&rows.narrow(1, head, len))?;
            }
        }
        self.all_to_all(&sent)?.f_view([size as i64 * num_rows, width]).map_err(Into::into)
    }

    /// Turns all rows of this rank's heads into this rank's rows of all heads; heads that several ranks hold are summed. Collective. [T / n, columns]
    pub(super) fn to_rows(
        &self,
        heads: &Tensor, /* [T, own columns] */
        sections: &[SharedHeads],
    ) -> Result<Tensor> {
        self.watch.time(|| self.heads_to_rows(heads, sections))
    }

    fn heads_to_rows(&self, heads: &Tensor, sections: &[SharedHeads]) -> Result<Tensor> {
        let [num_rows, width] = heads.size()[..] else { return Err(not_rows(heads)) };
        let size = self.size() as i64;
        let received = self.all_to_all(&heads.f_contiguous()?)?.f_view([size, num_rows / size, width])?;
        let columns: usize = sections.iter().map(|section| section.total * section.width).sum();
        let shape = ([num_rows / size, columns as i64], (heads.kind(), heads.device()));
        let repeats = sections.iter().any(|section| section.repeats(self.size()));
        let rows = if repeats { Tensor::f_zeros(shape.0, shape.1)? } else { Tensor::f_empty(shape.0, shape.1)? };
        for rank in 0..self.size() {
            let of_rank = received.select(0, rank as i64);
            for ColumnRun { slot, head, len } in self.columns(sections, rank) {
                let (mut into, from) = (rows.narrow(1, head, len), of_rank.narrow(1, slot, len));
                if repeats { drop(into.f_add_(&from)?) } else { into.f_copy_(&from)? }
            }
        }
        Ok(rows)
    }

    /// Calls [`Self::to_heads`] for a tensor [T / n, heads, width].
    pub(super) fn split(&self, rows: &Tensor, heads: SharedHeads) -> Result<Tensor /* [T, own heads, width] */> {
        let own = self.to_heads(&rows.f_flatten(1, 2)?, &[heads])?;
        Ok(own.f_view([-1, heads.own as i64, heads.width as i64])?)
    }

    /// Calls [`Self::to_rows`] for a tensor [T, own heads, width].
    pub(super) fn join(&self, own: &Tensor, heads: SharedHeads) -> Result<Tensor /* [T / n, heads, width] */> {
        let rows = self.to_rows(&own.f_flatten(1, 2)?, &[heads])?;
        Ok(rows.f_view([-1, heads.total as i64, heads.width as i64])?)
    }

    /// This rank's rows of a weight that has one row per column of the activations. [own columns, ..]
    pub(super) fn own_rows(
        &self,
        weight: &Tensor, /* [columns, ..] */
        sections: &[SharedHeads],
    ) -> Result<Tensor> {
        let runs = self.columns(sections, self.group.rank());
        let parts: Vec<Tensor> = runs.iter().map(|run| weight.narrow(0, run.head, run.len)).collect();
        Ok(Tensor::f_cat(&parts, 0)?)
    }

    /// Adds the gradient of this rank's rows ([`Self::own_rows`]) to the gradient of the whole weight.
    pub(super) fn add_own_rows(&self, own: &Tensor, sections: &[SharedHeads], sum: &Tensor) -> Result<()> {
        for run in self.columns(sections, self.group.rank()) {
            let _ = sum.narrow(0, run.head, run.len).f_add_(&own.narrow(0, run.slot, run.len))?;
        }
        Ok(())
    }

    fn columns(&self, sections: &[SharedHeads], rank: usize) -> Vec<ColumnRun> {
        let (mut first_slot, mut first_head, mut columns) = (0, 0, Vec::new());
        for section in sections {
            let of_run = |HeadRun { slot, head, len }| ColumnRun {
                slot: (first_slot + slot * section.width) as i64,
                head: (first_head + head * section.width) as i64,
                len: (len * section.width) as i64,
            };
            columns.extend(section.runs(rank, self.size()).into_iter().map(of_run));
            first_slot += section.own * section.width;
            first_head += section.total * section.width;
        }
        columns
    }

    fn all_to_all(&self, sent: &Tensor) -> Result<Tensor> {
        let mut received = sent.f_empty_like()?;
        timed("exchange of heads", OpCost::default, || self.group.all_to_all(sent, &mut received))?;
        Ok(received)
    }
}

fn not_rows(rows: &Tensor) -> Error {
    Error::InvalidArgument {
        op: "TokenExchange",
        expected: "rows of columns".to_owned(),
        got: format!("{:?}", rows.size()),
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::ranks::testing;

    /// Tests three sections: heads that the ranks divide, fewer heads than ranks, and heads of which neither is true.
    #[test]
    fn head_exchange_and_its_gradients_match_one_rank() {
        let heads = |total, width| SharedHeads::new(total, width, 12, 4);
        assert_eq!([12, 4, 2, 6].map(|total| heads(total, 1).own), [3, 1, 1, 3]);
        let sections = [heads(12, 2), heads(2, 3), heads(6, 1)];
        let columns: i64 = 12 * 2 + 2 * 3 + 6;
        testing::threads(4, |group| {
            let whole = Tensor::arange(8 * columns, (Kind::Double, Device::Cpu)).view([8, columns]);
            let (rank, exchange) = (group.rank() as i64, TokenExchange::of(&group).unwrap().unwrap());
            let rows = whole.narrow(0, 2 * rank, 2);
            let own = exchange.to_heads(&rows, &sections).unwrap();
            let kv = |query: i64, total: i64| query * total / 12; // the head that a query head reads
            let of = |first: i64, width: i64, head: i64| whole.narrow(1, first + head * width, width);
            let queries = 3 * rank..3 * rank + 3;
            let mut expected: Vec<Tensor> = queries.clone().map(|query| of(0, 2, query)).collect();
            expected.push(of(24, 3, kv(3 * rank, 2)));
            expected.extend(queries.map(|query| of(30, 1, kv(query, 6))));
            assert_eq!(own, Tensor::cat(&expected, 1));
            let back = exchange.to_rows(&own, &sections).unwrap();
            let times = Tensor::from_slice(&[vec![1.0; 24], vec![2.0; 6], vec![2.0; 6]].concat());
            assert_eq!(back, rows * times);
            let weight = whole.tr().contiguous(); // [columns, 8]
            let part = exchange.own_rows(&weight, &sections).unwrap();
            assert_eq!(part, own.tr());
            let sum = weight.zeros_like();
            exchange.add_own_rows(&part, &sections[..2], &sum).unwrap();
            assert_eq!(sum.narrow(0, 6 * rank, 6), weight.narrow(0, 6 * rank, 6));
            let all = |t: &Tensor| t.sum(None::<Kind>).double_value(&[]);
            assert_eq!(all(&sum), all(&part.narrow(0, 0, 9)));
        });
    }
}
