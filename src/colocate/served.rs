//! A model that only generates: the engine with weights of its own, for `generate`, `eval` and benchmarks.

use std::sync::Arc;

use tch::Tensor;

use super::weights::EngineSlices;
use crate::dist::{Mesh, World};
use crate::error::Result;
use crate::model::{ParamTable, Unit, UnitLayout};
use crate::rollout::{Engine, RolloutEngine};

/// Whole weights and an engine that reads them in place.
#[derive(Debug)]
pub struct Served {
    world: Arc<World>,
    slices: EngineSlices,
    table: Arc<ParamTable>,
    units: Vec<Tensor>, // [len] each
    engine: Engine,
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
        Ok(Self { world, slices, table, units, engine })
    }

    /// Runs `work` with the engine awake on every rank; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank, on every rank.
    pub fn with_engine<R>(&mut self, work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>) -> Result<R> {
        let (table, units) = (&self.table, &self.units);
        let unit = |unit: Unit| Ok(units[table.index(unit)].shallow_clone());
        let weights = self.slices.of_units(table, 0, &mut { unit });
        let outcome = weights.and_then(|weights| work(&mut self.engine.wake(weights, 0)?));
        if let Err(error) = &outcome {
            self.world.post_failure(error);
        }
        self.world.agree(outcome)
    }

    /// The sleeping engine, for its sizes.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}
