//! Which checkpoint a run resumes from, and whether it may.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::candidates::{refuse_earlier_run, refuse_what_is_missing, refuse_what_is_no_checkpoint};
use super::changes::KeyChange;
use super::claim::{Claim, claim};
use super::copies::common_checkpoint;
use super::manifest::Manifest;
use super::shared::check_shared;
use super::waiting::while_others_wait;
use super::writers::{check_each_node, is_apart};
use super::{Checkpoint, find_latest};
use crate::config::{OutputConfig, SavingConfig};
use crate::console;
use crate::console::redact;
use crate::error::{Error, Result};
use crate::ranks::{World, first_text};

/// A run's claim on its output folder, and the checkpoint that it resumes from.
#[derive(Debug)]
pub struct OpenedFolder {
    /// The claim, on rank 0 (with `save_on_each_node` on the first rank of every node).
    pub claim: Option<Claim>,
    /// The checkpoint, unless the run starts from the beginning.
    pub checkpoint: Option<Checkpoint>,
}

/// Claims the output folder for a run of `world` whose optimizer state is sharded over `shard_group_size` ranks, and finds the checkpoint to resume
/// from. `changes` lists the differences from the checkpoint's run that would change the result. Collective over the world; ranks must agree on the
/// returned result.
///
/// # Errors
/// [`Error::Checkpoint`] for a damaged checkpoint; [`Error::InvalidValue`] for changes unless the resume is forced, for a new run in a folder with
/// another run's checkpoints, and for a folder that is not shared between nodes as `save_on_each_node` says.
pub fn open_output(
    output: &OutputConfig,
    saving: &SavingConfig,
    world: &World,
    shard_group_size: usize,
    changes: &dyn Fn(&Checkpoint) -> Result<Vec<String>>,
) -> Result<OpenedFolder> {
    let on_each_node = saving.save_on_each_node;
    check_each_node(on_each_node, world.world_size(), shard_group_size)?;
    check_shared(&output.output_dir, world, on_each_node)?;
    let claim = claim(&output.output_dir, world, on_each_node)?;
    Ok(OpenedFolder { claim, checkpoint: resume(output, on_each_node, world, changes)? })
}

/// The checkpoint to resume from, chosen and verified by rank 0 (with `on_each_node` by the first rank of every node), equal on all ranks.
fn resume(
    output: &OutputConfig,
    on_each_node: bool,
    world: &World,
    changes: &dyn Fn(&Checkpoint) -> Result<Vec<String>>,
) -> Result<Option<Checkpoint>> {
    let folder = match is_apart(world, on_each_node) {
        true => common_checkpoint(output, world)?,
        false => checkpoint_of_first_rank(output, world)?,
    };
    let Some(folder) = folder else {
        if output.resume_from_checkpoint.is_some() && world.rank() == 0 {
            console::say(format_args!(
                "no checkpoint in {}: training starts from the beginning",
                output.output_dir.display()
            ));
        }
        return Ok(None);
    };
    let checkpoint = Checkpoint::open(&folder, false)?;
    check_changes(&checkpoint, changes(&checkpoint)?, output.force_resume, world.rank() == 0)?;
    Ok(Some(checkpoint))
}

fn checkpoint_of_first_rank(output: &OutputConfig, world: &World) -> Result<Option<PathBuf>> {
    let choose = |moved: &mut dyn FnMut()| match output.resume_from_checkpoint.as_deref() {
        None => refuse_earlier_run(&output.output_dir).map(|()| None),
        Some("latest") => find_latest(&output.output_dir, moved),
        Some(folder) => {
            let folder = Path::new(folder);
            refuse_what_is_no_checkpoint(folder)?;
            refuse_what_is_missing(folder)?;
            Manifest::verify(folder, moved).map(|_| Some(folder.into()))
        }
    };
    let folder = while_others_wait(world, (world.rank() == 0).then_some(choose))?;
    let text = folder.map(|folder| folder.to_string_lossy().into_owned());
    Ok(first_text(&*world.group(), text)?.map(PathBuf::from))
}

