//! Runs that run out of memory in a phase. The fault `fill` allocates the remaining memory at the start of the phase, so that the next
//! allocation fails. gpu_survival does the same on GPUs, also for the engine's phases. Numbers in comments are rows of docs/faults.md.

use crate::program::{SMALL_RUN, run};

/// A batch whose activations need far more memory than is left.
const LARGE: &str = "per_device_train_batch_size=1536 num_generations=16 max_tokens_per_micro_batch=1000000 \
    kv_cache_bytes=33554432 beta=0.1";

/// Row 6: wherever memory runs out in forward or backward, the error says so and names a key, and the run is not restarted.
#[test]
fn out_of_memory_in_training_names_the_key_without_restart() {
    for (phase, left_mib) in [("score", 48), ("forward_backward", 48), ("forward_backward", 160)] {
        ends_with(phase, left_mib, "lower max_tokens_per_micro_batch");
    }
}

fn ends_with(phase: &str, left_mib: usize, key: &str) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let fault = format!("max_restarts=2 fault=0:0:{phase}:fill={left_mib}");
    let ended = run(&format!("{SMALL_RUN} {LARGE} {fault} output_dir={}", out.display()));
    let told = format!("error: rank 0, step 0, {phase}: out of memory: a tensor in phase {phase} (held: ");
    ended.assert_error(phase, 11, &[&told, "policy_weights 3 MiB", "to mend: ", key, " bytes"]);
    assert!(!ended.stderr.contains("restart 1 of 2"), "{}", ended.stderr);
}
