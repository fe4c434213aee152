//! Forwards the output of the workers line by line, with the rank as prefix for all but rank 0.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::console;

/// Threads that read the workers' pipes.
#[derive(Debug, Default)]
pub(super) struct PipeReaders(Vec<JoinHandle<()>>);

impl PipeReaders {
    /// Makes the launcher read everything that would go to a terminal, so that only the launcher writes there. Rank 0 keeps streams of the launcher
    /// that are files or pipes, so that its results can be piped.
    pub(super) fn prepare(command: &mut Command, rank: usize) {
        command.env_remove(console::RELAY_VARIABLE);
        if rank > 0 || console::shows_output() {
            command.stdout(Stdio::piped());
        }
        if rank > 0 || console::is_shown() {
            command.stderr(Stdio::piped());
        }
        if rank == 0 && console::is_shown() {
            // Its progress bars are shown by the launcher.
            command.env(console::RELAY_VARIABLE, if console::shows_output() { console::RELAY_ALL } else { "messages" });
        }
    }

    /// Forwards a started worker's pipes.
    pub(super) fn follow(&mut self, child: &mut Child, rank: usize) {
        if let Some(pipe) = child.stdout.take() {
            self.0.push(std::thread::spawn(move || {
                pass_on(pipe, |line| drop(console::print(format_args!("{}{line}\n", prefix(rank)))))
            }));
        }
        if let Some(pipe) = child.stderr.take() {
            self.0.push(std::thread::spawn(move || pass_on(pipe, |line| console::pass_on(&prefix(rank), line))));
        }
    }

    /// Waits until everything written has been forwarded, for a limited time, because a stray descendant may hold a pipe open.
    pub(super) fn finish(self, patience: Duration) {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline && !self.0.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The prefix of a rank's lines.
fn prefix(rank: usize) -> String {
    if rank == 0 { String::new() } else { format!("[rank {rank}] ") }
}

/// Passes every line to `write`; failures to write must not stop the worker.
fn pass_on(pipe: impl Read, write: impl Fn(&str)) {
    let mut reader = BufReader::new(pipe);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        let text = String::from_utf8_lossy(&line);
        write(text.strip_suffix('\n').unwrap_or(&text));
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn worker_output_is_forwarded_line_by_line() {
        let lines = RefCell::new(Vec::new());
        pass_on(&b"one\n\nthr\xffee"[..], |line| lines.borrow_mut().push(line.to_owned()));
        assert_eq!(*lines.borrow(), ["one", "", "thr\u{fffd}ee"]);
        assert_eq!((prefix(0), prefix(7)), (String::new(), "[rank 7] ".to_owned()));
    }
}
