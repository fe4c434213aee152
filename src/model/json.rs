//! JSON files of a model folder, read key by key. Errors name the file, the key and the value found.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::untrusted::{self, KeyTable, MAX_MODEL_JSON_BYTES};

/// File name of a model's configuration.
pub(super) const CONFIG: &str = "config.json";
/// File name of the configuration of adapters.
pub(super) const ADAPTER_CONFIG: &str = "adapter_config.json";

/// The JSON object of a file, or an object nested in it.
pub(super) struct JsonObject {
    path: PathBuf,
    within: String,
    map: Map<String, Value>,
}

impl JsonObject {
    /// Reads a file that contains a JSON object.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is missing, too long, or not an object.
    pub(super) fn read(path: &Path) -> Result<Self> {
        Self::read_up_to(MAX_MODEL_JSON_BYTES, path)
    }

    /// Reads a file of at most `max_bytes` that contains a JSON object.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is missing, too long, or not an object.
    pub(super) fn read_up_to(max_bytes: u64, path: &Path) -> Result<Self> {
        let text = untrusted::read(path, max_bytes).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::bad_file(path, absent(path)),
            _ => Error::bad_file(path, error.to_string()),
        })?;
        match serde_json::from_slice(&text) {
            Ok(Value::Object(map)) => Ok(Self { path: path.to_owned(), within: String::new(), map }),
            Ok(_) => Err(Error::bad_file(path, "expected a JSON object")),
            Err(error) => Err(Error::bad_file(path, format!("not JSON: {error}"))),
        }
    }

    /// Refuses keys with unsupported values.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the key.
    pub(super) fn check(&self, table: &KeyTable) -> Result<()> {
        table.check(&self.path, &self.within, &self.map)
    }

    /// Copies a key's value from `other`, if `other` has the key.
    pub(super) fn take(&mut self, key: &str, other: &Self) {
        if let Some(value) = other.get(key) {
            self.map.insert(key.to_owned(), value.clone());
        }
    }

    /// Adds the entries of `usual` whose keys are absent.
    pub(super) fn complete(&mut self, usual: Map<String, Value>) {
        usual.into_iter().for_each(|(key, value)| _ = self.map.entry(key).or_insert(value));
    }

    /// Removes a boolean key and returns its value; `None` if it is absent.
    pub(super) fn take_flag(&mut self, key: &str) -> Result<Option<bool>> {
        let flag = self.get(key).map(|_| self.flag(key)).transpose()?;
        self.map.remove(key);
        Ok(flag)
    }

    /// Removes a key.
    pub(super) fn remove(&mut self, key: &str) {
        self.map.remove(key);
    }

    /// Returns all keys with their values.
    pub(super) fn into_map(self) -> Map<String, Value> {
        self.map
    }

    /// The value of a key; `null` counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is present, even with the value `null`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The keys of the object.
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str)
    }

    /// The nested object under a key, if it is present.
    pub(super) fn object(&self, key: &str) -> Result<Option<Self>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.wrong(key, "an object"))?.clone();
        Ok(Some(Self { path: self.path.clone(), within: format!("{}{key}.", self.within), map }))
    }

    /// The value of a key as an integer from 1 to `max`.
    pub(super) fn size(&self, key: &str, max: usize) -> Result<usize> {
        let value = self.get(key).and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
        value
            .filter(|&size| (1..=max).contains(&size))
            .ok_or_else(|| self.wrong(key, format!("a whole number from 1 to {max}")))
    }

    /// The value of a key as an integer of at least 0.
    pub(super) fn count(&self, key: &str) -> Result<usize> {
        let value = self.get(key).and_then(Value::as_u64).and_then(|count| usize::try_from(count).ok());
        value.ok_or_else(|| self.wrong(key, "a whole number"))
    }

    /// The value of a key as a finite number above 0.
    pub(super) fn positive(&self, key: &str) -> Result<f64> {
        let value = self.get(key).and_then(Value::as_f64).filter(|&value| value > 0.0 && value.is_finite());
        value.ok_or_else(|| self.wrong(key, "a number above 0"))
    }

    /// The value of a key as a boolean; false if it is absent.
    pub(super) fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    /// The error for a key with an invalid value.
    pub(super) fn wrong(&self, key: &str, expected: impl AsRef<str>) -> Error {
        let found = self.get(key).map_or("absent".to_owned(), Value::to_string);
        Error::bad_file(&self.path, format!("{}{key} is {found}: expected {}", self.within, expected.as_ref()))
    }
}

/// The error message for a missing file.
fn absent(path: &Path) -> String {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists());
    match folder.map(Path::display) {
        Some(name) => {
            format!("there is no folder {name}; to download a model from the Hugging Face Hub write USER/NAME")
        }
        None => match path.parent().and_then(model_within) {
            Some(model) => {
                format!("the file is missing; the model is in a subfolder, name that instead: {}", model.display())
            }
            None => match path.parent().map(held_by).filter(|held| !held.is_empty()) {
                Some(held) => {
                    format!("the file is missing: this is not a Hugging Face model folder; it contains {held}")
                }
                None => "the file is missing: expected a Hugging Face model folder".to_owned(),
            },
        },
    }
}

/// Names of the first few files in a folder, for error messages.
fn held_by(folder: &Path) -> String {
    const MOST: usize = 6;
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let more = if names.len() > MOST { " .." } else { "" };
    names.truncate(MOST);
    names.join(", ") + more
}

/// Whether a folder contains a model or adapters.
pub(crate) fn is_model_folder(folder: &Path) -> bool {
    [CONFIG, ADAPTER_CONFIG].iter().any(|name| folder.join(name).is_file())
}

/// The model or adapters in a run's output folder: the final one, or else its newest checkpoint.
pub(crate) fn model_within(folder: &Path) -> Option<PathBuf> {
    let folders = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let is_model = |path: &PathBuf| {
        let is_whole = path.file_name().is_some_and(|name| !name.to_string_lossy().starts_with('.'));
        is_whole && is_model_folder(path)
    };
    folders.filter(is_model).max_by_key(|path| (path.ends_with("final"), path.as_os_str().len(), path.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_run_folder_names_the_model_inside_it() {
        let run = tempfile::tempdir().unwrap();
        let said = || JsonObject::read(&run.path().join(CONFIG)).map(|_| ()).unwrap_err().to_string();
        assert!(said().ends_with("the file is missing: expected a Hugging Face model folder"), "{}", said());
        for (name, file) in [("checkpoint-2", CONFIG), ("final", ADAPTER_CONFIG), ("checkpoint-10", CONFIG)] {
            std::fs::create_dir(run.path().join(name)).unwrap();
            std::fs::write(run.path().join(name).join(file), "{}").unwrap();
        }
        assert!(said().ends_with(&format!("name that instead: {}", run.path().join("final").display())), "{}", said());
        std::fs::rename(run.path().join("final"), run.path().join(".final.tmp")).unwrap();
        assert!(said().ends_with("checkpoint-10"), "{}", said());
    }
}
