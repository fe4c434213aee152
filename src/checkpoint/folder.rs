//! Operations on whole checkpoint folders: names, free space, and renames that make a folder appear and disappear atomically.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::TrainerState;
use super::manifest::{sync_tree, written};
use crate::console;
use crate::error::{Error, Result};
use crate::model::sync;

/// Name of the trained model's folder.
pub const FINAL: &str = "final";
const PREFIX: &str = "checkpoint-";
const TEMPORARY_SUFFIX: &str = ".tmp";

/// The folder of a step's checkpoint.
pub fn path(output_dir: &Path, step: u64) -> PathBuf {
    output_dir.join(format!("{PREFIX}{step}"))
}

/// The temporary folder in which a checkpoint is written.
pub fn temporary(complete: &Path) -> PathBuf {
    hidden(complete, TEMPORARY_SUFFIX)
}

/// All checkpoints, ascending by step.
///
/// # Errors
/// [`Error::Io`].
pub fn list(output_dir: &Path) -> Result<Vec<PathBuf>> {
    let step = |name: &str| name.strip_prefix(PREFIX)?.parse::<u64>().ok();
    let mut found: Vec<_> =
        entries(output_dir)?.into_iter().filter_map(|(name, path)| Some((step(&name)?, path))).collect();
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Creates an empty temporary folder, after checking for `needed_bytes` of free space and removing the remains of a crash.
pub fn prepare(temporary: &Path, needed_bytes: u64) -> Result<()> {
    let output_dir = parent(temporary);
    std::fs::create_dir_all(output_dir).map_err(Error::io(output_dir))?;
    for (name, path) in entries(output_dir)? {
        let is_ours = |name: &str| name.starts_with(PREFIX) || name.starts_with(FINAL);
        if name.strip_prefix('.').is_some_and(is_ours) && name.ends_with(TEMPORARY_SUFFIX) {
            remove_whole(&path).map_err(Error::io(path))?;
        }
    }
    check_space(output_dir, needed_bytes)?;
    std::fs::create_dir(temporary).map_err(Error::io(temporary))
}

/// Removes a temporary folder after an error.
pub fn remove(temporary: &Path) {
    if let Err(error) = remove_whole(temporary)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::warn!(
            "cannot remove the temporary folder {}: {error}; the next save will remove it",
            temporary.display()
        );
    }
}

/// Makes the temporary folder durable on disk and gives it its final name, replacing what has that name.
pub fn publish(temporary: &Path, complete: &Path) -> Result<()> {
    sync_tree(temporary)?;
    if !complete.is_symlink() && !complete.exists() {
        std::fs::rename(temporary, complete).map_err(Error::io(complete))?;
        return sync(parent(complete));
    }
    exchange(temporary, complete).map_err(Error::io(complete))?;
    sync(parent(complete))?;
    remove_whole(temporary).map_err(Error::io(temporary))
}

/// Removes a folder with its contents, or a file or link; links are not followed.
fn remove_whole(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path)?.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    }
}

/// Creates the folder `complete` atomically, new or in place of an empty one. `option` is the name under which the user gave it.
///
/// # Errors
/// [`Error::InvalidValue`] if the name is taken; the errors of `write`; [`Error::Io`].
pub fn write_new(option: &str, complete: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if complete.file_name().is_none() || complete.is_file() || !entries(complete)?.is_empty() {
        let expected = "a folder that does not exist yet or is empty";
        return Err(Error::invalid_value(option, complete.display(), expected));
    }
    refuse_within_checkpoint(option, complete)?;
    let temporary = temporary(complete);
    if temporary.exists() || temporary.is_symlink() {
        remove_whole(&temporary).map_err(Error::io(&temporary))?; // left by a killed process
    }
    std::fs::create_dir_all(&temporary).map_err(Error::io(&temporary))?;
    let written = write(&temporary).and_then(|()| publish(&temporary, complete));
    if written.is_err() {
        remove(&temporary);
    }
    written
}

