//! Steps on a GPU: nothing of a decode step enters libtorch or is allocated, and the whole of it, from the last sampled tokens
//! to the next ones, is recorded once for every batch size and replayed. The host runs one step behind: it uploads a step's
//! description and launches it before it reads what the step before has sampled.
//!
//! | file | what it is |
//! |---|---|
//! | `buffers` | the memory of a step |
//! | `inputs` | what a step is told, packed into one upload |
//! | `network`, `sampling` | kernels and products, from token ids to hidden states and on to sampled tokens |
//! | `prefill` | attention of prompts |
//! | `graphs` | decode steps, recorded by batch size |
//! | `profile` | the time of a decode step and of each of its operations |

mod buffers;
mod graphs;
mod inputs;
mod network;
mod prefill;
mod profile;
mod sampling;

pub use self::buffers::{engine_buffer_bytes, engine_sum_bytes};
pub use self::profile::{OpTime, StepProfile, Sustained};

use std::collections::VecDeque;

use tch::{Device, Kind, Tensor, no_grad};

use self::buffers::{Buffers, Shape};
use self::graphs::Graphs;
use self::inputs::{DecodeInputs, Packing, PrefillInputs, Words};
use self::network::{Network, Op, Tokens};
use self::prefill::PrefillAttention;
use self::sampling::{Drawn, Processing};
use super::engine::EngineOptions;
use super::kv_cache::KvCache;
use super::runner::Runner;
use super::sampler::{Draw, Sampled, non_finite};
use super::scheduler::Step;
use super::sequence::Sequence;
use super::weights::EngineWeights;
use crate::cuda::kernels::{self, AttentionPlan, AttentionShape, RowSums, SharedPrefixes};
use crate::cuda::{Context, CurrentStream, PinnedWords, Products, TorchStream, Tuning};
use crate::dist::Collective;
use crate::error::{Error, Result};
use crate::memory::{Arena, Ledger, Place};
use crate::model::{ModelSpec, attention_scale};
use crate::ops::rope::Rope;
use crate::torch;
use crate::types::SamplingParams;

/// Tokens of a context that are summed at once in strict mode.
const STRICT_SPLIT_TOKENS: usize = 256;

