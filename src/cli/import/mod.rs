//! `import`: another trainer's configuration as one of ours, with a list of what became of every key.

mod draft;
mod expand;
mod script;
#[cfg(test)]
mod tests;
mod trl;
mod verl;

use std::path::{Path, PathBuf};

use super::args::ImportArgs;
use crate::config::{self, Config, ForeignEntry};
use crate::error::{Error, ExitCode, Result};
use crate::phase::terminal;
use crate::untrusted::{self, MAX_RUN_CONFIG_BYTES};
use draft::{Draft, ForeignKeys};
use script::Script;

/// Reads, translates, checks and writes.
///
/// # Errors
/// What does not parse; what is wrong with the configuration that comes out, which is written all the same.
pub(super) fn import(args: &ImportArgs) -> Result<ExitCode> {
    let (entries, nproc) = read(&args.file)?;
    let (mut draft, program) = translated(entries, is_script(&args.file));
    draft.nproc = nproc.or(draft.nproc);
    let outcome = draft.check();
    let text = draft.text(&args.file, program);
    match &args.output {
        Some(path) => write(path, &text)?,
        None => terminal::print(&text)?,
    }
    draft.notes().into_iter().for_each(terminal::say);
    outcome.map(|()| ExitCode::Done)
}

/// Translates every key; also returns whose they are.
fn translated(entries: Vec<ForeignEntry>, is_script: bool) -> (Draft, &'static str) {
    let (mut theirs, mut draft) = (ForeignKeys::new(entries), Draft::default());
    for (key, value) in theirs.take_unfilled(is_script) {
        draft.lose(&key, &value, "a variable in it that this file does not set");
    }
    let is_verl = theirs.has_table(&["actor_rollout_ref.", "data.", "algorithm.", "trainer."]);
    match is_verl {
        true => verl::translate(&mut theirs, &mut draft),
        false => trl::translate(&mut theirs, &mut draft),
    }
    draft.translate_rest(theirs);
    (draft, if is_verl { "verl" } else { "TRL or open-r1" })
}

/// Whether a file is a shell script by its name.
fn is_script(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "sh")
}

/// Every key of a file: YAML, JSON or TOML, or what a script that starts a trainer sets; and the processes that such a script starts.
fn read(file: &Path) -> Result<(Vec<ForeignEntry>, Option<u64>)> {
    let refuse = |message: String| Error::ConfigSyntax { origin: file.display().to_string(), message };
    match file.extension().and_then(|extension| extension.to_str()) {
        _ if is_script(file) => (),
        Some("yaml" | "yml" | "json" | "toml") => return Ok((config::foreign_entries(Some(file), &[])?, None)),
        Some("py") => {
            let message = "a Python script is not read; write what it gives GRPOConfig into a YAML file, a line for each (learning_rate: 1e-6), \
                           with model_name_or_path, dataset_name and reward_funcs (rewards.py:function), and import that";
            return Err(refuse(message.into()));
        }
        _ => return Err(refuse("expected a configuration (.yaml, .yml, .json, .toml) or a shell script (.sh)".into())),
    }
    let text =
        untrusted::read_text(file, MAX_RUN_CONFIG_BYTES).map_err(|error| Error::bad_file(file, error.to_string()))?;
    let script = script::read(&text, std::env::var("HOME").ok()).map_err(refuse)?;
    if script == Script::default() {
        let message = "expected a script that starts verl with key=value (python3 -m verl.trainer.main_ppo data.train_files=..), or TRL or \
                       open-r1 with flags (trl grpo --model_name_or_path ..; python3 -m trl.scripts.grpo ..; accelerate launch grpo.py --config recipe.yaml)";
        return Err(refuse(message.into()));
    }
    let recipe = script.config.map(|name| recipe(file, &name)).transpose()?;
    Ok((config::foreign_entries(recipe.as_deref(), &script.overrides)?, script.nproc))
}

/// The file that a script names, seen from the current folder, from the script's, or from one above it, as open-r1's scripts are started
/// in the root of their repository.
fn recipe(script: &Path, name: &str) -> Result<PathBuf> {
    let script = std::path::absolute(script).map_err(Error::io(script))?;
    let folders = std::iter::once(Path::new("")).chain(script.ancestors().skip(1));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file()).ok_or_else(|| {
        let message = format!("the script's --config {name} is neither in the current folder nor beside the script: start this command where it is");
        Error::bad_file(&script, message)
    })
}

fn write(path: &Path, text: &str) -> Result<()> {
    let new = std::fs::OpenOptions::new().write(true).create_new(true).open(path);
    if new.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::AlreadyExists) {
        return Err(Error::invalid_value("--output", path.display(), "a file that is not there yet"));
    }
    new.and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes())).map_err(Error::io(path))?;
    terminal::print_saved(path.display());
    Ok(())
}

/// Whether a name is a key of ours.
fn is_ours(key: &str) -> bool {
    let keys = Config::keys();
    keys.contains(&config::key_pattern(key, keys)) || key.starts_with("chat_template_kwargs.")
}
