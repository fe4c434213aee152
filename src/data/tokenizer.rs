//! The model's tokenizer and chat templates, from its folder.
//!
//! | file | what it is |
//! |---|---|
//! | `merged` | tokens that other files than `tokenizer.json` add or redefine |
//! | `rebuilt` | cases in which transformers 5 produces other tokens than `tokenizer.json` |
//! | `templates` | chat templates, one or several with names |

mod merged;
mod rebuilt;
mod templates;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::models::wordlevel::WordLevel;

use self::merged::{MergedTokens, NamedTokens, TokenFiles};
use self::rebuilt::AutoClass;
use self::templates::ChatTemplates;
use super::messages::{alias_reasoning, unread_field};
use super::{Conversation, Message, statics};
use crate::error::{Error, Result, panic_message};
use crate::untrusted::{self, MAX_MODEL_JSON_BYTES, MAX_TOKENIZER_BYTES, ThreadLimits};

pub(crate) use templates::FOLDER as TEMPLATES_FOLDER;

/// Size in bytes up to which a text is tokenized regardless of its token limit.
const MIN_LONG_BYTES: usize = 64 << 10;
/// Typical number of bytes per token.
const TYPICAL_TOKEN_BYTES: usize = 4;
/// Extra tokens that the end of a text may have if it is tokenized without the text that follows.
const SPARE_TOKENS: usize = 64;
/// Number of special tokens that are included as text in the hard texts.
const MAX_HARD_TOKENS: usize = 16;
/// Memory limit in bytes for reading a `tokenizer.json`: a base, and an amount per byte of the file. A BPE model needs about 10 per byte, the trie
/// of a unigram model about 60. `READ_CPU_S` limits the CPU time in seconds.
const READ_BYTES: [usize; 2] = [512 << 20, 64];
const READ_CPU_S: u64 = 60;

