//! Parses request bodies field by field. A field that is not supported is an error that names it, so that no setting is silently ignored.
//! Fields that do not affect tokens are ignored.

use std::fmt;

use serde_json::{Map, Value};

use super::calls::read_tools;
use super::fields::Fields;
use super::output::{logprobs, structure};
use super::refusal::Refusal;
use crate::data::{Conversation, check_numbers, read_message};
use crate::rollout::ParamFault;
use crate::types::SamplingParams;

/// Largest number of completions in one request.
const MAX_CHOICES: usize = 1024;
/// Largest number of JSON values in a conversation and its tools. Rendering the template copies each of them.
const MAX_VALUES: usize = 100_000;
/// Default `max_tokens` of `/v1/completions`, as in OpenAI and vLLM.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A prompt in the form in which a client sent it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum PromptSource {
    Text(String),
    Ids(Vec<u32>),
    Conversation(Conversation),
}

/// A parsed request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ApiRequest {
    pub is_chat: bool,
    pub model: Option<String>,
    pub prompts: Vec<PromptSource>,
    pub params: SamplingParams,
    /// Largest number of tokens of a completion; `None` means as many as fit.
    pub max_tokens: Option<usize>,
    /// Whether the client gave a seed.
    pub has_seed: bool,
    pub streams: bool,
    pub include_usage: bool,
    pub logprobs: bool,
    pub return_token_ids: bool,
}

impl ApiRequest {
    /// Parses a request body.
    #[cfg(test)]
    pub fn read(body: &[u8], is_chat: bool) -> Result<Self, Refusal> {
        Self::read_with(body, is_chat, &SamplingParams::default())
    }

    /// Parses a request body; `defaults` are used for absent sampling fields.
    pub fn read_with(body: &[u8], is_chat: bool, defaults: &SamplingParams) -> Result<Self, Refusal> {
        let wrong =
            |error: &dyn fmt::Display| Refusal::new(400, format!("the request body is not a JSON object: {error}"));
        let text = std::str::from_utf8(body).map_err(|error| wrong(&error))?;
        let body: Value = serde_json::from_str(text).map_err(|error| wrong(&error))?;
        check_numbers(&body, text).map_err(|error| Refusal::new(400, error))?;
        let Value::Object(mut body) = body else { return Err(wrong(&"expected {..}")) };
        body.retain(|_, value| !value.is_null());
        let mut fields = Fields(body);
        let prompts = if is_chat { vec![conversation(&mut fields)?] } else { texts(&mut fields)? };
        let params = sampling(&mut fields, defaults)?;
        if params.num_generations.saturating_mul(prompts.len()) > MAX_CHOICES {
            return Err(Refusal::of("n", format!("expected at most {MAX_CHOICES} completions in one request")));
        }
        let max_tokens = fields.one_of(["max_completion_tokens", "max_tokens"])?;
        let include_usage = stream_options(&mut fields)?;
        let seed: Option<i64> = fields.take("seed")?;
        let logprobs = logprobs(&mut fields, is_chat)?;
        let ask = Self {
            is_chat,
            model: fields.take("model")?,
            prompts,
            params: SamplingParams {
                seed: seed.map_or(0, |seed| seed as u64),
                top_logprobs: logprobs.unwrap_or(0),
                structure: structure(&mut fields)?,
                ..params
            },
            max_tokens: if is_chat { max_tokens } else { max_tokens.or(Some(DEFAULT_MAX_TOKENS)) },
            has_seed: seed.is_some(),
            streams: fields.take("stream")?.unwrap_or(false),
            include_usage,
            logprobs: logprobs.is_some(),
            return_token_ids: fields.take("return_token_ids")?.unwrap_or(false),
        };
        refuse_unserved(&mut fields)?;
        fields.end()?;
        Ok(ask)
    }
}

impl ApiRequest {
    /// Functions that the model may call; `Null` if there are none.
    pub fn tools(&self) -> &Value {
        match &self.prompts[..] {
            [PromptSource::Conversation(conversation)] => &conversation.tools,
            _ => &Value::Null,
        }
    }

