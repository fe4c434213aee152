//! A model that only generates: the engine with weights of its own, for `generate`, `eval`, benchmarks and ranks that do
//! nothing else.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::weights::{EngineSlices, no_adapters};
use crate::dist::{Mesh, World};
use crate::error::Result;
use crate::model::{AdapterFiles, BlockLora, LoraSpec, ParamTable, Unit, UnitLayout};
use crate::phase::{self, Phase};
use crate::rollout::{Engine, RolloutEngine};

/// Whole weights and an engine that reads them in place.
#[derive(Debug)]
pub struct Served {
    world: Arc<World>,
    slices: EngineSlices,
    table: Arc<ParamTable>,
    units: Vec<Tensor>, // [len] each
    adapters: Option<Adapters>,
    engine: Engine,
}

/// Adapters of a served model.
#[derive(Debug)]
struct Adapters {
    lora: LoraSpec,
    table: ParamTable,
    units: Vec<Tensor>, // [len] each
}

impl Served {
    /// Loads every unit from `source` to the world's device.
    pub fn new(
        world: Arc<World>,
        mesh: &Mesh,
        table: Arc<ParamTable>,
        engine: Engine,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<Self> {
        let device = world.device();
        let load = |layout: &UnitLayout| Ok(source(layout)?.f_to_device(device)?);
        let units = table.units.iter().map(load).collect::<Result<_>>()?;
        let slices = EngineSlices::in_place(mesh.tp.rank(), mesh.tp.size());
        Ok(Self { world, slices, table, units, adapters: None, engine })
    }

    /// Zeros, for what `base_units` and `adapter_units` will be told, in `kind`.
    pub fn unfilled(
        world: Arc<World>,
        mesh: &Mesh,
        table: Arc<ParamTable>,
        lora: Option<LoraSpec>,
        engine: Engine,
        kind: Kind,
    ) -> Result<Self> {
        let device = world.device();
        let zeros = |layout: &UnitLayout| Ok(Tensor::f_zeros([layout.len as i64], (kind, device))?);
        let shards = table.shards;
        let mut served = Self::new(world, mesh, table, engine, &zeros)?;
        if let Some(lora) = lora {
            let table = ParamTable::adapters(served.table.spec.clone(), &lora, shards);
            let units = table.units.iter().map(zeros).collect::<Result<_>>()?;
            served.adapters = Some(Adapters { lora, table, units });
        }
        Ok(served)
    }

    /// The same with adapters, in the kind of the units.
    pub fn with_adapters(mut self, files: &AdapterFiles) -> Result<Self> {
        let (lora, device) = (files.lora().clone(), self.world.device());
        let kind = self.units[0].f_kind()?;
        let table = ParamTable::adapters(self.table.spec.clone(), &lora, 1);
        let units = table.units.iter().map(|layout| Ok(files.read_unit(layout, kind)?.f_to_device(device)?));
        let units = units.collect::<Result<_>>()?;
        self.adapters = Some(Adapters { lora, table, units });
        Ok(self)
    }

    /// Runs `work` with the engine awake on every rank; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank, on every rank.
    pub fn with_engine<R>(&mut self, work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>) -> Result<R> {
        let outcome = self.awake(work);
        if let Err(error) = &outcome {
            self.world.post_failure(error);
        }
        self.world.agree(outcome)
    }

    /// The same, collective over the tensor-parallel group alone: an error is this rank's.
    pub(crate) fn awake<R>(&mut self, work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>) -> Result<R> {
        let (table, units) = (&self.table, &self.units);
        let unit = |unit: Unit| Ok(units[table.index(unit)].shallow_clone());
        let adapters = self.adapters.as_ref();
        let adapters = |layer| adapters.map_or_else(|| no_adapters(layer), |adapters| Ok(adapters.block(layer)));
        let weights = self.slices.of_units(table, 0, &mut { unit }, &adapters, &[])?;
        let mut rollout = phase::scope(Phase::Wake, || self.engine.wake(weights, 0))?;
        let value = phase::scope(Phase::Generate, || work(&mut rollout))?;
        phase::scope(Phase::Sleep, || {
            drop(rollout);
            Ok(value)
        })
    }

    /// The model's own units, to be written between uses.
    pub(crate) fn base_units(&self) -> impl Iterator<Item = Tensor> + '_ {
        self.units.iter().map(Tensor::shallow_clone)
    }

    /// Those of its adapters.
    pub(crate) fn adapter_units(&self) -> impl Iterator<Item = Tensor> + '_ {
        self.adapters.iter().flat_map(|adapters| &adapters.units).map(Tensor::shallow_clone)
    }

    /// Whether there are any.
    pub(crate) fn has_adapters(&self) -> bool {
        self.adapters.is_some()
    }

    /// The sleeping engine, for its sizes.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl Adapters {
    fn block(&self, layer: usize) -> BlockLora {
        let layout = self.table.unit(Unit::Block(layer));
        BlockLora::expand(&self.table.spec, &self.lora, layout, &self.units[layer], None)
    }
}
