//! Ranks started by another launcher while they wait for each other, and unrelated processes that connect or interfere.

use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use colo_grpo::internal::torch::Store;

use crate::program::{SMALL_RUN, command, end, signal, wait_until};

/// Starts one of two ranks, as torchrun does.
fn rank(rank: usize, port: u16, more: &str) -> Command {
    let folder = std::env::temp_dir().join("colo-grpo-test-that-never-starts");
    let mut command = command(&format!("{SMALL_RUN} output_dir={} {more}", folder.display()));
    let (rank, port) = (rank.to_string(), port.to_string());
    command.envs([("RANK", rank.as_str()), ("LOCAL_RANK", &rank), ("WORLD_SIZE", "2")]);
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
    command
}

fn listen() -> (TcpListener, u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Row 4: at this point there is nothing to save, so the rank ends at once.
#[test]
fn a_rank_waiting_for_others_reacts_to_a_signal() {
    let (listener, port) = listen();
    let waiting = rank(1, port, "").spawn().unwrap();
    let _unanswered = listener.accept().unwrap();
    signal(waiting.id(), "-TERM");
    let ended = end(waiting);
    assert_eq!(ended.code, Some(75), "{}", ended.stderr);
    assert!(ended.stderr.contains("stopped by a signal before there was anything to save"), "{}", ended.stderr);

    drop(listener);
    let mut first = rank(0, port, "").spawn().unwrap();
    let serves = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok();
    wait_until(|| serves() || first.try_wait().unwrap().is_some());
    signal(first.id(), "-TERM");
    let ended = end(first);
    assert_eq!(ended.code, Some(75), "{}", ended.stderr);
}

/// If rank 0 ends before the other ranks have connected to it, they print a one-line error.
#[test]
fn a_dead_rank_0_is_reported_in_one_line() {
    let (listener, port) = listen();
    std::thread::spawn(move || listener.incoming().for_each(drop)); // it ends as soon as it is met
    let ended = end(rank(1, port, "collective_timeout_s=3").spawn().unwrap());
    ended.assert_error("a dead rank 0", 4, &[&format!("rendezvous store at 127.0.0.1:{port}")]);
    assert_eq!(ended.stderr.trim().lines().count(), 1, "{}", ended.stderr);
}

/// Row 41: with this crate's launcher, ranks meet in inherited memory.
#[test]
fn an_unrelated_client_on_the_port_changes_nothing() {
    let (listener, port) = listen();
    drop(listener);
    let folder = tempfile::tempdir().unwrap();
    let line = format!("--nproc 2 --master_port {port} {SMALL_RUN} output_dir={}", folder.path().join("run").display());
    let started = command(&line).spawn().unwrap();
    let stranger = std::thread::spawn(move || {
        let Ok(store) = Store::connect("127.0.0.1", port, Duration::from_secs(5)) else { return };
        while store.set("colo-grpo/0/segment", b"{\"Ok\":\"/dev/zero\"}").is_ok() {}
    });
    let ended = end(started);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    stranger.join().unwrap();
}

/// Row 41: with other launchers, any process can write to the store, so its contents are checked.
#[test]
fn shared_memory_named_by_another_user_is_refused() {
    let store = Store::host("127.0.0.1", 0, None, Duration::from_secs(600)).unwrap();
    let mut file: File = tempfile::tempfile().unwrap();
    file.write_all(&vec![0; 64 << 20]).unwrap();
    let (own, fd) = (std::process::id(), file.as_raw_fd());
    for (place, told) in [
        (format!("{{\"Ok\":[{own},{fd}]}}"), "it belongs to another run"),
        (format!("{{\"Ok\":[{own},1000000]}}"), "memory of rank 0"),
        ("{\"Ok\":\"/dev/zero\"}".to_owned(), "rendezvous: invalid type"),
    ] {
        store.set("colo-grpo/0/segment", place.as_bytes()).unwrap();
        let ended = end(rank(1, store.port(), "").spawn().unwrap());
        ended.assert_error(&place, 4, &[told]);
    }
}
