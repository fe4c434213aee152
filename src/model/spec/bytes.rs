//! Bytes per element of the tensors that activations consist of.

use tch::Kind;

use crate::torch::accumulation_kind;

/// Bytes per element of activations, by their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementBytes {
    /// Bytes of a weight or an activation.
    pub narrow: usize,
    /// Bytes in the accumulation type, for example float32 for bfloat16.
    pub wide: usize,
    /// Bytes in the type of the residual stream.
    pub residual: usize,
    /// Bytes of an input of a forward GEMM: in the weights' type, quantized, or both.
    pub read: usize,
    /// Bytes of the quantized copy of a gradient (FP8); 0 if gradients are not quantized.
    pub rounded: usize,
}

/// Properties of a micro-batch's rows that set the memory of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsShape {
    /// Whether ranks share the rows (sequence parallelism).
    pub shares_rows: bool,
    /// Whether completions share prompts.
    pub shares_prompts: bool,
    /// Mean length of a sequence in tokens; prompts that are shared, and completions, are sequences of their own.
    pub mean_tokens: usize,
}

impl ElementBytes {
    /// Sizes for weights of `kind` and a residual stream of `residual`, without quantization.
    pub fn new(kind: Kind, residual: Kind) -> Self {
        let [narrow, wide, residual] = [kind, accumulation_kind(kind), residual].map(|kind| kind.elt_size_in_bytes());
        Self { narrow, wide, residual, read: narrow, rounded: 0 }
    }
}