/// A number that is derived from several keys, before and after a resume.
#[derive(Debug, Clone, Copy)]
pub struct NumberChange {
    /// The name of the number in errors.
    pub name: &'static str,
    /// The number in the checkpoint, on the ranks that wrote it.
    pub old: usize,
    /// The number in the resumed run, on that run's ranks.
    pub new: usize,
}

impl Checkpoint {
    /// Describes changes since the checkpoint was written: keys that change the result, and derived numbers on the old number of ranks and on
    /// `world_size`.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for another `lora.r`. Such a resume cannot be forced, because the optimizer state belongs to other parameters.
    pub fn unsafe_changes(
        &self,
        keys: &[KeyChange],
        numbers: &[NumberChange],
        world_size: usize,
    ) -> Result<Vec<String>> {
        if let Some(rank) = keys.iter().find(|change| change.key == "lora.r") {
            return Err(self.of_other_parameters(rank));
        }
        let old_size = self.state.world_size;
        let keys = keys.iter().filter(|change| change.changes_result).map(|change| redact(&change.to_string()));
        let numbers = numbers.iter().filter(|number| number.old != number.new);
        let told = |NumberChange { name, old, new }: &NumberChange| {
            format!("{name}: was {old} on {old_size} ranks, is {new} on {world_size}")
        };
        Ok(keys.chain(numbers.map(told)).collect())
    }

    /// Refuses weights that are read, but not trained, and differ from those of the checkpoint's run, or prints a warning if the resume is forced.
    /// `frozen` has the identities of this run's by key.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] with the keys of the folders.
    pub fn check_frozen(&self, frozen: &BTreeMap<String, String>, is_forced: bool, is_first: bool) -> Result<()> {
        let saved = self.state.frozen_weights.iter();
        let others = saved.filter(|(key, identity)| frozen.get(*key).is_some_and(|own| own != *identity));
        let told = |key| format!("the folder of {key} contains other weights, or another config.json, than before");
        check_changes(self, others.map(|(key, _)| told(key)).collect(), is_forced, is_first)
    }

    /// The error for a run that changes between full weights and adapters, or changes the rank of adapters.
    fn of_other_parameters(&self, rank: &KeyChange) -> Error {
        let KeyChange { key, old, new, .. } = rank;
        let folder = self.folder.display();
        let [saved, own] = [old, new].map(|rank| match rank.parse::<usize>() {
            Ok(rank) => format!("LoRA adapters of rank {rank}"),
            Err(_) => "full weights".to_owned(),
        });
        let merged = match old.parse::<usize>() {
            Ok(_) => format!("FOLDER, after colo-grpo export --merge --model {folder} --output FOLDER"),
            Err(_) => folder.to_string(),
        };
        let expected = format!(
            "{old}, as in {folder}: its optimizer state belongs to {saved} and cannot be used for {own}, not even with \
             force_resume; to train {own} from these weights, start a new run with another output_dir, without \
             resume_from_checkpoint, and with model_name_or_path = {merged}"
        );
        Error::invalid_value(key, new, expected)
    }
}

/// Refuses changes, or prints them if the resume is forced.
fn check_changes(checkpoint: &Checkpoint, changes: Vec<String>, is_forced: bool, is_first: bool) -> Result<()> {
    if changes.is_empty() {
        return Ok(());
    }
    let (folder, changes) = (checkpoint.folder.display(), changes.join("; "));
    if is_forced {
        if is_first {
            console::say(format_args!("warning: force_resume from {folder}: {changes}"));
        }
        return Ok(());
    }
    let expected = format!(
        "a run with the same settings as the checkpoint's, but these differ: {changes}. Restore them, or accept a \
         different result with force_resume = true. If the number of ranks changed, choose per_device_train_batch_size \
         so that generation_batch_size stays the same"
    );
    Err(Error::invalid_value("resume_from_checkpoint", folder, expected))
}
