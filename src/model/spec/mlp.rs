//! The shape of the sublayer that processes each token separately: a dense MLP or a mixture of experts.

use super::bytes::ElementBytes;
use super::dense::DenseSpec;
use super::experts::{ExpertsSpec, SharedExpertSpec};
use super::linear::LinearSpec;
use super::param_name::Shapes;
use crate::ops::swiglu::Activation;

/// The sublayer that processes each token separately.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mlp {
    /// A dense MLP.
    Dense(DenseSpec),
    /// A mixture of experts.
    Experts(ExpertsSpec),
}

impl Mlp {
    /// The shape of one rank's slice.
    pub(in crate::model) fn tp_slice(self, tp_size: usize) -> Self {
        match self {
            Mlp::Dense(dense) => Mlp::Dense(dense.tp_slice(tp_size)),
            Mlp::Experts(experts) => Mlp::Experts(experts.tp_slice(tp_size)),
        }
    }

    /// The activation of the gates.
    pub fn activation(self) -> Activation {
        match self {
            Mlp::Dense(dense) => dense.activation,
            Mlp::Experts(experts) => experts.expert.activation,
        }
    }

    /// The shape with `activation` in all gates.
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

    /// Whether the sublayer can be sliced for `tp_size` tensor-parallel ranks without copying weights.
    pub(in crate::model) fn can_slice(self, tp_size: usize) -> bool {
        match self {
            Mlp::Dense(dense) => dense.intermediate.is_multiple_of(tp_size),
            Mlp::Experts(experts) => experts.can_slice(tp_size),
        }
    }

    /// The sizes that ranks split, as text for error messages.
    pub(in crate::model) fn sizes(self) -> String {
        match self {
            Mlp::Dense(dense) => format!("intermediate size {}", dense.intermediate),
            Mlp::Experts(experts) => experts.sizes(),
        }
    }

    /// The weight matrices of the MLP.
    pub(in crate::model) fn linears(self) -> Vec<LinearSpec> {
        match self {
            Mlp::Dense(dense) => dense.linears().into(),
            Mlp::Experts(experts) => experts.linears(),
        }
    }

    /// Shapes of the weights that are not in `linears`: the router's and the shared expert's gate, if there are any.
    pub(in crate::model) fn other_shapes(self) -> Shapes {
        match self {
            Mlp::Dense(_) => Shapes::new(),
            Mlp::Experts(experts) => experts.other_shapes(),
        }
    }

    /// Bytes per token that `gradient_checkpointing = "none"` keeps.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Mlp::Dense(dense) => dense.kept_bytes(bytes),
            Mlp::Experts(experts) => experts.kept_bytes(bytes),
        }
    }

    /// Peak bytes per token during forward.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        match self {
            Mlp::Dense(dense) => dense.forward_bytes(bytes),
            Mlp::Experts(experts) => experts.forward_bytes(bytes),
        }
    }

    /// Peak bytes per token during backward.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool, drops: bool) -> usize {
        match self {
            Mlp::Dense(dense) => dense.backward_bytes(bytes, keeps_gate_up, drops),
            Mlp::Experts(experts) => experts.backward_bytes(bytes, keeps_gate_up),
        }
    }

    /// Bytes per token when an FP8 backward computes the gradient of the normalized rows; 0 for experts, whose gradients are not in FP8.
    pub(in crate::model) fn input_gradient_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        match self {
            Mlp::Dense(dense) => dense.input_gradient_bytes(bytes, keeps_gate_up),
            Mlp::Experts(_) => 0,
        }
    }
}
