//! Reads rows of a Parquet file, as written by Hugging Face's datasets and verl.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::{Map, Value};

use crate::error::panic_message;

/// Largest number of columns and groups in a file.
const MAX_COLUMNS: u64 = 1000;
/// Largest size of a footer in bytes.
const MAX_FOOTER_BYTES: u64 = 64 << 20;

/// The first bytes of a Parquet file.
pub(super) const MAGIC: &[u8; 4] = b"PAR1";

/// Reads the rows in order. Returns an error message if the file is malformed; the iterator yields one if a row is.
pub(super) fn read(file: File) -> Result<impl Iterator<Item = Result<Map<String, Value>, String>>, String> {
    check_schema(&file)?;
    let file = guarded(|| SerializedFileReader::new(file))?;
    check_codecs(file.metadata())?;
    let mut rows = guarded(|| Ok(file.into_iter()))?;
    let columns = |row: Row| row.get_column_iter().map(entry).collect();
    let mut next = move || guarded(|| rows.next().transpose().map(|row| row.map(columns))).transpose();
    let mut is_over = false;
    Ok(std::iter::from_fn(move || {
        let row = if is_over { None } else { next() };
        is_over = row.as_ref().is_none_or(Result::is_err);
        row
    }))
}

/// Rejects a file whose schema has more than [`MAX_COLUMNS`] columns and groups: the `parquet` crate reads, and drops, a group within a group by
/// recursion. A footer is a Thrift structure, its length and the magic; the schema is its second field, after the version, and a list begins with its
/// length.
///
/// # Errors
/// What is wrong with the file.
pub(crate) fn check_schema(file: &File) -> Result<(), String> {
    let damaged = || "Parquet error: damaged: no footer at the end of the file".to_owned();
    let read = |at: u64, bytes: &mut [u8]| file.read_exact_at(bytes, at).map_err(|_| damaged());
    let end = file.metadata().map_err(|error| error.to_string())?.len().checked_sub(8).ok_or_else(damaged)?;
    let mut tail = [0; 8];
    read(end, &mut tail)?;
    let [a, b, c, d, magic @ ..] = tail;
    let footer_bytes = u64::from(u32::from_le_bytes([a, b, c, d]));
    if magic != *MAGIC || !(16..=MAX_FOOTER_BYTES).contains(&footer_bytes) || footer_bytes > end {
        return Err(damaged());
    }
    let mut head = [0; 16];
    read(end - footer_bytes, &mut head)?;
    let [0x15, head @ ..] = head else { return Err(damaged()) }; // an i32 in field 1
    let (_, rest) = varint(&head).ok_or_else(damaged)?;
    let [0x19, head, rest @ ..] = rest else { return Err(damaged()) }; // a list in field 2
    let num_elements = match head >> 4 {
        0xf => varint(rest).ok_or_else(damaged)?.0,
        size => u64::from(size),
    };
    match num_elements {
        0..=MAX_COLUMNS => Ok(()),
        _ => Err(format!("its schema has {num_elements} columns and groups: expected at most {MAX_COLUMNS}")),
    }
}

/// Decodes a Thrift varint (groups of 7 bits, lowest first). Returns the number and the remaining bytes.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let len = 1 + bytes.iter().take(9).position(|byte| byte & 0x80 == 0)?;
    let number = bytes[..len].iter().rev().fold(0, |number, byte| number << 7 | u64::from(byte & 0x7f));
    Some((number, &bytes[len..]))
}

/// Rejects a file with a compression codec that the `parquet` crate is built without.
fn check_codecs(file: &ParquetMetaData) -> Result<(), String> {
    let mut columns = file.row_groups().iter().flat_map(|group| group.columns());
    match columns.find(|column| matches!(column.compression(), Compression::BROTLI(_) | Compression::LZO)) {
        Some(column) => {
            let (name, codec) = (column.column_path().string(), column.compression());
            Err(format!("column '{name}' is compressed with {codec}; expected zstd, snappy, gzip, lz4 or none"))
        }
        None => Ok(()),
    }
}

/// Runs `read` and converts a panic to an error, because the parser panics on some damaged files.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("Parquet error: damaged: {}", panic_message(&*panic))),
    }
}

fn entry((name, field): (&String, &Field)) -> (String, Value) {
    (name.clone(), json(field))
}

