//! Access to the fields of a request body.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::refusal::Refusal;

/// Fields that do not affect the completion.
const WITHOUT_EFFECT: [&str; 9] = [
    "user",
    "store",
    "metadata",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
    "priority",
];
/// Fields of a request body that have not been read yet.
pub(super) struct Fields(pub Map<String, Value>);

impl Fields {
    /// Removes a field and returns its value; `None` if it is absent or null.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, Refusal> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                serde_json::from_value(value).map(Some).map_err(|error| Refusal::of_type(name, &error.to_string()))
            }
        }
    }

    /// Removes a field that has two alternative names, and returns its value.
    pub fn one_of<T: DeserializeOwned>(&mut self, names: [&str; 2]) -> Result<Option<T>, Refusal> {
        let [first, second] = names.map(|name| self.take(name));
        Ok(first?.or(second?))
    }

    /// Returns an error if any field was not read.
    pub fn end(mut self) -> Result<(), Refusal> {
        WITHOUT_EFFECT.iter().for_each(|name| drop(self.0.remove(*name)));
        match self.0.keys().next() {
            Some(name) => Err(Refusal::of(name, "this field is not supported")),
            None => Ok(()),
        }
    }
}
