//! The parameters of a block by name, their gradients, and their tensor-parallel slices.

use tch::{Kind, Tensor};

use super::linear::Linear;
use crate::cuda::kernels::ScaledRows;
use crate::error::Result;
use crate::model::format::{Format, Section};
use crate::model::lora::BlockLora;
use crate::model::params::{UnitLayout, required};
use crate::model::spec::{BlockSpec, LinearSpec, Matrix, ModelSpec, ParamName, Unit};
use crate::torch::accumulation_kind;
use crate::types::Place;

/// A block's parameters by name, or their gradients, without those of frozen parameters. A tensor-parallel slice has its share of the heads and of
/// the MLP, or of every expert.
#[derive(Debug, Default)]
pub struct BlockParams {
    /// Norms, the router, and a gated delta net's parameters other than matrices.
    others: Vec<(ParamName, Tensor)>,
    linears: Vec<(Matrix, Linear)>,
    /// The shape of the whole block; `None` for gradients of adapters alone.
    spec: Option<BlockSpec>,
}

impl BlockParams {
    /// Views of the flat tensor [layout.len] of a block, or of the draft head including the parameters around its block.
    ///
    /// # Panics
    /// If `layout` belongs to neither a block nor the draft head of this model.
    pub fn view(spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor) -> Self {
        let block = match layout.unit {
            Unit::Block(layer) => spec.layers[layer],
            Unit::DraftHead => spec.draft_head.expect("a model with a draft head"),
            Unit::Embedding | Unit::Head => panic!("the {} is no block", layout.unit),
        };
        let linears = block.linears();
        let of_linear = |name| linears.iter().any(|linear| linear.matrix.weight() == name || linear.bias == Some(name));
        let others = layout.params.iter().map(|param| param.name).filter(|&name| !of_linear(name));
        Self {
            others: others.map(|name| (name, required(layout, name, flat))).collect(),
            linears: linears.iter().map(|linear| (linear.matrix, Linear::view(linear, layout, flat))).collect(),
            spec: Some(block),
        }
    }

    /// Gradients for a first backward into uninitialized memory. That backward overwrites the gradients of matrices; all others are set to zero here
    /// because it adds to them.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    ///
    /// # Panics
    /// If `layout` does not belong to a block of this model.
    pub fn begin_gradients(spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor) -> Result<Self> {
        let mut gradients = Self::view(spec, layout, flat);
        gradients.linears.iter_mut().for_each(|(_, linear)| linear.begins = true);
        layout.zero_others(flat, &|name| gradients.linears().any(|(matrix, _)| matrix.weight() == name))?;
        Ok(gradients)
    }

    /// Whether some gradients are still uninitialized because no backward has written them yet.
    pub(super) fn is_unwritten(&self) -> bool {
        self.linears().any(|(_, linear)| linear.begins)
    }

    /// Adds adapters to the matrices. With gradients of adapters alone, `self` may be empty, as the block's weights are frozen.
    pub fn with_adapters(mut self, lora: BlockLora) -> Self {
        lora.into_pairs().into_iter().for_each(|(matrix, lora)| self.linear_mut(matrix).lora = Some(lora));
        self
    }

    /// The block as it trains in a quantized format: the inputs of its GEMMs are quantized on the fly. Weights and adapters are unchanged.
    pub fn training_in(mut self, format: &'static dyn Format) -> Self {
        let rounded = self.linears.iter_mut().filter(|(matrix, _)| matrix.is_rounded());
        rounded.for_each(|(_, linear)| linear.format = format);
        self
    }

