//! `colo-grpo serve` and `chat` from the perspective of clients.

mod adapters;
mod chat;
mod fp8;
mod generation;
mod hybrid;
mod speculation;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Child;

use serde_json::{Value, json};

use crate::program::{self, Ended, MODEL, await_line, command, end, json_lines, run, wait_until};

const QUESTION: &str = "what is two plus three ?";

/// A server process, which is killed if a test fails.
struct Server {
    child: Option<Child>,
    address: String,
}

impl Server {
    fn start(more: &str) -> Self {
        Self::of(MODEL, more)
    }

    fn of(model: &str, more: &str) -> Self {
        let mut child = command(&format!("serve --model {model} --port 0 {more}")).spawn().unwrap();
        let line = await_line(&mut child, "listening on http://");
        let address = line.split_once("http://").unwrap().1.trim_end_matches("/v1").to_owned();
        Self { child: Some(child), address }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).unwrap()
    }

    /// Sends the headers and body of an HTTP/1.0 request; the response ends when the connection closes.
    fn send(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let head = format!(
            "{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{headers}\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
        stream
    }

    fn call(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
        answer_of(self.send(method, path, headers, body))
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.call("POST", path, "", body.to_string().as_bytes());
        (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
    }

    /// The choices in a complete (not streamed) response.
    fn choices(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"].as_array().unwrap().clone()
    }

    /// The events of a streamed response, without the final `[DONE]`.
    fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let (status, text) = self.call("POST", path, "", body.to_string().as_bytes());
        assert_eq!(status, 200, "{text}");
        events_of(&text)
    }

    fn metric(&self, name: &str) -> f64 {
        let (status, page) = self.call("GET", "/metrics", "", b"");
        assert_eq!(status, 200);
        let line = page.lines().find_map(|line| line.strip_prefix(&format!("colo_grpo_{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in\n{page}")).parse().unwrap()
    }

    /// Waits until no request is open. Then all KV blocks must be free.
    fn wait_until_idle(&self) {
        wait_until(|| {
            ["num_requests_running", "num_requests_waiting"].iter().all(|name| self.metric(name) == 0.0)
                && self.metric("kv_blocks_free") == self.metric("kv_blocks")
        });
    }

    fn signal(&self, signal: &str) {
        program::signal(self.child.as_ref().unwrap().id(), signal);
    }

    fn end(mut self) -> Ended {
        end(self.child.take().unwrap())
    }

    fn stop(self) {
        self.signal("-TERM");
        let ended = self.end();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn answer_of(mut stream: TcpStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in '{text}'"));
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn events_of(text: &str) -> Vec<Value> {
    let mut lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.pop(), Some("data: [DONE]"), "{text}");
    lines.iter().map(|line| serde_json::from_str(line.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

fn lists<'a>(of: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    of[name].as_array().unwrap().iter()
}

fn asked(more: Value) -> Value {
    let mut body = json!({"prompt": QUESTION, "max_tokens": 20, "return_token_ids": true, "logprobs": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn generated(model: &str, more: &str) -> Vec<Value> {
    let mut command = command(&format!("generate --device cpu --model {model} --max_completion_length 20 {more}"));
    let ended = end(command.args(["--prompt", QUESTION]).spawn().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    json_lines(&ended.stdout)
}

/// Text, token ids and finish reason of every choice, assembled from the events of a stream.
fn together(events: &[Value], num_choices: usize) -> Vec<(String, Vec<Value>, Value)> {
    let mut all = vec![(String::new(), Vec::new(), Value::Null); num_choices];
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let (text, ids, reason) = &mut all[choice["index"].as_u64().unwrap() as usize];
        *text += choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str()).unwrap();
        ids.extend(choice["token_ids"].as_array().unwrap().clone());
        if !choice["finish_reason"].is_null() {
            *reason = choice["finish_reason"].clone();
        }
    }
    all
}

/// Text, token ids and finish reason of every choice in a complete response.
fn parts(choices: &[Value]) -> Vec<(String, Vec<Value>, Value)> {
    let text =
        |choice: &Value| choice["text"].as_str().or_else(|| choice["message"]["content"].as_str()).unwrap().to_owned();
    let part = |choice: &Value| {
        (text(choice), choice["token_ids"].as_array().unwrap().clone(), choice["finish_reason"].clone())
    };
    choices.iter().map(part).collect()
}

/// Request bodies whose responses do not depend on time.
fn bodies() -> Vec<Value> {
    vec![
        asked(json!({"temperature": 0})),
        asked(json!({"seed": 7, "n": 3})),
        asked(json!({"seed": 8, "n": 2, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01})),
        asked(json!({"seed": 9, "n": 4, "stop": ["is", "answer is"], "temperature": 1.2})),
        asked(json!({"temperature": 0, "prompt": [QUESTION, "what is nine plus nine ?"], "n": 2})),
    ]
}

#[test]
fn served_answers_equal_generate_and_streams_equal_answers() {
    let server = Server::start("");
    for (body, options) in [(&bodies()[0], "--temperature 0"), (&bodies()[1], "--seed 7 -n 3")] {
        let (choices, lines) = (server.choices("/v1/completions", body), generated(MODEL, options));
        assert_eq!(choices.len(), lines.len());
        for (choice, line) in choices.iter().zip(&lines) {
            assert_eq!(choice["text"], line["completion"], "{options}");
            let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
            assert_eq!(json!(logprobs.len()), line["num_tokens"]);
            assert_eq!(choice["token_ids"].as_array().unwrap().len(), logprobs.len());
            let sum: f64 = logprobs.iter().map(|logprob| logprob.as_f64().unwrap()).sum();
            assert!((sum - line["logprob"].as_f64().unwrap()).abs() < 1e-3, "{sum}, {line}");
        }
    }
    for body in bodies() {
        let whole = parts(&server.choices("/v1/completions", &body));
        assert_eq!(together(&server.events("/v1/completions", &body), whole.len()), whole, "{body}");
        assert!(whole.iter().all(|(text, ..)| !body["stop"].is_array() || !text.contains("is")), "{whole:?}");
    }
    let ids = server.choices("/v1/completions", &bodies()[0])[0]["prompt_token_ids"].clone();
    let by_ids = asked(json!({"temperature": 0, "prompt": ids}));
    assert_eq!(
        parts(&server.choices("/v1/completions", &by_ids)),
        parts(&server.choices("/v1/completions", &bodies()[0]))
    );

    let chat = json!({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "logprobs": true,
        "return_token_ids": true, "max_tokens": 20});
    let whole = server.choices("/v1/chat/completions", &chat);
    assert_eq!(whole[0]["message"]["content"], generated(MODEL, "--temperature 0 --chat")[0]["completion"]);
    assert_eq!(
        whole[0]["logprobs"]["content"].as_array().unwrap().len(),
        whole[0]["token_ids"].as_array().unwrap().len()
    );
    let mut with_usage = chat.clone();
    with_usage["stream_options"] = json!({"include_usage": true});
    let mut events = server.events("/v1/chat/completions", &with_usage);
    let usage = events.pop().unwrap();
    assert_eq!(usage["usage"]["completion_tokens"], json!(whole[0]["token_ids"].as_array().unwrap().len()));
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert!(events[0]["prompt_token_ids"].is_array(), "{events:?}"); // on a busy machine one event may carry several tokens
    assert_eq!(together(&events, 1), parts(&whole));
    // The most probable tokens, of which greedy sampling takes the first.
    let chosen =
        server.choices("/v1/completions", &asked(json!({"temperature": 0, "logprobs": 3})))[0]["logprobs"].clone();
    for (token, (logprob, top)) in
        lists(&chosen, "tokens").zip(lists(&chosen, "token_logprobs").zip(lists(&chosen, "top_logprobs")))
    {
        let top = top.as_object().unwrap();
        assert!(top.len() == 3 && top[token.as_str().unwrap()] == *logprob, "{top:?} {token}");
        assert!(top.values().all(|other| other.as_f64() <= logprob.as_f64()), "{top:?} {token}");
    }
    let (status, models) = server.call("GET", "/v1/models", "", b"");
    assert!(status == 200 && models.contains(MODEL), "{models}");
    server.stop();
}

#[test]
fn a_server_with_two_ranks_answers_like_one() {
    let (alone, two, stages) = (Server::start(""), Server::start("--nproc 2"), Server::start("--nproc 2 --pp 2"));
    std::thread::scope(|scope| {
        for body in bodies() {
            let (alone, shared) = (&alone, [&two, &stages]);
            scope.spawn(move || {
                let expected = parts(&alone.choices("/v1/completions", &body));
                for server in shared {
                    assert_eq!(parts(&server.choices("/v1/completions", &body)), expected, "{body}");
                    assert_eq!(together(&server.events("/v1/completions", &body), expected.len()), expected, "{body}");
                }
            });
        }
    });
    for server in [two, stages] {
        server.wait_until_idle();
        server.stop();
    }
    alone.stop();
}

/// Every third of 200 clients disconnects before or after the first bytes of its response.
#[test]
fn vanished_clients_affect_only_their_own_requests() {
    let server = Server::start("");
    let expected = parts(&server.choices("/v1/completions", &bodies()[1]));
    std::thread::scope(|scope| {
        for client in 0..200 {
            let (server, expected) = (&server, &expected);
            scope.spawn(move || {
                let mut body = bodies()[1].clone();
                body["stream"] = json!(true);
                let mut stream = server.send("POST", "/v1/completions", "", body.to_string().as_bytes());
                match client % 6 {
                    0 => {}
                    3 => drop(stream.read(&mut [0; 64])),
                    _ => {
                        let (status, text) = answer_of(stream);
                        assert_eq!(status, 200, "{text}");
                        assert_eq!(together(&events_of(&text), 3), *expected);
                    }
                }
            });
        }
    });
    server.wait_until_idle();
    // One whose answer takes far longer than its client stays.
    let long = asked(json!({"n": 1024, "temperature": 2.0, "max_tokens": 50, "stream": true}));
    let mut stream = server.send("POST", "/v1/completions", "", long.to_string().as_bytes());
    assert!(stream.read(&mut [0; 64]).unwrap() > 0);
    let cancelled = server.metric("requests_total{outcome=\"cancelled\"}");
    drop(stream);
    wait_until(|| server.metric("requests_total{outcome=\"cancelled\"}") > cancelled);
    server.wait_until_idle();
    assert_eq!(parts(&server.choices("/v1/completions", &bodies()[1])), expected);
    server.stop();
}

#[test]
fn unsupported_requests_get_errors_in_openai_format() {
    let server = Server::start("--api-key secret --max-queue 8 --max-body-bytes 4000");
    let key = "Authorization: Bearer secret\r\n";
    let call = |path: &str, headers: &str, body: &str| {
        let (status, text) = server.call("POST", path, headers, body.as_bytes());
        let error: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(error["error"]["message"].is_string() && error["error"]["type"].is_string(), "{error}");
        (status, error["error"]["param"].as_str().unwrap_or_default().to_owned())
    };
    let (completions, chat) = ("/v1/completions", "/v1/chat/completions");
    for (headers, body) in [("", "{}"), ("Authorization: Bearer secre\r\n", "{}"), ("Authorization: secret\r\n", "x")] {
        assert_eq!(call(completions, headers, body).0, 401);
    }
    assert_eq!(server.call("GET", "/v1/models", "", b"").0, 401);
    assert_eq!(server.call("GET", "/health", "", b"").0, 200);
    for (path, body, status, param) in [
        (completions, "", 400, ""),
        (completions, "\u{0}garbage", 400, ""),
        (completions, "[1, 2]", 400, ""),
        (completions, "{}", 400, "prompt"),
        (completions, r#"{"prompt": "what", "temprature": 1}"#, 400, "temprature"),
        (completions, r#"{"prompt": "what", "temperature": -1}"#, 400, "temperature"),
        (completions, r#"{"prompt": "what", "temperature": 1e-40}"#, 400, "temperature"),
        (completions, r#"{"prompt": "what", "repetition_penalty": 1e30}"#, 400, "repetition_penalty"),
        (completions, r#"{"prompt": "what", "max_tokens": 64}"#, 400, "max_tokens"),
        (completions, r#"{"prompt": [1, 4000000000]}"#, 400, "prompt"),
        (completions, r#"{"prompt": "what", "model": "gpt"}"#, 404, "model"),
        (completions, r#"{"prompt": "what", "n": 9}"#, 429, ""),
        (chat, r#"{"messages": []}"#, 400, "messages"),
        (chat, r#"{"messages": [{"role": 3}]}"#, 400, "messages"),
        (chat, r#"{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}"#, 400, "top_logprobs"),
        (
            chat,
            r#"{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}"#,
            400,
            "tools[0].function",
        ),
        (completions, r#"{"prompt": "what", "logprobs": 21}"#, 400, "logprobs"),
        (
            chat,
            r#"{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}"#,
            400,
            "",
        ),
        ("/v1/embeddings", "{}", 404, ""),
        ("/v1/models", "{}", 405, ""),
    ] {
        assert_eq!(call(path, key, body), (status, param.to_owned()), "{body}");
    }
    let long = format!(r#"{{"prompt": {:?}}}"#, vec![1; 64]);
    for body in [r#"{"prompt": "what", "max_tokens": 64}"#, &long] {
        let (_, text) = server.call("POST", completions, key, body.as_bytes());
        assert!(text.contains(r#""code":"context_length_exceeded""#), "{body}: {text}");
    }
    let (status, text) = server.call("GET", "/v1/models/%ff", key, b"");
    let error: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!((status, &error["error"]["type"]), (400, &json!("invalid_request_error")), "{text}");
    let deep = format!(r#"{{"prompt": {}"#, "[".repeat(3900));
    assert_eq!(call(completions, key, &deep).0, 400);
    // A body that is announced is not waited for.
    let mut stream = server.connect();
    write!(
        stream,
        "POST {completions} HTTP/1.0\r\nContent-Type: application/json\r\n{key}Content-Length: 4001\r\n\r\n"
    )
    .unwrap();
    assert_eq!(answer_of(stream).0, 413);
    let mut stream = server.connect();
    stream.write_all(b"\x16\x03\x01 not HTTP\r\n\r\n").unwrap();
    let _ = stream.read(&mut [0; 64]);
    let (status, answer) = server.call("POST", completions, key, asked(json!({})).to_string().as_bytes());
    assert_eq!(status, 200, "{answer}");
    server.wait_until_idle();
    server.stop();
}

#[test]
fn a_stopped_server_answers_current_requests() {
    for (grace, is_answered) in [("600", true), ("0", false)] {
        let server = Server::start(&format!("--grace-s {grace}"));
        let long = asked(json!({"n": 512, "temperature": 2.0, "max_tokens": 50, "stream": true, "seed": 1}));
        let mut stream = server.send("POST", "/v1/completions", "", long.to_string().as_bytes());
        let mut first = [0; 15];
        stream.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"HTTP/1.0 200 OK");
        server.signal("-TERM");
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert_eq!(rest.ends_with("data: [DONE]\n\n"), is_answered, "{rest}");
        let refused = r#""the server stopped before the completion ended""#;
        assert_eq!(rest.contains(refused), !is_answered, "{rest}");
        let ended = server.end();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(ended.stderr.contains("current requests are answered"), "{}", ended.stderr);
    }
}

#[test]
fn a_used_port_and_a_bad_folder_are_reported_before_loading() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let in_use = run(&format!("serve --model {MODEL} --port {port}"));
    in_use.assert_error("port", 4, &["--port", "in use", "--port 0"]);
    assert!(!in_use.stderr.contains("KV blocks"), "{}", in_use.stderr);
    run(&format!("serve --nproc 2 --model {MODEL} --port {port}")).assert_error("port", 4, &["in use"]);
    run("serve --model configs --port 0").assert_error("folder", 3, &["config.json"]);
}

#[test]
fn foreign_origins_and_wrong_keys_are_refused() {
    let server = Server::start("--allowed-origins https://chat.example");
    let body = asked(json!({})).to_string();
    let status = |method: &str, headers: &str| {
        let mut stream = server.connect();
        let head = format!("{method} /v1/completions HTTP/1.0\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
        stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        (text.split(' ').nth(1).unwrap().parse::<u16>().unwrap(), text)
    };
    let json = "Content-Type: application/json\r\n";
    let own = format!("Host: {0}\r\nOrigin: http://{0}\r\n{json}", server.address);
    for (headers, expected) in [
        (json.to_owned(), 200),
        (own, 200),
        (format!("Host: evil.example\r\n{json}"), 403),
        (format!("Host: {}\r\nOrigin: https://evil.example\r\n{json}", server.address), 403),
        (format!("Host: {}\r\nOrigin: null\r\n{json}", server.address), 403),
        ("Content-Type: text/plain\r\n".to_owned(), 415),
        ("Content-Type: application/x-www-form-urlencoded\r\n".to_owned(), 415),
        (String::new(), 415),
    ] {
        let (status, text) = status("POST", &headers);
        assert_eq!(status, expected, "{headers}\n{text}");
        assert!(status == 200 || text.contains(r#"{"error":{"message":"#), "{text}");
    }
    let allowed = "Origin: https://chat.example\r\n";
    let (preflight, text) = status("OPTIONS", &format!("{allowed}Access-Control-Request-Method: POST\r\n"));
    assert!(preflight == 204 && text.contains("access-control-allow-headers: authorization, content-type"), "{text}");
    let (answer, text) = status("POST", &format!("{allowed}{json}"));
    assert!(answer == 200 && text.contains("access-control-allow-origin: https://chat.example"), "{text}");
    server.stop();

    for (variable, option, name) in
        [("", "", "COLO_GRPO_API_KEY"), ("two words", "", "COLO_GRPO_API_KEY"), ("good", "--api_key=", "--api_key")]
    {
        let mut command = command(&format!("serve --model {MODEL} --port 0 {option}"));
        let ended = end(command.env("COLO_GRPO_API_KEY", variable).spawn().unwrap());
        ended.assert_error(variable, 2, &[name, "without a key"]);
        assert!(!ended.stderr.contains("two words"), "{}", ended.stderr);
    }
    let mut child = command(&format!("serve --model {MODEL} --host 0.0.0.0 --port 0")).spawn().unwrap();
    await_line(&mut child, "warning: with --host 0.0.0.0 everybody who can reach this port can use the model");
    await_line(&mut child, "listening on http://0.0.0.0:");
    child.kill().unwrap();
    child.wait().unwrap();
}
