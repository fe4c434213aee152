//! Errors in OpenAI's format.

use std::borrow::Cow;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An error response to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The HTTP status.
    pub status: u16,
    /// The invalid field of the request, if the error is about one.
    pub param: Option<String>,
    /// OpenAI's error code, if it is not the usual one for the status.
    pub code: Option<&'static str>,
    /// Says what is wrong, what was expected, and how to fix it.
    pub message: String,
}

impl Refusal {
    pub(super) fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, param: None, code: None, message: message.into() }
    }

    /// An error about an invalid or unsupported field.
    pub(super) fn of(param: &str, message: impl Into<String>) -> Self {
        Self { status: 400, param: Some(param.to_owned()), code: None, message: format!("{param}: {}", message.into()) }
    }

    /// An error about a field that exceeds the context length. Clients recognize its code and shorten the conversation.
    pub(super) fn of_length(param: &str, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::of(param, message) }
    }

    /// An error about a field with a value of the wrong type; `error` is serde's message.
    pub(super) fn of_type(param: &str, error: &str) -> Self {
        Self::of(param, in_plain_words(error))
    }

    /// The message, which may quote the client's text, shortened for display.
    pub(super) fn cut_message(&self) -> Cow<'_, str> {
        cut(&self.message)
    }

    pub(super) fn json(&self) -> Value {
        let (kind, code) = match self.status {
            404 if self.param.as_deref() == Some("model") => ("invalid_request_error", Some("model_not_found")),
            401 => ("invalid_request_error", Some("invalid_api_key")),
            404 => ("invalid_request_error", Some("not_found")),
            429 => ("rate_limit_error", Some("queue_full")),
            500.. => ("server_error", None),
            _ => ("invalid_request_error", None),
        };
        let (message, param) = (cut(&self.message), self.param.as_deref().map(cut));
        json!({"error": {"message": message, "type": kind, "param": param, "code": self.code.or(code)}})
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.json().to_string()));
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if matches!(self.status, 429 | 503) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// Largest size of a message in bytes. A message may quote a client's text of any length.
const MAX_MESSAGE_BYTES: usize = 2000;

/// Cuts the middle out of a long text.
fn cut(text: &str) -> Cow<'_, str> {
    if text.len() <= MAX_MESSAGE_BYTES {
        return text.into();
    }
    let half = MAX_MESSAGE_BYTES / 2;
    let whole = |at: &usize| text.is_char_boundary(*at);
    let start = (0..=half).rev().find(whole).unwrap_or(0);
    let end = (text.len() - half..text.len()).find(whole).unwrap_or(text.len());
    format!("{} .. {}", &text[..start], &text[end..]).into()
}

/// Rewrites serde's type error without the names of Rust types.
fn in_plain_words(error: &str) -> String {
    let Some((start, expected)) = error.rsplit_once("expected ") else { return error.to_owned() };
    let expected = match expected {
        "usize" | "u64" | "u32" => "a whole number of at least 0",
        "i64" => "a whole number from -2^63 to 2^63 - 1",
        "f32" | "f64" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        other => other,
    };
    format!("{start}expected {expected}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_messages_contain_no_rust_type_names() {
        let message = |error: &str| Refusal::of_type("n", error).message;
        let of = |error: Result<usize, serde_json::Error>| message(&error.unwrap_err().to_string());
        let expected = "n: invalid value: integer `-1`, expected a whole number of at least 0";
        assert_eq!(of(serde_json::from_value(json!(-1))), expected);
        let beyond = serde_json::from_value::<i64>(json!(1_u64 << 63)).unwrap_err().to_string();
        assert!(message(&beyond).ends_with("expected a whole number from -2^63 to 2^63 - 1"), "{beyond}");
        let text = serde_json::from_value::<f32>(json!("hot")).unwrap_err().to_string();
        assert!(message(&text).ends_with("\"hot\", expected a number"), "{text}");
        assert_eq!(message("of a kind of its own"), "n: of a kind of its own");
    }

    #[test]
    fn long_error_messages_are_shortened_in_the_middle() {
        let field = |name: &str| Refusal::of(name, "this field is not supported").json()["error"].clone();
        assert_eq!(field("x")["message"], "x: this field is not supported");
        let error = field(&"ä".repeat(1 << 20));
        let (message, param) = (error["message"].as_str().unwrap(), error["param"].as_str().unwrap());
        assert!(message.starts_with("ää") && message.ends_with("ä: this field is not supported"));
        assert!(message.len() <= MAX_MESSAGE_BYTES + 4 && param.len() <= MAX_MESSAGE_BYTES + 4);
    }
}