    /// The block for a batch whose rows choose among stacked adapters: row t uses adapter number `adapters[t]`, or none if that is negative. Weights
    /// and their quantized copies are shared with `self`.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn for_rows(&self, adapters: &Tensor /* [T] i32 */) -> Result<Self> {
        let mut own = self.try_map(&mut |tensor| Ok(tensor.shallow_clone()))?;
        for ((_, linear), (_, shared)) in own.linears.iter_mut().zip(&self.linears) {
            linear.lora = linear.lora.as_ref().map(|lora| lora.for_rows(adapters)).transpose()?;
            linear.format = shared.format;
            for (piece, shared) in linear.pieces.iter_mut().zip(&shared.pieces) {
                piece.prepared = shared.prepared.as_ref().map(ScaledRows::shallow_clone);
            }
        }
        Ok(own)
    }

    /// A parameter that is not a matrix: a norm's weight, the router's, or one of a gated delta net's.
    pub fn norm(&self, name: ParamName) -> Option<&Tensor> {
        self.others.iter().find(|(own, _)| *own == name).map(|(_, weight)| weight)
    }

    /// The router's weight [E, D], or its gradient.
    pub fn router(&self) -> Option<&Tensor> {
        self.norm(ParamName::Router)
    }

    /// The type of the weights.
    ///
    /// # Panics
    /// If the block has no matrices.
    pub(super) fn kind(&self) -> Kind {
        self.linears[0].1.kind()
    }

    /// The matrix of this name.
    ///
    /// # Panics
    /// If the block has no such matrix.
    pub fn linear(&self, matrix: Matrix) -> &Linear {
        self.linears().find(|(own, _)| *own == matrix).map(|(_, linear)| linear).expect("a matrix of the block")
    }

    /// All matrices, each with its name.
    pub fn linears(&self) -> impl Iterator<Item = (Matrix, &Linear)> {
        self.linears.iter().map(|(matrix, linear)| (*matrix, linear))
    }

    /// Prepares every matrix for forward GEMMs in a format. Quantized copies are written to memory that `room` allocates, in a fixed order.
    ///
    /// # Errors
    /// The errors of `room` and of [`Format::round`].
    pub fn prepare(
        &mut self,
        format: &'static dyn Format,
        room: &mut dyn FnMut(Section) -> Result<Tensor>,
    ) -> Result<()> {
        for (matrix, linear) in self.linears.iter_mut().filter(|(matrix, _)| !format.rounds() || matrix.is_rounded()) {
            linear.format = format;
            for piece in linear.pieces.iter_mut().filter(|piece| format.copies(*matrix, piece.weight.dim() == 3)) {
                let [values, scales] = format.sections(&piece.weight.size());
                let prepared = ScaledRows { values: room(values)?, scales: room(scales)? };
                format.round(&piece.weight, &prepared)?;
                piece.prepared = Some(prepared);
            }
        }
        Ok(())
    }

    /// The number format of the block's GEMMs.
    ///
    /// # Panics
    /// If the block has no matrices.
    pub(crate) fn format(&self) -> &'static dyn Format {
        self.linears[0].1.format
    }

    /// The gradients of a matrix, added if they are missing.
    pub(super) fn linear_mut(&mut self, matrix: Matrix) -> &mut Linear {
        let known = self.linears.iter().position(|(own, _)| *own == matrix);
        let index = known.unwrap_or_else(|| {
            self.linears.push((matrix, Linear::default()));
            self.linears.len() - 1
        });
        &mut self.linears[index].1
    }

    /// The gradient of a parameter of `w` that is not a matrix; for a frozen parameter, a temporary tensor that is never read.
    pub(super) fn gradient_of(&self, w: &BlockParams, name: ParamName) -> Result<Tensor> {
        match (self.norm(name), w.norm(name)) {
            (Some(gradient), _) => Ok(gradient.shallow_clone()),
            (None, Some(w)) => Ok(Tensor::f_zeros(w.size(), (accumulation_kind(w.kind()), w.device()))?),
            (None, None) => panic!("no {name:?} in this block"),
        }
    }

    /// The slice of rank `tp_rank` of `tp_size`, as views of `self` (a whole block). `tp_size` must have passed [`ModelSpec::validate_tp`].
    ///
    /// # Errors
    /// The errors of [`BlockLora::tp_slice`]; [`crate::Error::OutOfMemory`].
    ///
    /// # Panics
    /// If `self` does not hold a block's weights.
    pub fn tp_slice(&self, tp_rank: usize, tp_size: usize) -> Result<Self> {
        let block = self.spec.expect("the weights of a block");
        let linears = block.linears();
        let slice = |spec: &LinearSpec| Ok((spec.matrix, self.linear(spec.matrix).tp_slice(spec, tp_rank, tp_size)?));
        let (others, place) = (self.others.iter(), Place { rank: tp_rank, size: tp_size });
        let own = |(name, w): &(ParamName, Tensor)| Ok((*name, block.mixer.own_part(*name, w, place)?));
        Ok(Self {
            others: others.map(own).collect::<Result<_>>()?,
            linears: linears.iter().map(slice).collect::<Result<_>>()?,
            spec: self.spec,
        })
    }

    /// Replaces every tensor except those of adapters by `f(tensor)`, in a fixed order.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let others = self.others.iter().map(|(name, weight)| Ok((*name, f(weight)?))).collect::<Result<_>>()?;
        let linears = self.linears().map(|(matrix, linear)| Ok((matrix, linear.try_map(f)?)));
        Ok(Self { others, linears: linears.collect::<Result<_>>()?, spec: self.spec })
    }
}
