//! The shape of the sublayer that mixes information between tokens: attention or a gated delta net.

use super::attention::AttentionSpec;
use super::bytes::{ElementBytes, RowsShape};
use super::delta_net::DeltaNetSpec;
use super::linear::LinearSpec;
use super::param_name::Shapes;

/// The sublayer that mixes information between tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mixer {
    /// Softmax attention, full or within a sliding window.
    Attention(AttentionSpec),
    /// A gated delta net: linear attention with a fixed-size state per sequence in place of keys and values.
    DeltaNet(DeltaNetSpec),
}

impl Mixer {
    /// The shape of one tensor-parallel rank's slice.
    pub(in crate::model) fn tp_slice(self, tp_size: usize) -> Self {
        match self {
            Self::Attention(attention) => Self::Attention(attention.tp_slice(tp_size)),
            Self::DeltaNet(delta_net) => Self::DeltaNet(delta_net.tp_slice(tp_size)),
        }
    }

    /// Whether the sublayer can be sliced for `tp_size` tensor-parallel ranks without copying weights.
    pub(in crate::model) fn can_slice(self, tp_size: usize) -> bool {
        match self {
            Self::Attention(attention) => attention.can_slice(tp_size),
            Self::DeltaNet(delta_net) => delta_net.heads.num_key_heads.is_multiple_of(tp_size),
        }
    }

    /// Whether `num_ranks` sequence-parallel ranks can split the heads evenly.
    pub(in crate::model) fn can_share_rows(self, num_ranks: usize) -> bool {
        match self {
            Self::Attention(attention) => attention.num_heads.is_multiple_of(num_ranks),
            Self::DeltaNet(delta_net) => delta_net.heads.num_value_heads.is_multiple_of(num_ranks),
        }
    }

    /// The sizes that ranks split, as text for error messages.
    pub(in crate::model) fn sizes(self) -> String {
        match self {
            Self::Attention(AttentionSpec { num_heads, num_kv_heads, .. }) => {
                format!("{num_heads} query heads, {num_kv_heads} key/value heads")
            }
            Self::DeltaNet(DeltaNetSpec { heads, .. }) => {
                let (keys, values) = (heads.num_key_heads, heads.num_value_heads);
                format!("{keys} key heads and {values} value heads of gated delta nets")
            }
        }
    }

    /// The weight matrices of the sublayer.
    pub fn linears(self) -> Vec<LinearSpec> {
        match self {
            Self::Attention(attention) => attention.linears().into(),
            Self::DeltaNet(delta_net) => delta_net.linears().into(),
        }
    }

    /// Names and shapes of the parameters, in the order in which the layout stores them.
    pub(in crate::model) fn shapes(self) -> Shapes {
        match self {
            Self::Attention(attention) => {
                let [qkv, o] = attention.linears();
                qkv.params().into_iter().chain(attention.other_shapes()).chain(o.params()).collect()
            }
            Self::DeltaNet(delta_net) => delta_net.shapes(),
        }
    }

    /// Elements per token in the KV cache; 0 for a gated delta net.
    pub fn cached_elements(self) -> usize {
        match self {
            Self::Attention(attention) => attention.cached_elements(),
            Self::DeltaNet(_) => 0,
        }
    }

    /// Floating-point operations of a forward pass for every (query, key) pair that attention computes.
    pub fn flop_per_pair(self) -> usize {
        match self {
            Self::Attention(attention) => attention.flop_per_pair(),
            Self::DeltaNet(_) => 0,
        }
    }

    /// Floating-point operations of a forward pass per token, not counting GEMMs and (query, key) pairs.
    pub fn flop_per_token(self) -> usize {
        match self {
            Self::Attention(_) => 0,
            Self::DeltaNet(delta_net) => delta_net.flop_per_token(),
        }
    }

    /// Bytes per token that backward reads from forward.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Self::Attention(attention) => attention.kept_bytes(bytes),
            Self::DeltaNet(delta_net) => delta_net.kept_bytes(bytes),
        }
    }

    /// Bytes per token of attention's output and log-sum-exp.
    pub(in crate::model) fn attended_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Self::Attention(attention) => attention.attended_bytes(bytes),
            Self::DeltaNet(_) => 0,
        }
    }

    /// Bytes per token of attention's output.
    pub(in crate::model) fn output_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Self::Attention(attention) => bytes.narrow * attention.widths()[0],
            Self::DeltaNet(_) => 0,
        }
    }

    /// The shape with the heads that sequence-parallel ranks hold, repeated heads included.
    pub(in crate::model) fn with_shared_rows(self, num_ranks: usize) -> Self {
        match self {
            Self::Attention(attention) => Self::Attention(attention.with_shared_rows(num_ranks)),
            Self::DeltaNet(delta_net) => Self::DeltaNet(delta_net.with_shared_rows(num_ranks)),
        }
    }

    /// Peak bytes per token of temporaries during forward. With sequence parallelism three copies exist of queries, keys and values before attention,
    /// and of its output after it: split by rows, split by heads, and between the two.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes, rows: RowsShape) -> usize {
        match self {
            Self::Attention(attention) if rows.shares_rows => {
                let [queries, keys] = attention.widths();
                bytes.narrow * (2 * queries).max(queries + 4 * keys)
            }
            Self::Attention(_) => 0,
            Self::DeltaNet(delta_net) => delta_net.forward_bytes(bytes, rows),
        }
    }

    /// Additional bytes per token that `gradient_checkpointing = "keep_chunks"` keeps.
    pub(in crate::model) fn chunk_bytes(self, bytes: ElementBytes, rows: RowsShape) -> usize {
        match self {
            Self::Attention(_) => 0,
            Self::DeltaNet(delta_net) => delta_net.chunk_bytes(bytes, rows),
        }
    }

    /// Peak bytes per token during backward.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, rows: RowsShape) -> usize {
        match self {
            Self::Attention(attention) => attention.backward_bytes(bytes, rows.shares_prompts),
            Self::DeltaNet(delta_net) => delta_net.backward_bytes(bytes, rows),
        }
    }
}
