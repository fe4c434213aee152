//! The matrices of a block by name, and the parameters that each has.

use crate::config::TargetModule;
use crate::model::params::ParamName;

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
