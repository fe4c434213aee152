//! Models that only generate: an engine with its own weights, for `generate`, `eval`, benchmarks and ranks that only
//! sample. Independent of training.

mod generation;
mod load;
mod weights;

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use crate::console::units_progress;
use crate::error::Result;
use crate::memory::explain_out_of_memory;
use crate::model::{BlockLora, Format, LoraSpec, ModelSpec, ParamTable, Unit, UnitLayout};
use crate::ranks::World;
use crate::rollout::{Engine, EngineWeights, RolloutEngine};

pub use generation::SamplingDefaults;
pub use load::{EngineDivision, ModelService, NamedAdapter, ServeOptions};
pub use weights::EngineSlices;
use weights::no_adapters;

/// A model's weights, and an engine that reads them in place.
#[derive(Debug)]
pub struct Served {
    world: Arc<World>,
    slices: EngineSlices,
    table: Arc<ParamTable>,
    units: Vec<Tensor>, // [len] each, [0] of other stages
    adapters: Vec<ServedAdapters>,
    /// Whether each request chooses its adapters. If not, there is at most one set of adapters, which applies to all requests.
    are_chosen: bool,
    engine: Engine,
}

/// One set of adapters of a served model.
#[derive(Debug)]
struct ServedAdapters {
    lora: LoraSpec,
    table: ParamTable,
    units: Vec<Tensor>, // [len] each
}

impl Served {
    /// Loads all weights of this rank's pipeline stage from `source` to the world's device.
    ///
    /// # Errors
    /// The errors of `source`; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn new(
        world: Arc<World>,
        table: Arc<ParamTable>,
        engine: Engine,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<Self> {
        let (device, own) = (world.device(), engine.ranks().stage().units(&table.spec));
        let mut loaded = units_progress("weights", table.units.len());
        let mut load = |layout: &UnitLayout| {
            let unit = match own.contains(&layout.unit) {
                true => source(layout)?.f_to_device(device)?,
                false => Tensor::f_zeros([0], (engine.kind(), device))?, // of another stage
            };
            loaded();
            Ok(unit)
        };
        let units = table.units.iter().map(&mut load).collect::<Result<_>>()?;
        let slices = EngineSlices::in_place(engine.ranks());
        Ok(Self { world, slices, table, units, adapters: Vec::new(), are_chosen: false, engine })
    }

    /// The model's shape.
    pub(crate) fn spec(&self) -> &Arc<ModelSpec> {
        &self.table.spec
    }

    /// Allocates zeroed weights of data type `kind`, to be filled through `base_units` and `adapter_units`.
    ///
    /// # Errors
    /// The errors of [`Served::new`].
    pub fn unfilled(
        world: Arc<World>,
        table: Arc<ParamTable>,
        lora: Option<LoraSpec>,
        engine: Engine,
        kind: Kind,
    ) -> Result<Self> {
        let device = world.device();
        let zeros = |layout: &UnitLayout| Ok(Tensor::f_zeros([layout.len as i64], (kind, device))?);
        let adapters = lora.map(|lora| ServedAdapters::new(&table, lora, (device, engine.format()), &zeros));
        let adapters = adapters.into_iter().collect::<Result<_>>()?;
        Ok(Self { adapters, ..Self::new(world, table, engine, &zeros)? })
    }

    /// Adds adapters that apply to all requests. `source` reads their units in the data type of the model's weights.
    ///
    /// # Errors
    /// The errors of [`Served::new`].
    pub fn with_adapters(mut self, lora: LoraSpec, source: &dyn Fn(&UnitLayout) -> Result<Tensor>) -> Result<Self> {
        let device = self.world.device();
        let load = |layout: &UnitLayout| Ok(source(layout)?.f_to_device(device)?);
        self.adapters = vec![ServedAdapters::new(&self.table, lora, (device, self.engine.format()), &load)?];
        Ok(self)
    }

