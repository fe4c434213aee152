//! Loads a trainer: everything is read and checked before anything is trained.

use std::collections::VecDeque;
use std::sync::Arc;

use tch::Tensor;

use super::ahead;
use super::build::{self, read_unit};
use super::builder::Functions;
use super::curriculum::RowsById;
use super::model::PolicyAndEngine;
use super::output::RunOutput;
use super::own_teacher::OwnTeacher;
use super::preflight::{Preflight, open_model, source};
use super::rows::TrainingRows;
use super::sampling;
use super::scores::Unscored;
use super::signal::{self, Signal};
use super::turns;
use super::{Trainer, TrainingProgress};
use crate::checkpoint::{self, CarriedGroup, Checkpoint, CheckpointOptions, Claim, ResumeOptions, Saver, TrainerState};
use crate::config::Config;
use crate::cuda::{Placement, chip_flop_per_s};
use crate::data::{Curriculum, Dataset, PromptSampler};
use crate::error::{Error, Result};
use crate::grpo::{EntropyControl, LossConfig};
use crate::memory;
use crate::metrics::rows_progress;
use crate::model::{ModelSource, ModelSpec, UnitLayout, WeightFiles};
use crate::phase;
use crate::plan::Room;
use crate::ranks::{World, share};
use crate::reward::RewardPool;
use crate::tools::ToolProcess;
use crate::torch;
use crate::train::Schedule;
use crate::types::LengthSpread;

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
    let room = Room::common(placement, &world)?;
    let model @ (spec, tokenizer, _) = &open_model(&config, placement)?;
    config.validate_world(world.size())?;
    config.validate_context(spec.max_position_embeddings)?;
    let needed = (rewards.required_columns(), tools.as_ref());
    let rows = TrainingRows::read(&config, tokenizer, spec, needed, rows_progress("load", world.rank() == 0))?;
    rows.check_same(&config, &world)?;
    let preflight = Preflight::of_model(&rows.planned(&config), model.clone(), placement, world.world_size(), room)?;
    rows.check_batch(&config, &preflight.batch)?;
    rows.check_columns(&rewards)?;
    rows.say_unreadable(&rewards, &world)?;
    rows.say_unsolvable(&config, &rewards, &world);
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
        mut rewards,
        tools,
        rows,
        source,
        checkpoint,
        claim,
        writes_files,
        spread_lengths,
    } = parts;
    let batch = preflight.batch;
    let mut description = rows.description();
    description.extend(preflight.tokenizer.notice().map(str::to_owned));
    let TrainingRows { train: dataset, eval: eval_set, options, .. } = rows;
    let mixed = mixed_reference(&config, &preflight.spec, checkpoint.as_ref())?;
    let of_reference =
        |layout: &UnitLayout| mixed.as_ref().map_or_else(|| weights(layout), |files| read_unit(files, layout));
    let sources =
        build::WeightSources { policy: weights, reference: &of_reference, adapters: source.adapters.as_deref() };
    let mut model = build::model(&config, &world, &preflight, &sources, spread_lengths)?;
    let engines = signal::engines(&config, &world, batch.roles.num_generators)?;
    let engine_group = ahead::engine_group(&config, &world, batch.roles.num_generators)?;
    let max_model_length = preflight.plan_of(world.rank()).max_model_length;
    let own_teacher = OwnTeacher::new(&config, &options, &preflight.tokenizer, max_model_length);
    let turns = turns::open(&config, &world, &preflight, tools.map(|tools| (tools, options)))?;
    let sampler = PromptSampler::new(dataset.len(), config.seed, config.shuffle_dataset);
    let mut sampler = sampler.with_curriculum(Curriculum::new(&config.curriculum));
    if config.dataloader_drop_last {
        sampler = sampler.dropping_last(batch.num_prompts);
    }
    let updates = config.updates_in_epochs(&batch, dataset.len());
    let schedule = Schedule::new(config.learning_rate, &config.optimizer, updates);
    let vocab_size = preflight.spec.vocab_size;
    let restored =
        |checkpoint: &Checkpoint| restore(checkpoint, &config, (&dataset, vocab_size), &mut model, &mut sampler);
    let begun =
        || (TrainingProgress { entropy_control: entropy_control(&config), ..TrainingProgress::default() }, Vec::new());
    let (progress, carried) = checkpoint.as_ref().map_or_else(|| Ok(begun()), restored)?;
    let options = CheckpointOptions {
        output_dir: config.output_dir.clone(),
        base_dir: source.base,
        save_total_limit: config.save_total_limit,
        save_async: config.save_async,
        on_each_node: config.save_on_each_node,
    };
    let saver = Saver::new(options, checkpoint.as_ref());
    if writes_files {
        checkpoint::check_room(
            saver.options(),
            &world,
            model.saved_models(config.objective.sync_ref_model),
            config.save_steps.is_some(),
        )?;
    }
    let saved = checkpoint.as_ref().map_or(&[][..], |checkpoint| &checkpoint.state.carried);
    let num_dropped = saved.len() - carried.len();
    let has_less = |(saved, now): &(&CarriedGroup, &CarriedGroup)| now.completions.len() < saved.completions.len();
    let has_others = checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.carries_others(config.num_generations));
    let num_anew = saved.iter().zip(&carried).filter(|groups| has_others && has_less(groups)).count();
    let max_steps = schedule.total_steps as u64;
    let files = (writes_files, &preflight.tokenizer);
    let output = RunOutput::new(&config, &world, max_steps, checkpoint.as_ref(), files)?;
    output.say(&format!("plan\n{preflight}"));
    if num_dropped > 0 {
        output.say(&format!("{num_dropped} unfinished groups of the checkpoint are dropped: oversample is 0"));
    }
    if num_anew > 0 {
        output.say(&format!("{num_anew} unfinished groups of the checkpoint are begun anew: num_generations differs"));
    }
    description.iter().for_each(|line| output.say(line));
    let saved_ahead = checkpoint.as_ref().map_or(&[][..], |checkpoint| &checkpoint.state.ahead);
    let goes_on = ahead::goes_on(saved_ahead, &config, batch.num_prompts);
    if let (Some(next), false) = (saved_ahead.first(), goes_on) {
        sampler.restore(next.before.clone())?;
        output.say(&format!(
            "{} batches that the checkpoint's run sampled ahead are sampled again: this run has other keys",
            saved_ahead.len()
        ));
    }
    if let Some(checkpoint) = checkpoint.as_ref().filter(|_| goes_on && !saved_ahead.is_empty()) {
        checkpoint.check_carried(config.num_generations, vocab_size)?;
    }
    let engine = (world.rank() + batch.roles.num_generators).checked_sub(world.size());
    let own = |len| engine.map_or(0..0, |place| share(len, (place, batch.roles.num_generators)));
    let parts = (&dataset, &*preflight.tokenizer, max_steps);
    let saved_ahead = saved_ahead.iter().filter(|_| goes_on);
    let ahead = saved_ahead.map(|saved| ahead::restored(saved, own(saved.groups.len()), parts, &mut rewards));
    let ahead = ahead.collect::<Result<VecDeque<_>>>()?;
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
        ahead,
        drawn: None,
        unscored: Unscored::default(),
        signal: Signal::default(),
        functions: Functions::default(),
        eval_rewards: None,
        engines,
        engine_group,
        turns,
        own_teacher,
    })
}

