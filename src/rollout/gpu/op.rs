//! The operations of a decode step by their names.
//!
//! `DecoderOp::run` can skip an operation when its thread asks so. A benchmark thereby runs one kind of operation in all layers
//! alone, for long enough to measure its energy; events inside a captured graph would give times only.

use std::cell::Cell;

use crate::error::Result;

/// An operation of a step, of all layers together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecoderOp {
    /// Looks the tokens' embeddings up.
    Embed,
    /// Norms, and sums of the residual stream.
    Norm,
    /// Projections that the first sublayer reads.
    Qkv,
    /// Rotates queries and keys, and writes keys and values into the cache.
    RopeWriteKv,
    /// Shares the rows' attention out among blocks.
    AttentionPlan,
    /// Attention to the cache.
    Attention,
    /// Gated delta nets between their projections.
    DeltaNet,
    /// The product behind the first sublayer.
    O,
    /// The experts of every token, and tokens by expert.
    Router,
    /// The first product of an MLP, with SwiGLU where one kernel does both.
    GateUp,
    /// SwiGLU by a kernel of its own.
    SiluMul,
    /// Rounds activations, where no operation before does that on its way.
    Round,
    /// The last product of an MLP.
    Down,
    /// The sum of a token's experts.
    Combine,
    /// Adapters beside the products.
    Adapters,
    /// Sums over the tensor-parallel group.
    AllReduce,
    /// The head's product.
    Head,
    /// Draws the next tokens.
    Sample,
}

thread_local! {
    static CHOSEN: Cell<Option<DecoderOp>> = const { Cell::new(None) };
}

impl DecoderOp {
    /// Runs `work` with all operations of this thread left out but the `chosen` one, or with all of them. A benchmark times one operation of a
    /// step so, and its energy, which events between operations would not tell.
    pub fn only<R>(chosen: Option<Self>, work: impl FnOnce() -> R) -> R {
        let before = CHOSEN.replace(chosen);
        let result = work();
        CHOSEN.set(before);
        result
    }

    /// Does `work`, unless a benchmark leaves this operation out.
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
