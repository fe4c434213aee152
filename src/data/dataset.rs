//! The data set of prompts for rollouts.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::Message;
use super::Tokenizer;
use super::digest::RowsDigest;
use super::prompt_text::{ChatFormat, RenderedPrompt};
use super::rows::{DataRow, RawPrompt, read_rows};
use super::sampler::splitmix64;
use super::schemas::ToolSchemas;
use super::sources::RowSources;
use crate::config::{DataConfig, PromptFormat};
use crate::error::{Error, Result};
use crate::types::Prompt;

/// How prompts are read from rows, and which rows are left out.
#[derive(Debug, Clone, Default)]
pub struct DatasetOptions {
    /// Longest prompt in tokens; `None` means no separate limit.
    pub max_prompt_length: Option<usize>,
    /// Longest sequence of prompt and completion in tokens; `None` means no limit.
    pub max_model_length: Option<usize>,
    /// Tokens of `max_model_length` reserved for the completion.
    pub max_completion_length: usize,
    /// How a prompt that is plain text is presented to the model.
    pub prompt_format: PromptFormat,
    /// System message added to conversations that have none; not added to prompts that stay plain text.
    pub system_prompt: Option<String>,
    /// Column with the prompt; `None` uses the first of the default names.
    pub prompt_column: Option<String>,
    /// Column with the completion of an SFT example; `None` means `completion`.
    pub completion_column: Option<String>,
    /// Columns that every row must have because rewards read them.
    pub required_columns: Vec<String>,
    /// Schemas of the functions that the model may call; the chat template shows them to the model.
    pub tools: ToolSchemas,
    /// Seed for choosing the rows that a fractional source weight repeats or leaves out.
    pub seed: u64,
}

impl DatasetOptions {
    /// Options by the `data` section of the configuration. Every row must have the `required` columns; lengths are not limited.
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

    /// The prompt of a row with an environment's `observation` appended to the last message, as text and token ids.
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

    /// Token ids of a row's prompt after `write` has replaced the text of its last message.
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

    /// The prompt of a row; empty for a row without one if an environment supplies the prompt, as in TRL.
    fn prompt(&self, row: &DataRow) -> Result<RawPrompt> {
        match row.prompt(self.prompt_column.as_deref()) {
            Err(_) if self.tools.has_environments() && !row.has_prompt() => {
                Ok(RawPrompt::Conversation(vec![Message::user("")]))
            }
            prompt => prompt,
        }
    }
}

/// Numbers of rows read, left out and kept. Prompts that are too long are left out, never truncated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DatasetCounts {
    /// Number of rows in all files.
    pub read: usize,
    /// Rows left out because they are longer than `max_prompt_length`.
    pub over_max_prompt_length: usize,
    /// Rows left out because `max_model_length` has not enough tokens left for the completion.
    pub over_context: usize,
    /// Number of rows kept.
    pub kept: usize,
    /// The limit by which `over_max_prompt_length` was counted, in tokens.
    pub max_prompt_length: Option<usize>,
    /// `max_model_length` and the tokens of it reserved for the completion.
    pub context: Option<(usize, usize)>,
    /// Prompts in an epoch, if source weights repeat rows or leave some out.
    pub drawn: Option<usize>,
    /// Rows whose prompt is plain text.
    pub texts: usize,
    /// Whether a plain text prompt is presented as a user's message.
    pub text_is_chat: bool,
    /// Whether plain text prompts are used without the model's chat template or the configured system message.
    pub text_is_bare: bool,
    /// Whether the chat template does not show the tools to the model.
    pub tools_are_hidden: bool,
    /// The notice about the first null field in a prompt that was added as padding.
    pub padding: Option<String>,
}

impl DatasetCounts {
    /// Warnings and notices about probable mistakes and how to fix them, each prefixed with `warning:` or `notice:`.
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

    /// Counts a prompt that exceeds one of the token limits and returns whether it does.
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

    /// Describes how prompts are presented to the model.
    fn format(&self) -> &'static str {
        match (self.texts, self.text_is_chat) {
            (0, _) => "conversations, through the chat template",
            (_, true) => "text as a user's message, through the chat template",
            (texts, false) if texts == self.read => "text, unchanged",
            _ => "text unchanged, conversations through the chat template",
        }
    }

    /// Describes the number of rows left out by each limit.
    fn left_out(&self) -> Vec<String> {
        let too_long = (self.max_prompt_length.filter(|_| self.over_max_prompt_length > 0))
            .map(|limit| format!("{} longer than max_prompt_length {limit}", self.over_max_prompt_length));
        let without_room = self.context.filter(|_| self.over_context > 0).map(|(context, completion)| {
            let (room, count) = (context.saturating_sub(completion), self.over_context);
            match room {
                0 => format!("{count} without room, as max_completion_length {completion} leaves none in the context of {context} tokens"),
                _ => format!("{count} longer than {room} tokens, context {context} less max_completion_length {completion}"),
            }
        });
        too_long.into_iter().chain(without_room).collect()
    }
}

