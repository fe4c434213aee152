//! A logged completion, and the columns of its Parquet file.

use std::fs::File;
use std::sync::Arc;

use parquet::basic::{Compression, LogicalType, Repetition, Type as Physical};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, FloatType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::record::Field;
use parquet::schema::types::Type;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// One completion in the file of completions.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionRow {
    /// Step in which it was sampled.
    pub step: u64,
    /// The prompt's text.
    pub prompt: String,
    /// The completion's text.
    pub completion: String,
    /// The reference answer of the row; as JSON if it is not text.
    pub reference_answer: Option<String>,
    /// Name and value of each reward; `None` if the reward failed.
    pub rewards: Vec<(String, Option<f32>)>,
    /// The weighted sum of the rewards.
    pub reward: Option<f32>,
    /// The advantage that it was trained with.
    pub advantage: f32,
    /// Whether its group was left out of the update, if that is possible (`dynamic_sampling`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<bool>,
    /// Messages after the prompt, if completions may have several turns: `role`, `content`, `tool_calls` and `name` as passed to rewards. A turn of
    /// the policy also has the text of its tokens, with special tokens, in `sampled`, and their number in `num_tokens`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<Value>,
}

/// Columns that are always written. Rewards are between `reference_answer` and `reward`, under their own names.
pub(super) const COLUMNS: [&str; 6] = ["step", "prompt", "completion", REFERENCE, "reward", "advantage"];
/// The column with the row's reference answer; null if the rows have none.
pub(super) const REFERENCE: &str = "reference_answer";
/// The column that says which groups were left out of the update, if some may be.
pub(super) const DROPPED: &str = "dropped";
/// The last column, if completions have several turns: their messages as JSON.
pub(super) const MESSAGES: &str = "messages";

/// Parses a row from a file's columns.
pub(super) fn parse_row<'a>(columns: impl Iterator<Item = (&'a String, &'a Field)>) -> Result<CompletionRow, String> {
    let mut row = CompletionRow::default();
    for (name, field) in columns {
        match (name.as_str(), field) {
            ("step", Field::Long(step)) => row.step = *step as u64,
            ("prompt", Field::Str(text)) => row.prompt.clone_from(text),
            ("completion", Field::Str(text)) => row.completion.clone_from(text),
            (REFERENCE, Field::Str(text)) => row.reference_answer = Some(text.clone()),
            ("reward", Field::Float(reward)) => row.reward = Some(*reward),
            ("advantage", Field::Float(advantage)) => row.advantage = *advantage,
            (DROPPED, Field::Bool(dropped)) => row.dropped = Some(*dropped),
            (MESSAGES, Field::Str(text)) => {
                row.messages = serde_json::from_str(text).map_err(|error| format!("the column {MESSAGES}: {error}"))?;
            }
            (MESSAGES, Field::Null) => {}
            (name, Field::Float(reward)) => row.rewards.push((name.to_owned(), Some(*reward))),
            (name, Field::Null) if !COLUMNS.contains(&name) => row.rewards.push((name.to_owned(), None)),
            _ => {}
        }
    }
    Ok(row)
}

/// Writes the rows as columns, in the order of the schema.
pub(super) fn write_columns(file: File, reward_names: &[String], rows: &[CompletionRow]) -> Result<(), ParquetError> {
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
    let tells_dropped = rows.iter().any(|row| row.dropped.is_some());
    let has_messages = rows.iter().any(|row| !row.messages.is_empty());
    let schema = Arc::new(schema(reward_names, tells_dropped, has_messages)?);
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties))?;
    let mut group = writer.next_row_group()?;
    let text = |get: fn(&CompletionRow) -> &str| rows.iter().map(|row| ByteArray::from(get(row))).collect::<Vec<_>>();
    write_column::<Int64Type>(&mut group, &rows.iter().map(|row| row.step as i64).collect::<Vec<_>>(), None)?;
    write_column::<ByteArrayType>(&mut group, &text(|row| &row.prompt), None)?;
    write_column::<ByteArrayType>(&mut group, &text(|row| &row.completion), None)?;
    let answers = rows.iter().map(|row| row.reference_answer.as_deref().map(ByteArray::from));
    write_optional::<ByteArrayType>(&mut group, answers)?;
    for index in 0..reward_names.len() {
        write_optional::<FloatType>(
            &mut group,
            rows.iter().map(|row| row.rewards.get(index).and_then(|reward| reward.1)),
        )?;
    }
    write_optional::<FloatType>(&mut group, rows.iter().map(|row| row.reward))?;
    write_column::<FloatType>(&mut group, &rows.iter().map(|row| row.advantage).collect::<Vec<_>>(), None)?;
    if tells_dropped {
        let dropped: Vec<bool> = rows.iter().map(|row| row.dropped == Some(true)).collect();
        write_column::<BoolType>(&mut group, &dropped, None)?;
    }
    if has_messages {
        let texts: Vec<Option<ByteArray>> = rows.iter().map(messages_text).collect();
        write_optional::<ByteArrayType>(&mut group, texts.into_iter())?;
    }
    group.close()?;
    writer.close().map(drop)
}

fn schema(reward_names: &[String], tells_dropped: bool, has_messages: bool) -> Result<Type, ParquetError> {
    let column = |name: &str, physical, repetition, logical| {
        let builder = Type::primitive_type_builder(name, physical).with_repetition(repetition);
        builder.with_logical_type(logical).build().map(Arc::new)
    };
    let text = |name| column(name, Physical::BYTE_ARRAY, Repetition::REQUIRED, Some(LogicalType::String));
    let mut fields =
        vec![column("step", Physical::INT64, Repetition::REQUIRED, None)?, text("prompt")?, text("completion")?];
    fields.push(column(REFERENCE, Physical::BYTE_ARRAY, Repetition::OPTIONAL, Some(LogicalType::String))?);
    for name in reward_names.iter().map(String::as_str).chain(["reward"]) {
        fields.push(column(name, Physical::FLOAT, Repetition::OPTIONAL, None)?);
    }
    fields.push(column("advantage", Physical::FLOAT, Repetition::REQUIRED, None)?);
    if tells_dropped {
        fields.push(column(DROPPED, Physical::BOOLEAN, Repetition::REQUIRED, None)?);
    }
    if has_messages {
        fields.push(column(MESSAGES, Physical::BYTE_ARRAY, Repetition::OPTIONAL, Some(LogicalType::String))?);
    }
    Type::group_type_builder("completions").with_fields(fields).build()
}

/// A row's messages as text for their column.
fn messages_text(row: &CompletionRow) -> Option<ByteArray> {
    (!row.messages.is_empty()).then(|| ByteArray::from(json!(row.messages).to_string().as_str()))
}

/// Writes an optional column; definition levels say which values exist.
fn write_optional<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: impl Iterator<Item = Option<T::T>> + Clone,
) -> Result<(), ParquetError> {
    let levels: Vec<i16> = values.clone().map(|value| i16::from(value.is_some())).collect();
    write_column::<T>(group, &values.flatten().collect::<Vec<_>>(), Some(&levels))
}

fn write_column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: &[T::T],
    levels: Option<&[i16]>,
) -> Result<(), ParquetError> {
    let mut column =
        group.next_column()?.ok_or_else(|| ParquetError::General("more columns than the schema".into()))?;
    column.typed::<T>().write_batch(values, levels, None)?;
    column.close()
}
