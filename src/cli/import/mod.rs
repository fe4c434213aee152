//! `import`: another trainer's configuration as one of ours, with a list of what became of every key.

mod draft;
mod script;
mod trl;
mod verl;

use std::path::Path;

use super::args::ImportArgs;
use crate::config::{self, Config, ForeignEntry};
use crate::error::{Error, ExitCode, Result};
use crate::phase::terminal;
use crate::untrusted::{self, MAX_RUN_CONFIG_BYTES};
use draft::{Draft, ForeignKeys};

/// Reads, translates, checks and writes.
///
/// # Errors
/// What does not parse; what is wrong with the configuration that comes out, which is written all the same.
pub(super) fn import(args: &ImportArgs) -> Result<ExitCode> {
    let mut theirs = ForeignKeys::new(read(&args.file)?);
    let mut draft = Draft::default();
    let is_verl = theirs.has_table(&["actor_rollout_ref.", "data.", "algorithm.", "trainer."]);
    match is_verl {
        true => verl::translate(&mut theirs, &mut draft),
        false => trl::translate(&mut theirs, &mut draft),
    }
    draft.translate_rest(theirs);
    let outcome = draft.check();
    let text = draft.text(&args.file, if is_verl { "verl" } else { "TRL or open-r1" });
    match &args.output {
        Some(path) => write(path, &text)?,
        None => terminal::print(&text)?,
    }
    draft.notes().into_iter().for_each(terminal::say);
    outcome.map(|()| ExitCode::Done)
}

/// Every key of a file: YAML, JSON or TOML, or the overrides of a verl script.
fn read(file: &Path) -> Result<Vec<ForeignEntry>> {
    if file.extension().is_none_or(|extension| extension != "sh") {
        return config::foreign_entries(Some(file), &[]);
    }
    let text =
        untrusted::read_text(file, MAX_RUN_CONFIG_BYTES).map_err(|error| Error::bad_file(file, error.to_string()))?;
    let overrides = script::overrides(&text, std::env::var("HOME").ok());
    if overrides.is_empty() {
        let message = "expected a script that starts verl with key=value, as python3 -m verl.trainer.main_ppo data.train_files=..";
        return Err(Error::ConfigSyntax { origin: file.display().to_string(), message: message.into() });
    }
    config::foreign_entries(None, &overrides)
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
