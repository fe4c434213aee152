//! This rank's part of a micro-batch's rows: all of them, unless ranks share micro-batches. Only this module splits a micro-batch.
//!
//! n ranks have T / n rows each, in order. Padding rows after the last one are never scored, so no gradient flows through them. The scores of all
//! parts are gathered before the loss, which every rank computes completely; each rank uses the gradients of its own rows.
//!
//! A part has T' of T rows and C' of C scored tokens.

use tch::Tensor;

use super::micro_batch::MicroBatch;
use crate::error::Result;
use crate::model::{ScoredTokens, TokenExchange};
use crate::ops::attention::Bounds;
use crate::ops::head::TopScores;
use crate::ranks::ReduceOp;
use crate::torch;

/// The rows of a micro-batch that this rank computes.
#[derive(Debug)]
pub(super) struct RowPart {
    pub token_ids: Tensor, // [T']
    pub positions: Tensor, // [T']
    /// Sequence bounds over all rows, including padding.
    pub bounds: Bounds,
    /// Within this part, the rows before the scored tokens.
    pub scored_rows: Tensor, // [C']
    pub targets: Tensor, // [C']
    /// Ids of the teacher's most probable tokens.
    pub top_ids: Option<Tensor>, // [C', K]
    others: Option<OtherParts>,
}

/// Position of a part in the whole micro-batch.
#[derive(Debug)]
struct OtherParts {
    exchange: TokenExchange,
    first: i64,
    num_rows: i64,
    num_scored: i64, // number of scored tokens (C)
    /// Indexes of this part's tokens among all scored tokens.
    scored: Tensor, // [C'] i64
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
            return Ok(Self { token_ids, positions, bounds, scored_rows, targets, top_ids, others: None });
        };
        let size = exchange.size() as i64;
        let num_rows = (token_ids.size()[0] + size - 1) / size;
        let first = exchange.group().rank() as i64 * num_rows;
        let own = |row: &i64| (first..first + num_rows).contains(row);
        let scored = micro_batch.host_scored_rows.iter().zip(0i64..).filter(|(row, _)| own(row));
        let (rows, scored): (Vec<i64>, Vec<i64>) = scored.map(|(row, at)| (row - first, at)).unzip();
        let device = token_ids.device();
        let scored = torch::tensor_on(&scored, device)?;
        let num_scored = targets.size()[0];
        let targets = targets.f_index_select(0, &scored)?;
        let top_ids = top_ids.map(|ids| ids.f_index_select(0, &scored)).transpose()?;
        let others = OtherParts { exchange: exchange.clone(), first, num_rows, num_scored, scored };
        Ok(Self {
            token_ids: others.rows(token_ids, 0.0)?,
            positions: others.rows(positions, 0.0)?,
            bounds: bounds.padded_to(num_rows * size),
            scored_rows: torch::tensor_on(&rows, device)?,
            targets,
            top_ids,
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

    /// This part's entries of a tensor over all scored tokens. [C', ..]
    pub(super) fn scored(&self, whole: &Tensor /* [C, ..] */) -> Result<Tensor> {
        match &self.others {
            Some(others) => Ok(whole.f_index_select(0, &others.scored)?),
            None => Ok(whole.shallow_clone()),
        }
    }

    /// Combines the entries of all parts into a tensor over all scored tokens. Collective. [C, ..]
    fn whole(&self, own: &Tensor /* [C', ..] */) -> Result<Tensor> {
        let Some(OtherParts { exchange, num_scored, scored, .. }) = &self.others else {
            return Ok(own.shallow_clone());
        };
        let mut size = own.size();
        size[0] = *num_scored;
        let mut all = Tensor::f_zeros(size, (own.kind(), own.device()))?.f_index_copy_(0, scored, own)?;
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
