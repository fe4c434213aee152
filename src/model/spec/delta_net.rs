//! The shape of a gated delta net: its parameters, how ranks split them, and the bytes and operations it costs.

use super::bytes::{ElementBytes, RowsShape};
use super::heads::SharedHeads;
use super::linear::{LinearSpec, Matrix, Projection, TpSplit};
use super::param_name::{ParamName, Shapes};
use crate::config::TargetModule::{InProjA, InProjB, InProjQkv, InProjZ, OutProj};
use crate::cuda::kernels::delta_fits;
use crate::ops::delta_net::DeltaHeads;

/// Numbers per token and value head that the chunk kernels keep: decays and write strengths.
const KERNEL_DECAYS: usize = 5;

/// Average bytes per token if the last chunk of each sequence is padded to the full chunk length.
fn padded(of_chunks: usize, RowsShape { mean_tokens, .. }: RowsShape) -> usize {
    of_chunks * (mean_tokens + DeltaHeads::CHUNK / 2) / mean_tokens
}

/// The shape of a gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Sizes of the heads and of the convolution.
    pub heads: DeltaHeads,
}

impl DeltaNetSpec {
    /// The shape of one tensor-parallel rank's slice: some key heads, with their value heads.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        let DeltaHeads { num_key_heads, num_value_heads, .. } = self.heads;
        let (num_key_heads, num_value_heads) = (num_key_heads / tp_size, num_value_heads / tp_size);
        Self { heads: DeltaHeads { num_key_heads, num_value_heads, ..self.heads }, ..self }
    }

    /// The shape with key heads repeated as often as sequence-parallel ranks hold them.
    pub(in crate::model) fn with_shared_rows(self, num_ranks: usize) -> Self {
        let DeltaHeads { num_key_heads, num_value_heads, key_dim, .. } = self.heads;
        let num_key_heads = num_ranks * SharedHeads::new(num_key_heads, key_dim, num_value_heads, num_ranks).own;
        Self { heads: DeltaHeads { num_key_heads, ..self.heads }, ..self }
    }

    /// Number of channels of the queries, which equals that of the keys.
    pub(in crate::model) fn keys(self) -> usize {
        self.heads.num_key_heads * self.heads.key_dim
    }

    /// The weight matrices: four projections of the residual stream, and the output projection after the gated norm.
    pub fn linears(self) -> [LinearSpec; 5] {
        let Self { hidden, heads } = self;
        let values = heads.num_value_heads * heads.value_dim;
        let linear = |matrix, module, (groups, inner), columns, split| LinearSpec {
            matrix,
            groups,
            inner,
            columns,
            projections: vec![(Projection::Module(module), 1)],
            split,
            bias: None,
            experts: None,
        };
        let (of_heads, rows) = (heads.num_value_heads, TpSplit::Rows);
        let sections = TpSplit::RowSections { keys: self.keys() };
        [
            linear(Matrix::DeltaQkv, InProjQkv, (1, heads.channels()), hidden, sections),
            linear(Matrix::DeltaZ, InProjZ, (of_heads, heads.value_dim), hidden, rows),
            linear(Matrix::DeltaB, InProjB, (of_heads, 1), hidden, rows),
            linear(Matrix::DeltaA, InProjA, (of_heads, 1), hidden, rows),
            linear(Matrix::DeltaOut, OutProj, (1, hidden), values, TpSplit::Columns),
        ]
    }

    /// Names and shapes of the parameters, in the order in which the layout stores them.
    pub(in crate::model) fn shapes(self) -> Shapes {
        let [projections @ .., out] = self.linears();
        let heads = self.heads;
        let [channels, width, value_heads, value_dim] =
            [heads.channels(), heads.conv_width, heads.num_value_heads, heads.value_dim].map(|size| size as i64);
        let own = [
            (ParamName::DeltaConv, vec![channels, width]),
            (ParamName::DeltaALog, vec![value_heads]),
            (ParamName::DeltaDtBias, vec![value_heads]),
            (ParamName::DeltaNorm, vec![value_dim]),
        ];
        projections.iter().flat_map(LinearSpec::params).chain(own).chain(out.params()).collect()
    }

    /// Floating-point operations of a forward pass of the delta rule for one token: reading the state by key and by query, decaying it, and writing
    /// to it.
    pub fn flop_per_token(self) -> usize {
        7 * self.heads.num_value_heads * self.heads.key_dim * self.heads.value_dim
    }

    /// Bytes per token that backward reads from forward: the projections' outputs and the gated norm's output.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        let DeltaHeads { num_value_heads, value_dim, .. } = self.heads;
        bytes.narrow * (self.heads.channels() + 2 * num_value_heads * value_dim + 2 * num_value_heads)
    }

    /// Peak bytes per token of temporaries during forward.
    ///
    /// With CUDA kernels: the sublayer's input (plus its FP8 copy when training in FP8), the convolution's output, the chunks' own tensors, and the
    /// states of sequences. Composed of libtorch operations, all in the accumulation type: the convolution's output, its heads, and for whole chunks
    /// six forms of the keys, four of the values, three tables of pairs, and a state.
    ///
    /// With sequence parallelism the projected rows exist three times before that: split by rows, split by heads, and between the two.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes, rows: RowsShape) -> usize {
        let ([keys, values, pairs, states], channels) = (self.elements(), self.heads.channels());
        if self.has_kernels(bytes) {
            let of_chunks = bytes.narrow * (keys + values + pairs);
            let input = (bytes.narrow + bytes.rounded) * self.hidden;
            let exchanged = if rows.shares_rows { 2 * self.kept_bytes(bytes) - 3 * bytes.narrow * values } else { 0 };
            return input + exchanged.max(bytes.narrow * channels + self.by_kernels(bytes, of_chunks, rows));
        }
        bytes.wide * (2 * channels + 6 * keys + 4 * values + 3 * pairs + states)
    }

    /// Peak bytes per token during backward, including the chunks, whether kept or recomputed.
    ///
    /// With CUDA kernels the peak is where the gradients of queries, keys and values are computed. Present then are: these gradients and their
    /// inputs; the gradients of the rule's result and of the gate; and of the chunks the solution of the triangular system, the written values with
    /// their gradient, and two states. Composed of libtorch operations: the forward's tensors, their gradients, and the projections' gradients.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, rows: RowsShape) -> usize {
        let ([keys, values, pairs, states], channels) = (self.elements(), self.heads.channels());
        let streams = 2 * bytes.narrow * self.hidden;
        if self.has_kernels(bytes) {
            let of_chunks = bytes.narrow * (keys + 2 * values + 2 * pairs + 2 * states);
            let gradients = bytes.narrow * (2 * channels + 2 * values) + 2 * bytes.narrow * self.heads.num_value_heads;
            return streams + gradients + self.by_kernels(bytes, of_chunks, rows);
        }
        let rule = 14 * keys + 12 * values + 6 * pairs + 2 * states;
        streams + bytes.wide * (3 * channels + rule)
    }

    /// Bytes per token of the chunks that forward keeps, and of the delta rule's outputs.
    ///
    /// With CUDA kernels a chunk has keys, values, two tables of pairs, and a state. Composed, it has five forms of the keys, three of the values,
    /// three tables of pairs, and a state.
    pub(in crate::model) fn chunk_bytes(self, bytes: ElementBytes, rows: RowsShape) -> usize {
        let [keys, values, pairs, states] = self.elements();
        if self.has_kernels(bytes) {
            let of_chunks = bytes.narrow * (keys + values + 2 * pairs + states) + self.decay_bytes(bytes);
            return bytes.narrow * values + padded(of_chunks, rows);
        }
        bytes.wide * values + padded(bytes.wide * (5 * keys + 3 * values + 3 * pairs + states), rows)
    }

    /// Bytes per token of the chunks that CUDA kernels use, with padding and decays, plus the last states of sequences, or the gradients of their first;
    /// if completions share prompts, also the states at the ends of prompts and at the starts of completions.
    fn by_kernels(self, bytes: ElementBytes, of_chunks: usize, rows: RowsShape) -> usize {
        let ([.., states], of_sequence) = (self.elements(), if rows.shares_prompts { 3 } else { 1 });
        padded(of_chunks + self.decay_bytes(bytes), rows)
            + of_sequence * bytes.wide * states * DeltaHeads::CHUNK / rows.mean_tokens
    }

    fn decay_bytes(self, bytes: ElementBytes) -> usize {
        KERNEL_DECAYS * bytes.wide * self.heads.num_value_heads
    }

    /// Whether the CUDA kernels support heads and weights of these sizes. If not, a GPU needs as much memory as the composed operations.
    fn has_kernels(self, bytes: ElementBytes) -> bool {
        let DeltaHeads { key_dim, value_dim, conv_width, .. } = self.heads;
        bytes.narrow < bytes.wide && delta_fits([key_dim, value_dim, conv_width])
    }

    /// Elements per token: of the keys and the values of all value heads, of the pairs within a chunk, and of a chunk's state.
    fn elements(self) -> [usize; 4] {
        let DeltaHeads { num_value_heads, key_dim, value_dim, .. } = self.heads;
        let states = (num_value_heads * key_dim * value_dim).div_ceil(DeltaHeads::CHUNK);
        [num_value_heads * key_dim, num_value_heads * value_dim, num_value_heads * DeltaHeads::CHUNK, states]
    }
}
