//! Formats log-probabilities of sampled tokens and of the most probable alternatives in OpenAI's two formats.

use serde_json::{Map, Value, json};

use crate::data::Tokenizer;
use crate::error::Result;
use crate::types::TokenLogprob;

/// A sampled token and the most probable tokens at its position.
#[derive(Debug)]
pub(super) struct ScoredToken {
    sampled: NamedToken,
    /// Number of characters before the token.
    offset: usize,
    /// The most probable tokens, most probable first.
    top: Vec<NamedToken>,
}

/// A token with its text and log-probability.
#[derive(Debug)]
struct NamedToken {
    token_id: u32,
    text: String,
    logprob: f32,
}

impl NamedToken {
    /// Decodes a single token; a special token by its name.
    fn new(token: &TokenLogprob, tokenizer: &Tokenizer) -> Result<Self> {
        let TokenLogprob { token_id, logprob } = *token;
        let text = tokenizer.decode(&[token_id])?;
        let text = if text.is_empty() { tokenizer.token(token_id).unwrap_or_default() } else { text };
        Ok(Self { token_id, text, logprob })
    }

    fn json(&self) -> Value {
        let Self { text, logprob, .. } = self;
        let bytes = (!text.contains('\u{FFFD}')).then_some(text.as_bytes());
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    }
}

impl ScoredToken {
    /// A scored token after `offset` characters. Adds the token's own characters to `offset`.
    pub fn new(token: &TokenLogprob, top: &[TokenLogprob], tokenizer: &Tokenizer, offset: &mut usize) -> Result<Self> {
        let sampled = NamedToken::new(token, tokenizer)?;
        let top = top.iter().map(|token| NamedToken::new(token, tokenizer)).collect::<Result<_>>()?;
        let next = *offset + sampled.text.chars().count();
        Ok(Self { sampled, offset: std::mem::replace(offset, next), top })
    }

    /// The most probable tokens by text, with the sampled one first, which is always included. If several tokens have the same text, as
    /// parts of a character have, all but the first are named by their ids, in vLLM's notation for tokens without text.
    fn by_text(&self) -> Value {
        let mut named = Map::from_iter([(self.sampled.text.clone(), json!(self.sampled.logprob))]);
        for NamedToken { token_id, text, logprob } in &self.top {
            if *token_id != self.sampled.token_id {
                let name = if named.contains_key(text) { format!("token_id:{token_id}") } else { text.clone() };
                named.insert(name, json!(logprob));
            }
        }
        named.into()
    }
}

/// The format of `/v1/chat/completions`: a list with one entry per token.
pub(super) fn of_chat(tokens: &[ScoredToken]) -> Value {
    let token = |scored: &ScoredToken| {
        let mut json = scored.sampled.json();
        json["top_logprobs"] = scored.top.iter().map(NamedToken::json).collect();
        json
    };
    json!({"content": tokens.iter().map(token).collect::<Vec<_>>()})
}

/// The format of `/v1/completions`: one list per kind of value.
pub(super) fn of_text(tokens: &[ScoredToken]) -> Value {
    let of = |value: &dyn Fn(&ScoredToken) -> Value| tokens.iter().map(value).collect::<Vec<_>>();
    let has_top = tokens.iter().any(|token| !token.top.is_empty());
    json!({
        "tokens": of(&|token| json!(token.sampled.text)),
        "token_logprobs": of(&|token| json!(token.sampled.logprob)),
        "text_offset": of(&|token| json!(token.offset)),
        "top_logprobs": has_top.then(|| of(&ScoredToken::by_text)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::text::tests::bytes;

    /// Bytes that are not a complete character all decode to the same text.
    #[test]
    fn tokens_with_equal_text_keep_separate_logprobs() {
        let token = |token_id, logprob| TokenLogprob { token_id, logprob };
        let top = [token(0xF1, -0.5), token(0x61, -1.0), token(0xF2, -2.0), token(0xF0, -3.0)];
        let mut offset = 4;
        let scored = [ScoredToken::new(&token(0xF0, -3.0), &top, &bytes(), &mut offset).unwrap()];
        let named = json!({"\u{FFFD}": -3.0, "token_id:241": -0.5, "a": -1.0, "token_id:242": -2.0});
        let text = of_text(&scored);
        assert_eq!((&text["top_logprobs"], &text["text_offset"], offset), (&json!([named]), &json!([4]), 5));
        let listed = of_chat(&scored)["content"][0]["top_logprobs"].clone();
        let logprobs: Vec<&Value> = listed.as_array().unwrap().iter().map(|top| &top["logprob"]).collect();
        assert_eq!(logprobs, [&json!(-0.5), &json!(-1.0), &json!(-2.0), &json!(-3.0)]);
    }
}
