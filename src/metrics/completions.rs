//! Writes every step's completions as Parquet, with TRL's file names and columns.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Row;
use serde_json::{Value, json};

use super::columns::{COLUMNS, CompletionRow, DROPPED, MESSAGES, REFERENCE, parse_row, write_columns};
use super::messages::logged_messages;
use crate::data::{Tokenizer, check_schema};
use crate::error::{Error, Result};
use crate::ranks::{Collective, all_gather_json};
use crate::types::{RolloutGroup, Trajectory};
use crate::untrusted::{self, Folder};

/// Name of the folder of completions in a run's output folder.
pub(crate) const FOLDER: &str = "completions";

/// A group whose completions are all written.
#[derive(Debug, Clone, Copy)]
pub struct LoggedGroup<'a> {
    /// The scored group.
    pub group: &'a RolloutGroup,
    /// Place of the group among those of all ranks; if all are 0, groups are in the order of ranks.
    pub place: u32,
    /// Whether the group was left out of the update.
    pub is_dropped: bool,
}

/// Writes files like `completions/completions_00042.parquet` in the output folder.
#[derive(Debug)]
pub struct CompletionsWriter {
    folder: Folder,
    reward_names: Vec<String>,
    tells_dropped: bool,
    tokenizer: Option<Arc<Tokenizer>>,
    has_failed: bool,
}

impl CompletionsWriter {
    /// Creates a writer. `reward_names` are in the order of [`Trajectory::rewards`](crate::types::Trajectory::rewards). `tells_dropped` adds a column
    /// that says which completions were left out of the update.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if a reward has the name of another column.
    pub fn new(output_dir: &Path, reward_names: &[String], tells_dropped: bool) -> Result<Self> {
        check_names(reward_names)?;
        if tells_dropped && reward_names.iter().any(|name| name == DROPPED) {
            return Err(Error::invalid_value(
                "reward_funcs",
                DROPPED,
                "another name: dynamic_sampling adds a column of this name",
            ));
        }
        let (folder, reward_names) = (Folder::new(output_dir).folder(FOLDER), reward_names.to_vec());
        Ok(Self { folder, reward_names, tells_dropped, tokenizer: None, has_failed: false })
    }

    /// Also writes the messages of completions with several turns, with the text of the sampled tokens.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if a reward has the name of the column of messages.
    pub fn with_messages(mut self, tokenizer: &Arc<Tokenizer>) -> Result<Self> {
        if self.reward_names.iter().any(|name| name == MESSAGES) {
            let expected = "another name: completions that call tools have a column of this name";
            return Err(Error::invalid_value("reward_funcs", MESSAGES, expected));
        }
        self.tokenizer = Some(Arc::clone(tokenizer));
        Ok(self)
    }

