//! Memory of GPUs and hosts after many cycles, and after a rank was killed. Ignored without a GPU; measurements are
//! printed as one JSON line each.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use colo_grpo::internal::cuda::{Context, FreeMemory};
use colo_grpo::internal::memory::{self, Arena};
use colo_grpo::internal::ranks::{Backend, World};
use colo_grpo::internal::torch;
use colo_grpo::internal::types::{Prompt, SamplingParams};
use serde_json::json;
use tch::Device;

use crate::colocate::setup::Setup;
use crate::program::{SMALL_RUN, command, end, eventually, metrics, processes_of, run};

const GPU: Device = Device::Cuda(0);
const MIB: usize = 1 << 20;
/// Memory that a driver may keep on a killed rank's GPU for bookkeeping.
const KEPT_BYTES: usize = 64 * MIB;

#[test]
#[ignore = "needs a GPU"]
fn gpu_five_hundred_sleep_cycles_leak_no_memory() {
    let world = Arc::new(World::single_on(Backend::Nccl).unwrap());
    let (context, device) = (Context::retain(0).unwrap(), world.device());
    let mut colocated = Setup::new(0).build(&world, &world.mesh(1, 1).unwrap());
    let prompt = Prompt { id: 0, text: String::new(), token_ids: vec![1, 2, 3], columns: Arc::default() };
    let params = SamplingParams { num_generations: 2, max_completion_length: 2, ..SamplingParams::default() };
    let mut held = Vec::new();
    let start = Instant::now();
    for cycle in 1..=500 {
        let groups =
            colocated.with_rollout(|rollout| rollout.generate(std::slice::from_ref(&prompt), &params, |_| ())).unwrap();
        assert_eq!(groups[0].completions.len(), 2);
        if cycle % 50 == 0 {
            memory::settle(device).unwrap();
            torch::release_memory(device).unwrap();
            let FreeMemory { free_bytes: free, total_bytes: total } = context.memory().unwrap();
            held.push((total - free, resident_bytes()));
        }
    }
    let ms = start.elapsed().as_secs_f64() * 1e3 / 500.0;
    println!("{}", json!({"test": "cycles", "cycles": 500, "ms_each": ms, "device_and_host_bytes": held}));
    let (first, last) = (held[0], held[held.len() - 1]);
    assert!(last.0 as f64 <= 1.01 * first.0 as f64 && last.1 as f64 <= 1.01 * first.1 as f64, "{held:?}");
}

/// In a run of the program, rank 1 of two is killed in a phase. The other process must end, and both GPUs must be free, soon after.
#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_of_which_one_is_killed_leave_both_gpus_free() {
    for phase in ["generate", "forward_backward", "wake", "offload", "gather"] {
        ends_and_frees(2, &format!("1:1:{phase}:kill"), "", 10);
    }
}

/// With two engines of four ranks: the killed rank's engine waits for its part of a sum, the other engine for the batch.
#[test]
#[ignore = "needs eight GPUs"]
fn gpu_eight_ranks_of_which_one_is_killed_leave_all_gpus_free() {
    for phase in ["generate", "forward_backward"] {
        ends_and_frees(8, &format!("5:1:{phase}:kill"), "tensor_parallel_size=4", 10);
    }
}

/// One rank of an engine is killed or fails while the other rank's kernels wait for its part of a sum.
#[test]
#[ignore = "needs two GPUs"]
fn gpu_two_ranks_of_one_engine_end_together() {
    for (kind, code) in [("kill", 10), ("oom", 11)] {
        ends_and_frees(2, &format!("1:1:decode:{kind}"), "tensor_parallel_size=2 dtype=bfloat16", code);
    }
}

fn ends_and_frees(num_ranks: usize, fault: &str, keys: &str, code: i32) {
    let gpus: Vec<_> = (0..num_ranks).map(|ordinal| Context::retain(ordinal).unwrap()).collect();
    let free = || gpus.iter().map(|gpu| gpu.memory().unwrap().free_bytes).collect::<Vec<_>>();
    let before = free();
    let folder = tempfile::tempdir().unwrap();
    let mut run = command(&format!(
        "{SMALL_RUN} --nproc {num_ranks} device=cuda zero.stage=3 residency.optimizer=swap kv_cache_bytes=8000000000 \
         max_steps=9 save_steps=none fault={fault} output_dir={} {keys}",
        folder.path().display()
    ));
    let run = run.spawn().unwrap();
    let alive = || processes_of(folder.path()).len();
    assert!(eventually(Duration::from_secs(60), || alive() == num_ranks + 1), "{fault}: it did not start");
    assert!(eventually(Duration::from_secs(60), || alive() <= num_ranks), "{fault}: nobody ended");
    let ended = Instant::now();
    assert!(eventually(Duration::from_secs(15), || alive() == 0), "{fault}: {} processes left", alive());
    let gone_s = ended.elapsed().as_secs_f64();
    let is_free = || free().iter().zip(&before).all(|(now, before)| now + KEPT_BYTES >= *before);
    assert!(eventually(Duration::from_secs(15), is_free), "{fault}: {:?} of {before:?} bytes free", free());
    let free_s = ended.elapsed().as_secs_f64();
    println!("{}", json!({"test": "end", "fault": fault, "gone_s": gone_s, "gpus_free_s": free_s}));
    let left = end(run);
    assert_eq!(left.code, Some(code), "{fault}\n{}", left.stderr);
    assert!(free_s < 15.0, "{fault}: {free_s} s");
}

