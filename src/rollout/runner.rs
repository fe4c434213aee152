//! One step through the network: from token ids to logits.

use tch::{Kind, Tensor, no_grad};

use super::attention::PagedAttention;
use super::batch::Batch;
use super::kv_cache::KvCache;
use super::weights::EngineWeights;
use crate::dist::{Collective, ReduceOp};
use crate::error::Result;
use crate::model::{BlockContext, ModelSpec, block_forward};
use crate::ops::rope::Rope;
use crate::ops::{embedding, linear, rms_norm};
use crate::torch;

/// What a step reads besides its batch.
#[derive(Debug)]
pub(super) struct Runner<'a> {
    pub(super) spec: &'a ModelSpec,
    pub(super) rope: &'a Rope,
    pub(super) weights: &'a EngineWeights<'a>,
    pub(super) kv_cache: &'a KvCache,
    pub(super) tp: &'a dyn Collective,
}

impl Runner<'_> {
    /// Logits of the batch's `last_rows` over this rank's vocabulary [L, V of this rank], on the host. Collective over
    /// the tensor-parallel group.
    pub(super) fn run(&self, batch: &Batch) -> Result<Vec<f32>> {
        no_grad(|| {
            let (_, num_kv_heads) = self.spec.tp_heads(self.tp.size());
            let mut attention = PagedAttention::new(self.kv_cache, batch, self.spec, num_kv_heads);
            let mut x = self.embed(&batch.token_ids)?; // [T, D]
            let rope = self.rope.rows(&batch.positions, x.kind());
            let context = BlockContext { spec: self.spec, rope: &rope, tp: Some(self.tp) };
            for (layer, block) in self.weights.blocks.iter().enumerate() {
                x = block_forward(&context, layer, block, &x, &mut attention, None)?.0;
            }
            let rows = x.index_select(0, &batch.last_rows); // [L, D]
            let (rows, _) = rms_norm::forward(&rows, &self.weights.final_norm, self.spec.rms_norm_eps);
            let logits = linear::forward(&rows, &self.weights.lm_head, None).to_kind(Kind::Float);
            torch::f32_vec(&logits)
        })
    }

    /// Rows of the whole table, or the sum over the group of what each rank's rows give. [T] -> [T, D]
    fn embed(&self, token_ids: &Tensor) -> Result<Tensor> {
        let table = &self.weights.embedding;
        if table.size()[0] == self.spec.vocab_size as i64 {
            return Ok(embedding::forward(token_ids, table));
        }
        let first_row = self.spec.vocab_range(self.tp.rank(), self.tp.size()).start as i64;
        let mut rows = embedding::forward_shard(token_ids, table, first_row);
        self.tp.all_reduce(&mut rows, ReduceOp::Sum)?;
        Ok(rows)
    }
}
