//! Which checkpoint a run goes on from, and whether it may.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use super::changes::KeyChange;
use super::copies::common_checkpoint;
use super::manifest::{Manifest, written};
use super::writers::is_apart;
use super::{Checkpoint, FINAL, TrainerState, find_latest, list};
use crate::console;
use crate::console::redact;
use crate::error::{Error, Result};
use crate::model::is_model_folder;
use crate::phase;
use crate::ranks::{World, any_rank, first_text};

/// How often ranks that read meet those that wait for them.
const MEET: Duration = Duration::from_millis(20);

/// Options of resuming.
#[derive(Debug, Clone, Copy)]
pub struct ResumeOptions<'a> {
    /// Where the run's own checkpoints are.
    pub output_dir: &'a Path,
    /// `resume_from_checkpoint`: a folder, or `latest` of `output_dir`.
    pub from: Option<&'a str>,
    /// `force_resume`: go on whatever has changed.
    pub is_forced: bool,
    /// `save_on_each_node`: every node has checkpoints of its own.
    pub on_each_node: bool,
}

/// The checkpoint to resume from, chosen and verified by the first rank (with `on_each_node` of every node), the same on all; `changes` names what differs from the
/// run that made it and would change the result. Collective over the world; the ranks are to agree on what it returns.
///
/// # Errors
/// [`Error::Checkpoint`] for one that is damaged; [`Error::InvalidValue`] for changes, unless the resume is forced, and for a
/// fresh run beside another run's checkpoints.
pub fn resume(
    options: &ResumeOptions<'_>,
    world: &World,
    changes: &dyn Fn(&Checkpoint) -> Result<Vec<String>>,
) -> Result<Option<Checkpoint>> {
    let folder = match is_apart(world, options.on_each_node) {
        true => common_checkpoint(options, world)?,
        false => checkpoint_of_first_rank(options, world)?,
    };
    let Some(folder) = folder else {
        if options.from.is_some() && world.rank() == 0 {
            console::say(format_args!(
                "no checkpoint in {}: training starts from the beginning",
                options.output_dir.display()
            ));
        }
        return Ok(None);
    };
    let checkpoint = Checkpoint::open(&folder, false)?;
    check_changes(&checkpoint, changes(&checkpoint)?, options.is_forced, world.rank() == 0)?;
    Ok(Some(checkpoint))
}

