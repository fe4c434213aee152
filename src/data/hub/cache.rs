//! The directory layout of `huggingface_hub`'s cache: `blobs` holds contents by hash, `snapshots` holds links to them by commit and file name,
//! `refs` holds the commit of each branch.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::Repo;
use crate::error::{Error, Result};
use crate::untrusted::{self, MAX_WORDS_BYTES};

/// Deepest folder level of a repository that is read.
const MAX_DEPTH: usize = 16;

/// The folder of one repository in the cache.
#[derive(Debug, Clone)]
pub(super) struct RepoCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub fn new(cache: &Path, repo: &Repo) -> Self {
        let name = format!("{}--{}", repo.plural(), repo.name.replace('/', "--"));
        Self { locks: cache.join(".locks").join(&name), folder: cache.join(name) }
    }

    /// The commit of `revision` when it was last looked up, or `revision` itself if it is a commit.
    pub fn commit(&self, revision: &str) -> Option<String> {
        let named = untrusted::read_text(&self.reference(revision)?, MAX_WORDS_BYTES).ok();
        let commit = named.map_or_else(|| revision.to_owned(), |text| text.trim().to_owned());
        (is_word(&commit) && self.snapshot(&commit).is_dir()).then_some(commit)
    }

    /// Records that `revision` is at `commit`.
    pub fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        let Some(path) = self.reference(revision).filter(|_| revision != commit) else { return Ok(()) };
        if untrusted::read_text(&path, MAX_WORDS_BYTES).is_ok_and(|known| known == commit) {
            return Ok(());
        }
        let written = make_parent(&path).and_then(|()| fs::write(&path, commit));
        written.map_err(Error::io(path))
    }

    /// The folder that holds the files of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The path of the contents with this hash.
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// The file that a process locks while it downloads these contents.
    pub fn lock(&self, etag: &str) -> PathBuf {
        self.locks.join(format!("{etag}.lock"))
    }

    /// Links the contents with hash `etag` as the file `name` of a commit.
    pub fn link(&self, commit: &str, name: &str, etag: &str) -> io::Result<()> {
        let path = self.snapshot(commit).join(name);
        make_parent(&path)?;
        let up = "../".repeat(2 + name.matches('/').count());
        let _ = fs::remove_file(&path); // a link to contents that are gone
        match std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), &path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    /// Names of the commit's files that are in the cache.
    pub fn names(&self, commit: &str) -> Vec<String> {
        files_below(&self.snapshot(commit))
    }

    fn reference(&self, revision: &str) -> Option<PathBuf> {
        is_safe(revision).then(|| self.folder.join("refs").join(revision))
    }
}

/// The repository and commit of a snapshot folder in the cache.
#[derive(Debug, PartialEq, Eq)]
pub struct NamedSnapshot {
    /// The model repository.
    pub repo: String,
    /// The commit.
    pub commit: String,
}

/// The model repository and the commit of a snapshot folder in the cache; `None` for other folders.
pub fn named_snapshot(folder: &Path) -> Option<NamedSnapshot> {
    let mut parts = folder.components().rev().filter_map(|part| part.as_os_str().to_str());
    let (commit, snapshots, repo) = (parts.next()?, parts.next()?, parts.next()?);
    let name = repo.strip_prefix("models--").filter(|_| snapshots == "snapshots" && is_word(commit))?;
    Some(NamedSnapshot { repo: name.replacen("--", "/", 1), commit: commit.to_owned() })
}

pub(super) fn make_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

/// Whether a file name from the network stays within its folder.
pub(super) fn is_safe(name: &str) -> bool {
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']);
    name.len() < 1024 && name.split('/').all(is_plain)
}

/// Whether a hash from the network is safe to use as a file name.
pub(super) fn is_word(text: &str) -> bool {
    !text.is_empty() && text.len() <= 128 && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

/// Paths of all files in a folder and its subfolders, sorted. Links to files are followed, links to folders are not.
pub(in crate::data) fn files_below(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    walk(folder, "", 0, &mut names);
    names.sort();
    names
}

fn walk(folder: &Path, within: &str, depth: usize, names: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = if within.is_empty() { name } else { format!("{within}/{name}") };
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && depth < MAX_DEPTH => walk(&entry.path(), &name, depth + 1, names),
            _ if entry.path().is_file() => names.push(name),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_folders_map_to_repository_names() {
        let named = |path: &str| named_snapshot(Path::new(path));
        let found = named("/c/hub/models--Qwen--Qwen2.5-1.5B/snapshots/0a1b");
        assert_eq!(found, Some(NamedSnapshot { repo: "Qwen/Qwen2.5-1.5B".to_owned(), commit: "0a1b".to_owned() }));
        assert_eq!(named("/c/hub/datasets--a--b/snapshots/0a1b"), None);
        assert_eq!(named("runs/final"), None);
    }

    #[test]
    fn file_names_from_the_hub_cannot_leave_their_folder() {
        for (name, expected) in [
            ("data/a.parquet", true),
            ("../a", false),
            ("a/../../b", false),
            ("/etc/x", false),
            ("a//b", false),
            ("", false),
        ] {
            assert_eq!(is_safe(name), expected, "{name}");
        }
        assert!(is_word("0123abcDEF-1") && !is_word("a/b") && !is_word(".."));
    }
}
