//! Replies of the tools' processes.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The kind of a request that failed because its process ended.
const LOST: &str = "lost";

/// The reply to a request: from opening an environment, from tool calls, or from the end of an environment.
#[derive(Debug, Default, Deserialize)]
pub(super) struct ToolReply {
    /// Number of the request.
    pub id: u64,
    /// One result per call, in order.
    #[serde(default)]
    pub results: Vec<CallResult>,
    /// Text that a new environment adds to the prompt.
    pub observation: Option<String>,
    /// The environment's own reward: a number, or the name of a non-finite value.
    #[serde(default)]
    pub reward: Value,
    /// Why the environment returned no reward.
    pub failure: Option<String>,
    /// The state of the environment.
    pub state: Option<String>,
    /// Why the request failed.
    pub error: Option<String>,
    /// `timeout` if the time limit was exceeded, [`LOST`] if the tools' process ended.
    pub kind: Option<String>,
    /// Duration in seconds, from the start of the first call.
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
    /// The result of a call that could not be executed, in TRL's format.
    pub fn error(error: &str) -> Self {
        Self { content: format!("{{'error': '{error}'}}"), failed: true }
    }
}

impl ToolReply {
    /// The reply to a request whose process, or the state of whose trajectory, was lost.
    pub fn lost(id: u64, reason: String) -> Self {
        Self { id, error: Some(reason), kind: Some(LOST.to_owned()), ..Self::default() }
    }

    /// Whether the process was lost. This is not the model's fault, so the trajectory is masked.
    pub fn is_lost(&self) -> bool {
        self.kind.as_deref() == Some(LOST)
    }

    /// Whether the time limit was exceeded.
    pub fn is_late(&self) -> bool {
        self.kind.as_deref() == Some("timeout")
    }

    /// The environment's own reward, if it returned one.
    pub fn reward(&mut self) -> Option<Result<f32, String>> {
        match (self.failure.take(), std::mem::take(&mut self.reward)) {
            (Some(failure), _) => Some(Err(failure)),
            (None, Value::Null) => None,
            (None, Value::Number(number)) => Some(Ok(number.as_f64().unwrap_or(f64::NAN) as f32)),
            (None, other) => Some(Err(format!("expected a number or None as the reward, got {other}"))),
        }
    }
}
