//! Messages to a user who stops a run: what happens now, and the command that continues the run.

use std::ffi::OsStr;
use std::path::Path;

use crate::checkpoint;
use crate::console;

/// The key that is set to continue a run.
const RESUME: &str = "resume_from_checkpoint=";
/// The effect of TERM, INT, USR1 or HUP on a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnStop {
    /// The command ends at once.
    End,
    /// The command finishes the step, saves a checkpoint and exits with 75.
    Save,
    /// The command answers the requests under way and exits with 0.
    Answer,
}

impl OnStop {
    /// Describes what happens now, and what a second signal would lose.
    pub(super) fn describe(self) -> (&'static str, &'static str) {
        match self {
            Self::End => ("they end", ""),
            Self::Save => (
                "the current step is finished, a checkpoint is saved, and the run ends with exit code 75",
                ", without saving",
            ),
            Self::Answer => ("current requests are answered, new ones are refused", ", without answers"),
        }
    }
}

/// Prints the command that continues a run whose output folder has a checkpoint; `hint` is added to it. It names the newest checkpoint unless a
/// message in `said` already has.
pub(super) fn tell_way_on(output_dir: Option<&Path>, hint: &str, said: &[String]) {
    let saved = output_dir.map(checkpoint::list).and_then(Result::ok).unwrap_or_default();
    let Some(newest) = saved.last().map(|newest| newest.display().to_string()) else { return };
    match said.iter().any(|message| message.ends_with(&newest)) {
        true => console::say(format_args!("to continue: {}", resume_command())),
        false => console::say(format_args!("saved: {newest}{hint}; to continue: {}", resume_command())),
    }
}

/// This process's command line, with the key that resumes from the newest checkpoint.
pub(super) fn resume_command() -> String {
    let words: Vec<_> = std::env::args_os().collect();
    continued(words.iter().map(|word| word.as_os_str()))
}

fn continued<'a>(words: impl Iterator<Item = &'a OsStr>) -> String {
    let words = words.map(OsStr::to_string_lossy).filter(|word| !word.trim_start_matches('-').starts_with(RESUME));
    words.map(|word| quoted(&word)).chain([format!("{RESUME}latest")]).collect::<Vec<_>>().join(" ")
}

/// Quotes a word for a shell if necessary.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_resume_command_adds_the_newest_checkpoint() {
        let line = |words: &[&str]| continued(words.iter().map(OsStr::new));
        assert_eq!(
            line(&["colo-grpo", "--nproc", "2", "resume_from_checkpoint=out/checkpoint-1", "stop=[\"it's\"]"]),
            r#"colo-grpo --nproc 2 'stop=["it'\''s"]' resume_from_checkpoint=latest"#
        );
        assert_eq!(line(&["x", ""]), "x '' resume_from_checkpoint=latest");
    }
}
