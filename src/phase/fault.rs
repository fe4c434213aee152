//! Injected faults for tests: the hidden configuration key `fault = "rank:step:phase:kind"`, available in every build.
#![allow(unsafe_code)]

use std::sync::Mutex;
use std::time::Duration;

use super::{Phase, current, step};
use crate::error::{Error, Result};

static FAULT: Mutex<Option<Fault>> = Mutex::new(None);
static FILLER: Mutex<Option<Filler>> = Mutex::new(None);

/// Allocates all memory of this rank's device except the given number of bytes.
type Filler = Box<dyn Fn(usize) -> Result<()> + Send>;

/// An injected fault: its rank, step, phase and kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The rank that fails.
    pub rank: usize,
    /// The step at which it fails.
    pub step: u64,
    /// Whether the fault is injected in every later step too (`3+`).
    pub repeats: bool,
    /// The phase at whose start it fails.
    pub phase: Phase,
    /// The kind of fault.
    pub kind: FaultKind,
}

/// The effect of an injected fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// Sends SIGKILL to itself.
    Kill,
    /// Sends SIGSTOP to itself.
    Stop,
    /// Sends SIGSEGV to itself.
    Segv,
    /// Sends SIGTERM to itself.
    Term,
    /// Calls `exit(1)` without a message.
    Exit,
    /// Hangs forever.
    Hang,
    /// Returns an out-of-memory error.
    OutOfMemory,
    /// Allocates all memory of the rank's device, so that the next allocation fails (`fill`), or all but some MiB (`fill=64`); see [`on_fill`].
    Fill {
        /// MiB that are left to allocate.
        left_mib: usize,
    },
    /// Returns an ordinary error.
    Error,
    /// Panics.
    Panic,
    /// Makes a gradient NaN; see [`fires_nan`].
    Nan,
    /// Makes an exact GEMM sum in another order; see [`fires_unequal`].
    Unequal,
}

const KINDS: [(&str, FaultKind); 12] = [
    ("kill", FaultKind::Kill),
    ("stop", FaultKind::Stop),
    ("segv", FaultKind::Segv),
    ("term", FaultKind::Term),
    ("exit", FaultKind::Exit),
    ("hang", FaultKind::Hang),
    ("oom", FaultKind::OutOfMemory),
    ("error", FaultKind::Error),
    ("panic", FaultKind::Panic),
    ("nan", FaultKind::Nan),
    ("unequal", FaultKind::Unequal),
    ("fill", FaultKind::Fill { left_mib: 0 }),
];

fn kind_of(text: &str) -> Option<FaultKind> {
    if let Some(left_mib) = text.strip_prefix("fill=") {
        return Some(FaultKind::Fill { left_mib: left_mib.parse().ok()? });
    }
    KINDS.iter().find(|(name, _)| *name == text).map(|(_, kind)| *kind)
}

impl std::str::FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let shape = || "rank:step:phase:kind".to_owned();
        let parts: Vec<&str> = text.split(':').collect();
        let [rank, step, phase, kind] = parts[..] else { return Err(shape()) };
        let (step, repeats) = step.strip_suffix('+').map_or((step, false), |step| (step, true));
        let named = Phase::ALL.iter().find(|known| known.name() == phase);
        let kind = kind_of(kind);
        Ok(Self {
            rank: rank.parse().map_err(|_| shape())?,
            step: step.parse().map_err(|_| shape())?,
            repeats,
            phase: *named.ok_or_else(|| {
                let names: Vec<_> = Phase::ALL.iter().map(|known| known.name()).collect();
                format!("'{text}': the phase must be one of {}", names.join(", "))
            })?,
            kind: kind.ok_or_else(|| {
                format!("'{text}': the kind must be one of {}", KINDS.map(|(name, _)| name).join(", "))
            })?,
        })
    }
}

/// Arms a fault for this rank; `None` disarms. It fires once, unless it repeats.
pub fn arm_fault(fault: Option<Fault>, rank: usize) {
    if let Ok(mut armed) = FAULT.lock() {
        *armed = fault.filter(|fault| fault.rank == rank);
    }
}

/// Sets the function that [`FaultKind::Fill`] calls, because this module has no access to devices.
pub fn on_fill(filler: impl Fn(usize) -> Result<()> + Send + 'static) {
    if let Ok(mut set) = FILLER.lock() {
        *set = Some(Box::new(filler));
    }
}

