//! A server with speculative decoding gives the same answers as one without.

use serde_json::{Value, json};

use super::{QUESTION, Server};

#[test]
fn a_server_gives_equal_answers_with_draft_tokens() {
    let ask = |server: &Server| -> Vec<Value> {
        let bodies = [
            json!({"prompt": QUESTION, "n": 4, "max_tokens": 40, "seed": 3, "ignore_eos": false}),
            json!({"prompt": QUESTION, "n": 2, "max_tokens": 40, "seed": 5, "temperature": 0.0, "stop": ["is"]}),
            json!({"prompt": QUESTION, "n": 4, "max_tokens": 40, "seed": 3, "logprobs": 2}),
        ];
        let texts = |body: &Value| {
            let choices = server.choices("/v1/completions", body);
            choices.into_iter().map(|choice| json!([choice["text"], choice["finish_reason"]])).collect::<Vec<_>>()
        };
        let streamed = json!({"prompt": QUESTION, "max_tokens": 40, "seed": 9});
        let parts = server.events("/v1/completions", &streamed);
        let text: String = parts.iter().filter_map(|part| part["choices"][0]["text"].as_str()).collect();
        bodies.iter().flat_map(texts).chain([json!(text)]).collect()
    };
    let plain = Server::start("");
    let expected = ask(&plain);
    assert_eq!(plain.metric("spec_decode_num_draft_tokens_total"), 0.0);
    plain.stop();
    for method in ["ngram", "auto"] {
        let server = Server::start(&format!("--speculation {method}"));
        assert_eq!((ask(&server), ask(&server)), (expected.clone(), expected.clone()), "{method}");
        if method == "ngram" {
            let [drafts, accepted] =
                ["draft", "accepted"].map(|name| server.metric(&format!("spec_decode_num_{name}_tokens_total")));
            assert!(accepted > 0.0 && accepted <= drafts, "{accepted} of {drafts}");
        }
        server.stop();
    }
}
