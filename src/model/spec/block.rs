//! The shape of a block: its sublayers and the norms around them, its parameters, and the bytes of its activations.

use super::attention::AttentionSpec;
use super::bytes::ElementBytes;
use super::dense::DenseSpec;
use super::linear::LinearSpec;
use super::mixer::Mixer;
use super::mlp::Mlp;
use super::param_name::{ParamName, Shapes};
use crate::config::GradientCheckpointing;

/// The names of the norms around a sublayer.
#[derive(Debug, Clone, Copy)]
pub struct NormNames {
    /// The norm of the sublayer's input.
    pub pre: ParamName,
    /// The norm of the sublayer's output, before the residual stream.
    pub post: ParamName,
}

/// Norms around the first sublayer.
pub const MIXER_NORMS: NormNames = NormNames { pre: ParamName::InputNorm, post: ParamName::MixerPostNorm };
/// Norms around the second sublayer.
pub const MLP_NORMS: NormNames = NormNames { pre: ParamName::PostNorm, post: ParamName::MlpPostNorm };

/// Where the norms of a sublayer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormPlaces {
    /// Before it: of what it reads.
    pub pre: bool,
    /// Behind it: of what it adds to the residual stream.
    pub post: bool,
}

impl NormPlaces {
    /// Before each sublayer alone, as in most families.
    pub const PRE: Self = Self { pre: true, post: false };
    /// Behind each sublayer alone, as in OLMo 2.
    pub const POST: Self = Self { pre: false, post: true };
    /// Before and behind each sublayer, as in Gemma 3.
    pub const BOTH: Self = Self { pre: true, post: true };
}

/// The description of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// The first sublayer.
    pub mixer: Mixer,
    /// The second sublayer.
    pub mlp: Mlp,
    /// Norms of both.
    pub norms: NormPlaces,
    /// Factor of what each sublayer adds to the residual stream.
    pub residual_scale: f64,
}

impl BlockSpec {
    /// A block of attention and a dense MLP of this width, with SiLU.
    pub fn dense(attention: AttentionSpec, intermediate: usize, norms: NormPlaces) -> Self {
        let hidden = attention.hidden;
        let mlp = Mlp::Dense(DenseSpec::new(hidden, intermediate));
        Self { hidden, mixer: Mixer::Attention(attention), mlp, norms, residual_scale: 1.0 }
    }

    /// The share of a rank.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        Self { mixer: self.mixer.tp_slice(tp_size), mlp: self.mlp.tp_slice(tp_size), ..self }
    }

    /// Whether so many ranks can have slices without copies.
    pub fn can_slice(self, tp_size: usize) -> bool {
        tp_size > 0 && self.mixer.can_slice(tp_size) && self.mlp.can_slice(tp_size)
    }

    /// Whether the second sublayer has experts.
    pub fn has_experts(self) -> bool {
        matches!(self.mlp, Mlp::Experts(_))
    }

    /// The matrices of the block, in the order of their parameters.
    pub fn linears(self) -> Vec<LinearSpec> {
        self.mixer.linears().into_iter().chain(self.mlp.linears()).collect()
    }

    /// Names and shapes of the block's parameters, in the layout's order.
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
    /// Bytes a token of what [`SavedBlock`](crate::model::SavedBlock) keeps.
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

    /// Bytes a token of each tensor that `SavedBlock::movable` gives.
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
