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

step "build"
cargo build --release --quiet

step "lints"
cargo clippy --release --all-targets --quiet -- -D warnings

step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --release --no-deps --lib --quiet

step "tests"
cargo test --release --quiet --lib --bins
cargo test --release --quiet --test it -- --test-threads=2

step "programs that must not compile, and their twins"
cargo test --release --quiet --doc

step "scripts"
scripts/test_scripts.sh

step "done"
