//! Tool calls in an answer: content is sent as it comes, calls when the answer has ended.

use std::hash::{BuildHasher, RandomState};

use serde_json::{Value, json};

use crate::data::{ToolCall, ToolCallParser};

/// Length of a call's number; Mistral's templates ask for exactly this.
const ID_LEN: usize = 9;

/// A message that may have calls, as it grows.
#[derive(Debug)]
pub(super) struct MessageStream {
    parser: ToolCallParser,
    tools: Value,
    text: String,
    num_sent: usize,
}

impl MessageStream {
    /// An answer to a request with `tools`.
    pub fn new(parser: ToolCallParser, tools: Value) -> Self {
        Self { parser, tools, text: String::new(), num_sent: 0 }
    }

    /// Takes in text and returns what is content, whatever follows.
    pub fn push(&mut self, text: &str) -> String {
        self.text += text;
        let end = self.parser.num_certain(&self.text).max(self.num_sent);
        self.text[std::mem::replace(&mut self.num_sent, end)..end].to_owned()
    }

    /// Returns the content that is left, and the calls, once the message has ended.
    pub fn finish(&mut self) -> (String, Vec<Value>) {
        let parsed = self.parser.parse(&self.text, &self.tools);
        let content = parsed.content.get(self.num_sent..).unwrap_or_default().to_owned();
        (content, parsed.tool_calls.iter().map(call).collect())
    }
}

/// A call in OpenAI's form, with a number that no other has.
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

    /// Content in the pieces that are sent, and names and arguments of calls.
    fn stream(parser: ToolCallParser, pieces: &[&str]) -> (Vec<String>, Vec<(String, String)>) {
        let mut stream = MessageStream::new(parser, Value::Null);
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
    fn content_streams_until_a_call_begins() {
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
