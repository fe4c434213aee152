//! State of an engine on a GPU that persists between wakes.
#![allow(unsafe_code)]

use std::time::Duration;

use tch::{Device, Kind, Tensor};

use super::buffers::{DecodeBuffers, StepShape};
use super::graphs::Graphs;
use super::inputs::Words;
use super::masks::TokenMasks;
use super::network::{self, DecoderNetwork};
use super::op::DecoderOp;
use super::plans::AttentionPlans;
use super::stages::StageTokens;
use super::wait::wait;
use crate::cuda::kernels::{AttentionPlan, RowSums};
use crate::cuda::{Context, Graph, PinnedWords, Products, TorchStream};
use crate::error::{Error, Result};
use crate::memory::{Arena, Ledger, MemoryKind};
use crate::model::{ByRope, ModelSpec, OwnProducts, Ropes, bytes_of_parts};
use crate::ranks::{Collective, ReduceOp, all_gather_json, all_reduce_f64};
use crate::rollout::options::EngineOptions;
use crate::rollout::sampler::Draw;
use crate::rollout::state_pages::SequenceMemory;
use crate::rollout::weights::EngineWeights;

/// Number of replays of a step per choice of GEMM kernels; the median is compared.
const TRIALS: usize = 5;
/// Uploads of inputs that may be under way, beside those of a step's drafts.
const MOST_UPLOADS: usize = 2;
/// Number of replays for GEMMs of many rows. They use the full power of the GPU, so the trial must be long enough to reach the clock of a long run.
const LASTING_TRIALS: usize = 200;

/// State that persists between wakes: streams, addresses, CUDA graphs. While asleep it holds little memory, unless the engine keeps its memory.
#[derive(Debug)]
pub(in crate::rollout) struct GpuState {
    // Declared before the arena, so that graphs are dropped first: they use its addresses.
    pub(super) graphs: Graphs,
    pub(super) buffers: Option<DecodeBuffers>,
    pub(super) shape: StepShape,
    arena: Arena,
    pub(super) plans: AttentionPlans,
    pub(super) ropes: ByRope<Tensor>, // [max_model_length, turned columns] f32
    pub(super) low: Option<Tensor>,   // for adapters, allocated at the first wake with some
    pub(super) sums: Option<RowSums>,
    pub(super) masks: Option<TokenMasks>, // allocated for the first request with a structure
    pub(super) products: Products,
    pub(super) stream: TorchStream,
    uploads: Vec<PinnedWords>,
    num_uploads: usize,
    pub(super) downloads: [PinnedWords; 2],
    /// Downloads of the recorded experts of a step's tokens, if experts are recorded.
    pub(super) record_downloads: Option<[PinnedWords; 2]>,
    pub(super) strict: bool,
    pub(super) exact: bool,
    /// Tokens of the steps under way, in an engine with pipeline stages.
    pub(super) tokens: Option<StageTokens>,
    /// Attention of the rows of a draft head.
    pub(super) head_plan: Option<AttentionPlan>,
}

