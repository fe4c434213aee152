//! The memory of a rank's steps: one arena, mapped while the engine is awake. Addresses stay, so graphs do.
//!
//! R rows of a step, S sequences at most, D hidden, H query and Hkv key/value heads of width hd, F MLP width, V vocabulary, all
//! of this rank. W is the width of the largest rank's share of V, S' is S rounded up to a multiple of the ranks.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::delta_columns::DeltaColumns;
use super::expert_buffers::{ExpertBuffers, ExpertShape};
use crate::cuda::kernels::{CANDIDATE_WORDS, RowSums, ScaledRows};
use crate::error::Result;
use crate::memory::Arena;
use crate::model::{Format, Mlp, ModelSpec, Section, SharedExpertSpec};
use crate::ranks::Collective;
use crate::rollout::kv_cache::kv_block_bytes;
use crate::rollout::options::EngineOptions;

/// Blocks that sample at once, at most, where they are more than the draws: `kernels::sample_parts` splits rows so.
const MOST_PARTS: usize = 1024;
/// Rows that are summed over the group other than by NCCL, at most.
const MOST_SUMMED_ROWS: usize = 1024;
/// Rows of logits begin at multiples of this, in elements: `kernels::sample` then takes them fastest.
const ALIGNED_LOGITS: usize = 8;
/// Sections begin at multiples of this, in bytes.
const ALIGNMENT: usize = 256;

/// Sizes of one rank's steps.
#[derive(Debug, Clone)]
pub(super) struct StepShape {
    rows: usize,
    pub(super) seqs: usize,
    /// Entries of a block table.
    pub(super) blocks: usize,
    /// Rows that are summed over the group other than by NCCL. Those sums norm their result with the residual stream, not before it.
    summed_rows: Option<usize>,
    hidden: usize,
    qkv: usize,
    heads: usize,
    /// Width of the first sublayer's output before its last product.
    attended: usize,
    /// Width of the widest MLP that all tokens go to, 0 where there is none.
    mlp: usize,
    pub(super) experts: Option<ExpertShape>,
    /// Columns of the widest matrix whose rows are rounded, and all rows that an expert's matrix has of a token.
    rounded: [usize; 2], // columns, rows of experts
    format: &'static dyn Format,
    vocab: usize,
    kv_slots: [usize; 2], // blocks, tokens of a block
    tp_size: usize,
    kind: Kind,
    residual: Kind,
}

