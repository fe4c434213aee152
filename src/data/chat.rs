//! Chat templates: Jinja from the model's folder, rendered as transformers renders it but without files, without
//! loops that do not end and without unbounded output.

use std::collections::BTreeMap;
use std::io;

use minijinja::value::Kwargs;
use minijinja::{Environment, Error as JinjaError, ErrorKind, Value, context};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::date;
use crate::error::{Error, Result};

/// Jinja instructions that one conversation may take.
const FUEL: u64 = 1_000_000;
/// Widest indentation of `tojson`.
const MAX_INDENT: usize = 64;
/// Longest rendered conversation.
const MAX_OUTPUT_BYTES: usize = 4 << 20;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A user's turn.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".to_owned(), content: content.into() }
    }
}

/// A compiled chat template with the special tokens it may name.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Compiles `source`; `special_tokens` (`bos_token` → `<s>` ..) become its variables. `strftime_now` gives the time
    /// of this call, or of `SOURCE_DATE_EPOCH` (seconds since 1970) where that is set.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] with the line that does not compile.
    pub fn new(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        let now = date::now_s()?;
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", move |format: String| {
            date::strftime(&format, now).map_err(|message| JinjaError::new(ErrorKind::InvalidOperation, message))
        });
        let template = Self { environment, source: without_generation_tags(source), special_tokens };
        template.environment.template_from_named_str("chat_template", &template.source).map_err(failed)?;
        Ok(template)
    }

    /// The conversation as text; with `add_generation_prompt` it ends where the assistant's answer begins.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template refuses the conversation, runs out of fuel or writes too much.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let template = self.environment.template_from_named_str("chat_template", &self.source).map_err(failed)?;
        let variables = context! {
            messages,
            add_generation_prompt,
            tools => (),
            documents => (),
            ..Value::from_serialize(&self.special_tokens)
        };
        let mut output = Capped(Vec::new());
        template.render_captured_to(variables, &mut output).map_err(failed)?;
        String::from_utf8(output.0).map_err(|error| Error::ChatTemplate { message: error.to_string() })
    }
}

/// transformers' `tojson`: no HTML escapes, Python's spacing.
fn tojson(value: &Value, options: Kwargs) -> Result<String, JinjaError> {
    let indent: Option<usize> = options.get("indent")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if indent.is_some_and(|width| width > MAX_INDENT) {
        let message = format!("tojson: indent of more than {MAX_INDENT} is too large");
        return Err(JinjaError::new(ErrorKind::InvalidOperation, message));
    }
    if ensure_ascii == Some(true) {
        return Err(JinjaError::new(ErrorKind::InvalidOperation, "tojson: ensure_ascii=true is not supported"));
    }
    let mut output = Vec::new();
    let spaces = " ".repeat(indent.unwrap_or(0));
    let written = match indent {
        Some(_) => value
            .serialize(&mut Serializer::with_formatter(&mut output, PrettyFormatter::with_indent(spaces.as_bytes()))),
        None => value.serialize(&mut Serializer::with_formatter(&mut output, PythonFormatter)),
    };
    written.map_err(|error| JinjaError::new(ErrorKind::InvalidOperation, error.to_string()))?;
    String::from_utf8(output).map_err(|error| JinjaError::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// `json.dumps`' separators: a blank after commas and colons.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.begin_array_value(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// `{% generation %}` marks the assistant's tokens for loss masks in transformers; here it is a block that always runs.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        match tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+', ' ', '\t', '\n']) {
            "generation" => text.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => text.push_str(&tag.replace("endgeneration", "endif")),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text + rest
}

struct Capped(Vec<u8>);

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::other(format!("the conversation renders to more than {MAX_OUTPUT_BYTES} bytes")));
        }
        self.0.extend_from_slice(bytes);
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
mod tests;
