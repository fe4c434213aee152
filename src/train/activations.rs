//! Bytes of activations of one micro-batch, from what the explicit forward and backward hold at their fullest moment. Exact for
//! bfloat16 on a GPU, whose kernels work in place where this says so; a CPU's operations hold a little more.

use super::bytes::TrainedModel;
use crate::config::GradientCheckpointing;
use crate::model::{ModelSpec, SavedBlock, head_chunk_tokens};
use crate::torch::accumulation_kind;

/// What the products' library takes for itself on a GPU.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// A micro-batch, as far as memory goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MicroBatchShape {
    /// Tokens that run through the network (T).
    pub tokens: usize,
    /// Tokens that are scored (C).
    pub scored_tokens: usize,
    /// Whether completions share prompts.
    pub shares_prompts: bool,
}

/// Bytes of activations on one rank, by what holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationBytes {
    /// What each block keeps for its backward.
    pub saved: usize,
    /// Held through the whole pass: the last block's output, the rotations.
    pub pass: usize,
    /// The gradient of the residual stream between two units.
    pub stream: usize,
    /// The fullest moment of a block's forward that no backward follows.
    pub block_forward: usize,
    /// The fullest moment of a block's backward.
    pub block_backward: usize,
    /// The fullest moment of the head.
    pub head: usize,
    /// The same where no backward follows.
    pub head_forward: usize,
}

impl ActivationBytes {
    /// For a micro-batch.
    pub fn new(model: &TrainedModel<'_>, keep: GradientCheckpointing, shape: MicroBatchShape) -> Self {
        let spec = &model.table.spec;
        let row = Row::new(model, keep, shape.shares_prompts);
        let expanded = model.lora.as_ref().map_or(0, |lora| lora.num_expanded(spec) / spec.num_layers);
        let (narrow, wide) = (model.kind.elt_size_in_bytes(), accumulation_kind(model.kind).elt_size_in_bytes());
        Self {
            saved: row.saved * shape.tokens,
            pass: row.pass * shape.tokens,
            stream: row.hidden * shape.tokens,
            block_forward: row.block_forward() * shape.tokens + narrow * expanded,
            block_backward: row.block_backward() * shape.tokens + (narrow + wide) * expanded,
            head: row.head(spec, shape),
            head_forward: row.head_forward(spec, shape),
        }
    }
}

/// Bytes of one token's row of everything. D hidden, W = H hd, K = Hkv hd, F MLP width.
struct Row {
    residual: usize, // D, of the residual stream
    hidden: usize,   // D
    queries: usize,  // W
    wide_queries: usize,
    keys: usize, // K
    mlp: usize,  // F
    /// A block's results up to the residual stream after attention.
    attention_half: usize,
    /// Kept by one block.
    saved: usize,
    /// Up to the residual stream after attention, where backward computes it again.
    recomputed: usize,
    /// Gate and up: kept, or computed again.
    gate_up_is_saved: bool,
    /// Held through the whole pass: the last block's output, the rotations.
    pass: usize,
    lse: usize,
    groups_queries: bool,
    shares_prompts: bool,
    /// Adapters' inputs are dropped from.
    drops: bool,
    wide: usize,
}

