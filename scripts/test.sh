#!/usr/bin/env bash
# Everything that is tested: format, lints, the documentation's links, unit and integration tests (real processes on the CPU
# backend), documentation tests (programs that must not compile), the scripts, and the demo's job. Needs no GPU. Tests of
# the reward math fetch math-verify once with pip, by the hashes in scripts/math_verify.txt.
#   scripts/test.sh
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n== %s (%ds)\n' "$*" "$SECONDS"; }
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
cargo test --quiet --no-run --lib --bins --test it --examples
cargo build --quiet

step "documentation, programs that must not compile, and their twins"
cargo test --quiet --doc

step "unit tests"
within 1200 cargo test --quiet --lib --bins

# Integration tests and scripts wait for processes much of the time: they run side by side, more at once than there are processors.
step "integration tests and scripts"
said=$(mktemp)
PROGRAM="${CARGO_TARGET_DIR:-target}/debug/colo-grpo" scripts/test_scripts.sh >"$said" 2>&1 &
scripts=$!
trap 'kill "$scripts" 2>/dev/null || true; rm -f "$said"' EXIT
within 2900 cargo test --quiet --test it -- --test-threads=4
wait "$scripts" || { cat "$said" >&2; exit 1; }
cat "$said"

step "a long trajectory, in a process of its own"
within 600 cargo test --quiet --lib -- --ignored --exact trainer::long_turns_tests::a_trajectory_of_100_000_tokens_computes_each_of_them_once

step "done"
