#!/usr/bin/env bash
# How fast two tasks are learned, by colo-grpo and by TRL with vLLM, on the GPUs at hand: scripts/learning.py with the libraries that both need.
#   scripts/learning.sh OUT [OPTIONS OF learning.py ..]
# The program is target/release/colo-grpo unless --program names another. TRL, datasets and vLLM must be importable by python3 for `--who trl`.
set -euo pipefail
cd "$(dirname "$0")/.."
if nvidia-smi -L >/dev/null 2>&1; then . scripts/gpu_libraries.sh; fi
exec python3 scripts/learning.py "$@"
