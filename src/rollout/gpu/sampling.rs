//! Samples tokens from hidden states on a GPU. Each rank handles its share of the vocabulary, then the ranks exchange what they found. Allocates
//! nothing.

use tch::Tensor;

use super::inputs::Sampling;
use super::network::{DecoderNetwork, scale};
use super::op::DecoderOp;
use crate::cuda::Tuning;
use crate::cuda::kernels::{self, Draws, Filters};
use crate::error::Result;

/// The S draws of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct DrawOutputs<'a> {
    /// Number of tokens so far of each draw's sequence, 0 if there is nothing to sample. [S]
    pub(super) lens: &'a Tensor,
    /// Block tables of those tokens. [S, blocks]
    pub(super) block_tables: &'a Tensor,
    pub(super) sampling: &'a Sampling,
}

impl DecoderNetwork<'_> {
    /// Samples one token from each hidden state into the buffer `sampled`. Collective.
    pub(super) fn sample(&self, hidden: &Tensor /* [S, D] */, drawn: &DrawOutputs) -> Result<()> {
        let vocab = self.spec.vocab_range(self.tp.rank(), self.tp.size()).len() as i64;
        let logits = self.buffers.logits.narrow(0, 0, hidden.size()[0]).narrow(1, 0, vocab);
        DecoderOp::Head.run(|| scale(&mut hidden.shallow_clone(), 1.0 / self.spec.logits_scaling))?;
        self.product(DecoderOp::Head, hidden, &self.weights.lm_head, None, &logits)?;
        DecoderOp::Sample.run(|| self.draw(&logits, drawn))
    }

    fn draw(&self, logits: &Tensor /* [S, V of this rank] */, drawn: &DrawOutputs) -> Result<()> {
        let (rows, tp_size) = (logits.size()[0], self.tp.size());
        let first_id = self.spec.vocab_range(self.tp.rank(), tp_size).start;
        if let Some(masks) = self.masks.filter(|_| self.processing.masks) {
            kernels::mask_logits(logits, first_id, &masks.places(rows), &masks.words())?;
        }
        let Sampling { keys, temperatures, penalties, .. } = drawn.sampling;
        let mut draws = Draws { keys, positions: drawn.lens, temperatures, penalties: None, cuts: None };
        let mut seen = self.buffers.seen.narrow(0, 0, rows);
        if self.processing.penalises {
            kernels::mark_seen(&self.buffers.history, drawn.block_tables, drawn.lens, &mut seen)?;
            draws.penalties = Some((penalties, &seen));
        }
        let cuts = self.buffers.cuts.narrow(0, 0, 2 * rows);
        if self.processing.filters {
            self.cut(&draws, drawn.sampling)?;
            draws.cuts = Some(&cuts);
        }
        // Use the mean share, so that all ranks get the same number. Strict steps use one part: sums are then split equally in all batches.
        let parts = match self.tuning {
            Tuning::Fixed | Tuning::Exact => 1,
            _ => kernels::sample_parts(rows as usize, self.spec.vocab_size / tp_size) as i64,
        };
        let shape = [parts, rows, kernels::CANDIDATE_WORDS];
        let len = shape.iter().product();
        let mut candidates = self.buffers.candidates.narrow(0, 0, len).view(shape);
        kernels::sample(logits, first_id, &draws, &mut candidates)?;
        if tp_size > 1 {
            let mut gathered = self.buffers.gathered.narrow(0, 0, len * tp_size as i64);
            self.tp.all_gather(&candidates.view(-1), &mut gathered)?;
            candidates = gathered;
        }
        let (ids, logprobs) = self.buffers.sampled();
        kernels::combine(&candidates, &mut ids.narrow(0, 0, rows), &mut logprobs.narrow(0, 0, rows))
    }

    /// Writes what filters leave of every draw into the buffers' `cuts`. They need whole rows of the vocabulary: each rank gets those of
    /// its share of the draws.
    fn cut(&self, draws: &Draws, sampling: &Sampling) -> Result<()> {
        let (ranks, rank, width) = (self.tp.size() as i64, self.tp.rank() as i64, self.buffers.logits.size()[1]);
        let per_rank = (draws.positions.size()[0] + ranks - 1) / ranks;
        let logits = self.buffers.logits.narrow(0, 0, ranks * per_rank); // includes rows without a draw
        let Sampling { min_p, top_k, top_p, .. } = sampling;
        let (filters, vocab) = (Filters { min_p, top_k, top_p }, self.spec.vocab_size);
        let parts = match self.tuning {
            Tuning::Fixed | Tuning::Exact => 1, // the mass of strict steps is summed alike in all batches
            _ => kernels::filter_parts(per_rank as usize, vocab) as i64,
        };
        let shape = [per_rank, parts, kernels::FILTER_HEAD_WORDS];
        let mut heads = self.buffers.heads.narrow(0, 0, shape.iter().product()).view(shape);
        if ranks == 1 {
            let mut cuts = self.buffers.cuts.narrow(0, 0, 2 * per_rank);
            return kernels::filter(&logits.unsqueeze(0), vocab, 0, draws, &filters, &mut heads, &mut cuts);
        }
        let mut shards = self.buffers.shards.narrow(0, 0, ranks * per_rank * width).view([ranks, per_rank, width]);
        self.tp.all_to_all(&logits, &mut shards)?;
        let mut own = self.buffers.own_cuts.narrow(0, 0, 2 * per_rank);
        let first = (rank * per_rank) as usize;
        kernels::filter(&shards, vocab, first, draws, &filters, &mut heads, &mut own)?;
        self.tp.all_gather(&own, &mut self.buffers.cuts.narrow(0, 0, 2 * ranks * per_rank))
    }
}
