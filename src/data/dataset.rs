//! Rows to generate from.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::Message;
use super::Tokenizer;
use super::prompt_text::{ChatFormat, RenderedPrompt};
use super::rows::{DataRow, RawPrompt, read_rows};
use super::sampler::splitmix64;
use super::schemas::ToolSchemas;
use super::sources::RowSources;
use crate::config::{DataConfig, PromptFormat};
use crate::error::{Error, Result};
use crate::types::Prompt;

/// Limits of rows, and how their prompts are read.
#[derive(Debug, Clone, Default)]
pub struct DatasetOptions {
    /// Longest prompt in tokens; `None` is no limit of its own.
    pub max_prompt_length: Option<usize>,
    /// Longest sequence, prompt and completion, in tokens; `None` is no limit.
    pub max_model_length: Option<usize>,
    /// Tokens of `max_model_length` that are kept free for the completion.
    pub max_completion_length: usize,
    /// The treatment of a prompt that is text.
    pub prompt_format: PromptFormat,
    /// System message for conversations that have none; a prompt that stays text has none.
    pub system_prompt: Option<String>,
    /// Column with the prompt; `None` is the first of the usual ones.
    pub prompt_column: Option<String>,
    /// Column with the completion of an example that is learned; `None` is `completion`.
    pub completion_column: Option<String>,
    /// Columns without which a row is an error: those that the rewards read.
    pub required_columns: Vec<String>,
    /// Schemas of the functions that the model may call, which the chat template shows it.
    pub tools: ToolSchemas,
    /// Chooses which rows a source's weight repeats or leaves out.
    pub seed: u64,
}

impl DatasetOptions {
    /// How the configuration reads rows, which all have the `required` columns; without limits of length.
    pub fn of(config: &DataConfig, seed: u64, required: Vec<String>) -> Self {
        Self {
            prompt_format: config.prompt_format,
            system_prompt: config.system_prompt.clone(),
            prompt_column: config.dataset_prompt_column.clone(),
            required_columns: required,
            seed,
            ..Self::default()
        }
    }

    /// The prompt of a row with an `observation` of its environment behind the last message, as text and token ids.
    ///
    /// # Errors
    /// The errors of [`Dataset::read`] for a row.
    pub fn observed(
        &self,
        columns: &Map<String, Value>,
        observation: &str,
        tokenizer: &Tokenizer,
    ) -> Result<RenderedPrompt> {
        let row = DataRow::of_columns(columns.clone());
        let mut prompt = self.prompt(&row)?;
        prompt.append(observation);
        prompt.render(&row, tokenizer, &self.format(tokenizer))
    }

    /// The ids of a row's prompt with another text in place of its last message's, which `write` makes of that.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a conversation that does not end with a user's message; the errors of [`Dataset::read`] for a row.
    pub fn rewritten(
        &self,
        columns: &Map<String, Value>,
        write: impl FnOnce(&str) -> String,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>> {
        let row = DataRow::of_columns(columns.clone());
        let mut prompt = self.prompt(&row)?;
        if !prompt.rewrite(write) {
            let expected =
                "a prompt that ends with a user message, from which the teacher's prompt is built".to_owned();
            let got = "a prompt that ends with a message of another role".to_owned();
            return Err(Error::InvalidArgument { op: "self_distillation", expected, got });
        }
        Ok(prompt.render(&row, tokenizer, &self.format(tokenizer))?.token_ids)
    }

    fn format(&self, tokenizer: &Tokenizer) -> ChatFormat<'_> {
        let format = ChatFormat::new(self.prompt_format, self.system_prompt.as_deref(), tokenizer);
        ChatFormat { tools: self.tools.clone(), ..format }
    }

