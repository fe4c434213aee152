//! Ensures that only one run writes to an output folder; two would overwrite each other's files.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::writers::writes_folder;
use crate::error::{Error, Result};
use crate::ranks::World;
use crate::untrusted::Folder;

/// The lock file, which contains the id of the locking process.
const LOCK: &str = ".lock";

/// The exclusive right to write to an output folder, until it is dropped or its process ends in any way.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    lock: File,
}

impl Claim {
    /// Claims the folder again if it was deleted or moved. Returns whether it was.
    ///
    /// # Errors
    /// The errors of [`claim`], because another run may have created the folder again.
    pub fn renew(&mut self) -> Result<bool> {
        let own = self.lock.metadata().map_err(Error::io(&self.path))?;
        let output_dir = self.path.parent().unwrap_or(Path::new("."));
        let named = Folder::new(output_dir).open(LOCK).and_then(|file| file.metadata());
        if named.is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())) {
            return Ok(false);
        }
        if let Some(again) = lock(output_dir)? {
            *self = again;
        }
        Ok(true)
    }
}

/// Claims `output_dir` for this run, on rank 0 or, with `on_each_node`, on the first rank of each node. If the file system does not support locks,
/// this is logged and nothing is claimed.
///
/// # Errors
/// [`Error::InvalidValue`] with the id of the process that already writes there; [`Error::Io`].
pub fn claim(output_dir: &Path, world: &World, on_each_node: bool) -> Result<Option<Claim>> {
    if writes_folder(world, on_each_node) { lock(output_dir) } else { Ok(None) }
}

fn lock(output_dir: &Path) -> Result<Option<Claim>> {
    let path = output_dir.join(LOCK);
    let mut lock = Folder::new(output_dir).append(LOCK).map_err(Error::io(&path))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {
            let id = std::process::id().to_string();
            lock.set_len(0).and_then(|()| lock.write_all(id.as_bytes())).map_err(Error::io(&path))?;
            Ok(Some(Claim { path, lock }))
        }
        Err(Errno::WOULDBLOCK) => {
            let mut id = String::new();
            lock.read_to_string(&mut id).map_err(Error::io(&path))?;
            let expected = format!(
                "a folder that no other run writes to, but process {id} writes to this one; wait until it ends, stop \
                 it, or choose another folder"
            );
            Err(Error::invalid_value("output_dir", output_dir.display(), expected))
        }
        Err(error) => {
            tracing::warn!(
                "cannot lock {}: {error}; unable to check whether another run writes to this folder",
                path.display()
            );
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_folder_is_locked_until_its_run_ends() {
        let folder = tempfile::tempdir().unwrap();
        let (output_dir, world) = (folder.path().join("run"), World::single());
        for _ in 0..2 {
            let first = claim(&output_dir, &world, false).unwrap();
            let refused = claim(&output_dir, &world, false).unwrap_err().to_string();
            assert!(refused.contains(&format!("process {} writes to this one", std::process::id())), "{refused}");
            drop(first);
        }
        assert!(claim(&output_dir, &world, false).unwrap().is_some());
    }

    #[test]
    fn a_deleted_or_moved_output_folder_is_locked_again() {
        let folder = tempfile::tempdir().unwrap();
        let (output_dir, world) = (folder.path().join("run"), World::single());
        let mut own = claim(&output_dir, &world, false).unwrap().unwrap();
        assert!(!own.renew().unwrap());
        std::fs::remove_dir_all(&output_dir).unwrap();
        assert!(own.renew().unwrap() && !own.renew().unwrap());
        std::fs::rename(&output_dir, folder.path().join("moved")).unwrap();
        let other = claim(&output_dir, &world, false).unwrap();
        assert!(own.renew().unwrap_err().to_string().contains("writes to this one; wait until it ends"));
        drop(other);
    }
}
