//! The policy and the engine of a run on this rank, loaded as configured and planned, with one interface for colocated and split mode.

use std::path::Path;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::engine_memory::gathers;
use super::preflight::Preflight;
use super::teacher::Teacher;
use crate::checkpoint::Models;
use crate::colocate::Colocated;
use crate::config::{Config, Mode, OptimizerResidency, Quantization, ReferenceResidency, Roles};
use crate::console::pinning_progress;
use crate::cuda::residual_kind;
use crate::error::Result;
use crate::memory::HostPool;
use crate::model::{LoraSpec, ParamTable, Plain, UnitLayout, WeightFiles};
use crate::phase;
use crate::plan::engine_options;
use crate::ranks::{Mesh, World};
use crate::rollout::{DraftCounts, Engine, EngineRanks, RolloutEngine, StageTimes};
use crate::serve::{EngineSlices, Served};
use crate::split::{Split, SplitRank, Updated};
use crate::train::{
    AdamOptions, GradientOptions, NetworkOptions, Optim, OptimizerHome, Policy, PolicyOptions, PolicyStart, Reference,
    Sequence, TrainedModel, reference_bytes,
};
use crate::update::{Divergence, Learner, UpdateOptions, UpdateProgress};

/// The policy and the engine, on the same ranks or on separate ones.
#[derive(Debug)]
pub(super) enum PolicyAndEngine {
    /// Every rank has both and alternates between them.
    Colocated(Box<Colocated>),
    /// This rank has one of the two.
    Split(Split),
}

impl PolicyAndEngine {
    /// Loads what this rank needs from `sources`; collective over the world.
    pub(super) fn load(
        config: &Config,
        world: &Arc<World>,
        preflight: &Preflight,
        sources: &WeightSources<'_>,
    ) -> Result<Self> {
        let (table, kind) = (&preflight.table, preflight.kind);
        if config.mode == Mode::Colocated {
            let mesh = world.mesh(config.engine_shape(), table.shards)?;
            let mesh = mesh.with_sequence_groups(world, world.size(), config.num_sharers())?;
            let learner = learner(config, world, &mesh, preflight, sources)?;
            let engine = engine(config, world, &mesh, preflight)?;
            let slices = slices(config, world, &engine, preflight)?;
            return Ok(Self::Colocated(Box::new(Colocated::new(learner, engine, slices))));
        }
        let Roles { num_trainers, num_generators } = preflight.batch.roles;
        let mesh = world.split_mesh(num_generators, config.engine_shape(), table.shards)?;
        let mesh = mesh.with_sequence_groups(world, num_trainers, config.num_sharers())?;
        let role = if world.rank() < num_trainers {
            SplitRank::Trains(Box::new(learner(config, world, &mesh, preflight, sources)?))
        } else {
            let (engine, lora) = (engine(config, world, &mesh, preflight)?, LoraSpec::new(&config.lora));
            let served = Served::unfilled(world.clone(), table.clone(), lora, engine, kind)?;
            SplitRank::Generates(Box::new(served))
        };
        Ok(Self::Split(Split::new(world.clone(), num_trainers, role)))
    }

    /// Runs `work` with the engines awake; a rank without an engine returns `R`'s default. Collective.
    pub(super) fn with_rollout<R: Default>(
        &mut self,
        work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>,
    ) -> Result<R> {
        match self {
            Self::Colocated(colocated) => colocated.with_rollout(work),
            Self::Split(split) => split.with_rollout(work),
        }
    }

    /// Trains on the whole batch, of which `sequences` are this rank's part. Engines that have no other work run `beside` meanwhile. Collective.
    pub(super) fn update<R: Default>(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
        beside: Option<impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>>,
    ) -> Result<Updated<R>> {
        match self {
            Self::Colocated(colocated) => Ok(Updated::alone(colocated.update(sequences, options, progress)?)),
            Self::Split(split) => split.update(sequences, options, progress, beside),
        }
    }

    /// KL divergences of this rank's `sequences` from the reference model. Collective.
    pub(super) fn divergences(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
    ) -> Result<Vec<Divergence>> {
        match self {
            Self::Colocated(colocated) => colocated.divergences(sequences, options, progress),
            Self::Split(split) => split.divergences(sequences, options, progress),
        }
    }

    /// How long this rank's pipeline stage computed and waited since the last call; `None` with a single stage.
    pub(super) fn take_stage_times(&self) -> Option<StageTimes> {
        self.engine().map(Engine::take_stage_times).filter(|times| *times != StageTimes::default())
    }

    /// Draft token counts of this rank's engine since the last call, if it has one.
    pub(super) fn take_draft_counts(&self) -> Option<DraftCounts> {
        self.engine().map(Engine::take_draft_counts)
    }

    fn engine(&self) -> Option<&Engine> {
        match self {
            Self::Colocated(colocated) => Some(colocated.engine()),
            Self::Split(split) => split.engine(),
        }
    }

    /// The sleeping engine, for changes between steps, on a rank that has one.
    pub(super) fn engine_mut(&mut self) -> Option<&mut Engine> {
        match self {
            Self::Colocated(colocated) => Some(colocated.engine_mut()),
            Self::Split(split) => split.engine_mut(),
        }
    }

    /// The learner, on a rank that trains.
    fn learner(&self) -> Option<&Learner> {
        match self {
            Self::Colocated(colocated) => Some(colocated.learner()),
            Self::Split(split) => split.learner(),
        }
    }

    /// The policy, on a rank that trains.
    pub(super) fn policy(&self) -> Option<&Policy> {
        self.learner().map(Learner::policy)
    }

