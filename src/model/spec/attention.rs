//! The shape of an attention sublayer: its parameters, how ranks split them, and the bytes and operations it costs.

use super::bytes::ElementBytes;
use super::heads::SharedHeads;
use super::linear::Projection::Module;
use super::linear::{LinearSpec, Matrix, TpSplit};
use super::param_name::{ParamName, Shapes};
use crate::config::TargetModule::{KProj, OProj, QProj, VProj};
use crate::ops::rope::RopeScaling;

/// Where queries and keys are normalized before the rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head is normalized on its own.
    Head,
    /// All heads of a token are normalized together.
    All,
}

/// The rotary embedding (RoPE) of a layer's queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// Scaling of the rotary frequencies, for example Llama 3's or YaRN's.
    pub scaling: Option<RopeScaling>,
    /// Fraction of each head's columns, from the first on, that is rotated.
    pub partial_rotary_factor: f64,
}

impl RopeSpec {
    /// Number of columns of a head that are rotated.
    pub fn columns(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.partial_rotary_factor) as usize
    }
}

/// The mask and the scale of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sight {
    /// The sliding window in tokens; see [`AttentionSpec::window`].
    pub window: Option<usize>,
    /// The multiplier of the scores; see [`AttentionSpec::scale`].
    pub scale: f64,
}

/// The shape of an attention sublayer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key/value heads.
    pub num_kv_heads: usize,
    /// Columns of one head.
    pub head_dim: usize,
    /// The query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub o_bias: bool,
    /// Every query head has an attention sink: a learned logit that takes part in the softmax with the value 0.
    pub sinks: bool,
    /// Norms of queries and keys, if there are any.
    pub qk_norm: Option<QkNorm>,
    /// Every query head has a gate; attention's output is multiplied by the gate's sigmoid.
    pub output_gate: bool,
    /// The rotary embedding of queries and keys; `None` applies none.
    pub rope: Option<RopeSpec>,
    /// Sliding window: a token attends to itself and the `window - 1` tokens before it. `None` attends to all earlier tokens.
    pub window: Option<usize>,
    /// Multiplier of the attention scores.
    pub scale: f64,
}

impl AttentionSpec {
    /// The usual multiplier of the scores, 1 / sqrt(head_dim).
    pub fn usual_scale(head_dim: usize) -> f64 {
        (head_dim as f64).powf(-0.5)
    }

    /// The window and scale from which the engine plans attention over the KV cache.
    pub fn sight(self) -> Sight {
        Sight { window: self.window, scale: self.scale }
    }

    /// Number of query heads that share one key/value head.
    pub fn heads_per_group(self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Whether the heads can be sliced for `tp_size` tensor-parallel ranks without copying weights.
    pub(in crate::model) fn can_slice(self, tp_size: usize) -> bool {
        self.num_heads.is_multiple_of(tp_size)
            && (self.num_kv_heads.is_multiple_of(tp_size) || tp_size.is_multiple_of(self.num_kv_heads))
    }

    /// Whether `tp_rank` is the first of the ranks that hold the same key/value heads.
    pub fn has_first_of_key(self, tp_rank: usize, tp_size: usize) -> bool {
        tp_rank.is_multiple_of((tp_size / self.num_kv_heads).max(1))
    }

    /// The shape of one tensor-parallel rank's slice. Ranks share key/value heads when there are fewer heads than ranks.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        let num_kv_heads = (self.num_kv_heads / tp_size).max(1);
        Self { num_heads: self.num_heads / tp_size, num_kv_heads, ..self }
    }

    /// Elements of one token's queries, and of its keys.
    pub fn widths(self) -> [usize; 2] {
        [self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim]
    }

    /// Elements of one token in the KV cache: its key and its value.
    pub fn cached_elements(self) -> usize {
        2 * self.num_kv_heads * self.head_dim
    }

    /// Floating-point operations of a forward pass for every (query, key) pair that attention computes.
    pub fn flop_per_pair(self) -> usize {
        4 * self.num_heads * self.head_dim
    }

    /// The weight matrices: QKV and the output projection.
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

    /// Heads of the QKV projection per query head: the query and, with an output gate, its gate.
    pub(in crate::model) fn rows_per_query(self) -> usize {
        1 + usize::from(self.output_gate)
    }

    /// Shapes of the parameters that are not matrices: norms of queries and keys, and sinks.
    pub(in crate::model) fn other_shapes(self) -> Shapes {
        let shape = |[q, k]: [usize; 2]| vec![(ParamName::QNorm, vec![q as i64]), (ParamName::KNorm, vec![k as i64])];
        let norms = match self.qk_norm {
            None => Vec::new(),
            Some(QkNorm::Head) => shape([self.head_dim; 2]),
            Some(QkNorm::All) => shape(self.widths()),
        };
        norms.into_iter().chain(self.sinks.then(|| (ParamName::Sinks, vec![self.num_heads as i64]))).collect()
    }

    /// Bytes per token that backward reads from forward: heads before and after their norm, attention's output and log-sum-exp.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        let [queries, keys] = self.widths();
        let qkv = queries + 2 * keys;
        let raw = if self.qk_norm.is_some() { qkv } else { 0 };
        let gate = if self.output_gate { queries } else { 0 };
        bytes.narrow * (raw + qkv + gate) + self.attended_bytes(bytes)
    }

    /// Bytes per token of attention's output and log-sum-exp.
    pub(in crate::model) fn attended_bytes(self, bytes: ElementBytes) -> usize {
        bytes.narrow * self.widths()[0] + bytes.wide * self.num_heads
    }

    /// Peak bytes per token during backward. While the attention kernel runs, these are: the gradients of the block's output, of the residual stream
    /// after attention and of attention's output; dq, dk and dv; the kernel's float32 sums of dq and, with grouped-query attention, dk and dv of
    /// every query head; and, if completions share their prompt, the prompt's gradients that wait to be added. The gate's gradient takes the place of
    /// the gate. Afterwards: the gradient of the heads and, for a norm over all heads, four more copies of the queries.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, shares_prompts: bool) -> usize {
        let [queries, keys] = self.widths().map(|elements| bytes.narrow * elements);
        let (hidden, lse) = (bytes.narrow * self.hidden, bytes.wide * self.num_heads);
        let per_query_head = if self.num_heads > self.num_kv_heads { 2 * queries } else { 0 };
        let kernel = queries + 2 * keys + bytes.wide * self.widths()[0] + per_query_head + 2 * lse;
        let waiting = if shares_prompts { queries } else { 0 };
        let norm = if self.qk_norm == Some(QkNorm::All) { 4 * queries + 2 * keys } else { 0 };
        2 * hidden + (queries + kernel + waiting).max(queries + norm)
    }

    /// The shape with key/value heads repeated as often as sequence-parallel ranks hold them.
    pub(in crate::model) fn with_shared_rows(self, num_ranks: usize) -> Self {
        let own = SharedHeads::new(self.num_kv_heads, self.head_dim, self.num_heads, num_ranks).own;
        Self { num_kv_heads: own * num_ranks, ..self }
    }
}
