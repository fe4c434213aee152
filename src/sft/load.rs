//! Loads a supervised run; everything is read and checked before anything is trained.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tch::Kind;

use super::Sft;
use crate::checkpoint::{self, Checkpoint, CheckpointOptions, Models, NumberChange, OpenedFolder, Saver, TrainerState};
use crate::config::SftConfig;
use crate::console::{self, pinning_progress, rows_progress};
use crate::cuda::{Placement, chip_flop_per_s, residual_kind};
use crate::data::{DatasetOptions, Hub, PromptSampler, RowSources, SftDataset, Tokenizer};
use crate::error::{Error, Result};
use crate::memory::HostPool;
use crate::metrics::ranks::RankReporter;
use crate::metrics::{LogOptions, RunLog, Services};
use crate::model::{LoraSpec, ModelSource, ModelSpec, ParamTable, Use, WeightFiles};
use crate::phase;
use crate::ranks::{Mesh, World};
use crate::train::{AdamOptions, GradientOptions, NetworkOptions, Optim, OptimizerHome, Policy};
use crate::train::{PolicyOptions, PolicyStart, Schedule, TrainedModel};

/// Loads the run; collective over the world.
pub(super) fn load(
    config: SftConfig,
    world: Arc<World>,
    OpenedFolder { checkpoint, claim }: OpenedFolder,
) -> Result<Sft> {
    let revision = config.model.model_revision.as_deref();
    let source = ModelSource::find(&config.model.model_name_or_path, revision, None, &Hub::cached())?;
    let spec = Arc::new(ModelSpec::from_folder(&source.base)?);
    let placement = Placement::in_world(config.model.device, config.model.dtype, world.device())?;
    config.combination().with(placement.settings()).in_circumstances(spec.circumstances()).check()?;
    config.model.mixed_precision.format().check(Use::Training, &spec, placement.on_cuda)?;
    world.world_size().check_sequence_groups(world.size(), config.sequence_parallel_size)?;
    spec.validate_sequence_parallel(config.sequence_parallel_size)?;
    let (sources, rows, eval_rows, description) = read_rows(&config, &source, &spec, world.rank() == 0)?;
    let rows_per_update = rows_per_update(&config, world.size());
    if rows_per_update > rows.examples.len() {
        return Err(too_few_rows(&config, &sources, rows.examples.len(), rows_per_update));
    }
    let updates = config.optimizer.num_train_epochs * rows.examples.len() as f64 / rows_per_update as f64;
    let schedule = Schedule::new(config.learning_rate, &config.optimizer, updates.ceil() as usize);
    let mesh = world.mesh(1, config.zero.shard_group(world.size(), world.local_size()))?;
    let mesh = mesh.with_sequence_groups(&world, world.size(), config.sequence_parallel_size)?;
    let mut frozen_weights = BTreeMap::new();
    if config.lora.r.is_some() {
        let identity = WeightFiles::open(&source.base, spec.clone())?.identity()?;
        frozen_weights.insert("model_name_or_path".to_owned(), identity);
    }
    if let Some(checkpoint) = &checkpoint {
        checkpoint.check_frozen(&frozen_weights, config.output.force_resume, world.rank() == 0)?;
    }
    let mut policy = policy(&config, &world, &mesh, &source, spec)?;
    let mut sampler = PromptSampler::new(rows.examples.len(), config.seed, config.shuffle_dataset);
    let (mut global_step, mut num_tokens) = (0, 0);
    if let Some(checkpoint) = &checkpoint {
        checkpoint.check_rows(rows.examples.len(), Some(&rows.digest.text()))?;
        checkpoint.restore(&mut policy)?;
        sampler.restore(checkpoint.state.sampler.clone())?;
        TrainerState { global_step, num_input_tokens_seen: num_tokens, .. } = checkpoint.state;
    }
    let options = CheckpointOptions::new(&config.output, &config.saving, source.base);
    let models = Models { policy: &policy, reference: None };
    checkpoint::check_room(&options, &world, Some(models), config.saving.save_steps.is_some())?;
    let saver = Saver::new(options, checkpoint.as_ref());
    let options = LogOptions { logging_steps: config.logging_steps, max_steps: schedule.total_steps as u64 };
    let earlier = checkpoint.as_ref().map(Checkpoint::earlier_log);
    let services = Services { tensorboard: true, ..Services::default() };
    let log = RunLog::open(&config.output.output_dir, &config, options, world.rank() == 0, earlier, &services)?;
    let reporter = RankReporter::start(&config.output.output_dir, world.place(), options.max_steps, world.device())?;
    log.display().say(&format!("{sources}: {}", rows.counts()));
    log.display().say(&description);
    rows.notices().iter().for_each(|notice| log.display().say(notice));
    let loss = log.first_and_newest("loss").map_or(f64::NAN, |numbers| numbers.newest);
    Ok(Sft {
        device: world.device(),
        chip_flop_per_s: chip_flop_per_s(world.device(), placement.kind)?,
        config,
        world,
        mesh,
        policy,
        rows_digest: rows.digest.text(),
        frozen_weights,
        examples: rows.examples,
        eval_examples: eval_rows.map_or_else(Vec::new, |rows| rows.examples),
        sampler,
        schedule,
        loss,
        last: Instant::now(),
        log,
        reporter,
        saver,
        claim,
        global_step,
        num_tokens,
    })
}

