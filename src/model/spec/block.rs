//! The shape of a transformer block: its sublayers and their norms, its parameters, and the bytes of its activations.

use super::attention::AttentionSpec;
use super::bytes::{ElementBytes, RowsShape};
use super::dense::DenseSpec;
use super::linear::LinearSpec;
use super::mixer::Mixer;
use super::mlp::Mlp;
use super::param_name::{ParamName, Shapes};
use crate::config::GradientCheckpointing;

/// The names of the two norms of a sublayer.
#[derive(Debug, Clone, Copy)]
pub struct NormNames {
    /// The norm of the sublayer's input.
    pub pre: ParamName,
    /// The norm of the sublayer's output, applied before it is added to the residual stream.
    pub post: ParamName,
}

/// Names of the norms of the first sublayer (attention or delta net).
pub const MIXER_NORMS: NormNames = NormNames { pre: ParamName::InputNorm, post: ParamName::MixerPostNorm };
/// Names of the norms of the second sublayer (MLP or experts).
pub const MLP_NORMS: NormNames = NormNames { pre: ParamName::PostNorm, post: ParamName::MlpPostNorm };

/// Whether a sublayer has a norm on its input, on its output, or on both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormPlaces {
    /// There is a norm of the sublayer's input.
    pub pre: bool,
    /// There is a norm of the sublayer's output, before it is added to the residual stream.
    pub post: bool,
}

impl NormPlaces {
    /// A norm of each sublayer's input only, as in most families.
    pub const PRE: Self = Self { pre: true, post: false };
    /// A norm of each sublayer's output only, as in OLMo 2.
    pub const POST: Self = Self { pre: false, post: true };
    /// Norms of each sublayer's input and output, as in Gemma 3.
    pub const BOTH: Self = Self { pre: true, post: true };
}

/// The shape of a transformer block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// The first sublayer: attention or a gated delta net.
    pub mixer: Mixer,
    /// The second sublayer: a dense MLP or experts.
    pub mlp: Mlp,
    /// Places of the norms in both sublayers.
    pub norms: NormPlaces,
    /// Multiplier of each sublayer's output before it is added to the residual stream.
    pub residual_scale: f64,
}

impl BlockSpec {
    /// A block with attention and a dense SiLU MLP whose inner width is `intermediate`.
    pub fn dense(attention: AttentionSpec, intermediate: usize, norms: NormPlaces) -> Self {
        let hidden = attention.hidden;
        let mlp = Mlp::Dense(DenseSpec::new(hidden, intermediate));
        Self { hidden, mixer: Mixer::Attention(attention), mlp, norms, residual_scale: 1.0 }
    }

    /// The shape of one tensor-parallel rank's slice of the block.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        Self { mixer: self.mixer.tp_slice(tp_size), mlp: self.mlp.tp_slice(tp_size), ..self }
    }

    /// Whether the block can be sliced for `tp_size` tensor-parallel ranks without copying weights.
    pub fn can_slice(self, tp_size: usize) -> bool {
        tp_size > 0 && self.mixer.can_slice(tp_size) && self.mlp.can_slice(tp_size)
    }

    /// Whether the second sublayer has experts.
    pub fn has_experts(self) -> bool {
        matches!(self.mlp, Mlp::Experts(_))
    }

    /// The weight matrices of the block, in the order of their parameters.
    pub fn linears(self) -> Vec<LinearSpec> {
        self.mixer.linears().into_iter().chain(self.mlp.linears()).collect()
    }

    /// Names and shapes of the block's parameters, in the order in which the layout stores them.
    pub(in crate::model) fn shapes(self) -> Shapes {
        let norm = |present: bool, name| present.then(|| (name, vec![self.hidden as i64]));
        let NormNames { pre, post } = MIXER_NORMS;
        let mixer = norm(self.norms.pre, pre).into_iter().chain(self.mixer.shapes()).chain(norm(self.norms.post, post));
        let NormNames { pre, post } = MLP_NORMS;
        let mlp = norm(self.norms.pre, pre).into_iter().chain(self.mlp.other_shapes());
        let mlp = mlp.chain(self.mlp.linears().into_iter().flat_map(|linear| linear.params()));
        mixer.chain(mlp).chain(norm(self.norms.post, post)).collect()
    }
}

