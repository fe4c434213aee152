//! Resolves the configured data sources (files, folders, patterns and data sets of the Hub) to files.

use std::fmt;
use std::path::{Path, PathBuf};

use super::hub::{Hub, Repo, files_below};
use super::splits::{matching, split_files};
use crate::config::{DataConfig, NamedSplit};
use crate::error::{Error, Result};
use crate::untrusted::{self, MAX_README_BYTES};

/// Prefix of the address of files in a Hub repository: `hf://datasets/NAME[@REVISION]/PATTERN`.
const HUB_SCHEME: &str = "hf://datasets/";

/// Files with rows, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct RowSources {
    /// The source as the user named it.
    pub name: String,
    /// Each file, and the number of times its rows appear in an epoch.
    pub(super) files: Vec<(PathBuf, f64)>,
    /// Largest number of rows that are read.
    pub(super) max_rows: Option<usize>,
}

impl fmt::Display for RowSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl RowSources {
    /// A single file whose rows appear once per epoch.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self { name: path.display().to_string(), files: vec![(path, 1.0)], max_rows: None }
    }

    /// Resolves `entry`, the value of configuration key `key`, to files: a file, a pattern, the split `split` of a folder, or files of the Hub.
    ///
    /// # Errors
    /// [`Error::BadFile`] and [`Error::Hub`] if there are no such files; the message names the key.
    pub fn named(key: &str, entry: &str, split: &str, hub: &Hub) -> Result<Self> {
        let files = located(key, entry, split, hub)?.into_iter().map(|path| (path, 1.0)).collect();
        Ok(Self { name: entry.to_owned(), files, max_rows: None })
    }

    /// The files with training rows.
    ///
    /// # Errors
    /// [`Error::BadFile`] and [`Error::Hub`] if a configured file does not exist; the message names the key.
    pub fn train(config: &DataConfig, hub: &Hub) -> Result<Self> {
        let split = &config.dataset_train_split;
        if let Some(name) = config.dataset_name.as_deref() {
            let files = dataset("dataset_name", name, config.dataset_config.as_deref(), split, hub)?;
            return Ok(Self::of_split(name, split, files, config.max_train_samples));
        }
        let (entries, weights) = (&config.train_file.0, &config.train_file_weights);
        let weight = |index: usize| weights.get(index).copied().unwrap_or(1.0);
        let mut files = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            files.extend(located("train_file", entry, split, hub)?.into_iter().map(|path| (path, weight(index))));
        }
        Ok(Self { name: entries.join(", "), files, max_rows: config.max_train_samples })
    }

    /// The files with held-out rows; `None` if the run has no evaluation ([`DataConfig::has_held_out`]).
    ///
    /// # Errors
    /// The errors of [`RowSources::train`].
    pub fn held_out(config: &DataConfig, eval_steps: Option<usize>, hub: &Hub) -> Result<Option<Self>> {
        if !config.has_held_out(eval_steps) {
            return Ok(None);
        }
        let entries = &config.eval_file.0;
        if let Some(NamedSplit { dataset: name, split }) = config.test_split().filter(|_| entries.is_empty()) {
            let files = dataset("dataset_test_split", name, config.dataset_config.as_deref(), split, hub)?;
            return Ok(Some(Self::of_split(name, split, files, config.max_eval_samples)));
        }
        let split = config.dataset_test_split.as_deref().unwrap_or("test");
        let mut files = Vec::new();
        for entry in entries {
            files.extend(located("eval_file", entry, split, hub)?.into_iter().map(|path| (path, 1.0)));
        }
        Ok(Some(Self { name: entries.join(", "), files, max_rows: config.max_eval_samples }))
    }

    fn of_split(name: &str, split: &str, files: Vec<PathBuf>, max_rows: Option<usize>) -> Self {
        let files = files.into_iter().map(|path| (path, 1.0)).collect();
        Self { name: format!("{name} ({split})"), files, max_rows }
    }
}

