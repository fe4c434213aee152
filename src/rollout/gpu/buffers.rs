//! The memory of a rank's GPU steps: one arena, mapped while the engine is awake. Its addresses never change, so captured CUDA graphs stay valid.
//!
//! Sizes on this rank: R is the number of rows of a step, S the maximum number of sequences, K the maximum number of draft tokens of the draft head,
//! D the hidden size, H the number of query heads, Hkv the number of key/value heads, hd their width, F the width of the MLP and V the size of the
//! vocabulary. W is the width of the largest rank's share of V. S' is S rounded up to a multiple of the number of ranks.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::delta_columns::DeltaColumns;
use super::expert_buffers::{ExpertBuffers, ExpertShape};
use crate::cuda::kernels::{CANDIDATE_WORDS, FILTER_HEAD_WORDS, RowSums, ScaledRows, most_filter_parts};
use crate::error::Result;
use crate::memory::Arena;
use crate::model::{Format, Mlp, ModelSpec, Section, SharedExpertSpec};
use crate::ranks::Collective;
use crate::rollout::kv_cache::kv_block_bytes;
use crate::rollout::options::EngineOptions;

/// Maximum number of parts into which a step's rows are split for sampling, unless the step has more rows. One thread block samples from each part;
/// `kernels::sample_parts` chooses the number.
const MOST_PARTS: usize = 1024;
/// Maximum number of rows that are summed over the group without NCCL.
const MOST_SUMMED_ROWS: usize = 1024;
/// Alignment of each row of logits, in elements: `kernels::sample` reads aligned rows fastest.
const ALIGNED_LOGITS: usize = 8;
/// Alignment of each section of the arena, in bytes.
const ALIGNMENT: usize = 256;

/// Maximum sizes of one rank's steps.
#[derive(Debug, Clone)]
pub(super) struct StepShape {
    rows: usize,
    pub(super) seqs: usize,
    /// Entries of one block table.
    pub(super) blocks: usize,
    /// Maximum number of rows that are all-reduced without NCCL; `None` if NCCL is always used. Such an all-reduce also adds the residual stream and
    /// norms the result.
    summed_rows: Option<usize>,
    hidden: usize,
    qkv: usize,
    heads: usize,
    /// Width of the first sublayer's output before its last GEMM.
    attended: usize,
    /// Width of the widest dense MLP, or 0 if there is none.
    mlp: usize,
    pub(super) experts: Option<ExpertShape>,
    /// Number of columns of the widest matrix whose rows are quantized, and number of experts that a token is routed to.
    rounded: [usize; 2], // columns, rows of experts per token
    format: &'static dyn Format,
    vocab: usize,
    kv_slots: [usize; 2], // blocks, tokens per block
    tp_size: usize,
    kind: Kind,
    residual: Kind,
    /// Maximum number of draft tokens of the draft head per sequence and step; 0 if the model has no draft head.
    pub(super) drafts: usize,
}

