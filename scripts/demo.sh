#!/usr/bin/env bash
# The main job from nothing: fetches libtorch once, builds, trains a tiny model on two processes and prints how the mean
# reward on held-out problems rose. Further arguments are overrides: scripts/demo.sh beta=0.04 zero.stage=3 output_dir=runs/beta
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
cargo build --release
case " $*" in *output_dir*|*resume*) ;; *) rm -rf runs/tiny-cpu ;; esac # an earlier demo's
exec "${CARGO_TARGET_DIR:-target}/release/colo-grpo" --nproc 2 --config configs/tiny-cpu.toml "$@"
