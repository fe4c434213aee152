//! Runs on two nodes: two launchers on this machine, connected by the loopback interface. `scripts/nodes.sh` runs each in its own
//! network namespace and interrupts the network.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command};

use tempfile::TempDir;

use crate::program::{Ended, SMALL_RUN, await_line, command, end, metrics, run};

const TOKEN: &str = "COLO_GRPO_TOKEN";

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// The launcher on one of two nodes.
fn node(node_rank: usize, port: u16, line: &str) -> Command {
    let place = format!("--nnodes 2 --node_rank {node_rank} --master_addr 127.0.0.1 --master_port {port}");
    let mut command = command(&format!("{place} {line}"));
    command.env(TOKEN, "a token of the integration tests");
    command
}

/// Runs `line` on two nodes until it ends.
fn on_two_nodes(line: &str) -> [Ended; 2] {
    let port = free_port();
    let nodes: [Child; 2] = [0, 1].map(|rank| node(rank, port, line).spawn().unwrap());
    nodes.map(end)
}

/// Metrics of a run without times and rates, which differ between runs.
fn lasting_metrics(output_dir: &Path) -> Vec<serde_json::Value> {
    let differs = |key: &str| {
        key == "time" || ["timing_s", "perf/", "step_time", "transition/"].iter().any(|part| key.contains(part))
    };
    let mut lines = metrics(output_dir);
    lines.iter_mut().for_each(|line| line.as_object_mut().unwrap().retain(|key, _| !differs(key)));
    lines
}

#[test]
fn two_nodes_train_like_one_bit_for_bit() {
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
fn an_unreachable_rank_0_times_out() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(); // the kernel connects, and nobody reads
    let port = silent.local_addr().unwrap().port();
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL_RUN} collective_timeout_s=1 output_dir={}", folder.path().join("run").display());
    let ended = end(node(1, port, &line).spawn().unwrap());
    ended.assert_error("a silent rank 0", 4, &[&format!("could not connect to rank 0 at 127.0.0.1:{port} within 1 s")]);
}

#[test]
fn mismatched_nodes_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL_RUN} output_dir={}", folder.path().join("run").display());
    let port = free_port();
    let first = node(0, port, &line).spawn().unwrap();
    let second = node(1, port, &format!("{line} learning_rate=0.5")).spawn().unwrap();
    for ended in [end(first), end(second)] {
        ended.assert_error(
            "another learning rate",
            2,
            &["learning_rate = 0.5: expected the same value on all nodes: node 0", "node 1"],
        );
    }
    let missing = end(node(0, port, &line).env_remove(TOKEN).spawn().unwrap());
    missing.assert_error("no token", 4, &["COLO_GRPO_TOKEN is not set", "openssl rand -hex 16"]);
    let lost = run(&format!("--nnodes 2 --node_rank 2 {line}"));
    lost.assert_error("a node too many", 2, &["--node_rank = 2: expected 0 to 1"]);
    let nowhere = run(&format!("--nnodes 2 --node_rank 1 --master_port 0 {line}"));
    nowhere.assert_error(
        "a port that nobody can know",
        2,
        &["--master_port = 0: expected a port that is free on node 0"],
    );
}

/// Working folders of two nodes without shared files; each has a copy of the repository's `configs`.
fn two_disks() -> [TempDir; 2] {
    [0, 1].map(|_| {
        let folder = tempfile::tempdir().unwrap();
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
        std::os::unix::fs::symlink(configs, folder.path().join("configs")).unwrap();
        folder
    })
}

/// Runs `line` on two nodes, each in its own folder.
fn on_two_disks(disks: &[TempDir; 2], line: &str) -> [Ended; 2] {
    let port = free_port();
    [0, 1].map(|rank| node(rank, port, line).current_dir(disks[rank].path()).spawn().unwrap()).map(end)
}

#[test]
fn an_output_folder_that_is_not_shared_is_refused_with_the_node() {
    for ended in on_two_disks(&two_disks(), &format!("{SMALL_RUN} output_dir=run")) {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let [second, first] = [1, 0].map(|node| format!("node {node} ({})", host.trim()));
        let seen = format!("{second} does not see the file .node-check-");
        ended.assert_error(
            "two folders",
            2,
            &["output_dir = run", &seen, &format!("that {first} wrote to it"), "save_on_each_node"],
        );
    }
}