/// Fires the armed fault, if it is for the start of `phase` in the current step.
pub(super) fn inject(phase: Phase) -> Result<()> {
    inject_at(phase, step())
}

/// Fires the armed fault, if it is for the start of `phase` in `step`; for helper threads that work during later steps.
pub fn inject_at(phase: Phase, step: u64) -> Result<()> {
    let is_asked = |kind| !matches!(kind, FaultKind::Nan | FaultKind::Unequal);
    let Some(kind) = take(phase, step, is_asked) else { return Ok(()) };
    match kind {
        FaultKind::Kill => raise(libc::SIGKILL),
        FaultKind::Stop => raise(libc::SIGSTOP),
        FaultKind::Term => raise(libc::SIGTERM),
        FaultKind::Segv => {
            // SAFETY: gives the signal its default action, which ends the process; a handler would.
            unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
            raise(libc::SIGSEGV);
        }
        // SAFETY: ends the process.
        FaultKind::Exit => unsafe { libc::_exit(1) },
        FaultKind::Hang => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
        FaultKind::Panic => panic!("injected panic in {}", phase.name()),
        FaultKind::OutOfMemory => {
            return Err(Error::OutOfMemory { owner: format!("injected in {}", phase.name()), requested_bytes: 0 });
        }
        FaultKind::Fill { left_mib } => {
            let filler = FILLER.lock().ok();
            return filler.as_ref().and_then(|filler| filler.as_ref()).map_or(Ok(()), |fill| fill(left_mib << 20));
        }
        FaultKind::Error => return Err(Error::Injected { phase: phase.name() }),
        FaultKind::Nan | FaultKind::Unequal => unreachable!("taken by fires_nan and fires_unequal alone"),
    }
    Ok(())
}

/// Whether a gradient that is computed now in `phase` must be made NaN.
pub fn fires_nan(phase: Phase) -> bool {
    take(phase, step(), |kind| kind == FaultKind::Nan).is_some()
}

/// Whether an exact GEMM that is computed now, in the current phase, must sum in another order.
pub fn fires_unequal() -> bool {
    take(current(), step(), |kind| kind == FaultKind::Unequal).is_some()
}

fn take(phase: Phase, step: u64, is_asked: impl Fn(FaultKind) -> bool) -> Option<FaultKind> {
    let mut armed = FAULT.lock().ok()?;
    let fault = armed.as_ref()?;
    let is_due = if fault.repeats { step >= fault.step } else { step == fault.step };
    if fault.phase != phase || !is_due || !is_asked(fault.kind) {
        return None;
    }
    let kind = fault.kind;
    tracing::warn!(?fault, "injected fault");
    if !fault.repeats {
        *armed = None;
    }
    Some(kind)
}

fn raise(signal: i32) {
    // SAFETY: raising a signal in the own process has no memory preconditions.
    unsafe { libc::raise(signal) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_specifications_are_parsed_or_refused_with_the_reason() {
        let fault: Fault = "1:3:wake:kill".parse().unwrap();
        assert_eq!(fault, Fault { rank: 1, step: 3, repeats: false, phase: Phase::Wake, kind: FaultKind::Kill });
        let fill = |text: &str| text.parse::<Fault>().map(|fault| fault.kind);
        assert_eq!(fill("0:0:score:fill"), Ok(FaultKind::Fill { left_mib: 0 }));
        assert_eq!(fill("0:0:score:fill=64"), Ok(FaultKind::Fill { left_mib: 64 }));
        assert!(fill("0:0:score:fill=some").is_err());
        assert!("1:3+:wake:nan".parse::<Fault>().unwrap().repeats);
        assert!("1:3:nap:kill".parse::<Fault>().unwrap_err().contains("one of startup, load"));
        assert!("1:3:wake:sigh".parse::<Fault>().unwrap_err().contains("one of kill, stop"));
        for wrong in ["1:3++:wake:kill", "1:+:wake:kill", "1:-3:wake:kill"] {
            assert!(wrong.parse::<Fault>().is_err(), "{wrong}");
        }
        assert!("1:3:wake".parse::<Fault>().unwrap_err().contains("rank:step:phase:kind"));
    }
}
