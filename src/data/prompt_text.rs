//! Converts prompts of rows to the text and tokens for the model.

use super::rows::{DataRow, RawPrompt};
use super::schemas::ToolSchemas;
use super::{Conversation, Message, Tokenizer};
use crate::config::PromptFormat;
use crate::error::Result;

/// How prompts are converted to text for the model.
#[derive(Debug, Clone, Default)]
pub(super) struct ChatFormat<'a> {
    /// Whether a plain text prompt becomes a user's message.
    pub text_is_chat: bool,
    /// The system message for conversations that have none.
    pub system_prompt: Option<&'a str>,
    /// Schemas of the functions that the model may call.
    pub tools: ToolSchemas,
}

impl<'a> ChatFormat<'a> {
    /// The format for this tokenizer: `auto` depends on whether it has a chat template.
    pub fn new(format: PromptFormat, system_prompt: Option<&'a str>, tokenizer: &Tokenizer) -> Self {
        let text_is_chat = match format {
            PromptFormat::Auto => tokenizer.has_chat_template(),
            PromptFormat::Chat => true,
            PromptFormat::Text => false,
        };
        Self { text_is_chat, system_prompt, tools: ToolSchemas::default() }
    }

    /// Inserts the system message at the start of a conversation that has none.
    pub fn add_system_prompt(&self, messages: &mut Vec<Message>) {
        let has_one = messages.first().is_some_and(|first| first.role == "system");
        if let Some(content) = self.system_prompt.filter(|_| !has_one) {
            messages.insert(0, Message::new("system", content));
        }
    }

    /// A row's messages, with the tools that the model may call in that row.
    ///
    /// # Errors
    /// [`Error::BadLine`] if the row does not name its environment, or the chat template would drop a field of a message.
    pub fn conversation(
        &self,
        row: &DataRow,
        tokenizer: &Tokenizer,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Conversation> {
        let tools = self.tools.of_row(&row.columns).map_err(|message| row.bad(message))?.clone();
        let conversation = Conversation { tools, ..Conversation::of(messages, add_generation_prompt) };
        if tokenizer.has_chat_template() {
            tokenizer.check_fields(&conversation.messages).map_err(|message| row.bad(message))?;
        }
        Ok(conversation)
    }
}

/// A prompt as text and token ids.
#[derive(Debug, Clone, PartialEq)]
pub struct RenderedPrompt {
    /// The prompt's text, after the chat template if one is used.
    pub text: String,
    /// Ids of `text`; never empty.
    pub token_ids: Vec<u32>,
}

impl RawPrompt {
    /// Size of the prompt's text in bytes, before any template.
    pub fn num_bytes(&self) -> usize {
        match self {
            RawPrompt::Text(text) => text.len(),
            RawPrompt::Conversation(messages) => messages.iter().map(Message::num_bytes).sum(),
        }
    }

    /// Appends to the prompt's text, or to its last message.
    pub fn append(&mut self, more: &str) {
        match self {
            RawPrompt::Text(text) => text.push_str(more),
            RawPrompt::Conversation(messages) => messages.last_mut().iter_mut().for_each(|last| last.content += more),
        }
    }

    /// Replaces the prompt's text, or its last message's text, by the result of `write`. Returns whether that was a user's message.
    pub fn rewrite(&mut self, write: impl FnOnce(&str) -> String) -> bool {
        match self {
            RawPrompt::Text(text) => *text = write(text),
            RawPrompt::Conversation(messages) => match messages.last_mut().filter(|last| last.role == "user") {
                Some(last) => last.content = write(&last.content),
                None => return false,
            },
        }
        true
    }

    /// Whether the prompt is plain text.
    pub fn is_text(&self) -> bool {
        matches!(self, RawPrompt::Text(_))
    }

    /// Converts the prompt to text and token ids. A conversation is rendered with the chat template up to the start of the answer, as in TRL; so is
    /// text that the `format` makes a user's message. Other text stays unchanged, and the tokenizer adds its special tokens.
    pub fn render(self, row: &DataRow, tokenizer: &Tokenizer, format: &ChatFormat<'_>) -> Result<RenderedPrompt> {
        let prompt = match self {
            RawPrompt::Text(text) if format.text_is_chat => RawPrompt::Conversation(vec![Message::user(text)]),
            other => other,
        };
        let (text, ids) = match prompt {
            RawPrompt::Text(_) if !format.tools.is_empty() => {
                return Err(row.bad(
                    "the prompt is plain text, but tools need a conversation: only a chat template can show them to \
                     the model"
                        .into(),
                ));
            }
            RawPrompt::Text(text) => {
                let ids = tokenizer.encode(&text, true);
                (text, ids)
            }
            RawPrompt::Conversation(mut messages) => {
                if messages.last().is_some_and(|last| last.role == "assistant") {
                    return Err(row.bad(
                        "the last message is from the assistant: a prompt must end with a message to answer".into(),
                    ));
                }
                format.add_system_prompt(&mut messages);
                let text = tokenizer.converse(format.conversation(row, tokenizer, &messages, true)?)?;
                let ids = tokenizer.encode(&text, false);
                (text, ids)
            }
        };
        let ids = ids.map_err(|error| row.bad(error.to_string()))?;
        if ids.is_empty() {
            Err(row.bad("the prompt has no tokens".into()))
        } else {
            Ok(RenderedPrompt { text, token_ids: ids })
        }
    }
}
