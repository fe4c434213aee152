//! Loads a trainer: everything is read and checked before anything is trained.

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::ahead;
use super::build::{self, read_unit};
use super::builder::Functions;
use super::curriculum::RowsById;
use super::model::PolicyAndEngine;
use super::output::RunOutput;
use super::rows::TrainingRows;
use super::sampling;
use super::scores::Unscored;
use super::signal::{self, Signal};
use super::teacher::Teacher;
use super::turns;
use super::{Trainer, TrainingProgress};
use crate::checkpoint::{self, CarriedGroup, Checkpoint, CheckpointOptions, Claim, ResumeOptions, Saver, TrainerState};
use crate::config::{BatchPlan, Config, Mode, OptimizerName, Quantization, Roles, RolloutQuantization, WorldSize};
use crate::cuda::{Placement, chip_flop_per_s};
use crate::data::{Curriculum, Dataset, Hub, PromptSampler, Tokenizer};
use crate::dist::{ReduceOp, World, all_reduce_f64};
use crate::error::{Error, Result};
use crate::grpo::{EntropyControl, LossConfig};
use crate::memory;
use crate::model::{
    BlockMatrix, LoraSpec, ModelSource, ModelSpec, ParamTable, QuantizedBlock, UnitLayout, WeightFiles,
};
use crate::phase;
use crate::plan::{MemoryPlan, PlanInput, Role, Room};
use crate::reward::RewardPool;
use crate::rollout::check_fp8;
use crate::serve::EngineSlices;
use crate::tools::ToolProcess;
use crate::torch;
use crate::train::Schedule;
use crate::types::LengthSpread;

/// Everything about a run that is known without touching its data: checked by the launcher before any process starts.
#[derive(Debug)]
pub struct Preflight {
    /// How a generation batch is spread.
    pub batch: BatchPlan,
    /// The model.
    pub spec: Arc<ModelSpec>,
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// The layout of its weights.
    pub table: Arc<ParamTable>,
    /// A model that scores the samples.
    pub teacher: Option<Teacher>,
    /// Type of weights and activations.
    pub kind: Kind,
    /// The memory plan of each rank; in split mode of each rank that trains.
    pub plan: MemoryPlan,
    /// The memory plan of each rank that generates, in split mode.
    pub engine_plan: Option<MemoryPlan>,
}

impl Preflight {
    /// Checks a run of as many ranks as `world_size` says that computes at `placement` in the memory of `room`.
    ///
    /// # Errors
    /// What is wrong with the configuration, the model's folder or the machine.
    pub fn new(config: &Config, placement: Placement, world_size: WorldSize, room: Room) -> Result<Self> {
        config.validate_world(world_size.ranks)?;
        let model @ (spec, tokenizer, _) = &open_model(config, placement)?;
        config.validate_context(spec.max_position_embeddings)?;
        // The longest prompt is that of the rows where the configuration gives no limit.
        let rows = match config.max_prompt_length {
            None => {
                let tools = ToolProcess::start(config)?;
                Some(TrainingRows::read(config, tokenizer, spec, (Vec::new(), tools.as_ref()))?)
            }
            Some(_) => None,
        };
        let planned = rows.map_or_else(|| config.clone(), |rows| rows.planned(config));
        Self::of_model(&planned, model.clone(), placement, world_size, room)
    }

    /// Checks a run whose rows are not there yet: without `max_prompt_length` prompts may be as long as the context.
    ///
    /// # Errors
    /// The errors of [`Preflight::new`].
    pub fn without_rows(config: &Config, placement: Placement, world_size: WorldSize, room: Room) -> Result<Self> {
        Self::of_model(config, open_model(config, placement)?, placement, world_size, room)
    }

