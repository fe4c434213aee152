//! The policy's weights as the engine reads them: views, never copies.

use std::marker::PhantomData;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::model::{BlockParams, Exact, Format, ModelSpec, ParamTable, Section, Stage, StoredBlock, Unit};
use crate::types::Place;

/// The weights of one tensor-parallel rank, borrowed from the policy while the engine is awake.
#[derive(Debug)]
pub struct EngineWeights<'a> {
    /// The embedding table: either the whole table, or this rank's vocabulary rows, whose look-ups are summed over the group. No rows on stages other
    /// than the first.
    pub embedding: Tensor, // [V or V of this rank or 0, D]
    /// This rank's slices of the layers of its stage.
    pub blocks: Vec<BlockParams>,
    /// This rank's slice of the draft head, on the last stage of an engine that uses one.
    pub draft_head: Option<BlockParams>,
    /// Weight of the norm before the head, on the last stage.
    pub final_norm: Tensor, // [D or 0]
    /// This rank's vocabulary rows of the language model head, split by [`ModelSpec::vocab_range`]. No rows on stages other than the last.
    pub lm_head: Tensor, // [V of this rank or 0, D]
    /// The stored blocks, if these are in a quantized format; `blocks` then holds valid data only after `prepare`.
    pub stored: Option<StoredBlocks<'a>>,
    /// Number of LoRA adapters that requests choose among; they are stacked beside the blocks' matrices. 0 if all requests use the same adapters, or
    /// none.
    pub num_adapters: usize,
    /// The policy's version when these weights were taken.
    pub version: u64,
    /// Keeps the policy borrowed.
    pub policy: PhantomData<&'a ()>,
}

/// Quantized blocks. They are dequantized, one after the other, into two buffers; a rank's [`EngineWeights::blocks`] are views of these.
#[derive(Debug)]
pub struct StoredBlocks<'a> {
    /// The layout of whole blocks.
    pub table: ParamTable,
    /// The blocks in their stored format.
    pub blocks: &'a [StoredBlock],
    /// Dequantization buffers; block `layer` goes to buffer `layer % 2`.
    pub buffers: [Tensor; 2], // [len of the longest block]
}

impl EngineWeights<'_> {
    /// Dequantizes a block, if blocks are stored quantized. It stays valid until the call for block `layer + 2`. The work is queued on libtorch's
    /// current stream, like the GEMMs that read it. On a GPU it allocates nothing, so it can be captured as a CUDA graph.
    pub(super) fn prepare(&self, layer: usize) -> Result<()> {
        let Some(StoredBlocks { table, blocks, buffers }) = &self.stored else { return Ok(()) };
        let layout = table.unit(Unit::Block(layer));
        blocks[layer].decode(layout, &buffers[layer % buffers.len()].f_narrow(0, 0, layout.len as i64)?)
    }

    /// Makes the blocks' GEMMs give each row the same bits as in training.
    pub(super) fn multiply_exactly(&mut self) -> Result<()> {
        let mut room = |_: Section| -> Result<Tensor> { unreachable!("the format has no sections") };
        self.blocks.iter_mut().try_for_each(|block| block.prepare(&Exact, &mut room))
    }

    /// The format in which the blocks' GEMMs run.
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
