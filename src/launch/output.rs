//! Output of the workers but the first, passed on line by line under their ranks.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::phase::terminal;

/// Readers of the workers' pipes.
#[derive(Debug, Default)]
pub(super) struct Output(Vec<JoinHandle<()>>);

impl Output {
    /// Rank 0 has the launcher's own streams: its results can be piped on, and its progress bars find the terminal. The
    /// others are read line by line.
    pub(super) fn prepare(command: &mut Command, rank: usize) {
        if rank > 0 {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
    }

    /// Passes a started worker's pipes on.
    pub(super) fn follow(&mut self, child: &mut Child, rank: usize) {
        if let Some(pipe) = child.stdout.take() {
            self.0.push(std::thread::spawn(move || {
                pass_on(pipe, rank, |line| drop(terminal::print(format_args!("{line}\n"))))
            }));
        }
        if let Some(pipe) = child.stderr.take() {
            self.0.push(std::thread::spawn(move || pass_on(pipe, rank, |line| terminal::say(line))));
        }
    }

    /// Waits until everything written has been passed on; not for ever, as a stray descendant may hold a pipe open.
    pub(super) fn finish(self, patience: Duration) {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline && !self.0.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Hands every line to `write`, whose failures must not stop the worker.
fn pass_on(pipe: impl Read, rank: usize, write: impl Fn(&str)) {
    let mut reader = BufReader::new(pipe);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        let text = String::from_utf8_lossy(&line);
        write(&format!("[rank {rank}] {}", text.strip_suffix('\n').unwrap_or(&text)));
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn every_line_is_prefixed_and_the_last_one_completed() {
        let lines = RefCell::new(Vec::new());
        pass_on(&b"one\n\nthr\xffee"[..], 7, |line| lines.borrow_mut().push(line.to_owned()));
        assert_eq!(*lines.borrow(), ["[rank 7] one", "[rank 7] ", "[rank 7] thr\u{fffd}ee"]);
    }
}