/// The paths of the files that an entry of configuration key `key` names: a file, a folder, a pattern, or files of the Hub.
fn located(key: &str, entry: &str, split: &str, hub: &Hub) -> Result<Vec<PathBuf>> {
    if let Some(address) = entry.strip_prefix(HUB_SCHEME) {
        return hub_files(key, entry, address, hub);
    }
    let path = Path::new(entry);
    let missing = |message: String| Error::bad_file(path, format!("{key}: {message}"));
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => folder_split(path, None, split).map_err(missing),
        Ok(_) => Ok(vec![path.to_owned()]),
        Err(_) if entry.contains(['*', '?', '[']) => {
            let paths = glob::glob(entry).map_err(|error| missing(format!("not a valid file pattern: {error}")))?;
            let mut files: Vec<PathBuf> = paths.flatten().filter(|path| path.is_file()).collect();
            files.sort();
            if files.is_empty() { Err(missing("no file matches the pattern".into())) } else { Ok(files) }
        }
        Err(error) => {
            let is_name = entry.contains('/') && path.extension().is_none_or(|kind| kind.len() > 7);
            let command = Repo::dataset(entry, None).filter(|_| is_name).map(|repo| repo.download_command());
            let hint = command.map(|command| match key {
                "--data" => format!("; files of a data set of the Hub are named {HUB_SCHEME}{entry}/PATTERN"),
                _ => format!("; a data set of the Hub is named by dataset_name = {entry} and fetched with: {command}"),
            });
            Err(missing(format!("{error}{}", hint.unwrap_or_default())))
        }
    }
}

/// Downloads the files with the address `NAME[@REVISION]/PATTERN` and returns their paths.
fn hub_files(key: &str, entry: &str, address: &str, hub: &Hub) -> Result<Vec<PathBuf>> {
    let expected = "hf://datasets/USER/NAME/PATTERN, or hf://datasets/USER/NAME@REVISION/PATTERN";
    let invalid = || Error::invalid_value(key, entry, expected);
    let mut parts = address.splitn(3, '/');
    let (user, name, pattern) = match (parts.next(), parts.next(), parts.next()) {
        (Some(user), Some(name), Some(pattern)) => (user, name, pattern),
        _ => return Err(invalid()),
    };
    let (name, revision) = name.split_once('@').map_or((name, None), |(name, revision)| (name, Some(revision)));
    let repo = Repo::dataset(&format!("{user}/{name}"), revision).ok_or_else(invalid)?;
    let snapshot = hub.open(&repo)?;
    let names = matching(snapshot.names(), &[pattern.to_owned()]);
    if names.is_empty() {
        return Err(Error::Hub { repo: repo.to_string(), message: format!("{key}: no file matches '{pattern}'") });
    }
    snapshot.fetch(&names)
}

/// The files of a split of a folder or of a Hub data set. Errors name the configuration key `key`.
fn dataset(key: &str, name: &str, config: Option<&str>, split: &str, hub: &Hub) -> Result<Vec<PathBuf>> {
    let path = Path::new(name);
    let missing = |message: String| Error::Hub { repo: name.to_owned(), message: format!("{key}: {message}") };
    if path.is_dir() {
        return folder_split(path, config, split).map_err(missing);
    }
    let (plain, revision) = name.split_once('@').map_or((name, None), |(name, revision)| (name, Some(revision)));
    let repo = Repo::dataset(plain, revision).filter(|_| !path.exists()).ok_or_else(|| {
        Error::invalid_value(
            "dataset_name",
            name,
            "a folder, or the name of a data set on the Hub (USER/NAME); for files use train_file",
        )
    })?;
    let snapshot = hub.open(&repo)?;
    let readme = snapshot.text("README.md")?;
    let names = split_files(snapshot.names(), readme, config, split).map_err(missing)?;
    snapshot.fetch(&names)
}

