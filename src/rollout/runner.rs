//! The [`Runner`] trait for computing steps, and its implementation with libtorch operations and sampling on the host.

use std::collections::VecDeque;

use tch::{Kind, Tensor, no_grad};

use super::batch::StepBatch;
use super::draft_rows::{HeadDrafts, HeadWork};
use super::mixer::PagedMixer;
use super::options::EngineOptions;
use super::routes::StepRoutes;
use super::sampler::{Draw, Sampled, Sampler};
use super::scheduler::Step;
use super::sequence::EngineSequence;
use super::speculation::StoredDrafts;
use super::stages::EngineRanks;
use super::state_pages::SequenceMemory;
use super::stats::StageTimes;
use super::weights::EngineWeights;
use crate::error::Result;
use crate::model::{BlockContext, Mixer, ModelSpec, Ropes, Routes, Stage, block_forward};
use crate::ops::delta_net::{DeltaOptions, DraftedRows, StoredAndRows};
use crate::ops::{embedding, exact, linear, try_map};
use crate::ranks::{Collective, ReduceOp};
use crate::torch;

/// Computes steps in the order in which they are launched. Collective over the tensor-parallel group.
pub(super) trait Runner {
    /// Maximum number of steps under way when the next one is launched.
    fn lag(&self) -> usize;

    /// Launches a step. Its sequences' blocks have space for it. Tokens that the sequences do not have yet are read from the output of the previous
    /// step.
    fn launch(&mut self, step: &Step, draws: &[Draw], sequences: &[EngineSequence]) -> Result<()>;

    /// Returns the tokens that the oldest step under way sampled, one for each of its draws.
    fn collect(&mut self) -> Result<Vec<Sampled>>;

    /// Returns the experts of all tokens of the step that was collected last, token by token; empty unless experts are recorded.
    fn take_experts(&mut self) -> Vec<u16>;

    /// The drafts of a decode step that have `depth` others before them, by the model's own head; none where they stay on the device.
    fn draft(
        &mut self,
        _step: &Step,
        _depth: usize,
        _draws: &[Draw],
        _sequences: &[EngineSequence],
    ) -> Result<Vec<Sampled>> {
        unreachable!("engines in stages have no draft head")
    }

    /// The drafts of the step that was collected last, by run, which stayed on the device until then; none where the host knew them.
    fn take_drafts(&mut self) -> Vec<u32> {
        Vec::new()
    }

    /// Has states take in the drafts that are stored beside them, as they are taken in by steps.
    fn settle(&mut self, stored: &[StoredDrafts]) -> Result<()>;

    /// With pipeline stages, the times that this rank computed and waited since the last call; otherwise zeros.
    fn take_times(&mut self) -> StageTimes {
        StageTimes::default()
    }
}

/// Runs steps with libtorch operations, copies the logits to the host and samples there; for the layers of one stage, or for all.
#[derive(Debug)]
pub(super) struct HostRunner<'a> {
    pub(super) spec: &'a ModelSpec,
    own: &'a ModelSpec, // with only the stage's layers
    stage: Stage,
    pub(super) ropes: &'a Ropes,
    pub(super) weights: &'a EngineWeights<'a>,
    pub(super) memory: SequenceMemory<'a>,
    pub(super) tp: &'a dyn Collective,
    pub(super) residual: Kind,
    records_experts: bool,
    exact: bool,
    sampled: VecDeque<Vec<Sampled>>,
    experts: Vec<u16>, // of the newest step, which is collected before the next is launched
    pub(super) draft_spec: Option<ModelSpec>,
    pub(super) head_drafts: Option<HeadDrafts>, // of the step that is being drafted
}

/// One stage's inputs for a step, independent of its sequences, which may change before it is computed.
#[derive(Debug)]
pub(super) struct StepWork {
    batch: StepBatch,
    routes: Option<StepRoutes>,
    copies: Vec<(u32, u32)>,       // block pairs (from, to)
    state_copies: Vec<(u32, u32)>, // page pairs (from, to)
    head: Option<HeadWork>,
}

impl StepWork {
    /// Number of tokens of the step.
    pub(super) fn num_tokens(&self) -> usize {
        self.batch.token_ids.size()[0] as usize
    }

    /// The experts of the stage's layers, token by token, once computed; empty unless experts are recorded.
    pub(super) fn take_experts(&mut self) -> Result<Vec<u16>> {
        self.routes.take().map_or_else(|| Ok(Vec::new()), StepRoutes::into_experts)
    }
}

