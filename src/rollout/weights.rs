//! The policy's weights as the engine reads them: views, never copies.

use std::marker::PhantomData;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::model::{BlockParams, Exact, Format, ModelSpec, ParamTable, Section, Stage, StoredBlock, Unit};
use crate::types::Place;

/// One tensor-parallel rank's weights, borrowed from the policy for as long as the engine is awake.
#[derive(Debug)]
pub struct EngineWeights<'a> {
    /// The whole embedding table, looked up unsplit; or this rank's vocabulary rows, whose lookups are summed over the group. Without
    /// rows on stages other than the first.
    pub embedding: Tensor, // [V or V of this rank or 0, D]
    /// This rank's slices of its stage's layers.
    pub blocks: Vec<BlockParams>,
    /// This rank's slice of the head that drafts tokens, of a model that is served with one; on the last stage.
    pub draft_head: Option<BlockParams>,
    /// Norm before the head, on the last stage.
    pub final_norm: Tensor, // [D or 0]
    /// This rank's vocabulary rows of the head, as [`ModelSpec::vocab_range`] splits them. Without rows on stages other than the last.
    pub lm_head: Tensor, // [V of this rank or 0, D]
    /// Where blocks are stored in a format of their own, they hold nothing before `prepare`.
    pub stored: Option<StoredBlocks<'a>>,
    /// Adapters that requests choose among, which are stacked beside the blocks' matrices. 0 where all requests have the same adapters, or
    /// none.
    pub num_adapters: usize,
    /// The policy's version when these weights were taken.
    pub version: u64,
    /// Keeps the policy borrowed.
    pub policy: PhantomData<&'a ()>,
}

/// Blocks that are decoded in turn into the same few buffers, of which a rank's [`EngineWeights::blocks`] are views.
#[derive(Debug)]
pub struct StoredBlocks<'a> {
    /// The layout of whole blocks.
    pub table: ParamTable,
    /// The blocks as they are stored.
    pub blocks: &'a [StoredBlock],
    /// Where block `layer` goes: buffer `layer % 2`.
    pub buffers: [Tensor; 2], // [len of the longest block]
}

impl EngineWeights<'_> {
    /// Makes a block ready to be read, until the second after it is made so. Queued on libtorch's current stream like the
    /// products that read it; on a GPU nothing is allocated, so that it can be recorded in a graph.
    pub(super) fn prepare(&self, layer: usize) -> Result<()> {
        let Some(StoredBlocks { table, blocks, buffers }) = &self.stored else { return Ok(()) };
        let layout = table.unit(Unit::Block(layer));
        blocks[layer].decode(layout, &buffers[layer % buffers.len()].f_narrow(0, 0, layout.len as i64)?)
    }

    /// Makes products of blocks of which a row has the same bits in training.
    pub(super) fn multiply_exactly(&mut self) -> Result<()> {
        let mut room = |_: Section| -> Result<Tensor> { unreachable!("the format has no sections") };
        self.blocks.iter_mut().try_for_each(|block| block.prepare(&Exact, &mut room))
    }

    /// The format that products of blocks are made in.
    ///
    /// # Panics
    /// If there are no blocks.
    pub(super) fn format(&self) -> &'static dyn Format {
        self.blocks[0].format()
    }

    /// Refuses weights of another model, rank, stage or version.
    pub(super) fn check(&self, spec: &ModelSpec, stage: &Stage, tp: Place, policy_version: u64) -> Result<()> {
        if self.version != policy_version {
            return Err(Error::StaleWeights { engine: self.version, policy: policy_version });
        }
        let (vocab, hidden) = (spec.vocab_size as i64, spec.hidden_size as i64);
        let rows = spec.vocab_range(tp.rank, tp.size).len() as i64;
        let embedding_rows = match stage.is_first() {
            true if self.embedding.size()[0] == rows => rows,
            true => vocab,
            false => 0,
        };
        let head_rows = if stage.is_last() { rows } else { 0 };
        let has_draft_head = stage.is_last() && spec.draft_head.is_some();
        let expected = (stage.layers.len(), vec![embedding_rows, hidden], vec![head_rows, hidden], has_draft_head);
        let got = (self.blocks.len(), self.embedding.size(), self.lm_head.size(), self.draft_head.is_some());
        if got != expected {
            return Err(Error::InvalidArgument {
                op: "Engine::wake",
                expected: format!(
                    "(blocks, embedding, lm_head, draft head) = {expected:?} on rank {} of {}",
                    tp.rank, tp.size
                ),
                got: format!("{got:?}"),
            });
        }
        Ok(())
    }
}
