//! The shape of the sublayer that treats every token by itself: one MLP for all of them, or experts.

use super::bytes::ElementBytes;
use super::dense::DenseSpec;
use super::experts::{ExpertsSpec, SharedExpertSpec};
use super::linear::LinearSpec;
use super::param_name::Shapes;
use crate::ops::swiglu::Activation;

/// The sublayer that treats every token by itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mlp {
    /// One MLP for all tokens.
    Dense(DenseSpec),
    /// Some of several for each token.
    Experts(ExpertsSpec),
}

impl Mlp {
    /// The share of a rank.
    pub(in crate::model) fn tp_slice(self, tp_size: usize) -> Self {
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
    pub(in crate::model) fn can_slice(self, tp_size: usize) -> bool {
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
    pub(in crate::model) fn linears(self) -> Vec<LinearSpec> {
        match self {
            Mlp::Dense(dense) => dense.linears().into(),
            Mlp::Experts(experts) => experts.linears(),
        }
    }

    /// The weights that are no matrices of experts: the router's and a gate's, where there are any.
    pub(in crate::model) fn other_shapes(self) -> Shapes {
        match self {
            Mlp::Dense(_) => Shapes::new(),
            Mlp::Experts(experts) => experts.other_shapes(),
        }
    }

    /// Bytes a token of what `gradient_checkpointing = "none"` keeps.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Mlp::Dense(dense) => dense.kept_bytes(bytes),
            Mlp::Experts(experts) => experts.kept_bytes(bytes),
        }
    }

    /// Bytes a token of the fullest moment of forward.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Mlp::Dense(dense) => dense.forward_bytes(bytes),
            Mlp::Experts(experts) => experts.forward_bytes(bytes),
        }
    }

    /// Bytes a token of the fullest moment of backward.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool, drops: bool) -> usize {
        match self {
            Mlp::Dense(dense) => dense.backward_bytes(bytes, keeps_gate_up, drops),
            Mlp::Experts(experts) => experts.backward_bytes(bytes, keeps_gate_up),
        }
    }

    /// Bytes a token of the moment at which backward makes the gradient of the normalised rows, in a format that rounds; 0 of experts, which
    /// do not train in such a format.
    pub(in crate::model) fn input_gradient_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        match self {
            Mlp::Dense(dense) => dense.input_gradient_bytes(bytes, keeps_gate_up),
            Mlp::Experts(_) => 0,
        }
    }
}
