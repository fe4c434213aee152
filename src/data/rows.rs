//! Rows of a file, and the names of the columns that hold their prompts and answers.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::messages::{null_argument, null_path};
use super::{Message, check_numbers, csv, parquet, read_message};
use crate::error::{Error, Result};
use crate::untrusted;

/// Largest size of a line in bytes.
const MAX_LINE_BYTES: u64 = 64 << 20;
/// Bytes that are read to detect a file's format.
const FIRST_BYTES: u64 = 64;
/// Largest size of a file with one JSON list, in bytes.
const MAX_LIST_BYTES: u64 = 2 << 30;
/// The UTF-8 byte order mark, which some Windows programs write at the start of a file; it is skipped.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
const NOT_UTF8: &str = "not UTF-8: expected text in UTF-8 (convert it with iconv -f ENCODING -t UTF-8), or a Parquet \
                        file";
const PROMPT_COLUMNS: [&str; 3] = ["prompt", "problem", "question"];
const ANSWER_COLUMNS: [&str; 3] = ["answer", "solution", "ground_truth"];
/// Columns with the tests of a program: this crate's name and open-r1's.
const TESTS_COLUMNS: [&str; 2] = ["tests", "verification_info"];

/// One row of a file.
pub(super) struct DataRow {
    path: PathBuf,
    /// Line number of the row, or its index in a Parquet file or a JSON list, from 1.
    line: usize,
    /// All columns. The answer is also stored under `answer`, if the file names it otherwise.
    pub columns: Map<String, Value>,
}

/// A prompt in the form in which a file gives it.
pub(super) enum RawPrompt {
    Text(String),
    Conversation(Vec<Message>),
}

/// An SFT example in the form in which a file gives it.
pub(super) enum RawExample {
    /// A prompt and its completion.
    Completion(RawPrompt, String),
    /// A conversation. The assistant's messages from this index on are training targets.
    Conversation(Vec<Message>, usize),
}

/// Reads the rows of a file in order. Formats: JSONL (blank lines are skipped; may be a pipe), a JSON list, Parquet, and
/// CSV or TSV by the file's name.
pub(super) fn read_rows(path: &Path) -> Result<Box<dyn Iterator<Item = Result<DataRow>>>> {
    let mut file = open(path).map_err(|error| Error::bad_file(path, error.to_string()))?;
    let mut start = Vec::new();
    let looked_at = (&mut file).take(FIRST_BYTES).read_to_end(&mut start);
    looked_at.map_err(|error| Error::bad_file(path, error.to_string()))?;
    let path = path.to_owned();
    if start.starts_with(parquet::MAGIC) {
        let from_its_end = "Parquet files cannot be read from a pipe: expected a regular file";
        file.rewind().map_err(|error| Error::bad_file(&path, format!("{from_its_end} ({error})")))?;
        let rows = parquet::read(file).map_err(|message| Error::bad_file(&path, message))?.enumerate();
        return Ok(Box::new(rows.map(move |(index, row)| match row {
            Ok(columns) => Ok(DataRow::new(path.clone(), index + 1, columns)),
            Err(message) => Err(Error::BadLine { path: path.clone(), line: index + 1, message }),
        })));
    }
    if csv::is_csv(&path) {
        file.rewind().map_err(|error| Error::bad_file(&path, error.to_string()))?;
        let rows = csv::read(&path, file).map_err(|message| Error::bad_file(&path, message))?;
        return Ok(Box::new(rows.map(move |row| match row {
            Ok((line, columns)) => Ok(DataRow::new(path.clone(), line, columns)),
            Err((line, message)) => Err(Error::BadLine { path: path.clone(), line, message }),
        })));
    }
    let start = start.strip_prefix(BYTE_ORDER_MARK).map_or(start.clone(), <[u8]>::to_vec);
    let is_list = start.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    let mut reader = BufReader::new(Cursor::new(start).chain(file));
    if is_list {
        return list_rows(path, reader);
    }
    let lines = std::iter::from_fn(move || read_line(&mut reader).transpose()).enumerate();
    Ok(Box::new(lines.filter_map(move |(index, line)| {
        let bad = |message| Error::BadLine { path: path.clone(), line: index + 1, message };
        match line {
            Ok(line) if line.trim().is_empty() => None,
            Ok(line) => Some(match serde_json::from_str::<Value>(&line) {
                Ok(value @ Value::Object(_)) => check_numbers(&value, &line)
                    .map_err(|error| bad(format!("column {error}")))
                    .map(|()| DataRow::new(path.clone(), index + 1, into_columns(value))),
                Ok(_) => Err(bad("expected an object {\"prompt\": ..} on each line".into())),
                Err(error) => {
                    let problem = error.to_string();
                    let problem = match problem.split_once(" at line 1 column") {
                        Some((problem, column)) => format!("{problem} at column{column}"),
                        None => problem.split(" at line ").next().unwrap_or_default().into(), // the end of the line
                    };
                    Err(bad(format!("not JSON: {problem}; expected an object on each line, or a Parquet file")))
                }
            }),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Some(Err(bad(NOT_UTF8.into()))),
            Err(error) => Some(Err(bad(error.to_string()))),
        }
    })))
}

