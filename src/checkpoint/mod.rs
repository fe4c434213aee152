//! Saving, validating, resuming and exporting. A checkpoint is a folder `checkpoint-N`:
//!
//! | file | what it is |
//! |---|---|
//! | `config.json`, `*.safetensors`, `tokenizer*` | the policy as a Hugging Face model; for a LoRA run, adapters in PEFT's format |
//! | `reference/` | the reference model in the same format, if it follows the policy (`sync_ref_model`) |
//! | `optimizer/rank_00000_of_00004.safetensors` | one rank's master weights and Adam moments, by parameter and range, with their run and step |
//! | `trainer_state.json` | step, data position, history, configuration |
//! | `manifest.json` | sizes and SHA-256 of all files; written last |
//!
//! It is written to a temporary folder, made durable and renamed; before it is removed, it is renamed again. So a folder with this name is always
//! complete. Any world size, ZeRO stage or shard group can resume from it. The module knows nothing of generation.
//!
//! | file | what it does |
//! |---|---|
//! | `resume` | opens the output folder: which checkpoint a run resumes from, and whether it may |
//! | `candidates` | checks of folders that a run may resume from or start in |
//! | `waiting` | long work on some ranks while the others wait |
//! | `changes` | which keys differ from a saved configuration, and which of them change the result |
//! | `claim` | one run per folder |
//! | `shared` | whether all nodes see one output folder, or each its own |
//! | `writers` | the ranks that write a checkpoint together |
//! | `copies` | the checkpoint that all nodes have a copy of |
//! | `folder` | temporary folders, names, free space |
//! | `saver` | one save at a time, during training |
//! | `write` | writes a checkpoint's files |
//! | `manifest` | sizes and hashes |
//! | `shard_file`, `shards` | optimizer state: one rank's file; reading all files by range |
//! | `state` | `trainer_state.json` |

mod candidates;
mod changes;
mod claim;
mod copies;
mod digits;
mod folder;
mod manifest;
mod resume;
mod saver;
mod shard_file;
mod shards;
mod shared;
mod state;
mod waiting;
mod write;
mod writers;

use std::path::{Path, PathBuf};

pub use changes::{changes, sft_changes};
pub use claim::{Claim, claim};
pub use folder::{FINAL, check_space, list, refuse_within_checkpoint, write_new};
pub use manifest::written;
pub use resume::{NumberChange, OpenedFolder, open_output};
pub use saver::Saver;
pub use state::{CarriedGroup, SavedBatch, SavedConfig, TrainerState};
pub use write::Models;
pub use writers::writes_folder;

use crate::config::{Config, OutputConfig, SavingConfig, SftConfig};
use crate::console;
use crate::error::{Error, Result};
use crate::metrics::EarlierLog;
use crate::phase::{self, Phase};
use crate::ranks::World;
use crate::train::Policy;
use manifest::Manifest;
use shards::ShardFiles;

/// Where checkpoints are saved and how many are kept.
#[derive(Debug, Clone)]
pub struct CheckpointOptions {
    /// The run's output folder.
    pub output_dir: PathBuf,
    /// Model folder whose tokenizer files are copied, and which adapters refer to as their base.
    pub base_dir: PathBuf,
    /// Number of newest checkpoints to keep; `None` keeps all.
    pub save_total_limit: Option<usize>,
    /// Whether to write during training, from copies in host memory.
    pub save_async: bool,
    /// Whether every node writes whole checkpoints to its own folder.
    pub on_each_node: bool,
}

impl CheckpointOptions {
    /// Options for checkpoints in the output folder, of a model whose tokenizer is in `base_dir`.
    pub fn new(output: &OutputConfig, saving: &SavingConfig, base_dir: PathBuf) -> Self {
        Self {
            output_dir: output.output_dir.clone(),
            base_dir,
            save_total_limit: saving.save_total_limit,
            save_async: saving.save_async,
            on_each_node: saving.save_on_each_node,
        }
    }
}

/// The folder of a step's checkpoint.
pub fn folder_of_step(output_dir: &Path, step: u64) -> PathBuf {
    folder::path(output_dir, step)
}

/// Checks before training that the disk has space for the trained model and, if the run `saves` any, for a checkpoint. Only rank 0, which has the
/// model, checks; with `on_each_node` the first rank of each node.
///
/// # Errors
/// [`Error::Io`] with the needed and the free bytes.
pub fn check_room(options: &CheckpointOptions, world: &World, models: Option<Models<'_>>, saves: bool) -> Result<()> {
    let Some(models) = models.filter(|_| writes_folder(world, options.on_each_node)) else { return Ok(()) };
    let checkpoint = if saves { write::first_bytes(models) } else { 0 };
    folder::check_space(&options.output_dir, write::model_bytes(models.policy) + checkpoint)
}

