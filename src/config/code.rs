//! Configuration of running code that the model wrote, and commands as lists of arguments.

use std::path::PathBuf;

use serde_json::Value;

use super::SandboxLayer;
use super::field::{FromValue, keys};
use super::range::{COUNT, NumberRange, SECONDS, at_least};

/// Minimum address space of a program in bytes: an interpreter alone takes some tens of MiB.
const MIN_MEMORY_BYTES: f64 = (1 << 26) as f64;

keys! {
    /// Settings of the reward `code` and of the tool `python` (`reward.code.*`).
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{CodeConfig, CommandLine, SandboxLayer};
    ///
    /// let words = [
    ///     "reward.code.command=[\"python3\", \"-I\", \"-S\"]",
    ///     "reward.code.timeout_s=5",
    ///     "reward.code.may_lack=[landlock]",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let code: &CodeConfig = &config.reward.code;
    /// let CommandLine(words) = &code.command; // the file to run is appended as another argument
    /// assert_eq!((words.len(), &code.may_lack[..]), (3, &[SandboxLayer::Landlock][..]));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
    pub struct CodeConfig {
        /// Column with the tests: a list of `{input, output}`, or `{inputs, outputs}`, or one of these as JSON text.
        pub tests_column: String = "tests".into(),
        /// Command that runs the program; the program's file is appended as the last argument.
        pub command: CommandLine = CommandLine(vec!["python3".into(), "-I".into()]),
        /// Time limit in seconds for all tests of a program; tests not passed by then count as failed.
        pub timeout_s: f64 = 10.0 => SECONDS,
        /// Maximum address space of the program in bytes.
        pub memory_bytes: usize = 1 << 30 => at_least(MIN_MEMORY_BYTES),
        /// Number of programs that each rank runs at the same time.
        pub workers: usize = 1 => COUNT,
        /// Files and folders that the program may read, in addition to those of the system and of the command.
        pub readable: Vec<PathBuf> = Vec::new(),
        /// Sandbox layers that may be missing; a run is refused if another one is missing.
        pub may_lack: Vec<SandboxLayer> = Vec::new(),
    }
}

/// A command: a program and its arguments, as a list. An argument is never split at spaces.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CommandLine(pub Vec<String>);

impl FromValue for CommandLine {
    fn expected(_: &NumberRange) -> String {
        "a list [..] of a program and its arguments".into()
    }

    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        value.as_array().and_then(|_| Vec::from_value(value, range)).map(Self)
    }

    fn to_value(&self) -> Value {
        self.0.to_value()
    }
}
