//! The chat templates of a model's folder, one or several with names.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::{Map, Value};

use super::super::{ChatTemplate, Conversation};
use crate::error::{Error, Result};
use crate::untrusted::{self, MAX_TEMPLATE_BYTES};

/// Name of the template for conversations without tools.
const DEFAULT: &str = "default";
/// Name of the template for conversations with tools, if the model has one.
const WITH_TOOLS: &str = "tool_use";
/// Subfolder of a model's folder with named templates.
pub(crate) const FOLDER: &str = "additional_chat_templates";

/// The compiled chat templates of a model.
#[derive(Debug)]
pub(super) struct ChatTemplates {
    default: Option<ChatTemplate>,
    with_tools: Option<ChatTemplate>,
    /// Names of all templates, including those that are only selected by name.
    names: Vec<String>,
}

impl ChatTemplates {
    /// Reads and compiles the templates of a model's folder: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, else `chat_template`
    /// of `tokenizer_config.json`. `variables` are the special tokens.
    ///
    /// # Errors
    /// [`Error::BadFile`]; [`Error::ChatTemplate`] if a template does not compile.
    pub fn read(folder: &Path, config: &Value, variables: &BTreeMap<String, String>) -> Result<Option<Self>> {
        let mut sources = files(folder)?;
        if sources.is_empty() {
            sources = of_config(config)?;
        }
        let compile =
            |name: &str| sources.get(name).map(|source| ChatTemplate::new(source, variables.clone())).transpose();
        let templates = Self {
            default: compile(DEFAULT)?,
            with_tools: compile(WITH_TOOLS)?,
            names: sources.keys().cloned().collect(),
        };
        Ok(Some(templates).filter(|templates| !templates.names.is_empty()))
    }

    /// Adds variables that all templates may use.
    ///
    /// # Errors
    /// The errors of [`ChatTemplate::add_variables`].
    pub fn add_variables(&self, variables: &Map<String, Value>) -> Result<()> {
        [&self.default, &self.with_tools]
            .into_iter()
            .flatten()
            .try_for_each(|template| template.add_variables(variables))
    }

    /// Renders a conversation with the template that transformers chooses: the one named `tool_use` if there are tools and it exists.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if no template applies, or rendering fails.
    pub fn converse(&self, conversation: Conversation) -> Result<String> {
        let with_tools = self.with_tools.as_ref().filter(|_| !conversation.tools.is_null());
        let template = with_tools.or(self.default.as_ref()).ok_or_else(|| Error::ChatTemplate {
            message: format!(
                "the tokenizer has several templates, but none named '{DEFAULT}', which conversations need: the names \
                 are {}",
                self.names.join(", ")
            ),
        })?;
        template.converse(conversation)
    }

    /// The source of the template that is used with tools.
    pub fn source(&self) -> Option<&str> {
        self.with_tools.as_ref().or(self.default.as_ref()).map(ChatTemplate::source)
    }
}

fn files(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut paths = vec![(DEFAULT.to_owned(), folder.join("chat_template.jinja"))];
    for entry in folder.join(FOLDER).read_dir().into_iter().flatten() {
        let path = entry.map_err(Error::io(folder.join(FOLDER)))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".jinja"));
        paths.extend(name.map(str::to_owned).map(|name| (name, path.clone())));
    }
    let mut sources = BTreeMap::new();
    for (name, path) in paths {
        match untrusted::read_text(&path, MAX_TEMPLATE_BYTES) {
            Ok(source) => _ = sources.insert(name, source),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::bad_file(path, error.to_string())),
        }
    }
    Ok(sources)
}

fn of_config(template: &Value) -> Result<BTreeMap<String, String>> {
    let wrong = |value: &Value| Error::ChatTemplate {
        message: format!(
            "chat_template in tokenizer_config.json must be a text or a list of objects with name and template, got \
             {value}"
        ),
    };
    match template {
        Value::Null => Ok(BTreeMap::new()),
        Value::String(source) => Ok(BTreeMap::from([(DEFAULT.to_owned(), source.clone())])),
        Value::Array(named) => {
            let pair = |entry: &Value| {
                let (name, source) =
                    entry["name"].as_str().zip(entry["template"].as_str()).ok_or_else(|| wrong(entry))?;
                Ok((name.to_owned(), source.to_owned()))
            };
            named.iter().map(pair).collect()
        }
        other => Err(wrong(other)),
    }
}