    /// Checks a run of a model's shape alone, whose tokens are numbers.
    ///
    /// # Errors
    /// The errors of [`Preflight::new`].
    pub fn of_shape(
        config: &Config,
        spec: Arc<ModelSpec>,
        placement: Placement,
        world_size: WorldSize,
        room: Room,
    ) -> Result<Self> {
        let spec = Arc::new((*spec).clone().with_expert_parallel(config.enable_expert_parallel)?);
        let tokenizer = Arc::new(Tokenizer::of_ids(spec.vocab_size)?);
        validate_gpu(&spec, placement, Some(config.tensor_parallel_size), Path::new(""))?;
        Self::of_model(config, (spec, tokenizer, false), placement, world_size, room)
    }

    /// Checks a run of a model that is already read.
    pub(super) fn of_model(
        config: &Config,
        (spec, tokenizer, starts_from_adapters): (Arc<ModelSpec>, Arc<Tokenizer>, bool),
        placement: Placement,
        world_size: WorldSize,
        room: Room,
    ) -> Result<Self> {
        let kind = placement.kind;
        let batch = config.validate_world(world_size.ranks)?;
        let BatchPlan { roles: Roles { num_trainers, num_generators }, .. } = batch;
        world_size.check_engines(world_size.ranks - num_generators, config.tensor_parallel_size)?;
        config.validate_context(spec.max_position_embeddings)?;
        spec.validate_tp(config.tensor_parallel_size)?;
        if config.quantization == Quantization::Nf4 {
            QuantizedBlock::check(&spec)?;
        }
        if config.rollout_quantization == RolloutQuantization::Fp8 {
            check_fp8(&spec, kind, placement.on_cuda, config.tensor_parallel_size)?;
        }
        spec.router_aux_loss_coef(config.objective.router_aux_loss_coef)?;
        if let Some(lora) = LoraSpec::new(&config.lora) {
            lora.check(&spec)?;
            if placement.on_cuda {
                lora.check_gpu(&spec, placement.kind)?;
            }
        }
        if config.optimizer.optim == OptimizerName::Muon {
            BlockMatrix::check(&spec)?;
        }
        let shards = config.zero.shard_group(num_trainers, world_size.local_ranks);
        let table = Arc::new(ParamTable::new(spec.clone(), shards));
        let teacher = Teacher::open(config, &tokenizer, shards)?;
        if let Some(teacher) = &teacher {
            validate_gpu(&teacher.table.spec, placement, None, &teacher.folder)?;
        }
        let engine_weights = |config: &Config| engine_weight_bytes(config, &table, kind);
        let engine_weight_bytes = engine_weights(config)?;
        let plan_of = |role| {
            let teacher = teacher.as_ref().map(|teacher| &*teacher.table);
            let input = PlanInput {
                config,
                table: &table,
                teacher,
                kind,
                role,
                batch,
                engine_weight_bytes,
                starts_from_adapters,
                room,
            };
            MemoryPlan::new(&input, &engine_weights)
        };
        let (plan, engine_plan) = match config.mode {
            Mode::Colocated => (plan_of(Role::Both)?, None),
            Mode::Split => (plan_of(Role::Trains)?, Some(plan_of(Role::Generates)?)),
        };
        teacher.as_ref().map_or(Ok(()), |teacher| teacher.check_context(plan.max_model_length))?;
        Ok(Self { batch, spec, tokenizer, table, teacher, kind, plan, engine_plan })
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
        self.engine_plan.as_ref().map_or(Ok(()), |plan| write!(f, "\n{plan}"))
    }
}

/// Refuses a shape that no kernel serves on GPUs: of a model that trains, and where its engine has `tp_size` ranks also generates.
fn validate_gpu(spec: &ModelSpec, placement: Placement, tp_size: Option<usize>, folder: &Path) -> Result<()> {
    if !placement.on_cuda {
        return Ok(());
    }
    spec.validate_gpu(placement.kind, folder)?;
    tp_size.map_or(Ok(()), |tp_size| spec.validate_gpu_engine(placement.kind, tp_size, folder))
}

