//! Tests of the server without an engine: a test takes the role of the engine, or leaves requests in the queue.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::*;
use crate::endpoint::client::{ClientLimits, EngineChannel, EngineCommand, EngineQueue, RequestUpdate, engine_channel};
use crate::http::HttpServer;
use crate::tools::GroupKey;
use crate::types::{FinishReason, SamplingParams};

const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";
const BODY: &str = r#"{"messages": [{"role": "user", "content": "go"}], "max_tokens": 5}"#;
/// Number of concurrent requests. Bodies of the largest size would not all fit in memory.
const NUM_REQUESTS: usize = 300;

struct TestServer {
    server: HttpServer,
    queue: EngineQueue,
    body_room: Arc<Semaphore>,
}

impl TestServer {
    fn start(max_body_bytes: usize, api_key: Option<&str>, episodes: Option<Arc<Episodes>>) -> Self {
        let EngineChannel { client, queue } = engine_channel(ClientLimits { max_queue: 1024, grace: Duration::ZERO });
        let model = ServedModel::of_bytes("model", TEMPLATE);
        let body_room = body_room(max_body_bytes);
        let state = HttpState {
            model,
            client,
            api_key: api_key.map(str::to_owned),
            max_body_bytes,
            num_answers: AtomicU64::new(0),
            episodes,
            body_room: Arc::clone(&body_room),
        };
        let listener = HttpServer::bind("127.0.0.1", 0).unwrap();
        let server = HttpServer::start(listener, router(Arc::new(state), Guard::new("127.0.0.1", &[], &[]))).unwrap();
        Self { server, queue, body_room }
    }

    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Waits until the queue contains `num_requests` requests, and answers each with an empty completion.
    fn answer(&self, num_requests: usize) {
        let next =
            || self.queue.commands.recv_timeout(Duration::from_secs(60)).expect("a request that was not refused");
        let waiting: Vec<EngineCommand> = (0..num_requests).map(|_| next()).collect();
        assert_eq!(self.body_room.available_permits(), BODY_ROOM_KIB, "nothing is read any more");
        for command in waiting {
            let EngineCommand::Submit { listener, .. } = command else { panic!("{command:?}") };
            let (reason, trajectory) = (FinishReason::Eos, Box::default());
            listener.updates.send(RequestUpdate::Finished { choice: 0, reason, trajectory }).unwrap();
        }
    }
}

/// Begins a request with a chunked body, whose size is not in the headers.
fn send_in_chunks(address: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    );
    write!(stream, "{head}\r\n\r\n{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len()).unwrap();
    stream
}

fn status_of(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.split(' ').nth(1).unwrap_or_else(|| panic!("no status in '{text}'")).to_owned()
}

#[test]
fn chunked_requests_are_answered_up_to_the_queue_limit() {
    let endpoint = TestServer::start(4 << 20, None, None);
    let send = |_| send_in_chunks(endpoint.address(), "/v1/chat/completions");
    let streams: Vec<TcpStream> = (0..NUM_REQUESTS).map(send).collect();
    endpoint.answer(NUM_REQUESTS);
    assert!(streams.into_iter().all(|stream| status_of(stream) == "200"));
    endpoint.server.finish();
}

#[test]
fn chunked_episode_requests_are_answered_up_to_the_queue_limit() {
    let episodes = Arc::new(Episodes::new(NUM_REQUESTS));
    let endpoint = TestServer::start(32 << 20, None, Some(Arc::clone(&episodes)));
    let key = GroupKey { prompt_id: 4, first_step: 5 };
    let name = episodes.open(key, 0, &SamplingParams { max_completion_length: 9, ..SamplingParams::default() });
    let send = |_| send_in_chunks(endpoint.address(), &format!("/episodes/{name}/v1/chat/completions"));
    let streams: Vec<TcpStream> = (0..NUM_REQUESTS).map(send).collect();
    endpoint.answer(NUM_REQUESTS);
    assert!(streams.into_iter().all(|stream| status_of(stream) == "200"));
    endpoint.server.finish();
}

#[test]
fn request_bodies_count_against_the_memory_limit_while_read() {
    let endpoint = TestServer::start(1 << 20, None, None);
    let most = BODY_ROOM_KIB;
    let post = |more: &str, body: &[u8]| {
        let mut stream = TcpStream::connect(endpoint.address()).unwrap();
        let head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n";
        stream.write_all(&[head.as_bytes(), more.as_bytes(), b"\r\n", body].concat()).unwrap();
        stream
    };
    let taken = endpoint.body_room.try_acquire_many(most as u32 - 4).unwrap();
    let body = format!(r#"{{"prompt": 3, "x": "{}"}}"#, "a".repeat(8 << 10));
    let length = format!("Content-Length: {}\r\n", body.len());
    assert_eq!(status_of(post(&length, body.as_bytes())), "503", "8 KiB where 4 are left");
    drop(taken);
    assert_eq!(status_of(post(&length, body.as_bytes())), "400");
    assert_eq!(status_of(post("Content-Length: 1048577\r\n", b"")), "413", "it is not waited for");
    assert_eq!(endpoint.body_room.available_permits(), most);
    endpoint.server.finish();
}

#[test]
fn the_authorization_scheme_is_case_insensitive() {
    let endpoint = TestServer::start(1 << 20, Some("secret"), None);
    let status = |authorization: &str| {
        let mut stream = TcpStream::connect(endpoint.address()).unwrap();
        write!(stream, "GET /v1/models HTTP/1.0\r\nHost: localhost\r\n{authorization}\r\n").unwrap();
        status_of(stream)
    };
    for scheme in ["Bearer ", "bearer ", "BEARER   "] {
        assert_eq!(status(&format!("Authorization: {scheme}secret\r\n")), "200", "{scheme}");
    }
    for wrong in
        ["Bearer secre", "Bearer secrets", "Bearer Secret", "Bearer ", "Basic secret", "secret", "bearersecret"]
    {
        assert_eq!(status(&format!("Authorization: {wrong}\r\n")), "401", "{wrong}");
    }
    assert_eq!(status(""), "401");
    endpoint.server.finish();
}
