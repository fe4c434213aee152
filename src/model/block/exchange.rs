//! The exchange of sequence parallelism (Ulysses, arXiv 2309.14509): rows for heads before a mixer, and heads for rows after it.
//!
//! Each of n ranks has T / n rows, in order. Before a mixer each rank sends the others their heads of its rows, so that every rank has all T rows of
//! its own heads; after the mixer the rows return to their ranks. If there are fewer heads than ranks, or the ranks do not divide them, a head goes
//! to every rank whose queries read it, and its gradients are summed.
//!
//! An exchange runs on the lane of collectives while libtorch computes, until [`Arriving::finish`]. Only heads among other columns are copied, before
//! they are sent or after they have arrived; what a rank keeps is copied once, in the meantime.
//!
//! Attention hides an exchange; GEMMs do not. On two H200, each of whose GPUs has 65,536 rows and 14 of 28 heads of width 128, an exchange of queries
//! takes 0.87 ms. During it attention's forward takes 110.3 ms, not 109.8, but the gradient of the output projection 3.55 ms, not 2.19: its kernel
//! waits for the multiprocessors that NCCL has. So long sequences are computed in two parts of the heads, of which one is exchanged while the other is
//! computed, and everything else waits for its exchange.

use std::sync::Arc;
use std::time::Duration;

use tch::Tensor;

use super::columns::{ColumnCopy, ColumnRun};
use crate::cuda::{OpCost, timed};
use crate::error::{Error, Result};
use crate::model::spec::{HeadRun, SharedHeads};
use crate::ops::try_map;
use crate::ranks::{Collective, Lane, Trade, Work};

/// The ranks of a sequence-parallel group, each of which has some of a micro-batch's rows.
#[derive(Debug, Clone)]
pub struct TokenExchange {
    group: Arc<dyn Collective>,
    lane: Arc<Lane>,
    /// Fewest tokens of a micro-batch for which attention is computed in two parts of a rank's heads.
    least_halved_tokens: i64,
    /// Whether this micro-batch has at least that many.
    halves: bool,
}

/// The fewest tokens that are computed in two parts on GPUs. With two sequences of 4,096 tokens, for which an exchange takes 0.09 ms, the two parts'
/// forward takes 0.02 ms longer than the whole, and their backward 0.11 ms. On a CPU, where nothing overlaps, micro-batches of all lengths are, so that
/// tests compute them.
const LEAST_HALVED_TOKENS: i64 = 32 << 10;

/// Tensors that are being exchanged.
#[derive(Debug)]
#[must_use = "the tensors may be read once they have arrived"]
pub(super) struct Arriving<const N: usize> {
    works: Vec<Work>,
    tensors: [Tensor; N],
}

/// The steps of an exchange, in this order.
#[derive(Default)]
struct ExchangeSteps {
    packs: Vec<ColumnCopy>,
    trades: Vec<Trade>,
    unpacks: Vec<ColumnCopy>,
    /// Copies of what this rank keeps, at any time.
    keeps: Vec<ColumnCopy>,
}

impl<const N: usize> Arriving<N> {
    /// Tensors that are there, without an exchange.
    pub(super) fn there(tensors: [Tensor; N]) -> Self {
        Self { works: Vec::new(), tensors }
    }

    /// Makes everything that libtorch queues from now on wait for the tensors.
    pub(super) fn finish(self) -> Result<[Tensor; N]> {
        let Self { works, tensors } = self;
        if !works.is_empty() {
            timed("exchange of heads", OpCost::default, || works.into_iter().try_for_each(Work::hold_libtorch))?;
        }
        Ok(tensors)
    }

    /// Views the tensors [rows, columns] as [rows, heads, width].
    fn of_heads(self, widths: [usize; N]) -> Result<Self> {
        let mut widths = widths.into_iter();
        let view = |tensor: Tensor| {
            let shape = [tensor.size()[0], -1, widths.next().expect("one for each") as i64];
            Ok::<_, Error>(tensor.f_view(shape)?)
        };
        Ok(Self { works: self.works, tensors: try_map(self.tensors, view)? })
    }
}

