#!/usr/bin/env bash
# Everything that is tested: format, lints, the documentation's links, unit and integration tests (real processes on the CPU
# backend), documentation tests (programs that must not compile), the scripts, and the demo's job. Needs no GPU. Tests of
# the reward math fetch math-verify once with pip, by the hashes in scripts/math_verify.txt. At its end, also where a step fails, it prints
# how many seconds each step took, and how many its processes computed (more than passed where both cores were busy).
#   scripts/test.sh
set -euo pipefail
cd "$(dirname "$0")/.."
steps=()
# CPU seconds of all processes that have ended.
computed() { local stat; read -r stat <"/proc/$$/stat"; set -- ${stat##*) }; echo $(((${14} + ${15}) / $(getconf CLK_TCK))); }
step() { steps+=("$SECONDS $(computed) $*"); printf '\n== %s (%ds)\n' "$*" "$SECONDS"; }
end() {
    local step next seconds cpu name ended computed
    steps+=("$SECONDS $(computed) end")
    printf '\n%8s %8s  %s\n' seconds "of CPUs" step
    for ((step = 0; step + 1 < ${#steps[@]}; step++)); do
        next=$((step + 1))
        read -r seconds cpu name <<<"${steps[step]}"
        read -r ended computed _ <<<"${steps[next]}"
        printf '%8d %8d  %s\n' $((ended - seconds)) $((computed - cpu)) "$name"
    done
    printf '%8d %8d  all\n' "$SECONDS" "$(computed)"
}
trap end EXIT
# A test that waits for ever must not take the rest of the time with it; the suite has named it ("has been running for over 60 seconds").
within() {
    timeout --kill-after=10 "$@" || { local code=$?; [ $code != 124 ] || echo "stopped after $1 s: ${*:2}" >&2; return $code; }
}

step "libtorch"
scripts/setup.sh
export OMP_NUM_THREADS=1

step "format"
cargo fmt --check

# Everything is compiled once. Clippy lints the crate while it compiles it, so that it need not check the dependencies; Cargo.toml
# makes warnings errors. rustdoc.sh documents the crate with the libraries that the documentation's tests use.
step "build and lints"
export CARGO_INCREMENTAL=0 RUSTC_WORKSPACE_WRAPPER=clippy-driver RUSTDOC=scripts/rustdoc.sh
cargo test --quiet --no-run --lib --test it --examples
cargo build --quiet

step "documentation, programs that must not compile, and their twins"
cargo test --quiet --doc

step "unit tests"
within 1200 cargo test --quiet --lib

# Integration tests and scripts wait for processes much of the time: they run side by side, more at once than there are processors.
step "integration tests and scripts"
said=$(mktemp)
PROGRAM="${CARGO_TARGET_DIR:-target}/debug/colo-grpo" scripts/test_scripts.sh >"$said" 2>&1 &
scripts=$!
trap 'kill "$scripts" 2>/dev/null || true; rm -f "$said"; end' EXIT
within 2900 cargo test --quiet --test it -- --test-threads=4
wait "$scripts" || { cat "$said" >&2; exit 1; }
cat "$said"

step "a long trajectory, in a process of its own"
within 600 cargo test --quiet --lib -- --ignored --exact trainer::long_turns_tests::a_trajectory_of_100_000_tokens_computes_each_of_them_once

echo "all passed"