/// Refuses a folder that is a checkpoint or is inside one, because files that the manifest does not record would invalidate it.
///
/// # Errors
/// [`Error::InvalidValue`] with the checkpoint.
pub fn refuse_within_checkpoint(option: &str, folder: &Path) -> Result<()> {
    let whole = std::path::absolute(folder).map_err(Error::io(folder))?;
    let is_checkpoint = |folder: &&Path| written(folder).is_some() && TrainerState::file(folder).exists();
    match whole.ancestors().find(is_checkpoint) {
        Some(checkpoint) => {
            let expected = format!(
                "a folder outside of the checkpoint {}: files inside a checkpoint would make it invalid",
                checkpoint.display()
            );
            Err(Error::invalid_value(option, folder.display(), expected))
        }
        None => Ok(()),
    }
}

/// Removes all but the newest `limit` checkpoints. The ones in `spared`, which are the one just written and the best, are always kept. If removal
/// fails, it only prints a warning.
pub fn keep_newest(output_dir: &Path, spared: [Option<&PathBuf>; 2], limit: Option<usize>) {
    let Some(limit) = limit else { return };
    let removed = list(output_dir).and_then(|mut others| {
        let num_all = others.len();
        others.retain(|folder| !spared.contains(&Some(folder)));
        let num_over = num_all.saturating_sub(limit.max(1)).min(others.len());
        others[..num_over].iter().try_for_each(|old| discard(old))
    });
    if let Err(error) = removed {
        console::say(format_args!("warning: save_total_limit: {error}"));
    }
}

/// Exchanges the names of two folders: atomically where the file system supports it, else (NFS) with a moment in which `b` does not exist.
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS) => {
            let aside = doomed(b);
            std::fs::rename(b, &aside)?;
            std::fs::rename(a, b)?;
            std::fs::rename(aside, a)
        }
        exchanged => exchanged.map_err(io::Error::from),
    }
}

/// Removes a checkpoint, renaming it first, so that a crash leaves no partial checkpoint under its name.
fn discard(complete: &Path) -> Result<()> {
    let doomed = doomed(complete);
    std::fs::rename(complete, &doomed).map_err(Error::io(complete))?;
    remove_whole(&doomed).map_err(Error::io(doomed))
}

/// # Errors
/// [`Error::Io`] with both numbers if fewer than `needed_bytes` are free for this user.
pub fn check_space(folder: &Path, needed_bytes: u64) -> Result<()> {
    let disk =
        rustix::fs::statvfs(folder).map_err(|error| Error::Io { path: folder.to_owned(), source: error.into() })?;
    let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free_bytes >= needed_bytes {
        return Ok(());
    }
    let message = format!(
        "not enough disk space: {needed_bytes} bytes are needed, {free_bytes} are free; free some space, choose \
         another folder, or lower save_total_limit"
    );
    Err(Error::Io { path: folder.to_owned(), source: io::Error::new(ErrorKind::StorageFull, message) })
}

fn doomed(complete: &Path) -> PathBuf {
    hidden(complete, &format!(".old{TEMPORARY_SUFFIX}"))
}

/// A name beside `complete` that [`list`] ignores and [`prepare`] removes.
fn hidden(complete: &Path, suffix: &str) -> PathBuf {
    let name = complete.file_name().unwrap_or_default().to_string_lossy();
    complete.with_file_name(format!(".{name}{suffix}"))
}

