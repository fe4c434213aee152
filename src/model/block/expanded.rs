//! Results of the forward of a sublayer that treats every token by itself, which its backward may keep.

use tch::Tensor;

use crate::config::GradientCheckpointing;

/// Results of a forward that the backward reads, or computes again where they are absent.
#[derive(Debug)]
pub(super) struct Expanded<T> {
    /// Gate and up, with what belongs to them.
    pub(super) wide: Option<T>,
    /// Before the norm behind it, if there is one.
    pub(super) output: Option<Tensor>, // [T, D]
}

impl<T> Expanded<T> {
    /// The part of it that `keep` asks for.
    pub(super) fn kept(self, keep: GradientCheckpointing) -> Self {
        Self {
            wide: self.wide.filter(|_| keep.keeps_gate_up()),
            output: self.output.filter(|_| !keep.recomputes_blocks()),
        }
    }
}
