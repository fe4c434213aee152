//! Rows of one factor of a product with experts' matrices, there or still to be copied.

use tch::Tensor;

use super::Dispatch;
use crate::error::Result;
use crate::ops::swiglu::GateUp;

/// Rows that are sorted by expert.
#[derive(Debug, Clone, Copy)]
pub enum ExpertRows<'a> {
    /// The rows. [R, N]
    Sorted(&'a Tensor),
    /// What each row's token has. [T, N]
    OfTokens(&'a Tensor),
    /// Rows of gate and up. [R, N / 2] each
    GateUp(&'a GateUp),
}

impl ExpertRows<'_> {
    /// The rows, copied where they are not there. [R, N]
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
    /// [`Dispatch::accumulate_weight`] of rows that may have to be copied, or are gate and up.
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
