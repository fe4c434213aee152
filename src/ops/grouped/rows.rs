//! Rows of an operand of a grouped GEMM: already sorted by expert, or still to be copied from tokens.

use tch::Tensor;

use super::Dispatch;
use crate::error::Result;
use crate::ops::swiglu::GateUp;

/// Rows sorted by expert, or the tensors to make them from.
#[derive(Debug, Clone, Copy)]
pub enum ExpertRows<'a> {
    /// Rows that are already sorted by expert. [R, N]
    Sorted(&'a Tensor),
    /// One row per token; each token's row still has to be copied to its experts. [T, N]
    OfTokens(&'a Tensor),
    /// Sorted rows of gate and up, or of their gradients. [R, N / 2] each
    GateUp(&'a GateUp),
}

impl ExpertRows<'_> {
    /// Returns the sorted rows; copies rows of tokens if necessary. [R, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn sorted(self, dispatch: &Dispatch) -> Result<Tensor> {
        match self {
            Self::Sorted(rows) => Ok(rows.shallow_clone()),
            Self::OfTokens(x) => dispatch.scatter(x),
            Self::GateUp(d) => Ok(d.pairs()?.shallow_clone()),
        }
    }
}

impl Dispatch {
    /// Computes [`Dispatch::accumulate_weight`] with operands of any form of [`ExpertRows`], which are copied if necessary.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn accumulate_weight_of(
        &self,
        dy: ExpertRows<'_>, // [R, N]
        x: ExpertRows<'_>,  // [R, K]
        dw: &mut Tensor,    // [E, N, K]
    ) -> Result<()> {
        let x = x.sorted(self)?;
        match dy {
            ExpertRows::GateUp(d) => self.accumulate_gate_up(d, &x, dw),
            rows => self.accumulate_weight(&rows.sorted(self)?, &x, dw),
        }
    }
}