/// Bytes of a GPU that one rank's steps take while the engine is awake, beside weights and cache.
pub fn engine_buffer_bytes(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> usize {
    StepShape::new(spec, options, tp_size).bytes()
}

/// Bytes of a GPU that one rank's sums over its tensor-parallel group take, asleep or awake, where GPUs map one another's memory.
pub fn engine_sum_bytes(spec: &ModelSpec, options: &EngineOptions, tp_size: usize) -> usize {
    StepShape::new(spec, options, tp_size).summed_rows.map_or(0, |rows| RowSums::bytes(rows, spec.hidden_size))
}

/// Tensors over the arena.
#[derive(Debug)]
pub(super) struct DecodeBuffers {
    pub(super) x: Tensor,          // [R, D], of the residual stream's kind
    pub(super) normed: Tensor,     // [R, D]
    pub(super) delta: Tensor,      // [R, D]
    pub(super) qkv: Tensor,        // flat, of each row the projections that the first sublayer reads
    pub(super) q: Tensor,          // [R, H hd]
    pub(super) attended: Tensor,   // flat, of each row what its last product reads
    pub(super) gate_up: Tensor,    // [R, 2 F]
    pub(super) act: Tensor,        // [R, F]
    pub(super) rounded: Tensor,    // flat, of the rows [R, K] of the product at hand; none but for a format that rounds
    pub(super) scales: Tensor,     // flat, of them
    pub(super) logits: Tensor,     // [S', W] f32
    pub(super) shards: Tensor,     // [S' W] f32, whole rows of this rank's share of the draws; none on a single rank
    pub(super) own_cuts: Tensor,   // [2 S' / ranks] i32, what filters leave of them
    pub(super) cuts: Tensor,       // [2 S'] i32, the same of all draws
    pub(super) history: Tensor,    // [KV blocks, block_size] i32, token ids at the slots of their keys
    pub(super) seen: Tensor,       // [S, V of all ranks / 32] i32, as `kernels::mark_seen` leaves it
    pub(super) candidates: Tensor, // f64, as `kernels::sample` has them
    pub(super) gathered: Tensor,   // the same of all ranks
    pub(super) inputs: Tensor,     // i32
    pub(super) token_ids: Tensor,  // [S] i32
    /// Sampled ids [S], then the bits of their log-probabilities [S].
    pub(super) sampled: Tensor, // [2 S] i32
    /// Where some layers have experts.
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
        // Rows of all choices of a token, as one.
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
        }
    }

    /// Experts of a token; 1 where there are none.
    pub(super) fn choices(&self) -> i64 {
        self.experts.map_or(1, |experts| experts.choices() as i64)
    }

    /// Words that describe the largest step, whether it prefills or decodes: a few a row, and block tables.
    pub(super) fn input_words(&self) -> usize {
        8 * self.rows + self.seqs * (24 + self.blocks) + 256
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(&self) -> usize {
        self.sections().iter().map(|(shape, kind)| section_bytes(shape, *kind)).sum()
    }

    /// The decode steps' sums over the group, through memory that its ranks map; none where NCCL has to do it. Collective.
    pub(super) fn row_sums(&self, tp: &dyn Collective) -> Result<Option<RowSums>> {
        let Some(rows) = self.summed_rows else { return Ok(None) };
        let memory = tp.peer_memory(RowSums::bytes(rows, self.hidden))?;
        memory.map(|memory| RowSums::new(memory, rows, self.hidden)).transpose()
    }

    /// In the order of [`DecodeBuffers`].
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
        let [values, _] = self.format.sections([self.rows as i64, columns]);
        let [_, scales] = self.format.sections([self.rows as i64 * choices, columns]);
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
            words(&[2 * draws / self.tp_size]),
            words(&[2 * draws]),
            words(&self.kv_slots),
            words(&[self.seqs, self.vocab.div_ceil(32)]),
            candidates(1),
            candidates(self.tp_size),
            words(&[self.input_words()]),
            words(&[self.seqs]),
            words(&[2 * self.seqs]),
        ];
        sections.extend(self.experts.iter().flat_map(ExpertShape::sections));
        sections
    }

    /// Reserves the addresses.
    pub(super) fn reserve(&self, device: Device) -> Result<Arena> {
        Arena::reserve("engine_buffers", self.bytes(), device)
    }

    /// Maps the memory and lays the buffers out.
    pub(super) fn map(&self, arena: &mut Arena) -> Result<DecodeBuffers> {
        arena.map(self.bytes())?;
        let mut at = 0;
        let mut sections = self.sections().into_iter().map(|(shape, kind)| {
            // SAFETY: sections do not overlap; the buffers stay in this room and are dropped before the arena is unmapped.
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
            own_cuts: next()?,
            cuts: next()?,
            history: next()?,
            seen: next()?,
            candidates: next()?,
            gathered: next()?,
            inputs: next()?,
            token_ids: next()?,
            sampled: next()?,
            experts: self.experts.map(|experts| experts.buffers(&mut next)).transpose()?,
        })
    }
}

impl DecodeBuffers {
    /// Room for a sublayer's projections. [T, columns]
    pub(super) fn projected(&self, [rows, columns]: [i64; 2]) -> Tensor {
        self.qkv.narrow(0, 0, rows * columns).view([rows, columns])
    }

    /// Room for what a sublayer's last product reads. [T, columns]
    pub(super) fn attended(&self, [rows, columns]: [i64; 2]) -> Tensor {
        self.attended.narrow(0, 0, rows * columns).view([rows, columns])
    }

    /// Room for the rounded rows [T, K] that a product reads: each takes the place of the one before.
    pub(super) fn rounded(&self, format: &dyn Format, size: [i64; 2]) -> ScaledRows {
        let [values, scales] = format.sections(size);
        let within = |room: &Tensor, (shape, _): Section| {
            let flat = room.narrow(0, 0, shape.iter().product());
            if shape.len() == 1 { flat } else { flat.view(shape.as_slice()) }
        };
        ScaledRows { values: within(&self.rounded, values), scales: within(&self.scales, scales) }
    }

    /// The last step's samples: ids [S] i32 and log-probabilities [S] f32.
    pub(super) fn sampled(&self) -> (Tensor, Tensor) {
        let seqs = self.token_ids.size()[0];
        (self.sampled.narrow(0, 0, seqs), self.sampled.narrow(0, seqs, seqs).view_dtype(Kind::Float))
    }
}

fn section_bytes(shape: &[i64], kind: Kind) -> usize {
    let numel: i64 = shape.iter().product();
    (numel as usize * kind.elt_size_in_bytes()).next_multiple_of(ALIGNMENT)
}
