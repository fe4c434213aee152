//! A local HTTP server with the Hub's protocol that can simulate faults.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use sha2::{Digest, Sha256};

/// The commit hash of every repository.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Faults to simulate. A number counts how often a fault occurs.
#[derive(Debug, Default, Clone)]
pub struct Faults {
    /// The next download is cut off after this number of bytes.
    pub cut_after: Option<usize>,
    /// Number of downloads that contain a wrong byte.
    pub num_corrupt: usize,
    /// Whether range requests are ignored.
    pub never_resumes: bool,
    /// Requests without this token are rejected.
    pub token: Option<String>,
}

struct State {
    /// Files by repository path: `models/USER/NAME`.
    files: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    faults: Faults,
    /// Each request: method, path, `Range` header and `Authorization` header.
    requests: Vec<String>,
}

/// A running server, which stops when it is dropped.
#[derive(Clone)]
pub struct Server {
    state: Arc<Mutex<State>>,
    port: u16,
}

impl Server {
    /// Starts a server with one repository (`models/USER/NAME` or `datasets/USER/NAME`) that has these files.
    pub fn new(repo: &str, files: &[(&str, &[u8])]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = State { files: BTreeMap::new(), faults: Faults::default(), requests: Vec::new() };
        let server = Self { state: Arc::new(Mutex::new(state)), port };
        server.add(repo, files);
        let own = server.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let own = own.clone();
                thread::spawn(move || own.answer(stream));
            }
        });
        server
    }

    pub fn add(&self, repo: &str, files: &[(&str, &[u8])]) {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
        self.state.lock().unwrap().files.insert(repo.to_owned(), files);
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().unwrap().faults = faults;
    }

    /// The requests since the last call.
    pub fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let Some(request) = lines.next() else { return };
        let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
        let header = |name: &str| {
            let found = headers.iter().filter_map(|line| line.split_once(": "));
            found.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
        };
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (range, token) = (header("range"), header("authorization"));
        let mut state = self.state.lock().unwrap();
        let log = [method, path, range.as_deref().unwrap_or_default(), token.as_deref().unwrap_or_default()];
        state.requests.push(log.join(" ").trim_end().to_owned());
        let response = state.respond(self.port, method, path, range.as_deref(), token.as_deref());
        drop(state);
        let _ = stream.write_all(&response); // a client that ends early has its reasons
    }
}

impl State {
    fn respond(&mut self, port: u16, method: &str, path: &str, range: Option<&str>, token: Option<&str>) -> Vec<u8> {
        let is_store = path.starts_with("/store/");
        let needed = self.faults.token.as_ref().map(|token| format!("Bearer {token}"));
        if !is_store && needed.is_some() && needed.as_deref() != token {
            return reply(401, &[("X-Error-Message", "Repository not found")], b"no");
        }
        if let Some(rest) = path.strip_prefix("/api/") {
            return match rest.split_once("/revision/").filter(|(_, revision)| ["main", COMMIT].contains(revision)) {
                Some((repo, _)) => self.info(repo),
                None => reply(404, &[("X-Error-Code", "RevisionNotFound")], b""),
            };
        }
        // /store/REPO/resolve/COMMIT/FILE, /own/.. and /.. without `models/`
        let plain = path.trim_start_matches("/store").trim_start_matches("/own").trim_start_matches('/');
        let found = plain.split_once(&format!("/resolve/{COMMIT}/")).and_then(|(repo, name)| {
            let repo = if repo.starts_with("datasets/") { repo.to_owned() } else { format!("models/{repo}") };
            Some((self.files.get(&repo)?.get(name)?.clone(), name.to_owned()))
        });
        let Some((bytes, name)) = found else { return reply(404, &[], b"") };
        let is_large = name.ends_with(".safetensors") || name.ends_with(".parquet");
        let size = bytes.len().to_string();
        match (is_store, path.starts_with("/own/")) {
            (false, _) if is_large => {
                // Another host's name, as the Hub's store has: no token may go there.
                let place = format!("http://localhost:{port}/store{path}");
                let etag = format!("\"{}\"", hex(&Sha256::digest(&bytes)));
                let linked = [("Location", &*place), ("X-Linked-Etag", &etag), ("X-Linked-Size", &size)];
                reply(302, &linked, b"")
            }
            (false, false) => reply(307, &[("Location", &format!("/own{path}"))], b""),
            _ => self.contents(method, &bytes, is_large, range),
        }
    }

    fn info(&self, repo: &str) -> Vec<u8> {
        let Some(files) = self.files.get(repo) else { return reply(404, &[], b"") };
        let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        reply(200, &[], serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string().as_bytes())
    }

    fn contents(&mut self, method: &str, bytes: &[u8], is_large: bool, range: Option<&str>) -> Vec<u8> {
        let git = format!("\"{}\"", git_hash(bytes));
        let etag = if is_large { "\"of the store\"" } else { &git };
        if method == "HEAD" {
            let head = reply(200, &[("ETag", etag)], bytes);
            return head[..head.len() - bytes.len()].to_vec();
        }
        let first = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
        let first = first.filter(|_| !self.faults.never_resumes);
        if first.is_some_and(|first| first >= bytes.len()) {
            return reply(416, &[], b"");
        }
        let mut body = bytes[first.unwrap_or(0)..].to_vec();
        if self.faults.num_corrupt > 0 {
            self.faults.num_corrupt -= 1;
            body[0] ^= 1;
        }
        let mut response = reply(if first.is_some() { 206 } else { 200 }, &[("ETag", etag)], &body);
        if let Some(cut) = self.faults.cut_after.take().filter(|cut| *cut < body.len()) {
            response.truncate(response.len() - body.len() + cut);
        }
        response
    }
}

fn reply(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {status} Status\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
    headers.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
    [text.as_bytes(), b"\r\n", body].concat()
}

/// The git blob hash of these contents.
fn git_hash(bytes: &[u8]) -> String {
    hex(&sha1::Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize())
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
