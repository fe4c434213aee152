//! `import`: translates another trainer's configuration, and notes what became of every key.

mod draft;
mod expand;
mod hydra;
#[cfg(test)]
mod published;
mod script;
mod shell;
#[cfg(test)]
mod tests;
mod trl;
mod trl_version;
mod verl;

use std::path::{Path, PathBuf};

use super::args::ImportArgs;
use crate::config::{self, Config};
use crate::console;
use crate::error::{Error, ExitCode, Result};
use crate::untrusted::{self, MAX_RUN_CONFIG_BYTES};
use draft::{Draft, ForeignKeys};
use hydra::HydraFiles;
use script::Script;
use trl_version::TrlVersion;

/// Reads, translates, validates and writes a configuration.
///
/// # Errors
/// [`Error::BadFile`] for a script that does not parse; the errors of an invalid configuration, which is not written.
pub(super) fn import(args: &ImportArgs) -> Result<ExitCode> {
    let read = read(&args.file)?;
    let version = args.trl_version.as_deref().map(TrlVersion::named).transpose()?;
    let version = version.or_else(|| TrlVersion::required_beside(&args.file));
    let (mut draft, program) = translated(read, version);
    let outcome = draft.check();
    if outcome.is_ok() {
        let text = draft.text(&args.file, &program);
        match &args.output {
            Some(path) => write(path, &text)?,
            None => console::print(&text)?,
        }
    }
    draft.notes().into_iter().for_each(console::say);
    outcome.map(|()| ExitCode::Done)
}

/// The configuration of another trainer as read.
#[derive(Debug, Default)]
struct Foreign {
    files: HydraFiles,
    is_script: bool,
    /// Number of processes that a script starts.
    nproc: Option<u64>,
    /// Words of a script from which no key was read, and why.
    unread: Vec<String>,
}

/// Translates every key; also returns the name of the other trainer. `version` is TRL's, if known.
fn translated(read: Foreign, version: Option<TrlVersion>) -> (Draft, String) {
    let (mut theirs, mut draft) = (ForeignKeys::new(read.files.entries), Draft::default());
    read.files.dropped.iter().for_each(|(key, why)| draft.drop(key, why));
    read.files.lost.iter().for_each(|(key, value, why)| draft.lose(key, value, why));
    read.unread.into_iter().for_each(|word| draft.lose_word(word));
    for (key, value) in theirs.take_unfilled(read.is_script) {
        draft.lose(&key, &value, "expected a value without variables, or a variable that this script sets");
    }
    let program = match theirs.has_table(&["actor_rollout_ref.", "data.", "algorithm.", "trainer."]) {
        true => {
            verl::translate(&mut theirs, &mut draft);
            format!("verl ({})", verl::DEFAULTS)
        }
        false => {
            let version = version.unwrap_or_else(|| TrlVersion::by_keys(&theirs));
            trl::translate(&mut theirs, &mut draft);
            version.write_defaults(&theirs, &mut draft);
            format!("TRL or open-r1 ({version})")
        }
    };
    draft.translate_rest(theirs);
    draft.nproc = read.nproc.or(draft.nproc);
    (draft, program)
}

/// Whether a file is a shell script, by its name.
fn is_script(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "sh")
}

/// Reads every key of a YAML, JSON or TOML file, or the keys that a script sets.
fn read(file: &Path) -> Result<Foreign> {
    let refuse = |message: String| Error::ConfigSyntax { origin: file.display().to_string(), message };
    let of_entries = |entries| Foreign { files: HydraFiles::default().overridden(entries), ..Foreign::default() };
    match file.extension().and_then(|extension| extension.to_str()) {
        _ if is_script(file) => (),
        Some("yaml" | "yml") => return Ok(Foreign { files: hydra::read_file(file)?, ..Foreign::default() }),
        Some("json" | "toml") => return Ok(of_entries(config::foreign_entries(Some(file), &[])?)),
        Some("py") => {
            let message = "Python scripts cannot be imported; write the arguments of GRPOConfig into a YAML file, one \
                           per line (learning_rate: 1e-6), with model_name_or_path, dataset_name and reward_funcs \
                           (rewards.py:function), and import that file";
            return Err(refuse(message.into()));
        }
        _ => return Err(refuse("expected a configuration (.yaml, .yml, .json, .toml) or a shell script (.sh)".into())),
    }
    let text =
        untrusted::read_text(file, MAX_RUN_CONFIG_BYTES).map_err(|error| Error::bad_file(file, error.to_string()))?;
    let script = script::read(&text, file, std::env::var("HOME").ok()).map_err(refuse)?;
    if script == Script::default() {
        let message = "expected a script that starts verl with key=value (python3 -m verl.trainer.main_ppo data.train_files=..), or TRL or \
                       open-r1 with flags (trl grpo --model_name_or_path ..; python3 -m trl.scripts.grpo ..; accelerate launch grpo.py --config recipe.yaml)";
        return Err(refuse(message.into()));
    }
    let files = match (&script.config, &script.hydra) {
        (Some(name), _) => {
            let recipe = recipe(file, name)?;
            HydraFiles::default().overridden(config::foreign_entries(Some(&recipe), &[])?)
        }
        (None, Some(hydra)) => hydra::read(hydra, file)?,
        (None, None) => HydraFiles::default(),
    };
    let files = files.overridden(config::foreign_entries(None, &script.overrides)?);
    Ok(Foreign { files, is_script: true, nproc: script.nproc, unread: script.unread })
}

/// The configuration file that a script names, searched in the current folder, the script's folder and those above it, as open-r1's scripts are
/// started in the root of their repository.
fn recipe(script: &Path, name: &str) -> Result<PathBuf> {
    let script = std::path::absolute(script).map_err(Error::io(script))?;
    let folders = std::iter::once(Path::new("")).chain(script.ancestors().skip(1));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file()).ok_or_else(|| {
        let message = format!(
            "the file of the script's option --config {name} was found neither in the current folder nor next to the \
             script: run this command in the folder that contains it"
        );
        Error::bad_file(&script, message)
    })
}

fn write(path: &Path, text: &str) -> Result<()> {
    let new = std::fs::OpenOptions::new().write(true).create_new(true).open(path);
    if new.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::AlreadyExists) {
        return Err(Error::invalid_value(
            "--output",
            path.display(),
            "the path of a new file: this one already exists and is not overwritten",
        ));
    }
    new.and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes())).map_err(Error::io(path))?;
    console::print_saved(path.display());
    Ok(())
}

/// Whether a name is a key of this program.
fn is_ours(key: &str) -> bool {
    let keys = Config::keys();
    keys.contains(&config::key_pattern(key, keys)) || key.starts_with("chat_template_kwargs.")
}
