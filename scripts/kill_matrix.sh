#!/usr/bin/env bash
# The long tests of docs/reliability.md: every phase x every way to fail x two ranks, and runs that are killed again and again.
# Prints each cell's times and their medians. About 15 minutes on 2 cores; the limits assume that nothing else runs.
#   scripts/kill_matrix.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
for test in survive::matrix::the_whole_matrix survive::kills::a_run_killed_until_its_end_ends_like_an_undisturbed_one \
    checkpoint::files::two_hundred_kills_leave_only_complete_checkpoints colocate::a_thousand_scopes_leave_memory_flat; do
    cargo test --release --quiet --test it -- --exact "$test" --ignored --nocapture
done
