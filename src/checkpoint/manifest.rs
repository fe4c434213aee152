//! The manifest of a checkpoint, with sizes and hashes of its files, and making files durable on disk.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::{Component, Path};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::digits::hexadecimal;
use super::shards::FOLDER as SHARDS;
use super::state::FILE as STATE;
use crate::console::checkpoint_progress;
use crate::error::{Error, Result};
use crate::model::sync;
use crate::untrusted::{self, MAX_INDEX_BYTES};

const FILE: &str = "manifest.json";
const FORMAT: u32 = 1;

/// Records of all files in a checkpoint except the manifest itself.
#[derive(Debug, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    files: Vec<FileRecord>,
}

/// Size and hash of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Path relative to the checkpoint's folder.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 in hexadecimal digits.
    pub sha256: String,
}

impl FileRecord {
    /// Reads and hashes a file; `moved` is called with the number of bytes of each part.
    fn of(folder: &Path, path: &str, moved: &mut dyn FnMut(u64)) -> io::Result<Self> {
        let mut file = untrusted::open(&folder.join(path))?;
        let (mut hasher, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => {
                    hasher.update(&buffer[..count]);
                    bytes += count as u64;
                    moved(count as u64);
                }
            }
        }
        Ok(Self { path: path.to_owned(), bytes, sha256: hexadecimal(&hasher.finalize()) })
    }

    /// Checks that the file exists within the folder and has this size.
    fn check_size(&self, folder: &Path) -> Result<(), String> {
        if !Path::new(&self.path).components().all(|part| matches!(part, Component::Normal(_))) {
            return Err("the recorded path leads out of the checkpoint's folder".to_owned());
        }
        let actual = std::fs::metadata(folder.join(&self.path)).map_err(|error| error.to_string())?;
        match actual.len() {
            bytes if bytes == self.bytes && actual.is_file() => Ok(()),
            bytes => Err(format!(
                "the file has {bytes} bytes, expected {}; copy it again or use another checkpoint",
                self.bytes
            )),
        }
    }
}

/// Explains why the manifest of `folder` cannot be read.
fn unread(folder: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound if folder.is_dir() => {
            "the file is missing: this is not a checkpoint of colo-grpo, or the checkpoint is incomplete (its manifest \
             is written last)"
                .to_owned()
        }
        io::ErrorKind::NotFound => "no such folder: expected the folder of a checkpoint, or latest".to_owned(),
        _ => error.to_string(),
    }
}

impl Manifest {
    /// Records every file below `folder`; the ranks that wrote the `known` ones have already hashed them.
    pub fn write(folder: &Path, known: Vec<FileRecord>) -> Result<()> {
        let mut files = known;
        for path in files_below(folder)? {
            if !files.iter().any(|record| record.path == path) {
                let record = FileRecord::of(folder, &path, &mut |_| ()); // runs on a helper thread, which reports no progress
                files.push(record.map_err(Error::io(folder.join(&path)))?);
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let manifest = Manifest { format: FORMAT, files };
        let text = serde_json::to_string_pretty(&manifest).expect("a manifest is plain data");
        let path = folder.join(FILE);
        std::fs::write(&path, text + "\n").map_err(Error::io(path))
    }

    /// Checks every file's size, then every hash; `moved` is called for every MiB that is read.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the first file that is missing or differs.
    pub fn verify(folder: &Path, moved: &mut dyn FnMut()) -> Result<Self> {
        let bad = |file: &str, message: String| Error::Checkpoint {
            path: folder.to_owned(),
            message: format!("{file}: {message}"),
        };
        let text =
            untrusted::read(&folder.join(FILE), MAX_INDEX_BYTES).map_err(|error| bad(FILE, unread(folder, &error)))?;
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| bad(FILE, error.to_string()))?;
        if manifest.format != FORMAT {
            return Err(bad(
                FILE,
                format!(
                    "the manifest has format {}, but this version of colo-grpo reads format {FORMAT}",
                    manifest.format
                ),
            ));
        }
        if let Some(file) = manifest.unrecorded(folder)? {
            return Err(bad(
                &file,
                format!(
                    "the file is not listed in {FILE} and may belong to another run; remove it or use another \
                     checkpoint"
                ),
            ));
        }
        for record in &manifest.files {
            record.check_size(folder).map_err(|message| bad(&record.path, message))?;
        }
        let total = manifest.files.iter().map(|record| record.bytes).sum();
        let mut told = checkpoint_progress("checkpoint read", total);
        for record in &manifest.files {
            let found = FileRecord::of(folder, &record.path, &mut |bytes| {
                moved();
                told(bytes);
            });
            if found.map_err(|error| bad(&record.path, error.to_string()))? != *record {
                return Err(bad(
                    &record.path,
                    "the file was changed after the checkpoint was written (its SHA-256 differs); copy it again or use \
                     another checkpoint"
                        .to_owned(),
                ));
            }
        }
        Ok(manifest)
    }

    /// A hash of all files except optimizer state, which is written by one rank each. It is equal for copies of one checkpoint on several nodes.
    pub fn digest(&self) -> String {
        let shared = self.files.iter().filter(|record| !Path::new(&record.path).starts_with(SHARDS));
        let hash = shared.fold(Sha256::new(), |hash, FileRecord { path, sha256, .. }| {
            hash.chain_update(format!("{path} {sha256}\n"))
        });
        hexadecimal(&hash.finalize())
    }

    /// Finds a file that a resume would read but that is not recorded. The trainer's state must exist and be recorded.
    fn unrecorded(&self, folder: &Path) -> Result<Option<String>> {
        let recorded: BTreeSet<&str> = self.files.iter().map(|record| record.path.as_str()).collect();
        let is_read =
            |file: &String| [".json", ".safetensors"].iter().any(|end| file.ends_with(end)) || file.starts_with(SHARDS);
        let found = files_below(folder)
            .map_err(|error| Error::Checkpoint { path: folder.to_owned(), message: error.to_string() })?;
        let read = found.into_iter().filter(|file| is_read(file) && file != FILE);
        let mut needed = read.chain([STATE.to_owned()]);
        Ok(needed.find(|file| !recorded.contains(file.as_str())))
    }
}

/// When a checkpoint was written; `None` if the folder is not a checkpoint.
pub fn written(folder: &Path) -> Option<SystemTime> {
    std::fs::metadata(folder.join(FILE)).and_then(|manifest| manifest.modified()).ok()
}

/// Relative paths of all files, in order. Links to folders are refused, because they could form cycles.
fn files_below(folder: &Path) -> Result<Vec<String>> {
    fn walk(root: &Path, folder: &Path, found: &mut Vec<String>) -> std::io::Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() && path.is_symlink() {
                return Err(io::Error::other(format!(
                    "{}: symbolic links to folders are not allowed in a checkpoint",
                    path.display()
                )));
            } else if path.is_dir() {
                walk(root, &path, found)?;
            } else if let Ok(relative) = path.strip_prefix(root) {
                found.push(relative.to_string_lossy().into_owned());
            }
        }
        Ok(())
    }
    let mut found = Vec::new();
    walk(folder, folder, &mut found).map_err(Error::io(folder))?;
    found.sort();
    Ok(found)
}

