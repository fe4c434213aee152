//! The parameters of a block by name, their gradients, and their tensor-parallel slices.

use tch::Tensor;

use super::linear::{Linear, LinearSpec, Matrix};
use super::{BlockSpec, Mixer};
use crate::error::Result;
use crate::model::lora::BlockLora;
use crate::model::params::{ParamName, Unit, UnitLayout, required};
use crate::model::spec::ModelSpec;
use crate::torch::accumulation_kind;

/// The names of the norms around a sublayer.
#[derive(Debug, Clone, Copy)]
pub struct NormNames {
    /// The norm of the sublayer's input.
    pub pre: ParamName,
    /// The norm of the sublayer's output, before the residual stream.
    pub post: ParamName,
}

/// Norms around the first sublayer.
pub const MIXER_NORMS: NormNames = NormNames { pre: ParamName::InputNorm, post: ParamName::MixerPostNorm };
/// Norms around the second sublayer.
pub const MLP_NORMS: NormNames = NormNames { pre: ParamName::PostNorm, post: ParamName::MlpPostNorm };

/// A block's parameters by name, or their gradients, in which those of frozen ones are left out. A tensor-parallel slice has its
/// share of heads and of the MLP, or of every expert.
#[derive(Debug, Default)]
pub struct BlockParams {
    /// Norms and the router.
    others: Vec<(ParamName, Tensor)>,
    linears: Vec<(Matrix, Linear)>,
    /// The description of the whole block; gradients of adapters alone have none.
    spec: Option<BlockSpec>,
}

impl BlockParams {
    /// Views of a block's flat tensor [layout.len].
    ///
    /// # Panics
    /// If `layout` is not a block's of this model.
    pub fn view(spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor) -> Self {
        let Unit::Block(layer) = layout.unit else { panic!("the {} is no block", layout.unit) };
        let block = spec.block(layer);
        let linears = block.linears();
        let of_linear =
            |name| linears.iter().any(|linear| linear.matrix.params()[0] == name || linear.bias == Some(name));
        let others = layout.params.iter().map(|param| param.name).filter(|&name| !of_linear(name));
        Self {
            others: others.map(|name| (name, required(layout, name, flat))).collect(),
            linears: linears.iter().map(|linear| (linear.matrix, Linear::view(linear, layout, flat))).collect(),
            spec: Some(block),
        }
    }

    /// With these adapters beside its matrices. Of nothing: gradients of a block whose weights are frozen.
    pub fn with_adapters(mut self, lora: BlockLora) -> Self {
        lora.into_pairs().into_iter().for_each(|(matrix, lora)| self.linear_mut(matrix).lora = Some(lora));
        self
    }

    /// A norm's weight.
    pub fn norm(&self, name: ParamName) -> Option<&Tensor> {
        self.others.iter().find(|(own, _)| *own == name).map(|(_, weight)| weight)
    }

    /// The router's weight [E, D], or where its gradient goes.
    pub fn router(&self) -> Option<&Tensor> {
        self.norm(ParamName::Router)
    }

    /// A matrix.
    ///
    /// # Panics
    /// If the block has none of this name.
    pub fn linear(&self, matrix: Matrix) -> &Linear {
        self.linears().find(|(own, _)| *own == matrix).map(|(_, linear)| linear).expect("a matrix of the block")
    }

    /// All matrices.
    pub fn linears(&self) -> impl Iterator<Item = (Matrix, &Linear)> {
        self.linears.iter().map(|(matrix, linear)| (*matrix, linear))
    }

    /// Where a matrix' gradients go.
    pub(super) fn linear_mut(&mut self, matrix: Matrix) -> &mut Linear {
        let known = self.linears.iter().position(|(own, _)| *own == matrix);
        let index = known.unwrap_or_else(|| {
            self.linears.push((matrix, Linear::default()));
            self.linears.len() - 1
        });
        &mut self.linears[index].1
    }

    /// The gradient of a norm of `w`; for a frozen one, a tensor that nobody reads.
    pub(super) fn norm_of(&self, w: &BlockParams, name: ParamName) -> Result<Tensor> {
        match (self.norm(name), w.norm(name)) {
            (Some(gradient), _) => Ok(gradient.shallow_clone()),
            (None, Some(w)) => Ok(Tensor::f_zeros(w.size(), (accumulation_kind(w.kind()), w.device()))?),
            (None, None) => panic!("no {name:?} in this block"),
        }
    }

    /// The slice of rank `tp_rank` of `tp_size`, as views of `self` (a whole block). `tp_size` must have passed
    /// [`ModelSpec::validate_tp`].
    ///
    /// # Errors
    /// As [`BlockLora::tp_slice`].
    ///
    /// # Panics
    /// If `self` is not a block's weights.
    pub fn tp_slice(&self, tp_rank: usize, tp_size: usize) -> Result<Self> {
        let block = self.spec.expect("the weights of a block");
        let (Mixer::Attention(attention), linears) = (block.mixer, block.linears());
        let slice = |spec: &LinearSpec| Ok((spec.matrix, self.linear(spec.matrix).tp_slice(spec, tp_rank, tp_size)?));
        let others = self.others.iter();
        Ok(Self {
            others: others.map(|(name, w)| (*name, attention.own_norm(*name, w, tp_rank, tp_size))).collect(),
            linears: linears.iter().map(slice).collect::<Result<_>>()?,
            spec: self.spec,
        })
    }

    /// With every tensor but the adapters' replaced by `f` of it, in a fixed order.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let others = self.others.iter().map(|(name, weight)| Ok((*name, f(weight)?))).collect::<Result<_>>()?;
        let linears = self.linears().map(|(matrix, linear)| Ok((matrix, linear.try_map(f)?)));
        Ok(Self { others, linears: linears.collect::<Result<_>>()?, spec: self.spec })
    }
}