/// Opens a file or a pipe. Reading a pipe waits for its writer.
fn open(path: &Path) -> io::Result<File> {
    if std::fs::metadata(path)?.file_type().is_fifo() { File::open(path) } else { untrusted::open(path) }
}

/// The objects of a JSON list, which is read into memory as a whole.
fn list_rows(path: PathBuf, reader: impl Read) -> Result<Box<dyn Iterator<Item = Result<DataRow>>>> {
    let bad = |problem: String| {
        let expected = format!("expected a JSON list of objects with less than {MAX_LIST_BYTES} bytes in all");
        Error::bad_file(&path, format!("{problem}; {expected}"))
    };
    let mut text = String::new();
    reader.take(MAX_LIST_BYTES).read_to_string(&mut text).map_err(|error| bad(error.to_string()))?;
    let rows: Value = serde_json::from_str(&text).map_err(|error| bad(format!("not JSON: {error}")))?;
    check_numbers(&rows, &text).map_err(&bad)?;
    drop(text);
    let Value::Array(rows) = rows else { return Err(bad("the file is not a JSON list".to_owned())) };
    Ok(Box::new(rows.into_iter().enumerate().map(move |(index, row)| match row {
        Value::Object(_) => Ok(DataRow::new(path.clone(), index + 1, into_columns(row))),
        _ => {
            let message = "expected an object {\"prompt\": ..} in each entry of the list".to_owned();
            Err(Error::BadLine { path: path.clone(), line: index + 1, message })
        }
    })))
}

fn into_columns(row: Value) -> Map<String, Value> {
    match row {
        Value::Object(columns) => columns,
        _ => Map::new(),
    }
}

/// The next line; `None` at the end of the file.
fn read_line(reader: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = String::new();
    match reader.take(MAX_LINE_BYTES).read_line(&mut line)? as u64 {
        0 => Ok(None),
        MAX_LINE_BYTES => Err(io::Error::other(format!("a line has {MAX_LINE_BYTES} bytes or more"))),
        _ => Ok(Some(line)),
    }
}

impl DataRow {
    fn new(path: PathBuf, line: usize, mut columns: Map<String, Value>) -> Self {
        let named = ANSWER_COLUMNS.iter().find_map(|name| columns.get(*name).filter(|value| !value.is_null()));
        let verl = columns.get("reward_model").and_then(|model| model.get("ground_truth"));
        if let Some(answer) = named.or(verl).cloned() {
            columns.insert("answer".into(), answer);
        }
        if let Some(tests) = columns.get(TESTS_COLUMNS[1]).filter(|_| !columns.contains_key(TESTS_COLUMNS[0])).cloned()
        {
            columns.insert(TESTS_COLUMNS[0].into(), tests);
        }
        Self { path, line, columns }
    }

    /// A row made from columns, without a file.
    pub fn of_columns(columns: Map<String, Value>) -> Self {
        Self { path: PathBuf::new(), line: 0, columns }
    }

    /// Whether the row has a prompt in one of the default columns.
    pub fn has_prompt(&self) -> bool {
        PROMPT_COLUMNS.iter().any(|name| self.given(name).is_some())
    }

    /// The prompt, from `column` if it is given, or else from the first default column that the row has.
    pub fn prompt(&self, column: Option<&str>) -> Result<RawPrompt> {
        let names = column.as_ref().map_or(&PROMPT_COLUMNS[..], std::slice::from_ref);
        let found = names.iter().find_map(|name| Some((name, self.given(name)?)));
        match found {
            Some((_, Value::String(text))) if !text.is_empty() => Ok(RawPrompt::Text(text.clone())),
            Some((name, turns)) => self.conversation(name, turns, "neither text nor").map(RawPrompt::Conversation),
            None => Err(self.missing(names, column.is_none().then_some("dataset_prompt_column"))),
        }
    }

    /// The row as an SFT example: a prompt and its completion, from the given or the default columns, both as text or as
    /// messages; or a conversation in column `messages`, if no completion column is given.
    pub fn example(&self, prompt: Option<&str>, completion: Option<&str>) -> Result<RawExample> {
        const KEY: Option<&str> = Some("dataset_completion_column");
        let column = completion.unwrap_or("completion");
        match (self.given(column), self.given("messages")) {
            (Some(Value::String(text)), _) => Ok(RawExample::Completion(self.prompt(prompt)?, text.clone())),
            (Some(turns), _) => {
                let RawPrompt::Conversation(mut messages) = self.prompt(prompt)? else {
                    return Err(self.bad(format!(
                        "column '{column}' is not text, although the prompt is text: use text for both or \
                         conversations for both"
                    )));
                };
                let first = messages.len();
                messages.extend(self.conversation(column, turns, "neither text nor")?);
                Ok(RawExample::Conversation(messages, first))
            }
            (None, _) if completion.is_some() => Err(self.missing(&[column], None)),
            (None, Some(turns)) => Ok(RawExample::Conversation(self.conversation("messages", turns, "not")?, 0)),
            (None, None) => Err(self.missing(&["completion", "messages"], KEY)),
        }
    }

