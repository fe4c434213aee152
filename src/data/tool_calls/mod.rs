//! Tool calls in what a model wrote, in the formats that models are trained on, under vLLM's names. Pure functions of a text; they
//! know nothing of requests, tools that run, or tokens.
//!
//! | file | what it is |
//! |---|---|
//! | `thoughts` | where a thought begins and ends: calls are looked for outside of thoughts alone |
//! | `json` | `hermes`, `llama3_json`, `mistral`: calls are JSON |
//! | `xml` | `qwen3_xml`: a tag for each argument |
//! | `glm` | `glm45`: two tags for each argument |
//! | `harmony` | `openai`: a message for each channel, calls those with a recipient |
//! | `pythonic` | `pythonic`: a list of Python calls |

mod glm;
mod harmony;
mod json;
mod pythonic;
#[cfg(test)]
mod tests;
mod thoughts;
mod xml;

use serde_json::Value;

use super::numbers::check_numbers;
pub use crate::config::ToolCallParser;
pub(crate) use thoughts::{ContentScan, open_thought};
use thoughts::{Outside, THOUGHTS, TextMark};

/// A function that the model wants to be called.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The function's name.
    pub name: String,
    /// Arguments of the call: a JSON object, unless the model wrote another JSON value.
    pub arguments: Value,
    /// The call's id, if the model wrote one, as Mistral's models do. The result is labelled with it.
    pub id: Option<String>,
}

impl ToolCall {
    /// A call without an id.
    pub(crate) fn new(name: impl Into<String>, arguments: impl Into<Value>) -> Self {
        Self { name: name.into(), arguments: arguments.into(), id: None }
    }
}

/// An assistant's message, split into text and tool calls.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParsedMessage {
    /// The text outside of calls; the whole text if no call was found. Of gpt-oss's messages their text, without markers.
    pub content: String,
    /// The tool calls in the order in which the model wrote them.
    pub tool_calls: Vec<ToolCall>,
    /// Why a part of the text that looks like a call could not be parsed.
    pub error: Option<String>,
}

impl ToolCallParser {
    /// The format of tool calls in a chat template; `None` if the template contains none.
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        let rules = [
            (has("<|channel|>commentary"), Self::OpenAi),
            (has("[TOOL_CALLS]"), Self::Mistral),
            (has("<function=") && has("<parameter="), Self::Qwen3Xml),
            (has("<tool_call>") && has("<arg_key>"), Self::Glm45),
            (has("<tool_call>"), Self::Hermes),
            (has("func_name1(") || has("params_name1="), Self::Pythonic),
            (has("<|python_tag|>") || has(r#"{"name": function name, "parameters":"#), Self::Llama3Json),
        ];
        rules.into_iter().find(|(holds, _)| *holds).map(|(_, parser)| parser)
    }

    /// Texts with which a call begins. Some are special tokens in their models' vocabularies, so a decoder may leave them out.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Glm45 => &["<tool_call>"],
            Self::Qwen3Xml => &["<tool_call>", "<function="],
            Self::Llama3Json => &["<|python_tag|>", "{"],
            Self::Pythonic => &["["],
            Self::Mistral => &["[TOOL_CALLS]"],
            Self::OpenAi => &[harmony::CHANNEL],
        }
    }

    /// Texts with which calls and thoughts begin and end. They must appear in the decoded text, even if they are special tokens.
    pub fn marks(self) -> impl Iterator<Item = &'static str> {
        let thoughts = THOUGHTS.iter().flat_map(|(open, end)| [*open, *end]);
        self.markers().iter().copied().chain(thoughts)
    }

    /// Parses a complete message. `tools`, a list of JSON schemas as in requests, provides the types of arguments in formats
    /// that write all values as text. `thought` is the marker that ends the thought opened by the prompt ([`open_thought`]).
    ///
    /// Calls within a thought are part of the thought, which is content. If one call cannot be parsed, the whole message is content, as in
    /// vLLM, and [`ParsedMessage::error`] says why.
    pub fn parse(self, text: &str, tools: &Value, thought: Option<&'static str>) -> ParsedMessage {
        let parsed = match self {
            Self::Hermes => blocks(text, thought, self, &|at| json::hermes(text, at)),
            Self::Qwen3Xml => blocks(text, thought, self, &|at| xml::call(text, at, tools)),
            Self::Glm45 => blocks(text, thought, self, &|at| glm::call(text, at, tools)),
            Self::Llama3Json => blocks(text, thought, self, &|at| json::llama3(text, at)),
            Self::Mistral => blocks(text, thought, self, &|at| json::mistral(text, at)),
            Self::OpenAi => blocks(text, thought, self, &|at| harmony::message(text, at)),
            Self::Pythonic => pythonic_list(text, thought),
        };
        match parsed.tool_calls.is_empty() {
            is_empty if self == Self::OpenAi && parsed.error.is_none() => {
                ParsedMessage { content: harmony::content(text, !is_empty), ..parsed }
            }
            true => ParsedMessage { content: text.to_owned(), ..parsed },
            false => parsed,
        }
    }
}

