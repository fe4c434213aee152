//! Runs untrusted work on threads with a known stack size and limits on memory and CPU time.

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::meter::metered;
use crate::error::panic_message;

/// Interval at which a thread that has not answered yet is checked.
const LOOK: Duration = Duration::from_millis(20);

/// Limits for work on an untrusted file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThreadLimits {
    /// Size of the thread's stack in bytes. Only pages that are touched use memory.
    pub stack_bytes: usize,
    /// Largest size of live heap memory in bytes. Enforced only if the program uses [`MeteredAllocator`](super::MeteredAllocator).
    pub memory_bytes: usize,
    /// CPU time limit of one call in seconds.
    pub cpu_s: u64,
}

/// A thread that answers calls one at a time, within limits. If a call exceeds a limit, the thread is abandoned. It keeps
/// its memory, at most its budget, and all later calls return the same error.
pub(crate) struct Confined<I, O> {
    limits: ThreadLimits,
    is_exceeded: &'static AtomicBool,
    line: Mutex<Line<I, O>>,
}

struct Line<I, O> {
    calls: Sender<I>,
    answers: Receiver<Result<O, Box<dyn Any + Send>>>,
    task: PathBuf,
    breach: Option<String>,
}

impl<I: Send + 'static, O: Send + 'static> Confined<I, O> {
    /// Starts the thread, which applies `work` to the input of each call.
    ///
    /// # Errors
    /// The system's error if it cannot create a thread or reserve its stack.
    pub fn start(name: &str, limits: ThreadLimits, mut work: impl FnMut(I) -> O + Send + 'static) -> io::Result<Self> {
        let is_exceeded: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false))); // the thread may outlive all
        let (calls, received) = channel::<I>();
        let (answer, answers) = channel();
        let (named, task) = channel();
        let serve = move || {
            let _ = named.send(std::fs::read_link("/proc/thread-self").unwrap_or_default());
            for call in received {
                let guarded = || catch_unwind(AssertUnwindSafe(|| work(call)));
                if answer.send(metered(limits.memory_bytes, is_exceeded, guarded)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name(name.to_owned()).stack_size(limits.stack_bytes).spawn(serve)?;
        let task = Path::new("/proc").join(task.recv().unwrap_or_default()).join("schedstat");
        Ok(Self { limits, is_exceeded, line: Mutex::new(Line { calls, answers, task, breach: None }) })
    }

    /// Runs `work` on `input` and waits for the result.
    ///
    /// # Errors
    /// The exceeded limit, or the message of a panic in `work`.
    pub fn call(&self, input: I) -> Result<O, String> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(breach) = &line.breach {
            return Err(breach.clone());
        }
        let outcome = self.answer(&line, input);
        line.breach = outcome.as_ref().err().cloned();
        outcome
    }

    fn answer(&self, line: &Line<I, O>, input: I) -> Result<O, String> {
        let ended = || "the thread that processes it has ended".to_owned();
        line.calls.send(input).map_err(|_| ended())?;
        let ThreadLimits { memory_bytes, cpu_s, .. } = self.limits;
        let mut start_ns = None; // first asked after a while: most calls are over by then
        loop {
            match line.answers.recv_timeout(LOOK) {
                Ok(answer) => return answer.map_err(|panic| format!("panic: {}", panic_message(&*panic))),
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                Err(RecvTimeoutError::Timeout) if self.is_exceeded.load(Ordering::Acquire) => {
                    return Err(format!("processing it needs more than {} MiB of memory", memory_bytes >> 20));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let now_ns = on_cpu_ns(&line.task);
                    if now_ns > *start_ns.get_or_insert(now_ns) + cpu_s * 1_000_000_000 {
                        return Err(format!("processing it takes more than {cpu_s} s of CPU time"));
                    }
                }
            }
        }
    }
}

impl<I, O> fmt::Debug for Confined<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Confined").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// Runs `work` once within limits, on a thread of its own.
///
/// # Errors
/// The exceeded limit, or that no thread can be created.
pub(crate) fn once<O: Send + 'static>(
    name: &str,
    limits: ThreadLimits,
    work: impl FnOnce() -> O + Send + 'static,
) -> Result<O, String> {
    let mut work = Some(work);
    let run = move |()| work.take().expect("called once")();
    let thread =
        Confined::start(name, limits, run).map_err(|error| format!("cannot start a thread to process it: {error}"))?;
    thread.call(())
}

/// CPU time of a thread in nanoseconds; 0 if the kernel does not report it.
fn on_cpu_ns(task: &Path) -> u64 {
    let text = std::fs::read_to_string(task).unwrap_or_default();
    text.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ThreadLimits = ThreadLimits { stack_bytes: 64 << 20, memory_bytes: 64 << 20, cpu_s: 1 };

    #[test]
    fn a_confined_thread_answers_calls_until_it_panics() {
        let thread = Confined::start("test", LIMITS, |number: u32| 6 / number).unwrap();
        assert_eq!([1, 2, 3].map(|number| thread.call(number).unwrap()), [6, 3, 2]);
        for _ in 0..2 {
            assert!(thread.call(0).unwrap_err().starts_with("panic: attempt to divide by zero"));
        }
    }

    #[test]
    fn endless_work_in_a_confined_thread_is_abandoned() {
        let outcome = once("test", LIMITS, || {
            let mut number = 0_u64;
            loop {
                number = std::hint::black_box(number + 1);
            }
        });
        let _: &Result<(), _> = &outcome;
        assert_eq!(outcome.unwrap_err(), "processing it takes more than 1 s of CPU time");
    }

    #[test]
    fn a_confined_thread_has_the_requested_stack() {
        fn deep(levels: usize) -> usize {
            let here = std::hint::black_box([levels; 8]);
            if levels == 0 { 0 } else { here[0] - levels + 1 + deep(levels - 1) }
        }
        assert_eq!(once("test", LIMITS, || deep(200_000)).unwrap(), 200_000);
    }
}
