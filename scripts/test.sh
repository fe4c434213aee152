#!/usr/bin/env bash
# Everything that is tested: format, lints, the documentation's links, unit and integration tests (real processes on the CPU
# backend), documentation tests (programs that must not compile), the scripts, and the demo's job. Needs no GPU. Tests of
# the reward math fetch math-verify once with pip, by the hashes in scripts/math_verify.txt.
#   scripts/test.sh
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n== %s (%ds)\n' "$*" "$SECONDS"; }

step "libtorch"
scripts/setup.sh
export OMP_NUM_THREADS=1

step "format"
cargo fmt --check

# One profile for all: the dependencies are built once.
step "build"
cargo test --quiet --no-run --lib --bins --test it --examples

step "lints"
cargo clippy --all-targets --quiet -- -D warnings

step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --lib --quiet

step "tests"
cargo test --quiet --lib --bins
cargo test --quiet --test it -- --test-threads=2

step "programs that must not compile, and their twins"
cargo test --quiet --doc

step "scripts"
cargo build --quiet
PROGRAM="${CARGO_TARGET_DIR:-target}/debug/colo-grpo" scripts/test_scripts.sh

step "done"