    /// A request that was not sent by a client, with the sampling parameters `params`.
    pub fn of_source(source: PromptSource, params: SamplingParams) -> Self {
        Self {
            is_chat: true,
            model: None,
            prompts: vec![source],
            params,
            max_tokens: None,
            has_seed: true,
            streams: true,
            include_usage: false,
            logprobs: false,
            return_token_ids: false,
        }
    }
}

fn sampling(fields: &mut Fields, defaults: &SamplingParams) -> Result<SamplingParams, Refusal> {
    let stop = match fields.take("stop")? {
        None => defaults.stop.clone(),
        Some(Value::String(stop)) => vec![stop],
        Some(other) => {
            serde_json::from_value(other).map_err(|_| Refusal::of("stop", "expected a string or a list of strings"))?
        }
    };
    if stop.len() > 64 || stop.iter().any(|stop: &String| stop.is_empty() || stop.len() > 1024) {
        return Err(Refusal::of("stop", "expected at most 64 strings of 1 to 1024 bytes"));
    }
    let top_k: Option<i64> = fields.take("top_k")?;
    let min_p: Option<f32> = fields.take("min_p")?.or(defaults.min_p);
    let params = SamplingParams {
        num_generations: fields.take("n")?.unwrap_or(1),
        temperature: fields.take("temperature")?.unwrap_or(defaults.temperature),
        top_p: fields.take("top_p")?.unwrap_or(defaults.top_p),
        top_k: top_k.map_or(defaults.top_k, |top_k| usize::try_from(top_k).unwrap_or(0)), // -1 is off, as with vLLM
        min_p: min_p.filter(|least| *least != 0.0),
        repetition_penalty: fields.take("repetition_penalty")?.unwrap_or(defaults.repetition_penalty),
        stop,
        ..SamplingParams::default()
    };
    match params.fault() {
        Some(ParamFault { name: "num_generations", .. }) => Err(Refusal::of("n", "expected at least 1")),
        Some(ParamFault { name, expected, got }) => Err(Refusal::of(name, format!("expected {expected}, got {got}"))),
        None => Ok(params),
    }
}

/// Whether the stream ends with an event about token usage.
fn stream_options(fields: &mut Fields) -> Result<bool, Refusal> {
    let mut options: Map<String, Value> = fields.take("stream_options")?.unwrap_or_default();
    options.remove("include_obfuscation"); // changes no token
    options.retain(|name, value| name == "include_usage" || !(value.is_null() || *value == false));
    let include_usage = options.remove("include_usage").unwrap_or_default();
    match (include_usage, options.keys().next()) {
        (_, Some(name)) => Err(Refusal::of("stream_options", format!("'{name}' is not supported"))),
        (Value::Null, _) => Ok(false),
        (Value::Bool(include_usage), _) => Ok(include_usage),
        _ => Err(Refusal::of("stream_options", "expected include_usage: true or false")),
    }
}

/// Decides whether a value means that a feature is not used.
type IsUnused<'a> = &'a dyn Fn(&Value) -> bool;

