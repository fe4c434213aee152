//! Schemas of the functions that a model may call, by the environment of a row.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{Conversation, Message, Tokenizer};

/// The column that names a row's environment.
const COLUMN: &str = "environment";

/// JSON schemas of tools, lists as chat templates read them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolSchemas {
    /// Schemas for rows without an environment; null if there are no tools.
    tools: Value,
    /// By the environment's name, which is empty where all rows have the same one.
    environments: BTreeMap<String, Value>,
}

impl ToolSchemas {
    /// `tools` are those of all rows, or `environments` those of each environment, tools of all rows among them.
    pub fn new(tools: Value, environments: BTreeMap<String, Value>) -> Self {
        Self { tools, environments }
    }

    /// Whether the model may call nothing.
    pub fn is_empty(&self) -> bool {
        self.tools.is_null() && self.environments.is_empty()
    }

    /// Whether rows have environments.
    pub fn has_environments(&self) -> bool {
        !self.environments.is_empty()
    }

    /// Whether rows say which environment they have.
    pub fn are_named(&self) -> bool {
        self.has_environments() && !self.environments.contains_key("")
    }

    /// The name of a row's environment.
    ///
    /// # Errors
    /// The names that there are, for a row without one of them.
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

    /// The tools of a row.
    ///
    /// # Errors
    /// The errors of [`ToolSchemas::environment`].
    pub fn of_row(&self, columns: &Map<String, Value>) -> Result<&Value, String> {
        match self.has_environments() {
            true => Ok(&self.environments[self.environment(columns)?]),
            false => Ok(&self.tools),
        }
    }

    /// The tools of rows with the environment of this name; those of all rows where none has it.
    pub fn of_environment(&self, name: &str) -> &Value {
        self.environments.get(name).unwrap_or(&self.tools)
    }

    /// The tools of some row.
    pub fn of_any(&self) -> &Value {
        self.environments.values().next().unwrap_or(&self.tools)
    }

    /// Whether a prompt has nothing of the tools in it, as the model's chat template leaves them out.
    pub fn are_hidden(&self, tokenizer: &Tokenizer) -> bool {
        let conversation = Conversation::of(&[Message::user("")], true);
        let with_tools = Conversation { tools: self.of_any().clone(), ..conversation.clone() };
        let has_some = self.of_any().as_array().is_some_and(|tools| !tools.is_empty());
        has_some
            && matches!((tokenizer.converse(conversation), tokenizer.converse(with_tools)), (Ok(a), Ok(b)) if a == b)
    }

    /// A row's columns as `reset` gets them.
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