fn checkpoint_of_first_rank(options: &ResumeOptions<'_>, world: &World) -> Result<Option<PathBuf>> {
    let choose = |moved: &mut dyn FnMut()| match options.from {
        None => refuse_earlier_run(options.output_dir).map(|()| None),
        Some("latest") => find_latest(options.output_dir, moved),
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

/// Runs `work` in a thread on the ranks that have some; the others wait while it reports progress, and return the default: reading all of a
/// checkpoint may take longer than a collective's time limit. Collective over the world.
pub(super) fn while_others_wait<T: Send + Default>(
    world: &World,
    work: Option<impl FnOnce(&mut dyn FnMut()) -> Result<T> + Send>,
) -> Result<T> {
    let (group, moves) = (world.group(), AtomicU64::new(0));
    let moved = || {
        phase::beat();
        moves.fetch_add(1, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        let working = work.map(|work| scope.spawn(|| work(&mut { moved })));
        let is_done = || working.as_ref().is_none_or(ScopedJoinHandle::is_finished);
        let mut seen = 0;
        loop {
            // Only a rank that moves meets the others: they have a time limit for a disk that stands still.
            while !is_done() && moves.load(Ordering::Relaxed) == seen {
                std::thread::sleep(MEET);
            }
            seen = moves.load(Ordering::Relaxed);
            if !any_rank(&*group, !is_done())? {
                break;
            }
        }
        working.map_or_else(|| Ok(T::default()), |done| done.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

impl Checkpoint {
    /// Changes since it was made as they are told: keys that change the result, and `(name, old, new)` that several keys come to on the
    /// old number of ranks and on `world_size`.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for another `lora.r`, which no resume can be forced over: the optimizer's state is of other parameters.
    pub fn unsafe_changes(
        &self,
        keys: &[KeyChange],
        numbers: &[(&str, usize, usize)],
        world_size: usize,
    ) -> Result<Vec<String>> {
        if let Some(rank) = keys.iter().find(|change| change.key == "lora.r") {
            return Err(self.of_other_parameters(rank));
        }
        let old_size = self.state.world_size;
        let keys = keys.iter().filter(|change| change.changes_result).map(|change| redact(&change.to_string()));
        let numbers = numbers.iter().filter(|(_, old, new)| old != new);
        let told = |(name, old, new): &(&str, usize, usize)| {
            format!("{name}: was {old} on {old_size} ranks, is {new} on {world_size}")
        };
        Ok(keys.chain(numbers.map(told)).collect())
    }

    /// The error of a run that trains full weights in place of adapters, adapters in place of full weights, or adapters of another rank.
    fn of_other_parameters(&self, rank: &KeyChange) -> Error {
        let KeyChange { key, old, new, .. } = rank;
        let folder = self.folder.display();
        let [saved, own] = [old, new].map(|rank| match rank.parse::<usize>() {
            Ok(rank) => format!("adapters of rank {rank}"),
            Err(_) => "all weights".to_owned(),
        });
        let merged = match old.parse::<usize>() {
            Ok(_) => format!("FOLDER, which colo-grpo export --merge --model {folder} --output FOLDER makes"),
            Err(_) => folder.to_string(),
        };
        let expected = format!(
            "{old}, that of {folder}, whose optimizer's state is of {saved} and not of {own}: no resume can be forced over that; to \
             train {own} from there, start a run with another output_dir, without resume_from_checkpoint, and model_name_or_path = {merged}"
        );
        Error::invalid_value(key, new, expected)
    }
}

/// Refuses a fresh run beside another run's checkpoints: a later `latest` could not tell the two apart.
pub(super) fn refuse_earlier_run(output_dir: &Path) -> Result<()> {
    let Some(newest) = list(output_dir)?.pop() else {
        let model = output_dir.join(FINAL);
        if model.exists() {
            console::say(format_args!(
                "warning: {}, an earlier run's model, is replaced at the end, and its metrics are now",
                model.display()
            ));
        }
        return Ok(());
    };
    let expected = format!(
        "a folder without an earlier run's checkpoints, such as {}; resume it with resume_from_checkpoint=latest, remove \
         them, or name another folder",
        newest.display()
    );
    Err(Error::invalid_value("output_dir", output_dir.display(), expected))
}

/// Refuses a run's folder and a model's, with what to name.
pub(super) fn refuse_what_is_no_checkpoint(folder: &Path) -> Result<()> {
    if written(folder).is_some() || TrainerState::file(folder).exists() {
        return Ok(()); // damaged it may be
    }
    let expected = match list(folder).ok().and_then(|mut checkpoints| checkpoints.pop()) {
        Some(newest) => format!("a checkpoint's folder, not the run's: {}", newest.display()),
        None if is_model_folder(folder) => {
            "a checkpoint's folder: a model has no state of an optimizer; name it as model_name_or_path".to_owned()
        }
        None => return Ok(()),
    };
    Err(Error::invalid_value("resume_from_checkpoint", folder.display(), expected))
}

/// Refuses a folder that is not there, with those beside it that are.
fn refuse_what_is_missing(folder: &Path) -> Result<()> {
    let beside = folder.parent().and_then(|run| list(run).ok()).filter(|_| !folder.exists()).unwrap_or_default();
    let names: Vec<_> = beside.iter().filter_map(|path| path.file_name()).map(|name| name.to_string_lossy()).collect();
    let expected = || format!("a folder that is there, or latest; beside it are {}", names.join(", "));
    if names.is_empty() {
        return Ok(());
    }
    Err(Error::invalid_value("resume_from_checkpoint", folder.display(), expected()))
}

/// Refuses changes, or names them where a resume is forced.
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
        "no change of what makes the result ({changes}), or force_resume = true; on another number of ranks, \
         per_device_train_batch_size that makes the same generation_batch_size"
    );
    Err(Error::invalid_value("resume_from_checkpoint", folder, expected))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::ranks::testing;

    #[test]
    fn a_missing_folder_is_told_with_those_beside_it() {
        let run = tempfile::tempdir().unwrap();
        let folder = |step: u64| run.path().join(format!("checkpoint-{step}"));
        refuse_what_is_missing(&folder(7)).unwrap();
        [10, 5].into_iter().for_each(|step| std::fs::create_dir(folder(step)).unwrap());
        refuse_what_is_missing(&folder(10)).unwrap();
        let told = refuse_what_is_missing(&folder(7)).unwrap_err().to_string();
        assert!(told.ends_with("beside it are checkpoint-5, checkpoint-10"), "{told}");
    }

    #[test]
    fn a_rank_that_moves_is_waited_for_beyond_a_collective_s_limit() {
        let timeout = Duration::from_secs(1);
        let made = testing::worlds_with(3, 4096, timeout, |world| {
            let rank = world.rank();
            let work = move |moved: &mut dyn FnMut()| {
                let start = Instant::now();
                while start.elapsed() < 2 * timeout {
                    std::thread::sleep(Duration::from_millis(10));
                    moved();
                }
                Ok(Some(rank))
            };
            while_others_wait(&world, (rank == 0).then_some(work)).unwrap()
        });
        assert_eq!(made, [Some(0), None, None]);
    }

    #[test]
    fn what_the_first_rank_fails_with_reaches_those_that_wait() {
        let errors = testing::worlds(2, |world| {
            let fail = |_: &mut dyn FnMut()| Err::<(), _>(Error::NonFinite { message: "a test".to_owned() });
            world.agree(while_others_wait(&world, (world.rank() == 0).then_some(fail))).unwrap_err()
        });
        assert!(matches!(errors[0], Error::NonFinite { .. }), "{}", errors[0]);
        assert!(matches!(errors[1], Error::PeerFailed { rank: 0, .. }), "{}", errors[1]);
    }
}
