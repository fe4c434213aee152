//! Reads a growing metrics.jsonl incrementally.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::metrics::MetricLine;
use crate::metrics::report::History;
use crate::untrusted::Folder;

/// Name of the metrics file in a run's output folder.
const FILE: &str = "metrics.jsonl";

/// Bytes read per call; the rest is read by the next call.
const MAX_READ_BYTES: u64 = 8 << 20;
/// Values kept per run, of 16 bytes each.
const MAX_VALUES: usize = 8 << 20;
/// Number of bytes before the current offset that are compared, to detect that a file was rewritten.
const SEAM_BYTES: usize = 256;

/// Reader of a growing metrics file.
#[derive(Debug)]
pub(super) struct Follower {
    folder: Folder,
    history: History,
    /// Device and inode number of the file that was read.
    file: Option<(u64, u64)>,
    offset: u64,
    /// The last bytes before `offset`.
    seam: Vec<u8>,
    /// Time of the last line, in seconds since 1970.
    newest: Option<f64>,
    message: String,
    revision: u64,
}

impl Follower {
    pub fn new(folder: Folder) -> Self {
        let (seam, message) = (Vec::new(), String::new());
        Self { folder, history: History::default(), file: None, offset: 0, seam, newest: None, message, revision: 0 }
    }

    pub fn history(&self) -> &History {
        &self.history
    }

    /// Time of the last line, in seconds since 1970.
    pub fn newest(&self) -> Option<f64> {
        self.newest
    }

    /// What is wrong with the file; empty if nothing is.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// A number that increases with every change of the history.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Reads the lines that were added since the last call.
    pub fn look(&mut self) {
        self.message = match self.read_on() {
            Ok(message) => message,
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.file.is_none() => "no metrics yet".to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                "metrics.jsonl was deleted; showing what was read before".to_owned()
            }
            Err(error) => format!("cannot read metrics.jsonl: {error}; showing what was read before"),
        };
    }

    fn read_on(&mut self) -> io::Result<String> {
        let file = self.folder.open(FILE)?;
        let metadata = file.metadata()?;
        let identity = (metadata.dev(), metadata.ino());
        if self.file.is_some_and(|known| known != identity) || !self.continues(&file, metadata.len())? {
            *self = Self { revision: self.revision + 1, ..Self::new(self.folder.clone()) };
        }
        self.file = Some(identity);
        if self.history.num_values() >= MAX_VALUES {
            return Ok("metrics.jsonl is too long to show; its last lines are omitted".to_owned());
        }
        let size = metadata.len();
        let mut bytes = vec![0; (size - self.offset).min(MAX_READ_BYTES) as usize];
        let num_read = read_at(&file, &mut bytes, self.offset)?;
        bytes.truncate(num_read);
        // A line without its end is still being written, unless it is longer than any.
        let whole = match bytes.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => end + 1,
            None if num_read as u64 == MAX_READ_BYTES => num_read,
            None => 0,
        };
        self.take(&bytes[..whole]);
        let left = size.saturating_sub(self.offset);
        Ok(match left > MAX_READ_BYTES {
            true => format!("reading metrics.jsonl: {} of {} MiB", self.offset >> 20, size >> 20),
            false => String::new(),
        })
    }

    /// Whether the file continues the one that was read, judged by its size and the bytes before the offset.
    fn continues(&self, file: &File, size: u64) -> io::Result<bool> {
        let mut seam = vec![0; self.seam.len()];
        if size < self.offset || read_at(file, &mut seam, self.offset - self.seam.len() as u64)? < seam.len() {
            return Ok(false);
        }
        Ok(seam == self.seam)
    }

    fn take(&mut self, bytes: &[u8]) {
        for line in bytes.split(|byte| *byte == b'\n') {
            let Some(line) = std::str::from_utf8(line).ok().and_then(MetricLine::parse) else { continue };
            self.newest = Some(line.time);
            self.history.push(&line);
            self.revision += 1;
        }
        self.offset += bytes.len() as u64;
        if !bytes.is_empty() {
            self.seam = bytes[bytes.len().saturating_sub(SEAM_BYTES)..].to_vec();
        }
    }
}

fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut num_read = 0;
    while num_read < bytes.len() {
        match file.read_at(&mut bytes[num_read..], offset + num_read as u64) {
            Ok(0) => break,
            Ok(num) => num_read += num,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(num_read)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    fn line(step: u64, reward: f64) -> String {
        format!("{{\"step\":{step},\"time\":{step}.5,\"reward\":{reward}}}\n")
    }

    fn rewards(follower: &Follower) -> Vec<(f64, f64)> {
        follower.history().get("reward").unwrap_or_default().to_vec()
    }

    #[test]
    fn a_metrics_file_is_followed_through_truncation_and_replacement() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut follower = Follower::new(Folder::new(folder.path()));
        let mut look = move |expected: &[(f64, f64)], message: &str| {
            follower.look();
            assert_eq!((rewards(&follower).as_slice(), follower.message()), (expected, message));
            follower.revision()
        };
        look(&[], "no metrics yet");
        fs::write(&path, line(1, 0.5) + "{\"step\":2,\"ti").unwrap();
        let first = look(&[(1.0, 0.5)], "");
        assert_eq!(look(&[(1.0, 0.5)], ""), first, "nothing is new");
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"me\":2.5,\"reward\":1}\nno json\n\xff\n").unwrap();
        assert!(look(&[(1.0, 0.5), (2.0, 1.0)], "") > first);
        fs::write(&path, line(7, 2.0)).unwrap(); // shorter, the same file
        look(&[(7.0, 2.0)], "");
        fs::write(&path, line(8, 3.0) + &line(9, 3.0)).unwrap(); // longer, other lines
        look(&[(8.0, 3.0), (9.0, 3.0)], "");
        let other = folder.path().join("other");
        fs::write(&other, line(8, 3.0) + &line(9, 3.0) + &line(10, 4.0)).unwrap();
        fs::rename(&other, &path).unwrap(); // as a resumed run does
        look(&[(8.0, 3.0), (9.0, 3.0), (10.0, 4.0)], "");
        fs::remove_file(&path).unwrap();
        look(&[(8.0, 3.0), (9.0, 3.0), (10.0, 4.0)], "metrics.jsonl was deleted; showing what was read before");
        fs::create_dir(&path).unwrap();
        let message =
            "cannot read metrics.jsonl: expected a regular file, found a folder; showing what was read before";
        look(&[(8.0, 3.0), (9.0, 3.0), (10.0, 4.0)], message);
    }

    #[test]
    fn incomplete_lines_are_skipped_and_long_files_read_in_parts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let endless = vec![b'x'; MAX_READ_BYTES as usize + 100];
        let text = [&endless, b"\n".as_slice(), line(3, 1.0).as_bytes()].concat();
        fs::write(&path, text).unwrap();
        let mut follower = Follower::new(Folder::new(folder.path()));
        follower.look();
        assert!(rewards(&follower).is_empty());
        follower.look();
        assert_eq!(rewards(&follower), [(3.0, 1.0)]);
    }
}