impl Runner for HostRunner<'_> {
    fn lag(&self) -> usize {
        0
    }

    fn launch(&mut self, step: &Step, draws: &[Draw], sequences: &[EngineSequence]) -> Result<()> {
        let mut work = self.prepare(step, sequences)?;
        let x = self.compute(&work, None)?;
        self.sampled.push_back(self.sample(&work, &x, draws)?);
        self.experts = work.take_experts()?;
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Sampled>> {
        Ok(self.sampled.pop_front().expect("a step was launched"))
    }

    fn take_experts(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.experts)
    }

    fn draft(
        &mut self,
        step: &Step,
        depth: usize,
        draws: &[Draw],
        sequences: &[EngineSequence],
    ) -> Result<Vec<Sampled>> {
        self.draft_at(step, depth, draws, sequences)
    }

    fn settle(&mut self, stored: &[StoredDrafts]) -> Result<()> {
        let Some(states) = self.memory.states.filter(|_| !stored.is_empty()) else { return Ok(()) };
        let device = self.weights.embedding.device();
        let counts: Vec<i64> = stored.iter().map(|stored| stored.count as i64).collect();
        let pages: Vec<i64> = stored.iter().map(|stored| stored.page.into()).collect();
        let rows: Vec<_> = stored.iter().map(|stored| StoredAndRows { stored: stored.count, rows: 0 }).collect();
        let stored = DraftedRows::new(&rows, device)?;
        let pages = torch::tensor_on(&pages, device)?;
        for (layer, block) in self.own.layers.iter().enumerate() {
            let Mixer::DeltaNet(delta_net) = block.tp_slice(self.tp.size()).mixer else { continue };
            self.weights.prepare(layer)?;
            let options = DeltaOptions { heads: delta_net.heads, eps: self.spec.rms_norm_eps };
            let mut drafted = states.read_drafted(layer, &pages)?;
            no_grad(|| drafted.take_in(&stored, &self.weights.blocks[layer].delta_weights(), options))?;
            states.write(layer, &pages, &drafted.state)?;
        }
        if self.draft_spec.is_some() {
            states.keep_newest(&pages, &counts)?;
        }
        Ok(())
    }
}