/// The shape and the tokenizer of the model that the configuration names, and whether it comes with adapters.
fn open_model(config: &Config, placement: Placement) -> Result<(Arc<ModelSpec>, Arc<Tokenizer>, bool)> {
    let ModelSource { base: folder, adapters } = source(config)?;
    let spec = Arc::new(ModelSpec::from_folder(&folder)?.with_expert_parallel(config.enable_expert_parallel)?);
    let tokenizer = Tokenizer::from_folder(&folder)?.with_template_variables(&config.data.chat_template_kwargs.0)?;
    tokenizer.check_against(spec.vocab_size, &spec.eos_token_ids)?;
    validate_gpu(&spec, placement, Some(config.tensor_parallel_size), &folder)?;
    Ok((spec, Arc::new(tokenizer), adapters.is_some()))
}

/// The model's folders, of a repository those in the cache.
fn source(config: &Config) -> Result<ModelSource> {
    ModelSource::find(&config.model_name_or_path, config.model_revision.as_deref(), None, &Hub::cached())
}

/// The memory that every rank has at least, so that all make the same plan; collective over the world.
pub(super) fn common_room(placement: Placement, world: &World) -> Result<Room> {
    let Room { available_bytes, swap_bytes } = Room::available(placement, world.local_size())?;
    let mut least = [available_bytes as f64, swap_bytes.unwrap_or(0) as f64]; // exact below 2^53 bytes
    all_reduce_f64(&*world.group(), &mut least, ReduceOp::Min)?;
    let [available_bytes, common_swap_bytes] = least.map(|bytes| bytes as usize);
    Ok(Room { available_bytes, swap_bytes: swap_bytes.map(|_| common_swap_bytes) })
}

/// Whether the engine needs gathered slices: weights are sharded, which quantised ones and those of an engine's own never are.
pub(super) fn gathers(config: &Config, table: &ParamTable) -> bool {
    let in_place = config.zero.stage < 3 || table.shards == 1 || config.mode == Mode::Split;
    !in_place && config.quantization == Quantization::None
}

/// Bytes that the engine's own weights take on each rank.
fn engine_weight_bytes(config: &Config, table: &ParamTable, kind: Kind) -> Result<usize> {
    match (gathers(config, table), config.quantization) {
        (true, _) => EngineSlices::gathered_bytes(table, 0, config.tensor_parallel_size, kind),
        (false, Quantization::Nf4) => Ok(EngineSlices::dequantized_bytes(table, kind)),
        (false, Quantization::None) => Ok(0),
    }
}

/// The parts of a trainer beside its configuration.
pub(super) struct TrainerParts<'a> {
    pub preflight: Preflight,
    /// Whole units of the initial weights.
    pub weights: &'a dyn Fn(&UnitLayout) -> Result<Tensor>,
    pub rewards: RewardPool,
    /// The tools of a run that has some.
    pub tools: Option<ToolProcess>,
    pub rows: TrainingRows,
    pub source: ModelSource,
    pub checkpoint: Option<Checkpoint>,
    pub claim: Option<Claim>,
    /// Whether metrics, checkpoints and the report are kept.
    pub writes_files: bool,
    /// Lengths of completions of random weights.
    pub spread_lengths: Option<LengthSpread>,
}

/// Arms the injected fault, if there is one: in the first attempt of a run alone, so that a restart gets past it.
pub(super) fn arm_fault(config: &Config, world: &World) {
    let fault = config.fault.as_ref().filter(|_| world.attempt() == 0).and_then(|fault| fault.parse().ok());
    let device = world.device();
    phase::on_fill(move |left_bytes| memory::fill(device, left_bytes));
    phase::arm_fault(fault, world.rank());
}

