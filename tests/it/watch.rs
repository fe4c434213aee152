//! `colo-grpo watch` from the perspective of a browser.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Child;

use serde_json::Value;

use crate::program::{SMALL_RUN, await_line, command, end, run, signal, stdout_of, wait_until};

/// A running `watch` server, which is killed if a test fails.
struct Watcher {
    child: Option<Child>,
    address: String,
}

impl Watcher {
    fn start(folders: &[&Path]) -> Self {
        let mut command = command("watch --port 0");
        let mut child = command.args(folders).spawn().unwrap();
        let line = await_line(&mut child, "watching at http://");
        let address = line.split_once("http://").unwrap().1.split(' ').next().unwrap().to_owned();
        Self { child: Some(child), address }
    }

    /// Sends a request. Returns the headers and body of the response.
    fn call(&self, method: &str, path: &str, host: &str) -> (String, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(format!("{method} {path} HTTP/1.0\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in '{text}'"));
        (head.to_owned(), body.to_owned())
    }

    fn get(&self, path: &str) -> (u16, Value) {
        let (head, body) = self.call("GET", path, &self.address);
        let json = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
        (head.split(' ').nth(1).unwrap().parse().unwrap(), json)
    }

    fn found(&self, path: &str) -> Value {
        let (status, answer) = self.get(path);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    fn refused(&self, path: &str) -> (u16, String) {
        let (status, answer) = self.get(path);
        (status, answer["error"]["message"].as_str().unwrap().to_owned())
    }

    fn stop(mut self) {
        let child = self.child.take().unwrap();
        signal(child.id(), "-INT");
        let ended = end(child);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

#[test]
fn watch_follows_running_and_hostile_runs() {
    let folder = tempfile::tempdir().unwrap();
    let (real, other) = (folder.path().join("real"), folder.path().join("<img src=x onerror=alert(1)>"));
    let more = format!("{SMALL_RUN} max_steps=2 log_completions=true output_dir={}", real.display());
    stdout_of(&more);
    fs::create_dir(&other).unwrap();
    let metrics = other.join("metrics.jsonl");
    fs::write(&metrics, "{\"step\":1,\"time\":1,\"reward\":0.5,\"rewards/</script><b>/mean\":1}\n{\"step\":2,")
        .unwrap();
    let watcher = Watcher::start(&[folder.path()]);

    let (head, page) = watcher.call("GET", "/", &watcher.address);
    assert!(head.contains("content-security-policy: default-src 'none'") && page.contains("<title>colo-grpo watch"));
    let live = watcher.found("/live");
    let names: Vec<_> = live["runs"].as_array().unwrap().iter().map(|run| text(&run["name"])).collect();
    assert_eq!(names, ["<img src=x onerror=alert(1)>", "real"]);
    assert_eq!(live["selected"], serde_json::json!([1]), "the newest");
    assert_eq!((text(&live["runs"][1]["state"]), &live["runs"][1]["newest"]), ("done", &Value::from(2)));
    assert!(text(&live["ranks"]).contains("2 of 2") && text(&live["ranks"]).contains("done"), "{live}");

    let charts = watcher.found("/charts?runs=0,1");
    let all = ["tiles", "charts", "metrics", "configuration"].map(|part| text(&charts[part])).concat();
    assert!(all.contains("&lt;img src=x") && all.contains("&lt;/script&gt;") && all.contains("num_generations"));
    assert!(!all.contains("<img") && !all.contains("</script>") && charts["revision"] != live["revision"]);
    let alone = watcher.found("/charts?runs=1");
    assert!(text(&alone["charts"]).contains("Seconds per step") && alone["revision"] == live["revision"]);

    let shown = watcher.found("/completions?run=1&kind=all");
    let place = ["step", "before", "after", "num_pages"].map(|name| shown[name].clone());
    assert_eq!(place, [Value::from(2), Value::from(1), Value::Null, Value::from(1)]);
    assert!(text(&shown["html"]).contains("8 of 8 completions, of 2 prompts"), "{shown}");
    let none = watcher.found("/completions?run=1&step=1&text=no+such+text");
    assert!(text(&none["html"]).contains("0 of 8 completions"), "{none}");
    let pair = watcher.found("/completions?run=1&step=1&other_run=1&other_step=2");
    assert!(text(&pair["html"]).contains("real, step 1") && text(&pair["html"]).contains("real, step 2"), "{pair}");

    // Files that change under the watcher's eyes.
    fs::write(&metrics, "{\"step\":1,\"time\":1,\"reward\":0.5}\n{\"step\":2,\"time\":2,\"reward\":0.25}\n").unwrap();
    wait_until(|| watcher.found("/live?runs=0")["runs"][0]["reward"] == "0.25");
    let latest = real.join("completions/completions_00002.parquet");
    let bytes = fs::read(&latest).unwrap();
    fs::write(&latest, &bytes[..bytes.len() / 2]).unwrap();
    let (status, message) = watcher.refused("/completions?run=1");
    assert!(
        status == 404 && message.contains("completions of step 2: ") && message.contains("being written"),
        "{message}"
    );
    fs::remove_dir_all(&real).unwrap();
    wait_until(|| watcher.found("/live?runs=1")["runs"][1]["state"] == "deleted");
    wait_until(|| text(&watcher.found("/live?runs=1")["warnings"]).contains("metrics.jsonl was deleted"));
    watcher.stop();
}

#[test]
fn watch_refuses_invalid_queries_and_foreign_origins() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    run(&format!("watch {}/file", folder.path().display())).assert_error(
        "a file",
        2,
        &["DIR", "file", "output folder of a run"],
    );
    let watcher = Watcher::start(&[folder.path()]);
    assert!(text(&watcher.found("/live")["message"]).contains("no run in"));
    fs::create_dir(folder.path().join("new")).unwrap();
    fs::write(folder.path().join("new/metrics.jsonl"), "").unwrap();
    wait_until(|| watcher.found("/live")["runs"][0]["name"] == "new");
    fs::create_dir(folder.path().join("planted")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.path().join("planted/metrics.jsonl")).unwrap();
    wait_until(|| watcher.found("/live")["runs"][1]["name"] == "planted");
    let planted = watcher.found("/live")["runs"][1]["messages"].to_string();
    assert!(planted.contains("metrics.jsonl is a symbolic link, which could lead out of its folder"), "{planted}");
    for (path, status, fragment) in [
        ("/nowhere", 404, "the page is at /"),
        ("/completions?run=7", 404, "run = 7: there is no such run"),
        ("/completions?run=x", 400, "run = x: expected a whole number"),
        ("/completions?run=0", 404, "log_completions = true"),
    ] {
        let (got, message) = watcher.refused(path);
        assert!(got == status && message.contains(fragment), "{path}: {got} {message}");
    }
    for (method, host, status) in
        [("POST", "localhost", "405"), ("GET", "evil.example", "403"), ("GET", "LocalHost:1", "200")]
    {
        let (head, _) = watcher.call(method, "/live", host);
        assert!(head.starts_with(&format!("HTTP/1.0 {status}")), "{method} {host}: {head}");
    }
    watcher.stop();
}