    /// The models to save in a checkpoint, on a rank that trains. The reference model is included if it follows the policy.
    pub(super) fn saved_models(&self, reference_moves: bool) -> Option<Models<'_>> {
        let learner = self.learner()?;
        Some(Models { policy: learner.policy(), reference: learner.reference().filter(|_| reference_moves) })
    }

    /// Mutable access to the policy, for loading, on a rank that trains.
    pub(super) fn policy_mut(&mut self) -> Option<&mut Policy> {
        match self {
            Self::Colocated(colocated) => Some(colocated.policy_mut()),
            Self::Split(split) => split.learner_mut().map(Learner::policy_mut),
        }
    }
}

/// The initial weights of a run, as whole units.
pub(super) struct WeightSources<'a> {
    pub policy: &'a dyn Fn(&UnitLayout) -> Result<Tensor>,
    pub reference: &'a dyn Fn(&UnitLayout) -> Result<Tensor>,
    /// A folder of adapters to continue from.
    pub adapters: Option<&'a Path>,
}

/// Loads the policy, the reference model and the teacher.
fn learner(
    config: &Config,
    world: &Arc<World>,
    mesh: &Mesh,
    preflight: &Preflight,
    &WeightSources { policy: weights, reference: of_reference, adapters }: &WeightSources<'_>,
) -> Result<Learner> {
    let Preflight { table, plan, .. } = preflight;
    let (kind, device) = (preflight.kind, world.device());
    let (residual, format) = (residual_kind(config.model.residual_dtype, kind), config.training_format());
    let network = NetworkOptions { kind, residual, device, format };
    let options = PolicyOptions {
        stage: config.zero.stage,
        network,
        gradient_checkpointing: plan.gradient_checkpointing,
        optim: Optim::new(config.optimizer.optim, &config.optimizer.muon),
        adam: AdamOptions::new(&config.optimizer),
        gradients: GradientOptions::new(config.zero.grad_accum_dtype, config.zero.reduce_dtype),
    };
    let pool = |name, bytes| HostPool::new(name, bytes, device, &mut pinning_progress());
    let lora = LoraSpec::new(&config.lora);
    let optimizer_bytes = TrainedModel::of(config, table, kind).bytes().optimizer;
    let home = match plan.optimizer {
        OptimizerResidency::Swap => OptimizerHome::Swap(pool("optimizer_host", optimizer_bytes)?),
        OptimizerResidency::Stream => OptimizerHome::Stream(pool("optimizer_host", optimizer_bytes)?),
        OptimizerResidency::Resident => OptimizerHome::Resident,
    };
    let keeps_initial = config.keeps_initial_adapters();
    let start = PolicyStart { lora, quantization: config.quantization, seed: config.seed, adapters, keeps_initial };
    let mut policy = Policy::start(table.clone(), mesh, options, home, weights, start)?;
    if let bytes @ 1.. = plan.offloaded_bytes() {
        policy = policy.with_activation_offload(pool("activations_host", bytes)?);
    }
    let frozen_pool = |name, table: &ParamTable| match plan.reference {
        ReferenceResidency::Host => pool(name, reference_bytes(table, kind)).map(Some),
        ReferenceResidency::Resident => Ok(None),
    };
    let mut reference = None;
    if config.has_reference() {
        let pool = frozen_pool("reference_host", table)?;
        reference = Some(Reference::load("reference_weights", table.clone(), mesh, network, pool, of_reference)?);
    }
    let mut teacher = None;
    if let Some(Teacher { folder, table }) = &preflight.teacher {
        let files = WeightFiles::open(folder, table.spec.clone())?;
        let (pool, source) = (frozen_pool("teacher_host", table)?, |layout: &UnitLayout| read_unit(&files, layout));
        let network = NetworkOptions { format: &Plain, ..network };
        let loaded = Reference::load("teacher_weights", table.clone(), mesh, network, pool, &source)?;
        teacher = Some(loaded.scoring_top(config.distillation.num_top().unwrap_or(0)));
    }
    Ok(Learner::new(world.clone(), mesh.clone(), policy, reference).with_teacher(teacher))
}

/// Reads a whole unit from a model's files.
pub(super) fn read_unit(files: &WeightFiles, layout: &UnitLayout) -> Result<Tensor> {
    phase::beat();
    files.read_unit(layout, Kind::Float)
}

fn engine(config: &Config, world: &World, mesh: &Mesh, preflight: &Preflight) -> Result<Engine> {
    let plan = preflight.plan_of(world.rank());
    let (max_model_length, kv_cache_bytes) = (plan.max_model_length, plan.kv_cache_bytes);
    let options = engine_options(config, max_model_length, kv_cache_bytes, preflight.kind, world.device());
    let ranks = EngineRanks::new(mesh, preflight.stages.clone());
    let engine = Engine::in_stages(preflight.spec.clone(), preflight.tokenizer.clone(), options, ranks)?;
    Ok(match config.mode {
        Mode::Split if config.updates_in_flight(world.device().is_cuda()) => engine.keeping_sequences(),
        Mode::Split => engine.keeping_memory(),
        Mode::Colocated if config.keeps_kv_cache() => engine.keeping_sequences(),
        Mode::Colocated => engine,
    })
}

fn slices(config: &Config, world: &World, engine: &Engine, preflight: &Preflight) -> Result<EngineSlices> {
    let Preflight { table, kind, .. } = preflight;
    let (ranks, device) = (engine.ranks(), world.device());
    match (gathers(config, table), config.quantization) {
        (true, _) => EngineSlices::gathered(table, ranks, *kind, device),
        (false, Quantization::None) => Ok(EngineSlices::in_place(ranks)),
        (false, _) => EngineSlices::dequantized(table, ranks, *kind, device),
    }
}