/// Loads everything; collective over the world.
pub(super) fn load(
    config: Config,
    (rewards, tools): (RewardPool, Option<ToolProcess>),
    world: Arc<World>,
    checkpoint: Option<Checkpoint>,
    claim: Option<Claim>,
) -> Result<Trainer> {
    torch::set_deterministic(config.full_determinism)?;
    let placement = Placement::in_world(config.device, config.dtype, world.device())?;
    let room = common_room(placement, &world)?;
    let model @ (spec, tokenizer, _) = &open_model(&config, placement)?;
    config.validate_world(world.size())?;
    config.validate_context(spec.max_position_embeddings)?;
    let rows = TrainingRows::read(&config, tokenizer, spec, (rewards.required_columns(), tools.as_ref()))?;
    let preflight = Preflight::of_model(&rows.planned(&config), model.clone(), placement, world.world_size(), room)?;
    rows.check_batch(&config, &preflight.batch)?;
    rows.say_unreadable(&rewards, &world)?;
    let source = source(&config)?;
    let files = WeightFiles::open(&source.base, preflight.spec.clone())?;
    let weights = |layout: &UnitLayout| read_unit(&files, layout);
    let parts = TrainerParts {
        preflight,
        weights: &weights,
        rewards,
        tools,
        rows,
        source,
        checkpoint,
        claim,
        writes_files: true,
        spread_lengths: None,
    };
    assemble(config, world, parts)
}

/// The reference model of a checkpoint, where it follows the policy.
fn mixed_reference(
    config: &Config,
    spec: &Arc<ModelSpec>,
    checkpoint: Option<&Checkpoint>,
) -> Result<Option<WeightFiles>> {
    let folder = checkpoint.filter(|_| config.objective.sync_ref_model).and_then(Checkpoint::reference);
    folder.map(|folder| WeightFiles::open(&folder, spec.clone())).transpose()
}

/// Collective over the world.
pub(super) fn assemble(config: Config, world: Arc<World>, parts: TrainerParts<'_>) -> Result<Trainer> {
    let TrainerParts {
        preflight,
        weights,
        rewards,
        tools,
        rows,
        source,
        checkpoint,
        claim,
        writes_files,
        spread_lengths,
    } = parts;
    let batch = preflight.batch;
    let description = rows.description();
    let TrainingRows { train: dataset, eval: eval_set, options, .. } = rows;
    let mixed = mixed_reference(&config, &preflight.spec, checkpoint.as_ref())?;
    let of_reference =
        |layout: &UnitLayout| mixed.as_ref().map_or_else(|| weights(layout), |files| read_unit(files, layout));
    let sources =
        build::WeightSources { policy: weights, reference: &of_reference, adapters: source.adapters.as_deref() };
    let mut model = build::model(&config, &world, &preflight, &sources, spread_lengths)?;
    let engines = signal::engines(&config, &world, batch.roles.num_generators)?;
    let engine_group = ahead::engine_group(&config, &world, batch.roles.num_generators)?;
    let turns = turns::open(&config, &world, &preflight, tools.map(|tools| (tools, options)))?;
    let sampler = PromptSampler::new(dataset.len(), config.seed, config.shuffle_dataset);
    let mut sampler = sampler.with_curriculum(Curriculum::new(&config.curriculum));
    if config.dataloader_drop_last {
        sampler = sampler.dropping_last(batch.num_prompts);
    }
    let updates = config.updates_in_epochs(&batch, dataset.len());
    let schedule = Schedule::new(config.learning_rate, &config.optimizer, updates);
    let restored = |checkpoint: &Checkpoint| restore(checkpoint, &config, &dataset, &mut model, &mut sampler);
    let begun =
        || (TrainingProgress { entropy_control: entropy_control(&config), ..TrainingProgress::default() }, Vec::new());
    let (progress, carried) = checkpoint.as_ref().map_or_else(|| Ok(begun()), restored)?;
    let saver = Saver::new(CheckpointOptions {
        output_dir: config.output_dir.clone(),
        base_dir: source.base,
        save_total_limit: config.save_total_limit,
        save_async: config.save_async,
        on_each_node: config.save_on_each_node,
    });
    if writes_files {
        checkpoint::check_room(
            saver.options(),
            &world,
            model.saved_models(config.objective.sync_ref_model),
            config.save_steps.is_some(),
        )?;
    }
    let num_dropped = checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.state.carried.len()) - carried.len();
    let max_steps = schedule.total_steps as u64;
    let files = (writes_files, &preflight.tokenizer);
    let output = RunOutput::new(&config, &world, max_steps, checkpoint.as_ref(), files)?;
    output.say(&format!("plan\n{preflight}"));
    if num_dropped > 0 {
        output.say(&format!("{num_dropped} unfinished groups of the checkpoint are dropped: oversample is 0"));
    }
    description.iter().for_each(|line| output.say(line));
    let plan = preflight.plan_of(world.rank()).clone();
    let rows_by_id = RowsById::new(&config, &dataset);
    let chip_flop_per_s = chip_flop_per_s(world.device(), preflight.kind)?;
    Ok(Trainer {
        config,
        world,
        chip_flop_per_s,
        batch,
        plan,
        model,
        rewards,
        dataset,
        rows_by_id,
        sampler,
        carried,
        carried_by: Vec::new(),
        eval_set,
        schedule,
        output,
        saver,
        claim,
        saved_step: progress.global_step,
        previous_step: progress.global_step,
        progress,
        ahead: VecDeque::new(),
        drawn: None,
        unscored: Unscored::default(),
        signal: Signal::default(),
        functions: Functions::default(),
        eval_rewards: None,
        engines,
        engine_group,
        turns,
    })
}