/// Bytes of a GPU that one rank's engine holds asleep, too: what its attention needs, rotations and the products' workspace.
pub fn engine_table_bytes(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> usize {
    let (shape, attention) = (Shape::new(spec, options, tp_size), attention_shape(spec, options, tp_size));
    let partials = AttentionPlan::partial_bytes(&attention, shape.seqs, shape.blocks, split_tokens(options));
    partials + options.max_model_length * spec.head_dim * size_of::<f32>() + Products::BYTES
}

fn attention_shape(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> AttentionShape {
    let (num_heads, num_kv_heads) = spec.tp_heads(tp_size);
    AttentionShape {
        num_heads,
        num_kv_heads,
        head_dim: spec.head_dim,
        block_size: options.block_size,
        sliding_window: spec.sliding_window,
        scale: attention_scale(spec),
    }
}

fn split_tokens(options: &EngineOptions) -> Option<usize> {
    options.strict.then_some(STRICT_SPLIT_TOKENS)
}

/// What lasts from one wake to the next: streams, addresses, graphs. Asleep it holds little memory.
#[derive(Debug)]
pub(super) struct GpuState {
    // Before the arena, whose addresses they have.
    graphs: Graphs,
    buffers: Option<Buffers>,
    shape: Shape,
    arena: Arena,
    plan: AttentionPlan,
    rope: Tensor,        // [max_model_length, hd] f32
    low: Option<Tensor>, // for adapters, made at the first wake that has some
    sums: Option<RowSums>,
    products: Products,
    stream: TorchStream,
    uploads: [PinnedWords; 2],
    downloads: [PinnedWords; 2],
    strict: bool,
}

impl GpuState {
    /// Reserves addresses and allocates what stays.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a block size that the kernels do not take; [`Error::Cuda`].
    pub(super) fn new(
        spec: &ModelSpec,
        options: &EngineOptions,
        rope: &Rope,
        tp: &dyn Collective,
        ordinal: usize,
    ) -> Result<Self> {
        if !options.block_size.is_multiple_of(16) {
            return Err(Error::invalid_value("kv_block_size", options.block_size, "a multiple of 16 on a GPU"));
        }
        let (device, context) = (Device::Cuda(ordinal), Context::retain(ordinal)?);
        let shape = Shape::new(spec, options, tp.size());
        let attention = attention_shape(spec, options, tp.size());
        let (split, place) = (split_tokens(options), (options.kind, device));
        let pinned =
            |words| -> Result<_> { Ok([PinnedWords::new(&context, words)?, PinnedWords::new(&context, words)?]) };
        let stream = TorchStream::new(&context)?;
        Ok(Self {
            graphs: Graphs::default(),
            buffers: None,
            arena: shape.reserve(device)?,
            plan: AttentionPlan::new(attention, place, shape.seqs, shape.blocks, split)?,
            rope: rope.table(options.max_model_length, device),
            low: None,
            sums: None,
            products: Products::new(&stream)?,
            stream,
            uploads: pinned(shape.input_words())?,
            downloads: pinned(2 * shape.seqs)?,
            shape,
            strict: options.strict,
        })
    }

    /// Maps the buffers. Graphs stay if weights, cache and communicators are where they were. Collective.
    pub(super) fn wake(&mut self, weights: &EngineWeights, kv_cache: &KvCache, tp: &dyn Collective) -> Result<()> {
        let buffers = self.shape.map(&mut self.arena)?;
        if self.low.is_none() {
            self.low = network::low_rank_buffer(weights, buffers.x.size()[0])?;
        }
        self.buffers = Some(buffers);
        self.sums = self.shape.row_sums(tp)?;
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        let peers = self.sums.as_ref().map_or(0, |sums| sums.memory().bytes());
        let tables = bytes(&self.rope) + self.low.as_ref().map_or(0, bytes) + peers;
        Ledger::set("engine_tables", Place::Device, tables + self.plan.bytes() + Products::BYTES);
        let mut seen = network::fingerprint(weights, kv_cache, self.low.as_ref());
        seen.push(tp.epoch()? as usize);
        seen.extend(self.sums.as_ref().map(|sums| sums.memory().address()));
        self.graphs.keep_if(seen);
        Ok(())
    }

    /// Packs what step number `step` is told, once an earlier step's words have left the host, and queues their copy.
    fn upload<T>(
        &mut self,
        step: usize,
        tp: &dyn Collective,
        pack: impl FnOnce(&mut Words, &Tensor) -> Result<T>,
    ) -> Result<T> {
        let inputs = &self.buffers.as_ref().expect("the engine is awake").inputs;
        let upload = &mut self.uploads[step % 2];
        let mut words = Words::new(upload.words(&mut || wait(tp))?);
        let packed = pack(&mut words, inputs)?;
        let len = words.len();
        upload.upload(&inputs.narrow(0, 0, len as i64))?;
        Ok(packed)
    }

    /// Gives the buffers' memory back. Never fails: the arena keeps an error for the next wake.
    pub(super) fn sleep(&mut self) {
        self.buffers = None;
        self.arena.unmap();
    }
}

impl Drop for GpuState {
    fn drop(&mut self) {
        for owner in ["engine_tables", "engine_graphs"] {
            Ledger::set(owner, Place::Device, 0);
        }
    }
}

/// The steps of one call of `generate`.
pub(super) struct GpuRunner<'a> {
    state: &'a mut GpuState,
    spec: &'a ModelSpec,
    weights: &'a EngineWeights<'a>,
    kv_cache: &'a KvCache,
    tp: &'a dyn Collective,
    params: &'a SamplingParams,
    /// Row of the last launched step that samples for each sequence.
    pending: Vec<u32>,
    /// (prompt id, tokens so far) of each draw of the steps under way.
    under_way: VecDeque<Vec<(u64, usize)>>,
    num_launched: usize,
    _current: CurrentStream,
}

impl<'a> GpuRunner<'a> {
    /// libtorch's operations of this thread go to the engine's stream as long as this lives.
    pub(super) fn new(
        state: &'a mut GpuState,
        (spec, weights, kv_cache): (&'a ModelSpec, &'a EngineWeights<'a>, &'a KvCache),
        tp: &'a dyn Collective,
        params: &'a SamplingParams,
        num_sequences: usize,
    ) -> Result<Self> {
        let current = state.stream.make_current()?;
        Ok(Self {
            state,
            spec,
            weights,
            kv_cache,
            tp,
            params,
            pending: vec![0; num_sequences],
            under_way: VecDeque::new(),
            num_launched: 0,
            _current: current,
        })
    }

    fn decode(&mut self, packing: &Packing) -> Result<()> {
        let bucket = self.bucket(packing);
        let mut graphs = std::mem::take(&mut self.state.graphs);
        let key = (bucket, Processing::of(self.params));
        let outcome = self.prepare_decode(packing, None, |stream, step| graphs.run(key, stream, step));
        self.state.graphs = graphs;
        outcome
    }

    /// The network over this engine's memory. A strict engine has one product algorithm, others choose by `tuning`; but what
    /// is timed may come out otherwise in the next run.
    fn network(&self, tuning: Tuning, only: Option<Op>) -> Network<'_> {
        let state = &*self.state;
        Network {
            spec: self.spec,
            weights: self.weights,
            kv_cache: self.kv_cache,
            tp: self.tp,
            products: &state.products,
            buffers: state.buffers.as_ref().expect("the engine is awake"),
            rope: &state.rope,
            low: state.low.as_ref(),
            sums: None,
            tuning: match tuning {
                _ if state.strict => Tuning::Fixed,
                Tuning::Timed if torch::is_deterministic() => Tuning::First,
                tuning => tuning,
            },
            own_products: false,
            processing: Processing::of(self.params),
            only,
        }
    }

    fn bucket(&self, packing: &Packing) -> usize {
        graphs::bucket(packing.step.runs.len(), self.state.shape.seqs)
    }

    /// Uploads a decode step's inputs and hands the step itself to `run`.
    fn prepare_decode<T>(
        &mut self,
        packing: &Packing,
        only: Option<Op>,
        run: impl FnOnce(&TorchStream, &mut dyn FnMut() -> Result<()>) -> Result<T>,
    ) -> Result<T> {
        let widths = (self.bucket(packing), self.state.shape.blocks);
        let (pending, least_shared) = (&self.pending, self.state.plan.least_shared_tokens(widths.0));
        let inputs = self.state.upload(self.num_launched, self.tp, |words, inputs| {
            DecodeInputs::pack(packing, words, widths, pending, least_shared, inputs)
        })?;
        let state = &*self.state;
        let sums = state.sums.as_ref().filter(|sums| widths.0 <= sums.rows());
        let network = Network { sums, ..self.network(Tuning::Timed, only) };
        let hidden = |network: &Network| decode_hidden(network, &inputs, &state.plan, state.strict);
        run(&state.stream, &mut || {
            let own_products = state.own_products_are_faster(&network, widths.0, &hidden)?;
            let hidden = hidden(&Network { own_products, ..network })?;
            let drawn =
                Drawn { lens: &inputs.context_lens, block_tables: &inputs.block_tables, sampling: &inputs.sampling };
            network.sample(&hidden, &drawn)
        })
    }

    fn prefill(&mut self, packing: &Packing) -> Result<()> {
        let blocks = self.state.shape.blocks;
        let pack = |words: &mut Words, inputs: &Tensor| PrefillInputs::pack(packing, words, blocks, inputs);
        let inputs = self.state.upload(self.num_launched, self.tp, pack)?;
        let network = self.network(Tuning::First, None);
        let strict = self.state.strict.then_some(&self.state.plan);
        let attention =
            PrefillAttention::new(packing.step, packing.sequences, &inputs, self.kv_cache, self.spec, strict);
        let tokens = Tokens { ids: &inputs.token_ids, positions: &inputs.positions, slots: &inputs.slots };
        let hidden = network.hidden(&tokens, &mut |layer, q, qkv| attention.attend(layer, q, qkv))?;
        if !packing.step.copies.is_empty() {
            let [from, to] = &inputs.copies;
            self.kv_cache.copy_blocks(from, to);
            let history = &network.buffers.history;
            let _ =
                history.shallow_clone().f_index_copy_(0, &to.to_kind(Kind::Int64), &history.index_select(0, from))?;
        }
        if packing.draws.is_empty() {
            return Ok(());
        }
        let block_tables = inputs.block_tables.index_select(0, &inputs.drawn_runs);
        let drawn = Drawn { lens: &inputs.lens, block_tables: &block_tables, sampling: &inputs.sampling };
        network.sample(&hidden.index_select(0, &inputs.last_rows), &drawn)
    }
}

