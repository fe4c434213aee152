//! Chat templates: Jinja from the model's folder, rendered as transformers renders it, but without access to files, without loops that do not end and
//! without unbounded output.
//!
//! A template is compiled, rendered and dropped on a thread with its own limits ([`Confined`]), because a short template can nest or chain thousands
//! of expressions, double a string with every instruction, or search a list without end.
//!
//! | file | what it is |
//! |---|---|
//! | `python` | how Python writes a value, as text and as JSON |
//! | `filters` | filters and tests of Python's Jinja |
//! | `methods` | methods of Python's strings |
//! | `values` | Python's tuples, ranges and views |
//! | `source` | syntax that minijinja reads differently from Python's Jinja: `'..' % ..`, tuples, strings with escapes, divisors |
//! | `scan` | operands, groups and strings in the code of a tag |
//! | `parts` | templates that want a message's content as a list of parts |

mod filters;
mod methods;
mod parts;
mod python;
mod scan;
mod source;
mod values;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, Error as JinjaError, ErrorKind, Value, context};
use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::{date, statics};
use crate::error::{Error, Result};
use crate::untrusted::{Confined, MAX_TEMPLATE_BYTES, ThreadLimits};

/// Jinja instructions that rendering one conversation may execute. Every level of a nested value needs one, so this also bounds nesting depth.
const FUEL: u64 = 200_000;
/// Limit on the characters and words of a template that may add a level to an expression or a block. Each level needs stack during compilation.
const MAX_OPERATORS: usize = 32_768;
/// Largest size of a rendered conversation in bytes, in addition to twice the size of its messages' text.
const MAX_OUTPUT_BYTES: usize = 4 << 20;
/// Name of the template in error messages.
const NAME: &str = "chat_template";
/// Limits for the thread of one template. The stack suffices for `MAX_OPERATORS` levels of syntax and `FUEL` levels of a value.
const LIMITS: ThreadLimits = ThreadLimits { stack_bytes: 256 << 20, memory_bytes: 128 << 20, cpu_s: 2 };

/// Threads that may be started to replace one whose conversation exceeded a limit.
const MAX_BREACHES: usize = 16;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or another role that the template knows.
    pub role: String,
    /// The message's text.
    pub content: String,
    /// Further fields that the chat template reads, such as `tool_calls`, `tool_call_id`, `name`, `reasoning_content`.
    #[serde(flatten)]
    pub more: Map<String, Json>,
}

impl Message {
    /// A message that has only a role and text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), more: Map::new() }
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// Total size of the message's texts in bytes.
    pub(super) fn num_bytes(&self) -> usize {
        self.content.len() + self.more.values().map(text_bytes).sum::<usize>()
    }
}

/// A compiled chat template with the special tokens that it may use as variables.
#[derive(Debug)]
pub struct ChatTemplate {
    thread: Mutex<Thread>,
    start: Start,
}

type Thread = Confined<TemplateJob, Result<String>>;

/// Source and variables from which the template's thread is started.
#[derive(Debug)]
struct Start {
    now: u64,
    limits: ThreadLimits,
    source: String,
    variables: Mutex<BTreeMap<String, Json>>,
    /// Conversations that exceeded a limit. Each left an abandoned thread behind.
    num_breaches: AtomicUsize,
}

/// A job for the template's thread.
#[derive(Debug)]
enum TemplateJob {
    Compile,
    Extend(Map<String, Json>),
    Render(Conversation),
}

/// The messages and variables that a template is rendered with.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// Messages: objects with a `role` and other fields that the template reads, such as `content`, `tool_calls`, `tool_call_id`, `name`.
    pub messages: Vec<Json>,
    /// Functions that the model may call, as JSON schemas; `Null` if there are none.
    pub tools: Json,
    /// Further variables of this conversation (`chat_template_kwargs`).
    pub variables: Map<String, Json>,
    /// Whether the text ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
}

impl Conversation {
    /// A conversation of these messages, without tools.
    pub fn of(messages: &[Message], add_generation_prompt: bool) -> Self {
        let json = |message: &Message| serde_json::to_value(message).expect("text and JSON values");
        Self { messages: messages.iter().map(json).collect(), add_generation_prompt, ..Self::default() }
    }
}

