//! The shape of the sublayer in which tokens see one another: attention, or a gated delta net.

use super::attention::AttentionSpec;
use super::bytes::ElementBytes;
use super::delta_net::DeltaNetSpec;
use super::linear::LinearSpec;
use super::param_name::Shapes;

/// The sublayer in which tokens see one another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mixer {
    /// Full attention, or within a window.
    Attention(AttentionSpec),
    /// A gated delta net, whose sequences have a state in place of keys and values.
    DeltaNet(DeltaNetSpec),
}

impl Mixer {
    /// The share of a rank.
    pub(in crate::model) fn tp_slice(self, tp_size: usize) -> Self {
        match self {
            Self::Attention(attention) => Self::Attention(attention.tp_slice(tp_size)),
            Self::DeltaNet(delta_net) => Self::DeltaNet(delta_net.tp_slice(tp_size)),
        }
    }

    /// Whether so many ranks can have slices without copies.
    pub(in crate::model) fn can_slice(self, tp_size: usize) -> bool {
        match self {
            Self::Attention(attention) => attention.can_slice(tp_size),
            Self::DeltaNet(delta_net) => delta_net.heads.num_key_heads.is_multiple_of(tp_size),
        }
    }

    /// Whether so many ranks that share rows can have equal parts of the heads.
    pub(in crate::model) fn can_share_rows(self, num_ranks: usize) -> bool {
        match self {
            Self::Attention(attention) => attention.num_heads.is_multiple_of(num_ranks),
            Self::DeltaNet(delta_net) => delta_net.heads.num_value_heads.is_multiple_of(num_ranks),
        }
    }

    /// The sizes that ranks have shares of, in words.
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

    /// The matrices of the sublayer.
    pub fn linears(self) -> Vec<LinearSpec> {
        match self {
            Self::Attention(attention) => attention.linears().into(),
            Self::DeltaNet(delta_net) => delta_net.linears().into(),
        }
    }

    /// Parameters with their shapes, in the layout's order.
    pub(in crate::model) fn shapes(self) -> Shapes {
        match self {
            Self::Attention(attention) => {
                let [qkv, o] = attention.linears();
                qkv.params().into_iter().chain(attention.other_shapes()).chain(o.params()).collect()
            }
            Self::DeltaNet(delta_net) => delta_net.shapes(),
        }
    }

    /// Elements that the cache has of a token.
    pub fn cached_elements(self) -> usize {
        match self {
            Self::Attention(attention) => attention.cached_elements(),
            Self::DeltaNet(_) => 0,
        }
    }

    /// Floating-point operations of a forward for every pair of a query and a key that it sees.
    pub fn flop_per_pair(self) -> usize {
        match self {
            Self::Attention(attention) => attention.flop_per_pair(),
            Self::DeltaNet(_) => 0,
        }
    }

    /// Floating-point operations of a forward for every token, beside those of products and of pairs.
    pub fn flop_per_token(self) -> usize {
        match self {
            Self::Attention(_) => 0,
            Self::DeltaNet(delta_net) => delta_net.flop_per_token(),
        }
    }

    /// Bytes a token that backward reads of the forward.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Self::Attention(attention) => attention.kept_bytes(bytes),
            Self::DeltaNet(delta_net) => delta_net.kept_bytes(bytes),
        }
    }

    /// Bytes a token of attention's output and log-sum-exp.
    pub(in crate::model) fn attended_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Self::Attention(attention) => attention.attended_bytes(bytes),
            Self::DeltaNet(_) => 0,
        }
    }

    /// Bytes a token of attention's output.
    pub(in crate::model) fn output_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Self::Attention(attention) => bytes.narrow * attention.widths()[0],
            Self::DeltaNet(_) => 0,
        }
    }

    /// As one of so many ranks that share rows has its heads, for each of its own rows.
    pub(in crate::model) fn with_shared_rows(self, num_ranks: usize) -> Self {
        match self {
            Self::Attention(attention) => Self::Attention(attention.with_shared_rows(num_ranks)),
            Self::DeltaNet(delta_net) => Self::DeltaNet(delta_net.with_shared_rows(num_ranks)),
        }
    }

    /// Bytes a token of the fullest moment of forward, beside what is kept. Where ranks share the rows, attention's output is there three
    /// times: by heads, as it has come from all ranks, and by rows.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes, shares_rows: bool) -> usize {
        match self {
            Self::Attention(attention) if shares_rows => 2 * bytes.narrow * attention.widths()[0],
            Self::Attention(_) => 0,
            Self::DeltaNet(delta_net) => delta_net.forward_bytes(bytes),
        }
    }

    /// Bytes a token of what `gradient_checkpointing = "keep_chunks"` keeps beside.
    pub(in crate::model) fn chunk_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Self::Attention(_) => 0,
            Self::DeltaNet(delta_net) => delta_net.chunk_bytes(bytes),
        }
    }

    /// Bytes a token of the fullest moment of backward.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, shares_prompts: bool) -> usize {
        match self {
            Self::Attention(attention) => attention.backward_bytes(bytes, shares_prompts),
            Self::DeltaNet(delta_net) => delta_net.backward_bytes(bytes),
        }
    }
}
