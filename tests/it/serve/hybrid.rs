//! Serving a model with gated delta nets and attention over HTTP.

use serde_json::json;

use super::{QUESTION, Server, asked, generated, parts, together};
use crate::program::random_model_of;

/// Several ranks answer conversations concurrently, complete or streamed, that begin with the same prompt. The answers, and the samples of a text,
/// equal those of `generate`.
#[test]
fn a_hybrid_model_answers_over_http_like_generate() {
    let folder = tempfile::tempdir().unwrap();
    let wide = json!({"tie_word_embeddings": false, "initializer_range": 0.2}); // it does not say one word for ever
    let model = random_model_of(folder.path(), "configs/arithmetic/config-hybrid.json", &wide).display().to_string();
    let chat = json!({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 20,
        "return_token_ids": true, "stream_options": {"include_usage": true}});
    let sampled = asked(json!({"seed": 7, "n": 3}));
    let greedy = generated(&model, "--temperature 0 --chat").remove(0);
    assert!(greedy["completion"].as_str().unwrap().split(' ').count() > 4, "{greedy}");
    let samples = generated(&model, "--seed 7 -n 3");
    for more in ["", "--nproc 2"] {
        let server = Server::of(&model, more);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let whole = parts(&server.choices("/v1/chat/completions", &chat));
                    assert_eq!(json!(whole[0].0), greedy["completion"], "{more}");
                    assert_eq!(json!(whole[0].1.len()), greedy["num_tokens"], "{more}");
                    let mut events = server.events("/v1/chat/completions", &chat);
                    let usage = events.pop().unwrap()["usage"]["completion_tokens"].clone();
                    assert_eq!((usage, together(&events, 1)), (greedy["num_tokens"].clone(), whole), "{more}");
                });
            }
            let choices = server.choices("/v1/completions", &sampled);
            assert_eq!(together(&server.events("/v1/completions", &sampled), 3), parts(&choices), "{more}");
            for (choice, line) in choices.iter().zip(&samples) {
                assert_eq!(choice["text"], line["completion"], "{more}");
            }
        });
        server.wait_until_idle();
        server.stop();
    }
}
