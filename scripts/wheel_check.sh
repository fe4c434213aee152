#!/usr/bin/env bash
# Installs the wheel into a fresh Python environment that sees an installed PyTorch 2.11, and trains the demo's first step with it, from
# another folder and without any variable. Prints how long each took, and ends with 1 if one fails.
#   scripts/wheel_check.sh WHEEL [DEVICE]    DEVICE: cpu, cuda or auto (default)
# PYTHON names the interpreter that has PyTorch, python3 unless it is set. Nothing is downloaded.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,5p' "$0"; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1") device=${2:-auto} python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "wheel_check: $*" >&2; exit 1; }
site=$("$python" -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("torch").submodule_search_locations[0]).parent)') ||
    fail "$python has no PyTorch"

start=$SECONDS
"$python" -m venv --system-site-packages "$work/venv" || fail "no environment can be made"
# An environment made from another one does not see its packages: it is told of them as a user's own .pth file would.
"$work/venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
    echo "$site" >"$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps "$wheel" || fail "pip install"
echo "installed in $((SECONDS - start)) s beside $site"

start=$SECONDS
cp -r "$root/configs/arithmetic" "$root/configs/tiny-cpu.toml" "$work"
mkdir "$work/configs" && mv "$work/arithmetic" "$work/tiny-cpu.toml" "$work/configs"
cd "$work"
env -i HOME="$work" PATH="$work/venv/bin:/usr/bin:/bin" colo-grpo --config configs/tiny-cpu.toml device="$device" tensor_parallel_size=1 max_steps=1 \
    per_device_train_batch_size=8 num_generations=4 eval_steps=none eval_file=none output_dir="$work/run" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; fail "the first step"; }
echo "started, trained a step and saved in $((SECONDS - start)) s on $device"
[ -s "$work/run/final/model.safetensors" ] || fail "no model was saved"
