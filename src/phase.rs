//! The phase that this process is in: timings, heartbeat, stop flag and fault injection, which every floor reports to.
//!
//! State is process-wide because signals, watchdogs and error reports are. It holds counters only, never data.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

macro_rules! phases {
    ($($(#[$doc:meta])* $variant:ident = $name:literal),+ $(,)?) => {
        /// A part of a run that is timed, watched and can be made to fail.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Phase { $($(#[$doc])* $variant),+ }

        impl Phase {
            /// Every phase in declaration order.
            pub const ALL: &[Phase] = &[$(Phase::$variant),+];

            /// The name used in metrics (`timing_s/{name}`), spans and the `fault` key.
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
    /// A checkpoint is written.
    Checkpoint = "checkpoint",
    /// Held-out problems are sampled and scored.
    Eval = "eval",
}

static CURRENT: AtomicU8 = AtomicU8::new(0);
static BEATS: AtomicU64 = AtomicU64::new(0);
static STOP: AtomicBool = AtomicBool::new(false);
static STEP: AtomicU64 = AtomicU64::new(0);
static TIMINGS: Mutex<BTreeMap<Phase, Duration>> = Mutex::new(BTreeMap::new());
static FAILED_IN: AtomicU8 = AtomicU8::new(u8::MAX);
static FAULT: Mutex<Option<Fault>> = Mutex::new(None);

/// Runs `work` as `phase`: a tracing span, a timing and an injection point. Phases nest; the outer one's time includes
/// the inner one's.
pub fn scope<T>(phase: Phase, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _span = tracing::debug_span!("phase", name = phase.name(), step = step()).entered();
    let _restore = Restore { outer: CURRENT.swap(phase as u8, Ordering::Relaxed), phase, start: Instant::now() };
    beat();
    let outcome = inject(phase).and_then(|()| work());
    if outcome.is_err() {
        // The innermost phase reports first; the outer ones that the error passes through leave it.
        let _ = FAILED_IN.compare_exchange(u8::MAX, phase as u8, Ordering::Relaxed, Ordering::Relaxed);
    }
    outcome
}

/// The innermost phase in which the process's first error arose; the current one if there was none.
pub fn at_failure() -> Phase {
    Phase::ALL.get(usize::from(FAILED_IN.load(Ordering::Relaxed))).copied().unwrap_or_else(current)
}

/// Puts the outer phase back and books the time, also when the work failed or panicked.
struct Restore {
    outer: u8,
    phase: Phase,
    start: Instant,
}

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.store(self.outer, Ordering::Relaxed);
        if let Ok(mut timings) = TIMINGS.lock() {
            *timings.entry(self.phase).or_default() += self.start.elapsed();
        }
        beat();
    }
}

/// The innermost phase now running.
pub fn current() -> Phase {
    Phase::ALL[usize::from(CURRENT.load(Ordering::Relaxed))]
}

/// Time spent in each phase since the last call.
pub fn take_timings() -> BTreeMap<Phase, Duration> {
    TIMINGS.lock().map(|mut timings| std::mem::take(&mut *timings)).unwrap_or_default()
}

/// Says that this process is alive and moving; cheap enough for every decode step.
pub fn beat() {
    BEATS.fetch_add(1, Ordering::Relaxed);
}

/// Number of heartbeats so far: a watcher that sees it stand still knows that nothing moves.
pub fn beats() -> u64 {
    BEATS.load(Ordering::Relaxed)
}

/// Sets the training step that spans, faults and reports name.
pub fn set_step(step: u64) {
    STEP.store(step, Ordering::Relaxed);
}

/// The training step now running.
pub fn step() -> u64 {
    STEP.load(Ordering::Relaxed)
}

/// Asks for a save and an orderly end at the next step boundary. Async-signal-safe.
pub fn request_stop() {
    STOP.store(true, Ordering::Relaxed);
}

/// Whether [`request_stop`] was called on this rank.
pub fn stop_requested() -> bool {
    STOP.load(Ordering::Relaxed)
}

/// A fault to inject: the hidden configuration key `fault = "rank:step:phase:kind"`, for tests in every build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Rank that fails.
    pub rank: usize,
    /// Step at which it fails.
    pub step: u64,
    /// Phase at whose start it fails.
    pub phase: Phase,
    /// What happens.
    pub kind: FaultKind,
}

/// What an injected fault does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// SIGKILL to itself.
    Kill,
    /// SIGSTOP to itself.
    Stop,
    /// SIGSEGV to itself.
    Segv,
    /// `exit(1)` without a word.
    Exit,
    /// An out-of-memory error.
    OutOfMemory,
    /// An ordinary error.
    Error,
    /// A panic.
    Panic,
}

