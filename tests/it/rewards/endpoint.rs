//! Rewards from HTTP services over real sockets: all kinds of responses, failing servers, and a run that ends because of them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use colo_grpo::internal::reward::{FailureKind, RewardPool};
use serde_json::{Value, json};

use super::processes::{group, pool, scores};
use crate::program::{SMALL_RUN, run};

/// Writes the server's response to a request with this completion.
type Answer = dyn Fn(&str, &mut TcpStream) + Send + Sync;

/// A server with one thread per connection. It counts requests, and the largest number of concurrent ones.
struct Server {
    url: String,
    num_requests: Arc<AtomicUsize>,
    most_open: Arc<AtomicUsize>,
    requests: Mutex<Receiver<Value>>,
    is_over: Arc<AtomicBool>,
}

struct Seen {
    num_requests: Arc<AtomicUsize>,
    num_open: AtomicUsize,
    most_open: Arc<AtomicUsize>,
    requests: Sender<Value>,
}

impl Server {
    fn start(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, requests) = channel();
        let (num_requests, most_open, is_over) = (Arc::default(), Arc::default(), Arc::new(AtomicBool::new(false)));
        let seen = Seen {
            num_requests: Arc::clone(&num_requests),
            num_open: AtomicUsize::new(0),
            most_open: Arc::clone(&most_open),
            requests: sender,
        };
        let (seen, answer, over): (_, Arc<Answer>, _) = (Arc::new(seen), Arc::new(answer), Arc::clone(&is_over));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
                std::thread::spawn(move || serve(stream, &seen, &*answer));
            }
        });
        Self { url, num_requests, most_open, requests: Mutex::new(requests), is_over }
    }

    fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::Relaxed)
    }

    fn request(&self) -> Value {
        self.requests.lock().unwrap().recv().unwrap()
    }

    /// A pool with one reward that uses this server.
    fn pool(&self, keys: &[&str]) -> RewardPool {
        let own = ["reward_funcs=judge".to_owned(), format!("rewards.judge.url={}", self.url)];
        pool(&own.into_iter().chain(keys.iter().map(|key| format!("rewards.judge.{key}"))).collect::<Vec<_>>())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.url.trim_start_matches("http://")); // wakes the listener
    }
}