    /// The prompt of a row; an environment may have all of it, as with TRL.
    fn prompt(&self, row: &DataRow) -> Result<RawPrompt> {
        match row.prompt(self.prompt_column.as_deref()) {
            Err(_) if self.tools.has_environments() && !row.has_prompt() => {
                Ok(RawPrompt::Conversation(vec![Message::user("")]))
            }
            prompt => prompt,
        }
    }
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
    /// The bounds of prompt and completion together: `max_model_length`, and the completion's part of it.
    pub context: Option<(usize, usize)>,
    /// Prompts an epoch has, where the weights of sources repeat rows or leave some out.
    pub drawn: Option<usize>,
    /// Rows whose prompt is text.
    pub texts: usize,
    /// Whether text is a user's message.
    pub text_is_chat: bool,
    /// Whether text does without a chat template or a system message that there is.
    pub text_is_bare: bool,
    /// Whether there are tools that no prompt shows.
    pub tools_are_hidden: bool,
    /// The notice about the first padded field in a prompt.
    pub padding: Option<String>,
}

impl DatasetCounts {
    /// Warnings and notices about what the user may not have meant, and how to mend it, each behind `warning:` or `notice:`.
    pub fn notices(&self) -> Vec<String> {
        let Self { texts, read, kept, .. } = self;
        let lost = read - kept;
        let warning = is_much(lost, *read)
            .then(|| format!("warning: {lost} of {read} rows are left out: {}", self.left_out().join(", ")));
        let notice = (self.text_is_bare && *texts > 0).then(|| {
            format!(
                "notice: {texts} of {read} prompts are text: they reach the model as they are, without a chat template or \
                 system_prompt; prompt_format = chat makes them a user's message where the model has a chat template"
            )
        });
        let hidden = self.tools_are_hidden.then(|| {
            "notice: the chat template shows the model no tools: name them in the prompts, unless it knows them from its training"
                .to_owned()
        });
        warning.into_iter().chain(notice).chain(hidden).chain(self.padding.clone()).collect()
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

    /// Describes the treatment of prompts.
    fn format(&self) -> &'static str {
        match (self.texts, self.text_is_chat) {
            (0, _) => "conversations, through the chat template",
            (_, true) => "text as a user's message, through the chat template",
            (texts, false) if texts == self.read => "text, as it is",
            _ => "text unchanged, conversations through the chat template",
        }
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
        write!(f, ", {} kept", self.kept)?;
        self.drawn.map_or(Ok(()), |drawn| write!(f, ", {drawn} an epoch by their weights"))
    }
}

/// Whether so many of all rows were hardly meant to be left out: more than a tenth.
pub(super) fn is_much(lost: usize, all: usize) -> bool {
    10 * lost > all
}

/// How often the row with this `id` is seen in an epoch; of a weight's fraction as many rows have one more.
pub(super) fn copies(weight: f64, id: u64, seed: u64) -> u64 {
    let share = splitmix64(splitmix64(seed) ^ id) as f64 / 2.0_f64.powi(64);
    weight as u64 + u64::from(share < weight.fract())
}

/// Between the ids of a row's copies: more than any data set has rows.
const COPY_STRIDE: u64 = 1 << 40;
/// Characters of the first prompt that are shown.
const SHOWN_CHARS: usize = 300;

/// Prompts in file order, tokenized.
#[derive(Debug)]
pub struct Dataset {
    prompts: Vec<Prompt>,
    counts: DatasetCounts,
}

/// The beginning of a text, in quotation marks.
pub(super) fn quoted(text: &str) -> String {
    let shown: String = text.chars().take(SHOWN_CHARS).collect();
    format!("{shown:?}{}", if shown.len() < text.len() { " .." } else { "" })
}

impl Dataset {
    /// Prompts that are made, not read; at least one.
    pub fn new(prompts: Vec<Prompt>) -> Self {
        assert!(!prompts.is_empty(), "no prompts in the data set");
        let counts = DatasetCounts { read: prompts.len(), kept: prompts.len(), ..DatasetCounts::default() };
        Self { prompts, counts }
    }

    /// Reads the rows of one file; see [`Dataset::read`].
    ///
    /// # Errors
    /// The errors of [`Dataset::read`].
    pub fn from_file(path: impl AsRef<Path>, tokenizer: &Tokenizer, options: &DatasetOptions) -> Result<Self> {
        Self::read(&RowSources::file(path.as_ref()), tokenizer, options)
    }

