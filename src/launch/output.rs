//! Output of the workers but the first, passed on line by line under their ranks.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
            self.0.push(std::thread::spawn(move || pass_on(pipe, rank, &mut std::io::stdout())));
        }
        if let Some(pipe) = child.stderr.take() {
            self.0.push(std::thread::spawn(move || pass_on(pipe, rank, &mut std::io::stderr())));
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

fn pass_on(pipe: impl Read, rank: usize, target: &mut impl Write) {
    let mut reader = BufReader::new(pipe);
    let mut line = format!("[rank {rank}] ").into_bytes();
    let prefix_len = line.len();
    while reader.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        // One write a line, so that ranks do not mix within lines. A closed target must not stop the worker.
        let _ = target.write_all(&line).and_then(|()| target.flush());
        line.truncate(prefix_len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_prefixed_and_the_last_one_completed() {
        let mut target = Vec::new();
        pass_on(&b"one\n\nthree"[..], 7, &mut target);
        assert_eq!(target, b"[rank 7] one\n[rank 7] \n[rank 7] three\n");
    }
}
