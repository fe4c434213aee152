//! Rows to generate from.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::Tokenizer;
use super::rows::{RawPrompt, read_rows};
use crate::error::{Error, Result};
use crate::types::Prompt;

/// What rows must fit into, and what is put before them.
#[derive(Debug, Clone, Default)]
pub struct DatasetOptions {
    /// Longest prompt in tokens; `None` is no limit of its own.
    pub max_prompt_length: Option<usize>,
    /// Longest sequence, prompt and completion, in tokens; `None` is no limit.
    pub max_model_length: Option<usize>,
    /// Tokens of `max_model_length` that are kept free for the completion.
    pub max_completion_length: usize,
    /// System message for conversations that have none; prompts given as text are left as they are.
    pub system_prompt: Option<String>,
    /// Columns without which a row is an error: those that the rewards read.
    pub required_columns: Vec<String>,
}

/// Rows at each stage. Too long prompts are left out and counted, never cut.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DatasetCounts {
    /// Rows in the file.
    pub read: usize,
    /// Left out: longer than `max_prompt_length`.
    pub over_max_prompt_length: usize,
    /// Left out: no room for the completion in `max_model_length`.
    pub over_context: usize,
    /// Rows that remain.
    pub kept: usize,
    /// The limit of the first of these.
    pub max_prompt_length: Option<usize>,
    /// Those of the second: `max_model_length`, and what of it is the completion's.
    pub context: Option<(usize, usize)>,
    /// Rows whose prompt is text, which goes to the model as it is, where conversations go through a chat template or get a
    /// system message.
    pub bare: usize,
}

impl DatasetCounts {
    /// What the user may not have meant, and how to mend it, each behind `warning:` or `notice:`.
    pub fn notices(&self) -> Vec<String> {
        let Self { bare, read, kept, .. } = self;
        let lost = read - kept;
        let warning = is_much(lost, *read)
            .then(|| format!("warning: {lost} of {read} rows are left out: {}", self.left_out().join(", ")));
        let notice = (*bare > 0).then(|| {
            format!(
                "notice: {bare} of {read} prompts are text: they reach the model as they are, without its chat template or \
                 system_prompt; for these, give prompt as [{{\"role\": \"user\", \"content\": ..}}]"
            )
        });
        warning.into_iter().chain(notice).collect()
    }

    /// Counts a prompt that is longer than one of the limits in tokens, and whether it is.
    fn leave_out(&mut self, is_longer_than: impl Fn(usize) -> bool) -> bool {
        let room = self.context.map(|(context, completion)| context.saturating_sub(completion));
        if self.max_prompt_length.is_some_and(&is_longer_than) {
            self.over_max_prompt_length += 1;
        } else if room.is_some_and(&is_longer_than) {
            self.over_context += 1;
        } else {
            return false;
        }
        true
    }

    /// How many rows are left out by each limit.
    fn left_out(&self) -> Vec<String> {
        let too_long = (self.max_prompt_length.filter(|_| self.over_max_prompt_length > 0))
            .map(|limit| format!("{} longer than max_prompt_length {limit}", self.over_max_prompt_length));
        let without_room = self.context.filter(|_| self.over_context > 0).map(|(context, completion)| {
            let room = context.saturating_sub(completion);
            let count = self.over_context;
            format!("{count} longer than {room} tokens, context {context} less max_completion_length {completion}")
        });
        too_long.into_iter().chain(without_room).collect()
    }
}

impl fmt::Display for DatasetCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} read", self.read)?;
        self.left_out().iter().try_for_each(|stage| write!(f, ", {stage}"))?;
        write!(f, ", {} kept", self.kept)
    }
}

/// Whether so many of all rows were hardly meant to be left out: more than a tenth.
pub(super) fn is_much(lost: usize, all: usize) -> bool {
    10 * lost > all
}

/// Prompts in file order, tokenized.
#[derive(Debug)]
pub struct Dataset {
    prompts: Vec<Prompt>,
    counts: DatasetCounts,
}

impl Dataset {
    /// Prompts that are made, not read; at least one.
    pub fn new(prompts: Vec<Prompt>) -> Self {
        assert!(!prompts.is_empty(), "a data set without prompts");
        let counts = DatasetCounts { read: prompts.len(), kept: prompts.len(), ..DatasetCounts::default() };
        Self { prompts, counts }
    }

    /// Reads rows, JSONL or Parquet. A prompt stands in `prompt`, `problem` or `question`, as text or as `[{role, content}]`; an
    /// answer in `answer`, `solution`, `ground_truth` or verl's `reward_model.ground_truth` is also given to the
    /// rewards as `answer`. [`Prompt::id`] is the row's index in the file, whatever is left out.
    ///
    /// # Errors
    /// [`Error::BadLine`] with file, line and columns, [`Error::EmptyDataset`] with the counts, [`Error::BadFile`],
    /// [`Error::ChatTemplate`].
    pub fn from_file(path: impl AsRef<Path>, tokenizer: &Tokenizer, options: &DatasetOptions) -> Result<Self> {
        let path = path.as_ref();
        let mut counts = DatasetCounts {
            max_prompt_length: options.max_prompt_length,
            context: options.max_model_length.map(|context| (context, options.max_completion_length)),
            ..DatasetCounts::default()
        };
        let mut prompts = Vec::new();
        let has_chat = tokenizer.has_chat_template() || options.system_prompt.is_some();
        for row in read_rows(path)? {
            let row = row?;
            let id = counts.read as u64;
            counts.read += 1;
            let prompt = row.prompt()?;
            options.required_columns.iter().try_for_each(|name| row.require(name))?;
            counts.bare += usize::from(matches!(prompt, RawPrompt::Text(_)) && has_chat);
            let num_bytes = prompt.num_bytes();
            if counts.leave_out(|limit| num_bytes > tokenizer.max_bytes(limit)) {
                continue; // to tokenize it would take hundreds of bytes for each of its own
            }
            let (text, token_ids) = prompt.render(&row, tokenizer, options.system_prompt.as_deref())?;
            if !counts.leave_out(|limit| token_ids.len() > limit) {
                prompts.push(Prompt { id, text, token_ids, columns: Arc::new(row.columns) });
            }
        }
        counts.kept = prompts.len();
        if prompts.is_empty() {
            return Err(Error::EmptyDataset { path: path.to_owned(), stages: counts.to_string() });
        }
        Ok(Self { prompts, counts })
    }

    /// Number of usable prompts; never 0.
    #[allow(clippy::len_without_is_empty)] // an empty data set is an error
    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// The usable prompt at `index`, from 0 to `len`.
    pub fn prompt(&self, index: usize) -> &Prompt {
        &self.prompts[index]
    }

    /// All usable prompts.
    pub fn prompts(&self) -> &[Prompt] {
        &self.prompts
    }

    /// How many rows were read, left out and kept.
    pub fn counts(&self) -> &DatasetCounts {
        &self.counts
    }
}

#[cfg(test)]
mod tests;
