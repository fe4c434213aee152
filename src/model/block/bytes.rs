//! Bytes of a block's activations, from what its sublayers hold.

use tch::Kind;

use super::BlockSpec;
use crate::config::GradientCheckpointing;
use crate::torch::accumulation_kind;

/// Bytes of an element of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementBytes {
    /// Weights and activations.
    pub narrow: usize,
    /// The accumulation kind.
    pub wide: usize,
    /// The residual stream.
    pub residual: usize,
    /// Rows that a product of forward reads: as they are, rounded, or both.
    pub read: usize,
    /// Gradients beside those that are kept as they are: rounded ones.
    pub rounded: usize,
}

impl ElementBytes {
    /// For weights of `kind`.
    pub fn new(kind: Kind, residual: Kind) -> Self {
        let [narrow, wide, residual] = [kind, accumulation_kind(kind), residual].map(|kind| kind.elt_size_in_bytes());
        Self { narrow, wide, residual, read: narrow, rounded: 0 }
    }
}

impl BlockSpec {
    /// Bytes a token of what [`SavedBlock`](super::SavedBlock) keeps.
    pub fn saved_bytes(self, bytes: ElementBytes, keep: GradientCheckpointing) -> usize {
        let x = bytes.residual * self.hidden;
        match keep {
            GradientCheckpointing::Full => x,
            GradientCheckpointing::KeepAttention => x + self.mixer.attended_bytes(bytes),
            GradientCheckpointing::Selective => x + self.half_bytes(bytes) + self.output_bytes(bytes),
            GradientCheckpointing::None | GradientCheckpointing::KeepChunks => {
                let chunks = if keep.keeps_chunks() { self.mixer.chunk_bytes(bytes) } else { 0 };
                x + self.half_bytes(bytes) + self.output_bytes(bytes) + self.mlp.kept_bytes(bytes) + chunks
            }
        }
    }

    /// Bytes a token of each tensor that [`SavedBlock::movable`](super::SavedBlock::movable) gives.
    pub fn movable_bytes(self, bytes: ElementBytes, keep: GradientCheckpointing) -> [usize; 2] {
        let attended = if keep.keeps_attention() { self.mixer.output_bytes(bytes) } else { 0 };
        [bytes.residual * self.hidden, attended]
    }

    /// Bytes a token of the fullest moment of a forward that no backward follows: its input, the block up to the residual stream
    /// after the first sublayer, and the MLP's.
    pub fn forward_bytes(self, bytes: ElementBytes, shares_rows: bool) -> usize {
        let x = bytes.residual * self.hidden;
        let rest = self.mlp.forward_bytes(bytes).max(self.mixer.forward_bytes(bytes, shares_rows));
        x + self.half_bytes(bytes) + rest + 2 * self.output_bytes(bytes) + self.scaled_bytes(bytes)
    }

    /// As one of so many ranks that share rows holds it for each of its own: with heads that several ranks have once for each.
    pub fn with_shared_rows(self, num_ranks: usize) -> Self {
        Self { mixer: self.mixer.with_shared_rows(num_ranks), ..self }
    }

    /// Bytes a token of the fullest moment of a backward, beside what all blocks saved.
    pub fn backward_bytes(
        self,
        bytes: ElementBytes,
        keep: GradientCheckpointing,
        shares_prompts: bool,
        drops: bool,
    ) -> usize {
        let keeps_gate_up = keep.keeps_gate_up();
        let recomputed = self.recomputed_bytes(bytes, keep);
        // Gate and up are gone when attention's backward begins; chunks that were kept are not made then.
        let gone = if keeps_gate_up { self.mlp.kept_bytes(bytes) } else { 0 };
        let there = if keep.keeps_chunks() { self.mixer.chunk_bytes(bytes) } else { 0 };
        let of_mlp = self.mlp.backward_bytes(bytes, keeps_gate_up, drops) + self.output_bytes(bytes);
        recomputed
            + self.scaled_bytes(bytes)
            + of_mlp.max(self.mixer.backward_bytes(bytes, shares_prompts).saturating_sub(gone + there))
    }

    /// Bytes a token where a backward of a format that rounds has the largest matrix rounded, beside what all blocks saved.
    pub fn input_gradient_bytes(self, bytes: ElementBytes, keep: GradientCheckpointing) -> usize {
        let recomputed = self.recomputed_bytes(bytes, keep);
        let of_mlp = self.mlp.input_gradient_bytes(bytes, keep.keeps_gate_up());
        recomputed + of_mlp + self.output_bytes(bytes)
    }

    /// Bytes of the block up to the residual stream after attention, where backward makes it again, beside what was kept of it.
    fn recomputed_bytes(self, bytes: ElementBytes, keep: GradientCheckpointing) -> usize {
        let kept = if keep.keeps_attention() { self.mixer.attended_bytes(bytes) } else { 0 };
        if keep.recomputes_blocks() { self.half_bytes(bytes) - kept } else { 0 }
    }

    /// Bytes of the block up to the residual stream after attention.
    fn half_bytes(self, bytes: ElementBytes) -> usize {
        bytes.residual * self.hidden + self.mixer.kept_bytes(bytes) + self.output_bytes(bytes)
    }

    /// Bytes of a sublayer's output, or of its gradient, where a factor keeps it apart from the residual stream.
    fn scaled_bytes(self, bytes: ElementBytes) -> usize {
        if self.residual_scale == 1.0 { 0 } else { bytes.narrow * self.hidden }
    }

    /// Bytes of a sublayer's output, where a norm follows it.
    fn output_bytes(self, bytes: ElementBytes) -> usize {
        if self.norms.post { bytes.narrow * self.hidden } else { 0 }
    }
}
