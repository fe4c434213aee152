//! Rows that an environment of a hub makes, by a process that ends when they are written.

use std::io;

use serde_json::Value;

use super::process::ENVIRONMENTS;
use super::worker::ToolWorker;
use crate::config::Config;
use crate::data::RowSources;
use crate::error::{Error, Result};
use crate::process::Scratch;
use crate::reward::{Origin, Program};

/// Longest answer of the process in bytes: an error.
const MAX_REPLY_BYTES: usize = 1 << 16;
/// Seconds that a request may take after the first one, which has a limit of its own; there is no other.
const TIMEOUT_S: f64 = 1.0;

/// Rows of a run in a temporary folder, which is removed with this.
#[derive(Debug)]
pub struct MadeRows {
    /// The training rows.
    pub train: RowSources,
    /// The held-out rows.
    pub held_out: RowSources,
    _folder: Scratch,
}

impl MadeRows {
    /// The rows of the environment that `config` names; `None` where it names none, or its rows are named.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an environment that cannot be opened, with the cause; [`Error::Environment`] for a full disk.
    pub fn of(config: &Config) -> Result<Option<Self>> {
        let Some((environment, settings)) = config.tools.environment.as_ref().zip(config.environment_settings()) else {
            return Ok(None);
        };
        if !config.makes_rows() {
            return Ok(None);
        }
        let python = &config.reward.python;
        let refuse = |cause: &str| {
            let expected = format!("an environment that {python} can open; opening it failed: {cause}");
            Error::invalid_value("environment", environment, expected)
        };
        let failed = |error: io::Error| Error::Environment {
            message: format!("a folder for the rows of {environment}: {error}"),
        };
        let folder = Scratch::new().map_err(failed)?;
        let place = folder.path().to_string_lossy().into_owned();
        let command = [python, "-c", ENVIRONMENTS, &settings.to_string(), &place].map(str::to_owned).to_vec();
        let origin = Origin::Key("environment".to_owned(), environment.to_string());
        let program = Program { command, is_ours: false, origin, max_reply_bytes: MAX_REPLY_BYTES };
        let worker = ToolWorker::start(
            program,
            "the process that makes the rows of an environment",
            "reward.timeout_s",
            TIMEOUT_S,
            &refuse,
        )?;
        let reply: Value = serde_json::from_slice(worker.loaded()).map_err(|error| refuse(&error.to_string()))?;
        if let Some(cause) = reply["error"].as_str() {
            return Err(refuse(cause));
        }
        let rows = |name: &str, split: &str| {
            let mut rows = RowSources::file(folder.path().join(name));
            rows.name = format!("{environment} ({split})");
            rows
        };
        Ok(Some(Self {
            train: rows("train.jsonl", "train"),
            held_out: rows("held_out.jsonl", "held out"),
            _folder: folder,
        }))
    }
}
