//! Runs over two nodes: two launchers on this machine, which meet over the loopback interface. `scripts/nodes.sh` gives each a
//! network of its own and breaks it.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command};

use crate::program::{Ended, SMALL_RUN, await_line, command, end, metrics, run};

const TOKEN: &str = "COLO_GRPO_TOKEN";

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// The launcher of one of two nodes.
fn node(node_rank: usize, port: u16, line: &str) -> Command {
    let place = format!("--nnodes 2 --node_rank {node_rank} --master_addr 127.0.0.1 --master_port {port}");
    let mut command = command(&format!("{place} {line}"));
    command.env(TOKEN, "a token of the integration tests");
    command
}

/// Runs `line` on two nodes to the end.
fn on_two_nodes(line: &str) -> [Ended; 2] {
    let port = free_port();
    let nodes: [Child; 2] = [0, 1].map(|rank| node(rank, port, line).spawn().unwrap());
    nodes.map(end)
}

/// Metrics of a run without times and rates, which differ from run to run.
fn lasting_metrics(output_dir: &Path) -> Vec<serde_json::Value> {
    let differs = |key: &str| {
        key == "time" || ["timing_s", "perf/", "step_time", "transition/"].iter().any(|part| key.contains(part))
    };
    let mut lines = metrics(output_dir);
    lines.iter_mut().for_each(|line| line.as_object_mut().unwrap().retain(|key, _| !differs(key)));
    lines
}

#[test]
fn two_nodes_train_to_the_bits_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let line = |name: &str, more: &str| {
        format!("{SMALL_RUN} max_steps=2 {more} output_dir={}", folder.path().join(name).display())
    };
    let [first, second] = on_two_nodes(&line("two", "--nproc 2 tensor_parallel_size=2"));
    assert_eq!((first.code, second.code), (Some(0), Some(0)), "{}\n{}", first.stderr, second.stderr);
    assert!(first.stderr.contains("node 0 of 2") && second.stderr.contains("ranks 2 to 3, interface lo"));
    let one = run(&line("one", "--nproc 4 tensor_parallel_size=2 zero.shard_group_size=2"));
    assert_eq!(one.code, Some(0), "{}", one.stderr);
    let weights = |name: &str| std::fs::read(folder.path().join(name).join("final/model.safetensors")).unwrap();
    assert!(weights("two") == weights("one"), "weights differ");
    let found = lasting_metrics(&folder.path().join("two"));
    assert_eq!(found.len(), 2);
    assert_eq!(found, lasting_metrics(&folder.path().join("one")));
}

#[test]
fn a_node_that_dies_ends_the_other_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("--nproc 2 {SMALL_RUN} max_steps=100000 output_dir={}", folder.path().join("run").display());
    let port = free_port();
    let first = node(0, port, &line).spawn().unwrap();
    let mut second = node(1, port, &line).spawn().unwrap();
    await_line(&mut second, "node 1 of 2");
    let log = folder.path().join("run/metrics.jsonl");
    crate::program::wait_until(|| std::fs::metadata(&log).is_ok_and(|log| log.len() > 0));
    second.kill().unwrap(); // the launcher; its workers die with it
    let ended = end(first);
    ended.assert_error("a dead node", 10, &["failed: on node 1 (", "its connection closed"]);
    drop(end(second));
}

#[test]
fn nodes_that_differ_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL_RUN} output_dir={}", folder.path().join("run").display());
    let port = free_port();
    let first = node(0, port, &line).spawn().unwrap();
    let second = node(1, port, &format!("{line} learning_rate=0.5")).spawn().unwrap();
    for ended in [end(first), end(second)] {
        ended.assert_error(
            "another learning rate",
            2,
            &["learning_rate = 0.5: expected the value of node 0", "node 1"],
        );
    }
    let missing = end(node(0, port, &line).env_remove(TOKEN).spawn().unwrap());
    missing.assert_error("no token", 4, &["COLO_GRPO_TOKEN is not set", "openssl rand -hex 16"]);
    let lost = run(&format!("--nnodes 2 --node_rank 2 {line}"));
    lost.assert_error("a node too many", 2, &["--node_rank = 2: expected 0 to 1"]);
}

/// One key, two folders: each node has a working folder of its own.
#[test]
fn a_folder_that_is_not_shared_is_refused_by_node() {
    let port = free_port();
    let line = format!("{SMALL_RUN} output_dir=run");
    let nodes = [0, 1].map(|rank| {
        let folder = tempfile::tempdir().unwrap();
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
        std::os::unix::fs::symlink(configs, folder.path().join("configs")).unwrap();
        let started = node(rank, port, &line).current_dir(folder.path()).spawn().unwrap();
        (started, folder)
    });
    for (started, _folder) in nodes {
        end(started).assert_error("two folders", 2, &["output_dir = run", "node 1 does not see the file .node-check-"]);
    }
}