/// Rejects unsupported fields of OpenAI and vLLM, unless their value means that the feature is not used.
fn refuse_unserved(fields: &mut Fields) -> Result<(), Refusal> {
    let unused: [(&str, IsUnused<'_>); 10] = [
        ("presence_penalty", &is_zero),
        ("frequency_penalty", &is_zero),
        ("logit_bias", &|value| value.as_object().is_some_and(Map::is_empty)),
        ("best_of", &|value| value == 1),
        ("echo", &|value| value == false),
        ("suffix", &|value| value == ""),
        ("ignore_eos", &|value| value == false),
        ("min_tokens", &is_zero),
        ("skip_special_tokens", &|value| value == true),
        ("include_stop_str_in_output", &|value| value == false),
    ];
    for (name, is_unused) in unused {
        if let Some(value) = fields.take::<Value>(name)?.filter(|value| !is_unused(value)) {
            let value: String = value.to_string().chars().take(80).collect();
            return Err(Refusal::of(name, format!("{value} is not supported")));
        }
    }
    Ok(())
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

/// Reads prompts: a text, token ids, or a list of either.
fn texts(fields: &mut Fields) -> Result<Vec<PromptSource>, Refusal> {
    let expected = || Refusal::of("prompt", "expected a text, a list of texts, token ids, or a list of lists of them");
    let prompt: Value = fields.take("prompt")?.ok_or_else(expected)?;
    let ids = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone()).map(PromptSource::Ids);
    match &prompt {
        Value::String(text) => Ok(vec![PromptSource::Text(text.clone())]),
        Value::Array(items) if items.is_empty() => Err(expected()),
        Value::Array(items) if items.len() > MAX_CHOICES && !items[0].is_number() => {
            Err(Refusal::of("prompt", format!("expected at most {MAX_CHOICES} prompts, not {}", items.len())))
        }
        Value::Array(items) if items[0].is_number() => Ok(vec![ids(&prompt).map_err(|_| expected())?]),
        Value::Array(items) => {
            let source = |item: &Value| match item {
                Value::String(text) => Ok(PromptSource::Text(text.clone())),
                list => ids(list).map_err(|_| expected()),
            };
            items.iter().map(source).collect()
        }
        _ => Err(expected()),
    }
}

fn conversation(fields: &mut Fields) -> Result<PromptSource, Refusal> {
    let messages: Vec<Value> = fields.take("messages")?.unwrap_or_default();
    if messages.is_empty() {
        return Err(Refusal::of("messages", "expected at least one message"));
    }
    let tools: Value = fields.take("tools")?.unwrap_or_default();
    let variables: Map<String, Value> = fields.take("chat_template_kwargs")?.unwrap_or_default();
    let num_values = messages.iter().chain([&tools]).chain(variables.values()).map(num_values).sum::<usize>();
    if num_values > MAX_VALUES {
        return Err(Refusal::of("messages", format!("expected at most {MAX_VALUES} JSON values, not {num_values}")));
    }
    let tools = read_tools(tools)?;
    let tools = match fields.take::<Value>("tool_choice")? {
        None => tools,
        Some(choice) if choice == "auto" => tools,
        Some(choice) if choice == "none" => Value::Null,
        Some(_) => return Err(Refusal::of("tool_choice", "expected auto or none: calls are not enforced")),
    };
    Ok(PromptSource::Conversation(Conversation {
        messages: messages.iter().map(message).collect::<Result<_, _>>()?,
        tools: Some(tools).filter(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty())).unwrap_or_default(),
        variables,
        add_generation_prompt: fields.take("add_generation_prompt")?.unwrap_or(true),
    }))
}

/// A message in the form that templates read, with its content as one string.
pub(super) fn message(message: &Value) -> Result<Value, Refusal> {
    let mut fields = read_message(message).map_err(|error| Refusal::of("messages", error))?;
    let role = fields["role"].as_str().unwrap_or_default();
    if ["system", "user"].contains(&role) && !fields.contains_key("content") {
        return Err(Refusal::of("messages", format!("expected a content in every message of the role {role}")));
    }
    fields.entry("content").or_insert(Value::String(String::new()));
    Ok(fields.into())
}

