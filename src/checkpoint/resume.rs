//! Which checkpoint a run goes on from, and whether it may.

use std::path::Path;

use super::{Checkpoint, find_latest, list};
use crate::config::KeyChange;
use crate::dist::{World, all_gather_bytes};
use crate::error::{Error, Result};
use crate::metrics::redact;

/// What a run's configuration says of resuming.
#[derive(Debug, Clone, Copy)]
pub struct ResumeOptions<'a> {
    /// Where the run's own checkpoints are.
    pub output_dir: &'a Path,
    /// `resume_from_checkpoint`: a folder, or `latest` of `output_dir`.
    pub from: Option<&'a str>,
    /// `force_resume`: go on whatever has changed.
    pub is_forced: bool,
}

/// The checkpoint to resume from, chosen and verified by the first rank, the same on all; `changes` names what differs from the
/// run that made it and would change the result. Collective over the world.
///
/// # Errors
/// [`Error::Checkpoint`] for one that is damaged; [`Error::InvalidValue`] for changes, unless the resume is forced, and for a
/// fresh run beside another run's checkpoints.
pub fn resume(
    options: &ResumeOptions<'_>,
    world: &World,
    changes: &dyn Fn(&Checkpoint) -> Result<Vec<String>>,
) -> Result<Option<Checkpoint>> {
    let choose = || match options.from {
        None => refuse_earlier_run(options.output_dir).map(|()| None),
        Some("latest") => find_latest(options.output_dir),
        Some(folder) => Checkpoint::open(Path::new(folder), true).map(|checkpoint| Some(checkpoint.folder)),
    };
    let folder = world.agree(if world.rank() == 0 { choose() } else { Ok(None) })?;
    let text = folder.map(|folder| folder.to_string_lossy().into_owned()).unwrap_or_default();
    let gathered = all_gather_bytes(&*world.group(), text.as_bytes())?;
    let folder = String::from_utf8_lossy(&gathered[0]).into_owned();
    if folder.is_empty() {
        if options.from.is_some() && world.rank() == 0 {
            eprintln!("no checkpoint in {}: training starts from the beginning", options.output_dir.display());
        }
        return Ok(None);
    }
    let opened = Checkpoint::open(Path::new(&folder), false);
    let checked = opened.and_then(|checkpoint| {
        check_changes(&checkpoint, changes(&checkpoint)?, options.is_forced, world.rank() == 0)?;
        Ok(Some(checkpoint))
    });
    world.agree(checked)
}

/// Changes as they are told: keys that change the result, and `(name, old, new)` that several keys come to on the old and the
/// new number of ranks.
pub fn unsafe_changes(
    keys: &[KeyChange],
    numbers: &[(&str, usize, usize)],
    [old_size, size]: [usize; 2],
) -> Vec<String> {
    let keys = keys.iter().filter(|change| change.changes_result).map(|change| redact(&change.to_string()));
    let numbers = numbers.iter().filter(|(_, old, new)| old != new);
    keys.chain(numbers.map(|(name, old, new)| format!("{name}: was {old} on {old_size} ranks, is {new} on {size}")))
        .collect()
}

/// Refuses a fresh run beside another run's checkpoints: a later `latest` could not tell the two apart.
fn refuse_earlier_run(output_dir: &Path) -> Result<()> {
    let Some(newest) = list(output_dir)?.pop() else { return Ok(()) };
    let expected = format!(
        "a folder without an earlier run's checkpoints, such as {}; resume it with resume_from_checkpoint=latest, remove \
         them, or name another folder",
        newest.display()
    );
    Err(Error::invalid_value("output_dir", output_dir.display(), expected))
}

/// Refuses changes, or names them where a resume is forced.
fn check_changes(checkpoint: &Checkpoint, changes: Vec<String>, is_forced: bool, is_first: bool) -> Result<()> {
    if changes.is_empty() {
        return Ok(());
    }
    let (folder, changes) = (checkpoint.folder.display(), changes.join("; "));
    if is_forced {
        if is_first {
            eprintln!("warning: force_resume from {folder}: {changes}");
        }
        return Ok(());
    }
    let expected = format!(
        "the configuration that the checkpoint was made with (on other numbers of ranks: per_device_train_batch_size that makes the \
         same generation_batch_size), or force_resume = true; changed: {changes}"
    );
    Err(Error::invalid_value("resume_from_checkpoint", folder, expected))
}
