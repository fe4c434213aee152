#!/usr/bin/env bash
# Tests of the scripts, without PyTorch: they parse and say how they are used, setup.sh does its work once, and the demo's
# task and model come out of the scripts that are said to make them. Needs the program built.
#   scripts/test_scripts.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
program="${CARGO_TARGET_DIR:-target}/release/colo-grpo"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "test_scripts: $*" >&2; exit 1; }

for script in scripts/*.sh; do
    bash -n "$script"
    sed '1d; /^[^#]/,$d' "$script" | grep -q "$script" || fail "$script does not say how it is used"
done
for script in scripts/*.py; do
    "$python" - "$script" <<'PY' || fail "$script"
import ast, pathlib, sys
path = pathlib.Path(sys.argv[1])
tree = ast.parse(path.read_text(), str(path))
assert path.name in (ast.get_docstring(tree) or ""), "does not say how it is used"
PY
done

linked=$(readlink .libtorch)
said=$(scripts/setup.sh)
[ -z "$said" ] && [ "$(readlink .libtorch)" = "$linked" ] || fail "setup.sh did its work again: $said"

grep -q -- '--require-hashes --requirement "$root/scripts/libtorch.txt"' scripts/setup.sh || fail "setup.sh checks no hashes"
! grep -vE '^#|^[a-z-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}$' scripts/libtorch.txt || fail "libtorch.txt pins not every wheel"

"$python" scripts/make_arithmetic.py "$work/task" >/dev/null
for file in train.jsonl eval.jsonl demonstrations.jsonl tokenizer/tokenizer.json tokenizer/tokenizer_config.json; do
    cmp "$work/task/$file" "configs/arithmetic/$file" || fail "make_arithmetic.py makes another $file"
done
for file in tokenizer.json tokenizer_config.json; do
    cmp "configs/arithmetic/tokenizer/$file" "configs/arithmetic/model/$file" || fail "the model has another $file"
done

# A program equals itself; one that trains a little faster differs, and only where it trains.
printf '#!/bin/sh\n[ "$1" = generate ] || set -- "$@" learning_rate=2.001e-4\nexec "%s" "$@"\n' "$(realpath "$program")" >"$work/faster"
chmod +x "$work/faster"
runs=(--only one-rank,generate-greedy)
said=$("$python" scripts/hashes.py "$program" "$program" "${runs[@]}" 2>"$work/log") || { cat "$work/log" >&2; fail "hashes.py: $said"; }
[ -z "$said" ] || fail "hashes.py says that a program differs from itself: $said"
! said=$("$python" scripts/hashes.py "$program" "$work/faster" "${runs[@]}" 2>"$work/log") || fail "hashes.py sees no difference"
[[ $said =~ ^one-rank\ .*weights.*learning_rate && $said != *generate* ]] || fail "hashes.py: $said"

# A run is killed once, goes on, and is compared; how soon all that was depends on the machine and is not asked here.
"$python" - <<'PY' || fail "soak.py fits another line"
import sys
sys.path.insert(0, "scripts")
from soak import fit
slope, error = fit([(x, 3 * x + (-1) ** x) for x in range(1001)])
assert abs(slope - 3) < 2 * error < 1e-3, (slope, error)
PY
said=$("$python" scripts/soak.py "$program" "$work/soak" kills --size 1 2>"$work/log") || true
[[ $said =~ disturbed\ +1\ of\ 1 && $said =~ bit\ for\ bit\ +1 && $said != *fault* ]] || { cat "$work/log" >&2; fail "soak.py: $said"; }

printf '#!/bin/sh\n[ "$2" = compare ] || exit "$CODE"\n' >"$work/program"
chmod +x "$work/program"
compare() { CODE=$1 MODES=colocated TP=1 scripts/bench_colocated_vs_split.sh "$work/program" micro 1 "$work/bench" >/dev/null; }
{ compare 4 && compare 11; } || fail "bench_colocated_vs_split.sh does not leave out what has no room"
! compare 10 || fail "bench_colocated_vs_split.sh goes on after a crash"

scripts/make_demo_model.sh "$work/model" 3 2 >/dev/null 2>"$work/log" || { cat "$work/log" >&2; fail "make_demo_model.sh"; }
"$program" eval --model "$work/model" --data configs/arithmetic/eval.jsonl --max_completion_length 2 |
    grep -q '"problems":200' || fail "eval does not take the model of make_demo_model.sh"
echo "scripts: ok"
