//! The sublayer that treats every token by itself: one MLP for all of them, or experts.

use tch::Tensor;

use super::dense::DenseSpec;
use super::experts::{ExpertsSpec, Routed};
use super::linear::LinearSpec;
use super::shared::SharedExpertSpec;
use super::{BlockContext, BlockParams, ElementBytes};
use crate::config::GradientCheckpointing;
use crate::error::Result;
use crate::model::params::Shapes;
use crate::ops::swiglu::{Activation, GateUp};

/// The sublayer that treats every token by itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mlp {
    /// One MLP for all tokens.
    Dense(DenseSpec),
    /// Some of several for each token.
    Experts(ExpertsSpec),
}

/// Results of a forward that the backward reads, with the shape.
#[derive(Debug)]
pub(super) enum SavedMlp {
    Dense(DenseSpec, Expanded<GateUp>),
    Experts(ExpertsSpec, Box<Expanded<Routed>>),
}

#[derive(Debug)]
pub(super) struct Expanded<T> {
    /// Gate and up, with what belongs to them.
    pub(super) wide: Option<T>,
    /// Before the norm behind it, if there is one.
    pub(super) output: Option<Tensor>, // [T, D]
}

impl Mlp {
    /// The share of a rank.
    pub(super) fn tp_slice(self, tp_size: usize) -> Self {
        match self {
            Mlp::Dense(dense) => Mlp::Dense(dense.tp_slice(tp_size)),
            Mlp::Experts(experts) => Mlp::Experts(experts.tp_slice(tp_size)),
        }
    }

    /// The function of its gates.
    pub fn activation(self) -> Activation {
        match self {
            Mlp::Dense(dense) => dense.activation,
            Mlp::Experts(experts) => experts.expert.activation,
        }
    }

    /// With this function of all gates.
    pub(in crate::model) fn activated_by(self, activation: Activation) -> Self {
        let of = |dense: DenseSpec| DenseSpec { activation, ..dense };
        match self {
            Mlp::Dense(dense) => Mlp::Dense(of(dense)),
            Mlp::Experts(experts) => {
                let shared = experts.shared.map(|SharedExpertSpec(shared)| SharedExpertSpec(of(shared)));
                Mlp::Experts(ExpertsSpec { expert: of(experts.expert), shared, ..experts })
            }
        }
    }

    /// Whether so many ranks can have slices without copies.
    pub(super) fn can_slice(self, tp_size: usize) -> bool {
        match self {
            Mlp::Dense(dense) => dense.intermediate.is_multiple_of(tp_size),
            Mlp::Experts(experts) => experts.can_slice(tp_size),
        }
    }

    /// The sizes that ranks have shares of, in words.
    pub(in crate::model) fn sizes(self) -> String {
        match self {
            Mlp::Dense(dense) => format!("intermediate size {}", dense.intermediate),
            Mlp::Experts(experts) => experts.sizes(),
        }
    }

    /// The matrices of the MLP.
    pub(super) fn linears(self) -> Vec<LinearSpec> {
        match self {
            Mlp::Dense(dense) => dense.linears().into(),
            Mlp::Experts(experts) => experts.linears(),
        }
    }

    /// The weights that are no matrices of experts: the router's and a gate's, where there are any.
    pub(super) fn other_shapes(self) -> Shapes {
        match self {
            Mlp::Dense(_) => Shapes::new(),
            Mlp::Experts(experts) => experts.other_shapes(),
        }
    }

    /// Bytes a token of what `gradient_checkpointing = "none"` keeps.
    pub(super) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Mlp::Dense(dense) => dense.kept_bytes(bytes),
            Mlp::Experts(experts) => experts.kept_bytes(bytes),
        }
    }

    /// Bytes a token of the fullest moment of forward.
    pub(super) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Mlp::Dense(dense) => dense.forward_bytes(bytes),
            Mlp::Experts(experts) => experts.forward_bytes(bytes),
        }
    }

    /// Bytes a token of the fullest moment of backward.
    pub(super) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool, drops: bool) -> usize {
        match self {
            Mlp::Dense(dense) => dense.backward_bytes(bytes, keeps_gate_up, drops),
            Mlp::Experts(experts) => experts.backward_bytes(bytes, keeps_gate_up),
        }
    }

    /// Bytes a token of the moment at which backward makes the gradient of the normalised rows, in a format that rounds; 0 of experts, which
    /// do not train in such a format.
    pub(super) fn input_gradient_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        match self {
            Mlp::Dense(dense) => dense.input_gradient_bytes(bytes, keeps_gate_up),
            Mlp::Experts(_) => 0,
        }
    }

    /// The block's output [T, D], and what a backward may keep.
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
    /// The part of it that `keep` asks for.
    pub(super) fn kept(self, keep: GradientCheckpointing) -> Self {
        match self {
            SavedMlp::Dense(spec, expanded) => SavedMlp::Dense(spec, expanded.kept(keep)),
            SavedMlp::Experts(spec, expanded) => SavedMlp::Experts(spec, Box::new(expanded.kept(keep))),
        }
    }

    /// dh, the gradient of the residual stream before it, from that of the block's output.
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

impl<T> Expanded<T> {
    fn kept(self, keep: GradientCheckpointing) -> Self {
        Self {
            wide: self.wide.filter(|_| keep.keeps_gate_up()),
            output: self.output.filter(|_| !keep.recomputes_blocks()),
        }
    }
}
