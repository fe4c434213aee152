//! Checks and plans a run before any process starts.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use tch::Kind;

use super::engine_memory::{StagePlan, engine_weight_bytes};
use super::teacher::Teacher;
use crate::config::{BatchPlan, Circumstance, Combination, Config, Mode, Roles, Speculation, WorldSize};
use crate::cuda::Placement;
use crate::data::{Hub, Tokenizer};
use crate::error::{Error, Result};
use crate::model::{LoraSpec, ModelSource, ModelSpec, ParamTable, Stages, Use};
use crate::plan::{MemoryPlan, PlanInput, Role, Room};
use crate::rollout::fullest_stage;

/// The model of a run, without its weights.
#[derive(Debug, Clone)]
pub(super) struct OpenModel {
    pub spec: Arc<ModelSpec>,
    pub tokenizer: Arc<Tokenizer>,
    pub has_adapters: bool,
}

/// A function that makes a plan. Its second argument returns the bytes of gathered weights for other configurations.
pub(super) type MakePlan<'a> = dyn Fn(&PlanInput<'_>, &dyn Fn(&Config) -> Result<usize>) -> Result<MemoryPlan> + 'a;

/// Everything about a run that is known without reading its data. The launcher checks it before any process starts.
#[derive(Debug)]
pub struct Preflight {
    /// How a generation batch is distributed over ranks.
    pub batch: BatchPlan,
    /// The model.
    pub spec: Arc<ModelSpec>,
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// The layout of the model's weights.
    pub table: Arc<ParamTable>,
    /// The layers of each pipeline stage of an engine.
    pub stages: Stages,
    /// The memory of each pipeline stage, if there are several.
    pub(super) stage_plans: Vec<StagePlan>,
    /// The teacher model that scores the samples, if any.
    pub teacher: Option<Teacher>,
    /// Dtype of weights and activations.
    pub kind: Kind,
    /// The memory plan of each rank; in split mode, of each rank that trains.
    pub plan: MemoryPlan,
    /// The memory plan of each rank that generates, in split mode.
    pub engine_plan: Option<MemoryPlan>,
    /// Why this number of ranks shares micro-batches, if `sequence_parallel_size = auto`.
    pub(super) why_shared: Option<String>,
}

impl Preflight {
    /// Checks a run of `world_size` ranks with a model that is already read, at `placement`, within the memory of `room`.
    pub(super) fn of_model(
        config: &Config,
        model: OpenModel,
        placement: Placement,
        world_size: WorldSize,
        room: Room,
    ) -> Result<Self> {
        Self::planned(config, model, placement, world_size, room, &MemoryPlan::new)
    }

    /// Checks and plans a run with the configured `sequence_parallel_size`, by the function `plan`.
    pub(super) fn of_size(
        config: &Config,
        model: OpenModel,
        placement: Placement,
        world_size: WorldSize,
        room: Room,
        plan: &MakePlan<'_>,
    ) -> Result<Self> {
        let OpenModel { spec, tokenizer, has_adapters: starts_from_adapters } = model;
        let kind = placement.kind;
        let batch = config.validate_world(world_size.ranks)?;
        let BatchPlan { roles: Roles { num_trainers, num_generators }, .. } = batch;
        let found = [
            world_size.check_engines(world_size.ranks - num_generators, config.engine_shape()),
            combination(config, &spec, placement, world_size).check(),
            config.validate_context(spec.max_position_embeddings),
            spec.validate_tp(config.tensor_parallel_size),
            world_size.check_sequence_groups(num_trainers, config.num_sharers()),
            spec.validate_sequence_parallel(config.num_sharers()),
        ];
        Error::of_all(found.into_iter().filter_map(Result::err).collect()).map_or(Ok(()), Err)?;
        let stages = Stages::new(&spec, config.pipeline_parallel_size, config.stage_sizes())?;
        let engine_layers = fullest_stage(&spec, &stages);
        config.quantization.format().map_or(Ok(()), |format| format.check(&spec))?;
        let (on_cuda, tp_size) = (placement.on_cuda, config.tensor_parallel_size);
        config.rollout_quantization.format().check(Use::Engine { tp_size }, &spec, on_cuda)?;
        config.model.mixed_precision.format().check(Use::Training, &spec, on_cuda)?;
        if let Some(lora) = LoraSpec::new(&config.lora) {
            lora.check(&spec)?;
            if placement.on_cuda {
                lora.check_gpu(&spec, placement.kind, config.training_format())?;
            }
        }
        let shards = config.zero.shard_group(num_trainers, world_size.local_ranks);
        let table = Arc::new(ParamTable::new(spec.clone(), shards));
        let teacher = Teacher::open(config, &tokenizer, shards)?;
        if let Some(teacher) = &teacher {
            validate_gpu(&teacher.table.spec, placement, None, &teacher.folder)?;
            teacher.table.spec.validate_sequence_parallel(config.num_sharers())?;
        }
        if config.teaches_itself() {
            Teacher::check_top(config, spec.vocab_size)?;
        }
        let engine_weights = |config: &Config| engine_weight_bytes(config, &table, &stages, kind);
        let engine_weight_bytes = engine_weights(config)?;
        let generator_params = stages.iter().map(|stage| table.elements_of(&stage.units(&spec))).max().unwrap_or(0);
        let plan_of = |role| {
            let teacher = teacher.as_ref().map(|teacher| &*teacher.table);
            let input = PlanInput {
                config,
                table: &table,
                teacher,
                kind,
                role,
                batch,
                world_size,
                engine_layers: &engine_layers,
                engine_weight_bytes,
                generator_params,
                starts_from_adapters,
                room,
            };
            plan(&input, &engine_weights)
        };
        let (plan, engine_plan) = match config.mode {
            Mode::Colocated => (plan_of(Role::Both)?, None),
            Mode::Split => (plan_of(Role::Trains)?, Some(plan_of(Role::Generates)?)),
        };
        teacher.as_ref().map_or(Ok(()), |teacher| teacher.check_context(plan.max_model_length))?;
        let stage_plans: Vec<StagePlan> = match stages.count() {
            1 => Vec::new(),
            _ => stages
                .iter()
                .map(|stage| StagePlan::new(stage, config, &table, kind, engine_plan.as_ref().unwrap_or(&plan)))
                .collect::<Result<_>>()?,
        };
        Ok(Self {
            batch,
            spec,
            tokenizer,
            table,
            stages,
            stage_plans,
            teacher,
            kind,
            plan,
            engine_plan,
            why_shared: None,
        })
    }

