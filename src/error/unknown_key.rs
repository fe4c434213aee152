//! Configuration keys that the program does not know.

use std::fmt;

/// Number of keys of another trainer in one file from which on the error names the command that translates the whole file.
const MANY: usize = 2;
/// Prefix of the advice for a key of another trainer.
pub(crate) const OF_ANOTHER_TRAINER: &str = "here: ";

/// A configuration key that the program does not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownKey {
    /// File and line (`run.toml:12`) or `command line`.
    pub origin: String,
    /// The key as written.
    pub key: String,
    /// The closest known key, or the equivalent of another trainer's key.
    pub advice: Option<String>,
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: unknown key '{}'", self.origin, self.key)?;
        self.advice.as_ref().map_or(Ok(()), |advice| write!(f, "; {advice}"))
    }
}

/// Names the command that translates a file with keys of another trainer; empty without such a file.
pub(super) fn hint(keys: &[UnknownKey]) -> String {
    let of_another = |key: &&UnknownKey| key.advice.as_ref().is_some_and(|it| it.starts_with(OF_ANOTHER_TRAINER));
    let files: Vec<&str> = keys.iter().filter(of_another).filter_map(UnknownKey::file).collect();
    match files.as_slice() {
        [file, ..] if files.len() >= MANY => {
            format!(
                "\nthese look like keys of TRL, open-r1 or verl; translate the file with: colo-grpo import {file} \
                 --output run.toml"
            )
        }
        _ => String::new(),
    }
}

impl UnknownKey {
    /// The configuration file that contains the key; `None` for the command line.
    fn file(&self) -> Option<&str> {
        let is_line = |line: &str| line.parse::<usize>().is_ok();
        let file =
            self.origin.rsplit_once(':').filter(|(_, line)| is_line(line)).map_or(&*self.origin, |(file, _)| file);
        (file != "command line").then_some(file)
    }
}