/// Converts a Parquet field to JSON; dates, times, decimals and bytes become strings.
fn json(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(flag) => (*flag).into(),
        Field::Byte(number) => (*number).into(),
        Field::Short(number) => (*number).into(),
        Field::Int(number) => (*number).into(),
        Field::Long(number) => (*number).into(),
        Field::UByte(number) => (*number).into(),
        Field::UShort(number) => (*number).into(),
        Field::UInt(number) => (*number).into(),
        Field::ULong(number) => (*number).into(),
        Field::Float16(number) => number.to_f32().into(),
        Field::Float(number) => (*number).into(),
        Field::Double(number) => (*number).into(),
        Field::Str(text) => text.as_str().into(),
        Field::Group(row) => row.get_column_iter().map(entry).collect::<Map<_, _>>().into(),
        Field::ListInternal(list) => list.elements().iter().map(json).collect(),
        Field::MapInternal(map) => {
            let named = |(key, value): &(Field, Field)| match key {
                Field::Str(text) => (text.clone(), json(value)),
                other => (other.to_string(), json(value)),
            };
            map.entries().iter().map(named).collect::<Map<_, _>>().into()
        }
        Field::Decimal(_)
        | Field::Bytes(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => field.to_string().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::TokenizerFolder;
    use super::super::{Dataset, DatasetOptions};
    use super::*;

    /// Two rows in the form of verl's preprocessing, with a column of each other type; created with pyarrow 26 by
    /// `pq.write_table(pa.Table.from_pylist([{"prompt": [{"content": "one", "role": "user"}], "reward_model": {"ground_truth": "1", "style": "rule"},
    /// "level": 3, "score": 0.5, "hard": True, "tags": ["a", "b"], "at": datetime.date(2026, 1, 1)}, {"prompt": [{"content": "two three", "role":
    /// "user"}], "reward_model": {"ground_truth": "5", "style": "rule"}}]), path)`.
    const ROWS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/rows.parquet");

    /// A file with one column per compression codec, named after it, and two rows; created with pyarrow 26 by `pq.write_table(table, path,
    /// compression={name: name for name in table.column_names}, use_dictionary=False, write_statistics=False, store_schema=False)`.
    const COMPRESSED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/compressed.parquet");
    /// A file with one of the columns of `COMPRESSED`, compressed with Brotli.
    const BROTLI: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/brotli.parquet");

    /// Reads the rows up to the first that is malformed; an error if the file as a whole cannot be read.
    fn rows(path: &str) -> Result<Vec<Value>, String> {
        let rows = read(File::open(path).unwrap())?;
        Ok(rows.map_while(Result::ok).map(Value::from).collect())
    }

    #[test]
    fn nested_parquet_rows_equal_their_json() {
        let found = rows(ROWS).unwrap();
        let expected = serde_json::json!([
            {"prompt": [{"content": "one", "role": "user"}], "reward_model": {"ground_truth": "1", "style": "rule"},
             "level": 3, "score": 0.5, "hard": true, "tags": ["a", "b"], "at": "2026-01-01"},
            {"prompt": [{"content": "two three", "role": "user"}], "reward_model": {"ground_truth": "5", "style": "rule"},
             "level": null, "score": null, "hard": null, "tags": null, "at": null},
        ]);
        assert_eq!(Value::from(found), expected);
    }

    #[test]
    fn all_parquet_compressions_are_read() {
        for (index, row) in rows(COMPRESSED).unwrap().iter().enumerate() {
            for codec in ["zstd", "gzip", "lz4", "snappy", "none"] {
                assert_eq!(row[codec], "one and ".repeat(9) + &index.to_string(), "{codec}");
            }
        }
        let error = rows(BROTLI).unwrap_err();
        assert!(error.starts_with("column 'none' is compressed with BROTLI"), "{error}");
    }

    #[test]
    fn parquet_is_recognized_by_content_not_by_name() {
        let folder = TokenizerFolder::new();
        folder.write("chat_template.jinja", "{% for m in messages %}{{ m.content }} {% endfor %}answer");
        let path = folder.path().join("rows.jsonl");
        std::fs::copy(ROWS, &path).unwrap();
        let data = Dataset::from_file(&path, &folder.tokenizer(), &DatasetOptions::default()).unwrap();
        assert_eq!((data.len(), data.prompt(1).text.as_str()), (2, "two three answer"));
        assert_eq!(data.prompt(1).columns["answer"], "5");
        let options = DatasetOptions { required_columns: vec!["level".into()], ..Default::default() };
        let error = Dataset::from_file(&path, &folder.tokenizer(), &options).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl:2: no column 'level'"), "{error}");
    }

    #[test]
    fn damaged_files_are_read_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("damaged.parquet");
        for whole in [ROWS, COMPRESSED].map(|path| std::fs::read(path).unwrap()) {
            for index in (0..2 * whole.len()).step_by(5) {
                let mut bytes = whole.clone();
                match index.checked_sub(whole.len()) {
                    Some(end) => bytes.truncate(end),
                    None => bytes[index] ^= 0x55,
                }
                std::fs::write(&path, bytes).unwrap();
                let _ = rows(path.to_str().unwrap());
            }
        }
        std::fs::write(&path, b"PAR1 and nothing more").unwrap();
        assert!(rows(path.to_str().unwrap()).unwrap_err().starts_with("Parquet error: "));
    }
}