/// The files of a split in a local folder.
fn folder_split(folder: &Path, config: Option<&str>, split: &str) -> std::result::Result<Vec<PathBuf>, String> {
    let names = files_below(folder);
    let readme = untrusted::read_text(&folder.join("README.md"), MAX_README_BYTES).ok();
    let names = split_files(&names, readme, config, split)?;
    Ok(names.iter().map(|name| folder.join(name)).collect())
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::TokenizerFolder;
    use super::super::{Dataset, DatasetOptions};
    use super::*;
    use crate::config::Config;

    fn data(keys: &[&str]) -> DataConfig {
        let required = ["model_name_or_path=m", "reward_funcs=[\"format\"]"];
        let keys: Vec<String> = required.iter().chain(keys).map(|key| (*key).to_owned()).collect();
        Config::load(None, &keys).unwrap().data
    }

    fn names(sources: &RowSources) -> Vec<String> {
        sources.files.iter().map(|(path, _)| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn rows_are_read_from_files_folders_and_patterns_with_weights() {
        let folder = TokenizerFolder::new();
        std::fs::create_dir(folder.path().join("rows")).unwrap();
        let line = |word: &str| format!("{{\"prompt\": \"{word}\"}}\n");
        for (name, text) in [
            ("rows/train-1.jsonl", line("one").repeat(4)),
            ("rows/train-2.jsonl", line("two").repeat(4)),
            ("rows/test.jsonl", line("three")),
            ("more.csv", "prompt\nminus\nplus\n".to_owned()),
        ] {
            folder.write(name, &text);
        }
        let place = folder.path().display();
        let train = |keys: &[&str]| RowSources::train(&data(keys), &Hub::cached());
        let whole = format!("train_file=[\"{place}/rows\", \"{place}/m*.csv\"]");
        let sources = train(&[&whole, "train_file_weights=[0.5, 2]"]).unwrap();
        assert_eq!(names(&sources), ["train-1.jsonl", "train-2.jsonl", "more.csv"]);
        let read =
            |sources: &RowSources| Dataset::read(sources, &folder.tokenizer(), &DatasetOptions::default()).unwrap();
        let rows = read(&sources);
        let num = |word: &str| rows.prompts().iter().filter(|prompt| prompt.text == word).count();
        assert_eq!((num("minus"), num("plus"), num("three")), (2, 2, 0));
        assert!((1..8).contains(&(num("one") + num("two"))), "about half of 8 rows");
        let mut ids: Vec<u64> = rows.prompts().iter().map(|prompt| prompt.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), rows.len());
        assert!(rows.counts().to_string().ends_with(&format!("10 kept, {} per epoch by their weights", rows.len())));

        let few = train(&[&whole, "max_train_samples=5"]).unwrap();
        assert_eq!(read(&few).counts().to_string(), "5 read, 5 kept");
        let held_out = data(&[&whole, &format!("eval_file={place}/rows")]);
        let held_out = RowSources::held_out(&held_out, None, &Hub::cached()).unwrap().unwrap();
        assert_eq!(names(&held_out), ["test.jsonl"]);
        let named = [&format!("dataset_name={place}/rows")[..], "max_eval_samples=1"];
        assert_eq!(names(&train(&named).unwrap()), ["train-1.jsonl", "train-2.jsonl"]);
        let held_out = |keys: &[&str], eval_steps| RowSources::held_out(&data(keys), eval_steps, &Hub::cached());
        assert_eq!(held_out(&named, None).unwrap(), None, "no evaluation is asked for");
        assert_eq!(names(&held_out(&named, Some(1)).unwrap().unwrap()), ["test.jsonl"]);
        let none = [named[0], "dataset_test_split=validation"];
        assert_eq!(held_out(&none, None).unwrap(), None);
        let missing = held_out(&none, Some(1)).unwrap_err().to_string();
        assert!(missing.contains("dataset_test_split: there is no split 'validation'"), "{missing}");
        let missing = train(&[named[0], "dataset_train_split=more"]).unwrap_err().to_string();
        assert!(missing.ends_with("there is no split 'more': the data set has the splits test, train"), "{missing}");
        let address = train(&["train_file=hf://datasets/rows.jsonl"]).unwrap_err().to_string();
        assert!(address.contains("expected hf://datasets/USER/NAME/PATTERN"), "{address}");
    }
}
