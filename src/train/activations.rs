//! Bytes of activations of one micro-batch, from what the explicit forward and backward hold at their fullest moment. Exact for
//! bfloat16 on a GPU, whose kernels work in place where this says so; a CPU's operations hold a little more.

use tch::Kind;

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

/// Bytes of activations on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationBytes {
    /// Tokens of the micro-batch.
    pub tokens: usize,
    /// What all blocks keep for their backward.
    pub saved: usize,
    /// Beside it at the fullest moment: in the last block's backward or in the head.
    pub transient: usize,
}

impl ActivationBytes {
    /// For a forward and backward of `kind`.
    pub fn new(spec: &ModelSpec, kind: Kind, keep: GradientCheckpointing, shape: MicroBatchShape) -> Self {
        let row = Row::new(spec, kind, keep, shape.shares_prompts);
        let per_token = row.block_backward();
        let head = row.head(spec, shape);
        Self {
            tokens: shape.tokens,
            saved: spec.num_layers * row.saved * shape.tokens,
            transient: (per_token * shape.tokens).max(head) + row.pass * shape.tokens,
        }
    }

    /// The most at once.
    pub fn peak(&self) -> usize {
        self.saved + self.transient
    }

    /// The most tokens, all of them scored, whose activations fit into `bytes`.
    pub fn largest_micro_batch(
        spec: &ModelSpec,
        kind: Kind,
        keep: GradientCheckpointing,
        shares_prompts: bool,
        bytes: usize,
    ) -> usize {
        let fits = |tokens: usize| {
            let shape = MicroBatchShape { tokens, scored_tokens: tokens, shares_prompts };
            Self::new(spec, kind, keep, shape).peak() <= bytes
        };
        let (mut least, mut most) = (0, 1);
        while fits(most) {
            (least, most) = (most, 2 * most);
        }
        while most - least > 1 {
            let middle = least.midpoint(most);
            *(if fits(middle) { &mut least } else { &mut most }) = middle;
        }
        least
    }
}

/// Bytes of one token's row of everything. D hidden, W = H hd, K = Hkv hd, F MLP width.
struct Row {
    hidden: usize,  // D
    queries: usize, // W
    wide_queries: usize,
    keys: usize, // K
    mlp: usize,  // F
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
    wide: usize,
}

impl Row {
    fn new(spec: &ModelSpec, kind: Kind, keep: GradientCheckpointing, shares_prompts: bool) -> Self {
        let (narrow, wide) = (kind.elt_size_in_bytes(), accumulation_kind(kind).elt_size_in_bytes());
        let (hidden, lse) = (narrow * spec.hidden_size, wide * spec.num_heads);
        let elements = |keep| narrow * SavedBlock::elements_per_token(spec, keep);
        let is_full = keep == GradientCheckpointing::Full;
        Self {
            hidden,
            queries: narrow * spec.num_heads * spec.head_dim,
            wide_queries: wide * spec.num_heads * spec.head_dim,
            keys: narrow * spec.num_kv_heads * spec.head_dim,
            mlp: narrow * spec.intermediate_size,
            saved: elements(keep) + if is_full { 0 } else { lse },
            recomputed: if is_full { elements(GradientCheckpointing::Selective) - hidden + lse } else { 0 },
            gate_up_is_saved: keep == GradientCheckpointing::None,
            pass: hidden + 2 * wide * spec.head_dim,
            lse,
            groups_queries: spec.num_heads > spec.num_kv_heads,
            shares_prompts,
            wide,
        }
    }

    /// The fullest moment of a block's backward, beside what all blocks saved.
    fn block_backward(&self) -> usize {
        self.recomputed + self.mlp_backward().max(self.attention_backward())
    }

    /// The gradient that comes in and the normalised rows; gate and up, which become their gradients in place, unless they
    /// were saved; the activation and its gradient.
    fn mlp_backward(&self) -> usize {
        let gate_up = if self.gate_up_is_saved { 0 } else { 2 * self.mlp };
        2 * self.hidden + gate_up + 2 * self.mlp
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
        let chunk = head_chunk_tokens(spec.vocab_size, true).min(shape.scored_tokens);
        let logits = self.wide * chunk * spec.vocab_size;
        let all_rows = self.hidden * (shape.scored_tokens + shape.tokens);
        (3 * self.hidden + 8 * self.wide) * shape.scored_tokens + logits.max(all_rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: MicroBatchShape = MicroBatchShape { tokens: 1000, scored_tokens: 10, shares_prompts: false };

    /// Qwen2.5-7B by hand: D = W = 3584, K = 512, F = 18944, 28 blocks, 28 heads.
    #[test]
    fn a_block_keeps_what_its_backward_reads() {
        let spec = ModelSpec::preset("qwen2.5-7b").unwrap();
        let bytes = |keep| ActivationBytes::new(&spec, Kind::BFloat16, keep, SHAPE);
        let (full, selective, none) = (
            bytes(GradientCheckpointing::Full),
            bytes(GradientCheckpointing::Selective),
            bytes(GradientCheckpointing::None),
        );
        assert_eq!(full.saved, 28 * 1000 * 2 * 3584);
        assert_eq!(selective.saved, 28 * 1000 * (2 * (3584 + 4608 + 3584 + 3584) + 4 * 28));
        assert_eq!(none.saved - selective.saved, 28 * 1000 * 2 * 2 * 18944);
        // Its MLP's backward: two rows of D, four of F; beside the last block's output and the rotations.
        assert_eq!(selective.transient, 1000 * (2 * (2 * 3584 + 4 * 18944) + 2 * 3584 + 8 * 128));
        assert_eq!(full.transient - selective.transient, 1000 * (2 * (4608 + 3584 + 3584) + 4 * 28));
        assert!(
            none.transient < selective.transient && full.peak() < selective.peak() && selective.peak() < none.peak()
        );
    }

    #[test]
    fn the_largest_micro_batch_fits_and_one_token_more_does_not() {
        let spec = ModelSpec::preset("qwen2.5-0.5b").unwrap();
        for keep in [GradientCheckpointing::None, GradientCheckpointing::Full] {
            let peak = |tokens| {
                let shape = MicroBatchShape { tokens, scored_tokens: tokens, shares_prompts: true };
                ActivationBytes::new(&spec, Kind::BFloat16, keep, shape).peak()
            };
            let largest = ActivationBytes::largest_micro_batch(&spec, Kind::BFloat16, keep, true, 10 << 30);
            assert!(peak(largest) <= 10 << 30 && peak(largest + 1) > 10 << 30);
        }
        assert_eq!(ActivationBytes::largest_micro_batch(&spec, Kind::Float, GradientCheckpointing::None, false, 0), 0);
    }
}
