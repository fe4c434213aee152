//! The replies of the processes of tools.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The kind of a failed request whose process is gone.
const LOST: &str = "lost";

/// The reply to a request: a fresh environment's, the results of calls, or the end of an environment.
#[derive(Debug, Default, Deserialize)]
pub(super) struct ToolReply {
    /// The request's number.
    pub id: u64,
    /// One for each call, in their order.
    #[serde(default)]
    pub results: Vec<CallResult>,
    /// Text that a fresh environment adds to the prompt.
    pub observation: Option<String>,
    /// The environment's own reward: a number, or the name of what is none.
    #[serde(default)]
    pub reward: Value,
    /// Why it has given none.
    pub failure: Option<String>,
    /// The environment's state.
    pub state: Option<String>,
    /// Why the request failed.
    pub error: Option<String>,
    /// `timeout` where that was the time, [`LOST`] where the process of all tools was.
    pub kind: Option<String>,
    /// Seconds from the beginning of the first call.
    #[serde(default)]
    pub seconds: f64,
}

/// The result of one call as text.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CallResult {
    pub content: String,
    pub failed: bool,
}

impl CallResult {
    /// The answer to a call that was not served, in TRL's form.
    pub fn error(error: &str) -> Self {
        Self { content: format!("{{'error': '{error}'}}"), failed: true }
    }
}

impl ToolReply {
    /// The reply to a request whose process is gone, or what it kept for the request's trajectory.
    pub fn lost(id: u64, reason: String) -> Self {
        Self { id, error: Some(reason), kind: Some(LOST.to_owned()), ..Self::default() }
    }

    /// Whether it says that the process is gone: no fault of the model's, so that the trajectory is masked.
    pub fn is_lost(&self) -> bool {
        self.kind.as_deref() == Some(LOST)
    }

    /// Whether the time was over.
    pub fn is_late(&self) -> bool {
        self.kind.as_deref() == Some("timeout")
    }

    /// The environment's own reward, if it has one.
    pub fn reward(&mut self) -> Option<Result<f32, String>> {
        match (self.failure.take(), std::mem::take(&mut self.reward)) {
            (Some(failure), _) => Some(Err(failure)),
            (None, Value::Null) => None,
            (None, Value::Number(number)) => Some(Ok(number.as_f64().unwrap_or(f64::NAN) as f32)),
            (None, other) => Some(Err(format!("expected a number or None as the reward, got {other}"))),
        }
    }
}
