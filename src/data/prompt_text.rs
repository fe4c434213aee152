//! Prompts of rows as the text and the tokens that the model reads.

use super::rows::{DataRow, RawPrompt};
use super::schemas::ToolSchemas;
use super::{Conversation, Message, Tokenizer};
use crate::config::PromptFormat;
use crate::error::Result;

/// How prompts become what the model reads.
#[derive(Debug, Clone, Default)]
pub(super) struct ChatFormat<'a> {
    /// Whether text is a user's message.
    pub text_is_chat: bool,
    /// The system message of conversations that have none.
    pub system_prompt: Option<&'a str>,
    /// Schemas of the functions that the model may call.
    pub tools: ToolSchemas,
}

impl<'a> ChatFormat<'a> {
    /// Resolves `format` for this tokenizer.
    pub fn new(format: PromptFormat, system_prompt: Option<&'a str>, tokenizer: &Tokenizer) -> Self {
        let text_is_chat = match format {
            PromptFormat::Auto => tokenizer.has_chat_template(),
            PromptFormat::Chat => true,
            PromptFormat::Text => false,
        };
        Self { text_is_chat, system_prompt, tools: ToolSchemas::default() }
    }

    /// Puts the system message before a conversation that has none.
    pub fn add_system_prompt(&self, messages: &mut Vec<Message>) {
        let has_one = messages.first().is_some_and(|first| first.role == "system");
        if let Some(content) = self.system_prompt.filter(|_| !has_one) {
            messages.insert(0, Message::new("system", content));
        }
    }

    /// A row's messages with the tools that the model may call there.
    ///
    /// # Errors
    /// [`Error::BadLine`] for a row without the name of its environment, or with a message that the chat template would not show whole.
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

/// A prompt as the model reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct RenderedPrompt {
    /// Through the chat template, where there is one.
    pub text: String,
    /// Ids of `text`; never empty.
    pub token_ids: Vec<u32>,
}

impl RawPrompt {
    /// Bytes of its text, before any template.
    pub fn num_bytes(&self) -> usize {
        match self {
            RawPrompt::Text(text) => text.len(),
            RawPrompt::Conversation(messages) => messages.iter().map(Message::num_bytes).sum(),
        }
    }

    /// Appends to the text, or to the last message.
    pub fn append(&mut self, more: &str) {
        match self {
            RawPrompt::Text(text) => text.push_str(more),
            RawPrompt::Conversation(messages) => messages.last_mut().iter_mut().for_each(|last| last.content += more),
        }
    }

    /// Replaces the text, or that of the last message, by what `write` makes of it. Returns whether that is a user's.
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

    /// Whether the prompt is text.
    pub fn is_text(&self) -> bool {
        matches!(self, RawPrompt::Text(_))
    }

    /// Text and ids. A conversation goes through the chat template up to where the answer begins, as in TRL; so does text where
    /// the `format` makes it a user's message. Other text is taken as it is, with the special tokens that the tokenizer adds.
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
