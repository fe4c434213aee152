//! Repositories of the Hugging Face Hub: read from the local cache of `huggingface_hub`, or downloaded
//! into it. Independent of the contents of files.

mod cache;
mod client;
mod download;
mod options;

use std::fmt;
use std::path::{Path, PathBuf};

use cache::RepoCache;
pub(super) use cache::files_below;
pub use cache::named_snapshot;
use client::{DownloadFailure, HubClient};
pub use options::HubOptions;

use crate::error::{Error, Result};
use crate::untrusted::{self, MAX_INDEX_BYTES};

/// A model repository or a data set repository at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    kind: RepoKind,
    name: String,
    revision: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RepoKind {
    Model,
    Dataset,
}

impl Repo {
    /// The model repository `name` at `revision` (default `main`); `None` if `name` is not a valid repository name.
    pub fn model(name: &str, revision: Option<&str>) -> Option<Self> {
        Self::new(RepoKind::Model, name, revision)
    }

    /// The data set repository `name` at `revision` (default `main`); `None` if `name` is not a valid repository name.
    pub fn dataset(name: &str, revision: Option<&str>) -> Option<Self> {
        Self::new(RepoKind::Dataset, name, revision)
    }

    /// Checks a repository name by the Hub's rules: one or two parts of letters, digits, `-`, `_` and `.`.
    fn new(kind: RepoKind, name: &str, revision: Option<&str>) -> Option<Self> {
        let is_part = |part: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            let has_ends = part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_') && !part.ends_with('.');
            has_ends && part.chars().all(is_plain) && !part.contains("--") && !part.contains("..")
        };
        let is_name = name.len() <= 96 && name.split('/').count() <= 2 && name.split('/').all(is_part);
        let revision = revision.unwrap_or("main").to_owned();
        is_name.then(|| Self { kind, name: name.to_owned(), revision })
    }

    /// The shell command that downloads the repository into the cache on a machine with a network.
    pub fn download_command(&self) -> String {
        let kind = if self.kind == RepoKind::Dataset { " --repo-type dataset" } else { "" };
        let revision = match self.revision.as_str() {
            "main" => String::new(),
            other => format!(" --revision {other}"),
        };
        format!("hf download {}{kind}{revision}", self.name)
    }

    /// `models` or `datasets`, as in the Hub's addresses and the cache's folder names.
    fn plural(&self) -> &'static str {
        if self.kind == RepoKind::Model { "models" } else { "datasets" }
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.revision == "main" { Ok(()) } else { write!(f, "@{}", self.revision) }
    }
}

/// Access to repositories: the local cache and, if the network may be used, the Hub.
#[derive(Debug)]
pub struct Hub {
    options: HubOptions,
    client: Option<HubClient>,
}

impl Hub {
    /// Access to the cache only. Workers use it after their launcher has downloaded the needed files.
    pub fn cached() -> Self {
        Self { options: HubOptions::from_env(), client: None }
    }

    /// Access to the Hub and the cache, or to the cache only if `options` are offline.
    pub fn new(options: HubOptions) -> Self {
        let client = (!options.is_offline).then(|| HubClient::new(&options));
        Self { options, client }
    }

