//! Safe reading of untrusted files: opening them, and threads with limits for processing them.
//!
//! Only regular files are read, so a pipe cannot hang a run and a device cannot fill its memory. Every kind of file has a largest size. `Confined`
//! runs work whose depth, memory or time the file decides on a thread with limits. `Folder` reads and writes below a folder without following links.
//! A `KeyTable` says what the keys of a file mean here.

mod confined;
mod folder;
mod keys;
mod meter;
#[cfg(test)]
pub(crate) mod testing;

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

pub(crate) use confined::{Confined, ThreadLimits, once};
pub(crate) use folder::Folder;
pub(crate) use keys::KeyTable;
pub use meter::MeteredAllocator;

/// Largest size of a run's TOML or YAML configuration in bytes.
pub(crate) const MAX_RUN_CONFIG_BYTES: u64 = 1 << 20;
/// Largest size in bytes of a JSON file that describes a model, adapters or a tokenizer's special tokens.
pub(crate) const MAX_MODEL_JSON_BYTES: u64 = 8 << 20;
/// Largest size of a `tokenizer.json` in bytes.
pub(crate) const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Largest size of a chat template in bytes.
pub(crate) const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
/// Largest size in bytes of an index of weight files or a checkpoint's manifest.
pub(crate) const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Largest size of a data set's README.md in bytes.
pub(crate) const MAX_README_BYTES: u64 = 4 << 20;
/// Largest size in bytes of a file with a few words, such as an access token or a commit.
pub(crate) const MAX_WORDS_BYTES: u64 = 64 << 10;
/// Largest size in bytes of a run's log, or of a trainer's saved state, which contains a log.
pub(crate) const MAX_LOG_BYTES: u64 = 1 << 30;

/// First line of a Git LFS pointer, the text that a clone without Git LFS contains instead of a large file.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1\n";

/// Opens a regular file for reading. Never blocks; a pipe is rejected.
///
/// # Errors
/// The system's error, or an error if the file is not a regular file or is a Git LFS pointer.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    refuse_unless_regular(&std::fs::metadata(path)?)?; // a device is not even opened
    regular(OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?)
}

/// Checks that the file is a regular file and not a Git LFS pointer.
fn regular(file: File) -> io::Result<File> {
    refuse_unless_regular(&file.metadata()?)?;
    let mut start = [0; LFS_POINTER.len()];
    match file.read_at(&mut start, 0) {
        Ok(num_bytes) if start[..num_bytes] == *LFS_POINTER => Err(io::Error::other(
            "this is a Git LFS pointer, not the file itself: fetch the file with `git lfs pull` in that clone, or with \
             `hf download NAME`",
        )),
        _ => Ok(file), // what cannot be read is said by who reads it
    }
}

/// Reads a regular file of at most `max_bytes`.
///
/// # Errors
/// The errors of [`open`], and an error with both sizes if the file is larger.
pub(crate) fn read(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    read_all(open(path)?, max_bytes)
}

fn read_all(file: File, max_bytes: u64) -> io::Result<Vec<u8>> {
    let num_bytes = file.metadata()?.len();
    let too_large = |bytes: u64| io::Error::other(format!("it has {bytes} bytes: expected at most {max_bytes}"));
    if num_bytes > max_bytes {
        return Err(too_large(num_bytes));
    }
    let mut bytes = Vec::with_capacity(num_bytes as usize);
    file.take(max_bytes + 1).read_to_end(&mut bytes)?; // it may grow meanwhile
    if bytes.len() as u64 > max_bytes { Err(too_large(bytes.len() as u64)) } else { Ok(bytes) }
}

/// Reads a regular UTF-8 file of at most `max_bytes`.
///
/// # Errors
/// The errors of [`read`], and an error with the offset of the first byte that is not UTF-8.
pub(crate) fn read_text(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read(path, max_bytes)?).map_err(|error| io::Error::other(format!("not UTF-8: {error}")))
}

fn refuse_unless_regular(metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    let found = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(io::Error::other(format!("expected a regular file, found {found}")))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode};

    use super::*;

    #[test]
    fn only_regular_files_of_a_known_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let message = |name: &str| read(&path(name), 4).unwrap_err().to_string();
        rustix::fs::mknodat(CWD, path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("device")).unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        std::fs::write(path("long"), "12345").unwrap();
        std::fs::write(path("text"), "1234").unwrap();
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n";
        std::fs::write(path("pointer"), pointer).unwrap();
        std::os::unix::fs::symlink(path("text"), path("link")).unwrap();
        for (name, expected) in [
            ("pipe", "expected a regular file, found a pipe"),
            ("device", "expected a regular file, found a device"),
            ("folder", "expected a regular file, found a folder"),
            ("long", "it has 5 bytes: expected at most 4"),
            (
                "pointer",
                "this is a Git LFS pointer, not the file itself: fetch the file with `git lfs pull` in that clone, or \
                 with `hf download NAME`",
            ),
            ("a\0b", "file name contained an unexpected NUL byte"),
        ] {
            assert_eq!(message(name), expected, "{name:?}");
        }
        assert_eq!(read_text(&path("link"), 4).unwrap(), "1234");
        assert_eq!(read(&path("none"), 4).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
