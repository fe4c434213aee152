//! What the backward of every attention is told.

use tch::Tensor;

/// What an attention took and gave. Shapes are those of the backward that it is for.
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