/// Row 20: memory that another process uses is reported before anything is started.
#[test]
#[ignore = "needs a GPU"]
fn gpu_memory_used_by_others_is_refused_before_the_launch() {
    let mut held = Arena::reserve("held_test", 2 << 30, GPU).unwrap();
    held.map(2 << 30).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL_RUN} device=cuda max_restarts=1 output_dir={}", folder.path().display());
    run(&line).assert_error("in use", 4, &["GPU 0: ", "MiB are in use by", "CUDA_VISIBLE_DEVICES"]);
}

/// Rows 5 and 6: another process fills a GPU while the run continues.
#[test]
#[ignore = "needs a GPU"]
fn gpu_out_of_memory_names_the_key_to_lower() {
    let context = Context::retain(0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let line = format!(
        "{SMALL_RUN} device=cuda residency.optimizer=swap kv_cache_bytes=40000000000 max_steps=100000 save_steps=none \
         output_dir={}",
        folder.path().display()
    );
    let mut filled = command(&line).spawn().unwrap();
    assert!(eventually(Duration::from_secs(60), || !metrics(folder.path()).is_empty()), "it did not start");
    let total = context.memory().unwrap().total_bytes;
    let mut other = Arena::reserve("other_test", total, GPU).unwrap();
    let start = Instant::now();
    while filled.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(30) {
        let more = context.memory().unwrap().free_bytes.saturating_sub(2 * MIB).min(1 << 30);
        let _ = other.map(other.mapped_bytes() + more); // the run may have been faster
    }
    let _ = filled.kill();
    let ended = end(filled);
    println!("{}", json!({"test": "fill", "held_bytes": other.mapped_bytes(), "told": ended.stderr.lines().last()}));
    ended.assert_error("filled", 11, &["out of memory: ", "held", "to mend: "]);
}

/// Rows 5 and 6: a GPU is full when a phase begins. The remaining memory runs out in the forward pass, in the backward pass or immediately.
#[test]
#[ignore = "needs a GPU"]
fn gpu_out_of_memory_in_training_names_the_key_without_restart() {
    let large = "per_device_train_batch_size=1536 num_generations=16 max_tokens_per_micro_batch=1000000 beta=0.1";
    let key = "lower max_tokens_per_micro_batch";
    for (phase, left_mib, key) in [
        ("score", 0, key),
        ("score", 32, key),
        ("forward_backward", 0, key),
        ("forward_backward", 32, key),
        ("forward_backward", 128, key),
        ("optimizer", 0, "raise zero.stage"),
    ] {
        for dtype in ["float32", "bfloat16"] {
            ends_full(
                &format!("{large} dtype={dtype}"),
                phase,
                left_mib,
                &[&format!("step 0, {phase}: out of memory"), key],
            );
        }
    }
}

/// Row 5: memory of the engine runs out: for its cache and buffers when it wakes, for prompts, and for captured steps.
#[test]
#[ignore = "needs a GPU"]
fn gpu_out_of_memory_in_the_engine_names_the_key_without_restart() {
    for dtype in ["float32", "bfloat16"] {
        let keys = format!("dtype={dtype}");
        let key = "lower kv_cache_bytes, max_num_seqs or max_num_batched_tokens";
        for phase in ["wake", "prefill"] {
            ends_full(&keys, phase, 0, &[&format!("step 0, {phase}: out of memory"), key]);
        }
    }
}

/// Starts a run with restarts in which the GPU is filled at the start of `phase`, except for `left_mib`, and checks that it ends with an
/// out-of-memory error.
fn ends_full(keys: &str, phase: &str, left_mib: usize, told: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let ended = run(&format!(
        "{SMALL_RUN} device=cuda kv_cache_bytes=2000000000 max_restarts=2 fault=0:0:{phase}:fill={left_mib} {keys} \
         output_dir={}",
        folder.path().display()
    ));
    let what = format!("{phase}, {left_mib} MiB left, {keys}");
    println!("{}", json!({"test": "full", "case": what, "told": ended.stderr.lines().last()}));
    ended.assert_error(&what, 11, &[&["held: ", "to mend: "], told].concat());
    assert!(!ended.stderr.contains("restart 1 of 2"), "{what}\n{}", ended.stderr);
}

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string(Path::new("/proc/self/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<usize>().unwrap() * 1024
}