impl BlockSpec {
    /// Bytes per token of the activations that [`SavedBlock`](crate::model::SavedBlock) keeps for backward.
    pub fn saved_bytes(self, bytes: ElementBytes, keep: GradientCheckpointing, rows: RowsShape) -> usize {
        let x = bytes.residual * self.hidden;
        match keep {
            GradientCheckpointing::Full => x,
            GradientCheckpointing::KeepAttention => x + self.mixer.attended_bytes(bytes),
            GradientCheckpointing::Selective => x + self.half_bytes(bytes) + self.output_bytes(bytes),
            GradientCheckpointing::None | GradientCheckpointing::KeepChunks => {
                let chunks = if keep.keeps_chunks() { self.mixer.chunk_bytes(bytes, rows) } else { 0 };
                x + self.half_bytes(bytes) + self.output_bytes(bytes) + self.mlp.kept_bytes(bytes) + chunks
            }
        }
    }

    /// Bytes per token of each tensor that `SavedBlock::movable` returns: the block's input and attention's output.
    pub fn movable_bytes(self, bytes: ElementBytes, keep: GradientCheckpointing) -> [usize; 2] {
        let attended = if keep.keeps_attention() { self.mixer.output_bytes(bytes) } else { 0 };
        [bytes.residual * self.hidden, attended]
    }

    /// Peak bytes per token of a forward pass without backward: the block's input, the block up to the residual stream after the first sublayer, and
    /// the larger of the two sublayers' temporaries.
    pub fn forward_bytes(self, bytes: ElementBytes, rows: RowsShape) -> usize {
        let x = bytes.residual * self.hidden;
        let rest = self.mlp.forward_bytes(bytes).max(self.mixer.forward_bytes(bytes, rows));
        x + self.half_bytes(bytes) + rest + 2 * self.output_bytes(bytes) + self.scaled_bytes(bytes)
    }

    /// The shape with the heads that sequence-parallel ranks hold; a head on several ranks counts once for each.
    pub fn with_shared_rows(self, num_ranks: usize) -> Self {
        Self { mixer: self.mixer.with_shared_rows(num_ranks), ..self }
    }

    /// Peak bytes per token of the block's backward, not counting the activations that all blocks saved.
    pub fn backward_bytes(
        self,
        bytes: ElementBytes,
        keep: GradientCheckpointing,
        rows: RowsShape,
        drops: bool,
    ) -> usize {
        let keeps_gate_up = keep.keeps_gate_up();
        let recomputed = self.recomputed_bytes(bytes, keep);
        // The gate and up activations are freed before attention's backward begins. Chunks that forward kept are not recomputed then.
        let gone = if keeps_gate_up { self.mlp.kept_bytes(bytes) } else { 0 };
        let there = if keep.keeps_chunks() { self.mixer.chunk_bytes(bytes, rows) } else { 0 };
        let of_mlp = self.mlp.backward_bytes(bytes, keeps_gate_up, drops) + self.output_bytes(bytes);
        recomputed
            + self.scaled_bytes(bytes)
            + of_mlp.max(self.mixer.backward_bytes(bytes, rows).saturating_sub(gone + there))
    }

    /// Bytes per token when an FP8 backward has its largest weight matrix quantized, not counting the activations that all blocks saved.
    pub fn input_gradient_bytes(self, bytes: ElementBytes, keep: GradientCheckpointing) -> usize {
        let recomputed = self.recomputed_bytes(bytes, keep);
        let of_mlp = self.mlp.input_gradient_bytes(bytes, keep.keeps_gate_up());
        recomputed + of_mlp + self.output_bytes(bytes)
    }

    /// Bytes per token that backward recomputes: the block up to the residual stream after attention, less the activations that were kept.
    fn recomputed_bytes(self, bytes: ElementBytes, keep: GradientCheckpointing) -> usize {
        let kept = if keep.keeps_attention() { self.mixer.attended_bytes(bytes) } else { 0 };
        if keep.recomputes_blocks() { self.half_bytes(bytes) - kept } else { 0 }
    }

    /// Bytes per token of the block's activations up to the residual stream after attention.
    fn half_bytes(self, bytes: ElementBytes) -> usize {
        bytes.residual * self.hidden + self.mixer.kept_bytes(bytes) + self.output_bytes(bytes)
    }

    /// Bytes per token of a sublayer's output or its gradient, stored apart from the residual stream if `residual_scale` is not 1.
    fn scaled_bytes(self, bytes: ElementBytes) -> usize {
        if self.residual_scale == 1.0 { 0 } else { bytes.narrow * self.hidden }
    }

    /// Bytes per token of a sublayer's output if a norm follows it, else 0.
    fn output_bytes(self, bytes: ElementBytes) -> usize {
        if self.norms.post { bytes.narrow * self.hidden } else { 0 }
    }
}