/// A part of a text that consists of calls, or in which no call may begin.
struct CallBlock {
    calls: Vec<ToolCall>,
    /// Byte offset of the end of the block.
    end: usize,
}

/// Why the text after a call's opening marker is not a call.
struct Unreadable {
    message: String,
    kind: UnreadableKind,
}

enum UnreadableKind {
    /// The text is a call, but malformed.
    Call,
    /// The call has no end. The text is content, unless a call follows.
    Open,
    /// The text up to this byte offset is content if the message has another call.
    Prose(usize),
}

impl Unreadable {
    fn call(message: String) -> Self {
        Self { message, kind: UnreadableKind::Call }
    }

    fn open(message: String) -> Self {
        Self { message, kind: UnreadableKind::Open }
    }

    fn prose(message: String, end: usize) -> Self {
        Self { message, kind: UnreadableKind::Prose(end) }
    }
}

/// Collects the calls that `read` parses at markers outside of thoughts.
fn blocks(
    text: &str,
    thought: Option<&'static str>,
    parser: ToolCallParser,
    read: &dyn Fn(usize) -> Result<CallBlock, Unreadable>,
) -> ParsedMessage {
    let is_anywhere = parser == ToolCallParser::Llama3Json; // text beside a call is dropped
    let markers = if is_anywhere { &["{"] } else { parser.markers() };
    let mut outside = Outside::new(text, thought);
    let (mut tool_calls, mut begin) = (Vec::new(), 0);
    let [mut of_call, mut of_open, mut of_prose] = [None, None, None];
    while let Some(mark) = outside.next(markers) {
        let TextMark::Call(at) = mark else {
            tool_calls.clear();
            (of_call, of_open, of_prose) = (None, None, None);
            continue;
        };
        match read(at) {
            Ok(block) => {
                if tool_calls.is_empty() {
                    begin = if is_anywhere { outside.thoughts_end } else { at };
                }
                tool_calls.extend(block.calls);
                outside.at = block.end;
                of_open = None;
            }
            Err(Unreadable { message, kind }) => {
                let error = match kind {
                    UnreadableKind::Call => &mut of_call,
                    UnreadableKind::Open => &mut of_open,
                    UnreadableKind::Prose(end) => {
                        outside.at = end;
                        &mut of_prose
                    }
                };
                error.get_or_insert(message);
            }
        }
    }
    let error = of_call.or(of_open).or(of_prose.filter(|_| tool_calls.is_empty()));
    match error {
        Some(_) => ParsedMessage { error, ..ParsedMessage::default() },
        None => ParsedMessage { content: text[..begin].to_owned(), tool_calls, error },
    }
}

/// Parses a message that consists of a list of Python calls, apart from thoughts before it.
fn pythonic_list(text: &str, thought: Option<&'static str>) -> ParsedMessage {
    let mut outside = Outside::new(text, thought);
    let mut first = None;
    while let Some(mark) = outside.next(&["["]) {
        let begins = |at: usize| text[outside.thoughts_end..at].trim().is_empty();
        match mark {
            TextMark::Call(at) if first.is_none() && begins(at) => {
                let parsed = pythonic::parse(&text[at..]);
                let is_read = !parsed.tool_calls.is_empty() && parsed.error.is_none();
                first = Some(ParsedMessage { content: text[..outside.thoughts_end].to_owned(), ..parsed });
                if is_read {
                    break;
                }
            }
            TextMark::Call(_) => {}
            TextMark::EndOfThought => first = None,
        }
    }
    first.unwrap_or_default()
}

/// Converts a JSON object to a call; its arguments are under one of `keys`.
fn call_of(mut object: Value, keys: &[&str]) -> Result<ToolCall, String> {
    let fields = object.as_object_mut().ok_or("expected an object with a name and arguments")?;
    let arguments = keys.iter().find_map(|key| fields.remove(*key));
    let arguments = arguments.ok_or_else(|| format!("no '{}' next to the function's name", keys[0]))?;
    let id = fields.remove("id").and_then(|id| id.as_str().map(str::to_owned));
    match fields.remove("name") {
        Some(Value::String(name)) if !name.is_empty() => Ok(ToolCall { name, arguments: decoded(arguments)?, id }),
        _ => Err("no 'name' of a function".to_owned()),
    }
}

/// Arguments as a JSON value. If the model wrote them as a string, its JSON is parsed.
fn decoded(arguments: Value) -> Result<Value, String> {
    let parsed = arguments.as_str().and_then(|text| Some((serde_json::from_str(text).ok()?, text)));
    match parsed {
        Some((object @ Value::Object(_), text)) => check_numbers(&object, text).map(|()| object),
        _ => Ok(arguments),
    }
}
