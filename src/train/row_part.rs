//! This rank's part of a micro-batch's rows: all of them, unless ranks share micro-batches. Only this module splits a micro-batch.
//!
//! n ranks have T / n rows each, in order. Padding rows after the last one are never scored, so no gradient flows through them. The scores of all
//! parts are gathered before the loss, which every rank computes completely; each rank uses the gradients of its own scores.
//!
//! The rows before scored tokens may all be on a few ranks: those of a long prompt have none. For the head every rank therefore gets an equal share of
//! them, C / n in order, and returns their gradients. All gradients of a row are added at once, in the order of the scored tokens, as without parts:
//! the last row of a shared prompt has one for each completion.
//!
//! A part has T' of T rows and C' of C scored tokens.

use std::ops::Range;

use tch::{Device, Tensor};

use super::micro_batch::MicroBatch;
use crate::error::Result;
use crate::model::{ScoredTokens, TokenExchange};
use crate::ops::attention::Bounds;
use crate::ops::embedding;
use crate::ops::head::TopScores;
use crate::ranks::{ReduceOp, Trade};
use crate::torch;

/// The rows of a micro-batch that this rank computes.
#[derive(Debug)]
pub(super) struct RowPart {
    pub token_ids: Tensor, // [T']
    pub positions: Tensor, // [T']
    /// Sequence bounds over all rows, including padding.
    pub bounds: Bounds,
    pub targets: Tensor, // [C']
    /// Ids of the teacher's most probable tokens.
    pub top_ids: Option<Tensor>, // [C', K]
    /// The rows of the whole micro-batch before its scored tokens.
    scored_rows: Tensor, // [C] i64
    others: Option<OtherParts>,
}

/// Position of a part in the whole micro-batch.
#[derive(Debug)]
struct OtherParts {
    exchange: TokenExchange,
    first: i64,
    num_rows: i64,
    num_scored: i64, // number of scored tokens (C)
    /// Index of this part's first token among all scored tokens.
    first_scored: i64,
    /// The rows of this part before the scored tokens of each rank's part.
    sent: ByRank,
    /// The indexes among this part's scored tokens of those whose rows each rank has.
    received: ByRank,
}

/// Indexes of rows that are traded with each rank, rank by rank.
#[derive(Debug)]
struct ByRank {
    index: Tensor,    // [R] i64
    bounds: Vec<i64>, // [n + 1], from 0 to R
}

impl RowPart {
    /// The part of this rank among the ranks that share the micro-batch; the whole micro-batch if there are none.
    pub(super) fn new(micro_batch: &MicroBatch, exchange: Option<&TokenExchange>) -> Result<Self> {
        let MicroBatch { token_ids, positions, bounds, scored_rows, targets, .. } = micro_batch;
        let top_ids = micro_batch.teacher_top.as_ref().map(|top| &top.ids);
        let Some(exchange) = exchange else {
            let [token_ids, positions, scored_rows, targets] =
                [token_ids, positions, scored_rows, targets].map(Tensor::shallow_clone);
            let (bounds, top_ids) = (bounds.clone(), top_ids.map(Tensor::shallow_clone));
            return Ok(Self { token_ids, positions, bounds, targets, top_ids, scored_rows, others: None });
        };
        let size = exchange.size() as i64;
        let num_rows = (token_ids.size()[0] + size - 1) / size;
        let first = exchange.group().rank() as i64 * num_rows;
        let (rank, device, num_scored) = (exchange.group().rank(), token_ids.device(), targets.size()[0]);
        let share = |rank: usize| num_scored * rank as i64 / size..num_scored * (rank as i64 + 1) / size;
        let rows_of = |scored: Range<i64>| &micro_batch.host_scored_rows[scored.start as usize..scored.end as usize];
        let is_on = |rank: usize| move |row: i64| row / num_rows.max(1) == rank as i64;
        let here = |other: usize| {
            let rows = rows_of(share(other)).iter().filter(|row| is_on(rank)(**row));
            rows.map(|row| row - first).collect()
        };
        let there = |other: usize| {
            let rows = rows_of(share(rank)).iter().zip(0..).filter(|(row, _)| is_on(other)(**row));
            rows.map(|(_, at)| at).collect()
        };
        let sent = ByRank::new((0..exchange.size()).map(here), device)?;
        let received = ByRank::new((0..exchange.size()).map(there), device)?;
        let Range { start: first_scored, end } = share(rank);
        let own = |whole: &Tensor| whole.narrow(0, first_scored, end - first_scored);
        let (targets, top_ids) = (own(targets), top_ids.map(own));
        let others =
            OtherParts { exchange: exchange.clone(), first, num_rows, num_scored, first_scored, sent, received };
        Ok(Self {
            token_ids: others.rows(token_ids, 0.0)?,
            positions: others.rows(positions, 0.0)?,
            bounds: bounds.padded_to(num_rows * size),
            targets,
            top_ids,
            scored_rows: scored_rows.shallow_clone(),
            others: Some(others),
        })
    }

