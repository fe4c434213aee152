//! The flat layout of a model's weights, the same for weights, gradients and optimizer state.
//!
//! A model is a row of units (embedding, blocks, head), each one flat tensor that is gathered, reduced and stepped as a
//! whole. Every parameter starts on a multiple of [`ALIGNMENT`] elements and every unit divides evenly by the shards, so
//! that a shard is a plain range. Elements between parameters are padding and stay zero.
//!
//! Matrices are stored so that a tensor-parallel slice needs no copy (D hidden, H query heads, Hkv key/value heads, hd
//! head width, F MLP width, V vocabulary):
//! - `Qkv` [(H + 2 Hkv) hd, D]: rows grouped by key/value head, `[query heads of group g, k_g, v_g]` for g = 0, 1, ..
//! - `GateUp` [2 F, D]: rows interleaved, g0 u0 g1 u1 ..
//! - `O` [D, H hd] and `Down` [D, F]: a slice is a column range, read through the leading dimension.
//! - of E experts of width I, `GateUp` [E, 2 I, D] and `Down` [E, D, I]: a slice is that of every expert

use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

use super::lora::LoraSpec;
use super::spec::{ModelSpec, ParamName, Shapes, Unit, product};
use crate::error::Result;

/// Parameters start on multiples of this many elements, and so do shards: a block of 8-bit moments never crosses either.
pub const ALIGNMENT: usize = 256;

/// Where every weight lies.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamTable {
    /// The model.
    pub spec: Arc<ModelSpec>,
    /// In order: embedding, blocks, the draft head if there is one, head.
    pub units: Vec<UnitLayout>,
    /// Elements of all units, padding included.
    pub total: usize,
    /// Equal parts that every unit divides into.
    pub shards: usize,
}

impl ParamTable {
    /// Lays the model out so that every unit's length is a multiple of `shards * ALIGNMENT`.
    pub fn new(spec: Arc<ModelSpec>, shards: usize) -> Self {
        let units = spec.units().map(|unit| (unit, spec.shapes(unit))).collect();
        Self::of_units(spec, units, shards)
    }

    /// Lays out the adapters of every block instead: units without embedding and head.
    pub fn adapters(spec: Arc<ModelSpec>, lora: &LoraSpec, shards: usize) -> Self {
        let mut units: Vec<(Unit, Shapes)> = Vec::with_capacity(spec.num_layers());
        for layer in 0..spec.num_layers() {
            let equal = units.last().filter(|_| spec.layers[layer] == spec.layers[layer - 1]);
            let shapes = equal.map_or_else(|| lora.shapes(&spec, layer), |(_, shapes)| shapes.clone());
            units.push((Unit::Block(layer), shapes));
        }
        Self::of_units(spec, units, shards)
    }

    fn of_units(spec: Arc<ModelSpec>, units: Vec<(Unit, Shapes)>, shards: usize) -> Self {
        let mut total = 0;
        let units = units.into_iter().map(|(unit, shapes)| {
            let layout = UnitLayout::new(unit, shapes, total, shards, spec.zero_centred_norms);
            total += layout.len;
            layout
        });
        let units = units.collect();
        Self { spec, units, total, shards }
    }

    /// The layout of one unit.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn unit(&self, unit: Unit) -> &UnitLayout {
        &self.units[self.index(unit)]
    }

    /// Elements of some units, padding included.
    pub(crate) fn elements_of(&self, units: &[Unit]) -> usize {
        units.iter().map(|&unit| self.unit(unit).len).sum()
    }

    /// The place of a unit in [`ParamTable::units`].
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn index(&self, unit: Unit) -> usize {
        let found = self.units.binary_search_by_key(&unit, |layout| layout.unit);
        found.unwrap_or_else(|_| panic!("{unit} is not in the table of {} units", self.units.len()))
    }

    /// Elements of all parameters, padding left out.
    pub fn num_params(&self) -> usize {
        self.units.iter().flat_map(|layout| &layout.params).map(Param::numel).sum()
    }
}

/// The parameters of a unit within its flat tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitLayout {
    /// Which unit.
    pub unit: Unit,
    /// In order of offset.
    pub params: Vec<Param>,
    /// First element within the flat model.
    pub offset: usize,
    /// Elements, padding included.
    pub len: usize,
    /// Norms of the residual stream and of heads scale by 1 + weight: fresh ones are 0.
    pub zero_centred_norms: bool,
}

impl UnitLayout {
    fn new(unit: Unit, shapes: Shapes, offset: usize, shards: usize, zero_centred_norms: bool) -> Self {
        let mut len: usize = 0;
        let params = shapes.into_iter().map(|(name, shape)| {
            let param = Param { name, decay: shape.len() > 1 && !name.is_bias(), shape, offset: len };
            len = (len + param.numel()).next_multiple_of(ALIGNMENT);
            param
        });
        let params = params.collect();
        Self { unit, params, offset, len: len.next_multiple_of(shards * ALIGNMENT), zero_centred_norms }
    }

    /// The parameter with this name, if the unit has it.
    pub fn param(&self, name: ParamName) -> Option<&Param> {
        self.params.iter().find(|param| param.name == name)
    }

    /// Elements between and behind parameters, which stay zero.
    pub fn padding(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let ends = self.params.iter().map(|param| param.offset + param.numel());
        let starts = self.params.iter().skip(1).map(|param| param.offset).chain([self.len]);
        ends.zip(starts).map(|(end, start)| end..start).filter(|padding| !padding.is_empty())
    }

    /// Sets all elements of the unit's flat tensor `[len]` to zero, but for the parameters that `is_kept` names.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn zero_others(&self, flat: &Tensor, is_kept: &dyn Fn(ParamName) -> bool) -> Result<()> {
        let mut start = 0;
        let kept = self.params.iter().filter(|param| is_kept(param.name));
        let kept = kept.map(|param| param.offset..param.offset + param.numel());
        for Range { start: end, end: next } in kept.chain(std::iter::once(self.len..self.len)) {
            let _ = flat.narrow(0, start as i64, (end - start) as i64).f_zero_()?;
            start = next;
        }
        Ok(())
    }

    /// The parameter as a view of the unit's flat tensor `[len]`, if the unit has it.
    pub fn view(&self, name: ParamName, flat: &Tensor) -> Option<Tensor> {
        assert_eq!(flat.size(), [self.len as i64], "flat tensor of the {}", self.unit);
        let param = self.param(name)?;
        Some(flat.narrow(0, param.offset as i64, param.numel() as i64).view(param.shape.as_slice()))
    }
}

/// One parameter within its unit.
#[derive(Debug, Clone, PartialEq)]
pub struct Param {
    /// Which parameter.
    pub name: ParamName,
    /// Shape of the parameter in this layout.
    pub shape: Vec<i64>,
    /// First element within the unit, a multiple of [`ALIGNMENT`].
    pub offset: usize,
    /// Weight decay applies: matrices, not norms and biases.
    pub decay: bool,
}

impl Param {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        product(&self.shape)
    }
}

/// A view of a parameter that the unit has.
pub(super) fn required(layout: &UnitLayout, name: ParamName, flat: &Tensor) -> Tensor {
    layout.view(name, flat).unwrap_or_else(|| panic!("the {} has no {name:?}", layout.unit))
}
