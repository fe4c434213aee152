//! Temporary folders. Each is locked while its process lives, so that the next start can recognize and remove the folders of killed processes.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;

use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, flock, openat, renameat, statat, unlinkat};
use rustix::io::Errno;

/// A private folder in the system's temporary folder. Dropping it removes it with its contents.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    _lock: File,
}

impl Scratch {
    /// Creates an empty temporary folder.
    ///
    /// # Errors
    /// The errors of the file system.
    pub fn new() -> io::Result<Self> {
        Self::new_in(&std::env::temp_dir())
    }

    fn new_in(parent: &Path) -> io::Result<Self> {
        sweep();
        loop {
            let path = tempfile::Builder::new().prefix(&prefix()).tempdir_in(parent)?.keep();
            let lock = open_folder(&path)?;
            // A sweep may have seen the folder before it was locked.
            let is_locked = try_lock(&lock) != Err(Errno::WOULDBLOCK);
            let is_there =
                fs::metadata(&path).is_ok_and(|found| found.ino() == lock.metadata().map_or(0, |own| own.ino()));
            if is_locked && is_there {
                return Ok(Self { path, _lock: lock });
            }
        }
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.path) {
            tracing::debug!("{}: {error}: the next start removes it", self.path.display());
        }
    }
}

/// Removes the temporary folders of this user's killed processes; runs once per process. What cannot be removed stays for the next start.
pub fn sweep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| sweep_in(&std::env::temp_dir()));
}

fn sweep_in(parent: &Path) {
    let prefix = prefix();
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)) {
        if let Err(error) = remove_if_dead(&entry.path()) {
            tracing::debug!("{}: {error}", entry.path().display());
        }
    }
}

/// Removes a folder of this user if no process holds its lock.
fn remove_if_dead(path: &Path) -> io::Result<()> {
    let folder = open_folder(path)?;
    let is_own = folder.metadata()?.uid() == rustix::process::geteuid().as_raw();
    match is_own && try_lock(&folder).is_ok() {
        true => remove_tree(path), // the lock is held until it is gone
        false => Ok(()),
    }
}

/// Prefix of every folder's name. It names the host, as a file system may be shared with hosts whose locks are not visible here.
fn prefix() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("colo-grpo-{}-", host.trim())
}

fn try_lock(folder: &File) -> Result<(), Errno> {
    flock(folder, FlockOperation::NonBlockingLockExclusive)
}

fn open_folder(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path)
}

/// Removes a folder with its contents, whatever its depth and permissions, without following links.
///
/// # Errors
/// The errors of the file system.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let root = open_folder(path)?;
    unlock(&root)?;
    let mut num_moved = 0;
    // Folders within folders are moved up to the root, so that neither the stack nor open files grow with the depth.
    while remove_entries(&root, &root, &mut num_moved)? {}
    fs::remove_dir(path)
}

/// Removes files and empties folders one level deep. Returns whether there was anything to remove.
fn remove_entries(root: &File, folder: &File, num_moved: &mut u64) -> io::Result<bool> {
    let mut has_entries = false;
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        has_entries = true;
        let is_folder = match entry.file_type() {
            FileType::Unknown => {
                FileType::from_raw_mode(statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode).is_dir()
            }
            known => known.is_dir(),
        };
        if !is_folder {
            unlinkat(folder, name, AtFlags::empty())?;
            continue;
        }
        let inner = open_within(folder, name)?;
        if !std::ptr::eq(root, folder) {
            move_up(root, folder, name, num_moved)?;
            continue;
        }
        while remove_entries(root, &inner, num_moved)? {}
        unlinkat(root, name, AtFlags::REMOVEDIR)?;
    }
    Ok(has_entries)
}

fn move_up(root: &File, folder: &File, name: &OsStr, num_moved: &mut u64) -> io::Result<()> {
    loop {
        *num_moved += 1;
        match renameat(folder, name, root, format!(".moved-{num_moved}")) {
            Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
            moved => return Ok(moved?),
        }
    }
}

/// Opens a folder inside another one, whatever its permissions.
fn open_within(folder: &File, name: &OsStr) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let handle = File::from(openat(folder, name, flags, Mode::empty())?);
    unlock(&handle)?;
    File::open(alias(&handle))
}

/// Gives this user all permissions on a folder.
fn unlock(folder: &File) -> io::Result<()> {
    fs::set_permissions(alias(folder), fs::Permissions::from_mode(0o700))
}

/// A path that refers to exactly this open folder.
fn alias(folder: &File) -> String {
    format!("/proc/self/fd/{}", folder.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn scratch_folders_of_dead_processes_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let own = Scratch::new_in(parent.path()).unwrap();
        let dead = parent.path().join(format!("{}dead", prefix()));
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("file"), "").unwrap();
        fs::create_dir(parent.path().join("another-program")).unwrap();
        sweep_in(parent.path());
        assert!(own.path().exists() && !dead.exists());
        drop(own);
        assert_eq!(names(parent.path()), ["another-program"]);
    }

    #[test]
    fn a_symbolic_link_named_like_a_scratch_folder_is_not_followed() {
        let (parent, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("kept"), "").unwrap();
        let link = parent.path().join(format!("{}link", prefix()));
        std::os::unix::fs::symlink(outside.path(), &link).unwrap();
        sweep_in(parent.path());
        let scratch = Scratch::new_in(parent.path()).unwrap();
        std::os::unix::fs::symlink(outside.path(), scratch.path().join("link")).unwrap();
        drop(scratch);
        assert_eq!(names(outside.path()), ["kept"]);
    }

    #[test]
    fn scratch_folders_are_removed_despite_depth_and_permissions() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::new_in(parent.path()).unwrap();
        let locked = scratch.path().join("locked/inner");
        fs::create_dir_all(&locked).unwrap();
        fs::write(locked.join("file"), "").unwrap();
        for folder in [locked.as_path(), locked.parent().unwrap()] {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o000)).unwrap();
        }
        let mut deepest = open_folder(scratch.path()).unwrap();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&deepest, "a", Mode::RWXU).unwrap();
            deepest = open_within(&deepest, OsStr::new("a")).unwrap();
        }
        drop((deepest, scratch));
        assert_eq!(names(parent.path()), Vec::<String>::new());
    }
}
