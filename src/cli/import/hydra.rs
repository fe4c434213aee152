//! Files that Hydra reads before a script's overrides.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::script::Hydra;
use crate::config::{self, ForeignEntry};
use crate::error::Result;

/// verl's own files, whose defaults are written out, and those of its recipes that switch features on.
const OWN: &[&str] = &["ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer"];
/// Maximum depth of files that include other files.
const MAX_DEPTH: usize = 8;

/// The keys of Hydra's files, and notes on the files.
#[derive(Debug, Default)]
pub(super) struct HydraFiles {
    pub entries: Vec<ForeignEntry>,
    /// Options of Hydra that have no effect on the result.
    pub dropped: Vec<(String, String)>,
    /// Entries that could not be read, with their place and the reason.
    pub lost: Vec<(String, Value, String)>,
}

/// Reads the file that `hydra` names and the files it includes. They are searched in the module's folder, the current folder, the script's folder and
/// those above it.
///
/// # Errors
/// An error of a file that does not parse.
pub(super) fn read(hydra: &Hydra, script: &Path) -> Result<HydraFiles> {
    let mut files = HydraFiles::default();
    let Some(name) = &hydra.name else {
        if let Some(path) = &hydra.path {
            files.lost.push((
                "--config-path".into(),
                path.as_str().into(),
                "the folder is not used: --config-name, which names the file in it, is missing".into(),
            ));
        }
        return Ok(files);
    };
    let name = name.trim_end_matches(".yaml").trim_end_matches(".yml");
    let path = hydra.path.as_deref().unwrap_or("config");
    let module = hydra.module.as_deref().and_then(|module| module.rsplit_once('.'));
    let module = module.map_or(PathBuf::new(), |(folder, _)| folder.replace('.', "/").into());
    let above: Vec<PathBuf> = std::path::absolute(script)
        .map_or_else(|_| Vec::new(), |script| script.ancestors().skip(1).map(Path::to_owned).collect());
    let roots = std::iter::once(PathBuf::new()).chain(above);
    let folders = roots.flat_map(|root| [root.join(&module).join(path), root.join(path)]);
    let found = folders.into_iter().find_map(|folder| file_of(&folder, name));
    if hydra.path.is_some() {
        files.dropped.push(("--config-path".into(), format!("the folder of {name}.yaml")));
    }
    match found {
        _ if is_own(name) && (found.is_none() || name.starts_with("ppo_")) => {
            files.dropped.push(("--config-name".into(), format!("{name} is verl's own; its defaults are written out")));
        }
        Some(file) => {
            files.dropped.push(("--config-name".into(), format!("{} was read", file.display())));
            files.add(&file, 0)?;
        }
        None => {
            let why = format!(
                "the file {path}/{name}.yaml was found neither in the current folder nor next to the script: its keys \
                 are not imported"
            );
            files.lost.push(("--config-name".into(), name.into(), why));
        }
    }
    Ok(files)
}

/// Reads a file and the files named in its `defaults`.
///
/// # Errors
/// An error of a file that does not parse.
pub(super) fn read_file(file: &Path) -> Result<HydraFiles> {
    let mut files = HydraFiles::default();
    files.add(file, 0)?;
    files.resolve();
    Ok(files)
}

fn is_own(name: &str) -> bool {
    OWN.contains(&name)
}

fn file_of(folder: &Path, name: &str) -> Option<PathBuf> {
    ["yaml", "yml"].map(|extension| folder.join(format!("{name}.{extension}"))).into_iter().find(|file| file.is_file())
}

impl HydraFiles {
    /// Adds the keys of a file on top of those of the files named in its `defaults`.
    fn add(&mut self, file: &Path, depth: usize) -> Result<()> {
        let folder = file.parent().unwrap_or(Path::new(""));
        let (mut own, mut defaults) = (Vec::new(), Vec::new());
        for entry in config::foreign_entries(Some(file), &[])? {
            match entry.0.as_str() {
                "defaults" => defaults = entry.1.as_array().cloned().unwrap_or_default(),
                key if key.starts_with("hydra.") => {
                    self.dropped.push((key.into(), "where Hydra looks and writes".into()))
                }
                _ => own.push(entry),
            }
        }
        for default in defaults {
            match default.as_str() {
                Some("_self_") => (),
                Some(name) if is_own(name) => {
                    self.dropped
                        .push(("defaults".into(), format!("{name} is verl's own; its defaults are written out")));
                }
                Some(name) => match file_of(folder, name).filter(|_| depth < MAX_DEPTH) {
                    Some(file) => self.add(&file, depth + 1)?,
                    None => self.lost.push((
                        "defaults".into(),
                        default,
                        "the file was not found: its keys are not imported".into(),
                    )),
                },
                None => {
                    self.lost.push(("defaults".into(), default, "files of Hydra config groups are not read".into()))
                }
            }
        }
        for entry in own {
            self.entries.retain(|(key, ..)| *key != entry.0);
            self.entries.push(entry);
        }
        Ok(())
    }

    /// Applies overrides to the keys of the files.
    pub fn overridden(mut self, overrides: Vec<ForeignEntry>) -> Self {
        for entry in overrides {
            let bare = entry.0.trim_start_matches('+').to_owned();
            self.entries.retain(|(key, ..)| *key != bare);
            self.entries.push(entry);
        }
        self.resolve();
        self
    }

    /// Replaces references to other keys, such as `${data.train_batch_size}`, by their values.
    fn resolve(&mut self) {
        for at in 0..self.entries.len() {
            let text = self.entries[at].1.as_str().unwrap_or_default();
            let named = text.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
            let Some(other) = named.and_then(|key| self.entries.iter().find(|(known, ..)| known == key)) else {
                continue;
            };
            self.entries[at].1 = other.1.clone();
        }
    }
}