/// Bytes of GPU memory that one rank's step buffers take while the engine is awake, in addition to weights and cache.
pub fn engine_buffer_bytes(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> usize {
    StepShape::new(spec, options, tp_size).bytes()
}

/// Bytes of GPU memory for one rank's all-reduces over its tensor-parallel group, awake or asleep, where GPUs map each other's memory.
pub fn engine_sum_bytes(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> usize {
    StepShape::new(spec, options, tp_size).summed_rows.map_or(0, |rows| RowSums::bytes(rows, spec.hidden_size))
}

/// Views over the arena, one per buffer.
#[derive(Debug)]
pub(super) struct DecodeBuffers {
    pub(super) x: Tensor,          // [R, D], in the dtype of the residual stream
    pub(super) normed: Tensor,     // [R, D]
    pub(super) delta: Tensor,      // [R, D]
    pub(super) qkv: Tensor,        // flat, the input projections of the first sublayer for each row
    pub(super) q: Tensor,          // [R, H hd]
    pub(super) attended: Tensor,   // flat, the input of the first sublayer's last GEMM for each row
    pub(super) gate_up: Tensor,    // [R, 2 F]
    pub(super) act: Tensor,        // [R, F]
    pub(super) rounded: Tensor,    // flat, quantized rows [R, K] of the current GEMM; empty for an unquantized format
    pub(super) scales: Tensor,     // flat, scales of `rounded`
    pub(super) logits: Tensor,     // [S', W] f32
    pub(super) shards: Tensor,     // [S' W] f32, whole rows of logits for this rank's draws; empty on one rank
    pub(super) heads: Tensor,      // i64, scratch memory of `kernels::filter` for this rank's draws
    pub(super) own_cuts: Tensor,   // [2 S' / ranks] i32, results of `kernels::filter` for this rank's draws
    pub(super) cuts: Tensor,       // [2 S'] i32, results of `kernels::filter` for all draws
    pub(super) history: Tensor,    // [KV blocks, block_size] i32, token ids by KV slot
    pub(super) seen: Tensor,       // [S, V of all ranks / 32] i32, in the format of `kernels::mark_seen`
    pub(super) candidates: Tensor, // f64, in the format of `kernels::sample`
    pub(super) gathered: Tensor,   // `candidates` of all ranks
    pub(super) inputs: Tensor,     // i32
    pub(super) token_ids: Tensor,  // [S] i32
    /// Sampled ids [S], then the bits of their log-probabilities [S].
    /// After these, the ids of the draft head's tokens, by depth and run [K, S].
    pub(super) sampled: Tensor, // [(2 + K) S] i32
    pub(super) joined: Tensor,     // [R, 2 D], inputs of the draft head: embeddings beside hidden states
    pub(super) ahead: Tensor,      // [S, D], the draft head's hidden states at the newest draft tokens, by run
    /// Buffers of the experts, if some layers have experts.
    pub(super) experts: Option<ExpertBuffers>,
}

impl StepShape {
    pub(super) fn new(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> Self {
        let attention = spec.attention().tp_slice(tp_size);
        let [queries, keys] = attention.widths();
        let gates = if attention.output_gate { queries } else { 0 };
        let delta_nets = spec.delta_net().map(|delta_net| DeltaColumns::new(delta_net.tp_slice(tp_size).heads));
        let sums = spec.layers.iter().all(|block| !block.norms.post)
            && RowSums::serve(options.kind, spec.hidden_size, tp_size);
        let dense = spec.layers.iter().filter_map(|block| match block.tp_slice(tp_size).mlp {
            Mlp::Dense(dense) => Some(dense.intermediate),
            Mlp::Experts(experts) => experts.shared.map(|SharedExpertSpec(shared)| shared.intermediate),
        });
        // The rows of all chosen experts of a token, counted as one row.
        let of_experts = spec
            .experts()
            .map_or(0, |experts| experts.router.num_experts_per_tok * experts.tp_slice(tp_size).expert.intermediate);
        let seqs = options.most_decode_rows();
        let rows = options.max_num_batched_tokens.max(seqs);
        let mlp = dense.max().unwrap_or(0);
        let num_blocks =
            options.kv_cache_bytes / kv_block_bytes(spec, tp_size, options.block_size, options.cache_kind());
        Self {
            rows,
            seqs,
            blocks: options.max_model_length.div_ceil(options.block_size),
            hidden: spec.hidden_size,
            qkv: (queries + gates + 2 * keys).max(delta_nets.map_or(0, |columns| columns.all())),
            heads: queries,
            attended: queries.max(delta_nets.map_or(0, |columns| columns.values)),
            mlp,
            experts: ExpertShape::new(spec, rows, tp_size, options.kind),
            rounded: [
                spec.hidden_size
                    .max(queries)
                    .max(mlp)
                    .max(delta_nets.map_or(0, |columns| columns.values))
                    .max(of_experts),
                spec.experts().map_or(1, |experts| experts.router.num_experts_per_tok),
            ],
            format: options.quantization.format(),
            summed_rows: sums.then_some(seqs.min(MOST_SUMMED_ROWS)),
            vocab: spec.vocab_size,
            kv_slots: [num_blocks, options.block_size],
            tp_size,
            kind: options.kind,
            residual: options.residual,
            drafts: if spec.draft_head.is_some() { options.speculation.most_drafts() } else { 0 },
        }
    }

    /// Number of 32-bit words of `DecodeBuffers::sampled`: sampled ids, their log-probabilities and the ids of draft tokens.
    pub(super) fn sampled_words(&self) -> usize {
        (2 + self.drafts) * self.seqs
    }

    /// Index, among the words of [`Self::sampled_words`], of draft token number `depth` (from 0) of a run.
    pub(super) fn draft_place(&self, depth: usize, run: usize) -> i32 {
        ((2 + depth) * self.seqs + run) as i32
    }

    /// Number of experts that a token is routed to; 1 for a model without experts.
    pub(super) fn choices(&self) -> i64 {
        self.experts.map_or(1, |experts| experts.choices() as i64)
    }

    /// Number of 32-bit words for the inputs of the largest step, prefill or decode: a few words per row, and the block tables.
    pub(super) fn input_words(&self) -> usize {
        8 * self.rows + self.seqs * (24 + self.blocks) + 256
    }

    /// Bytes of all buffers together.
    pub(super) fn bytes(&self) -> usize {
        self.sections().iter().map(|(shape, kind)| section_bytes(shape, *kind)).sum()
    }

    /// The all-reduce of decode steps through memory that the ranks map from each other; `None` if NCCL has to do it. Collective.
    pub(super) fn row_sums(&self, tp: &dyn Collective) -> Result<Option<RowSums>> {
        let Some(rows) = self.summed_rows else { return Ok(None) };
        let memory = tp.peer_memory(RowSums::bytes(rows, self.hidden))?;
        memory.map(|memory| RowSums::new(memory, rows, self.hidden)).transpose()
    }

    /// Shapes of all buffers, in the order of the fields of [`DecodeBuffers`].
    fn sections(&self) -> Vec<Section> {
        let matrix = |rows: usize, columns: usize| (vec![rows as i64, columns as i64], self.kind);
        let candidates = |ranks: usize| {
            let parts = MOST_PARTS.max(self.seqs) * ranks;
            (vec![parts as i64 * CANDIDATE_WORDS], Kind::Double)
        };
        let words = |shape: &[usize]| (shape.iter().map(|&size| size as i64).collect(), Kind::Int);
        let draws = self.seqs.next_multiple_of(self.tp_size);
        let width = self.vocab.div_ceil(self.tp_size).next_multiple_of(ALIGNED_LOGITS);
        let whole = if self.tp_size > 1 { draws * width } else { 0 };
        let [columns, choices] = self.rounded.map(|size| size as i64);
        let [values, _] = self.format.sections(&[self.rows as i64, columns]);
        let [_, scales] = self.format.sections(&[self.rows as i64 * choices, columns]);
        let mut sections = vec![
            (vec![self.rows as i64, self.hidden as i64], self.residual),
            matrix(self.rows, self.hidden),
            matrix(self.rows, self.hidden),
            (vec![(self.rows * self.qkv) as i64], self.kind),
            matrix(self.rows, self.heads),
            (vec![(self.rows * self.attended) as i64], self.kind),
            matrix(self.rows, 2 * self.mlp),
            matrix(self.rows, self.mlp),
            values,
            scales,
            (vec![draws as i64, width as i64], Kind::Float),
            (vec![whole as i64], Kind::Float),
            (vec![most_filter_parts(draws / self.tp_size) as i64 * FILTER_HEAD_WORDS], Kind::Int64),
            words(&[2 * draws / self.tp_size]),
            words(&[2 * draws]),
            words(&self.kv_slots),
            words(&[self.seqs, self.vocab.div_ceil(32)]),
            candidates(1),
            candidates(self.tp_size),
            words(&[self.input_words()]),
            words(&[self.seqs]),
            words(&[self.sampled_words()]),
            matrix(if self.drafts > 0 { self.rows } else { 0 }, 2 * self.hidden),
            matrix(if self.drafts > 0 { self.seqs } else { 0 }, self.hidden),
        ];
        sections.extend(self.experts.iter().flat_map(ExpertShape::sections));
        sections
    }

    /// Reserves the addresses of all buffers.
    pub(super) fn reserve(&self, device: Device) -> Result<Arena> {
        Arena::reserve("engine_buffers", self.bytes(), device)
    }

    /// Maps the memory and creates the views of all buffers.
    pub(super) fn map(&self, arena: &mut Arena) -> Result<DecodeBuffers> {
        arena.map(self.bytes())?;
        let mut at = 0;
        let mut sections = self.sections().into_iter().map(|(shape, kind)| {
            // SAFETY: sections do not overlap; the buffers are dropped in the same module before the arena is unmapped.
            let view = unsafe { arena.tensor(at, &shape, kind) };
            at += section_bytes(&shape, kind);
            view
        });
        let mut next = || sections.next().expect("a section a buffer");
        Ok(DecodeBuffers {
            x: next()?,
            normed: next()?,
            delta: next()?,
            qkv: next()?,
            q: next()?,
            attended: next()?,
            gate_up: next()?,
            act: next()?,
            rounded: next()?.view(-1),
            scales: next()?,
            logits: next()?,
            shards: next()?,
            heads: next()?,
            own_cuts: next()?,
            cuts: next()?,
            history: next()?,
            seen: next()?,
            candidates: next()?,
            gathered: next()?,
            inputs: next()?,
            token_ids: next()?,
            sampled: next()?,
            joined: next()?,
            ahead: next()?,
            experts: self.experts.map(|experts| experts.buffers(&mut next)).transpose()?,
        })
    }
}

impl DecodeBuffers {
    /// The buffer for the projections of the first sublayer. [T, columns]
    pub(super) fn projected(&self, [rows, columns]: [i64; 2]) -> Tensor {
        self.qkv.narrow(0, 0, rows * columns).view([rows, columns])
    }

    /// The buffer for the input of the first sublayer's last GEMM. [T, columns]
    pub(super) fn attended(&self, [rows, columns]: [i64; 2]) -> Tensor {
        self.attended.narrow(0, 0, rows * columns).view([rows, columns])
    }

    /// The buffer for the quantized rows [T, K] of the next GEMM. It is reused: each call overwrites the rows of the one before.
    pub(super) fn rounded(&self, format: &dyn Format, size: [i64; 2]) -> ScaledRows {
        let [values, scales] = format.sections(&size);
        let within = |room: &Tensor, (shape, _): Section| {
            let flat = room.narrow(0, 0, shape.iter().product());
            if shape.len() == 1 { flat } else { flat.view(shape.as_slice()) }
        };
        ScaledRows { values: within(&self.rounded, values), scales: within(&self.scales, scales) }
    }

    /// Samples of the last step: ids [S] i32 and log-probabilities [S] f32.
    pub(super) fn sampled(&self) -> (Tensor, Tensor) {
        let seqs = self.token_ids.size()[0];
        (self.sampled.narrow(0, 0, seqs), self.sampled.narrow(0, seqs, seqs).view_dtype(Kind::Float))
    }
}

fn section_bytes(shape: &[i64], kind: Kind) -> usize {
    let numel: i64 = shape.iter().product();
    (numel as usize * kind.elt_size_in_bytes()).next_multiple_of(ALIGNMENT)
}
