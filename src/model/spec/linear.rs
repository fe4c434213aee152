//! The matrices of a block by name: what each is made of on disk, and how ranks share it.

use tch::Tensor;

use super::param_name::{ParamName, Shapes};
use crate::config::TargetModule;

/// The module of a block that treats every token by itself.
pub(in crate::model) const MLP: &str = "mlp";

/// The matrices of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Query, key and value.
    Qkv,
    /// Attention output.
    O,
    /// Gate and up.
    GateUp,
    /// Down.
    Down,
    /// Gate and up of a shared expert.
    SharedGateUp,
    /// Down of a shared expert.
    SharedDown,
    /// Queries, keys and values of a gated delta net.
    DeltaQkv,
    /// Gate of a gated delta net's norm.
    DeltaZ,
    /// Write strengths of a gated delta net.
    DeltaB,
    /// Decays of a gated delta net.
    DeltaA,
    /// Output of a gated delta net.
    DeltaOut,
}

/// A matrix of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Projection {
    /// One that can have an adapter.
    Module(TargetModule),
    /// A shared expert's, by its name there.
    SharedExpert(&'static str),
}

impl Projection {
    /// Whether it is one of these.
    pub(in crate::model) fn is_one_of(self, modules: &[TargetModule]) -> bool {
        matches!(self, Projection::Module(module) if modules.contains(&module))
    }
}

/// The module of a block that has a projection.
pub(in crate::model) fn room(module: TargetModule) -> &'static str {
    use TargetModule::{
        DownProj, GateProj, InProjA, InProjB, InProjQkv, InProjZ, KProj, OProj, OutProj, QProj, UpProj, VProj,
    };
    match module {
        QProj | KProj | VProj | OProj => "self_attn",
        GateProj | UpProj | DownProj => MLP,
        InProjQkv | InProjZ | InProjB | InProjA | OutProj => "linear_attn",
    }
}

impl Matrix {
    /// The parameter of the weight.
    pub(in crate::model) fn weight(self) -> ParamName {
        match self {
            Matrix::Qkv => ParamName::Qkv,
            Matrix::O => ParamName::O,
            Matrix::GateUp => ParamName::GateUp,
            Matrix::Down => ParamName::Down,
            Matrix::SharedGateUp => ParamName::SharedGateUp,
            Matrix::SharedDown => ParamName::SharedDown,
            Matrix::DeltaQkv => ParamName::DeltaQkv,
            Matrix::DeltaZ => ParamName::DeltaZ,
            Matrix::DeltaB => ParamName::DeltaB,
            Matrix::DeltaA => ParamName::DeltaA,
            Matrix::DeltaOut => ParamName::DeltaOut,
        }
    }

    /// Parameters of the adapter beside it, A and B, where it can have one.
    pub(in crate::model) fn adapter(self) -> Option<[ParamName; 2]> {
        match self {
            Matrix::Qkv => Some([ParamName::QkvA, ParamName::QkvB]),
            Matrix::O => Some([ParamName::OA, ParamName::OB]),
            Matrix::GateUp => Some([ParamName::GateUpA, ParamName::GateUpB]),
            Matrix::Down => Some([ParamName::DownA, ParamName::DownB]),
            Matrix::SharedGateUp | Matrix::SharedDown => None,
            Matrix::DeltaQkv => Some([ParamName::DeltaQkvLoraA, ParamName::DeltaQkvLoraB]),
            Matrix::DeltaZ => Some([ParamName::DeltaZLoraA, ParamName::DeltaZLoraB]),
            Matrix::DeltaB => Some([ParamName::DeltaBLoraA, ParamName::DeltaBLoraB]),
            Matrix::DeltaA => Some([ParamName::DeltaALoraA, ParamName::DeltaALoraB]),
            Matrix::DeltaOut => Some([ParamName::DeltaOutLoraA, ParamName::DeltaOutLoraB]),
        }
    }

    /// Whether a format that rounds also rounds the products of this matrix in training. The write strengths and decays of a gated delta net
    /// stay as they are: they have one row a head.
    pub(crate) fn is_rounded(self) -> bool {
        !matches!(self, Matrix::DeltaB | Matrix::DeltaA)
    }
}

/// The shape of a matrix. Its rows are [groups, heads, inner], and a projection is some consecutive heads of every group.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearSpec {
    /// Which matrix of its block.
    pub matrix: Matrix,
    /// Groups of rows.
    pub groups: usize,
    /// Rows of a head.
    pub inner: usize,
    /// Columns.
    pub columns: usize,
    /// Projections as a checkpoint has them, with their heads in a group.
    pub projections: Vec<(Projection, usize)>,
    /// How tensor-parallel ranks share the matrix.
    pub split: TpSplit,
    /// The bias, where there is one.
    pub bias: Option<ParamName>,
    /// The number of experts that have such a matrix, one after the other.
    pub experts: Option<usize>,
}

/// How tensor-parallel ranks share a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TpSplit {
    /// By rows: each rank computes some of the outputs.
    Rows,
    /// By columns: the ranks' products add up to the output.
    Columns,
    /// By experts: each rank has some of them whole.
    Experts,
    /// By rows of queries, of keys and of values, one after the other.
    RowSections {
        /// Rows of queries, and of keys.
        keys: usize,
    },
}

impl LinearSpec {
    /// Heads of a group.
    pub fn heads(&self) -> usize {
        self.projections.iter().map(|(_, heads)| heads).sum()
    }

    /// Rows of the matrix: outputs of the product.
    pub fn rows(&self) -> usize {
        self.groups * self.heads() * self.inner
    }

    /// The index of each expert that has such a matrix; `None` alone where there are no experts.
    pub(in crate::model) fn each_expert(&self) -> Vec<Option<usize>> {
        self.experts.map_or_else(|| vec![None], |experts| (0..experts).map(Some).collect())
    }

    /// Shape of the weight: [N, K], or [E, N, K] of experts.
    pub(in crate::model) fn shape(&self) -> Vec<i64> {
        self.experts.into_iter().chain([self.rows(), self.columns]).map(|size| size as i64).collect()
    }

    /// The weight and the bias with their shapes.
    pub(in crate::model) fn params(&self) -> Shapes {
        let (weight, shape) = (self.matrix.weight(), self.shape());
        let bias = self.bias.map(|bias| (bias, shape[..shape.len() - 1].to_vec()));
        std::iter::once((weight, shape)).chain(bias).collect()
    }

    /// Rows [groups, heads of the projection, inner, ..] of a projection, as a view of the matrix or of its bias.
    pub(in crate::model) fn rows_of(&self, projection: usize, whole: &Tensor) -> Tensor {
        let rows = [self.groups, self.heads(), self.inner].map(|size| size as i64);
        let first: usize = self.projections[..projection].iter().map(|(_, heads)| heads).sum();
        let whole = whole.view([&rows, &whole.size()[1..]].concat().as_slice());
        whole.narrow(1, first as i64, self.projections[projection].1 as i64)
    }
}
