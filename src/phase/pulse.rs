//! A snapshot of a process's activity.

use std::fmt;

use super::Phase;

/// A snapshot of a process's activity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulse {
    /// Number of heartbeats so far. If it does not change, the process makes no progress.
    pub beats: u64,
    /// Number of the training step.
    pub step: u64,
    /// Running phases, outermost first.
    pub stack: Vec<Phase>,
    /// The phase that ended last.
    pub left: Phase,
    /// The latest collective.
    pub collective: Option<LastCollective>,
}

/// The latest collective of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastCollective {
    /// Name of the operation.
    pub op: String,
    /// Name of the group.
    pub group: String,
    /// Bytes on this rank.
    pub bytes: u64,
    /// Number of collectives so far, including this one.
    pub number: u64,
    /// Whether the rank may be waiting for peers in this collective.
    pub is_waiting: bool,
}

impl Pulse {
    /// The phase whose time limit applies.
    pub fn phase(&self) -> Phase {
        self.stack.last().copied().unwrap_or(self.left)
    }

    /// The current phase as text: `generate`, or `after generate`; empty before the first phase.
    pub fn place(&self) -> String {
        match (self.stack.last(), self.left) {
            (Some(phase), _) => phase.name().to_owned(),
            (None, Phase::Startup) => String::new(),
            (None, left) => format!("after {}", left.name()),
        }
    }

    /// Whether the rank may be waiting for peers in a collective.
    pub fn is_waiting(&self) -> bool {
        self.collective.as_ref().is_some_and(|collective| collective.is_waiting)
    }
}

impl fmt::Display for Pulse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spans: Vec<&str> = self.stack.iter().map(|phase| phase.name()).collect();
        let spans = if spans.is_empty() { self.place() } else { spans.join(" > ") };
        write!(f, "step {}, {}", self.step, if spans.is_empty() { "startup" } else { &spans })?;
        let Some(LastCollective { op, group, bytes, number, is_waiting }) = &self.collective else {
            return f.write_str("; no collective yet");
        };
        let state = if *is_waiting { "waiting for peers" } else { "done" };
        write!(f, "; collective {number}: {op} of {bytes} bytes in group '{group}', {state}")
    }
}