impl Row {
    fn new(model: &TrainedModel<'_>, keep: GradientCheckpointing, shares_prompts: bool) -> Self {
        let (spec, kind) = (&model.table.spec, model.kind);
        let (narrow, wide) = (kind.elt_size_in_bytes(), accumulation_kind(kind).elt_size_in_bytes());
        let residual = model.residual.elt_size_in_bytes() * spec.hidden_size;
        let (hidden, lse) = (narrow * spec.hidden_size, wide * spec.num_heads);
        let kept = |keep| {
            let [of_residual, of_others] = SavedBlock::elements_per_token(spec, keep);
            model.residual.elt_size_in_bytes() * of_residual + narrow * of_others
        };
        let attention_half = kept(GradientCheckpointing::Selective) - residual + lse;
        let is_full = keep == GradientCheckpointing::Full;
        Self {
            residual,
            hidden,
            queries: narrow * spec.num_heads * spec.head_dim,
            wide_queries: wide * spec.num_heads * spec.head_dim,
            keys: narrow * spec.num_kv_heads * spec.head_dim,
            mlp: narrow * spec.intermediate_size,
            attention_half,
            saved: kept(keep) + if is_full { 0 } else { lse },
            recomputed: if is_full { attention_half } else { 0 },
            gate_up_is_saved: keep == GradientCheckpointing::None,
            pass: residual + 2 * wide * spec.head_dim,
            lse,
            groups_queries: spec.num_heads > spec.num_kv_heads,
            shares_prompts,
            drops: model.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0),
            wide,
        }
    }

    /// Its input, the block up to the residual stream after attention, gate and up, the activation.
    fn block_forward(&self) -> usize {
        self.residual + self.attention_half + 3 * self.mlp
    }

    /// The fullest moment of a block's backward, beside what all blocks saved.
    fn block_backward(&self) -> usize {
        self.recomputed + self.mlp_backward().max(self.attention_backward())
    }

    /// The gradient that comes in and the normalised rows; gate and up, which become their gradients in place, unless they
    /// were saved; the activation and its gradient. An adapter with dropout drops a copy of the activation, and its own part of
    /// the gradient comes in two tensors more.
    fn mlp_backward(&self) -> usize {
        let gate_up = if self.gate_up_is_saved { 0 } else { 2 * self.mlp };
        let dropped = if self.drops { 3 * self.mlp } else { 0 };
        2 * self.hidden + gate_up + 2 * self.mlp + dropped
    }

    /// The gradients of the block's output, of the residual stream after attention and of attention's output; dq, dk and dv;
    /// the kernel's float32 sums of dq and, where queries share a key, dk and dv of every query head. Gate and up are gone.
    fn attention_backward(&self) -> usize {
        let per_query_head = if self.groups_queries { 2 * self.queries } else { 0 };
        let kernel = self.queries + 2 * self.keys + self.wide_queries + per_query_head + 2 * self.lse;
        // What completions gave to their prompt waits for what they gave to themselves.
        let waiting = if self.shares_prompts { self.queries } else { 0 };
        let gone = if self.gate_up_is_saved { 2 * self.mlp } else { 0 };
        (2 * self.hidden + self.queries + kernel + waiting).saturating_sub(gone)
    }

    /// Chosen and normalised rows and their gradients, a few numbers a row, and first one chunk of logits, which become their
    /// gradient in place, then the gradient of all rows.
    fn head(&self, spec: &ModelSpec, shape: MicroBatchShape) -> usize {
        let all_rows = self.hidden * (shape.scored_tokens + shape.tokens);
        (self.residual + 2 * self.hidden + 8 * self.wide) * shape.scored_tokens + self.logits(spec, shape).max(all_rows)
    }

    /// Chosen and normalised rows, a few numbers a row, one chunk of logits.
    fn head_forward(&self, spec: &ModelSpec, shape: MicroBatchShape) -> usize {
        (self.residual + self.hidden + 4 * self.wide) * shape.scored_tokens + self.logits(spec, shape)
    }

    fn logits(&self, spec: &ModelSpec, shape: MicroBatchShape) -> usize {
        let chunk = head_chunk_tokens(spec.vocab_size, true).min(shape.scored_tokens);
        self.wide * chunk * spec.vocab_size
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::Kind;

    use super::*;
    use crate::model::{ModelSpec, ParamTable};
    use crate::train::GradientOptions;

    const SHAPE: MicroBatchShape = MicroBatchShape { tokens: 1000, scored_tokens: 10, shares_prompts: false };

    /// Qwen2.5-7B by hand: D = W = 3584, K = 512, F = 18944, 28 heads.
    #[test]
    fn a_block_keeps_what_its_backward_reads() {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 1);
        let model = TrainedModel::whole(&table, 0, Kind::BFloat16, GradientOptions::default());
        let bytes = |keep| ActivationBytes::new(&model, keep, SHAPE);
        let (full, selective, none) = (
            bytes(GradientCheckpointing::Full),
            bytes(GradientCheckpointing::Selective),
            bytes(GradientCheckpointing::None),
        );
        assert_eq!(full.saved, 1000 * 2 * 3584);
        assert_eq!(selective.saved, 1000 * (2 * (3584 + 4608 + 3584 + 3584) + 4 * 28));
        assert_eq!(none.saved - selective.saved, 1000 * 2 * 2 * 18944);
        assert_eq!(selective.pass, 1000 * (2 * 3584 + 8 * 128));
        // Its MLP's backward: two rows of D, four of F.
        assert_eq!(selective.block_backward, 1000 * 2 * (2 * 3584 + 4 * 18944));
        assert_eq!(full.block_backward - selective.block_backward, 1000 * (2 * (4608 + 3584 + 3584) + 4 * 28));
        assert!(none.block_backward < selective.block_backward && none.block_forward == full.block_forward);
        // In float32 the residual stream takes two bytes more an element: x and h of a block, its output; no gradient does.
        let wide = TrainedModel { residual: Kind::Float, ..model };
        let bytes = |keep| ActivationBytes::new(&wide, keep, SHAPE);
        let (wide_full, wide_none) = (bytes(GradientCheckpointing::Full), bytes(GradientCheckpointing::None));
        assert_eq!(wide_full.saved - full.saved, 1000 * 2 * 3584);
        assert_eq!(wide_none.saved - none.saved, 1000 * 2 * 2 * 3584);
        assert_eq!(wide_none.pass - none.pass, 1000 * 2 * 3584);
        assert_eq!(wide_none.block_forward - none.block_forward, 1000 * 2 * 2 * 3584);
        assert_eq!(wide_full.block_backward - full.block_backward, 1000 * 2 * 3584);
        assert_eq!((wide_none.block_backward, wide_none.stream), (none.block_backward, none.stream));
        assert_eq!(wide_none.head - none.head, 10 * 2 * 3584);
    }

    /// Head memory of 16,384 scored tokens and 152,064 logits each: under 1 GB.
    #[test]
    fn a_head_never_holds_all_logits() {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 1);
        let model = TrainedModel::whole(&table, 0, Kind::BFloat16, GradientOptions::default());
        let shape = MicroBatchShape { tokens: 16_384, scored_tokens: 16_384, shares_prompts: false };
        let bytes = ActivationBytes::new(&model, GradientCheckpointing::None, shape);
        assert!(bytes.head_forward < bytes.head && bytes.head < 1_000_000_000, "{bytes:?}");
    }
}
