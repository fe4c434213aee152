//! Inputs and results of an attention, for its backward.

use tch::Tensor;

/// Inputs and results of an attention. Shapes are those of the backward that it is for.
#[derive(Debug, Clone, Copy)]
pub struct SavedAttention<'a> {
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
    /// Outputs, shaped as the queries.
    pub o: &'a Tensor,
    /// Log-sum-exp of the scaled scores.
    pub lse: &'a Tensor,
}