/// The parsed template, owned by its thread.
#[derive(Debug)]
struct Renderer {
    environment: Environment<'static>,
    source: String,
    /// Special tokens and other variables that the template may use.
    variables: BTreeMap<String, Json>,
    /// Roles whose content is passed to the template as a list of parts.
    roles_in_parts: Vec<&'static str>,
}

impl ChatTemplate {
    /// Compiles `source`; `special_tokens` (`bos_token` → `<s>` ..) become its variables. `strftime_now` returns the time
    /// of this call, or of `SOURCE_DATE_EPOCH` (seconds since 1970) where that is set.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] with the line that does not compile.
    pub fn new(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        Self::within(LIMITS, source, special_tokens)
    }

    /// [`ChatTemplate::new`] with other limits for the template's thread.
    pub(super) fn within(limits: ThreadLimits, source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        Self::at((date::now_s()?, limits), source, special_tokens)
    }

    fn at((now, limits): (u64, ThreadLimits), source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        check_size(source)?;
        statics::of_templates(|| environment(now));
        let variables = special_tokens.into_iter().map(|(name, token)| (name, token.into())).collect();
        let start =
            Start { now, limits, source: source.to_owned(), variables: Mutex::new(variables), num_breaches: 0.into() };
        Ok(Self { thread: Mutex::new(start.thread()?), start })
    }

    /// The Jinja source of the template.
    pub(super) fn source(&self) -> &str {
        &self.start.source
    }

    /// Adds variables that the template may use (`chat_template_kwargs`).
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if they take more memory than a template may have.
    pub(super) fn add_variables(&self, variables: &Map<String, Json>) -> Result<()> {
        self.call(TemplateJob::Extend(variables.clone()))?;
        self.start.variables.lock().unwrap_or_else(PoisonError::into_inner).extend(variables.clone());
        Ok(())
    }

    /// Renders the conversation as text. With `add_generation_prompt` the text ends where the assistant's answer begins.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template refuses the conversation, runs out of fuel, memory or time, or writes too much.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.converse(Conversation::of(messages, add_generation_prompt))
    }

    /// Renders a conversation like [`ChatTemplate::render`], with tools, further variables and arbitrary message fields.
    ///
    /// # Errors
    /// The errors of [`ChatTemplate::render`].
    pub fn converse(&self, conversation: Conversation) -> Result<String> {
        self.call(TemplateJob::Render(conversation))
    }

    /// Runs a job on the template's thread. If the job exceeds a limit, it fails and a new thread renders later conversations. The old thread
    /// may keep its memory, so the number of such replacements is limited.
    fn call(&self, job: TemplateJob) -> Result<String> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.call(job).unwrap_or_else(|message| {
            if self.start.num_breaches.fetch_add(1, Ordering::Relaxed) < MAX_BREACHES
                && let Ok(fresh) = self.start.thread()
            {
                *thread = fresh;
            }
            Err(Error::ChatTemplate { message })
        })
    }
}

impl Start {
    /// Starts a thread and compiles the template on it.
    fn thread(&self) -> Result<Thread> {
        let variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (source, roles_in_parts) = (self.source.clone(), Vec::new());
        let mut renderer = Renderer { environment: environment(self.now), source, variables, roles_in_parts };
        let work = move |job| match job {
            TemplateJob::Compile => renderer.compile().map(|()| String::new()),
            TemplateJob::Extend(variables) => {
                renderer.variables.extend(variables);
                Ok(String::new())
            }
            TemplateJob::Render(conversation) => renderer.render(&conversation),
        };
        let thread = Confined::start("chat template", self.limits, work);
        let thread = thread.map_err(|error| Error::Environment {
            message: format!(
                "cannot start a thread with a stack of {} bytes to render the chat template: {error}",
                LIMITS.stack_bytes
            ),
        })?;
        thread.call(TemplateJob::Compile).unwrap_or_else(|message| Err(Error::ChatTemplate { message }))?;
        Ok(thread)
    }
}