impl Runner for GpuRunner<'_> {
    fn lag(&self) -> usize {
        1
    }

    fn launch(&mut self, step: &Step, draws: &[Draw], sequences: &[Sequence]) -> Result<()> {
        let block_size = self.kv_cache.block_size();
        let packing = Packing { step, draws, sequences, params: self.params, block_size };
        self.tp.epoch()?; // a graph knows nothing of a communicator's end
        no_grad(|| if step.is_decode { self.decode(&packing) } else { self.prefill(&packing) })?;
        let buffers = self.state.buffers.as_ref().expect("the engine is awake");
        self.state.downloads[self.num_launched % 2].download(&buffers.sampled)?;
        let samples = step.runs.iter().flat_map(|run| run.samples.clone().map(|index| (index, run.tokens.end)));
        let mut drawn = Vec::with_capacity(draws.len());
        for (row, ((index, len), draw)) in samples.zip(draws).enumerate() {
            self.pending[index] = row as u32;
            drawn.push((draw.prompt_id, len));
        }
        self.under_way.push_back(drawn);
        self.num_launched += 1;
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Sampled>> {
        let drawn = self.under_way.pop_front().expect("a step was launched");
        let parity = (self.num_launched - self.under_way.len() - 1) % 2;
        let tp = self.tp;
        let words = self.state.downloads[parity].words(&mut || wait(tp))?;
        let (ids, logprobs) = words.split_at(words.len() / 2);
        let results = drawn.iter().zip(ids.iter().zip(logprobs));
        let sampled = results.map(|(&(prompt_id, position), (&id, &bits))| match u32::try_from(id) {
            Ok(token_id) => Ok(Sampled { token_id, logprob: f32::from_bits(bits as u32) }),
            Err(_) => Err(non_finite(prompt_id, position)),
        });
        sampled.collect()
    }
}

