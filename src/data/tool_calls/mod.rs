//! Tool calls in what a model wrote, in the formats that models are trained on, under vLLM's names. Pure functions of a text; they
//! know nothing of requests, tools that run, or tokens.
//!
//! | file | formats |
//! |---|---|
//! | `json` | `hermes`, `llama3_json`, `mistral`: calls are JSON |
//! | `xml` | `qwen3_xml`: a tag for each argument |
//! | `pythonic` | `pythonic`: a list of Python calls |

mod json;
mod pythonic;
#[cfg(test)]
mod tests;
mod xml;

use serde_json::Value;

pub use crate::config::ToolCallParser;

/// A function that the model wants to be called.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The function's name.
    pub name: String,
    /// Arguments of the call: an object, unless the model wrote something else.
    pub arguments: Value,
}

/// An assistant's text, taken apart.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParsedMessage {
    /// The text beside the calls; all of it where no call was found.
    pub content: String,
    /// In the order in which they were written.
    pub tool_calls: Vec<ToolCall>,
    /// Why something that looks like a call is none.
    pub error: Option<String>,
}

impl ToolCallParser {
    /// The format that a chat template asks the model for; `None` where it shows none.
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        let rules = [
            (has("[TOOL_CALLS]"), Self::Mistral),
            (has("<function=") && has("<parameter="), Self::Qwen3Xml),
            (has("<tool_call>") && !has("<arg_key>"), Self::Hermes),
            (has("func_name1(") || has("params_name1="), Self::Pythonic),
            (has("<|python_tag|>") || has(r#"{"name": function name, "parameters":"#), Self::Llama3Json),
        ];
        rules.into_iter().find(|(holds, _)| *holds).map(|(_, parser)| parser)
    }

    /// Texts that a call begins with. Some are special tokens in their models' vocabularies, which a decoder may leave out.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>"],
            Self::Qwen3Xml => &["<tool_call>", "<function="],
            Self::Llama3Json => &["<|python_tag|>", "{"],
            Self::Pythonic => &["["],
            Self::Mistral => &["[TOOL_CALLS]"],
        }
    }

    /// Takes a whole message apart. `tools`, a list of JSON schemas as requests have it, gives the types of arguments in formats
    /// that write all of them as text.
    ///
    /// A message with a call that cannot be read is all content, as in vLLM. [`ParsedMessage::error`] says why.
    pub fn parse(self, text: &str, tools: &Value) -> ParsedMessage {
        let parsed = match self {
            Self::Hermes => json::hermes(text),
            Self::Qwen3Xml => xml::parse(text, tools),
            Self::Llama3Json => json::llama3(text),
            Self::Pythonic => Ok(pythonic::parse(text)),
            Self::Mistral => json::mistral(text),
        };
        let parsed = parsed.unwrap_or_else(|error| ParsedMessage { error: Some(error), ..ParsedMessage::default() });
        match parsed.tool_calls.is_empty() {
            true => ParsedMessage { content: text.to_owned(), ..parsed },
            false => parsed,
        }
    }

    /// Bytes of a growing message that are content whatever follows.
    pub fn num_certain(self, text: &str) -> usize {
        if self == Self::Pythonic {
            let trimmed = text.trim_start(); // a call is the whole message
            return if trimmed.is_empty() || trimmed.starts_with('[') { 0 } else { text.len() };
        }
        let found = self.markers().iter().filter_map(|marker| text.find(marker)).min();
        let may_begin = |at: usize| self.markers().iter().any(|marker| marker.starts_with(&text[at..]));
        let starts = || text.char_indices().rev().map(|(at, _)| at).take_while(|at| text.len() - at < 16);
        found.unwrap_or_else(|| starts().filter(|at| may_begin(*at)).last().unwrap_or(text.len()))
    }
}

/// A call from an object with a name and arguments under one of `keys`.
fn call_of(mut object: Value, keys: &[&str]) -> Result<ToolCall, String> {
    let fields = object.as_object_mut().ok_or("expected an object with a name and arguments")?;
    let arguments = keys.iter().find_map(|key| fields.remove(*key));
    let arguments = arguments.ok_or_else(|| format!("no '{}' beside the function's name", keys[0]))?;
    match fields.remove("name") {
        Some(Value::String(name)) if !name.is_empty() => Ok(ToolCall { name, arguments: decoded(arguments) }),
        _ => Err("no 'name' of a function".to_owned()),
    }
}

/// Arguments that the model has already written as a text of JSON.
fn decoded(arguments: Value) -> Value {
    match arguments.as_str().map(serde_json::from_str) {
        Some(Ok(object @ Value::Object(_))) => object,
        _ => arguments,
    }
}
