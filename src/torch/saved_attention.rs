//! Inputs and results of an attention, and the gradients of its inputs.

use tch::Tensor;

/// Inputs and results of an attention, in the shapes that its backward function requires.
#[derive(Debug, Clone, Copy)]
pub struct SavedAttention<'a> {
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
    /// Outputs, with the shape of the queries.
    pub o: &'a Tensor,
    /// Log-sum-exp of the scaled scores.
    pub lse: &'a Tensor,
}

/// Results of an attention.
#[derive(Debug)]
pub struct Attended {
    /// Outputs, with the shape of the queries.
    pub o: Tensor,
    /// Log-sum-exp of the scaled scores.
    pub lse: Tensor,
}

/// Gradients of an attention's inputs, each with the shape of its input.
#[derive(Debug)]
pub struct QkvGradients {
    /// The gradient of the queries.
    pub dq: Tensor,
    /// The gradient of the keys.
    pub dk: Tensor,
    /// The gradient of the values.
    pub dv: Tensor,
}