impl std::str::FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let shape = || format!("'{text}' is not rank:step:phase:kind");
        let parts: Vec<&str> = text.split(':').collect();
        let [rank, step, phase, kind] = parts[..] else { return Err(shape()) };
        let phase = Phase::ALL.iter().find(|known| known.name() == phase);
        Ok(Self {
            rank: rank.parse().map_err(|_| shape())?,
            step: step.parse().map_err(|_| shape())?,
            phase: *phase.ok_or_else(|| {
                let names: Vec<_> = Phase::ALL.iter().map(|known| known.name()).collect();
                format!("'{text}': the phase is one of {}", names.join(", "))
            })?,
            kind: match kind {
                "kill" => FaultKind::Kill,
                "stop" => FaultKind::Stop,
                "segv" => FaultKind::Segv,
                "exit" => FaultKind::Exit,
                "oom" => FaultKind::OutOfMemory,
                "error" => FaultKind::Error,
                "panic" => FaultKind::Panic,
                _ => return Err(format!("'{text}': the kind is one of kill, stop, segv, exit, oom, error, panic")),
            },
        })
    }
}

/// Arms a fault for this rank; `None` disarms. A fault fires once.
pub fn arm_fault(fault: Option<Fault>, rank: usize) {
    if let Ok(mut armed) = FAULT.lock() {
        *armed = fault.filter(|fault| fault.rank == rank);
    }
}

fn inject(phase: Phase) -> Result<()> {
    let fires = |fault: &mut Fault| fault.phase == phase && fault.step == step();
    let Some(fault) = FAULT.lock().ok().and_then(|mut armed| armed.take_if(|fault| fires(fault))) else {
        return Ok(());
    };
    tracing::warn!(?fault, "injected fault");
    match fault.kind {
        FaultKind::Kill => raise(libc::SIGKILL),
        FaultKind::Stop => raise(libc::SIGSTOP),
        FaultKind::Segv => raise(libc::SIGSEGV),
        FaultKind::Exit => std::process::exit(1),
        FaultKind::Panic => panic!("injected panic in {}", phase.name()),
        FaultKind::OutOfMemory => {
            return Err(Error::OutOfMemory { owner: format!("injected in {}", phase.name()), requested_bytes: 0 });
        }
        FaultKind::Error => return Err(Error::Injected { phase: phase.name() }),
    }
    Ok(())
}

#[allow(unsafe_code)]
fn raise(signal: i32) {
    // SAFETY: raising a signal in the own process has no memory preconditions.
    unsafe { libc::raise(signal) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_parse_and_name_what_is_wrong() {
        let fault: Fault = "1:3:wake:kill".parse().unwrap();
        assert_eq!(fault, Fault { rank: 1, step: 3, phase: Phase::Wake, kind: FaultKind::Kill });
        assert!("1:3:nap:kill".parse::<Fault>().unwrap_err().contains("one of startup, load"));
        assert!("1:3:wake".parse::<Fault>().unwrap_err().contains("rank:step:phase:kind"));
    }

    #[test]
    fn a_scope_restores_the_outer_phase_after_an_error() {
        let outer = current();
        let failed: Result<()> = scope(Phase::Pack, || Err(Error::Injected { phase: "pack" }));
        assert!(failed.is_err());
        assert_eq!(current(), outer);
    }
}
