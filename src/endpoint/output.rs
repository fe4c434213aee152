//! Request fields about the form of responses: log-probabilities and structured output.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::refusal::Refusal;
use crate::types::Structure;

/// Largest number of alternatives per sampled token.
const MAX_TOP_LOGPROBS: usize = 20;

/// The number of alternatives to report per sampled token; `None` if no log-probabilities are requested.
pub(super) fn logprobs(fields: &mut Fields, is_chat: bool) -> Result<Option<usize>, Refusal> {
    let name = if is_chat { "top_logprobs" } else { "logprobs" };
    let is_wanted = if is_chat { fields.take::<bool>("logprobs")?.unwrap_or(false) } else { true };
    let count: Option<usize> = fields.take(name)?;
    match count {
        Some(count) if count > MAX_TOP_LOGPROBS => {
            Err(Refusal::of(name, format!("expected at most {MAX_TOP_LOGPROBS}, not {count}")))
        }
        Some(1..) if !is_wanted => Err(Refusal::of(name, "expected logprobs: true as well")),
        None if is_chat => Ok(is_wanted.then_some(0)),
        count => Ok(count.filter(|_| is_wanted)),
    }
}

/// The structure that completions must follow, given under OpenAI's name or vLLM's newer or older names.
pub(super) fn structure(fields: &mut Fields) -> Result<Option<Structure>, Refusal> {
    let mut found = Vec::new();
    if let Some(format) = fields.take("response_format")? {
        found.extend(response_format(format)?.map(|structure| ("response_format", structure)));
    }
    if let Some(options) = fields.take("structured_outputs")? {
        found.push(("structured_outputs", structured_outputs(options)?));
    }
    for (name, key) in
        [("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"), ("guided_grammar", "grammar")]
    {
        if let Some(value) = fields.take::<Value>(name)? {
            found.push((name, of_key(name, key, value, false)?));
        }
    }
    match found.len() {
        0 | 1 => Ok(found.pop().map(|(_, structure)| structure)),
        _ => Err(Refusal::of(found[1].0, format!("only one structure per request: {} is given as well", found[0].0))),
    }
}

fn response_format(format: Value) -> Result<Option<Structure>, Refusal> {
    let name = "response_format";
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => of_key(name, "json_object", true.into(), false).map(Some),
        Some("json_schema") => {
            let schema = format["json_schema"].get("schema").cloned();
            let schema = schema.ok_or_else(|| Refusal::of(name, "expected json_schema: {name, schema}"))?;
            of_key(name, "json", schema, false).map(Some)
        }
        _ => Err(Refusal::of(name, "expected the type text, json_object or json_schema")),
    }
}

fn structured_outputs(mut options: Map<String, Value>) -> Result<Structure, Refusal> {
    let name = "structured_outputs";
    options.retain(|_, value| !value.is_null());
    let is_compact = options.remove("disable_any_whitespace").is_some_and(|value| value == true);
    let mut options = options.into_iter();
    match (options.next(), options.next()) {
        (Some((key, value)), None) => of_key(name, &key, value, is_compact),
        _ => Err(Refusal::of(name, "expected one of json, json_object, regex, choice and grammar")),
    }
}

