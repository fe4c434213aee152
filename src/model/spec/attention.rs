//! The shape of an attention: its parameters and how ranks share them, its operations and bytes.

use super::bytes::ElementBytes;
use super::heads::SharedHeads;
use super::linear::Projection::Module;
use super::linear::{LinearSpec, Matrix, TpSplit};
use super::param_name::{ParamName, Shapes};
use crate::config::TargetModule::{KProj, OProj, QProj, VProj};
use crate::ops::rope::RopeScaling;

/// The norm of queries and keys before rope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Every head by itself.
    Head,
    /// All heads of a token together.
    All,
}

/// The rotation of a layer's queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: Option<RopeScaling>,
    /// Share of a head, its first columns, that is turned.
    pub partial_rotary_factor: f64,
}

impl RopeSpec {
    /// Columns of a head that are turned.
    pub fn columns(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.partial_rotary_factor) as usize
    }
}

/// How a layer sees its context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sight {
    /// [`AttentionSpec::window`]
    pub window: Option<usize>,
    /// [`AttentionSpec::scale`]
    pub scale: f64,
}

/// The shape of an attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
    /// The projection behind attention has a bias.
    pub o_bias: bool,
    /// Every query head has a sink: a logit that takes part in the softmax with the value 0.
    pub sinks: bool,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Every query has a gate beside it, whose sigmoid its output is multiplied by.
    pub output_gate: bool,
    /// The rotation of queries and keys; `None` turns nothing.
    pub rope: Option<RopeSpec>,
    /// A token sees itself and the `window - 1` before it; `None` sees all.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f64,
}

impl AttentionSpec {
    /// The usual factor of the scores, 1 / sqrt(hd).
    pub fn usual_scale(head_dim: usize) -> f64 {
        (head_dim as f64).powf(-0.5)
    }

    /// What attention over the cache is planned by.
    pub fn sight(self) -> Sight {
        Sight { window: self.window, scale: self.scale }
    }

    /// Query heads that share one key and value head.
    pub fn heads_per_group(self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Whether so many ranks can have slices without copies.
    pub(in crate::model) fn can_slice(self, tp_size: usize) -> bool {
        self.num_heads.is_multiple_of(tp_size)
            && (self.num_kv_heads.is_multiple_of(tp_size) || tp_size.is_multiple_of(self.num_kv_heads))
    }

    /// Whether a rank is the first of those that share its key/value heads.
    pub fn has_first_of_key(self, tp_rank: usize, tp_size: usize) -> bool {
        tp_rank.is_multiple_of((tp_size / self.num_kv_heads).max(1))
    }

    /// The share of a rank. Ranks share key/value heads when there are fewer heads than ranks.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        let num_kv_heads = (self.num_kv_heads / tp_size).max(1);
        Self { num_heads: self.num_heads / tp_size, num_kv_heads, ..self }
    }

    /// Elements of a token's queries, and of its keys.
    pub fn widths(self) -> [usize; 2] {
        [self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim]
    }

    /// Elements that the cache has of a token.
    pub fn cached_elements(self) -> usize {
        2 * self.num_kv_heads * self.head_dim
    }

    /// Floating-point operations of a forward for every pair of a query and a key that it sees.
    pub fn flop_per_pair(self) -> usize {
        4 * self.num_heads * self.head_dim
    }

    /// The matrices of attention.
    pub fn linears(self) -> [LinearSpec; 2] {
        let Self { hidden, num_heads, num_kv_heads, head_dim, .. } = self;
        let queries = num_heads / num_kv_heads * self.rows_per_query();
        let qkv = LinearSpec {
            matrix: Matrix::Qkv,
            groups: num_kv_heads,
            inner: head_dim,
            columns: hidden,
            projections: vec![(Module(QProj), queries), (Module(KProj), 1), (Module(VProj), 1)],
            split: TpSplit::Rows,
            bias: self.qkv_bias.then_some(ParamName::QkvBias),
            experts: None,
        };
        let o = LinearSpec {
            matrix: Matrix::O,
            groups: 1,
            inner: hidden,
            columns: num_heads * head_dim,
            projections: vec![(Module(OProj), 1)],
            split: TpSplit::Columns,
            bias: self.o_bias.then_some(ParamName::OBias),
            experts: None,
        };
        [qkv, o]
    }

    /// Heads of the projection for one query: itself, and its gate.
    pub(in crate::model) fn rows_per_query(self) -> usize {
        1 + usize::from(self.output_gate)
    }

    /// Weights of the norms of queries and keys, and the sinks.
    pub(in crate::model) fn other_shapes(self) -> Shapes {
        let shape = |[q, k]: [usize; 2]| vec![(ParamName::QNorm, vec![q as i64]), (ParamName::KNorm, vec![k as i64])];
        let norms = match self.qk_norm {
            None => Vec::new(),
            Some(QkNorm::Head) => shape([self.head_dim; 2]),
            Some(QkNorm::All) => shape(self.widths()),
        };
        norms.into_iter().chain(self.sinks.then(|| (ParamName::Sinks, vec![self.num_heads as i64]))).collect()
    }

    /// Bytes a token that backward reads of the forward: heads before their norm and after, attention's output and log-sum-exp.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        let [queries, keys] = self.widths();
        let qkv = queries + 2 * keys;
        let raw = if self.qk_norm.is_some() { qkv } else { 0 };
        let gated = if self.output_gate { 2 * queries } else { 0 };
        bytes.narrow * (raw + qkv + gated) + self.attended_bytes(bytes)
    }

    /// Bytes a token of attention's output and log-sum-exp.
    pub(in crate::model) fn attended_bytes(self, bytes: ElementBytes) -> usize {
        bytes.narrow * self.widths()[0] + bytes.wide * self.num_heads
    }

    /// Bytes a token of the fullest moment of backward: the gradients of the block's output, of the residual stream after attention and
    /// of attention's output; dq, dk and dv; the kernel's float32 sums of dq and, where queries share a key, dk and dv of every
    /// query head; what completions gave to their prompt, which waits for what they gave to themselves. Or, behind it, the
    /// gradient of heads and four more rows of the queries for a norm over all of them.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, shares_prompts: bool) -> usize {
        let [queries, keys] = self.widths().map(|elements| bytes.narrow * elements);
        let (hidden, lse) = (bytes.narrow * self.hidden, bytes.wide * self.num_heads);
        let per_query_head = if self.num_heads > self.num_kv_heads { 2 * queries } else { 0 };
        let kernel = queries + 2 * keys + bytes.wide * self.widths()[0] + per_query_head + 2 * lse;
        let waiting = if shares_prompts { queries } else { 0 };
        let norm = if self.qk_norm == Some(QkNorm::All) { 4 * queries + 2 * keys } else { 0 };
        let gate = if self.output_gate { 3 * queries } else { 0 };
        2 * hidden + gate + (queries + kernel + waiting).max(queries + norm)
    }

    /// With key and value heads as often as ranks that share rows have them.
    pub(in crate::model) fn with_shared_rows(self, num_ranks: usize) -> Self {
        let own = SharedHeads::new(self.num_kv_heads, self.head_dim, self.num_heads, num_ranks).own;
        Self { num_kv_heads: own * num_ranks, ..self }
    }
}
