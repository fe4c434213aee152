//! Schemas of the functions that a model may call, for each environment.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{Conversation, Message, Tokenizer};

/// The column that names a row's environment.
const COLUMN: &str = "environment";

/// JSON schemas of the tools of each environment, as lists that chat templates read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolSchemas {
    /// Schemas for rows without an environment; null without tools.
    tools: Value,
    /// Schemas by environment name. The name is empty if all rows have the same environment.
    environments: BTreeMap<String, Value>,
}

impl ToolSchemas {
    /// `tools` applies to all rows. `environments` gives the schemas of each environment, including `tools`.
    pub fn new(tools: Value, environments: BTreeMap<String, Value>) -> Self {
        Self { tools, environments }
    }

    /// Whether the model has no tools to call.
    pub fn is_empty(&self) -> bool {
        self.tools.is_null() && self.environments.is_empty()
    }

    /// Whether rows have environments.
    pub fn has_environments(&self) -> bool {
        !self.environments.is_empty()
    }

    /// Whether each row names its environment.
    pub fn are_named(&self) -> bool {
        self.has_environments() && !self.environments.contains_key("")
    }

    /// The name of a row's environment.
    ///
    /// # Errors
    /// A message with the known names, if the row names none of them.
    pub fn environment<'a>(&self, columns: &'a Map<String, Value>) -> Result<&'a str, String> {
        if !self.are_named() {
            return Ok("");
        }
        let name = columns.get(COLUMN).and_then(Value::as_str);
        name.filter(|name| self.environments.contains_key(*name)).ok_or_else(|| {
            let names: Vec<&str> = self.environments.keys().map(String::as_str).collect();
            let got = columns.get(COLUMN).map_or_else(|| "nothing".to_owned(), Value::to_string);
            format!("column '{COLUMN}': expected one of {}, got {got}", names.join(", "))
        })
    }

    /// The schemas of the tools available in a row.
    ///
    /// # Errors
    /// The errors of [`ToolSchemas::environment`].
    pub fn of_row(&self, columns: &Map<String, Value>) -> Result<&Value, String> {
        match self.has_environments() {
            true => Ok(&self.environments[self.environment(columns)?]),
            false => Ok(&self.tools),
        }
    }

    /// The schemas for rows with the environment `name`; those for all rows if no environment has this name.
    pub fn of_environment(&self, name: &str) -> &Value {
        self.environments.get(name).unwrap_or(&self.tools)
    }

    /// The schemas for an arbitrary row.
    pub fn of_any(&self) -> &Value {
        self.environments.values().next().unwrap_or(&self.tools)
    }

    /// Whether the model's chat template does not show the tools in a prompt.
    pub fn are_hidden(&self, tokenizer: &Tokenizer) -> bool {
        let conversation = Conversation::of(&[Message::user("")], true);
        let with_tools = Conversation { tools: self.of_any().clone(), ..conversation.clone() };
        let has_some = self.of_any().as_array().is_some_and(|tools| !tools.is_empty());
        has_some
            && matches!((tokenizer.converse(conversation), tokenizer.converse(with_tools)), (Ok(a), Ok(b)) if a == b)
    }

    /// The row's columns that are passed to the environment's `reset`.
    pub fn reset_columns(&self, columns: &Map<String, Value>) -> Map<String, Value> {
        let mut columns = columns.clone();
        if self.are_named() {
            columns.remove(COLUMN);
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_get_the_tool_schemas_of_their_environment() {
        let row = |value: Value| value.as_object().unwrap().clone();
        let named = |names: &[&str]| names.iter().map(|name| (name.to_string(), json!([name]))).collect();
        let table = ToolSchemas::new(json!([]), named(&["code", "game"]));
        let of_game = row(json!({"environment": "game", "x": 1}));
        assert_eq!(table.of_row(&of_game).unwrap(), &json!(["game"]));
        assert_eq!((table.of_environment("game"), table.of_environment("")), (&json!(["game"]), &json!([])));
        assert_eq!(Value::from(table.reset_columns(&of_game)), json!({"x": 1}));
        for wrong in [json!({}), json!({"environment": "chess"}), json!({"environment": 1})] {
            let message = table.of_row(&row(wrong)).unwrap_err();
            assert!(message.contains("expected one of code, game, got "), "{message}");
        }
        let single = ToolSchemas::new(Value::Null, named(&[""]));
        assert_eq!((single.of_row(&of_game).unwrap(), single.are_named()), (&json!([""]), false));
        assert_eq!(single.reset_columns(&of_game), of_game);
        assert!(ToolSchemas::default().is_empty() && ToolSchemas::default().of_row(&of_game).unwrap().is_null());
    }
}
