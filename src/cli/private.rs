//! Refuses a run if programs written by the model could read its files.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::args::EvalArgs;
use crate::config::{CodeConfig, Config, INTERPRETER};
use crate::data::HubOptions;
use crate::error::{Error, Result};
use crate::phase;
use crate::ranks::WorkerEnv;
use crate::reward::RewardPool;
use crate::sandbox::Readable;

/// Keys for paths that programs may read, and for the interpreters that run them.
const MEANT: [&str; 3] = ["reward.code.readable", "reward.code.command", "reward.python"];

/// A path of a run with its name.
type Named = (String, PathBuf);

/// Checks a training run, by its configuration and the configuration file's path.
///
/// # Errors
/// [`Error::InvalidValue`] with the path that could be read, and the path of the sandbox that exposes it.
pub(super) fn check_run(config: &Config, file: Option<&Path>) -> Result<()> {
    check_all(config, of_file(file))
}

/// Checks an evaluation; with `config` it is that of a run.
///
/// # Errors
/// [`Error::InvalidValue`] as for a run, and errors of the reward's settings.
pub(super) fn check_evaluation(args: &EvalArgs, config: Option<&Config>) -> Result<()> {
    let of_options = [("--data", args.data.as_ref().map(PathBuf::from)), ("--output", args.output.clone())];
    let of_options = of_options.into_iter().filter_map(|(name, path)| Some((name.to_owned(), path?)));
    let model = ("--model".to_owned(), args.source.model.clone());
    let own = of_options.chain([model]).chain(of_file(args.config.as_deref())).collect();
    if let Some(config) = config {
        return check_all(config, own);
    }
    let settings = args.reward_config()?;
    match RewardPool::single("--reward", &args.reward, &settings)?.runs_programs() {
        true => check(&settings.code, &own),
        false => Ok(()),
    }
}

fn check_all(config: &Config, own: Vec<Named>) -> Result<()> {
    if config.tools.tools.iter().any(|tool| tool == INTERPRETER) || RewardPool::new(config)?.runs_programs() {
        check(&config.reward.code, &[own, of_config(config)].concat())
    } else {
        Ok(())
    }
}

/// Whether this process does the check: the launcher for its ranks, or each rank that another program launched.
pub(super) fn checks_here() -> Result<bool> {
    Ok(WorkerEnv::from_env()?.is_none() || !phase::is_watched())
}

fn check(settings: &CodeConfig, named: &[Named]) -> Result<()> {
    // What keeps an interpreter from being found is told by its name when it is to run.
    let Ok(readable) = Readable::new(settings) else { return Ok(()) };
    let given: Vec<PathBuf> = settings.readable.iter().filter_map(|path| path.canonicalize().ok()).collect();
    let refused = |shown: &Path, name: &str, path: &Path, how: &str| {
        let (key, value) = match given.iter().any(|given| shown.starts_with(given) || given.starts_with(shown)) {
            true => ("reward.code.readable", shown.display().to_string()),
            false => ("reward.code.command", settings.command.0.join(" ")),
        };
        let expected = format!(
            "paths that keep the run's files hidden from programs that the model writes: {name}, {}, {how} {}, which \
             such a program could read; move one of the two",
            path.display(),
            shown.display()
        );
        Err(Error::invalid_value(key, value, expected))
    };
    for (name, path) in named.iter().chain(&of_machine()) {
        if let Some(shown) = readable.shows(path) {
            return refused(shown, name, path, "is inside");
        }
    }
    for (name, path) in named {
        let Ok(path) = path.canonicalize() else { continue };
        if let Some(given) = given.iter().find(|given| given.starts_with(&path)) {
            return refused(given, name, &path, "holds");
        }
    }
    Ok(())
}

/// Paths of the machine that programs written by the model must never read.
fn of_machine() -> Vec<Named> {
    let named = |name: &str, path: PathBuf| (name.to_owned(), path);
    let mut all = vec![
        named("the cache of the Hub", HubOptions::from_env().cache),
        named("the folder of temporary files", std::env::temp_dir()),
        named("the state of processes", PathBuf::from("/proc")),
        named("shared memory", PathBuf::from("/dev/shm")),
    ];
    all.extend(std::env::current_dir().ok().map(|folder| named("the current folder", folder)));
    all.extend(std::env::home_dir().map(|folder| named("the home folder", folder)));
    all
}

fn of_file(file: Option<&Path>) -> Vec<Named> {
    file.map(|file| ("the configuration".to_owned(), file.to_owned())).into_iter().collect()
}

/// Every text value of a configuration as a possible path; one that is no path is taken as a file in the current folder.
fn of_config(config: &Config) -> Vec<Named> {
    let is_meant = |key: &str| MEANT.contains(&key) || (key.starts_with("rewards.") && key.ends_with(".command"));
    let mut all = Vec::new();
    for (key, value) in config.entries().into_iter().filter(|(key, _)| !is_meant(key)) {
        let mut left = vec![value];
        while let Some(value) = left.pop() {
            match value {
                Value::String(text) => {
                    let file = text.rsplit_once(":").map_or(&*text, |(file, _)| file); // FILE.py:function
                    all.extend([&*text, file].map(|path| (key.clone(), PathBuf::from(path))));
                }
                Value::Array(values) => left.extend(values),
                Value::Object(values) => left.extend(values.into_iter().map(|(_, value)| value)),
                _ => {}
            }
        }
    }
    all
}
