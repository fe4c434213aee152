//! How steps are computed: [`Runner`], and the one on libtorch's operations and the host's sampler.

use std::collections::VecDeque;

use tch::{Kind, Tensor, no_grad};

use super::batch::StepBatch;
use super::kv_cache::KvCache;
use super::mixer::PagedMixer;
use super::routes::StepRoutes;
use super::sampler::{Draw, Sampled, Sampler};
use super::scheduler::Step;
use super::sequence::EngineSequence;
use super::state_pages::StatePages;
use super::weights::EngineWeights;
use crate::dist::{Collective, ReduceOp};
use crate::error::Result;
use crate::model::{BlockContext, ModelSpec, Routes, block_forward};
use crate::ops::rope::Rope;
use crate::ops::{embedding, linear, try_map};
use crate::torch;

/// Computes steps in the order of their launch. Collective over the tensor-parallel group.
pub(super) trait Runner {
    /// Steps that may be under way when the next one is launched.
    fn lag(&self) -> usize;

    /// Takes a step on. Its sequences' blocks hold room for it; tokens that they do not know yet come out of the step before.
    fn launch(&mut self, step: &Step, draws: &[Draw], sequences: &[EngineSequence]) -> Result<()>;

    /// The tokens that the oldest step under way sampled, one for each of its draws.
    fn collect(&mut self) -> Result<Vec<Sampled>>;

    /// The experts of all tokens of the step that was collected last, token by token; none unless they are recorded.
    fn take_experts(&mut self) -> Vec<u16>;
}

/// libtorch's operations step by step, logits to the host, and the sampler there.
#[derive(Debug)]
pub(super) struct HostRunner<'a> {
    spec: &'a ModelSpec,
    rope: &'a Rope,
    weights: &'a EngineWeights<'a>,
    kv_cache: &'a KvCache,
    states: Option<&'a StatePages>,
    tp: &'a dyn Collective,
    residual: Kind,
    records_experts: bool,
    sampled: VecDeque<Vec<Sampled>>,
    experts: Vec<u16>, // of the newest step: none is launched before it is collected
}

impl Runner for HostRunner<'_> {
    fn lag(&self) -> usize {
        0
    }

    fn launch(&mut self, step: &Step, draws: &[Draw], sequences: &[EngineSequence]) -> Result<()> {
        let device = self.weights.embedding.device();
        let has_adapters = self.weights.num_adapters > 0;
        let batch = StepBatch::new(step, sequences, self.kv_cache.block_size(), has_adapters, device)?;
        let routes = if self.records_experts { StepRoutes::new(self.spec, step, sequences, device)? } else { None };
        let logits = self.logits(&batch, routes.as_ref().map(|routes| routes as &dyn Routes))?;
        self.experts = routes.map_or_else(|| Ok(Vec::new()), StepRoutes::into_experts)?;
        if !step.copies.is_empty() {
            let (from, to): (Vec<_>, Vec<_>) = step.copies.iter().map(|&(from, to)| (from as i32, to as i32)).unzip();
            let [from, to] = try_map([from, to], |blocks| torch::tensor_on(&blocks, batch.token_ids.device()))?;
            self.kv_cache.copy_blocks(&from, &to)?;
        }
        if let (Some(states), false) = (self.states, step.state_copies.is_empty()) {
            states.copy(&step.state_copies)?;
        }
        let vocab = self.spec.vocab_range(self.tp.rank(), self.tp.size());
        let sampler = Sampler { vocab, tp: self.tp };
        self.sampled.push_back(sampler.sample(&logits, draws)?);
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Sampled>> {
        Ok(self.sampled.pop_front().expect("a step was launched"))
    }

    fn take_experts(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.experts)
    }
}

impl<'a> HostRunner<'a> {
    pub(super) fn new(
        spec: &'a ModelSpec,
        rope: &'a Rope,
        weights: &'a EngineWeights<'a>,
        (kv_cache, states): (&'a KvCache, Option<&'a StatePages>),
        tp: &'a dyn Collective,
        (residual, records_experts): (Kind, bool),
    ) -> Self {
        let (sampled, experts) = (VecDeque::new(), Vec::new());
        Self { spec, rope, weights, kv_cache, states, tp, residual, records_experts, sampled, experts }
    }

    /// Logits of the batch's `last_rows` over this rank's vocabulary [L, V of this rank], on the host.
    fn logits(&self, batch: &StepBatch, routes: Option<&dyn Routes>) -> Result<Vec<f32>> {
        no_grad(|| {
            let (_, num_kv_heads) = self.spec.tp_heads(self.tp.size());
            let mixer = PagedMixer::new((self.kv_cache, self.states), batch, self.spec, num_kv_heads)?;
            let mut x = self.embed(&batch.token_ids)?.f_to_kind(self.residual)?; // [T, D]
            let rope = self.rope.rows(&batch.positions, self.weights.embedding.kind())?;
            let context = BlockContext { spec: self.spec, rope: &rope, tp: Some(self.tp), routes };
            for (layer, block) in self.weights.blocks.iter().enumerate() {
                self.weights.prepare(layer)?;
                let own = batch.adapters.as_ref().map(|adapters| block.for_rows(adapters)).transpose()?;
                let block = own.as_ref().unwrap_or(block);
                x = block_forward(&context, layer, block, &x, &mixer, None)?.0;
            }
            let rows = x.f_index_select(0, &batch.last_rows)?; // [L, D]
            let (rows, _) = self.spec.norm().forward(&rows, &self.weights.final_norm)?;
            let logits = linear::forward(&rows, &self.weights.lm_head, None)?.f_to_kind(Kind::Float)?;
            torch::f32_vec(&logits)
        })
    }

    /// Rows of the whole table, or the sum over the group of what each rank's rows give. [T] -> [T, D]
    fn embed(&self, token_ids: &Tensor) -> Result<Tensor> {
        let table = &self.weights.embedding;
        if table.size()[0] == self.spec.vocab_size as i64 {
            return embedding::forward(token_ids, table);
        }
        let first_row = self.spec.vocab_range(self.tp.rank(), self.tp.size()).start as i64;
        let mut rows = embedding::forward_shard(token_ids, table, first_row)?;
        self.tp.all_reduce(&mut rows, ReduceOp::Sum)?;
        Ok(rows)
    }
}