#[test]
fn every_node_may_write_its_own_complete_checkpoints() {
    let line = "--nproc 2 save_on_each_node=true max_steps=4 save_steps=2 save_total_limit=2 output_dir=run";
    let run_on = |disks: &[TempDir; 2], more: &str| {
        let ended = on_two_disks(disks, &format!("{SMALL_RUN} {line} {more}"));
        assert!(ended.iter().all(|node| node.code == Some(0)), "{}\n{}", ended[0].stderr, ended[1].stderr);
        ended
    };
    let disks = two_disks();
    run_on(&disks, "");
    let weights =
        |disk: usize, part: &str| std::fs::read(disks[disk].path().join("run").join(part).join("model.safetensors"));
    let straight = weights(0, "final").unwrap();
    assert!(straight == weights(1, "final").unwrap(), "each node has the model");
    let states =
        [0, 1].map(|disk| std::fs::read(disks[disk].path().join("run/checkpoint-2/trainer_state.json")).unwrap());
    assert!(states[0] == states[1], "copies are alike");

    // Node 1 was not done with its newest copy when the run ended: both go on from the one before.
    std::fs::remove_dir_all(disks[1].path().join("run/checkpoint-4")).unwrap();
    let ended = run_on(&disks, "resume_from_checkpoint=latest");
    assert_eq!(ended.map(|node| node.code), [Some(0); 2]);
    assert!(weights(1, "checkpoint-4").is_ok() && weights(1, "final").unwrap() == straight);

    // A node's copy is whole: one node of as many ranks goes on from it alone.
    let from = disks[1].path().join("run/checkpoint-2");
    let alone = disks[0].path().join("alone");
    let one = run(&format!(
        "{SMALL_RUN} --nproc 4 zero.shard_group_size=2 max_steps=4 save_steps=2 output_dir={} resume_from_checkpoint={}",
        alone.display(),
        from.display()
    ));
    assert_eq!(one.code, Some(0), "{}", one.stderr);
    assert!(std::fs::read(alone.join("final/model.safetensors")).unwrap() == straight);

    // A checkpoint of another run by the same name is no copy, and without any in common there is nothing to go on from.
    for checkpoint in ["checkpoint-2", "checkpoint-4"] {
        std::fs::remove_dir_all(disks[1].path().join("run").join(checkpoint)).unwrap();
    }
    let refused = on_two_disks(&disks, &format!("{SMALL_RUN} {line} resume_from_checkpoint=latest"));
    refused[0].assert_error(
        "no copy",
        5,
        &["every node needs a complete copy", "checkpoint-2, checkpoint-4; node 1 (", "has none"],
    );
}

#[test]
fn save_on_each_node_needs_separate_folders_and_unsharded_state() {
    let folder = tempfile::tempdir().unwrap();
    let line =
        format!("{SMALL_RUN} --nproc 2 save_on_each_node=true output_dir={}", folder.path().join("run").display());
    for ended in on_two_nodes(&line) {
        ended.assert_error(
            "one folder",
            2,
            &["save_on_each_node = true: expected false, as the nodes share output_dir", "sees the file"],
        );
    }
    for ended in on_two_nodes(&format!("{line} zero.shard_group_size=4")) {
        ended.assert_error("shards over nodes", 2, &["save_on_each_node = true", "zero.shard_group_size = 4"]);
    }
}

/// ZeRO-3 across nodes on request and otherwise within a node, engines on another node than the trainers, and engines with pipeline stages.
#[test]
fn zero_shards_and_split_roles_may_span_nodes() {
    let folder = tempfile::tempdir().unwrap();
    for keys in [
        "zero.stage=3 zero.shard_group_size=4",
        "zero.stage=3 zero.shard_group_size=2",
        "mode=split split.rollout_gpus=2 zero.shard_group_size=2 residency.optimizer=resident",
        "zero.stage=3 zero.shard_group_size=4 tensor_parallel_size=1 pipeline_parallel_size=2",
        "mode=split split.rollout_gpus=2 zero.shard_group_size=2 residency.optimizer=resident tensor_parallel_size=1 pipeline_parallel_size=2",
    ] {
        let weights = |name: &str, keys: &str, runs: &dyn Fn(&str) -> Vec<Ended>| {
            let output_dir = folder.path().join(name);
            let _ = std::fs::remove_dir_all(&output_dir);
            let ended = runs(&format!("{SMALL_RUN} max_steps=2 {keys} output_dir={}", output_dir.display()));
            assert!(ended.iter().all(|run| run.code == Some(0)), "{keys}: {}", ended[0].stderr);
            std::fs::read(output_dir.join("final/model.safetensors")).unwrap()
        };
        let two = weights("two", keys, &|line| on_two_nodes(&format!("--nproc 2 {line}")).into());
        let one = weights("one", keys, &|line| vec![run(&format!("--nproc 4 {line}"))]);
        assert!(two == one, "{keys}: weights differ");
    }
}

#[test]
fn checkpoints_resume_on_another_number_of_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let line = |name: &str, more: &str| {
        format!("{SMALL_RUN} max_steps=4 save_steps=2 {more} output_dir={}", path(name).display())
    };
    let from = |name: &str| format!("resume_from_checkpoint={}", path(name).join("checkpoint-2").display());
    let weights = |name: &str| std::fs::read(path(name).join("final/model.safetensors")).unwrap();
    let two = |name: &str, more: &str| {
        let ended = on_two_nodes(&line(name, &format!("--nproc 2 {more}")));
        assert!(ended.iter().all(|node| node.code == Some(0)), "{name}: {}\n{}", ended[0].stderr, ended[1].stderr);
    };
    let one = |name: &str, more: &str| {
        let ended = run(&line(name, more));
        assert_eq!(ended.code, Some(0), "{name}: {}", ended.stderr);
    };
    two("two", "");
    one("one", &format!("--nproc 4 zero.shard_group_size=2 {}", from("two")));
    assert!(weights("two") == weights("one"), "1 x 4 goes on to other weights");
    one("straight", "--nproc 4 zero.shard_group_size=2");
    two("again", &from("straight"));
    assert!(weights("two") == weights("again"), "2 x 2 goes on to other weights");
    // Half as many ranks add up in another order. What they resume is the same to the last bit.
    one("fewer", &format!("--nproc 2 per_device_train_batch_size=16 max_steps=2 {}", from("two")));
    let saved = std::fs::read(path("two").join("checkpoint-2/model.safetensors")).unwrap();
    assert!(weights("fewer") == saved, "1 x 2 resumes other weights");
}