/// Goes on from a checkpoint: with its progress, and with the groups that it carries if any step goes on with them.
fn restore(
    checkpoint: &Checkpoint,
    config: &Config,
    dataset: &Dataset,
    model: &mut PolicyAndEngine,
    sampler: &mut PromptSampler,
) -> Result<(TrainingProgress, Vec<CarriedGroup>)> {
    let TrainerState { global_step, generation_step, num_input_tokens_seen: num_tokens, .. } = checkpoint.state;
    checkpoint.check_rows(dataset.len())?;
    model.policy_mut().map_or(Ok(()), |policy| checkpoint.restore(policy))?;
    sampler.restore(checkpoint.state.sampler.clone())?;
    let carried = match checkpoint.state.carried.as_slice() {
        _ if config.oversample == 0.0 => Vec::new(), // force_resume
        carried if config.tools.has_turns() || config.tools.agent.is_some() => sampling::begun_anew(carried), // nobody has their tools and environments any more
        carried => carried.to_vec(),
    };
    let entropy_control = checkpoint.state.entropy_control.unwrap_or_else(|| entropy_control(config));
    Ok((TrainingProgress { global_step, generation_step, num_tokens, entropy_control }, carried))
}

/// The weight of the entropy bonus that a run begins with.
fn entropy_control(config: &Config) -> EntropyControl {
    EntropyControl::new(&LossConfig::from(config))
}

/// The checkpoint to resume from; collective over the world.
pub(super) fn find_checkpoint(config: &Config, world: &World) -> Result<Option<Checkpoint>> {
    let options = ResumeOptions {
        output_dir: &config.output_dir,
        from: config.resume_from_checkpoint.as_deref(),
        is_forced: config.force_resume,
        on_each_node: config.save_on_each_node,
    };
    checkpoint::resume(&options, world, &|checkpoint| unsafe_changes(config, world.size(), checkpoint))
}

/// Differences that would change the result: single keys, and the numbers that follow from keys of the batch and the world.
fn unsafe_changes(config: &Config, world_size: usize, checkpoint: &Checkpoint) -> Result<Vec<String>> {
    let TrainerState { config: saved, world_size: saved_size, .. } = &checkpoint.state;
    let foreign = |error: Error| checkpoint.of_another_program(&error);
    let saved = Config::from_entries(saved.entries(config.entries())).map_err(foreign)?;
    let saved_batch = saved.validate_world((*saved_size).max(1)).map_err(foreign)?;
    let batch = config.validate_world(world_size)?;
    let numbers = [
        ("generation_batch_size (completions)", saved_batch.generation_batch_size, batch.generation_batch_size),
        ("updates per generation batch", saved_batch.updates_per_generation, batch.updates_per_generation),
    ];
    Ok(checkpoint::unsafe_changes(&checkpoint::changes(config, &saved), &numbers, [*saved_size, world_size]))
}