/// Writes the policy as a Hugging Face model folder, or its adapters in PEFT's format, completely and durably or not at all. Collective over the
/// world, whose first ranks have the policy. Returns the folder, [`FINAL`] in the output folder, which replaces an existing one. With `on_each_node`
/// every node writes it.
///
/// # Errors
/// The first failure of any rank, on every rank.
pub fn export(options: &CheckpointOptions, world: &World, policy: Option<&Policy>) -> Result<PathBuf> {
    let complete = options.output_dir.join(FINAL);
    let temporary = folder::temporary(&complete);
    let is_first = writes_folder(world, options.on_each_node);
    let prepare = |policy| if is_first { folder::prepare(&temporary, write::model_bytes(policy)) } else { Ok(()) };
    world.agree(policy.map_or(Ok(()), prepare))?;
    let write = |policy| {
        write::model(&temporary, &options.base_dir, is_first, policy)?;
        if is_first { folder::publish(&temporary, &complete) } else { Ok(()) }
    };
    let written = phase::scope(Phase::Checkpoint, || policy.map_or(Ok(()), write));
    let agreed = world.agree(written);
    if agreed.is_err() && is_first {
        folder::remove(&temporary);
    }
    agreed.map(|()| complete)
}

/// The newest complete checkpoint of a run. Damaged ones are skipped with a warning. `moved` is called for every MiB that is read.
///
/// # Errors
/// [`Error::Checkpoint`] if there are checkpoints but none is valid.
pub fn find_latest(output_dir: &Path, moved: &mut dyn FnMut()) -> Result<Option<PathBuf>> {
    let all = folder::list(output_dir)?;
    let mut faults = Vec::new();
    for folder in all.iter().rev() {
        match Manifest::verify(folder, moved) {
            Ok(_) => return Ok(Some(folder.clone())),
            Err(error) => {
                console::say(format_args!("warning: {error}; trying the checkpoint before it"));
                faults.push(error.to_string());
            }
        }
    }
    match faults.is_empty() {
        true => Ok(None),
        false => Err(Error::Checkpoint {
            path: output_dir.to_owned(),
            message: format!("no valid checkpoint among {}: {}", all.len(), faults.join("; ")),
        }),
    }
}

/// A checkpoint to resume from.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder.
    pub folder: PathBuf,
    /// The trainer's state.
    pub state: TrainerState,
}

impl Checkpoint {
    /// Opens a folder. With `verify`, every size and hash is checked first, which is only necessary on one rank.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the damaged file.
    pub fn open(folder: &Path, verify: bool) -> Result<Self> {
        if verify {
            Manifest::verify(folder, &mut phase::beat)?;
        }
        Ok(Self { folder: folder.to_owned(), state: TrainerState::read(folder)? })
    }

    /// The folder of the reference model, if the checkpoint's run updates it from the policy.
    pub fn reference(&self) -> Option<PathBuf> {
        Some(self.folder.join(write::REFERENCE)).filter(|folder| folder.is_dir())
    }

    /// The metrics of the run that wrote this checkpoint.
    pub fn earlier_log(&self) -> EarlierLog {
        let TrainerState { global_step, log_history, unlogged, .. } = &self.state;
        let (history, unlogged) = (log_history.clone(), unlogged.clone());
        EarlierLog { folder: self.folder.clone(), step: *global_step, history, unlogged }
    }

    /// Refuses a different number of training rows, rows with another `digest` if both are known, and positions beyond the rows.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with what differs.
    pub fn check_rows(&self, num_rows: usize, digest: Option<&str>) -> Result<()> {
        self.state.check_rows(num_rows, digest).map_err(|message| self.bad(message))
    }

    /// Refuses carried groups that a run with `num_generations` completions per prompt and token ids below `vocab_size` cannot continue.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the row.
    pub fn check_carried(&self, num_generations: usize, vocab_size: usize) -> Result<()> {
        self.state.check_carried(num_generations, vocab_size).map_err(|message| self.bad(message))
    }

    /// Whether it has carried groups with another number of completions than `num_generations`.
    pub fn carries_others(&self, num_generations: usize) -> bool {
        !self.state.carried.iter().all(|group| group.suits(num_generations))
    }

    fn bad(&self, message: String) -> Error {
        Error::Checkpoint { path: self.folder.clone(), message }
    }

    /// The error for a saved configuration that cannot be read, because it is of another command or another version.
    pub fn of_another_program(&self, error: &Error) -> Error {
        let entries = || self.state.config.entries([]);
        let folder = self.folder.display();
        let message = if SftConfig::from_entries(entries()).is_ok() {
            format!(
                "the checkpoint was written by a supervised run: resume it with colo-grpo sft, or set \
                 model_name_or_path = {folder} to start a new run from its weights"
            )
        } else if Config::from_entries(entries()).is_ok() {
            format!(
                "the checkpoint was written by a GRPO run: resume it with colo-grpo train, or set model_name_or_path = \
                 {folder} to start a new run from its weights"
            )
        } else {
            format!("trainer_state.json holds a configuration that this version of colo-grpo does not accept: {error}")
        };
        self.bad(message)
    }

    /// Loads weights and optimizer state into a policy of the same model, with any sharding; collective over the world.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the file if the state does not belong to this model; the errors of [`Policy::import_state`]. The policy is
    /// undefined after an error.
    pub fn restore(&self, policy: &mut Policy) -> Result<()> {
        let mark = Some(self.state.mark()).filter(|_| !self.state.run_id.is_empty());
        let form = |param: &_| policy.state_form(param);
        let files = ShardFiles::open(&self.folder, mark.as_deref(), policy.trained_table(), &form)?;
        let mut restored = console::units_progress("restore", policy.state_ranges().count());
        policy.import_state(self.state.num_updates, &mut |unit, name, elements| {
            let state = files.read(unit, name, elements)?;
            restored();
            Ok(state)
        })
    }
}
