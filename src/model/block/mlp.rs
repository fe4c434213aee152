//! Forward and backward of the sublayer that processes each token separately: a dense MLP or experts.

use tch::Tensor;

use super::context::BlockContext;
use super::expanded::Expanded;
use super::experts::Routed;
use super::params::BlockParams;
use crate::config::GradientCheckpointing;
use crate::error::Result;
use crate::model::spec::{DenseSpec, ExpertsSpec, Mlp};
use crate::ops::swiglu::GateUp;

/// Activations of a forward that its backward reads, with the shape of the sublayer.
#[derive(Debug)]
pub(super) enum SavedMlp {
    Dense(DenseSpec, Expanded<GateUp>),
    Experts(ExpertsSpec, Box<Expanded<Routed>>),
}

impl Mlp {
    /// Returns the block's output [T, D], and the activations that a backward may keep.
    pub(super) fn forward(
        self,
        ctx: &BlockContext<'_>,
        layer: usize,
        w: &BlockParams,
        h: &Tensor, // [T, D]
    ) -> Result<(Tensor, SavedMlp)> {
        match self {
            Mlp::Dense(dense) => {
                let (y, expanded) = dense.forward(ctx, w, h)?;
                Ok((y, SavedMlp::Dense(dense, expanded)))
            }
            Mlp::Experts(experts) => {
                let (y, expanded) = experts.forward(ctx, layer, w, h)?;
                Ok((y, SavedMlp::Experts(experts, Box::new(expanded))))
            }
        }
    }
}

impl SavedMlp {
    /// Drops the activations that `keep` does not keep.
    pub(super) fn kept(self, keep: GradientCheckpointing) -> Self {
        match self {
            SavedMlp::Dense(spec, expanded) => SavedMlp::Dense(spec, expanded.kept(keep)),
            SavedMlp::Experts(spec, expanded) => SavedMlp::Experts(spec, Box::new(expanded.kept(keep))),
        }
    }

    /// Returns dh, the gradient of the residual stream before the sublayer, given that of the block's output.
    pub(super) fn backward(
        self,
        ctx: &BlockContext<'_>,
        layer: usize,
        w: &BlockParams,
        (h, dy): (&Tensor, &Tensor), // [T, D]
        grads: &mut BlockParams,
    ) -> Result<Tensor> {
        match self {
            SavedMlp::Dense(dense, kept) => dense.backward(ctx, w, (h, dy), kept, grads),
            SavedMlp::Experts(experts, kept) => experts.backward(ctx, layer, w, (h, dy), *kept, grads),
        }
    }
}