    /// Returns an error unless the row has column `name` and it is not null. Answers and tests under other names were renamed before.
    pub fn require(&self, name: &str) -> Result<()> {
        let (names, key) = match name {
            _ if name == ANSWER_COLUMNS[0] => (&ANSWER_COLUMNS[..], Some("reward.answer_column")),
            _ if name == TESTS_COLUMNS[0] => (&TESTS_COLUMNS[..], Some("reward.code.tests_column")),
            _ => (&[name][..], None),
        };
        self.given(name).map(drop).ok_or_else(|| self.missing(names, key))
    }

    /// The functions that an example may call: column `tools`, a list of JSON schemas or a string of such a list; null if the row has none.
    pub fn tools(&self) -> Result<Value> {
        let Some(given) = self.given("tools") else { return Ok(Value::Null) };
        let parsed = given.as_str().and_then(|text| Some((serde_json::from_str::<Value>(text).ok()?, text)));
        if let Some((tools, text)) = &parsed {
            check_numbers(tools, text).map_err(|error| self.bad(format!("column 'tools': {error}")))?;
        }
        let tools = parsed.map_or_else(|| given.clone(), |(tools, _)| tools);
        match tools.as_array().map(Vec::as_slice) {
            Some([]) => Ok(Value::Null),
            Some(schemas) if schemas.iter().all(Value::is_object) => Ok(tools),
            _ => Err(self.bad(format!("column 'tools': expected a list of JSON schemas of functions, got {given}"))),
        }
    }

    /// The notice about a null field that the model sees: in the schemas of column `tools`, or in tool call arguments. Arrow adds such nulls to
    /// rows that have different fields.
    pub fn padding(&self, has_tools: bool) -> Option<String> {
        let mut given = self.columns.iter().filter(|(_, value)| !value.is_null());
        let (name, path) = given.find_map(|(name, value)| {
            let path = if has_tools && name == "tools" { null_path(value) } else { null_argument(value) };
            path.map(|path| (name, path))
        })?;
        let (file, line) = (self.path.display(), self.line);
        Some(format!(
            "notice: {file}:{line}: {name}{path} is null, because Arrow fills in fields that only other rows have; the \
             model sees the null (also in other rows; reported once). To avoid such fields store the list or object as \
             JSON text"
        ))
    }

    /// An error with the row's file and line.
    pub fn bad(&self, message: String) -> Error {
        Error::BadLine { path: self.path.clone(), line: self.line, message }
    }

    /// The value of a column; `None` if it is missing or null.
    fn given(&self, name: &str) -> Option<&Value> {
        self.columns.get(name).filter(|value| !value.is_null())
    }

    /// The error for a row that has none of the columns `names`. It suggests to set `key`.
    fn missing(&self, names: &[&str], key: Option<&str>) -> Error {
        let seen = self
            .columns
            .iter()
            .map(|(name, value)| if value.is_null() { format!("{name} (null)") } else { name.clone() });
        let seen: Vec<_> = seen.collect();
        let hint = key.map_or_else(String::new, |key| format!("; to use another column set {key}"));
        self.bad(format!("no column '{}'; columns seen: {}{hint}", names.join("' or '"), seen.join(", ")))
    }

    fn conversation(&self, column: &str, turns: &Value, it_is: &str) -> Result<Vec<Message>> {
        let turns = turns.as_array().filter(|turns| !turns.is_empty()).ok_or_else(|| {
            self.bad(format!("column '{column}' is {it_is} a list of {{role, content}}, or is empty"))
        })?;
        turns.iter().enumerate().map(|(index, turn)| self.message(column, index, turn)).collect()
    }

    fn message(&self, column: &str, index: usize, turn: &Value) -> Result<Message> {
        let bad = |error: String| self.bad(format!("column '{column}', message {}: {error}; got {turn}", index + 1));
        let mut more = read_message(turn).map_err(bad)?;
        let text = |value| if let Value::String(text) = value { Some(text) } else { None };
        let role = more.shift_remove("role").and_then(text).unwrap_or_default();
        match more.shift_remove("content").and_then(text) {
            Some(content) => Ok(Message { more, ..Message::new(role, content) }),
            None if more.contains_key("tool_calls") => Ok(Message { more, ..Message::new(role, "") }),
            None => Err(bad("expected content (text) or tool_calls".to_owned())),
        }
    }
}
