//! The names and shapes of a model's parameters, and the units they belong to.

use std::fmt;

/// A part of the model whose parameters are gathered, reduced and updated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// The embedding table, which is also the output head if the two are tied.
    Embedding,
    /// The transformer block of this layer.
    Block(usize),
    /// The head that drafts tokens for speculative decoding.
    DraftHead,
    /// The final norm and, unless tied, the output head's table.
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

/// The kinds of parameters. A variant's position seeds its random initialization, so new variants go at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamName {
    /// Embedding table. [V, D]
    Embedding,
    /// Norm before attention. `[D]`
    InputNorm,
    /// Query, key and value projections. [(H + 2 Hkv) hd, D]
    Qkv,
    /// Bias of the query, key and value projections. [(H + 2 Hkv) hd]
    QkvBias,
    /// Norm of queries. `[hd]`, or [H hd] over all heads
    QNorm,
    /// Norm of keys. `[hd]`, or [Hkv hd] over all heads
    KNorm,
    /// Attention's output projection. [D, H hd]
    O,
    /// Norm before the MLP. `[D]`
    PostNorm,
    /// Gate and up projections. [2 F, D], or [E, 2 I, D] for experts
    GateUp,
    /// Down projection. [D, F], or [E, D, I] for experts
    Down,
    /// Norm before the output head. `[D]`
    FinalNorm,
    /// Output head. [V, D]
    LmHead,
    /// LoRA A of the adapted projections of `Qkv`. [n r, D], see [`LoraSpec`](crate::model::LoraSpec)
    QkvA,
    /// LoRA B of the adapted projections of `Qkv`. [rows of these, r]
    QkvB,
    /// LoRA A of attention's output projection. [r, H hd]
    OA,
    /// LoRA B of attention's output projection. [D, r]
    OB,
    /// LoRA A of the adapted projections of `GateUp`. [n r, D]
    GateUpA,
    /// LoRA B of the adapted projections of `GateUp`. [rows of these, r]
    GateUpB,
    /// LoRA A of the down projection. [r, F]
    DownA,
    /// LoRA B of the down projection. [D, r]
    DownB,
    /// Norm of attention's output. `[D]`
    MixerPostNorm,
    /// Norm of the MLP's output. `[D]`
    MlpPostNorm,
    /// The router before the experts. [E, D]
    Router,
    /// Gate and up projections of a shared expert. [2 F, D]
    SharedGateUp,
    /// Down projection of a shared expert. [D, F]
    SharedDown,
    /// The gate of a shared expert. [1, D]
    SharedGate,
    /// Query, key and value projections of a gated delta net, all heads of each in turn. [2 Hk dk + H dv, D]
    DeltaQkv,
    /// Projection to the gate of a delta net's norm. [H dv, D]
    DeltaZ,
    /// Projection to a delta net's write strengths. [H, D]
    DeltaB,
    /// Projection to a delta net's decays. [H, D]
    DeltaA,
    /// A delta net's convolution of width W. [2 Hk dk + H dv, W]
    DeltaConv,
    /// Logarithm of a delta net's decay rate (`A_log`). `[H]`
    DeltaALog,
    /// Bias of a delta net's decays (`dt_bias`). `[H]`
    DeltaDtBias,
    /// A delta net's gated norm. `[dv]`
    DeltaNorm,
    /// A delta net's output projection. [D, H dv]
    DeltaOut,
    /// LoRA A of `DeltaQkv`. [r, D]
    DeltaQkvLoraA,
    /// LoRA B of `DeltaQkv`. [2 Hk dk + H dv, r]
    DeltaQkvLoraB,
    /// LoRA A of `DeltaZ`. [r, D]
    DeltaZLoraA,
    /// LoRA B of `DeltaZ`. [H dv, r]
    DeltaZLoraB,
    /// LoRA A of `DeltaB`. [r, D]
    DeltaBLoraA,
    /// LoRA B of `DeltaB`. [H, r]
    DeltaBLoraB,
    /// LoRA A of `DeltaA`. [r, D]
    DeltaALoraA,
    /// LoRA B of `DeltaA`. [H, r]
    DeltaALoraB,
    /// LoRA A of `DeltaOut`. [r, H dv]
    DeltaOutLoraA,
    /// LoRA B of `DeltaOut`. [D, r]
    DeltaOutLoraB,
    /// Correction added to the router's scores when experts are chosen, stored as three summands. It is not trained. `[3 E]`
    RouterCorrection,
    /// Attention sinks: one logit per query head that takes part in the softmax with the value 0. `[H]`
    Sinks,
    /// Bias of attention's output projection. `[D]`
    OBias,
    /// Bias of the router. `[E]`
    RouterBias,
    /// Biases of the experts' gate and up projections. [E, 2 I]
    GateUpBias,
    /// Biases of the experts' down projections. [E, D]
    DownBias,
    /// The draft head's norm of embeddings, before its projection. `[D]`
    DraftEmbeddingNorm,
    /// The draft head's norm of hidden states, before its projection. `[D]`
    DraftHiddenNorm,
    /// The draft head's projection of embedding and hidden state to the width of the model. [D, 2 D]
    DraftProjection,
}

impl ParamName {
    /// Whether the parameter is an additive bias. Weight decay never applies to biases, whatever their shape.
    pub fn is_bias(self) -> bool {
        use ParamName::{DownBias, GateUpBias, OBias, QkvBias, RouterBias};
        matches!(self, QkvBias | OBias | RouterBias | GateUpBias | DownBias)
    }

    /// Whether the parameter is a weight matrix of a block, and not part of a LoRA adapter.
    pub fn is_block_matrix(self) -> bool {
        use ParamName::{DeltaA, DeltaB, DeltaOut, DeltaQkv, DeltaZ, Down, GateUp, O, Qkv};
        matches!(self, Qkv | O | GateUp | Down | DeltaQkv | DeltaZ | DeltaB | DeltaA | DeltaOut)
    }
}

/// Names and shapes of a unit's parameters, in the order in which the layout stores them.
pub(in crate::model) type Shapes = Vec<(ParamName, Vec<i64>)>;

/// Number of elements of a shape; saturates at `usize::MAX`.
pub(in crate::model) fn product(shape: &[i64]) -> usize {
    shape.iter().fold(1, |product: usize, &size| product.saturating_mul(size as usize))
}
