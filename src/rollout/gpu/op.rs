//! Names for the operations of a decode step.
//!
//! A benchmark can make `DecoderOp::run` skip all operations of its thread but one kind. It thereby runs this kind alone, in all layers, long enough
//! to measure its energy; CUDA events inside a captured graph would give times only.

use std::cell::Cell;

use crate::error::Result;

/// One kind of operation in a decode step, in all layers together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecoderOp {
    /// Looks the tokens' embeddings up.
    Embed,
    /// Norms and sums of the residual stream.
    Norm,
    /// Projections that the first sublayer reads.
    Qkv,
    /// Rotates queries and keys, and writes keys and values into the cache.
    RopeWriteKv,
    /// Divides the rows' attention among thread blocks.
    AttentionPlan,
    /// Attention to the cache.
    Attention,
    /// Gated delta nets between their projections.
    DeltaNet,
    /// The output projection of the first sublayer.
    O,
    /// Chooses the experts of every token and sorts the tokens by expert.
    Router,
    /// The gate and up GEMM of an MLP, with SwiGLU if one kernel computes both.
    GateUp,
    /// SwiGLU in a separate kernel.
    SiluMul,
    /// Quantizes activations, where the previous operation does not do it.
    Round,
    /// The down GEMM of an MLP.
    Down,
    /// The weighted sum of a token's experts.
    Combine,
    /// LoRA adapters.
    Adapters,
    /// All-reduces over the tensor-parallel group.
    AllReduce,
    /// The GEMM of the language model head.
    Head,
    /// Samples the next tokens.
    Sample,
}

thread_local! {
    static CHOSEN: Cell<Option<DecoderOp>> = const { Cell::new(None) };
}

impl DecoderOp {
    /// Runs `work` with only the `chosen` operation enabled on this thread, or with all operations for `None`. A benchmark measures the time and
    /// energy of one operation so.
    pub fn only<R>(chosen: Option<Self>, work: impl FnOnce() -> R) -> R {
        let before = CHOSEN.replace(chosen);
        let result = work();
        CHOSEN.set(before);
        result
    }

    /// Runs `work`, unless a benchmark has disabled this operation.
    pub(super) fn run(self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        if CHOSEN.get().is_none_or(|chosen| chosen == self) { work() } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_run_unless_profiling_selects_another() {
        let ran = || {
            let mut ran = Vec::new();
            for op in [DecoderOp::Norm, DecoderOp::Head] {
                op.run(|| {
                    ran.push(op);
                    Ok(())
                })
                .unwrap();
            }
            ran
        };
        let both = [DecoderOp::Norm, DecoderOp::Head];
        assert_eq!(DecoderOp::only(Some(DecoderOp::Head), || [ran(), DecoderOp::only(None, ran)]), [&both[1..], &both]);
        assert_eq!(ran(), both);
    }
}
