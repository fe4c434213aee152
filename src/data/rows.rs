//! Rows of a file: what one must be, and under which names its prompt and answer may stand.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{Message, Tokenizer, parquet};
use crate::error::{Error, Result};
use crate::untrusted;

/// Longest line that is read: what has no end is no row.
const MAX_LINE_BYTES: u64 = 64 << 20;
const PROMPT_COLUMNS: [&str; 3] = ["prompt", "problem", "question"];
const ANSWER_COLUMNS: [&str; 3] = ["answer", "solution", "ground_truth"];

/// One row of a file.
pub(super) struct Row {
    path: PathBuf,
    /// Its line, or its number in a Parquet file; from 1.
    line: usize,
    /// Every column, and `answer` under that name whatever the file calls it.
    pub columns: Map<String, Value>,
}

/// A prompt as a file gives it.
pub(super) enum RawPrompt {
    Text(String),
    Conversation(Vec<Message>),
}

/// What a row gives to learn.
pub(super) enum RawExample {
    /// A prompt and the text that follows it.
    Completion(RawPrompt, String),
    /// A conversation, of which the assistant's messages are learned from this one on.
    Conversation(Vec<Message>, usize),
}

/// The rows of a file in order: JSONL, whose blank lines are skipped and which may come through a pipe, or Parquet.
pub(super) fn read_rows(path: &Path) -> Result<Box<dyn Iterator<Item = Result<Row>>>> {
    let mut file = open(path).map_err(|error| Error::bad_file(path, error.to_string()))?;
    let mut start = Vec::new();
    let looked_at = (&mut file).take(parquet::MAGIC.len() as u64).read_to_end(&mut start);
    looked_at.map_err(|error| Error::bad_file(path, error.to_string()))?;
    let path = path.to_owned();
    if start == parquet::MAGIC {
        let from_its_end = "Parquet is read from its end: expected a file, not a pipe";
        file.rewind().map_err(|error| Error::bad_file(&path, format!("{from_its_end} ({error})")))?;
        let rows = parquet::read(file).map_err(|message| Error::bad_file(&path, message))?.enumerate();
        return Ok(Box::new(rows.map(move |(index, row)| match row {
            Ok(columns) => Ok(Row::new(path.clone(), index + 1, columns)),
            Err(message) => Err(Error::BadLine { path: path.clone(), line: index + 1, message }),
        })));
    }
    let mut reader = BufReader::new(Cursor::new(start).chain(file));
    let lines = std::iter::from_fn(move || read_line(&mut reader).transpose()).enumerate();
    Ok(Box::new(lines.filter_map(move |(index, line)| {
        let bad = |message| Error::BadLine { path: path.clone(), line: index + 1, message };
        match line {
            Ok(line) if line.trim().is_empty() => None,
            Ok(line) => Some(match serde_json::from_str(&line) {
                Ok(Value::Object(columns)) => Ok(Row::new(path.clone(), index + 1, columns)),
                Ok(_) => Err(bad("expected an object {\"prompt\": ..} on each line".into())),
                Err(error) => {
                    let problem = error.to_string().replace(" at line 1 column", " at column");
                    Err(bad(format!("not JSON: {problem}; expected an object on each line, or a Parquet file")))
                }
            }),
            Err(error) => Some(Err(bad(error.to_string()))),
        }
    })))
}

/// A file, or a pipe, for which rows are a stream like any other: its reader waits for what comes.
fn open(path: &Path) -> io::Result<File> {
    if std::fs::metadata(path)?.file_type().is_fifo() { File::open(path) } else { untrusted::open(path) }
}

/// The next line, if there is one.
fn read_line(reader: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = String::new();
    match reader.take(MAX_LINE_BYTES).read_line(&mut line)? as u64 {
        0 => Ok(None),
        MAX_LINE_BYTES => Err(io::Error::other(format!("a line of {MAX_LINE_BYTES} bytes or more"))),
        _ => Ok(Some(line)),
    }
}

impl Row {
    fn new(path: PathBuf, line: usize, mut columns: Map<String, Value>) -> Self {
        let named = ANSWER_COLUMNS.iter().find_map(|name| columns.get(*name).filter(|value| !value.is_null()));
        let verl = columns.get("reward_model").and_then(|model| model.get("ground_truth"));
        if let Some(answer) = named.or(verl).cloned() {
            columns.insert("answer".into(), answer);
        }
        Self { path, line, columns }
    }