    /// Whether no token of this part is scored.
    pub(super) fn is_empty(&self) -> bool {
        self.targets.size()[0] == 0
    }

    /// The exchange between the ranks that hold the parts.
    pub(super) fn exchange(&self) -> Option<TokenExchange> {
        self.others.as_ref().map(|others| others.exchange.clone())
    }

    /// This part's rows of a tensor over all rows, with `padding` after the last. [T', ..]
    pub(super) fn rows(&self, whole: &Tensor /* [T, ..] */, padding: f64) -> Result<Tensor> {
        self.others.as_ref().map_or_else(|| Ok(whole.shallow_clone()), |others| others.rows(whole, padding))
    }

    /// The rows for the head of this part: its share of the rows before scored tokens, from all parts, of which `rows` are this one's. Collective.
    /// [C', D]
    pub(super) fn to_head(&self, rows: &Tensor /* [T', D] */) -> Result<Tensor> {
        let Some(OtherParts { sent, received, .. }) = &self.others else {
            return Ok(rows.f_index_select(0, &self.scored_rows)?);
        };
        let by_rank = self.traded(rows.f_index_select(0, &sent.index)?, sent, received)?;
        Ok(by_rank.f_empty_like()?.f_index_copy_(0, &received.index, &by_rank)?)
    }

    /// The gradient of this part's rows, given that of the rows that [`RowPart::to_head`] returned. Collective. [T', D]
    pub(super) fn return_gradient(&self, d_rows: Tensor /* [C', D] */) -> Result<Tensor> {
        let (d_rows, index) = match &self.others {
            None => (d_rows, &self.scored_rows),
            Some(OtherParts { sent, received, .. }) => {
                let by_rank = d_rows.f_index_select(0, &received.index)?;
                drop(d_rows);
                (self.traded(by_rank, received, sent)?, &sent.index)
            }
        };
        embedding::select_backward(&d_rows, index, self.token_ids.size()[0])
    }

    /// Sends each rank its rows, and returns the rows of all ranks. Collective.
    fn traded(&self, rows: Tensor, sent: &ByRank, received: &ByRank) -> Result<Tensor> {
        let group = self.others.as_ref().expect("ranks that share the micro-batch").exchange.group();
        let all = Tensor::f_empty([received.index.size()[0], rows.size()[1]], (rows.kind(), rows.device()))?;
        let mut trades = Vec::new();
        for rank in 0..group.size() {
            let (sent, received) = (sent.of(rank, &rows), received.of(rank, &all));
            if rank == group.rank() {
                received.shallow_clone().f_copy_(&sent)?;
            } else {
                trades.push(Trade { rank, sent, received });
            }
        }
        group.trade(&trades)?;
        Ok(all)
    }

    /// This part's entries of a tensor over all scored tokens. [C', ..]
    pub(super) fn scored(&self, whole: &Tensor /* [C, ..] */) -> Tensor {
        match &self.others {
            Some(others) => whole.narrow(0, others.first_scored, self.targets.size()[0]),
            None => whole.shallow_clone(),
        }
    }

    /// Combines the entries of all parts into a tensor over all scored tokens. Collective. [C, ..]
    fn whole(&self, own: &Tensor /* [C', ..] */) -> Result<Tensor> {
        let Some(OtherParts { exchange, num_scored, .. }) = &self.others else { return Ok(own.shallow_clone()) };
        let mut size = own.size();
        size[0] = *num_scored;
        let mut all = Tensor::f_zeros(size, (own.kind(), own.device()))?;
        self.scored(&all).f_copy_(own)?;
        exchange.group().all_reduce(&mut all, ReduceOp::Sum)?; // only one rank has each, so nothing is rounded
        Ok(all)
    }

    /// Log-probabilities, entropies and scores of the teacher's tokens, over all scored tokens. Collective.
    pub(super) fn scores(&self, own: &ScoredTokens) -> Result<(Tensor, Tensor, Option<TopScores>)> {
        let top = match &own.top {
            Some(TopScores { ids, logprobs }) => {
                Some(TopScores { ids: self.whole(ids)?, logprobs: self.whole(logprobs)? })
            }
            None => None,
        };
        Ok((self.whole(&own.logprobs)?, self.whole(&own.entropy)?, top))
    }

    /// Sums a tensor over all parts. Collective.
    pub(super) fn sum(&self, mut own: Tensor) -> Result<Tensor> {
        if let Some(others) = &self.others {
            own = own.f_contiguous()?;
            others.exchange.group().all_reduce(&mut own, ReduceOp::Sum)?;
        }
        Ok(own)
    }
}

