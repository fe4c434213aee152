//! Sizes and hashes of a checkpoint's files, and making them durable.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

const FILE: &str = "manifest.json";
const FORMAT: u32 = 1;

/// Every file of a checkpoint but the manifest itself.
#[derive(Debug, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    world_size: usize,
    files: BTreeMap<String, FileRecord>,
}

/// What a file must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Path below the checkpoint's folder.
    pub path: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256 in hexadecimal digits.
    pub sha256: String,
}

impl FileRecord {
    /// Reads and hashes a file.
    pub fn of(folder: &Path, path: &str) -> Result<Self> {
        let full = folder.join(path);
        let mut file = File::open(&full).map_err(Error::io(&full))?;
        let (mut hasher, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
        loop {
            match file.read(&mut buffer).map_err(Error::io(&full))? {
                0 => break,
                count => {
                    hasher.update(&buffer[..count]);
                    bytes += count as u64;
                }
            }
        }
        let sha256 = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { path: path.to_owned(), bytes, sha256 })
    }
}

impl Manifest {
    /// Records every file below `folder`; `known` ones were hashed by the ranks that wrote them.
    pub fn write(folder: &Path, world_size: usize, known: Vec<FileRecord>) -> Result<()> {
        let mut files: BTreeMap<_, _> = known.into_iter().map(|record| (record.path.clone(), record)).collect();
        for path in files_below(folder)? {
            if !files.contains_key(&path) {
                files.insert(path.clone(), FileRecord::of(folder, &path)?);
            }
        }
        let manifest = Manifest { format: FORMAT, world_size, files };
        let text = serde_json::to_string_pretty(&manifest).expect("a manifest is plain data");
        let path = folder.join(FILE);
        std::fs::write(&path, text + "\n").map_err(Error::io(path))
    }

    /// Checks every file's size, then every hash.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the first file that is missing or differs.
    pub fn verify(folder: &Path) -> Result<()> {
        let bad = |message: String| Error::Checkpoint { path: folder.to_owned(), message };
        let text = std::fs::read_to_string(folder.join(FILE)).map_err(|error| bad(format!("{FILE}: {error}")))?;
        let manifest: Manifest = serde_json::from_str(&text).map_err(|error| bad(format!("{FILE}: {error}")))?;
        if manifest.format != FORMAT {
            return Err(bad(format!("format {}, this version reads {FORMAT}", manifest.format)));
        }
        for record in manifest.files.values() {
            let actual =
                std::fs::metadata(folder.join(&record.path)).map_err(|e| bad(format!("{}: {e}", record.path)))?;
            if actual.len() != record.bytes {
                return Err(bad(format!("{}: {} bytes, expected {}", record.path, actual.len(), record.bytes)));
            }
        }
        for record in manifest.files.values() {
            if FileRecord::of(folder, &record.path)? != *record {
                return Err(bad(format!("{}: the contents changed since it was written (SHA-256)", record.path)));
            }
        }
        Ok(())
    }
}

/// Relative paths of all files, in order.
fn files_below(folder: &Path) -> Result<Vec<String>> {
    fn walk(root: &Path, folder: &Path, found: &mut Vec<String>) -> std::io::Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
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

/// Makes a folder's files and entries durable.
pub fn sync_tree(folder: &Path) -> Result<()> {
    for file in files_below(folder)? {
        sync(&folder.join(file))?;
    }
    let folders: Vec<PathBuf> = vec![folder.join(super::shards::FOLDER), folder.to_owned()];
    folders.iter().filter(|folder| folder.exists()).try_for_each(|folder| sync(folder))
}

/// Makes one file or folder durable.
pub fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("optimizer")).unwrap();
        for (name, text) in [("a", "one"), ("optimizer/b", "two")] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Manifest::write(folder.path(), 2, Vec::new()).unwrap();
        Manifest::verify(folder.path()).unwrap();
        let message = || Manifest::verify(folder.path()).unwrap_err().to_string();
        std::fs::write(folder.path().join("a"), "oxe").unwrap();
        assert!(message().contains("a: the contents changed"), "{}", message());
        std::fs::write(folder.path().join("a"), "on").unwrap();
        assert!(message().contains("a: 2 bytes, expected 3"), "{}", message());
        std::fs::remove_file(folder.path().join("optimizer/b")).unwrap();
        std::fs::write(folder.path().join("a"), "one").unwrap();
        assert!(message().contains("optimizer/b"), "{}", message());
    }
}