impl TokenExchange {
    /// The exchange within a group; `None` for a group of one rank.
    pub fn of(group: &Arc<dyn Collective>, lane: &Lane) -> Option<Self> {
        let least_halved_tokens = if group.device().is_cuda() { LEAST_HALVED_TOKENS } else { 0 };
        (group.size() > 1).then(|| Self {
            group: group.clone(),
            lane: lane.counted_apart(),
            least_halved_tokens,
            halves: false,
        })
    }

    /// The exchange with another fewest number of tokens that are computed in two parts of a rank's heads.
    pub fn halving_from(self, least_halved_tokens: i64) -> Self {
        Self { least_halved_tokens, ..self }
    }

    /// The exchange for a micro-batch of `num_tokens`.
    pub(super) fn for_tokens(self, num_tokens: i64) -> Self {
        Self { halves: num_tokens >= self.least_halved_tokens, ..self }
    }

    /// Whether attention is computed in two parts of a rank's heads, if these can be halved.
    pub(super) fn halves(&self) -> bool {
        self.halves
    }

    /// Returns how long computation waited for exchanges since the last call. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn take_exposed(&self) -> Result<Duration> {
        self.lane.take_exposed()
    }

    /// The group of sequence-parallel ranks.
    pub fn group(&self) -> &dyn Collective {
        &*self.group
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Begins to turn this rank's rows of all heads into all rows of this rank's heads. Collective. [T, columns of its own] each
    pub(super) fn to_heads<const N: usize>(
        &self,
        parts: [(&Tensor /* [T / n, columns] */, &[SharedHeads]); N],
    ) -> Result<Arriving<N>> {
        let mut steps = ExchangeSteps::default();
        let tensors = try_map(parts, |(rows, sections)| self.rows_to_heads(rows, sections, &mut steps))?;
        self.start(&steps, tensors)
    }

    fn rows_to_heads(&self, rows: &Tensor, sections: &[SharedHeads], steps: &mut ExchangeSteps) -> Result<Tensor> {
        let [num_rows, _] = rows.size()[..] else { return Err(not_rows(rows)) };
        let width: i64 = sections.iter().map(|section| (section.own * section.width) as i64).sum();
        let (size, like) = (self.size() as i64, (rows.kind(), rows.device()));
        let heads = Tensor::f_empty([size * num_rows, width], like)?;
        for rank in 0..self.size() {
            let received = heads.narrow(0, rank as i64 * num_rows, num_rows);
            let (into, copies) = if rank == self.group.rank() {
                (received, &mut steps.keeps)
            } else {
                let sent = Tensor::f_empty([num_rows, width], like)?;
                steps.trades.push(Trade { rank, sent: sent.shallow_clone(), received });
                (sent, &mut steps.packs)
            };
            copies.extend(self.columns(sections, rank).iter().map(|run| run.copy(&into, rows)));
        }
        Ok(heads)
    }

    /// Begins to turn all rows of this rank's heads into this rank's rows of all heads; heads that several ranks hold are summed. Collective.
    /// [T / n, columns] each. If these are a part of the heads, `before` is the exchange of the parts before them, whose rows it also writes.
    pub(super) fn to_rows<const N: usize>(
        &self,
        parts: [(&Tensor /* [T, own columns] */, &[SharedHeads]); N],
        before: Option<Arriving<N>>,
    ) -> Result<Arriving<N>> {
        let mut steps = ExchangeSteps::default();
        let mut into = before.as_ref().map(|before| before.tensors.iter());
        let tensors = try_map(parts, |(heads, sections)| {
            self.heads_to_rows(heads, sections, into.as_mut().and_then(Iterator::next), &mut steps)
        })?;
        let Arriving { works, tensors } = self.start(&steps, tensors)?;
        let before = before.map_or_else(Vec::new, |before| before.works);
        Ok(Arriving { works: before.into_iter().chain(works).collect(), tensors })
    }

    fn heads_to_rows(
        &self,
        heads: &Tensor,
        sections: &[SharedHeads],
        into: Option<&Tensor>, // [T / n, columns]
        steps: &mut ExchangeSteps,
    ) -> Result<Tensor> {
        let [num_all, width] = heads.size()[..] else { return Err(not_rows(heads)) };
        let (heads, num_rows, like) =
            (heads.f_contiguous()?, num_all / self.size() as i64, (heads.kind(), heads.device()));
        let columns: usize = sections.iter().map(|section| section.total * section.width).sum();
        let shape = [num_rows, columns as i64];
        let adds = sections.iter().any(|section| section.repeats(self.size()));
        let rows = match into {
            Some(rows) => rows.f_view(shape)?,
            None if adds => Tensor::f_zeros(shape, like)?,
            None => Tensor::f_empty(shape, like)?,
        };
        for rank in 0..self.size() {
            let sent = heads.narrow(0, rank as i64 * num_rows, num_rows);
            let is_own = rank == self.group.rank();
            let from = if is_own {
                sent
            } else {
                let received = Tensor::f_empty([num_rows, width], like)?;
                steps.trades.push(Trade { rank, sent, received: received.shallow_clone() });
                received
            };
            // Sums are in the order of ranks.
            let copies = if is_own && !adds { &mut steps.keeps } else { &mut steps.unpacks };
            let of_run = |run: &ColumnRun| ColumnCopy {
                into: rows.narrow(1, run.head, run.len),
                from: from.narrow(1, run.slot, run.len),
                adds,
            };
            copies.extend(self.columns(sections, rank).iter().map(of_run));
        }
        Ok(rows)
    }

    /// Calls [`Self::to_heads`] for tensors [T / n, heads, width].
    pub(super) fn split<const N: usize>(
        &self,
        rows: [(&Tensor, SharedHeads); N],
    ) -> Result<Arriving<N> /* [T, own heads, width] */> {
        let flat = try_map(rows, |(rows, heads)| Ok::<_, Error>((rows.f_flatten(1, 2)?, [heads])))?;
        let own = self.to_heads(flat.each_ref().map(|(rows, heads)| (rows, &heads[..])))?;
        own.of_heads(rows.map(|(_, heads)| heads.width))
    }

    /// Calls [`Self::to_rows`] for tensors [T, own heads, width].
    pub(super) fn join<const N: usize>(
        &self,
        own: [(&Tensor, SharedHeads); N],
        before: Option<Arriving<N>>,
    ) -> Result<Arriving<N> /* [T / n, heads, width] */> {
        let flat = try_map(own, |(own, heads)| Ok::<_, Error>((own.f_flatten(1, 2)?, [heads])))?;
        let rows = self.to_rows(flat.each_ref().map(|(own, heads)| (own, &heads[..])), before)?;
        rows.of_heads(own.map(|(_, heads)| heads.width))
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

    /// Queues an exchange on the lane, and on libtorch's stream the copies of what this rank sends and keeps, so that their sources may be freed.
    fn start<const N: usize>(&self, steps: &ExchangeSteps, tensors: [Tensor; N]) -> Result<Arriving<N>> {
        let ExchangeSteps { packs, trades, unpacks, keeps } = steps;
        let copied = |copies: &[ColumnCopy]| copies.iter().try_for_each(ColumnCopy::run);
        timed("copies of heads", OpCost::default, || copied(packs))?;
        let received = unpacks.iter().flat_map(|copy| [&copy.into, &copy.from]);
        let traded = trades.iter().flat_map(|trade| [&trade.sent, &trade.received]);
        let held = received.chain(traded).map(Tensor::shallow_clone).collect();
        let work = self.lane.run(held, || {
            self.group.trade(trades)?;
            copied(unpacks)
        })?;
        timed("copies of heads", OpCost::default, || copied(keeps))?;
        Ok(Arriving { works: vec![work], tensors })
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
            let (rank, exchange) = (group.rank() as i64, TokenExchange::of(&group, &Lane::immediate()).unwrap());
            let rows = whole.narrow(0, 2 * rank, 2);
            let [own] = exchange.to_heads([(&rows, &sections)]).unwrap().finish().unwrap();
            let kv = |query: i64, total: i64| query * total / 12; // the head that a query head reads
            let of = |first: i64, width: i64, head: i64| whole.narrow(1, first + head * width, width);
            let queries = 3 * rank..3 * rank + 3;
            let mut expected: Vec<Tensor> = queries.clone().map(|query| of(0, 2, query)).collect();
            expected.push(of(24, 3, kv(3 * rank, 2)));
            expected.extend(queries.map(|query| of(30, 1, kv(query, 6))));
            assert_eq!(own, Tensor::cat(&expected, 1));
            let [back] = exchange.to_rows([(&own, &sections)], None).unwrap().finish().unwrap();
            let times = Tensor::from_slice(&[vec![1.0; 24], vec![2.0; 6], vec![2.0; 6]].concat());
            assert_eq!(back, &rows * times);
            // Two exchanges of two tensors each, under way at the same time.
            let [few, many] = [&sections[1..2], &sections[2..]];
            let parts = [(rows.narrow(1, 24, 6), few), (rows.narrow(1, 30, 6), many)];
            let both = exchange.to_heads(parts.each_ref().map(|(rows, sections)| (rows, *sections))).unwrap();
            let again = exchange.to_heads([(&rows, &sections)]).unwrap();
            let ([few_own, many_own], [again]) = (both.finish().unwrap(), again.finish().unwrap());
            assert_eq!((Tensor::cat(&[&few_own, &many_own], 1), again), (own.narrow(1, 6, 6), own.copy()));
            let [few_rows, many_rows] =
                exchange.to_rows([(&few_own, few), (&many_own, many)], None).unwrap().finish().unwrap();
            assert_eq!(Tensor::cat(&[few_rows, many_rows], 1), back.narrow(1, 24, 12));
            assert!(exchange.take_exposed().unwrap() > Duration::ZERO);
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

    #[test]
    fn heads_exchanged_in_parts_fill_the_same_rows() {
        testing::threads(2, |group| {
            let (rank, exchange) = (group.rank() as i64, TokenExchange::of(&group, &Lane::immediate()).unwrap());
            let (queries, keys) = (SharedHeads::new(8, 2, 8, 2), SharedHeads::new(4, 3, 8, 2));
            let whole = Tensor::arange(6 * 28, (Kind::Double, Device::Cpu)).view([6, 28]);
            let rows = whole.narrow(0, 3 * rank, 3);
            let (q, k) = (rows.narrow(1, 0, 16).unflatten(1, [8, 2]), rows.narrow(1, 16, 12).unflatten(1, [4, 3]));
            let mut back = None;
            for part in 0..2 {
                let shared = [queries, keys].map(|heads| heads.part(part, 2));
                let [own_q, own_k] = exchange.split([(&q, shared[0]), (&k, shared[1])]).unwrap().finish().unwrap();
                let first = 2 * rank + part as i64;
                assert_eq!(own_q, whole.narrow(1, 4 * first, 4).unflatten(1, [2, 2]));
                assert_eq!(own_k, whole.narrow(1, 16 + 3 * first, 3).unflatten(1, [1, 3]));
                back = Some(exchange.join([(&own_q, shared[0]), (&own_k, shared[1])], back).unwrap());
            }
            assert_eq!(back.unwrap().finish().unwrap(), [q, k]);
        });
    }
}