impl<'a> HostRunner<'a> {
    pub(super) fn new(
        (spec, own, ranks): (&'a ModelSpec, &'a ModelSpec, &'a EngineRanks),
        ropes: &'a Ropes,
        weights: &'a EngineWeights<'a>,
        memory: SequenceMemory<'a>,
        &EngineOptions { residual, records_experts, exact, .. }: &EngineOptions,
    ) -> Self {
        let (stage, tp, sampled, experts) = (ranks.stage(), &*ranks.tp, VecDeque::new(), Vec::new());
        let (draft_spec, head_drafts) = (spec.draft_spec().filter(|_| stage.is_last()), None);
        Self {
            spec,
            own,
            stage,
            ropes,
            weights,
            memory,
            tp,
            residual,
            records_experts,
            exact,
            sampled,
            experts,
            draft_spec,
            head_drafts,
        }
    }

    /// Builds the tensors of a step from the current state of its sequences.
    pub(super) fn prepare(&self, step: &Step, sequences: &[EngineSequence]) -> Result<StepWork> {
        let device = self.weights.embedding.device();
        let has_adapters = self.weights.num_adapters > 0;
        let batch = StepBatch::new(step, sequences, self.memory.kv_cache.block_size(), has_adapters, device)?;
        let routes = match self.records_experts {
            true => StepRoutes::new((self.spec, &self.stage.layers), step, sequences, device)?,
            false => None,
        };
        let block_size = self.memory.kv_cache.block_size();
        let states = self.memory.states.filter(|_| self.draft_spec.is_some());
        let head = states.map(|states| HeadWork::new(step, sequences, states.num_kept_rows(), block_size));
        Ok(StepWork { batch, routes, copies: step.copies.clone(), state_copies: step.state_copies.clone(), head })
    }

    /// Runs the stage's layers on `input` [T, D], or on the first stage on the step's tokens. Also copies the blocks and pages that new sequences
    /// start from.
    pub(super) fn compute(&self, work: &StepWork, input: Option<Tensor>) -> Result<Tensor> {
        let device = work.batch.token_ids.device();
        let x = no_grad(|| {
            let x = match input {
                Some(x) => x,
                None => self.scaled(self.embed(&work.batch.token_ids)?)?, // [T, D]
            };
            self.layers(&work.batch, work.routes.as_ref().map(|routes| routes as &dyn Routes), x)
        })?;
        if let (Some(states), Some(head)) = (self.memory.states, &work.head) {
            no_grad(|| self.follow(head, &x, states))?;
        }
        if !work.copies.is_empty() {
            let (from, to): (Vec<_>, Vec<_>) = work.copies.iter().map(|&(from, to)| (from as i32, to as i32)).unzip();
            let [from, to] = try_map([from, to], |blocks| torch::tensor_on(&blocks, device))?;
            self.memory.kv_cache.copy_blocks(&from, &to)?;
        }
        if let (Some(states), false) = (self.memory.states, work.state_copies.is_empty()) {
            states.copy(&work.state_copies)?;
        }
        Ok(x)
    }

    /// Samples tokens from the last layer's output. Collective over the tensor-parallel group.
    pub(super) fn sample(&self, work: &StepWork, x: &Tensor /* [T, D] */, draws: &[Draw]) -> Result<Vec<Sampled>> {
        let vocab = self.spec.vocab_range(self.tp.rank(), self.tp.size());
        let sampler = Sampler { vocab, tp: self.tp };
        sampler.sample(&self.logits(&work.batch, x)?, draws)
    }

    /// Allocates a residual stream for this many tokens. [T, D]
    pub(super) fn stream(&self, num_tokens: usize) -> Result<Tensor> {
        let shape = [num_tokens as i64, self.spec.hidden_size as i64];
        Ok(Tensor::f_zeros(shape, (self.residual, self.weights.embedding.device()))?)
    }

    fn layers(&self, batch: &StepBatch, routes: Option<&dyn Routes>, mut x: Tensor) -> Result<Tensor> {
        let num_kv_heads = self.own.attention().tp_slice(self.tp.size()).num_kv_heads;
        let mixer = PagedMixer::new(self.memory, batch, (self.own, self.exact), num_kv_heads)?;
        let kind = self.weights.embedding.kind();
        let ropes = match self.exact {
            true => self.ropes.exact_rows(&batch.positions, kind)?,
            false => self.ropes.rows(&batch.positions, kind)?,
        };
        let context = BlockContext::new(self.own, &ropes, Some(self.tp), routes).exactly(self.exact);
        for (layer, block) in self.weights.blocks.iter().enumerate() {
            self.weights.prepare(layer)?;
            let own = batch.adapters.as_ref().map(|adapters| block.for_rows(adapters)).transpose()?;
            let block = own.as_ref().unwrap_or(block);
            x = block_forward(&context, layer, block, &x, &mixer, None)?.0;
        }
        Ok(x)
    }

    /// Logits of the batch's `last_rows` over this rank's vocabulary, on the host. [L, V of this rank]
    fn logits(&self, batch: &StepBatch, x: &Tensor /* [T, D] */) -> Result<Vec<f32>> {
        no_grad(|| {
            let rows = x.f_index_select(0, &batch.last_rows)?; // [L, D]
            if self.exact {
                let rows = exact::rms_norm(&rows, &self.weights.final_norm, self.spec.norm())?;
                return torch::f32_vec(&exact::logits(&rows, &self.weights.lm_head, self.spec.logits_scaling)?);
            }
            let (rows, _) = self.spec.norm().forward(&rows, &self.weights.final_norm)?;
            let logits = linear::forward(&rows, &self.weights.lm_head, None)?.f_to_kind(Kind::Float)?;
            torch::f32_vec(&self.spec.scale_logits(logits)?)
        })
    }

    /// Scales embedding rows to start the residual stream. [T, D]
    pub(super) fn scaled(&self, rows: Tensor) -> Result<Tensor> {
        let kind = self.weights.embedding.kind();
        if self.exact {
            return self.spec.scale_embedding(rows.f_to_kind(self.residual)?, kind); // scaled as in training
        }
        Ok(self.spec.scale_embedding(rows, kind)?.f_to_kind(self.residual)?)
    }

    /// Looks up embeddings: in the whole table, or as the sum over the group of each rank's part. [T] -> [T, D]
    pub(super) fn embed(&self, token_ids: &Tensor) -> Result<Tensor> {
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
