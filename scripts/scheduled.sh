#!/usr/bin/env bash
# Checks that take too long for CI or need more than a stable compiler, to be run by a schedule. Each one is run or said to be lacking a
# tool; where one fails or cannot be run, the script ends with 1 after the others.
#   scripts/scheduled.sh [CHECK..]    # all of them unless some are named
#   SECONDS_EACH=600 scripts/scheduled.sh fuzz
# deny   advisories, licences and sources of all libraries, by deny.toml         (cargo-deny, the network)
# docs   the documentation, built as docs.rs does: without libtorch
# fuzz   every fuzz target for SECONDS_EACH, two minutes unless it is set        (cargo-fuzz, a nightly compiler, scripts/setup.sh)
# kernels  every CUDA kernel for every GPU; CI compiles a text once that several GPUs get (scripts/setup.sh)
# miri   the allocator that counts, the scheduler and its blocks, interpreted    (a nightly compiler with miri)
# Loom is not among them: it replaces the atomics of one process, and those of src/ranks/shm lie in memory that processes share.
set -euo pipefail
cd "$(dirname "$0")/.."
checks=(deny docs fuzz kernels miri)
failed=()

# Ends a check with what it lacks and how to get it.
lack() { echo "lacks $1: $2" >&2; return 1; }
has_nightly() { rustup run nightly rustc --version >/dev/null 2>&1 || lack "a nightly compiler" "rustup toolchain install nightly"; }

check_deny() {
    command -v cargo-deny >/dev/null || lack cargo-deny "cargo install --locked cargo-deny" || return
    cargo deny --locked check
}

check_docs() {
    # Not where a build with libtorch is kept.
    DOCS_RS=1 LIBTORCH=/nonexistent CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/docs_rs" \
        cargo doc --locked --no-deps --lib --features tch/doc-only
}

check_fuzz() {
    has_nightly || return
    command -v cargo-fuzz >/dev/null || lack cargo-fuzz "cargo install --locked cargo-fuzz" || return
    [ -e .libtorch/lib/libtorch_cpu.so ] || lack libtorch scripts/setup.sh || return
    local target outcome=0
    export LIBTORCH="$PWD/.libtorch" LD_LIBRARY_PATH="$PWD/.libtorch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    for target in fuzz/fuzz_targets/*.rs; do
        target=$(basename "$target" .rs)
        # Its corpus and what it found stay in fuzz/, which git ignores.
        cargo +nightly fuzz run --sanitizer none "$target" -- -max_total_time="${SECONDS_EACH:-120}" -rss_limit_mb=4096 || outcome=1
    done
    return $outcome
}

check_kernels() {
    [ -e .libtorch/lib/libtorch_cpu.so ] || lack libtorch scripts/setup.sh || return
    cargo test --locked --lib -- --ignored --exact cuda::nvrtc::tests::every_kernel_compiles_for_every_gpu
}

check_miri() {
    has_nightly || return
    rustup run nightly cargo miri --version >/dev/null 2>&1 || lack miri "rustup +nightly component add miri rust-src" || return
    # Nothing is linked. Tests that start processes are left out, as Miri starts none.
    DOCS_RS=1 LIBTORCH=/nonexistent MIRIFLAGS=-Zmiri-disable-isolation CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri" \
        cargo +nightly miri test --locked --lib --features tch/doc-only -- \
        untrusted::meter::tests::freed_memory rollout::block_manager rollout::kept rollout::scheduler::tests::a_
}

for check in "${@:-${checks[@]}}"; do
    [[ " ${checks[*]} " == *" $check "* ]] || { echo "no check '$check': ${checks[*]}" >&2; exit 2; }
done
for check in "${@:-${checks[@]}}"; do
    printf '\n== %s\n' "$check"
    "check_$check" && echo "$check: passed" || failed+=("$check")
done
[ ${#failed[@]} = 0 ] || { printf '\nnot passed: %s\n' "${failed[*]}" >&2; exit 1; }
