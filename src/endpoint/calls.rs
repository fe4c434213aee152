//! The tools of a request, and tool calls in a response. Content is sent as it is generated, calls when the response has ended.

use std::hash::{BuildHasher, RandomState};

use serde_json::{Value, json};

use super::refusal::Refusal;
use crate::data::{ContentScan, ToolCall, ToolCallParser};

/// Length of a tool call's id. Mistral's templates require exactly this length.
const ID_LEN: usize = 9;

/// The functions of a request without null fields. A value that is not a list of functions in OpenAI's format is an error that names the field.
pub(super) fn read_tools(mut tools: Value) -> Result<Value, Refusal> {
    if !tools.is_null() && !tools.is_array() {
        return Err(Refusal::of("tools", "expected a list of functions"));
    }
    for (index, tool) in tools.as_array_mut().into_iter().flatten().enumerate() {
        if let Some(fields) = tool.as_object_mut() {
            fields.retain(|_, value| !value.is_null());
        }
        if let Some(fields) = tool.get_mut("function").and_then(Value::as_object_mut) {
            fields.retain(|_, value| !value.is_null());
        }
        let function = &tool["function"];
        let is_text = |value: &Value| value.is_null() || value.is_string();
        let fields = [
            ("", tool.is_object(), "an object with a function"),
            (".type", tool["type"].is_null() || tool["type"] == "function", "\"function\""),
            (".function", function.is_object(), "an object with a name"),
            (".function.name", function["name"].as_str().is_some_and(|name| !name.is_empty()), "a text"),
            (".function.description", is_text(&function["description"]), "a text"),
            (
                ".function.parameters",
                function["parameters"].is_null() || function["parameters"].is_object(),
                "an object",
            ),
        ];
        if let Some((field, _, expected)) = fields.into_iter().find(|(_, is_right, _)| !is_right) {
            return Err(Refusal::of(&format!("tools[{index}]{field}"), format!("expected {expected}")));
        }
    }
    Ok(tools)
}

/// A growing message that may contain tool calls.
#[derive(Debug)]
pub(super) struct MessageStream {
    parser: ToolCallParser,
    tools: Value,
    /// The marker that ends the thought opened by the prompt.
    thought: Option<&'static str>,
    text: String,
    scan: ContentScan,
    num_sent: usize,
}

impl MessageStream {
    /// A response to a request with `tools`. If the prompt has opened a thought, `thought` is the marker that ends it.
    pub fn new(parser: ToolCallParser, tools: Value, thought: Option<&'static str>) -> Self {
        let scan = ContentScan::new(parser, thought);
        Self { parser, tools, thought, text: String::new(), scan, num_sent: 0 }
    }

    /// Appends text and returns the part that is certainly content, whatever follows.
    pub fn push(&mut self, text: &str) -> String {
        self.text += text;
        let end = self.scan.advance(&self.text).max(self.num_sent);
        self.text[std::mem::replace(&mut self.num_sent, end)..end].to_owned()
    }

    /// Returns the remaining content and the tool calls after the message has ended.
    pub(super) fn finish(&mut self) -> (String, Vec<Value>) {
        let parsed = self.parser.parse(&self.text, &self.tools, self.thought);
        let content = parsed.content.get(self.num_sent..).unwrap_or_default().to_owned();
        (content, parsed.tool_calls.iter().map(call).collect())
    }
}

/// A tool call in OpenAI's format, with a random id.
fn call(call: &ToolCall) -> Value {
    let mut number = RandomState::new().hash_one(&call.name);
    let digit = |_| {
        let digit = char::from_digit((number % 36) as u32, 36).expect("below 36");
        number /= 36;
        digit
    };
    let id: String = (0..ID_LEN).map(digit).collect();
    let function = json!({"name": call.name, "arguments": call.arguments.to_string()});
    json!({"id": id, "type": "function", "function": function})
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams the pieces. Returns the pieces of content that are sent, and names and arguments of tool calls.
    fn stream(parser: ToolCallParser, pieces: &[&str]) -> (Vec<String>, Vec<(String, String)>) {
        let mut stream = MessageStream::new(parser, Value::Null, None);
        let mut content: Vec<String> = pieces.iter().map(|piece| stream.push(piece)).collect();
        let (rest, calls) = stream.finish();
        content.push(rest);
        content.retain(|piece| !piece.is_empty());
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        assert!(calls.iter().all(|call| text(&call["id"]).len() == ID_LEN && call["type"] == "function"));
        let parts = |call: &Value| (text(&call["function"]["name"]), text(&call["function"]["arguments"]));
        (content, calls.iter().map(parts).collect())
    }

    fn owned(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn malformed_tool_definitions_are_refused_by_field() {
        let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
        for right in
            [json!(null), json!([]), json!([{"type": "function", "function": function}, {"function": {"name": "f"}}])]
        {
            assert_eq!(read_tools(right.clone()), Ok(right));
        }
        let padded =
            json!([{"type": null, "function": {"name": "f", "description": null, "strict": null}, "more": null}]);
        assert_eq!(read_tools(padded).unwrap(), json!([{"function": {"name": "f"}}]));
        let with = |field: &str, value: Value| {
            let mut function = function.clone();
            function[field] = value;
            json!([{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": function}])
        };
        for (wrong, field) in [
            (json!({}), "tools"),
            (json!("f"), "tools"),
            (json!([3]), "tools[0]"),
            (json!([{"type": "web_search"}]), "tools[0].type"),
            (json!([{"type": 3, "function": function}]), "tools[0].type"),
            (json!([{"type": "function"}]), "tools[0].function"),
            (json!([{"type": "function", "function": "f"}]), "tools[0].function"),
            (json!([{"type": "function", "name": "f"}]), "tools[0].function"),
            (with("name", json!(null)), "tools[1].function.name"),
            (with("name", json!("")), "tools[1].function.name"),
            (with("description", json!(3)), "tools[1].function.description"),
            (with("parameters", json!([])), "tools[1].function.parameters"),
        ] {
            let refusal = read_tools(wrong.clone()).unwrap_err();
            assert_eq!((refusal.status, refusal.param.as_deref()), (400, Some(field)), "{wrong}");
        }
    }

    #[test]
    fn content_is_streamed_until_a_tool_call_begins() {
        let call = |name: &str, arguments: &str| (name.to_owned(), arguments.to_owned());
        let pieces =
            ["I ", "see <", "b>. <tool_", "call>{\"name\": \"f\", ", "\"arguments\": {\"a\": [1]}}</tool", "_call> !"];
        let expected = (owned(&["I ", "see ", "<b>. "]), vec![call("f", "{\"a\":[1]}")]);
        assert_eq!(stream(ToolCallParser::Hermes, &pieces), expected);
        let cut = ["no <tool", "_call>{\"name\""];
        assert_eq!(stream(ToolCallParser::Hermes, &cut), (owned(&["no ", "<tool_call>{\"name\""]), vec![]));
        assert_eq!(stream(ToolCallParser::Pythonic, &["[f(", "a='b')]"]).1, [call("f", "{\"a\":\"b\"}")]);
        assert_eq!(
            stream(ToolCallParser::Llama3Json, &["{\"name\": \"f\",", "\"parameters\": {}}"]).1,
            [call("f", "{}")]
        );
    }
}
