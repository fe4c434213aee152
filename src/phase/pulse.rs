//! The activity of a process at one moment.

use std::fmt;

use super::Phase;

/// The activity of a process at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulse {
    /// Heartbeats so far: a watcher that sees the number stand still knows that nothing moves.
    pub beats: u64,
    /// Training step.
    pub step: u64,
    /// Running phases, outermost first.
    pub stack: Vec<Phase>,
    /// The phase that ended last.
    pub left: Phase,
    /// The newest collective.
    pub collective: Option<LastCollective>,
}

/// The newest collective of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastCollective {
    /// The operation.
    pub op: String,
    /// The group's name.
    pub group: String,
    /// Bytes of this rank.
    pub bytes: u64,
    /// Collectives so far, this one included.
    pub number: u64,
    /// Whether the rank may be waiting for peers in it.
    pub is_waiting: bool,
}

impl Pulse {
    /// The phase that its time limit is taken from.
    pub fn phase(&self) -> Phase {
        self.stack.last().copied().unwrap_or(self.left)
    }

    /// The phase of the rank: `generate`, `after generate`; empty before the first phase.
    pub fn place(&self) -> String {
        match (self.stack.last(), self.left) {
            (Some(phase), _) => phase.name().to_owned(),
            (None, Phase::Startup) => String::new(),
            (None, left) => format!("after {}", left.name()),
        }
    }

    /// Whether the rank may be waiting for peers.
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
