//! The weight matrices of a block by name, the checkpoint tensors each consists of, and how ranks split it.

use tch::Tensor;

use super::param_name::{ParamName, Shapes};
use crate::config::TargetModule;

/// Name in checkpoints of the sublayer that processes each token separately.
pub(in crate::model) const MLP: &str = "mlp";

/// The weight matrices of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Query, key and value projections.
    Qkv,
    /// Attention's output projection.
    O,
    /// Gate and up projections.
    GateUp,
    /// Down projection.
    Down,
    /// Gate and up projections of a shared expert.
    SharedGateUp,
    /// Down projection of a shared expert.
    SharedDown,
    /// Query, key and value projections of a gated delta net.
    DeltaQkv,
    /// Projection to the gate of a gated delta net's norm.
    DeltaZ,
    /// Projection to the write strengths of a gated delta net.
    DeltaB,
    /// Projection to the decays of a gated delta net.
    DeltaA,
    /// Output projection of a gated delta net.
    DeltaOut,
}

/// One projection as a checkpoint stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Projection {
    /// A module that LoRA can adapt.
    Module(TargetModule),
    /// A shared expert's projection, by its name in the checkpoint.
    SharedExpert(&'static str),
}

impl Projection {
    /// Whether the projection is one of `modules`.
    pub(in crate::model) fn is_one_of(self, modules: &[TargetModule]) -> bool {
        matches!(self, Projection::Module(module) if modules.contains(&module))
    }
}

/// Name in checkpoints of the sublayer that contains a module, for example `self_attn`.
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
    /// The name of the weight parameter.
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

    /// Names of the LoRA parameters A and B of this matrix, if it can have an adapter.
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

    /// Whether FP8 training quantizes this matrix's GEMMs. The write strengths and decays of a gated delta net are not quantized: they have only one
    /// row per head.
    pub(crate) fn is_rounded(self) -> bool {
        !matches!(self, Matrix::DeltaB | Matrix::DeltaA)
    }
}

/// The shape of a matrix. Its rows are [groups, heads, inner]; a projection is a range of consecutive heads in every group.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearSpec {
    /// The name of the matrix in its block.
    pub matrix: Matrix,
    /// Number of groups of rows.
    pub groups: usize,
    /// Rows per head.
    pub inner: usize,
    /// Number of columns: inputs of the GEMM.
    pub columns: usize,
    /// The checkpoint's projections, each with its number of heads per group.
    pub projections: Vec<(Projection, usize)>,
    /// How tensor-parallel ranks split the matrix.
    pub split: TpSplit,
    /// The name of the bias parameter, if there is one.
    pub bias: Option<ParamName>,
    /// Number of experts, whose matrices are stacked; `None` without experts.
    pub experts: Option<usize>,
}

/// How tensor-parallel ranks split a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TpSplit {
    /// By rows: each rank computes some of the outputs.
    Rows,
    /// By columns: the outputs of the ranks are summed.
    Columns,
    /// By experts: each rank has some whole experts.
    Experts,
    /// By rows within each of the sections queries, keys and values.
    RowSections {
        /// Rows of the query section, which equal those of the key section.
        keys: usize,
    },
}

impl LinearSpec {
    /// Number of heads in a group.
    pub fn heads(&self) -> usize {
        self.projections.iter().map(|(_, heads)| heads).sum()
    }

    /// Number of rows of the matrix: outputs of the GEMM.
    pub fn rows(&self) -> usize {
        self.groups * self.heads() * self.inner
    }

    /// The index of each expert that has such a matrix; a single `None` without experts.
    pub(in crate::model) fn each_expert(&self) -> Vec<Option<usize>> {
        self.experts.map_or_else(|| vec![None], |experts| (0..experts).map(Some).collect())
    }

    /// Shape of the weight: [N, K], or [E, N, K] for E experts.
    pub(crate) fn shape(&self) -> Vec<i64> {
        self.experts.into_iter().chain([self.rows(), self.columns]).map(|size| size as i64).collect()
    }

    /// Names and shapes of the weight and the bias.
    pub(in crate::model) fn params(&self) -> Shapes {
        let (weight, shape) = (self.matrix.weight(), self.shape());
        let bias = self.bias.map(|bias| (bias, shape[..shape.len() - 1].to_vec()));
        std::iter::once((weight, shape)).chain(bias).collect()
    }

    /// A view of one projection's rows in the matrix or in its bias: [groups, heads of the projection, inner, ..].
    pub(in crate::model) fn rows_of(&self, projection: usize, whole: &Tensor) -> Tensor {
        let rows = [self.groups, self.heads(), self.inner].map(|size| size as i64);
        let first: usize = self.projections[..projection].iter().map(|(_, heads)| heads).sum();
        let whole = whole.view([&rows, &whole.size()[1..]].concat().as_slice());
        whole.narrow(1, first as i64, self.projections[projection].1 as i64)
    }
}
