//! The shape of a mixture of experts and its shared expert: parameters, how ranks split them, and bytes.

use super::bytes::ElementBytes;
use super::dense::DenseSpec;
use super::linear::{LinearSpec, Matrix, Projection, TpSplit};
use super::param_name::{ParamName, Shapes};
use crate::model::correction;
use crate::ops::router::{RouterOptions, RouterScores};

/// The shape of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsSpec {
    /// The shape of each expert.
    pub expert: DenseSpec,
    /// Number of experts in the layer.
    pub num_experts: usize,
    /// Number of experts on this rank: all, or with expert parallelism its share.
    pub own: usize,
    /// Ranks split the experts by whole experts (expert parallelism).
    pub is_parallel: bool,
    /// How a token's experts are chosen.
    pub router: RouterOptions,
    /// The shared expert, which processes every token in addition to the chosen experts.
    pub shared: Option<SharedExpertSpec>,
    /// The output of the shared expert is multiplied by the sigmoid of a gate.
    pub gates_shared: bool,
    /// The router and both matrices of every expert have biases.
    pub has_biases: bool,
}

/// The shape of a shared expert, which processes every token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpertSpec(pub DenseSpec);

impl ExpertsSpec {
    /// The shape of one rank's slice: a slice of every expert or, with expert parallelism, some whole experts. The shared expert is always sliced.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        let shared = self.shared.map(|SharedExpertSpec(expert)| SharedExpertSpec(expert.tp_slice(tp_size)));
        if self.is_parallel {
            return Self { own: self.own / tp_size, shared, ..self };
        }
        Self { expert: self.expert.tp_slice(tp_size), shared, ..self }
    }

    /// Whether the experts can be sliced for `tp_size` tensor-parallel ranks without copying weights.
    pub(in crate::model) fn can_slice(self, tp_size: usize) -> bool {
        let shared = if self.is_parallel { self.num_experts } else { self.expert.intermediate };
        shared.is_multiple_of(tp_size)
            && self.shared.is_none_or(|SharedExpertSpec(expert)| expert.intermediate.is_multiple_of(tp_size))
    }

    /// The sizes that ranks split, as text for error messages.
    pub(in crate::model) fn sizes(self) -> String {
        let own = match self.is_parallel {
            true => format!("{} experts", self.num_experts),
            false => format!("experts of intermediate size {}", self.expert.intermediate),
        };
        match self.shared {
            Some(SharedExpertSpec(expert)) => {
                format!("{own}, a shared expert of intermediate size {}", expert.intermediate)
            }
            None => own,
        }
    }

    /// The weight matrices: gate-up and down of all experts, each stacked, then those of the shared expert.
    pub fn linears(self) -> Vec<LinearSpec> {
        let split = |linear: &LinearSpec| if self.is_parallel { TpSplit::Experts } else { linear.split };
        let bias = |linear: &LinearSpec| match linear.matrix {
            Matrix::GateUp => ParamName::GateUpBias,
            _ => ParamName::DownBias,
        };
        let own = |linear: LinearSpec| LinearSpec {
            experts: Some(self.own),
            split: split(&linear),
            bias: self.has_biases.then(|| bias(&linear)),
            ..linear
        };
        let shared = self.shared.into_iter().flat_map(SharedExpertSpec::linears);
        self.expert.linears().map(own).into_iter().chain(shared).collect()
    }

    /// Shapes of the other weights: the router, its bias or correction, and the shared expert's gate.
    pub(in crate::model) fn other_shapes(self) -> Shapes {
        let router = (ParamName::Router, vec![self.num_experts as i64, self.expert.hidden as i64]);
        let is_corrected = matches!(self.router.scores, RouterScores::Sigmoid { .. });
        let correction = (ParamName::RouterCorrection, vec![(correction::PARTS * self.num_experts) as i64]);
        let gate = self.shared.filter(|_| self.gates_shared).map(SharedExpertSpec::gate_shape);
        let bias = self.has_biases.then(|| (ParamName::RouterBias, vec![self.num_experts as i64]));
        std::iter::once(router).chain(bias).chain(is_corrected.then_some(correction)).chain(gate).collect()
    }

    /// Number of weights in a layer that one token does not use.
    pub fn num_idle_params(self) -> usize {
        let idle = self.num_experts - self.router.num_experts_per_tok;
        idle * self.expert.linears().iter().map(|linear| linear.rows() * linear.columns).sum::<usize>()
    }

    /// Bytes per token that backward reads: gate and up, and the routing.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        let shared = self.shared.map_or(0, |shared| shared.kept_bytes(bytes));
        self.router.num_experts_per_tok * self.expert.kept_bytes(bytes) + self.routing_bytes(bytes) + shared
    }

    /// Peak bytes per token during forward: gate and up, and the activation; in addition either the gathered input rows and half of the activation,
    /// or the output rows.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        let rows =
            self.router.num_experts_per_tok * (self.expert.forward_bytes(bytes) + bytes.narrow * self.expert.hidden);
        let shared = self.shared.map_or(0, |shared| shared.forward_bytes(bytes));
        rows + self.routing_bytes(bytes) + 3 * bytes.wide * self.expert.hidden + shared
    }

    /// Peak bytes per token during backward: a dense MLP's for all routed rows, the input rows with their gradients, which no format quantizes, and the
    /// summed gradient.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        let plain = ElementBytes { rounded: 0, ..bytes };
        let rows = self.router.num_experts_per_tok * self.expert.backward_bytes(plain, keeps_gate_up, false);
        let shared = self.shared.map_or(0, |shared| shared.backward_bytes(bytes, keeps_gate_up));
        rows + 2 * self.routing_bytes(bytes) + 3 * bytes.wide * self.expert.hidden + shared
    }

    /// Bytes per token of the router's probabilities, and of the chosen experts with their weights and positions.
    fn routing_bytes(self, bytes: ElementBytes) -> usize {
        const INDEX_BYTES: usize = 8;
        let hot = if self.has_biases { bytes.narrow * self.num_experts } else { 0 }; // one-hot rows, for the bias gradients
        bytes.wide * self.num_experts + self.router.num_experts_per_tok * (bytes.wide + 5 * INDEX_BYTES + hot)
    }
}

impl SharedExpertSpec {
    /// The weight matrices of the shared expert.
    pub(in crate::model) fn linears(self) -> [LinearSpec; 2] {
        self.0.linears().map(|linear| {
            let (matrix, names) = match linear.matrix {
                Matrix::GateUp => (Matrix::SharedGateUp, &["gate_proj", "up_proj"][..]),
                _ => (Matrix::SharedDown, &["down_proj"][..]),
            };
            let projections = names.iter().map(|name| (Projection::SharedExpert(name), 1)).collect();
            LinearSpec { matrix, projections, ..linear }
        })
    }

    /// Name and shape of the gate's weight.
    pub(in crate::model) fn gate_shape(self) -> (ParamName, Vec<i64>) {
        (ParamName::SharedGate, vec![1, self.0.hidden as i64])
    }

    /// Bytes per token that backward reads: gate and up, and the sigmoid of the gate.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        self.0.kept_bytes(bytes) + bytes.wide
    }

    /// Peak bytes per token during forward: gate and up, the activation, and the output in both the weights' and the accumulation type.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        self.0.forward_bytes(bytes) + (bytes.narrow + bytes.wide) * self.0.hidden
    }

    /// Peak bytes per token during backward: a dense MLP's, plus a copy of the activation multiplied by the sigmoid.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        self.0.backward_bytes(bytes, keeps_gate_up, false) + bytes.narrow * self.0.intermediate
    }
}
