//! Cache files that save work at later starts on the same GPU: compiled kernels, and timings of GEMM algorithms.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::library::environment;
use crate::error::{Error, Result};

/// Path of the cache file for `key`, in a folder for its `kind`; `name` makes the file's name readable.
///
/// # Errors
/// [`Error::Environment`] if the user has no cache folder.
pub(super) fn path(kind: &str, name: &str, key: &str) -> Result<PathBuf> {
    Ok(folder()?.join(kind).join(file_name(kind, name, key)))
}

/// The name of the cache file for `key`; it contains a hash of the key.
pub(super) fn file_name(kind: &str, name: &str, key: &str) -> String {
    let hash: String = Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{name}-{}.{kind}", &hash[..32])
}

/// Path of a file that was installed with the program, in a folder `kernels` beside the program or beside its `bin` folder.
pub(super) fn packaged(file_name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    packaged_beside(&program, file_name)
}

/// Looks in `kernels` beside the program, or beside the folder `bin` that contains it. No other folder above belongs to the package.
fn packaged_beside(program: &Path, file_name: &str) -> Option<PathBuf> {
    let folder = program.parent()?;
    let above = folder.parent().filter(|_| folder.file_name().is_some_and(|name| name == "bin"));
    let places = [Some(folder), above].into_iter().flatten();
    places.map(|place| place.join("kernels").join(file_name)).find(|path| path.is_file())
}

/// Reads a file through `parse`; returns `None` if it is missing or `parse` rejects it. Rejected files are removed, so that they can be written
/// again.
pub(super) fn read<T>(path: &Path, parse: impl FnOnce(Vec<u8>) -> Option<T>) -> Result<Option<T>> {
    let parsed = match std::fs::read(path) {
        Ok(bytes) => parse(bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(path)(error)),
    };
    if parsed.is_none() {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!("cannot delete the invalid cache file {}: {error}", path.display());
            }
            _ => (),
        }
    }
    Ok(parsed)
}

/// Writes `bytes` for later starts, unless another process has written the file first: then that content stays, and callers read it back. A failure
/// is only logged, as it costs time but no correctness; `done` names the work that will be repeated.
pub(super) fn keep(path: &Path, bytes: &[u8], done: &str) {
    if let Err(error) = write(path, bytes) {
        tracing::warn!("cannot write to the cache, so {done} again at every start: {error}");
    }
}

/// Writes the file atomically and durably, but only if it does not exist yet, so that the first of several ranks wins.
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

/// The cache folder: `$COLO_GRPO_CACHE`, `$XDG_CACHE_HOME/colo-grpo` or `~/.cache/colo-grpo`, the same as in scripts/setup.sh.
fn folder() -> Result<PathBuf> {
    let folder = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let own = folder("COLO_GRPO_CACHE")
        .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("colo-grpo")))
        .or_else(|| Some(folder("HOME")?.join(".cache/colo-grpo")));
    own.ok_or_else(|| environment("no folder for the cache of compiled kernels: set COLO_GRPO_CACHE or HOME"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packaged_kernels_are_found_by_their_full_name() {
        let folder = tempfile::tempdir().unwrap();
        let [beside, above] = ["bin/kernels", "kernels"].map(|place| folder.path().join(place));
        let (program, name) = (folder.path().join("bin/colo-grpo"), file_name("cubin", "norm", "sm_90a (13, 0)"));
        assert_eq!(packaged_beside(&program, &name), None);
        for place in [&above, &beside] {
            std::fs::create_dir_all(place).unwrap();
            std::fs::write(place.join(&name), b"image").unwrap();
            assert_eq!(
                packaged_beside(&program, &name),
                Some(place.join(&name)),
                "the program's own folder comes first"
            );
        }
        let elsewhere = folder.path().join("other/colo-grpo");
        assert_eq!(packaged_beside(&elsewhere, &name), None, "a folder above that is not the package's");
        let stale = file_name("cubin", "norm", "sm_90a (13, 1)");
        assert_eq!(packaged_beside(&program, &stale), None, "another compiler's kernel has another name");
    }

    #[test]
    fn a_cached_file_is_kept_until_it_is_invalid() {
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