/// Makes everything below a folder durable on disk, including the folder's own entries.
pub fn sync_tree(folder: &Path) -> Result<()> {
    let files = files_below(folder)?;
    let folders: BTreeSet<&Path> = files.iter().flat_map(|file| Path::new(file).ancestors().skip(1)).collect();
    let files = files.iter().map(Path::new);
    files.chain(folders).try_for_each(|path| sync(&folder.join(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_named_by_verification() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("optimizer")).unwrap();
        for (name, text) in [("a", "one"), ("optimizer/b", "two"), (STATE, "{}")] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Manifest::write(folder.path(), Vec::new()).unwrap();
        let verify = || Manifest::verify(folder.path(), &mut || ());
        verify().unwrap();
        let message = || verify().unwrap_err().to_string();
        std::fs::write(folder.path().join("a"), "oxe").unwrap();
        assert!(message().contains("a: the file was changed after the checkpoint was written"), "{}", message());
        std::fs::write(folder.path().join("a"), "on").unwrap();
        assert!(message().contains("a: the file has 2 bytes, expected 3"), "{}", message());
        std::fs::remove_file(folder.path().join("optimizer/b")).unwrap();
        std::fs::write(folder.path().join("a"), "one").unwrap();
        assert!(message().contains("optimizer/b"), "{}", message());
    }

    #[test]
    fn verification_reports_progress_every_mebibyte() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("large"), vec![7; 5 << 19]).unwrap();
        std::fs::write(folder.path().join(STATE), "{}").unwrap();
        Manifest::write(folder.path(), Vec::new()).unwrap();
        let mut num_told = 0;
        Manifest::verify(folder.path(), &mut || num_told += 1).unwrap();
        assert_eq!(num_told, 4);
    }

    /// A manifest that does not record the files to read must be refused.
    #[test]
    fn files_missing_from_the_manifest_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let message = || Manifest::verify(folder.path(), &mut || ()).unwrap_err().to_string();
        std::fs::write(path(FILE), r#"{"format": 1, "files": []}"#).unwrap();
        assert!(message().contains("trainer_state.json: the file is not listed in manifest.json"), "{}", message());
        std::fs::write(path(STATE), "{}").unwrap();
        assert!(message().contains("trainer_state.json: the file is not listed in manifest.json"), "{}", message());
        std::fs::remove_file(path(FILE)).unwrap();
        assert!(
            message().contains("manifest.json: the file is missing: this is not a checkpoint of colo-grpo"),
            "{}",
            message()
        );
        let nowhere = Manifest::verify(&path("nowhere"), &mut || ()).unwrap_err().to_string();
        assert!(nowhere.contains("no such folder: expected the folder of a checkpoint"), "{nowhere}");
        Manifest::write(folder.path(), Vec::new()).unwrap();
        Manifest::verify(folder.path(), &mut || ()).unwrap();
        std::fs::write(path("model.safetensors"), "").unwrap();
        assert!(message().contains("model.safetensors: the file is not listed in manifest.json"), "{}", message());
    }

    #[test]
    fn links_to_folders_are_refused_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(STATE), "{}").unwrap();
        Manifest::write(folder.path(), Vec::new()).unwrap();
        for name in ["a", "b"] {
            std::os::unix::fs::symlink(".", folder.path().join(name)).unwrap();
        }
        let error = Manifest::verify(folder.path(), &mut || ()).unwrap_err();
        assert_eq!(error.exit_code(), crate::error::ExitCode::Checkpoint);
        assert!(error.to_string().contains("symbolic links to folders are not allowed"), "{error}");
    }

    #[test]
    fn pipes_and_links_to_devices_are_refused_without_being_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let message = || {
            let error = Manifest::verify(folder.path(), &mut || ()).unwrap_err();
            assert_eq!(error.exit_code(), crate::error::ExitCode::Checkpoint);
            error.to_string()
        };
        std::os::unix::fs::symlink("/dev/zero", path(FILE)).unwrap();
        assert!(message().contains("found a device"), "{}", message());
        std::fs::remove_file(path(FILE)).unwrap();
        std::fs::write(path(STATE), "{}").unwrap();
        Manifest::write(folder.path(), Vec::new()).unwrap();
        std::fs::remove_file(path(STATE)).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, path(STATE), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(message().contains("expected 2"), "{}", message());
    }
}