/// The last tokens of a bucket's rows, through the network; the same however often it is done before the rows' next tokens are drawn.
fn decode_hidden(network: &Network, inputs: &DecodeInputs, plan: &AttentionPlan, strict: bool) -> Result<Tensor> {
    let buffers = network.buffers;
    let rows = inputs.from.size()[0];
    let mut ids = buffers.token_ids.narrow(0, 0, rows);
    kernels::next_tokens(&inputs.from, &buffers.sampled().0, &mut ids)?;
    let prefixes = SharedPrefixes { groups: &inputs.groups, num_shared_blocks: &inputs.num_shared };
    network.op(Op::AttentionPlan, || plan.update(&inputs.context_lens, (!strict).then_some(prefixes)))?;
    let tokens = Tokens { ids: &ids, positions: &inputs.positions, slots: &inputs.slots };
    let attended = buffers.attended.narrow(0, 0, rows); // [S, H hd]
    network.hidden(&tokens, &mut |layer, q, _| {
        let (k_cache, v_cache) = network.kv_cache.layer(layer);
        let mut o = attended.view_as(q);
        network.op(Op::Attention, || {
            kernels::paged_attention(plan, q, &k_cache, &v_cache, &inputs.block_tables, &inputs.context_lens, &mut o)
        })?;
        Ok(attended.shallow_clone())
    })
}

/// Between two looks at whether a copy is done. Gives up when a peer has failed: what is recorded would wait for it.
fn wait(tp: &dyn Collective) -> Result<()> {
    std::thread::yield_now();
    tp.epoch().map(|_| ())
}