impl GpuState {
    /// Reserves addresses and allocates the permanent memory.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a block size that the kernels do not support; [`Error::Cuda`].
    pub(in crate::rollout) fn new(
        spec: &ModelSpec,
        options: &EngineOptions,
        ropes: &Ropes,
        (tp, num_stages): (&dyn Collective, usize),
        ordinal: usize,
    ) -> Result<Self> {
        if !options.block_size.is_multiple_of(16) {
            return Err(Error::invalid_value("kv_block_size", options.block_size, "a multiple of 16 on a GPU"));
        }
        let (device, context) = (Device::Cuda(ordinal), Context::retain(ordinal)?);
        let shape = StepShape::new(spec, options, tp.size());
        let pinned =
            |words| -> Result<_> { Ok([PinnedWords::new(&context, words)?, PinnedWords::new(&context, words)?]) };
        let stream = TorchStream::new(&context)?;
        let uploads = (0..MOST_UPLOADS + shape.drafts).map(|_| PinnedWords::new(&context, shape.input_words()));
        let head_plan = spec
            .draft_spec()
            .map(|draft| AttentionPlans::of_head(&draft, options, (tp.size(), device), [shape.seqs, shape.blocks]));
        Ok(Self {
            graphs: Graphs::default(),
            buffers: None,
            arena: shape.reserve(device)?,
            plans: AttentionPlans::new(spec, options, (tp.size(), device), [shape.seqs, shape.blocks])?,
            ropes: match options.exact {
                true => ropes.exact_tables(options.max_model_length, device)?,
                false => ropes.tables(options.max_model_length, device)?,
            },
            low: None,
            sums: None,
            masks: None,
            products: Products::new(&stream)?,
            stream,
            uploads: uploads.collect::<Result<_>>()?,
            num_uploads: 0,
            downloads: pinned(shape.sampled_words())?,
            head_plan: head_plan.transpose()?,
            record_downloads: shape
                .experts
                .filter(|_| options.records_experts)
                .map(|experts| pinned(experts.record_words()))
                .transpose()?,
            tokens: (num_stages > 1).then(|| StageTokens::new(&context, num_stages, shape.seqs)).transpose()?,
            shape,
            strict: options.strict,
            exact: options.exact,
        })
    }

    /// Maps the buffers. Captured graphs stay valid if weights, cache and communicators have the same addresses as before. Collective.
    pub(in crate::rollout) fn wake(
        &mut self,
        weights: &EngineWeights,
        memory: SequenceMemory<'_>,
        tp: &dyn Collective,
    ) -> Result<()> {
        let buffers = self.shape.map(&mut self.arena)?;
        if self.low.is_none() {
            self.low = network::low_rank_buffer(weights, buffers.x.size()[0], self.shape.choices())?;
        }
        self.buffers = Some(buffers);
        self.sums = self.shape.row_sums(tp)?;
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        let peers = self.sums.as_ref().map_or(0, |sums| sums.memory().bytes());
        let plans = self.plans.bytes() + self.head_plan.as_ref().map_or(0, AttentionPlan::bytes);
        let tables = self.ropes.iter().map(bytes).sum::<usize>() + self.low.as_ref().map_or(0, bytes) + peers;
        Ledger::set("engine_tables", MemoryKind::Device, tables + plans + Products::BYTES);
        let mut seen = network::fingerprint(weights, memory, self.low.as_ref())?;
        seen.push(tp.epoch()? as usize);
        seen.extend(self.sums.as_ref().map(|sums| sums.memory().address()));
        self.graphs.keep_if(seen);
        Ok(())
    }

    /// Packs what a step is told, once an earlier one's words have left the host, and queues their copy. `all`: the ranks of the engine.
    pub(super) fn upload<T>(
        &mut self,
        all: &dyn Collective,
        pack: impl FnOnce(&mut Words, &Tensor) -> Result<T>,
    ) -> Result<T> {
        let inputs = &self.buffers.as_ref().expect("the engine is awake").inputs;
        let place = self.num_uploads % self.uploads.len();
        self.num_uploads += 1;
        let upload = &mut self.uploads[place];
        let mut words = Words::new(upload.words(&mut || wait(all))?);
        let packed = pack(&mut words, inputs)?;
        let len = words.len();
        upload.upload(&inputs.narrow(0, 0, len as i64))?;
        Ok(packed)
    }

    /// Uploads the token masks of a step's draws, if any draw has one.
    pub(super) fn upload_masks(&mut self, draws: &[Draw], vocab_size: usize, all: &dyn Collective) -> Result<()> {
        if draws.iter().all(|draw| draw.allowed.is_none()) {
            return Ok(());
        }
        if self.masks.is_none() {
            let masks = TokenMasks::new(
                &self.stream,
                &self.buffers.as_ref().expect("the engine is awake").inputs,
                self.shape.seqs,
                vocab_size,
            )?;
            Ledger::set("engine_masks", MemoryKind::Device, masks.bytes());
            self.masks = Some(masks);
        }
        let masks = self.masks.as_mut().expect("made above");
        masks.upload(draws, &mut || wait(all))
    }