/// Differences from the checkpoint's run that would change the result.
pub(super) fn unsafe_changes(config: &SftConfig, world_size: usize, checkpoint: &Checkpoint) -> Result<Vec<String>> {
    let TrainerState { config: saved, world_size: saved_size, .. } = &checkpoint.state;
    let saved = SftConfig::from_entries(saved.entries(config.entries()));
    let saved = saved.map_err(|error| checkpoint.of_another_program(&error))?;
    let (old, new) = (rows_per_update(&saved, *saved_size), rows_per_update(config, world_size));
    let rows = NumberChange { name: "rows per update", old, new };
    checkpoint.unsafe_changes(&checkpoint::sft_changes(config, &saved), &[rows], world_size)
}

/// Reads training rows and their sources, held-out rows, and the first row as the model sees it.
fn read_rows(
    config: &SftConfig,
    source: &ModelSource,
    spec: &ModelSpec,
    is_first_rank: bool,
) -> Result<(RowSources, SftDataset, Option<SftDataset>, String)> {
    let (data, hub) = (&config.data, Hub::cached());
    let tokenizer = Tokenizer::from_folder(&source.base)?.with_template_variables(&data.chat_template_kwargs.0)?;
    tokenizer.check_against(spec.vocab_size, &spec.eos_token_ids)?;
    tokenizer.notice().filter(|_| is_first_rank).iter().for_each(console::say);
    let max_length = config.max_length.min(spec.max_position_embeddings);
    let completion_column = config.dataset_completion_column.clone();
    let options = DatasetOptions { completion_column, ..DatasetOptions::of(data, config.seed, Vec::new()) };
    let mut told = rows_progress("load");
    let mut read = |sources: &RowSources| {
        SftDataset::read(sources, &tokenizer, &spec.eos_token_ids, max_length, &options, &mut told)
    };
    let (train, held_out) = (RowSources::train(data, &hub)?, RowSources::held_out(data, None, &hub)?);
    let (rows, eval_rows) = (read(&train)?, held_out.as_ref().map(&mut read).transpose()?);
    let description = rows.description(&tokenizer)?;
    Ok((train, rows, eval_rows, description))
}

/// Rows of one update over all ranks. Ranks that share micro-batches count as one.
fn rows_per_update(config: &SftConfig, world_size: usize) -> usize {
    config.per_device_train_batch_size * config.gradient_accumulation_steps * world_size / config.sequence_parallel_size
}

fn too_few_rows(config: &SftConfig, sources: &RowSources, num_rows: usize, rows_per_update: usize) -> Error {
    let got = config.per_device_train_batch_size;
    let expected = format!(
        "at most {num_rows} rows per update over all ranks and accumulation slices, got {rows_per_update}: {sources} \
         has no more rows"
    );
    Error::invalid_value("per_device_train_batch_size", got, expected)
}

fn policy(
    config: &SftConfig,
    world: &World,
    mesh: &Mesh,
    source: &ModelSource,
    spec: Arc<ModelSpec>,
) -> Result<Policy> {
    let device = world.device();
    let kind = Placement::in_world(config.model.device, config.model.dtype, device)?.kind;
    let residual = residual_kind(config.model.residual_dtype, kind);
    let options = PolicyOptions {
        stage: config.zero.stage,
        network: NetworkOptions { kind, residual, device, format: config.model.mixed_precision.format() },
        gradient_checkpointing: config.gradient_checkpointing,
        optim: Optim::new(config.optimizer.optim, &config.optimizer.muon),
        adam: AdamOptions::new(&config.optimizer),
        gradients: GradientOptions::new(config.zero.grad_accum_dtype, config.zero.reduce_dtype),
    };
    let table = Arc::new(ParamTable::new(spec.clone(), mesh.shard.size()));
    let files = WeightFiles::open(&source.base, spec)?;
    let start = PolicyStart {
        lora: LoraSpec::new(&config.lora),
        quantization: config.quantization,
        seed: config.seed,
        adapters: source.adapters.as_deref(),
        keeps_initial: false,
    };
    let weights = |layout: &_| {
        phase::beat();
        files.read_unit(layout, Kind::Float)
    };
    let policy = Policy::start(table.clone(), mesh, options, OptimizerHome::Resident, &weights, start)?;
    if !config.activation_offload {
        return Ok(policy);
    }
    let model = TrainedModel {
        residual,
        sharers: mesh.sequence.size(),
        offloads: true,
        ..TrainedModel::whole(&table, config.zero.stage, kind, options.gradients)
    };
    let tokens = config.max_tokens_per_micro_batch.max(config.max_length);
    let bytes = model.offloaded_bytes(config.gradient_checkpointing, tokens).max(1);
    Ok(policy.with_activation_offload(HostPool::new("activations_host", bytes, device, &mut pinning_progress())?))
}