impl Renderer {
    fn compile(&mut self) -> Result<()> {
        let source = source::for_minijinja(&self.source);
        self.environment.add_template_owned(NAME, source).map_err(failed)?;
        if self.source.contains("text") {
            self.roles_in_parts = parts::roles_in_parts(|conversation| self.render(conversation).ok());
        }
        Ok(())
    }

    fn render(&self, conversation: &Conversation) -> Result<String> {
        let Conversation { messages, tools, variables, add_generation_prompt } = conversation;
        let num_bytes: usize = messages.iter().map(text_bytes).sum();
        let messages = &mut Cow::Borrowed(messages.as_slice());
        if !self.roles_in_parts.is_empty() {
            parts::wrap(messages.to_mut(), &self.roles_in_parts);
        }
        let mut named = self.variables.clone();
        named.extend(variables.clone());
        let variables = context! {
            messages,
            add_generation_prompt,
            tools,
            documents => (),
            ..Value::from_serialize(&named)
        };
        let mut output = Capped { text: Vec::new(), max_bytes: MAX_OUTPUT_BYTES + 2 * num_bytes };
        let template = self.environment.get_template(NAME).map_err(failed)?;
        template.render_captured_to(variables, &mut output).map_err(failed)?;
        String::from_utf8(output.text).map_err(|error| Error::ChatTemplate { message: error.to_string() })
    }
}

/// Total size in bytes of all strings in a value.
fn text_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(text_bytes).sum(),
        Json::Object(fields) => fields.values().map(text_bytes).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 0,
    }
}

/// A Jinja environment set up as in transformers; `now` is the current time in seconds since 1970.
fn environment(now: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment.set_formatter(|output, _, value| python::write(output, value));
    environment.set_unknown_method_callback(methods::call);
    environment.add_filter("tojson", tojson);
    filters::add(&mut environment);
    environment.add_filter(source::FORMAT, source::format);
    environment.add_function(source::TUPLE, |items: Rest<Value>| values::tuple(items.0));
    environment.add_function(source::DIVISOR, python::divisor);
    environment.add_function("range", values::range);
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment
        .add_function("raise_exception", |message: String| -> Result<Value, JinjaError> { Err(invalid(message)) });
    environment.add_function("strftime_now", move |format: String| date::strftime(&format, now).map_err(invalid));
    environment
}

/// The `tojson` filter of transformers: `json.dumps` without HTML escapes, with `ensure_ascii` off by default.
fn tojson(value: &Value, options: Kwargs) -> Result<String, JinjaError> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let layout = python::JsonLayout {
        indent,
        separators: match separators.as_deref() {
            None => None,
            Some([item, key]) => Some((item.clone(), key.clone())),
            Some(_) => return Err(invalid("tojson: separators must be two strings")),
        },
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    python::json(value, &layout)
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> JinjaError {
    JinjaError::new(ErrorKind::InvalidOperation, message)
}

/// Rejects a template that might nest more deeply than its thread's stack allows. Every level of syntax needs one of these
/// characters or words, so their number bounds the depth, even if some of them are inside strings or comments.
fn check_size(source: &str) -> Result<()> {
    let refuse = |message| Err(Error::ChatTemplate { message });
    if source.len() as u64 > MAX_TEMPLATE_BYTES {
        return refuse(format!("it has {} bytes: expected at most {MAX_TEMPLATE_BYTES}", source.len()));
    }
    let signs = source.bytes().filter(|byte| b"-+~|.*/%<>=!([{".contains(byte)).count();
    let words: usize = ["if", "or", "and", "not", "is", "in"].iter().map(|word| source.matches(word).count()).sum();
    match signs + words {
        0..=MAX_OPERATORS => Ok(()),
        count => refuse(format!("it has {count} operators: expected at most {MAX_OPERATORS}")),
    }
}

struct Capped {
    text: Vec<u8>,
    max_bytes: usize,
}

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.max_bytes {
            return Err(io::Error::other(format!("the conversation renders to more than {} bytes", self.max_bytes)));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failed(error: JinjaError) -> Error {
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
    Error::ChatTemplate { message: format!("{error}{cause}") }
}

#[cfg(test)]
mod published;
#[cfg(test)]
mod tests;
