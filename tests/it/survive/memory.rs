//! Runs whose memory ends in a phase. The fault `fill` takes what is left when the phase begins: what fails is then whatever
//! allocation comes next. gpu_survival does the same on GPUs, the engine's phases too. Numbers are rows of docs/faults.md.

use crate::program::{SMALL_RUN, run};

/// A batch whose activations are far larger than what is left.
const LARGE: &str = "per_device_train_batch_size=1536 num_generations=16 max_tokens_per_micro_batch=1000000 \
    kv_cache_bytes=33554432 beta=0.1";

/// 6: wherever in a forward or backward memory ends, it is told as such, with the key, and the run is not started again.
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
