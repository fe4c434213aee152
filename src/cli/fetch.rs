//! Downloads models and data sets from the Hub before any process starts; the processes read them from the cache.

use std::path::Path;

use crate::config::{Config, DataConfig};
use crate::console::download_progress;
use crate::data::{Hub, HubOptions, RowSources};
use crate::error::{Error, Result};
use crate::model::ModelSource;
use crate::phase;

/// Downloads a configuration's model, teacher and rows from the Hub, unless they are in the cache. Returns one error for each that cannot be found;
/// equal errors are returned once. Does nothing in a worker, because the launcher has downloaded everything.
pub(super) fn missing(file: Option<&Path>, overrides: &[String]) -> Vec<Error> {
    let Some(sources) = Config::sources(file, overrides).filter(|_| !is_worker()) else {
        return Vec::new();
    };
    let hub = hub();
    let model = ModelSource::find(&sources.model, sources.revision.as_deref(), None, &hub);
    let teacher = sources
        .teacher
        .as_ref()
        .and_then(|(name, revision)| ModelSource::find(name, revision.as_deref(), None, &hub).err());
    let train = RowSources::train(&sources.data, &hub);
    let held_out = RowSources::held_out(&sources.data, sources.eval_steps, &hub);
    let model = model.err().map(|error| of_the_model(error, "model_name_or_path"));
    let teacher = teacher.map(|error| of_the_model(error, "teacher_model_name_or_path"));
    let mut missing: Vec<_> = [model, teacher, train.err(), held_out.err()].into_iter().flatten().collect();
    missing.dedup_by_key(|error| error.to_string());
    missing
}

/// Finds a model, and downloads it from the Hub if necessary.
pub(super) fn model(name: &Path, base: Option<&Path>) -> Result<ModelSource> {
    let source = ModelSource::find(name, None, base, &hub_of_process())?;
    match base.filter(|_| source.adapters.is_none()) {
        Some(base) => Err(Error::invalid_value(
            "--base_model",
            base.display(),
            format!("no base model: {} is a full model, and only LoRA adapters need a base", name.display()),
        )),
        None => Ok(source),
    }
}

/// The evaluation rows of a run, downloaded if necessary.
pub(super) fn held_out(data: &DataConfig) -> Result<Option<RowSources>> {
    RowSources::held_out(data, Some(1), &hub_of_process())
}

/// The rows that `entry` of `key` names, downloaded if necessary.
pub(super) fn rows(key: &str, entry: &str) -> Result<RowSources> {
    RowSources::named(key, entry, "test", &hub_of_process())
}

/// Whether all rows of the run are on this machine.
pub(super) fn has_rows(config: &Config) -> bool {
    let hub = Hub::cached();
    let held_out = RowSources::held_out(&config.data, config.eval_steps, &hub);
    RowSources::train(&config.data, &hub).is_ok() && held_out.is_ok()
}

/// The Hub client; in a process of our launcher only its cache, which the launcher has filled.
fn hub_of_process() -> Hub {
    if is_worker() { Hub::cached() } else { hub() }
}

fn hub() -> Hub {
    Hub::new(HubOptions::from_env().with_progress(download_progress()))
}

/// Whether our launcher started this process and has downloaded everything.
fn is_worker() -> bool {
    phase::is_watched()
}

/// Adds the key's name to an error about a repository.
fn of_the_model(error: Error, key: &str) -> Error {
    match error {
        Error::Hub { repo, message } => Error::Hub { repo, message: format!("{key}: {message}") },
        other => other,
    }
}
