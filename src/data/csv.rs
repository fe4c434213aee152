//! Reads rows of a CSV or TSV file. The first line names the columns; every value is a string, and an empty value is null.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

use csv::{ReaderBuilder, StringRecord};
use serde_json::{Map, Value};

/// Largest size of a record in bytes.
const MAX_RECORD_BYTES: usize = 64 << 20;

/// A row with its line number, or the line number and an error message.
pub(super) type CsvLine = Result<(usize, Map<String, Value>), (usize, String)>;

/// Whether a file is read as CSV or TSV, by its file name.
pub(super) fn is_csv(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "csv" || extension == "tsv")
}

/// Reads the rows in order, each with its line number. Returns an error if the header is malformed; the iterator yields an error for a
/// malformed row.
pub(super) fn read(path: &Path, file: File) -> Result<impl Iterator<Item = CsvLine> + use<>, String> {
    let delimiter = if path.extension().is_some_and(|extension| extension == "tsv") { b'\t' } else { b',' };
    let left = Rc::new(Cell::new(MAX_RECORD_BYTES));
    let file = Bounded { inner: BufReader::new(file), left: left.clone() };
    let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(file);
    let names = reader.headers().map_err(|error| error.to_string())?.clone();
    if let Some(name) = names.iter().enumerate().find(|(index, name)| names.iter().take(*index).any(|n| n == *name)) {
        return Err(format!("the first line names the column '{}' twice", name.1));
    }
    let mut last = 1;
    Ok(reader.into_records().map(move |record| match record {
        Ok(record) => {
            left.set(MAX_RECORD_BYTES);
            last = record.position().map_or(last, |place| place.line() as usize);
            Ok((last, columns(&names, &record)))
        }
        Err(error) => Err((error.position().map_or(last, |place| place.line() as usize), error.to_string())),
    }))
}

/// Limits the size of a record: returns an error if too many bytes follow without the end of a record, as with a quote that is never closed.
struct Bounded<R> {
    inner: R,
    left: Rc<Cell<usize>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let num = self.inner.read(buffer)?;
        let left = self.left.get().checked_sub(num);
        self.left.set(left.ok_or_else(|| io::Error::other(format!("a row of more than {MAX_RECORD_BYTES} bytes")))?);
        Ok(num)
    }
}

fn columns(names: &StringRecord, record: &StringRecord) -> Map<String, Value> {
    let value = |text: &str| if text.is_empty() { Value::Null } else { text.into() };
    names.iter().zip(record).map(|(name, text)| (name.trim_start_matches('\u{feff}').to_owned(), value(text))).collect()
}
