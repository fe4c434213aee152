#!/usr/bin/env bash
# The main job from nothing: fetches libtorch once, builds, trains a tiny model on two processes and prints how the mean
# reward on held-out problems rose. Further arguments are overrides: scripts/demo.sh beta=0.04 zero.stage=3 output_dir=runs/beta
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
cargo build --release
program="${CARGO_TARGET_DIR:-target}/release/colo-grpo"
run=(--nproc 2 --config configs/tiny-cpu.toml "$@")
case " $* " in
*output[_-]dir* | *resume* | *" -h "* | *" --help "*) ;;
*) # an earlier demo's folder goes, if this run is not refused
    said=$("$program" plan "${run[@]}" 2>&1) || { echo "$said" >&2; exit 2; }
    rm -rf runs/tiny-cpu ;;
esac
exec "$program" "${run[@]}"