#[cfg(test)]
thread_local! {
    /// Number of bytes that this thread has tokenized, for tests.
    pub(crate) static ENCODED_BYTES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// File name of a tokenizer in Mistral's own format.
const TEKKEN: &str = "tekken.json";

/// Converts text to token ids and back. Never truncates or pads, even if `tokenizer.json` says so.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    eos_token_id: Option<u32>,
    max_id: u32,
    /// Length in bytes of the longest vocabulary entry; a token's text is never longer than its entry.
    max_token_bytes: usize,
    chat_templates: Option<ChatTemplates>,
    notice: Option<String>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` and, where present, `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, and chat templates in
    /// files of their own, merged as transformers' AutoTokenizer does.
    ///
    /// # Errors
    /// [`Error::BadFile`] for a missing or malformed file, and for unsupported keys, [`Error::TokenizerMismatch`] for an EOS token without an id,
    /// [`Error::ChatTemplate`] for a template that does not compile.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join("tokenizer.json");
        let bytes = untrusted::read(&path, MAX_TOKENIZER_BYTES).map_err(|error| match error.kind() {
            ErrorKind::NotFound if folder.join(TEKKEN).exists() => {
                let message = format!(
                    "the file is missing; the folder has {TEKKEN}, which is not supported: copy the tokenizer.json of \
                     the same model from the Hub or from a checkpoint converted for transformers; colo-grpo init \
                     copies one with --tokenizer FOLDER"
                );
                Error::bad_file(&path, message)
            }
            ErrorKind::NotFound => {
                let folder = folder.display();
                let line = format!("from transformers import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')");
                let message = format!(
                    "the file is missing; if the folder has a tokenizer in another format (tokenizer.model, \
                     vocab.json), convert it with: python3 -c \"{line}\"; colo-grpo init copies one with --tokenizer \
                     FOLDER"
                );
                Error::bad_file(&path, message)
            }
            _ => Error::bad_file(&path, error.to_string()),
        })?;
        let unreadable = |message: String| Error::bad_file(&path, message);
        let memory_bytes = READ_BYTES[0] + READ_BYTES[1] * bytes.len();
        let limits = ThreadLimits { stack_bytes: 16 << 20, memory_bytes, cpu_s: READ_CPU_S };
        let files = TokenFiles::read(folder)?;
        let (eos_token, template) = (files.eos_token(), files.get("chat_template").clone());
        let ReadTokenizer { inner, named, eos_token_id: known_eos, notice } =
            read_within(bytes, files, limits).map_err(unreadable)?;
        let vocab = inner.get_vocab(true);
        let Some(&max_id) = vocab.values().max() else {
            return Err(Error::bad_file(&path, "the vocabulary is empty"));
        };
        let max_token_bytes = vocab.keys().map(String::len).max().unwrap_or_default();
        let eos_token_id = match eos_token {
            Some(eos) => Some(known_eos.ok_or_else(|| Error::TokenizerMismatch {
                message: format!("eos_token '{eos}' of tokenizer_config.json has no id in {}", path.display()),
            })?),
            None => None,
        };
        let chat_templates = ChatTemplates::read(folder, &template, &named)?;
        Ok(Self { inner, eos_token_id, max_id, max_token_bytes, chat_templates, notice })
    }

    /// A notice for the user if AutoTokenizer of transformers 5 tokenizes some text differently.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Texts that tokenizers often tokenize differently, including texts with this tokenizer's special tokens.
    pub fn hard_texts(&self) -> Vec<String> {
        let mut texts = rebuilt::hard_texts();
        let added: BTreeMap<_, _> = self.inner.get_added_tokens_decoder().into_iter().collect();
        texts.extend(added.values().take(MAX_HARD_TOKENS).map(|token| format!("a {0}b {0} c{0}", token.content)));
        texts
    }

    /// Adds variables that the chat template may use (`chat_template_kwargs`).
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if they take more memory than a template may have.
    pub fn with_template_variables(self, variables: &Map<String, Value>) -> Result<Self> {
        self.chat_templates.iter().try_for_each(|templates| templates.add_variables(variables))?;
        Ok(self)
    }

    /// A tokenizer whose tokens are the decimal numbers below `vocab_size`, for benchmark models without a tokenizer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty vocabulary.
    pub fn of_ids(vocab_size: usize) -> Result<Self> {
        let invalid =
            |got: String| Error::InvalidArgument { op: "Tokenizer::of_ids", expected: "a vocabulary".into(), got };
        let max_id = vocab_size.checked_sub(1).ok_or_else(|| invalid("0 tokens".into()))? as u32;
        let vocab = (0..=max_id).map(|id| (id.to_string(), id)).collect();
        let model = WordLevel::builder().vocab(vocab).unk_token("0".into()).build();
        let inner = tokenizers::Tokenizer::new(model.map_err(|error| invalid(error.to_string()))?);
        Ok(Self { inner, eos_token_id: None, max_id, max_token_bytes: 10, chat_templates: None, notice: None })
    }

    /// Upper bound for the size in bytes of a text with `num_tokens` tokens. A longer text does not fit, so it need not be
    /// tokenized. The bound is at least 64 KiB, for tokenizers that drop or merge text (white space, unknown words).
    pub fn max_bytes(&self, num_tokens: usize) -> usize {
        num_tokens.saturating_mul(self.max_token_bytes).max(MIN_LONG_BYTES)
    }

    /// Whether `text` has more than `limit` tokens. Of a text that is far too long, only a part is tokenized that suffices to
    /// decide this.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`].
    pub fn exceeds(&self, text: &str, limit: usize) -> Result<bool> {
        if text.len() > self.max_bytes(limit) {
            return Ok(true);
        }
        let enough = limit.saturating_add(SPARE_TOKENS);
        let mut num_bytes = enough.saturating_mul(TYPICAL_TOKEN_BYTES);
        while num_bytes < text.len() {
            let end = (0..=num_bytes).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
            if self.encode(&text[..end], false)?.len() > enough {
                return Ok(true);
            }
            num_bytes *= 2;
        }
        Ok(false)
    }

    /// Token ids of `text`. With `add_special_tokens`, includes the special tokens that the tokenizer adds to a text (such as BOS).
    /// Rendered conversations already contain theirs.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        #[cfg(test)]
        ENCODED_BYTES.set(ENCODED_BYTES.get() + text.len());
        let encoded = unpanicked(|| self.inner.encode_fast(text, add_special_tokens));
        encoded.map(|encoding| encoding.get_ids().to_vec()).map_err(|error| {
            let start: String = text.chars().take(80).collect();
            Error::TokenizerMismatch { message: format!("the tokenizer cannot encode '{start}': {error}") }
        })
    }

    /// The text of `ids`, without special tokens and without ids that are not in the vocabulary.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`].
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        unpanicked(|| self.inner.decode(ids, true)).map_err(|message| Error::TokenizerMismatch { message })
    }

    /// The text of `ids`, with special tokens.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`].
    pub fn decode_all(&self, ids: &[u32]) -> Result<String> {
        unpanicked(|| self.inner.decode(ids, false)).map_err(|message| Error::TokenizerMismatch { message })
    }

    /// Whether `token` is a special token, which [`Tokenizer::decode`] leaves out.
    pub fn is_special(&self, token: &str) -> bool {
        let added = self.inner.get_added_tokens_decoder();
        self.token_id(token).and_then(|id| added.get(&id)).is_some_and(|token| token.special)
    }

    /// The chat template's source; the one for conversations with tools if there are several.
    pub fn template_source(&self) -> Option<&str> {
        self.chat_templates.as_ref().and_then(ChatTemplates::source)
    }

    /// The tokenizer in the format of `tokenizer.json`.
    pub(super) fn json(&self) -> Result<Value> {
        let failed = |message: String| Error::TokenizerMismatch { message };
        let text = self.inner.to_string(false).map_err(|error| failed(error.to_string()))?;
        serde_json::from_str(&text).map_err(|error| failed(error.to_string()))
    }

    /// The normalizer and the pre-tokenizer in the format of `tokenizer.json`; null where there is none.
    pub(super) fn steps_before_model(&self) -> [Value; 2] {
        [json!(self.inner.get_normalizer()), json!(self.inner.get_pre_tokenizer())]
    }

    /// Describes the lowest id with different tokens in the two vocabularies; `None` if the vocabularies are equal.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let name =
            |tokenizer: &Self, id| tokenizer.token(id).map_or_else(|| "no token".to_owned(), |it| format!("'{it}'"));
        let mut ids = 0..=self.max_id.max(other.max_id);
        let differs = |id: &u32| self.inner.id_to_token(*id) != other.inner.id_to_token(*id);
        ids.find(differs).map(|id| format!("id {id} is {} there and {} here", name(other, id), name(self, id)))
    }

    /// The vocabulary entry of a token id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a vocabulary entry.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of embedding rows needed: the largest token id, added tokens included, plus 1.
    pub fn vocab_size(&self) -> usize {
        self.max_id as usize + 1
    }

    /// The tokenizer's own end-of-sequence token.
    pub fn eos_token_id(&self) -> Option<u32> {
        self.eos_token_id
    }

    /// Ids that end a completion, sorted: the tokenizer's end-of-sequence id and those of the model.
    pub fn eos_token_ids(&self, model_eos_token_ids: &[u32]) -> Vec<u32> {
        let mut ids: Vec<u32> = self.eos_token_id.iter().chain(model_eos_token_ids).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Checks the tokenizer against a model with `vocab_rows` embedding rows and these end-of-sequence ids.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`] with the ids and rows compared, or if neither side knows an EOS.
    pub fn check_against(&self, vocab_rows: usize, model_eos_token_ids: &[u32]) -> Result<()> {
        let mismatch = |message: String| Err(Error::TokenizerMismatch { message });
        if self.vocab_size() > vocab_rows {
            let token = self.token(self.max_id).unwrap_or_default();
            return mismatch(format!(
                "the tokenizer has ids up to {} ('{token}'), the model has {vocab_rows} embedding rows (ids up to {}); \
                 take the tokenizer that belongs to the model, or resize its embedding",
                self.max_id,
                vocab_rows.saturating_sub(1)
            ));
        }
        for &id in model_eos_token_ids {
            if id as usize >= vocab_rows || self.token(id).is_none() {
                return mismatch(format!(
                    "eos_token_id {id} in the model's configuration is not a token of the tokenizer (its ids go up to \
                     {}; the model has {vocab_rows} embedding rows)",
                    self.max_id
                ));
            }
        }
        if self.eos_token_ids(model_eos_token_ids).is_empty() {
            return mismatch(
                "no end-of-sequence token: set eos_token in tokenizer_config.json, or eos_token_id in \
                 generation_config.json or config.json"
                    .into(),
            );
        }
        Ok(())
    }

    /// Whether the model's folder has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.chat_templates.is_some()
    }

    /// Renders the conversation as text; encode it without adding special tokens.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if there is no template or it fails.
    pub fn apply_chat_template(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.converse(Conversation::of(messages, add_generation_prompt))
    }

    /// Renders a conversation like [`Tokenizer::apply_chat_template`], with tools, further variables and arbitrary message fields.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::apply_chat_template`].
    pub fn converse(&self, mut conversation: Conversation) -> Result<String> {
        let missing = || Error::ChatTemplate {
            message: "the model's folder has no chat template: add chat_template to tokenizer_config.json or a file \
                      chat_template.jinja, or give prompts as text"
                .into(),
        };
        let templates = self.chat_templates.as_ref().ok_or_else(missing)?;
        self.check_fields(&conversation.messages).map_err(|message| Error::ChatTemplate { message })?;
        conversation.messages.iter_mut().for_each(alias_reasoning);
        templates.converse(conversation)
    }

    /// Returns an error if a message has a field that the chat template does not read.
    pub(super) fn check_fields(&self, messages: &[Value]) -> Result<(), String> {
        let unread = unread_field(messages, self.template_source().unwrap_or_default());
        unread.map_or(Ok(()), |field| {
            Err(format!(
                "the chat template does not use the field '{field}' of a message: remove the field, or move its text \
                 into the content"
            ))
        })
    }
}

