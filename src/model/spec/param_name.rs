//! The parameters of a model by name, with their shapes, and the units that they belong to.

use std::fmt;

/// A part of the model that is gathered, reduced and stepped as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// The embedding table (and head, when tied).
    Embedding,
    /// One transformer block.
    Block(usize),
    /// The head that drafts tokens.
    DraftHead,
    /// Final norm and, unless tied, the head's table.
    Head,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unit::Embedding => f.write_str("embedding"),
            Unit::Block(layer) => write!(f, "block {layer}"),
            Unit::DraftHead => f.write_str("draft head"),
            Unit::Head => f.write_str("head"),
        }
    }
}

/// The kinds of parameter. The place of one among them is part of the key of its random weights: new ones stand at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamName {
    /// [V, D]
    Embedding,
    /// `[D]`, before attention
    InputNorm,
    /// [(H + 2 Hkv) hd, D]
    Qkv,
    /// [(H + 2 Hkv) hd]
    QkvBias,
    /// `[hd]`, or [H hd] over all heads
    QNorm,
    /// `[hd]`, or [Hkv hd] over all heads
    KNorm,
    /// [D, H hd]
    O,
    /// `[D]`, before the MLP
    PostNorm,
    /// [2 F, D], or [E, 2 I, D] of experts
    GateUp,
    /// [D, F], or [E, D, I] of experts
    Down,
    /// `[D]`, before the head
    FinalNorm,
    /// [V, D]
    LmHead,
    /// [n r, D], see [`LoraSpec`](crate::model::LoraSpec)
    QkvA,
    /// Rows of the adapted projections of `Qkv`, [.., r]
    QkvB,
    /// [r, H hd]
    OA,
    /// [D, r]
    OB,
    /// [n r, D]
    GateUpA,
    /// Rows of the adapted projections of `GateUp`, [.., r]
    GateUpB,
    /// [r, F]
    DownA,
    /// [D, r]
    DownB,
    /// `[D]`, behind attention
    MixerPostNorm,
    /// `[D]`, behind the MLP
    MlpPostNorm,
    /// [E, D], before the experts
    Router,
    /// [2 F, D] of a shared expert
    SharedGateUp,
    /// [D, F] of a shared expert
    SharedDown,
    /// [1, D], the gate of a shared expert
    SharedGate,
    /// [2 Hk dk + H dv, D] of a gated delta net: queries of all heads, keys, values
    DeltaQkv,
    /// [H dv, D], the gate of a delta net's norm
    DeltaZ,
    /// [H, D], write strengths
    DeltaB,
    /// [H, D], decays
    DeltaA,
    /// [2 Hk dk + H dv, W], the convolution
    DeltaConv,
    /// `[H]`
    DeltaALog,
    /// `[H]`
    DeltaDtBias,
    /// `[dv]`, the gated norm
    DeltaNorm,
    /// [D, H dv]
    DeltaOut,
    /// [r, D]
    DeltaQkvLoraA,
    /// [2 Hk dk + H dv, r]
    DeltaQkvLoraB,
    /// [r, D]
    DeltaZLoraA,
    /// [H dv, r]
    DeltaZLoraB,
    /// [r, D]
    DeltaBLoraA,
    /// [H, r]
    DeltaBLoraB,
    /// [r, D]
    DeltaALoraA,
    /// [H, r]
    DeltaALoraB,
    /// [r, H dv]
    DeltaOutLoraA,
    /// [D, r]
    DeltaOutLoraB,
    /// `[3 E]`, what is added to the router's scores where experts are chosen, in three summands; it is not trained
    RouterCorrection,
    /// `[H]`, a logit of each query head that takes part in the softmax with the value 0
    Sinks,
    /// `[D]`
    OBias,
    /// `[E]`, before the experts
    RouterBias,
    /// [E, 2 I] of experts
    GateUpBias,
    /// [E, D] of experts
    DownBias,
    /// `[D]`, of the draft head: before its projection
    DraftEmbeddingNorm,
    /// `[D]`, of the draft head: before its projection
    DraftHiddenNorm,
    /// [D, 2 D], of the draft head
    DraftProjection,
}

impl ParamName {
    /// Whether it is added to products: weights do not decay there, whatever the shape.
    pub fn is_bias(self) -> bool {
        use ParamName::{DownBias, GateUpBias, OBias, QkvBias, RouterBias};
        matches!(self, QkvBias | OBias | RouterBias | GateUpBias | DownBias)
    }

    /// Whether it is a matrix of a block, not an adapter's.
    pub fn is_block_matrix(self) -> bool {
        use ParamName::{DeltaA, DeltaB, DeltaOut, DeltaQkv, DeltaZ, Down, GateUp, O, Qkv};
        matches!(self, Qkv | O | GateUp | Down | DeltaQkv | DeltaZ | DeltaB | DeltaA | DeltaOut)
    }
}

/// Parameters of a unit with their shapes, in layout order.
pub(in crate::model) type Shapes = Vec<(ParamName, Vec<i64>)>;

/// Elements of a shape.
pub(in crate::model) fn product(shape: &[i64]) -> usize {
    shape.iter().fold(1, |product: usize, &size| product.saturating_mul(size as usize))
}