    /// Opens a repository at its revision. Requests the revision's commit from the Hub, or uses the one in the cache if the Hub
    /// is unreachable or offline mode is set.
    ///
    /// # Errors
    /// [`Error::Hub`] if the repository is in neither place, or the Hub refuses access.
    pub fn open(&self, repo: &Repo) -> Result<Snapshot<'_>> {
        let cache = RepoCache::new(&self.options.cache, repo);
        let cached = |online| {
            let commit = cache.commit(&repo.revision)?;
            let names = cache.names(&commit);
            Some(Snapshot { hub: self, repo: repo.clone(), cache: cache.clone(), commit, names, is_online: online })
        };
        let Some(client) = &self.client else {
            return cached(false).ok_or_else(|| self.absent(repo));
        };
        match client.info(repo) {
            Ok(info) => {
                cache.set_commit(&repo.revision, &info.commit)?;
                let (commit, names) = (info.commit, info.names);
                Ok(Snapshot { hub: self, repo: repo.clone(), cache, commit, names, is_online: true })
            }
            Err(failure @ DownloadFailure::Unreachable(_)) => {
                let found = cached(false).ok_or_else(|| self.failed(repo, &failure))?;
                tracing::warn!("{repo}: {failure}; using the copy in the cache, commit {}", found.commit);
                Ok(found)
            }
            Err(failure) => Err(self.failed(repo, &failure)),
        }
    }

    /// The error for a repository that is not in the cache.
    fn absent(&self, repo: &Repo) -> Error {
        let why = if self.options.is_offline { ", and HF_HUB_OFFLINE is set" } else { "" };
        let cache = self.options.cache.display();
        let command = repo.download_command();
        let message = format!(
            "no such folder, and not in the cache {cache}{why}; fetch it on a machine with network access: {command}"
        );
        Error::Hub { repo: repo.to_string(), message }
    }

    fn failed(&self, repo: &Repo, failure: &DownloadFailure) -> Error {
        let message = match failure {
            DownloadFailure::Storage(path, error) => {
                return Error::Io { path: path.clone(), source: std::io::Error::new(error.kind(), error.to_string()) };
            }
            DownloadFailure::Unreachable(_) => format!(
                "no such folder; {failure}, and it is not in the cache {}; fetch it on a machine with network access: \
                 {}",
                self.options.cache.display(),
                repo.download_command()
            ),
            DownloadFailure::Refused { status: 401 | 403, .. } => format!(
                "no such folder; {failure}: there is no such repository, or it is private or gated; check the name, \
                 accept its terms at {}/{}, and set HF_TOKEN (or run: hf auth login)",
                self.options.endpoint, repo.name
            ),
            DownloadFailure::Refused { status: 404, .. } => {
                format!(
                    "no such folder; {failure}: {} has no such repository, revision or file; check the name",
                    self.options.endpoint
                )
            }
            DownloadFailure::Refused { .. } | DownloadFailure::Broken(_) => failure.to_string(),
        };
        Error::Hub { repo: repo.to_string(), message }
    }
}

/// The files of a repository at one commit.
#[derive(Debug)]
pub struct Snapshot<'a> {
    hub: &'a Hub,
    repo: Repo,
    cache: RepoCache,
    commit: String,
    names: Vec<String>,
    is_online: bool,
}

impl Snapshot<'_> {
    /// Names of all files, or of those in the cache if the Hub was not reached.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The folder that contains the files of this commit under their names.
    pub fn folder(&self) -> PathBuf {
        self.cache.snapshot(&self.commit)
    }

    /// Downloads missing files into the cache and returns the paths of all `names`, in their order.
    ///
    /// # Errors
    /// [`Error::Hub`] for a file that is not in the cache and cannot be downloaded; [`Error::Io`].
    pub fn fetch(&self, names: &[String]) -> Result<Vec<PathBuf>> {
        let paths: Vec<PathBuf> = names.iter().map(|name| self.folder().join(name)).collect();
        let missing: Vec<&String> =
            names.iter().zip(&paths).filter(|(_, path)| !path.is_file()).map(|(name, _)| name).collect();
        if missing.is_empty() {
            return Ok(paths);
        }
        let Some(client) = self.hub.client.as_ref().filter(|_| self.is_online) else {
            let message = format!(
                "the cache {} lacks {}; fetch it on a machine with network access: {}",
                self.hub.options.cache.display(),
                missing.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", "),
                self.repo.download_command()
            );
            return Err(Error::Hub { repo: self.repo.to_string(), message });
        };
        let download = download::Download {
            client,
            repo: &self.repo,
            commit: &self.commit,
            cache: &self.cache,
            progress: &self.hub.options.progress,
        };
        download.run(&missing).map_err(|failure| self.hub.failed(&self.repo, &failure))?;
        Ok(paths)
    }

    /// Reads a small text file; `None` if the repository does not have it.
    ///
    /// # Errors
    /// The errors of [`Snapshot::fetch`]; [`Error::BadFile`] if the file is not text.
    pub fn text(&self, name: &str) -> Result<Option<String>> {
        if !self.names.iter().any(|known| known == name) {
            return Ok(None);
        }
        let paths = self.fetch(&[name.to_owned()])?;
        let text = untrusted::read_text(&paths[0], MAX_INDEX_BYTES);
        text.map(Some).map_err(|error| Error::bad_file(&paths[0], error.to_string()))
    }
}

/// Whether a path is clearly a local path and not a repository name.
pub fn is_plainly_local(path: &Path) -> bool {
    path.exists() || path.is_absolute() || path.starts_with(".") || path.starts_with("..") || path.starts_with("~")
}
