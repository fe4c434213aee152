//! Keys of a configuration that nothing reads.

use std::fmt;

/// Keys of another trainer in one file from which on the command that translates all of them is named.
const MANY: usize = 2;
/// How the advice on a key of another trainer begins.
pub(crate) const OF_ANOTHER_TRAINER: &str = "here: ";

/// A key that no part of the program reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownKey {
    /// File and line (`run.toml:12`) or `command line`.
    pub origin: String,
    /// The key as written.
    pub key: String,
    /// The known key that is close to it, or what takes the place of another program's key.
    pub advice: Option<String>,
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: unknown key '{}'", self.origin, self.key)?;
        self.advice.as_ref().map_or(Ok(()), |advice| write!(f, "; {advice}"))
    }
}

/// The command that translates a file with keys of another trainer; empty where there is none.
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
    /// The file that the key is in.
    fn file(&self) -> Option<&str> {
        let is_line = |line: &str| line.parse::<usize>().is_ok();
        let file =
            self.origin.rsplit_once(':').filter(|(_, line)| is_line(line)).map_or(&*self.origin, |(file, _)| file);
        (file != "command line").then_some(file)
    }
}