    /// Reads rows of JSONL, JSON, Parquet or CSV. A prompt stands in `prompt`, `problem` or `question`, as text or as `[{role,
    /// content}]`; an answer in `answer`, `solution`, `ground_truth` or verl's `reward_model.ground_truth` is also given to
    /// the rewards as `answer`. [`Prompt::id`] is the row's index over all files, whatever is left out; a repeated row has ids
    /// of its own.
    ///
    /// # Errors
    /// [`Error::BadLine`] with file, line and columns, [`Error::EmptyDataset`] with the counts, [`Error::BadFile`],
    /// [`Error::ChatTemplate`].
    pub fn read(sources: &RowSources, tokenizer: &Tokenizer, options: &DatasetOptions) -> Result<Self> {
        Self::read_with(sources, tokenizer, options, &mut |_, _| ())
    }

    /// [`Dataset::read`], which calls `told` with the rows that are read so far, and whether they are all.
    ///
    /// # Errors
    /// The errors of [`Dataset::read`].
    pub fn read_with(
        sources: &RowSources,
        tokenizer: &Tokenizer,
        options: &DatasetOptions,
        told: &mut dyn FnMut(usize, bool),
    ) -> Result<Self> {
        let format = options.format(tokenizer);
        let has_more = tokenizer.has_chat_template() && options.prompt_format == PromptFormat::Auto;
        let mut data = Self {
            prompts: Vec::new(),
            counts: DatasetCounts {
                max_prompt_length: options.max_prompt_length,
                context: options.max_model_length.map(|context| (context, options.max_completion_length)),
                text_is_chat: format.text_is_chat,
                text_is_bare: !format.text_is_chat && (has_more || options.system_prompt.is_some()),
                tools_are_hidden: options.tools.are_hidden(tokenizer),
                ..DatasetCounts::default()
            },
        };
        for (path, weight) in &sources.files {
            for row in read_rows(path)? {
                if sources.max_rows.is_some_and(|most| data.counts.read >= most) {
                    break;
                }
                data.add(row?, *weight, tokenizer, options, &format)?;
                told(data.counts.read, false);
            }
        }
        told(data.counts.read, true);
        if sources.files.iter().any(|(_, weight)| *weight != 1.0) {
            data.counts.drawn = Some(data.prompts.len());
        }
        if data.prompts.is_empty() {
            return Err(Error::EmptyDataset { path: sources.name.clone().into(), stages: data.counts.to_string() });
        }
        Ok(data)
    }

    /// Adds a row as often as its weight says, if it fits.
    fn add(
        &mut self,
        row: DataRow,
        weight: f64,
        tokenizer: &Tokenizer,
        options: &DatasetOptions,
        format: &ChatFormat<'_>,
    ) -> Result<()> {
        let id = self.counts.read as u64;
        self.counts.read += 1;
        self.counts.padding = self.counts.padding.take().or_else(|| row.padding(false));
        let prompt = options.prompt(&row)?;
        options.required_columns.iter().try_for_each(|name| row.require(name))?;
        self.counts.texts += usize::from(prompt.is_text());
        let num_bytes = prompt.num_bytes();
        if self.counts.leave_out(|limit| num_bytes > tokenizer.max_bytes(limit)) {
            return Ok(()); // to tokenize it would take hundreds of bytes for each of its own
        }
        let RenderedPrompt { text, token_ids } = prompt.render(&row, tokenizer, format)?;
        if self.counts.leave_out(|limit| token_ids.len() > limit) {
            return Ok(());
        }
        self.counts.kept += 1;
        let columns = Arc::new(row.columns);
        self.prompts.extend((0..copies(weight, id, options.seed)).map(|copy| Prompt {
            id: id + copy * COPY_STRIDE,
            text: text.clone(),
            token_ids: token_ids.clone(),
            columns: columns.clone(),
        }));
        Ok(())
    }

    /// Describes the treatment of prompts, with the first of them as the model reads it.
    pub fn description(&self) -> String {
        format!("prompts: {}; the first one: {}", self.counts.format(), quoted(&self.prompts[0].text))
    }

    /// Tokens of the longest usable prompt.
    pub fn longest_prompt(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.token_ids.len()).max().unwrap_or(0)
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