    /// Adds adapters that requests choose by index ([`Request::adapter`](crate::rollout::Request)), from 0 in the order of these calls.
    /// Requests without an index use the base model.
    ///
    /// # Errors
    /// The errors of [`Served::new`].
    pub fn with_choice(mut self, lora: LoraSpec, source: &dyn Fn(&UnitLayout) -> Result<Tensor>) -> Result<Self> {
        let device = self.world.device();
        let load = |layout: &UnitLayout| Ok(source(layout)?.f_to_device(device)?);
        self.adapters.push(ServedAdapters::new(&self.table, lora, (device, self.engine.format()), &load)?);
        self.are_chosen = true;
        Ok(self)
    }

    /// Runs `work` with the engine awake on every rank; collective over the world. If `work` panics, the panic continues after the engine sleeps.
    ///
    /// # Errors
    /// The first failure of any rank, on every rank.
    pub fn with_engine<R>(&mut self, work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>) -> Result<R> {
        let world = self.world.clone();
        world.scope("with_engine", self, |served| served.awake(work), |_| Ok(()), |_| ())
    }

    /// Like [`Served::with_engine`], but collective only over the tensor-parallel group: an error is this rank's own, and is reported to all ranks.
    /// An out-of-memory error lists the memory's users, which is not possible once the engine sleeps.
    pub(crate) fn awake<R>(&mut self, work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>) -> Result<R> {
        let Self { world, slices, table, units, adapters, are_chosen, engine } = self;
        let unit = |unit: Unit| Ok(units[table.index(unit)].shallow_clone());
        let num_adapters = if *are_chosen { adapters.len() } else { 0 };
        let adapters = |layer| match &adapters[..] {
            [] => no_adapters(layer),
            [shared] if num_adapters == 0 => shared.block(layer),
            all => BlockLora::stacked(&all.iter().map(|one| one.block(layer)).collect::<Result<Vec<_>>>()?),
        };
        let weights = slices.of_units(table, 0, &mut { unit }, &adapters, &[])?;
        let weights = EngineWeights { num_adapters, ..weights };
        let explained = |rollout: &mut RolloutEngine<'_>| work(rollout).map_err(explain_out_of_memory);
        engine.awake(weights, 0, |rollout| explained(rollout).inspect_err(|error| world.post_failure(error)))
    }

    /// The model's own units, to be written while the engine sleeps. A unit of another pipeline stage gets temporary memory while it is written.
    pub(crate) fn base_units(&self) -> impl Iterator<Item = Result<Tensor>> + '_ {
        self.units.iter().zip(&self.table.units).map(|(unit, layout)| match unit.numel() {
            0 => Ok(Tensor::f_zeros([layout.len as i64], (unit.kind(), unit.device()))?),
            _ => Ok(unit.shallow_clone()),
        })
    }

    /// The units of the adapters.
    pub(crate) fn adapter_units(&self) -> impl Iterator<Item = Tensor> + '_ {
        self.adapters.iter().flat_map(|adapters| &adapters.units).map(Tensor::shallow_clone)
    }

    /// Whether the model has adapters.
    pub(crate) fn has_adapters(&self) -> bool {
        !self.adapters.is_empty()
    }

    /// The sleeping engine, for its sizes and times.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The sleeping engine, for changes of its settings.
    pub(crate) fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl ServedAdapters {
    /// Loads a set of adapters for a model of `table`, with units from `source`, for GEMMs in the given format.
    fn new(
        table: &ParamTable,
        lora: LoraSpec,
        (device, format): (Device, &dyn Format),
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<Self> {
        let table = ParamTable::adapters(table.spec.clone(), &lora, table.shards);
        let units: Vec<Tensor> = table.units.iter().map(source).collect::<Result<_>>()?;
        if let Some(unit) = units.first().filter(|_| device.is_cuda()) {
            lora.check_gpu(&table.spec, unit.kind(), format)?;
        }
        Ok(Self { lora, table, units })
    }

    fn block(&self, layer: usize) -> Result<BlockLora> {
        let layout = self.table.unit(Unit::Block(layer));
        BlockLora::expand(&self.table.spec, &self.lora, layout, &self.units[layer], None)
    }
}