    /// Gathers the completions of all ranks and writes them on rank 0, sorted by the place of their groups and then by rank. Collective over `group`.
    /// If a file cannot be written, this is reported once and training continues.
    ///
    /// # Errors
    /// The errors of the collective operation.
    pub fn write(&mut self, step: u64, groups: &[LoggedGroup<'_>], group: &dyn Collective) -> Result<()> {
        let mut own = Vec::new();
        for LoggedGroup { group, place, is_dropped } in groups {
            let dropped = self.tells_dropped.then_some(*is_dropped);
            let rows =
                rows(step, &self.reward_names, std::slice::from_ref(*group), self.tokenizer.as_deref())?.into_iter();
            own.extend(rows.map(|row| (*place, CompletionRow { dropped, ..row })));
        }
        let rows: Vec<Vec<(u32, CompletionRow)>> = all_gather_json(group, "gather completions", &own)?;
        if group.rank() != 0 {
            return Ok(());
        }
        let mut rows = rows.concat();
        rows.sort_by_key(|(place, _)| *place); // a stable sort
        let rows: Vec<CompletionRow> = rows.into_iter().map(|(_, row)| row).collect();
        let name = format!("completions_{step:05}.parquet");
        let path = self.folder.path().join(&name);
        let file = self.folder.create(&name).map_err(Error::io(&path));
        if let Err(error) = file.and_then(|file| write_rows(file, &path, &self.reward_names, &rows))
            && !std::mem::replace(&mut self.has_failed, true)
        {
            tracing::warn!("cannot write completions: {error}; training continues without them (reported once)");
        }
        Ok(())
    }
}

/// Gathers the completions of all ranks on rank 0, in the order of ranks; other ranks get none. With a tokenizer they include the messages of their
/// turns. Collective over `group`.
///
/// # Errors
/// The errors of the collective operation and of the tokenizer.
pub fn gather_completions(
    step: u64,
    reward_names: &[String],
    groups: &[RolloutGroup],
    tokenizer: Option<&Tokenizer>,
    group: &dyn Collective,
) -> Result<Vec<CompletionRow>> {
    let own = rows(step, reward_names, groups, tokenizer)?;
    let all: Vec<Vec<CompletionRow>> = all_gather_json(group, "gather completions", &own)?;
    Ok(if group.rank() == 0 { all.concat() } else { Vec::new() })
}

fn rows(
    step: u64,
    reward_names: &[String],
    groups: &[RolloutGroup],
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<CompletionRow>> {
    let all = groups.iter().flat_map(|group| group.completions.iter().map(move |completion| (group, completion)));
    let row = |(group, completion): (&RolloutGroup, &Trajectory)| -> Result<CompletionRow> {
        Ok(CompletionRow {
            step,
            prompt: group.prompt.text.clone(),
            completion: completion.text.clone(),
            reference_answer: group.prompt.columns.get("answer").and_then(answer_text),
            rewards: reward_names.iter().cloned().zip(completion.rewards.iter().copied()).collect(),
            reward: completion.reward,
            advantage: completion.advantage,
            dropped: None,
            messages: tokenizer.map_or_else(|| Ok(Vec::new()), |tokenizer| logged_messages(completion, tokenizer))?,
        })
    };
    all.map(row).collect()
}

/// Checks that [`write_completions`] will be able to write a file of samples.
///
/// # Errors
/// [`Error::InvalidValue`] for another extension or a missing folder; [`Error::Io`] if the file may not be written.
pub fn check_samples_file(path: &Path) -> Result<()> {
    let is_known = path.extension().is_some_and(|kind| kind == "jsonl" || kind == "parquet");
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !is_known || !folder.is_dir() || path.is_dir() {
        let expected = "FILE.jsonl or FILE.parquet in a folder that exists";
        return Err(Error::invalid_value("--output", path.display(), expected));
    }
    let is_new = !path.exists();
    File::options().append(true).create(true).open(path).map_err(Error::io(path))?;
    if is_new {
        let _ = std::fs::remove_file(path); // another rank may already have removed it
    }
    Ok(())
}

/// Writes samples as Parquet or as JSON lines, depending on the file's extension.
///
/// # Errors
/// [`Error::Io`], [`Error::BadFile`] and [`Error::InvalidValue`] if it cannot be written.
pub fn write_completions(path: &Path, reward_names: &[String], rows: &[CompletionRow]) -> Result<()> {
    check_names(reward_names)?;
    if path.extension().is_some_and(|kind| kind == "parquet") {
        let file = File::create(path).map_err(Error::io(path))?;
        return write_rows(file, path, reward_names, rows);
    }
    let mut text = String::new();
    for row in rows {
        let CompletionRow { prompt, completion, reference_answer, rewards, reward, messages, .. } = row;
        let mut line =
            json!({"prompt": prompt, "completion": completion, REFERENCE: reference_answer, "reward": reward});
        rewards.iter().for_each(|(name, value)| line[name] = json!(value));
        if !messages.is_empty() {
            line[MESSAGES] = json!(messages);
        }
        text += &format!("{line}\n");
    }
    std::fs::write(path, text).map_err(Error::io(path))
}

fn check_names(reward_names: &[String]) -> Result<()> {
    match reward_names.iter().find(|name| COLUMNS.contains(&name.as_str())) {
        Some(name) => {
            let expected = format!(
                "a reward of another name, as completions already have the columns {}; rename the function, or give it \
                 another name with rewards.NAME.function",
                COLUMNS.join(", ")
            );
            Err(Error::invalid_value("reward_funcs", name, expected))
        }
        None => Ok(()),
    }
}

/// A reference answer as text; `None` for null.
fn answer_text(answer: &Value) -> Option<String> {
    match answer {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// Reads a file written by [`CompletionsWriter`].
///
/// # Errors
/// [`Error::Io`] if it cannot be opened, [`Error::BadFile`] if it is not such a file.
pub fn read_completions(path: &Path) -> Result<Vec<CompletionRow>> {
    read_rows(untrusted::open(path).map_err(Error::io(path))?, path)
}

/// Like [`read_completions`], for an open file; `path` is for errors.
pub(crate) fn read_rows(file: File, path: &Path) -> Result<Vec<CompletionRow>> {
    let bad = |error: ParquetError| Error::bad_file(path, error.to_string());
    check_schema(&file).map_err(|message| Error::bad_file(path, message))?;
    let reader = SerializedFileReader::new(file).map_err(bad)?;
    let parsed = |row: Result<Row, ParquetError>| {
        parse_row(row.map_err(bad)?.get_column_iter()).map_err(|message| Error::bad_file(path, message))
    };
    reader.get_row_iter(None).map_err(bad)?.map(parsed).collect()
}

fn write_rows(file: File, path: &Path, reward_names: &[String], rows: &[CompletionRow]) -> Result<()> {
    write_columns(file, reward_names, rows).map_err(|error| Error::bad_file(path, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Prompt, Trajectory, fixtures};

    fn row(completion: &str, rewards: [Option<f32>; 2], reward: Option<f32>) -> CompletionRow {
        let rewards = [("format", rewards[0]), ("answer", rewards[1])].map(|(name, value)| (name.to_owned(), value));
        CompletionRow {
            step: 42,
            prompt: "1 + 1 =".into(),
            completion: completion.into(),
            reference_answer: reward.map(|_| "2".into()),
            rewards: rewards.into(),
            reward,
            advantage: -0.7,
            ..CompletionRow::default()
        }
    }

    #[test]
    fn completions_round_trip_through_parquet() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("completions_00042.parquet");
        let rows = [
            row("2 <|end|> é", [Some(1.0), Some(0.1)], Some(1.1)),
            row("", [None, Some(0.0)], Some(0.0)),
            row("\u{0}", [None, None], None),
        ];
        let write = |rows: &[CompletionRow]| {
            write_completions(&path, &["format".to_owned(), "answer".to_owned()], rows).unwrap();
        };
        write(&rows);
        assert_eq!(read_completions(&path).unwrap(), rows);
        let told = rows.map(|row| CompletionRow { dropped: Some(row.reward.is_none()), ..row });
        write(&told);
        assert_eq!(read_completions(&path).unwrap(), told);
        let mut several = told;
        several[1].messages =
            vec![json!({"role": "assistant", "content": "é", "num_tokens": 2}), json!({"role": "tool"})];
        write(&several);
        assert_eq!(read_completions(&path).unwrap(), several);
    }

    #[test]
    fn rank_0_writes_the_completions_of_all_ranks() {
        let folder = tempfile::tempdir().unwrap();
        crate::ranks::testing::threads(2, |group| {
            let mut writer = CompletionsWriter::new(folder.path(), &["format".to_owned()], false).unwrap();
            let completion = Trajectory {
                rewards: vec![Some(0.1)],
                reward: Some(0.1),
                ..fixtures::completion(&format!("from rank {}", group.rank()))
            };
            let columns = [("answer".to_owned(), serde_json::json!(7))].into_iter().collect();
            let prompt = Prompt { columns: Arc::new(columns), ..fixtures::prompt(0) };
            let group_of = RolloutGroup { completions: vec![completion], ..RolloutGroup::new(prompt) };
            writer.write(7, &[LoggedGroup { group: &group_of, place: 0, is_dropped: false }], &*group).unwrap();
        });
        let rows = read_completions(&folder.path().join("completions/completions_00007.parquet")).unwrap();
        assert!(rows.iter().all(|row| row.reference_answer.as_deref() == Some("7")), "{rows:?}");
        let texts: Vec<_> = rows.iter().map(|row| (row.step, row.completion.as_str(), row.reward)).collect();
        assert_eq!(texts, [(7, "from rank 0", Some(0.1)), (7, "from rank 1", Some(0.1))]);
    }

    #[test]
    fn a_reward_named_like_a_column_is_refused() {
        let refusal = |name: &str, tells_dropped| {
            let refused = CompletionsWriter::new(Path::new("out"), &[name.to_owned()], tells_dropped);
            refused.map_err(|error| error.to_string())
        };
        assert!(
            refusal("advantage", false)
                .unwrap_err()
                .contains("another name, as completions already have the columns step")
        );
        assert!(refusal("dropped", true).unwrap_err().contains("dynamic_sampling adds a column of this name"));
        assert!(refusal("dropped", false).is_ok());
    }
}