/// Goes on from a checkpoint: with its progress, and with the groups that it carries if any step goes on with them.
fn restore(
    checkpoint: &Checkpoint,
    config: &Config,
    (dataset, vocab_size): (&Dataset, usize),
    model: &mut PolicyAndEngine,
    sampler: &mut PromptSampler,
) -> Result<(TrainingProgress, Vec<CarriedGroup>)> {
    let TrainerState { global_step, generation_step, num_input_tokens_seen: num_tokens, .. } = checkpoint.state;
    checkpoint.check_rows(dataset.len())?;
    model.policy_mut().map_or(Ok(()), |policy| checkpoint.restore(policy))?;
    sampler.restore(checkpoint.state.sampler.clone())?;
    let carried = match checkpoint.state.carried.as_slice() {
        _ if config.oversample == 0.0 => Vec::new(), // force_resume
        carried if config.tools.has_turns() || config.tools.agent().is_some() => sampling::begun_anew(carried), // nobody has their tools and environments any more
        carried if config.force_resume && checkpoint.carries_others(config.num_generations) => {
            sampling::begun_anew(carried)
        }
        carried => {
            checkpoint.check_carried(config.num_generations, vocab_size)?;
            carried.to_vec()
        }
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
    checkpoint.unsafe_changes(&checkpoint::changes(config, &saved), &numbers, world_size)
}
