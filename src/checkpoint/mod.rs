//! Save, validate, resume and export. A checkpoint is a folder `checkpoint-N`:
//!
//! | file | what it is |
//! |---|---|
//! | `config.json`, `*.safetensors`, `tokenizer*` | the policy as a Hugging Face model |
//! | `optimizer/rank_00000_of_00004.safetensors` | one rank's master weights and Adam moments, by parameter and range |
//! | `trainer_state.json` | step, data position, history, configuration |
//! | `manifest.json` | sizes and SHA-256 of all of them; written last |
//!
//! It is written to a temporary folder, made durable and renamed, so that a folder by that name is complete. Any world
//! size, ZeRO stage or shard group can resume from it. Knows nothing of generation.

mod manifest;
mod shards;
mod state;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use state::TrainerState;

use crate::dist::{World, all_gather_bytes};
use crate::error::{Error, Result};
use crate::model::{ModelSpec, WeightWriter, copy_tokenizer};
use crate::train::Policy;
use manifest::{FileRecord, Manifest};

const PREFIX: &str = "checkpoint-";
const STATE_FILE: &str = "trainer_state.json";

/// Where checkpoints go and how many stay.
#[derive(Debug, Clone)]
pub struct CheckpointOptions {
    /// The run's output folder.
    pub output_dir: PathBuf,
    /// Model folder whose tokenizer files are copied.
    pub tokenizer_dir: PathBuf,
    /// Newest checkpoints kept; `None` keeps all.
    pub save_total_limit: Option<usize>,
}

/// Saves the policy, its optimizer and the trainer's state as `checkpoint-{global_step}`; collective over the world.
///
/// # Errors
/// The first failure of any rank, on every rank; nothing partial is left behind.
pub fn save(options: &CheckpointOptions, world: &World, policy: &Policy, state: &TrainerState) -> Result<PathBuf> {
    let name = format!("{PREFIX}{}", state.global_step);
    let temporary = options.output_dir.join(format!(".{name}.tmp"));
    let complete = options.output_dir.join(name);
    let prepared = if world.rank() == 0 { prepare(&temporary) } else { Ok(()) };
    world.agree(prepared)?;
    let written = write_parts(options, world, policy, state, &temporary);
    let outcome = written.and_then(|()| match world.rank() {
        0 => publish(&temporary, &complete, options),
        _ => Ok(()),
    });
    let outcome = world.agree(outcome);
    if outcome.is_err() && world.rank() == 0 {
        let _ = std::fs::remove_dir_all(&temporary);
    }
    outcome.map(|()| complete)
}

/// Writes the policy as a Hugging Face model folder; collective over the world.
pub fn export(folder: &Path, tokenizer_dir: &Path, world: &World, policy: &Policy) -> Result<()> {
    let written = write_model(folder, tokenizer_dir, world, policy);
    world.agree(written)
}

/// The newest checkpoint of a run that is complete; damaged ones are named loudly and passed over.
///
/// # Errors
/// [`Error::Checkpoint`] if there are checkpoints and none is valid.
pub fn find_latest(output_dir: &Path) -> Result<Option<PathBuf>> {
    let mut last_error = None;
    for (_, folder) in list(output_dir)?.into_iter().rev() {
        match Manifest::verify(&folder) {
            Ok(()) => return Ok(Some(folder)),
            Err(error) => {
                eprintln!("warning: {error}; trying the checkpoint before it");
                last_error = Some(error);
            }
        }
    }
    last_error.map_or(Ok(None), Err)
}

/// A checkpoint whose files were checked against its manifest.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder.
    pub folder: PathBuf,
    /// Where training was.
    pub state: TrainerState,
}

impl Checkpoint {
    /// Opens a folder; with `verify`, every size and hash is checked first (one rank is enough).
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the damaged file.
    pub fn open(folder: &Path, verify: bool) -> Result<Self> {
        if verify {
            Manifest::verify(folder)?;
        }
        Ok(Self { folder: folder.to_owned(), state: TrainerState::read(&folder.join(STATE_FILE))? })
    }

    /// Puts weights and optimizer state into a policy of the same model, whatever its sharding; collective over the world.
    pub fn restore(&self, policy: &mut Policy) -> Result<()> {
        let files = shards::ShardFiles::open(&self.folder)?;
        policy.import_state(self.state.num_updates, &mut |unit, name, elements| files.read(unit, name, elements))
    }
}

fn prepare(temporary: &Path) -> Result<()> {
    if temporary.exists() {
        std::fs::remove_dir_all(temporary).map_err(Error::io(temporary))?;
    }
    let optimizer = temporary.join(shards::FOLDER);
    std::fs::create_dir_all(&optimizer).map_err(Error::io(optimizer))
}

fn write_parts(
    options: &CheckpointOptions,
    world: &World,
    policy: &Policy,
    state: &TrainerState,
    temporary: &Path,
) -> Result<()> {
    let mut records = Vec::new();
    if policy.saves_state() {
        records.push(shards::write(temporary, world, policy)?);
    }
    write_model(temporary, &options.tokenizer_dir, world, policy)?;
    let bytes = serde_json::to_vec(&records).expect("records are plain data");
    let gathered = all_gather_bytes(&*world.group(), &bytes)?;
    if world.rank() == 0 {
        state.write(&temporary.join(STATE_FILE))?;
        let shards: Vec<FileRecord> = gathered
            .iter()
            .flat_map(|bytes| serde_json::from_slice::<Vec<FileRecord>>(bytes).expect("records that a peer wrote"))
            .collect();
        Manifest::write(temporary, world.size(), shards)?;
    }
    Ok(())
}

/// Rank 0 writes; units of sharded weights are gathered by all.
fn write_model(folder: &Path, tokenizer_dir: &Path, world: &World, policy: &Policy) -> Result<()> {
    let spec: &Arc<ModelSpec> = &policy.table().spec;
    let mut writer = match world.rank() {
        0 => {
            std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
            copy_tokenizer(tokenizer_dir, folder)?;
            spec.write_config(folder)?;
            Some(WeightWriter::create(folder, spec.clone(), policy.kind())?)
        }
        _ => None,
    };
    for layout in &policy.table().units {
        let flat = policy.unit_weights(layout.unit)?;
        if let Some(writer) = &mut writer {
            writer.write_unit(layout, &flat)?;
        }
    }
    writer.map_or(Ok(()), WeightWriter::finish)
}

/// Makes the folder durable, gives it its name and removes what is over the limit.
fn publish(temporary: &Path, complete: &Path, options: &CheckpointOptions) -> Result<()> {
    manifest::sync_tree(temporary)?;
    if complete.exists() {
        std::fs::remove_dir_all(complete).map_err(Error::io(complete))?;
    }
    std::fs::rename(temporary, complete).map_err(Error::io(complete))?;
    manifest::sync(&options.output_dir)?;
    let Some(limit) = options.save_total_limit else { return Ok(()) };
    let all = list(&options.output_dir)?;
    for (_, old) in &all[..all.len().saturating_sub(limit.max(1))] {
        std::fs::remove_dir_all(old).map_err(Error::io(old))?;
    }
    Ok(())
}

/// Checkpoints by step, ascending.
fn list(output_dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let Ok(entries) = std::fs::read_dir(output_dir) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io(output_dir))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix(PREFIX)).and_then(|step| step.parse().ok());
        found.extend(step.map(|step: u64| (step, entry.path())));
    }
    found.sort();
    Ok(found)
}
