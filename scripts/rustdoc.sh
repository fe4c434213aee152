#!/usr/bin/env bash
# rustdoc for `cargo test --doc`: writes the documentation first, with the libraries that its examples use, and takes warnings as
# errors; then runs the examples. `cargo doc` would check every dependency again.
#   RUSTDOC=scripts/rustdoc.sh cargo test --doc
set -euo pipefail
documented=()
is_test=
for argument; do
    if [ "$argument" = --test ]; then is_test=1; else documented+=("$argument"); fi
done
if [ "$is_test" ]; then
    # The examples find libtorch: what build.rs tells the linker is for the crate's own targets alone.
    libtorch=$(dirname "$(realpath "${LIBTORCH:-.libtorch}/lib/libtorch_cpu.so")")
    export LD_LIBRARY_PATH="$libtorch${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    pages=$(mktemp -d)
    trap 'rm -rf "$pages"' EXIT
    rustdoc "${documented[@]}" --out-dir "$pages" -D warnings
fi
rustdoc "$@"
