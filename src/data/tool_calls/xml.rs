//! Calls with a tag for each argument, whose values are plain text: their types are those of the tool's schema.

use serde_json::{Map, Number, Value};

use super::{ParsedMessage, ToolCall};

const FUNCTION: &str = "<function=";
const PARAMETER: &str = "<parameter=";

/// Functions with their closing tags; `<tool_call>` around them is not asked for.
pub(super) fn parse(text: &str, tools: &Value) -> Result<ParsedMessage, String> {
    let begin = ["<tool_call>", FUNCTION].iter().filter_map(|tag| text.find(tag)).min().unwrap_or(text.len());
    let mut parsed = ParsedMessage { content: text[..begin].to_owned(), ..ParsedMessage::default() };
    let mut functions = text[begin..].split(FUNCTION);
    if begin < text.len() && !text[begin..].contains(FUNCTION) {
        return Err("a <tool_call> without <function=NAME>".to_owned());
    }
    functions.next();
    for function in functions {
        let (name, body) = function.split_once('>').ok_or("a <function= without its end '>'")?;
        let name = name.trim();
        if name.is_empty() || name.contains(['<', '\n']) {
            return Err("a <function=> without a name".to_owned());
        }
        let (body, _) = body.split_once("</function>").ok_or_else(|| format!("no </function> of '{name}'"))?;
        parsed.tool_calls.push(ToolCall { name: name.to_owned(), arguments: arguments(name, body, tools)?.into() });
    }
    Ok(parsed)
}

fn arguments(function: &str, body: &str, tools: &Value) -> Result<Map<String, Value>, String> {
    let mut arguments = Map::new();
    for parameter in body.split(PARAMETER).skip(1) {
        let (name, text) = parameter.split_once('>').ok_or("a <parameter= without its end '>'")?;
        let text = text.rsplit_once("</parameter>").map_or(text.trim_end(), |(text, _)| text);
        let text = text.strip_prefix('\n').unwrap_or(text);
        let text = text.strip_suffix('\n').unwrap_or(text);
        arguments.insert(name.trim().to_owned(), typed(text, schema_type(function, name.trim(), tools)));
    }
    Ok(arguments)
}

/// The type that a tool's schema gives a parameter.
fn schema_type<'a>(function: &str, parameter: &str, tools: &'a Value) -> Option<&'a str> {
    let functions = tools.as_array()?.iter().map(|tool| tool.get("function").unwrap_or(tool));
    let schema = functions.filter(|tool| tool["name"] == function).find_map(|tool| {
        let properties = tool["parameters"].get("properties").unwrap_or(&tool["parameters"]);
        properties.get(parameter)
    })?;
    let first = |types: &'a Vec<Value>| types.iter().filter_map(Value::as_str).find(|kind| *kind != "null");
    schema["type"].as_str().or_else(|| schema["type"].as_array().and_then(first))
}

/// A value by its type; the text itself where it is no value of that type, as in vLLM.
fn typed(text: &str, kind: Option<&str>) -> Value {
    if text.trim().eq_ignore_ascii_case("null") {
        return Value::Null;
    }
    let number = |text: &str| text.parse::<i64>().map(Number::from).ok();
    let float = |text: &str| text.parse().ok().and_then(Number::from_f64);
    let value = match kind.unwrap_or("string") {
        "integer" | "int" => number(text.trim()).map(Value::Number),
        "number" | "float" => number(text.trim()).or_else(|| float(text.trim())).map(Value::Number),
        "boolean" | "bool" => match text.trim().to_ascii_lowercase().as_str() {
            "true" => Some(true.into()),
            "false" => Some(false.into()),
            _ => None,
        },
        "object" | "array" => serde_json::from_str(text).ok(),
        _ => None,
    };
    value.unwrap_or_else(|| text.into())
}