    /// The subset of this crate's GEMM kernels with which `hidden` over this many rows is fastest. It is timed on the current batch, once for each
    /// model shape. The step is timed as a whole, since kernels prefetch weights while the previous operation runs. Rows have no state pages during a
    /// trial, because it would change the states. Collective over the tensor-parallel group for new shapes.
    pub(super) fn own_products(
        &self,
        network: &DecoderNetwork,
        rows: usize,
        hidden: &dyn Fn(&DecoderNetwork, &Tensor /* [rows] i32, pages */) -> Result<Tensor>,
    ) -> Result<OwnProducts> {
        let residual = network.buffers.x.kind();
        let weights = (network.weights.stored.is_some(), network.format().rounds(), network.low.is_some());
        let mut best = network.own_products;
        for candidate in network.may_own_products(rows)? {
            let trials = if candidate == OwnProducts::FewRows { TRIALS } else { LASTING_TRIALS };
            let of = (candidate, best, residual, weights);
            let mut step = format!("{of:?} {} {:?}", network.memory.kv_cache.block_size(), network.spec);
            if network.tp.size() > 1 {
                step += &format!(" on {} ranks", network.tp.size());
            }
            let agree = |known| of_first_rank(network.tp, known);
            let is_faster = self.products.own_are_faster(rows, &step, agree, || {
                let pages = Tensor::f_full([rows as i64], -1i64, (Kind::Int, network.weights.embedding.device()))?;
                let median = |own_products| -> Result<Duration> {
                    let step = || hidden(&DecoderNetwork { own_products, ..*network }, &pages).map(drop);
                    let step = || DecoderOp::only(None, step);
                    step()?;
                    let mut graph = Graph::capture(&self.stream, step)?;
                    // SAFETY: recorded just now, over memory that stays as long as the engine is awake.
                    unsafe { graph.median_time(&self.stream, trials) }
                };
                let mut times = [median(best)?.as_secs_f64(), median(candidate)?.as_secs_f64()];
                all_reduce_f64(network.tp, &mut times, ReduceOp::Max)?; // the slowest rank decides
                let [before, now] = times.map(Duration::from_secs_f64);
                tracing::debug!("{rows} rows: {now:?} with {candidate:?}, {before:?} with {best:?}");
                Ok(now < before)
            })?;
            if is_faster {
                best = candidate;
            }
        }
        Ok(best)
    }

    /// Bytes that waking has to map.
    pub(in crate::rollout) fn absent_bytes(&self) -> usize {
        self.arena.absent_bytes()
    }

    /// Unmaps the buffers. Never fails: the arena keeps an error for the next wake.
    pub(in crate::rollout) fn sleep(&mut self) {
        self.buffers = None;
        self.arena.unmap();
    }
}

impl Drop for GpuState {
    fn drop(&mut self) {
        for owner in ["engine_tables", "engine_graphs", "engine_masks"] {
            Ledger::set(owner, MemoryKind::Device, 0);
        }
    }
}

/// Broadcasts rank 0's cached decision to the group. Collective.
fn of_first_rank(tp: &dyn Collective, known: Option<bool>) -> Result<Option<bool>> {
    if tp.size() == 1 {
        return Ok(known);
    }
    Ok(all_gather_json(tp, "own_are_faster", &known)?[0])
}

/// Bytes of GPU memory that one rank's engine always holds, also asleep: attention scratch, rotary tables and the GEMM workspace.
pub fn engine_table_bytes(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> usize {
    let shape = StepShape::new(spec, options, tp_size);
    let partials_of =
        |spec: &ModelSpec| AttentionPlans::partial_bytes(spec, options, tp_size, [shape.seqs, shape.blocks]);
    let partials = partials_of(spec) + spec.draft_spec().as_ref().map_or(0, partials_of);
    let products =
        Products::BYTES + if options.exact && options.kind == Kind::BFloat16 { bytes_of_parts(spec) } else { 0 };
    partials + options.max_model_length * spec.ropes().columns() * size_of::<f32>() + products
}