fn parent(folder: &Path) -> &Path {
    folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Names and paths of a folder's entries; empty if the folder does not exist.
fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let read = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(Error::io(folder))?,
    };
    let named = |entry: std::fs::DirEntry| (entry.file_name().to_string_lossy().into_owned(), entry.path());
    read.map(|entry| entry.map(named).map_err(Error::io(folder))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::manifest::Manifest;
    use super::*;
    use crate::error::ExitCode;

    #[test]
    fn the_disk_full_error_names_needed_and_free_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let temporary = temporary(&path(folder.path(), 7));
        prepare(&temporary, 1).unwrap();
        let error = prepare(&temporary, u64::MAX).unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::Storage);
        assert!(error.to_string().contains(&format!("disk space: {} bytes are needed", u64::MAX)), "{error}");
        assert!(!temporary.exists());
    }

    #[test]
    fn temporary_folders_are_not_listed_and_the_next_save_removes_them() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            ".checkpoint-3.tmp",
            ".checkpoint-2.old.tmp",
            ".final.tmp",
            "checkpoint-10",
            "checkpoint-9",
            "checkpoint-x",
        ] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        assert_eq!(list(folder.path()).unwrap(), [9, 10].map(|step| path(folder.path(), step)));
        prepare(&temporary(&path(folder.path(), 11)), 1).unwrap();
        let mut names: Vec<_> = entries(folder.path()).unwrap().into_iter().map(|(name, _)| name).collect();
        names.sort();
        assert_eq!(names, [".checkpoint-11.tmp", "checkpoint-10", "checkpoint-9", "checkpoint-x"]);
    }

    /// Files and links with the names of folders must neither fail a save nor survive it.
    #[test]
    fn files_and_links_named_like_checkpoints_do_not_block_a_save() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let link = |name: &str| std::os::unix::fs::symlink("nowhere", at(name)).unwrap();
        std::fs::write(at(".checkpoint-4.tmp"), "").unwrap();
        std::fs::write(at("checkpoint-5"), "").unwrap();
        link(".final.tmp");
        link("checkpoint-6");
        for step in [5, 6] {
            let complete = path(folder.path(), step);
            prepare(&temporary(&complete), 1).unwrap();
            publish(&temporary(&complete), &complete).unwrap();
            assert!(std::fs::symlink_metadata(complete).unwrap().is_dir());
        }
        let mut names: Vec<_> = entries(folder.path()).unwrap().into_iter().map(|(name, _)| name).collect();
        names.sort();
        assert_eq!(names, ["checkpoint-5", "checkpoint-6"]);
        std::fs::write(at("checkpoint-1"), "").unwrap();
        keep_newest(folder.path(), [None, None], Some(2));
        assert!(!at("checkpoint-1").exists() && !at(".checkpoint-1.old.tmp").exists());
    }

    #[test]
    fn a_new_folder_appears_complete_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("deep/model");
        let write = |fails: bool| {
            write_new("--to", &target, |at| {
                std::fs::write(at.join("config.json"), "{}").unwrap();
                if fails { Err(Error::bad_file(at, "no")) } else { Ok(()) }
            })
        };
        assert!(write(true).is_err());
        assert_eq!(std::fs::read_dir(target.parent().unwrap()).unwrap().count(), 0);
        std::fs::create_dir(&target).unwrap();
        std::fs::create_dir(temporary(&target)).unwrap(); // left by a killed process
        write(false).unwrap();
        std::fs::remove_dir_all(&target).unwrap();
        std::os::unix::fs::symlink("nowhere", temporary(&target)).unwrap();
        write(false).unwrap();
        let refused = write(false).unwrap_err().to_string();
        assert!(target.join("config.json").exists() && refused.starts_with("--to = "), "{refused}");
        assert_eq!(std::fs::read_dir(target.parent().unwrap()).unwrap().count(), 1);
        assert!(write_new("--to", Path::new("."), |_| Ok(())).is_err());
    }

    #[test]
    fn output_inside_a_checkpoint_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = path(folder.path(), 4);
        std::fs::create_dir(&checkpoint).unwrap();
        std::fs::write(checkpoint.join("trainer_state.json"), "{}").unwrap();
        Manifest::write(&checkpoint, Vec::new()).unwrap();
        let error = write_new("--output", &checkpoint.join("deep/model"), |_| Ok(())).unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::Configuration);
        assert!(error.to_string().contains("expected a folder outside of "), "{error}");
        assert!(refuse_within_checkpoint("output_dir", &checkpoint).is_err());
        std::fs::write(folder.path().join("manifest.json"), "{}").unwrap(); // not a manifest of this program
        refuse_within_checkpoint("output_dir", &folder.path().join("run")).unwrap();
        Manifest::verify(&checkpoint, &mut || ()).unwrap();
    }

    #[test]
    fn the_checkpoint_just_written_is_kept_whatever_its_step() {
        let folder = tempfile::tempdir().unwrap();
        let of_steps = |steps: &[u64]| steps.iter().map(|&step| path(folder.path(), step)).collect::<Vec<_>>();
        of_steps(&[3, 6, 9]).iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        keep_newest(folder.path(), [Some(&path(folder.path(), 3)), None], Some(2));
        assert_eq!(list(folder.path()).unwrap(), of_steps(&[3, 9]));
        keep_newest(folder.path(), [Some(&path(folder.path(), 9)), None], None);
        assert_eq!(list(folder.path()).unwrap(), of_steps(&[3, 9]));
    }
}
