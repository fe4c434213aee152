//! The shape of a gated delta net: its parameters and how ranks share them, its operations and bytes.

use super::bytes::ElementBytes;
use super::heads::SharedHeads;
use super::linear::{LinearSpec, Matrix, Projection, TpSplit};
use super::param_name::{ParamName, Shapes};
use crate::config::TargetModule::{InProjA, InProjB, InProjQkv, InProjZ, OutProj};
use crate::cuda::kernels::delta_fits;
use crate::ops::delta_net::DeltaHeads;

const MEAN_TOKENS: usize = DeltaHeads::MEAN_TOKENS;
/// Numbers that a chunk's kernels keep of a token and value head: decays and write strengths.
const KERNEL_DECAYS: usize = 5;

/// Bytes a token with the padding of last chunks.
fn padded(of_chunks: usize) -> usize {
    of_chunks * (MEAN_TOKENS + DeltaHeads::CHUNK / 2) / MEAN_TOKENS
}

/// The shape of a gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads and the convolution.
    pub heads: DeltaHeads,
}

impl DeltaNetSpec {
    /// The share of a rank: some key heads with their value heads.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        let DeltaHeads { num_key_heads, num_value_heads, .. } = self.heads;
        let (num_key_heads, num_value_heads) = (num_key_heads / tp_size, num_value_heads / tp_size);
        Self { heads: DeltaHeads { num_key_heads, num_value_heads, ..self.heads }, ..self }
    }

    /// With key heads as often as ranks that share rows have them.
    pub(in crate::model) fn with_shared_rows(self, num_ranks: usize) -> Self {
        let DeltaHeads { num_key_heads, num_value_heads, key_dim, .. } = self.heads;
        let num_key_heads = num_ranks * SharedHeads::new(num_key_heads, key_dim, num_value_heads, num_ranks).own;
        Self { heads: DeltaHeads { num_key_heads, ..self.heads }, ..self }
    }

    /// Channels of queries, and of keys.
    pub(in crate::model) fn keys(self) -> usize {
        self.heads.num_key_heads * self.heads.key_dim
    }

    /// Projections that read the residual stream, and the one behind the gated norm.
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

    /// Parameters with their shapes, in the layout's order.
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

    /// Floating-point operations of the rule's forward for one token: reading the state for its key and for its query, decaying it and
    /// writing to it.
    pub fn flop_per_token(self) -> usize {
        7 * self.heads.num_value_heads * self.heads.key_dim * self.heads.value_dim
    }

    /// Bytes a token that backward reads of the forward: the projections, and what the gated norm gave.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        let DeltaHeads { num_value_heads, value_dim, .. } = self.heads;
        bytes.narrow * (self.heads.channels() + 2 * num_value_heads * value_dim + 2 * num_value_heads)
    }

    /// Bytes a token of the fullest moment of forward beside what is kept. By kernels: the sublayer's input, rounded, too, where products are
    /// rounded, what the convolution gives,
    /// chunks by themselves, and states of sequences. Composed of libtorch's operations, all of it in the accumulation kind: what the
    /// convolution gives, its heads, and of whole chunks keys and values in six and four forms, three tables of pairs, and a state.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        let ([keys, values, pairs, states], channels) = (self.elements(), self.heads.channels());
        if self.has_kernels(bytes) {
            let of_chunks = bytes.narrow * (keys + values + pairs);
            let rounded = bytes.rounded * self.hidden;
            return bytes.narrow * (self.hidden + channels) + rounded + self.by_kernels(bytes, of_chunks);
        }
        bytes.wide * (2 * channels + 6 * keys + 4 * values + 3 * pairs + states)
    }

    /// Bytes a token of the fullest moment of backward, with chunks, whether they were kept or are computed again. By kernels that is when
    /// the gradients of queries, keys and values are made: beside them and what they belong to there are those of the rule's result and of
    /// the gate, and of chunks the system's results, what was written, its gradient, and two states. Composed, they are the forward's
    /// tensors and their gradients, and beside them the gradients of the projections.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes) -> usize {
        let ([keys, values, pairs, states], channels) = (self.elements(), self.heads.channels());
        let streams = 2 * bytes.narrow * self.hidden;
        if self.has_kernels(bytes) {
            let of_chunks = bytes.narrow * (keys + 2 * values + 2 * pairs + 2 * states);
            let gradients = bytes.narrow * (2 * channels + 2 * values) + 2 * bytes.narrow * self.heads.num_value_heads;
            return streams + gradients + self.by_kernels(bytes, of_chunks);
        }
        let rule = 14 * keys + 12 * values + 6 * pairs + 2 * states;
        streams + bytes.wide * (3 * channels + rule)
    }

    /// Bytes a token of chunks that a forward keeps, and of the rule's outputs. By kernels chunks have keys, values, two tables of pairs, and
    /// a state. Composed, they have five forms of keys, three of values, three tables of pairs, and a state.
    pub(in crate::model) fn chunk_bytes(self, bytes: ElementBytes) -> usize {
        let [keys, values, pairs, states] = self.elements();
        if self.has_kernels(bytes) {
            let of_chunks = bytes.narrow * (keys + values + 2 * pairs + states) + self.decay_bytes(bytes);
            return bytes.narrow * values + padded(of_chunks);
        }
        bytes.wide * values + padded(bytes.wide * (5 * keys + 3 * values + 3 * pairs + states))
    }

    /// Bytes a token of chunks as kernels have them, with the padding of last chunks and decays beside them, and of the states that
    /// prompts end with, completions begin with and either has as a result.
    fn by_kernels(self, bytes: ElementBytes, of_chunks: usize) -> usize {
        let [.., states] = self.elements();
        padded(of_chunks + self.decay_bytes(bytes)) + 3 * bytes.wide * states * DeltaHeads::CHUNK / MEAN_TOKENS
    }

    fn decay_bytes(self, bytes: ElementBytes) -> usize {
        KERNEL_DECAYS * bytes.wide * self.heads.num_value_heads
    }

    /// Whether a GPU has kernels for heads and weights of this kind; a chip without them needs what composed operations do.
    fn has_kernels(self, bytes: ElementBytes) -> bool {
        let DeltaHeads { key_dim, value_dim, conv_width, .. } = self.heads;
        bytes.narrow < bytes.wide && delta_fits([key_dim, value_dim, conv_width])
    }

    /// Elements a token of the keys and values of all value heads, of pairs within a chunk, and of a chunk's state.
    fn elements(self) -> [usize; 4] {
        let DeltaHeads { num_value_heads, key_dim, value_dim, .. } = self.heads;
        let states = (num_value_heads * key_dim * value_dim).div_ceil(DeltaHeads::CHUNK);
        [num_value_heads * key_dim, num_value_heads * value_dim, num_value_heads * DeltaHeads::CHUNK, states]
    }
}
