//! The flat layout of a model's weights, shared by weights, gradients and optimizer state.
//!
//! A model is a sequence of units (embedding, blocks, head). Each unit is one flat tensor that is gathered, reduced and updated as a whole. Every
//! parameter starts at a multiple of [`ALIGNMENT`] elements, and every unit divides evenly by the number of shards, so a shard is a contiguous range.
//! Elements between parameters are padding and stay zero.
//!
//! Matrices are stored so that a tensor-parallel slice needs no copy (D hidden, H query heads, Hkv key/value heads, hd head width, F MLP width, V
//! vocabulary):
//! - `Qkv` [(H + 2 Hkv) hd, D]: rows grouped by key/value head, `[query heads of group g, k_g, v_g]` for g = 0, 1, ..
//! - `GateUp` [2 F, D]: rows interleaved, g0 u0 g1 u1 ..
//! - `O` [D, H hd] and `Down` [D, F]: a slice is a range of columns, addressed through the leading dimension.
//! - `GateUp` [E, 2 I, D] and `Down` [E, D, I] of E experts of width I: a slice has a slice of every expert.

use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

use super::lora::LoraSpec;
use super::spec::{ModelSpec, ParamName, Shapes, Unit, product};
use crate::error::Result;

/// Parameters and shards start at multiples of this many elements, so that a block of 8-bit optimizer moments never spans two of them.
pub const ALIGNMENT: usize = 256;

/// The memory layout of all weights of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamTable {
    /// The model's shape.
    pub spec: Arc<ModelSpec>,
    /// Layouts of the units in order: embedding, blocks, the draft head if there is one, head.
    pub units: Vec<UnitLayout>,
    /// Number of elements of all units, padding included.
    pub total: usize,
    /// Number of equal shards that every unit divides into.
    pub shards: usize,
}

impl ParamTable {
    /// Creates a layout in which every unit's length is a multiple of `shards * ALIGNMENT`.
    pub fn new(spec: Arc<ModelSpec>, shards: usize) -> Self {
        let units = spec.units().map(|unit| (unit, spec.shapes(unit))).collect();
        Self::of_units(spec, units, shards)
    }

    /// Creates the layout of the adapters of every block; it has no embedding and no head.
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

    /// Number of elements of some units, padding included.
    pub(crate) fn elements_of(&self, units: &[Unit]) -> usize {
        units.iter().map(|&unit| self.unit(unit).len).sum()
    }

    /// The index of a unit in [`ParamTable::units`].
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn index(&self, unit: Unit) -> usize {
        let found = self.units.binary_search_by_key(&unit, |layout| layout.unit);
        found.unwrap_or_else(|_| panic!("{unit} is not in the table of {} units", self.units.len()))
    }

    /// Number of elements of all parameters, without padding.
    pub fn num_params(&self) -> usize {
        self.units.iter().flat_map(|layout| &layout.params).map(Param::numel).sum()
    }
}

/// The layout of a unit's parameters within its flat tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitLayout {
    /// The unit's name.
    pub unit: Unit,
    /// The unit's parameters, in order of offset.
    pub params: Vec<Param>,
    /// Index of the unit's first element within the flat model.
    pub offset: usize,
    /// Number of elements, padding included.
    pub len: usize,
    /// Norms of the residual stream and of heads multiply by 1 + weight, so fresh weights are 0.
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

    /// The ranges of padding between and after parameters; they stay zero.
    pub fn padding(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let ends = self.params.iter().map(|param| param.offset + param.numel());
        let starts = self.params.iter().skip(1).map(|param| param.offset).chain([self.len]);
        ends.zip(starts).map(|(end, start)| end..start).filter(|padding| !padding.is_empty())
    }

    /// Zeroes the unit's flat tensor `[len]`, except the parameters for which `is_kept` returns true.
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

/// The layout of one parameter within its unit.
#[derive(Debug, Clone, PartialEq)]
pub struct Param {
    /// The parameter's name.
    pub name: ParamName,
    /// Shape of the parameter in this layout.
    pub shape: Vec<i64>,
    /// Index of the first element within the unit, a multiple of [`ALIGNMENT`].
    pub offset: usize,
    /// Whether weight decay applies: true for matrices, false for norms and biases.
    pub decay: bool,
}

impl Param {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        product(&self.shape)
    }
}

/// A view of a parameter; panics if the unit does not have it.
pub(super) fn required(layout: &UnitLayout, name: ParamName, flat: &Tensor) -> Tensor {
    layout.view(name, flat).unwrap_or_else(|| panic!("the {} has no {name:?}", layout.unit))
}
