//! The identity of a data set: a hash of its rows, by which a resumed run notices that they have changed.

use std::fmt::Write;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// SHA-256 of the kept rows in order: their columns as they were read, independent of file names, chat template and tokenizer. Templates may print
/// the date, so prompts as text are not part of it.
#[derive(Debug, Clone, Default)]
pub(crate) struct RowsDigest {
    hash: Sha256,
    line: Vec<u8>,
}

impl RowsDigest {
    /// Adds the row with index `id`, which appears `copies` times in an epoch. Rows without copies do not count.
    pub fn add(&mut self, id: u64, copies: u64, columns: &Map<String, Value>) {
        if copies == 0 {
            return;
        }
        let mut sorted: Vec<_> = columns.iter().collect();
        sorted.sort_unstable_by_key(|(name, _)| *name);
        self.line.clear();
        serde_json::to_writer(&mut self.line, &(id, copies, sorted)).expect("columns are plain data");
        self.line.push(b'\n');
        self.hash.update(&self.line);
    }

    /// The hash of all rows so far, as hexadecimal digits.
    pub fn text(&self) -> String {
        self.hash.clone().finalize().iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").expect("a string accepts all text");
            text
        })
    }
}