    /// The memory plan of a rank.
    pub fn plan_of(&self, rank: usize) -> &MemoryPlan {
        let of_engine = self.engine_plan.as_ref().filter(|_| rank >= self.batch.roles.num_trainers);
        of_engine.unwrap_or(&self.plan)
    }
}

impl fmt::Display for Preflight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.plan)?;
        self.engine_plan.as_ref().map_or(Ok(()), |plan| write!(f, "\n{plan}"))?;
        self.stage_plans.iter().try_for_each(|stage| write!(f, "\n{stage}"))?;
        self.why_shared.iter().try_for_each(|why| write!(f, "\n{why}"))
    }
}

/// The run's configuration with its model, device and nodes, for the table of features that exclude each other.
pub(super) fn combination(
    config: &Config,
    spec: &ModelSpec,
    placement: Placement,
    world_size: WorldSize,
) -> Combination {
    let nodes = (world_size.ranks > world_size.local_ranks).then_some(Circumstance::SeveralNodes);
    config.combination().with(placement.settings()).in_circumstances(spec.circumstances().chain(nodes))
}

/// Refuses a model shape that no GPU kernel supports, for training and, if its engine has `tp_size` ranks, for generation.
pub(super) fn validate_gpu(
    spec: &ModelSpec,
    placement: Placement,
    tp_size: Option<usize>,
    folder: &Path,
) -> Result<()> {
    if !placement.on_cuda {
        return Ok(());
    }
    spec.validate_gpu(placement.kind, tp_size, folder)
}

/// Reads the configured model, without weights.
pub(super) fn open_model(config: &Config, placement: Placement) -> Result<OpenModel> {
    let ModelSource { base: folder, adapters } = source(config)?;
    let spec = ModelSpec::from_folder(&folder)?.with_expert_parallel(config.enable_expert_parallel)?;
    let spec = Arc::new(if config.speculation == Speculation::Mtp { spec.with_draft_head() } else { spec });
    let tokenizer = Tokenizer::from_folder(&folder)?.with_template_variables(&config.data.chat_template_kwargs.0)?;
    tokenizer.check_against(spec.vocab_size, &spec.eos_token_ids)?;
    validate_gpu(&spec, placement, Some(config.tensor_parallel_size), &folder)?;
    Ok(OpenModel { spec, tokenizer: Arc::new(tokenizer), has_adapters: adapters.is_some() })
}

/// The model's folders; those of a Hub repository must be in the cache.
pub(super) fn source(config: &Config) -> Result<ModelSource> {
    ModelSource::find(&config.model.model_name_or_path, config.model.model_revision.as_deref(), None, &Hub::cached())
}
