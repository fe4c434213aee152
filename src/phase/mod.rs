//! The current phase of this process: timings, heartbeat, stop flag and fault injection, to which all layers report.
//!
//! The state is process-wide because signals, watchdogs and error reports are. It consists of counters only.
//!
//! | file | content |
//! |---|---|
//! | `page`, `pulse` | phases, step, heartbeats and last collective, on a page that the launcher also reads; a snapshot of it |
//! | `awake` | a clock that stops while the process is stopped |
//! | `watch` | finds ranks without heartbeat for longer than their phase allows |
//! | `trace` | a timeline of phases, on request |
//! | `fault` | injected faults |
//! | `failure` | the phase in which an error arose |

mod awake;
mod failure;
mod fault;
mod page;
mod pulse;
mod trace;
mod watch;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use awake::awake_now;
use failure::FirstFailure;
use fault::inject;
pub use fault::{Fault, FaultKind, arm_fault, fires_nan, fires_unequal, inject_at, on_fill};
use page::page;
pub use page::{CollectiveScope, PULSE_FD_VARIABLE, SharedPage, is_watched, publish};
pub use pulse::Pulse;
pub use trace::{flush_trace, merge_traces, trace_to};
pub use watch::{HeartbeatLimits, Stall, Watch};

use crate::error::Result;

macro_rules! phases {
    ($($(#[$doc:meta])* $variant:ident = $name:literal),+ $(,)?) => {
        /// A part of a run that is timed and watched, and at which faults can be injected.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Phase { $($(#[$doc])* $variant),+ }

        impl Phase {
            /// Every phase, in declaration order.
            pub const ALL: &[Phase] = &[$(Phase::$variant),+];

            /// The name used in metrics (`timing_s/{name}`), spans and the keys `fault` and `heartbeat.{name}_s`.
            pub fn name(self) -> &'static str {
                match self { $(Phase::$variant => $name),+ }
            }
        }
    };
}

phases! {
    /// Before anything else has started.
    Startup = "startup",
    /// Model, data and tokenizer are read.
    Load = "load",
    /// Policy weights are gathered for the engine.
    Gather = "gather",
    /// Optimizer state goes to the host pool.
    Offload = "offload",
    /// The engine's memory is mapped.
    Wake = "wake",
    /// Prompts are exchanged and completions sampled.
    Generate = "generate",
    /// An engine step over prompts, within `generate`.
    Prefill = "prefill",
    /// An engine step over running sequences, within `generate`.
    Decode = "decode",
    /// The engine's memory is given back.
    Sleep = "sleep",
    /// Optimizer state returns.
    Reload = "reload",
    /// Rewards still outstanding after generation are awaited.
    Reward = "reward",
    /// Groups become micro-batches.
    Pack = "pack",
    /// Old and reference log-probabilities.
    Score = "score",
    /// Forward and backward of the policy.
    ForwardBackward = "forward_backward",
    /// Gradient norm, AdamW and the new weights' gather.
    Optimizer = "optimizer",
    /// This rank is done and waits for the others to come as far.
    Idle = "idle",
    /// The contents of a checkpoint are copied to the host.
    Checkpoint = "checkpoint",
    /// A checkpoint's files are written, beside training; the training thread is in it while it waits for that.
    Write = "write",
    /// Held-out problems are sampled and scored.
    Eval = "eval",
}

static STOP: AtomicBool = AtomicBool::new(false);
static TIMINGS: Mutex<BTreeMap<Phase, Duration>> = Mutex::new(BTreeMap::new());
static FAILURE: FirstFailure = FirstFailure::new();

/// Runs `work` as `phase`: with a tracing span, a timing and fault injection. Phases can be nested; the outer one's time includes the inner one's.
///
/// # Errors
/// The errors of `work`; [`Error::Injected`](crate::Error::Injected) and other injected errors.
pub fn scope<T>(phase: Phase, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _span = tracing::debug_span!("phase", name = phase.name(), step = step()).entered();
    let start = Instant::now();
    let outcome = part(phase, work);
    let duration = start.elapsed();
    trace::span(phase, duration);
    if let Ok(mut timings) = TIMINGS.lock() {
        *timings.entry(phase).or_default() += duration;
    }
    outcome
}

/// Runs `work` as a sub-phase of the current phase: visible to watchers and with fault injection, but without a span and a timing.
///
/// # Errors
/// The errors of [`scope`].
pub fn part<T>(phase: Phase, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _left = page().enter(phase);
    FAILURE.watch(phase, || inject(phase).and_then(|()| work()))
}

/// The innermost phase in which the current error arose; the current phase if there is no error. An error is over when a phase in which it arose
/// succeeds, or when the next training step begins.
pub fn at_failure() -> Phase {
    FAILURE.phase().unwrap_or_else(current)
}

/// The innermost running phase.
pub fn current() -> Phase {
    pulse().stack.last().copied().unwrap_or(Phase::Startup)
}

/// A snapshot of this process's activity, as watchers see it.
pub fn pulse() -> Pulse {
    page().read()
}

/// Returns the time spent in each phase since the last call.
pub fn take_timings() -> BTreeMap<Phase, Duration> {
    TIMINGS.lock().map(|mut timings| std::mem::take(&mut *timings)).unwrap_or_default()
}

/// Reports a heartbeat; cheap enough for every decode step. Only the training thread may call it: a helper thread's heartbeat would hide that
/// training hangs.
pub fn beat() {
    page().beat();
}

/// Reports a collective that begins now, with `bytes` on this rank; it ends when the result is dropped.
pub fn collective(op: &str, group: &str, bytes: usize) -> CollectiveScope {
    page().begin_collective(op, group, bytes)
}

/// Begins a training step, whose number spans, faults and reports use. All earlier errors must have been handled.
pub fn set_step(step: u64) {
    FAILURE.forget();
    page().set_step(step);
}

/// Number of the current training step.
pub fn step() -> u64 {
    page().step()
}

/// Requests a checkpoint and an orderly end at the next step boundary. Async-signal-safe.
pub fn request_stop() {
    STOP.store(true, Ordering::Relaxed);
}

/// Whether [`request_stop`] was called on this rank.
pub fn stop_requested() -> bool {
    STOP.load(Ordering::Relaxed)
}