    /// The prompt, under any of its names.
    pub fn prompt(&self) -> Result<RawPrompt> {
        let found = PROMPT_COLUMNS.iter().find_map(|name| Some((name, self.given(name)?)));
        match found {
            Some((_, Value::String(text))) if !text.is_empty() => Ok(RawPrompt::Text(text.clone())),
            Some((name, turns)) => self.conversation(name, turns, "neither text nor").map(RawPrompt::Conversation),
            None => Err(self.missing(&PROMPT_COLUMNS)),
        }
    }

    /// What is to be learned: a prompt and its `completion`, both as text or as messages, or else a conversation in `messages`.
    pub fn example(&self) -> Result<RawExample> {
        match (self.given("completion"), self.given("messages")) {
            (Some(Value::String(text)), _) => Ok(RawExample::Completion(self.prompt()?, text.clone())),
            (Some(turns), _) => {
                let RawPrompt::Conversation(mut messages) = self.prompt()? else {
                    return Err(self.bad("column 'completion' is not text, as the prompt is".into()));
                };
                let first = messages.len();
                messages.extend(self.conversation("completion", turns, "neither text nor")?);
                Ok(RawExample::Conversation(messages, first))
            }
            (None, Some(turns)) => Ok(RawExample::Conversation(self.conversation("messages", turns, "not")?, 0)),
            (None, None) => Err(self.missing(&["completion", "messages"])),
        }
    }

    /// Refuses the row unless it has `name`, and not as null. An answer has been found under its other names already.
    pub fn require(&self, name: &str) -> Result<()> {
        let names = if name == ANSWER_COLUMNS[0] { &ANSWER_COLUMNS[..] } else { &[name] };
        self.given(name).map(|_| ()).ok_or_else(|| self.missing(names))
    }

    /// An error at this line.
    pub fn bad(&self, message: String) -> Error {
        Error::BadLine { path: self.path.clone(), line: self.line, message }
    }

    /// A column that is there and not null.
    fn given(&self, name: &str) -> Option<&Value> {
        self.columns.get(name).filter(|value| !value.is_null())
    }

    fn missing(&self, names: &[&str]) -> Error {
        let seen: Vec<_> = self.columns.keys().map(String::as_str).collect();
        self.bad(format!("no column '{}'; columns seen: {}", names.join("' or '"), seen.join(", ")))
    }

    fn conversation(&self, column: &str, turns: &Value, it_is: &str) -> Result<Vec<Message>> {
        let turns = turns.as_array().filter(|turns| !turns.is_empty()).ok_or_else(|| {
            self.bad(format!("column '{column}' is {it_is} a list of {{role, content}}, or is empty"))
        })?;
        turns.iter().map(|turn| self.message(column, turn)).collect()
    }

    fn message(&self, column: &str, turn: &Value) -> Result<Message> {
        let known = turn.as_object().is_some_and(|turn| {
            turn.iter().all(|(key, value)| matches!(key.as_str(), "role" | "content") || value.is_null())
        });
        match (known, turn["role"].as_str(), turn["content"].as_str()) {
            (true, Some(role), Some(content)) => Ok(Message { role: role.into(), content: content.into() }),
            _ => {
                Err(self.bad(format!("column '{column}': expected {{\"role\": text, \"content\": text}}, got {turn}")))
            }
        }
    }
}

impl RawPrompt {
    /// Bytes of its text, before any template.
    pub fn num_bytes(&self) -> usize {
        match self {
            RawPrompt::Text(text) => text.len(),
            RawPrompt::Conversation(messages) => messages.iter().map(|message| message.content.len()).sum(),
        }
    }

    /// Text and ids. Text is taken as it is, with the special tokens that the tokenizer adds; a conversation goes
    /// through the chat template up to where the answer begins, as in TRL.
    pub fn render(self, row: &Row, tokenizer: &Tokenizer, system_prompt: Option<&str>) -> Result<(String, Vec<u32>)> {
        let (text, ids) = match self {
            RawPrompt::Text(text) => {
                let ids = tokenizer.encode(&text, true);
                (text, ids)
            }
            RawPrompt::Conversation(mut messages) => {
                if messages.last().is_some_and(|last| last.role == "assistant") {
                    return Err(row.bad("the last message is the assistant's: nothing is left to answer".into()));
                }
                if let (Some(content), false) = (system_prompt, messages[0].role == "system") {
                    messages.insert(0, Message { role: "system".into(), content: content.into() });
                }
                let text = tokenizer.apply_chat_template(&messages, true)?;
                let ids = tokenizer.encode(&text, false);
                (text, ids)
            }
        };
        let ids = ids.map_err(|error| row.bad(error.to_string()))?;
        if ids.is_empty() { Err(row.bad("the prompt has no tokens".into())) } else { Ok((text, ids)) }
    }
}