/// A tokenizer with facts found when it was read.
pub(super) struct ReadTokenizer {
    inner: tokenizers::Tokenizer,
    named: NamedTokens,
    /// The end-of-sequence token's id according to the tokenizer's files.
    eos_token_id: Option<u32>,
    /// The text of [`Tokenizer::notice`].
    notice: Option<String>,
}

/// Runs [`read_and_try`] on a thread with limits.
pub(super) fn read_within(json: Vec<u8>, files: TokenFiles, limits: ThreadLimits) -> Result<ReadTokenizer, String> {
    statics::of_tokenizers();
    untrusted::once("tokenizer", limits, move || read_and_try(json, &files)).and_then(|read| read)
}

/// Reads a tokenizer from the contents of a `tokenizer.json` and the other files, and encodes some text, so that an expensive normalizer
/// exceeds the limits here.
fn read_and_try(json: Vec<u8>, files: &TokenFiles) -> Result<ReadTokenizer, String> {
    let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|error| error.to_string())?;
    inner.with_truncation(None).map_err(|error| error.to_string())?.with_padding(None);
    let MergedTokens { named, eos_token_id } = files.merge_into(&mut inner)?;
    let text: String = (' '..='~').collect();
    let _ = inner.encode_fast(text, false); // one that lacks a token for an unknown word may have one for every prompt
    let notice = AutoClass::of(files).notice(&inner);
    Ok(ReadTokenizer { inner, named, eos_token_id, notice })
}

/// Calls the tokenizers library and converts a panic to an error; the library panics on some files and texts.
fn unpanicked<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => outcome.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("panic: {}", panic_message(&*panic))),
    }
}

/// Reads a JSON file; `null` if it does not exist.
fn read_json(path: &Path) -> Result<Value> {
    match untrusted::read(path, MAX_MODEL_JSON_BYTES) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| Error::bad_file(path, error.to_string())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(Error::bad_file(path, error.to_string())),
    }
}

#[cfg(test)]
mod tests;
