//! Activations of the MLP or experts that forward may keep for backward.

use tch::Tensor;

use crate::config::GradientCheckpointing;

/// Activations of a forward that its backward reads, or recomputes if absent.
#[derive(Debug)]
pub(super) struct Expanded<T> {
    /// Gate and up, with the data that belongs to them, such as the routing.
    pub(super) wide: Option<T>,
    /// The output before the norm that follows it, if there is one.
    pub(super) output: Option<Tensor>, // [T, D]
}

impl<T> Expanded<T> {
    /// Drops the activations that `keep` does not keep.
    pub(super) fn kept(self, keep: GradientCheckpointing) -> Self {
        Self {
            wide: self.wide.filter(|_| keep.keeps_gate_up()),
            output: self.output.filter(|_| !keep.recomputes_blocks()),
        }
    }
}