/// A structure given by vLLM's key for its kind.
fn of_key(field: &str, key: &str, value: Value, is_compact: bool) -> Result<Structure, Refusal> {
    let text = |value: Value, expected: &str| match value {
        Value::String(text) if !text.is_empty() => Ok(text),
        _ => Err(Refusal::of(field, expected)),
    };
    match (key, value) {
        ("json", value @ Value::Object(_)) => Ok(Structure::Json { schema: value.to_string(), is_compact }),
        ("json", value) => Ok(Structure::Json { schema: text(value, "expected a JSON schema")?, is_compact }),
        ("json_object", Value::Bool(true)) => {
            Ok(Structure::Json { schema: json!({"type": "object"}).to_string(), is_compact })
        }
        ("regex", value) => Ok(Structure::Regex(text(value, "expected a regular expression")?)),
        ("grammar", value) => Ok(Structure::Grammar(text(value, "expected a grammar")?)),
        ("choice", value) => match serde_json::from_value::<Vec<String>>(value) {
            Ok(texts) if !texts.is_empty() => Ok(Structure::Choice(texts)),
            _ => Err(Refusal::of(field, "expected a list of texts to choose from")),
        },
        _ => Err(Refusal::of(field, format!("'{key}' is not supported"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::ask::ApiRequest;

    fn asked(more: &Value, is_chat: bool) -> Result<ApiRequest, Refusal> {
        let mut body = match is_chat {
            true => json!({"messages": [{"role": "user", "content": "a"}]}),
            false => json!({"prompt": "a"}),
        };
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ApiRequest::read(body.to_string().as_bytes(), is_chat)
    }

    #[test]
    fn logprobs_parameters_follow_openai() {
        let count = |more: Value, is_chat| asked(&more, is_chat).map(|ask| (ask.logprobs, ask.params.top_logprobs));
        assert_eq!(count(json!({}), true).unwrap(), (false, 0));
        assert_eq!(count(json!({"logprobs": true}), true).unwrap(), (true, 0));
        assert_eq!(count(json!({"logprobs": true, "top_logprobs": 20}), true).unwrap(), (true, 20));
        assert_eq!(count(json!({"logprobs": false, "top_logprobs": 0}), true).unwrap(), (false, 0));
        assert_eq!(count(json!({}), false).unwrap(), (false, 0));
        assert_eq!(count(json!({"logprobs": 0}), false).unwrap(), (true, 0));
        assert_eq!(count(json!({"logprobs": 5}), false).unwrap(), (true, 5));
        let refused = |more: Value, is_chat| asked(&more, is_chat).unwrap_err().param;
        assert_eq!(refused(json!({"logprobs": true, "top_logprobs": 21}), true).as_deref(), Some("top_logprobs"));
        assert_eq!(refused(json!({"top_logprobs": 3}), true).as_deref(), Some("top_logprobs"));
        assert_eq!(refused(json!({"logprobs": 21}), false).as_deref(), Some("logprobs"));
    }

    #[test]
    fn structured_output_is_accepted_under_all_known_names() {
        let structure = |more: Value| asked(&more, true).map(|ask| ask.params.structure);
        let json_of = |schema: &str, is_compact| Some(Structure::Json { schema: schema.to_owned(), is_compact });
        let schema = json!({"type": "integer"});
        for (more, expected) in [
            (json!({}), None),
            (json!({"response_format": {"type": "text"}}), None),
            (json!({"response_format": {"type": "json_object"}}), json_of(r#"{"type":"object"}"#, false)),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}),
                json_of(r#"{"type":"integer"}"#, false),
            ),
            (
                json!({"structured_outputs": {"json": schema, "regex": null, "disable_any_whitespace": true}}),
                json_of(r#"{"type":"integer"}"#, true),
            ),
            (
                json!({"structured_outputs": {"choice": ["a", "b"]}}),
                Some(Structure::Choice(vec!["a".into(), "b".into()])),
            ),
            (json!({"guided_regex": "a+"}), Some(Structure::Regex("a+".into()))),
            (json!({"guided_grammar": "start: \"a\""}), Some(Structure::Grammar("start: \"a\"".into()))),
        ] {
            assert_eq!(structure(more.clone()).unwrap(), expected, "{more}");
        }
        for (more, field) in [
            (json!({"response_format": {"type": "xml"}}), "response_format"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format"),
            (json!({"structured_outputs": {}}), "structured_outputs"),
            (json!({"structured_outputs": {"json": schema, "regex": "a"}}), "structured_outputs"),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_regex": "a", "guided_json": schema}), "guided_regex"),
        ] {
            assert_eq!(structure(more.clone()).unwrap_err().param.as_deref(), Some(field), "{more}");
        }
    }
}
