//! The shape of a set of experts, and of one that every token goes to: their parameters and how ranks share them, and their bytes.

use super::bytes::ElementBytes;
use super::dense::DenseSpec;
use super::linear::{LinearSpec, Matrix, Projection, TpSplit};
use super::param_name::{ParamName, Shapes};
use crate::model::correction;
use crate::ops::router::{RouterOptions, RouterScores};

/// The shape of a set of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsSpec {
    /// Each of them.
    pub expert: DenseSpec,
    /// How many there are.
    pub num_experts: usize,
    /// How many of them a rank has: all, or its share.
    pub own: usize,
    /// Ranks share experts, each whole, and not every expert.
    pub is_parallel: bool,
    /// How tokens choose among them.
    pub router: RouterOptions,
    /// An expert that every token goes to, beside those that it chooses.
    pub shared: Option<SharedExpertSpec>,
    /// The output of the shared expert is multiplied by the sigmoid of a gate.
    pub gates_shared: bool,
    /// The router has a bias, and so have both matrices of every expert.
    pub has_biases: bool,
}

/// The shape of a shared expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpertSpec(pub DenseSpec);

impl ExpertsSpec {
    /// The share of a rank: a part of every expert, or some experts whole; of the shared one a part.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        let shared = self.shared.map(|SharedExpertSpec(expert)| SharedExpertSpec(expert.tp_slice(tp_size)));
        if self.is_parallel {
            return Self { own: self.own / tp_size, shared, ..self };
        }
        Self { expert: self.expert.tp_slice(tp_size), shared, ..self }
    }

    /// Whether so many ranks can have slices without copies.
    pub(in crate::model) fn can_slice(self, tp_size: usize) -> bool {
        let shared = if self.is_parallel { self.num_experts } else { self.expert.intermediate };
        shared.is_multiple_of(tp_size)
            && self.shared.is_none_or(|SharedExpertSpec(expert)| expert.intermediate.is_multiple_of(tp_size))
    }

    /// The sizes that ranks have shares of, in words.
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

    /// The two matrices of an expert, each as many times as there are experts; then those of the shared one.
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

    /// The weights of the router, its bias or correction, and those of the shared expert's gate.
    pub(in crate::model) fn other_shapes(self) -> Shapes {
        let router = (ParamName::Router, vec![self.num_experts as i64, self.expert.hidden as i64]);
        let is_corrected = matches!(self.router.scores, RouterScores::Sigmoid { .. });
        let correction = (ParamName::RouterCorrection, vec![(correction::PARTS * self.num_experts) as i64]);
        let gate = self.shared.filter(|_| self.gates_shared).map(SharedExpertSpec::gate_shape);
        let bias = self.has_biases.then(|| (ParamName::RouterBias, vec![self.num_experts as i64]));
        std::iter::once(router).chain(bias).chain(is_corrected.then_some(correction)).chain(gate).collect()
    }

    /// Weights of a layer that a token does not use.
    pub fn num_idle_params(self) -> usize {
        let idle = self.num_experts - self.router.num_experts_per_tok;
        idle * self.expert.linears().iter().map(|linear| linear.rows() * linear.columns).sum::<usize>()
    }

    /// Bytes a token of gate and up, and of the routing, which backward reads.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        let shared = self.shared.map_or(0, |shared| shared.kept_bytes(bytes));
        self.router.num_experts_per_tok * self.expert.kept_bytes(bytes) + self.routing_bytes(bytes) + shared
    }

    /// Bytes a token of the fullest moment of forward: gate and up and the activation, and beside them either the rows that go in and
    /// the activation's half, or the rows that come out.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        let rows =
            self.router.num_experts_per_tok * (self.expert.forward_bytes(bytes) + bytes.narrow * self.expert.hidden);
        let shared = self.shared.map_or(0, |shared| shared.forward_bytes(bytes));
        rows + self.routing_bytes(bytes) + 3 * bytes.wide * self.expert.hidden + shared
    }

    /// Bytes a token of the fullest moment of backward: what a dense MLP of all rows needs, the rows that go in and their gradients, of a
    /// format that rounds these twice, and the sum of these.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        let row = self.expert.backward_bytes(bytes, keeps_gate_up, false) + bytes.rounded * self.expert.hidden;
        let rows = self.router.num_experts_per_tok * row;
        let shared = self.shared.map_or(0, |shared| shared.backward_bytes(bytes, keeps_gate_up));
        rows + 2 * self.routing_bytes(bytes) + 3 * bytes.wide * self.expert.hidden + shared
    }

    /// Bytes a token of probabilities, and of choices with their weights and places.
    fn routing_bytes(self, bytes: ElementBytes) -> usize {
        const INDEX_BYTES: usize = 8;
        let hot = if self.has_biases { bytes.narrow * self.num_experts } else { 0 }; // of a row, for the biases
        bytes.wide * self.num_experts + self.router.num_experts_per_tok * (bytes.wide + 5 * INDEX_BYTES + hot)
    }
}

impl SharedExpertSpec {
    /// The matrices of the expert.
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

    /// The weight of the gate.
    pub(in crate::model) fn gate_shape(self) -> (ParamName, Vec<i64>) {
        (ParamName::SharedGate, vec![1, self.0.hidden as i64])
    }

    /// Bytes a token of gate and up, and of the gate's sigmoid, which backward reads.
    pub(in crate::model) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        self.0.kept_bytes(bytes) + bytes.wide
    }

    /// Bytes a token of the fullest moment of forward: gate and up, the activation, and the output in both kinds.
    pub(in crate::model) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        self.0.forward_bytes(bytes) + (bytes.narrow + bytes.wide) * self.0.hidden
    }

    /// Bytes a token of the fullest moment of backward: a dense MLP's, and the activation once more, times the sigmoid.
    pub(in crate::model) fn backward_bytes(self, bytes: ElementBytes, keeps_gate_up: bool) -> usize {
        self.0.backward_bytes(bytes, keeps_gate_up, false) + bytes.narrow * self.0.intermediate
    }
}