/// Answers the requests of a connection in order.
fn serve(mut stream: TcpStream, seen: &Seen, answer: &Answer) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Some(request) = read_request(&mut reader) {
        seen.num_requests.fetch_add(1, Ordering::Relaxed);
        let num_open = seen.num_open.fetch_add(1, Ordering::Relaxed) + 1;
        seen.most_open.fetch_max(num_open, Ordering::Relaxed);
        let completion = request["body"]["completion"].as_str().unwrap_or_default().to_owned();
        let _ = seen.requests.send(request);
        answer(&completion, &mut stream);
        seen.num_open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Reads the next request: its path, authorization header and body.
fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Value> {
    let (mut first, mut length, mut authorization) = (String::new(), 0, None);
    reader.read_line(&mut first).ok().filter(|length| *length > 0)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_lowercase().as_str() {
            "content-length" => length = value.parse().ok()?,
            "authorization" => authorization = Some(value.to_owned()),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let body: Value = serde_json::from_slice(&body).ok()?;
    Some(json!({"path": first.split(' ').nth(1), "authorization": authorization, "body": body}))
}

fn reply(stream: &mut TcpStream, status: &str, body: &str) {
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let _ = stream.write_all(answer.as_bytes()); // at once: parts would wait for one another
}

fn rewards(pool: &mut RewardPool, completions: &[&str]) -> Vec<Option<f32>> {
    let row = json!({"prompt": [{"role": "user", "content": "why?"}], "answer": "because"});
    scores(pool, group(row, completions)).into_iter().map(|(reward, _)| reward).collect()
}

#[test]
fn a_reward_model_over_http_scores_completions() {
    let server = Server::start(|completion, stream| {
        reply(stream, "200 OK", &format!("{{\"score\": {}, \"model\": \"rm\"}}", completion.len()));
    });
    let mut pool = server.pool(&["concurrency=3"]);
    assert_eq!(rewards(&mut pool, &["a", "bb", "", "dddd"]), [Some(1.0), Some(2.0), Some(0.0), Some(4.0)]);
    let request = server.request();
    assert_eq!(request["body"]["prompt"], json!([{"role": "user", "content": "why?"}]));
    assert_eq!(request["body"].as_object().unwrap().len(), 2);
    assert!(request["authorization"].is_null());
}

#[test]
fn services_get_the_prompt_from_the_configured_column() {
    let server = Server::start(|_, stream| reply(stream, "200 OK", "{\"score\": 1}"));
    let keys = ["reward_funcs=judge", "dataset_prompt_column=instruction"].map(str::to_owned);
    let mut pool = pool(&[&keys[..], &[format!("rewards.judge.url={}", server.url)]].concat());
    scores(&mut pool, group(json!({"question": "what?", "instruction": "add 1"}), &["a"]));
    assert_eq!(server.request()["body"]["prompt"], "add 1");
}

#[test]
fn a_judge_gets_the_rubric_and_its_last_score_counts() {
    let server = Server::start(|_, stream| {
        let said = "It lacks detail. A first score: 3. But it is right.\n**Score: 7.5**/10";
        let answer = json!({"choices": [{"message": {"role": "assistant", "content": said}}]});
        reply(stream, "200 OK", &answer.to_string());
    });
    let rubric =
        "judge_rubric=Asked: {{ prompt }} Said: {{ completion }} Right: {{ columns.answer }} 0 to {{ max_score }}";
    let mut pool = server.pool(&["judge_model=gpt", rubric, "api_key_env=PATH"]);
    assert_eq!(rewards(&mut pool, &["{{ 7 * 7 }}"]), [Some(0.75)]);
    let Value::Object(request) = server.request() else { panic!("no request") };
    assert_eq!(request["path"], "/chat/completions");
    assert_eq!(request["authorization"], format!("Bearer {}", std::env::var("PATH").unwrap()));
    assert_eq!((&request["body"]["model"], &request["body"]["temperature"]), (&json!("gpt"), &json!(0.0)));
    let asked = "Asked: why? Said: {{ 7 * 7 }} Right: because 0 to 10.0";
    assert_eq!(request["body"]["messages"], json!([{"role": "user", "content": asked}]));
}

/// Rows 30 and 31: each failure masks only its own sample and is counted by kind; temporary failures are retried.
#[test]
fn a_failing_reward_service_masks_only_its_sample() {
    let num_busy = AtomicUsize::new(0);
    let server = Server::start(move |completion, stream| match completion {
        "garbage" => reply(stream, "200 OK", "<html>"),
        "no score" => reply(stream, "200 OK", "{\"score\": \"high\"}"),
        "nan" => reply(stream, "200 OK", "{\"score\": 1e999}"),
        "none" => reply(stream, "200 OK", "{\"score\": null}"),
        "refused" => reply(stream, "401 Unauthorized", "no key"),
        "elsewhere" => reply(stream, "302 Found", ""),
        "down" => reply(stream, "503 Service Unavailable", "later"),
        "busy" if num_busy.fetch_add(1, Ordering::Relaxed) < 2 => reply(stream, "429 Too Many Requests", ""),
        "long" => {
            let _ = write!(stream, "HTTP/1.1 200 OK\r\n\r\n{{\"score\": 1, \"rest\": \"");
            while stream.write_all(&[b'x'; 1 << 16]).is_ok() {}
        }
        "drip" => {
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n");
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        "silence" => {
            let _ = stream.read(&mut [0]); // until the other side gives up
        }
        "cut" => {
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{{\"sc");
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        _ => reply(stream, "200 OK", "{\"score\": 1}"),
    });
    let mut pool = server.pool(&["timeout_s=3"]);
    let failing = ["garbage", "no score", "nan", "refused", "elsewhere", "down", "long", "drip", "silence", "cut"];
    let completions: Vec<&str> = failing.iter().flat_map(|bad| [*bad, "good"]).chain(["busy", "none"]).collect();
    let of_all = rewards(&mut pool, &completions);
    for (text, reward) in completions.iter().zip(&of_all) {
        assert_eq!(*reward, ["good", "busy"].contains(text).then_some(1.0), "{text}");
    }
    let kinds: Vec<_> = pool.take_failures().into_iter().map(|failure| (failure.kind, failure.count)).collect();
    let expected =
        [(FailureKind::Error, 2), (FailureKind::Timeout, 2), (FailureKind::Output, 4), (FailureKind::Unavailable, 2)];
    assert_eq!(kinds, expected);
}

/// Scores 10,000 completions with at most the allowed number of concurrent requests, each once.
#[test]
fn ten_thousand_completions_are_scored_within_the_bound() {
    let server = Server::start(|completion, stream| reply(stream, "200 OK", &format!("{{\"score\": {completion}}}")));
    let mut pool = server.pool(&["concurrency=8", "timeout_s=120"]);
    let texts: Vec<String> = (0..10_000).map(|number| number.to_string()).collect();
    let mut groups: Vec<_> = texts
        .chunks(100)
        .enumerate()
        .map(|(id, part)| {
            let mut group = group(json!({"prompt": "p"}), &part.iter().map(String::as_str).collect::<Vec<_>>());
            group.prompt.id = id as u64;
            group
        })
        .collect();
    pool.score(&mut groups).unwrap();
    let rewards: Vec<_> =
        groups.iter().flat_map(|group| group.completions.iter().map(|completion| completion.reward)).collect();
    assert!(rewards.iter().enumerate().all(|(number, reward)| *reward == Some(number as f32)));
    assert_eq!(server.num_requests(), 10_000);
    assert!((2..=8).contains(&server.most_open.load(Ordering::Relaxed)));
}

/// Row 31: an outage counts once regardless of the number of open requests, and ends the pool only if it lasts.
#[test]
fn only_a_lasting_outage_of_a_reward_service_ends_the_run() {
    let is_down = Arc::new(AtomicBool::new(true));
    let down = Arc::clone(&is_down);
    let server = Server::start(move |_, stream| match down.load(Ordering::Relaxed) {
        true => reply(stream, "500 Internal Server Error", ""),
        false => reply(stream, "200 OK", "{\"score\": 1}"),
    });
    let keys = |limit: usize| {
        let own = ["reward_funcs=judge".to_owned(), format!("rewards.judge.url={}", server.url)];
        own.into_iter()
            .chain([format!("reward.max_worker_failures={limit}"), "rewards.judge.timeout_s=2".to_owned()])
            .collect::<Vec<_>>()
    };
    let mut patient = pool(&keys(3));
    assert_eq!(rewards(&mut patient, &["x"; 20]), [None; 20]);
    is_down.store(false, Ordering::Relaxed);
    assert_eq!(rewards(&mut patient, &["x"; 20]), [Some(1.0); 20]);
    is_down.store(true, Ordering::Relaxed);
    let mut groups = [group(json!({"prompt": "p"}), &["x"; 200])];
    let error = patient.score(&mut groups).unwrap_err();
    assert_eq!(error.exit_code(), colo_grpo::ExitCode::RewardService);
    assert!(error.to_string().contains("'judge'") && error.to_string().contains("status 500"), "{error}");
}

/// Row 31: if the service does not come back, the run saves a checkpoint and ends with exit code 14.
#[test]
fn a_run_is_saved_when_its_reward_service_disappears() {
    let folder = tempfile::tempdir().unwrap();
    let num_left = AtomicUsize::new(8);
    let server = Server::start(move |_, stream| {
        match num_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
            Ok(left) => reply(stream, "200 OK", &format!("{{\"score\": {}}}", left % 3)),
            Err(_) => reply(stream, "503 Service Unavailable", "gone"),
        }
    });
    let ended = run(&format!(
        "{SMALL_RUN} max_steps=5 save_steps=none reward_weights=[] reward_funcs=[\"judge\"] rewards.judge.url={} \
         rewards.judge.timeout_s=3 rewards.judge.concurrency=1 reward.max_worker_failures=2 output_dir={}",
        server.url,
        folder.path().join("run").display()
    ));
    ended.assert_error("gone", 14, &["reward 'judge'", "status 503"]);
    assert!(folder.path().join("run/checkpoint-1").exists(), "{}", ended.stderr);
}

#[test]
fn invalid_reward_services_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let url = "rewards.judge.url=http://localhost:1/v1";
    for (keys, parts) in [
        ("rewards.judge.url=localhost", ["rewards.judge.url = localhost", "http://host"]),
        (&*format!("{url} rewards.judge.command=[\"cat\"]"), ["rewards.judge.function", "rewards.judge.url"]),
        (
            &*format!("{url} rewards.judge.api_key_env=NOT_SET_ANYWHERE"),
            ["rewards.judge.api_key_env", "an environment variable that is set"],
        ),
        (
            &*format!("{url} rewards.judge.judge_model=m rewards.judge.judge_rubric={{{{completion"),
            ["rewards.judge.judge_rubric", "template"],
        ),
        (&*format!("{url} rewards.judge.batch=group"), ["rewards.judge.batch", "completion"]),
        (
            "rewards.judge.judge_model=m rewards.judge.command=[\"cat\"]",
            ["rewards.judge.judge_model", "the judge's service in"],
        ),
    ] {
        let ended =
            run(&format!("{SMALL_RUN} reward_weights=[] reward_funcs=[\"judge\"] {keys} output_dir={}", out.display()));
        ended.assert_error(keys, 2, &parts);
    }
    assert!(!out.exists());
}