impl ByRank {
    fn new(of_ranks: impl Iterator<Item = Vec<i64>>, device: Device) -> Result<Self> {
        let (mut all, mut bounds) = (Vec::new(), vec![0]);
        for of_rank in of_ranks {
            all.extend(of_rank);
            bounds.push(all.len() as i64);
        }
        Ok(Self { index: torch::tensor_on(&all, device)?, bounds })
    }

    /// The rows of one rank among rows that are in this order.
    fn of(&self, rank: usize, rows: &Tensor /* [R, ..] */) -> Tensor {
        rows.narrow(0, self.bounds[rank], self.bounds[rank + 1] - self.bounds[rank])
    }
}

impl OtherParts {
    fn rows(&self, whole: &Tensor, padding: f64) -> Result<Tensor> {
        let num_all = whole.size()[0];
        let len = (num_all - self.first).clamp(0, self.num_rows);
        let own = whole.narrow(0, self.first.min(num_all), len);
        if len == self.num_rows {
            return Ok(own);
        }
        let mut size = whole.size();
        size[0] = self.num_rows - len;
        let behind = Tensor::f_empty(size, (whole.kind(), whole.device()))?.f_fill_(padding)?;
        Ok(Tensor::f_cat(&[own, behind], 0)?)
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::ranks::{Lane, testing};
    use crate::train::{PackOptions, Sequence, pack};

    /// The length of a prompt, and those of its completions.
    type Group = (usize, Vec<usize>);

    fn micro_batch(groups: &[Group]) -> MicroBatch {
        let sequence = |first: usize, prompt_len: usize, len: usize| {
            Sequence::of_tokens((first..first + prompt_len + len).map(|at| at as u32).collect(), prompt_len)
        };
        let of_group = |(first, (prompt_len, lens)): (usize, &Group)| -> Vec<Sequence> {
            lens.iter().map(|&len| sequence(first, *prompt_len, len)).collect()
        };
        let sequences: Vec<Sequence> = groups.iter().enumerate().flat_map(of_group).collect();
        let options = PackOptions { max_tokens: 1000, share_prompts: true, device: Device::Cpu };
        let [micro_batch] = pack(&sequences, &options).unwrap().try_into().expect("all fit into one");
        micro_batch
    }

    /// The rows for the head of each of `num_ranks` parts, and their gradients, equal those of the whole micro-batch bit for bit. Returns the largest
    /// number of rows that a part has for heads, and the number that is planned for.
    fn match_whole(num_ranks: usize, groups: &[Group]) -> [usize; 2] {
        let sent = testing::threads(num_ranks, |group| {
            let whole = micro_batch(groups);
            let index = &whole.scored_rows;
            let rand = |rows: i64| Tensor::arange(rows * 3, (Kind::Float, Device::Cpu)).sin().view([rows, 3]);
            let [all, d_all] =
                [whole.token_ids.size()[0], index.size()[0]].map(|rows| rand(rows).to_kind(Kind::BFloat16));
            let (expected, mut d_expected) = (all.index_select(0, index), all.zeros_like());
            embedding::accumulate(&d_all, index, &mut d_expected).unwrap();
            let exchange = TokenExchange::of(&group, &Lane::immediate()).unwrap();
            let part = RowPart::new(&whole, Some(&exchange)).unwrap();
            assert_eq!(part.to_head(&part.rows(&all, 0.0).unwrap()).unwrap(), part.scored(&expected));
            let d_rows = part.return_gradient(part.scored(&d_all)).unwrap();
            assert_eq!(d_rows, part.rows(&d_expected, 0.0).unwrap());
            part.others.unwrap().sent.index.numel()
        });
        [sent.into_iter().max().unwrap(), micro_batch(groups).shape().most_scored_rows(num_ranks)]
    }

    /// Six completions of one token begin after the last row of their prompt, so the first of two parts, which has four rows, has six for heads.
    #[test]
    fn rows_for_the_head_and_their_gradients_match_one_part() {
        let of = |prompt_len: usize, lens: &[usize]| (prompt_len, lens.to_vec());
        let few = of(2, &[1; 6]);
        assert_eq!(match_whole(2, std::slice::from_ref(&few)), [6, 6]);
        for groups in [vec![of(5, &[7, 1, 2])], vec![of(3, &[4, 2]), few, of(9, &[1])], vec![of(4, &[3]), of(1, &[8])]]
        {
            for num_ranks in [2, 4] {
                let [most, planned] = match_whole(num_ranks, &groups);
                assert!(most <= planned, "{most} rows of {groups:?}, planned are {planned}");
            }
        }
    }
}
