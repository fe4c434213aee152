//! Files that spare later starts some work on the same GPU: compiled kernels, what was timed of products.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::library::environment;
use crate::error::{Error, Result};

/// Where what `key` decides is kept, by its kind and a name for people.
///
/// # Errors
/// [`Error::Environment`] where the user has no cache folder.
pub(super) fn path(kind: &str, name: &str, key: &str) -> Result<PathBuf> {
    let hash: String = Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(folder()?.join(kind).join(format!("{name}-{}.{kind}", &hash[..32])))
}

/// Reads a file with `parse`, if it is there. One that `parse` rejects is replaced later.
pub(super) fn read<T>(path: &Path, parse: impl FnOnce(Vec<u8>) -> Option<T>) -> Result<Option<T>> {
    let parsed = match std::fs::read(path) {
        Ok(bytes) => parse(bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(path)(error)),
    };
    if parsed.is_none() {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!("{} is of no use and stays: {error}", path.display());
            }
            _ => (),
        }
    }
    Ok(parsed)
}

/// Keeps `bytes` for later starts, unless another process was faster: what that one has found stays, and who goes by it reads it
/// back. Where keeping fails it only costs time: `done` says what is done again.
pub(super) fn keep(path: &Path, bytes: &[u8], done: &str) {
    if let Err(error) = write(path, bytes) {
        tracing::warn!("{done} again at every start: {error}");
    }
}

/// Whole or not at all, after a power cut too, and the first of several ranks alone.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    let mut draft = tempfile::NamedTempFile::new_in(folder).map_err(Error::io(folder))?;
    draft.write_all(bytes).and_then(|()| draft.as_file().sync_all()).map_err(Error::io(path))?;
    match draft.persist_noclobber(path) {
        Err(error) if error.error.kind() != ErrorKind::AlreadyExists => Err(Error::io(path)(error.error)),
        _ => Ok(()),
    }
}

/// `$COLO_GRPO_CACHE`, `$XDG_CACHE_HOME/colo-grpo` or `~/.cache/colo-grpo`, as scripts/setup.sh has it.
fn folder() -> Result<PathBuf> {
    let folder = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let own = folder("COLO_GRPO_CACHE")
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("colo-grpo")))
        .or_else(|| Some(folder("HOME")?.join(".cache/colo-grpo")));
    own.ok_or_else(|| environment("set COLO_GRPO_CACHE or HOME: kernels are kept there"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_file_is_kept_whole_until_it_is_of_no_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/kernel.cubin");
        assert_eq!(read(&path, Some).unwrap(), None);
        write(&path, b"image").unwrap();
        write(&path, b"another").unwrap();
        assert_eq!(read(&path, Some).unwrap().unwrap(), b"image");
        assert_eq!(read(&path, |_| None::<()>).unwrap(), None);
        write(&path, b"another").unwrap();
        assert_eq!(read(&path, Some).unwrap().unwrap(), b"another");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no drafts left");
    }
}