fn num_values(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(num_values).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(num_values).sum::<usize>(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value, is_chat: bool) -> Result<ApiRequest, Refusal> {
        ApiRequest::read(body.to_string().as_bytes(), is_chat)
    }

    #[test]
    fn prompts_may_be_texts_or_token_ids_single_or_several() {
        let prompts = |prompt: Value| read(json!({"prompt": prompt}), false).map(|ask| ask.prompts);
        let text = |text: &str| PromptSource::Text(text.to_owned());
        assert_eq!(prompts(json!("a")).unwrap(), [text("a")]);
        assert_eq!(prompts(json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
        assert_eq!(prompts(json!([1, 2])).unwrap(), [PromptSource::Ids(vec![1, 2])]);
        assert_eq!(prompts(json!([[1], [2]])).unwrap(), [PromptSource::Ids(vec![1]), PromptSource::Ids(vec![2])]);
        for wrong in [json!([]), json!({}), json!(3), json!([-1]), json!([1, "a"]), json!([["a"]]), json!(null)] {
            assert_eq!(prompts(wrong.clone()).unwrap_err().param.as_deref(), Some("prompt"), "{wrong}");
        }
    }

    #[test]
    fn unsupported_request_fields_are_refused_by_name() {
        let refused = |field: &str, value: Value| {
            let mut body = json!({"prompt": "a"});
            body[field] = value;
            read(body, false).err().and_then(|refusal| refusal.param)
        };
        for (field, value) in [
            ("logprobs", json!(21)),
            ("response_format", json!({"type": "xml"})),
            ("presence_penalty", json!(0.5)),
            ("logit_bias", json!({"3": 1})),
            ("temprature", json!(1)),
            ("n", json!(-1)),
            ("n", json!(0)),
            ("n", json!(100_000)),
            ("temperature", json!(-1)),
            ("top_p", json!(0)),
            ("top_p", json!(1.5)),
            ("min_p", json!(2)),
            ("repetition_penalty", json!(0)),
            ("stop", json!([""])),
            ("stop", json!(3)),
            ("max_tokens", json!("ten")),
            ("echo", json!(true)),
        ] {
            assert_eq!(refused(field, value.clone()).as_deref(), Some(field), "{value}");
        }
        for (field, value) in [
            ("logprobs", json!(0)),
            ("presence_penalty", json!(0)),
            ("response_format", json!({"type": "text"})),
            ("user", json!("me")),
            ("stop", json!(null)),
            ("top_k", json!(-1)),
        ] {
            assert_eq!(refused(field, value.clone()), None, "{field} = {value}");
        }
    }

    #[test]
    fn null_request_fields_count_as_absent() {
        let plain = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}],
            "tools": [{"function": {"name": "f"}}]});
        let mut padded = plain.clone();
        for name in ["functions", "function_call", "stop", "logit_bias", "stream_options", "unknown", "seed"] {
            padded[name] = Value::Null;
        }
        for name in ["tool_calls", "content", "function_call", "name", "refusal", "audio", "reasoning"] {
            padded["messages"][1][name] = Value::Null;
        }
        (padded["tools"][0]["function"]["strict"], padded["tools"][0]["type"]) = (Value::Null, Value::Null);
        padded["stream_options"] = json!({"include_usage": null, "more": null});
        assert_eq!(read(padded, true).unwrap(), read(plain, true).unwrap());
        let refused = |more: &str| {
            let body = format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}], {more}}}");
            ApiRequest::read(body.as_bytes(), true).unwrap_err().message
        };
        assert!(
            refused("\"stream_options\": {\"continuous_usage_stats\": true}")
                .starts_with("stream_options: 'continuous")
        );
        let rounded = refused("\"chat_template_kwargs\": {\"x\": [18446744073709551616]}");
        assert!(rounded.starts_with("chat_template_kwargs.x[0]: the integer 18446744073709551616 has"), "{rounded}");
    }

    #[test]
    fn chat_requests_keep_their_tools_and_texts() {
        let body = json!({
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": null,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "max_completion_tokens": 5,
        });
        let ask = read(body.clone(), true).unwrap();
        let PromptSource::Conversation(Conversation { messages, tools, add_generation_prompt: true, .. }) =
            &ask.prompts[0]
        else {
            panic!("{ask:?}")
        };
        assert_eq!((&messages[0]["content"], ask.max_tokens), (&json!("ab"), Some(5)));
        assert_eq!(messages[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(tools[0]["function"]["name"], "f");
        let mut without = body;
        without["tool_choice"] = json!("none");
        let ask = read(without, true).unwrap();
        assert!(matches!(&ask.prompts[0], PromptSource::Conversation(Conversation { tools: Value::Null, .. })));
        let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]});
        assert_eq!(read(image, true).unwrap_err().param.as_deref(), Some("messages"));
        for silent in [json!({"role": "user"}), json!({"role": "system", "content": null})] {
            let refusal = read(json!({"messages": [silent]}), true).unwrap_err();
            assert!(refusal.message.contains("expected a content in every message of the role"), "{refusal:?}");
        }
        let many = json!({"messages": [{"role": "user", "content": "", "more": vec![0; MAX_VALUES]}]});
        assert!(read(many, true).unwrap_err().message.contains("JSON values"));
    }
}