impl fmt::Display for DatasetCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} read", self.read)?;
        self.left_out().iter().try_for_each(|stage| write!(f, ", {stage}"))?;
        write!(f, ", {} kept", self.kept)?;
        self.drawn.map_or(Ok(()), |drawn| write!(f, ", {drawn} per epoch by their weights"))
    }
}

/// Whether more than a tenth of all rows is left out, which is probably a mistake.
pub(super) fn is_much(lost: usize, all: usize) -> bool {
    10 * lost > all
}

/// How often the row `id` appears in an epoch. The fraction of `weight` is the share of rows that appear once more.
pub(super) fn copies(weight: f64, id: u64, seed: u64) -> u64 {
    let share = splitmix64(splitmix64(seed) ^ id) as f64 / 2.0_f64.powi(64);
    weight as u64 + u64::from(share < weight.fract())
}

/// Offset between the ids of a row's copies: more than the rows of any data set.
const COPY_STRIDE: u64 = 1 << 40;
/// Characters of the first prompt that are shown in a description.
const SHOWN_CHARS: usize = 300;

/// A data set of tokenized prompts in file order.
#[derive(Debug)]
pub struct Dataset {
    prompts: Vec<Prompt>,
    counts: DatasetCounts,
    /// The hash of the kept rows; `None` if they were not read from files that stay.
    digest: Option<RowsDigest>,
}

/// The beginning of a text, in quotation marks.
pub(super) fn quoted(text: &str) -> String {
    let shown: String = text.chars().take(SHOWN_CHARS).collect();
    format!("{shown:?}{}", if shown.len() < text.len() { " .." } else { "" })
}

impl Dataset {
    /// A data set of the given prompts; there must be at least one.
    pub fn new(prompts: Vec<Prompt>) -> Self {
        assert!(!prompts.is_empty(), "no prompts in the data set");
        let counts = DatasetCounts { read: prompts.len(), kept: prompts.len(), ..DatasetCounts::default() };
        Self { prompts, counts, digest: None }
    }

    /// Reads the rows of one file like [`Dataset::read`].
    ///
    /// # Errors
    /// The errors of [`Dataset::read`].
    pub fn from_file(path: impl AsRef<Path>, tokenizer: &Tokenizer, options: &DatasetOptions) -> Result<Self> {
        Self::read(&RowSources::file(path.as_ref()), tokenizer, options)
    }

    /// Reads rows of JSONL, JSON, Parquet or CSV. The prompt is in column `prompt`, `problem` or `question`, as text or as
    /// `[{role, content}]`. An answer in `answer`, `solution`, `ground_truth` or verl's `reward_model.ground_truth` is also given
    /// to the rewards as `answer`. [`Prompt::id`] is the row's index over all files, rows left out included; each copy of a
    /// repeated row has another id.
    ///
    /// # Errors
    /// [`Error::BadLine`] with file, line and columns, [`Error::EmptyDataset`] with the counts, [`Error::BadFile`],
    /// [`Error::ChatTemplate`].
    pub fn read(sources: &RowSources, tokenizer: &Tokenizer, options: &DatasetOptions) -> Result<Self> {
        Self::read_with(sources, tokenizer, options, &mut |_, _| ())
    }

    /// Reads rows like [`Dataset::read`], and calls `told` with the number of rows read so far and whether reading is finished.
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
            digest: Some(RowsDigest::default()),
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

    /// Adds a row as often as its weight says, if it is within the limits.
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
        let (columns, copies) = (Arc::new(row.columns), copies(weight, id, options.seed));
        if let Some(digest) = &mut self.digest {
            digest.add(id, copies, &columns);
        }
        self.prompts.extend((0..copies).map(|copy| Prompt {
            id: id + copy * COPY_STRIDE,
            text: text.clone(),
            token_ids: token_ids.clone(),
            columns: columns.clone(),
        }));
        Ok(())
    }

    /// Describes how prompts are presented to the model, with the first prompt as an example.
    pub fn description(&self) -> String {
        format!("prompts: {}; the first one: {}", self.counts.format(), quoted(&self.prompts[0].text))
    }

    /// Length of the longest kept prompt in tokens.
    pub fn longest_prompt(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.token_ids.len()).max().unwrap_or(0)
    }

    /// Number of kept prompts; never 0.
    #[allow(clippy::len_without_is_empty)] // an empty data set is an error
    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// The kept prompt at `index`, from 0 to `len`.
    pub fn prompt(&self, index: usize) -> &Prompt {
        &self.prompts[index]
    }

    /// All kept prompts.
    pub fn prompts(&self) -> &[Prompt] {
        &self.prompts
    }

    /// Marks the rows as made anew by each start of a program, so that they have no digest.
    pub fn without_digest(self) -> Self {
        Self { digest: None, ..self }
    }

    /// SHA-256 of the kept rows and their order, if they were read from files.
    pub fn digest(&self) -> Option<String> {
        self.digest.as_ref().map(RowsDigest::text)
    }

    /// The numbers of rows read, left out and kept.
    pub fn counts(&self) -> &DatasetCounts {
        &self.counts
    }
}

#[cfg(test)]
mod tests;
