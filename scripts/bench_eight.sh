#!/usr/bin/env bash
# The figures of eight GPUs of one host, a cell at a time, the most valuable first.
#   scripts/bench_eight.sh PROGRAM OUTPUT [CELL ..]
# PROGRAM is target/release/colo-grpo. A cell leaves OUTPUT/CELL.json (or .log) and is not run again while that is there, so that
# a call goes on where another stopped; no cell is begun that may not end within MINUTES (9) of the call. Names of cells choose some.
# TESTS names the tests' program for the cells "tests" and "killed" (the newest target/release/deps/it-*). GPUS (8) is the number of
# GPUs: with 2 or 4 every cell runs with engines of all of them, which tries the script and fills the table of scaling.
# Libraries are found as scripts/gpu_check.sh finds them. Prints the table of what is there; ends with 1 if a cell failed.
set -uo pipefail
[ $# -ge 2 ] || { sed -n "2,10s/^# //p" "$0"; exit 2; }
cd "$(dirname "$0")/.."
program=$(realpath -e "$1") || exit 2
output=$2
shift 2
chosen=" $* "
gpus=${GPUS:-8} deadline=$((SECONDS + 60 * ${MINUTES:-9})) failed=0
tp=$((gpus < 4 ? gpus : 4)) prompts=$((8 * gpus))
mkdir -p "$output"
tests=${TESTS:-$(find target/release/deps -maxdepth 1 -name 'it-*' -executable -type f -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -1 | cut -d' ' -f2-)}
. scripts/gpu_libraries.sh
export COLO_GRPO_PROGRAM=$program

# cell NAME SECONDS COMMAND..: SECONDS is what it takes at most.
cell() {
  local name=$1 limit=$2
  shift 2
  [[ $chosen = "  " || $chosen = *" $name "* ]] || return 0
  [ ! -s "$output/$name.json" ] || return 0
  if [ $((SECONDS + limit)) -gt "$deadline" ]; then
    echo "$name: left for another call"
    return 0
  fi
  if timeout "$limit" bash -c '"$@"' "$name" "$@" >"$output/$name.part" 2>"$output/$name.log"; then
    mv "$output/$name.part" "$output/$name.json"
  else
    local code=$?
    rm -f "$output/$name.part"
    echo "$name: exit $code: $(tail -1 "$output/$name.log" | cut -c1-300)"
    failed=1
  fi
}

# gpu_tests FILTER..: tests of as many ranks as there are GPUs, one after the other, a line each.
gpu_tests() {
  local word names name
  case $gpus in 2) word=two ;; 4) word=four ;; *) word=eight ;; esac
  names=$("$tests" --list --ignored | sed -n "s/^\(.*gpu_${word}_ranks.*\): test\$/\1/p" | grep -E "$1")
  [ -n "$names" ] || { echo "no test of $word ranks matches $1" >&2; return 1; }
  for name in $names; do
    "$tests" --exact "$name" --ignored --nocapture || return 1
  done
}

step() { "$program" bench step --nproc "$1" --group 8 --prompt_len 512 --completion_len 1024 device=cuda "${@:2}"; }

# 7B, all weights: 8 prompts a GPU.
seven() { step "$gpus" --preset qwen2.5-7b --prompts "$prompts" --steps 2 tensor_parallel_size="$tp" "$@"; }

export -f gpu_tests step seven
export program tests gpus tp prompts

cell tests 200 gpu_tests 'all_reduce|sample_what|losses_of'
cell step-7b-zero2 150 seven zero.stage=2
cell step-7b-zero3 150 seven zero.stage=3
cell step-7b-reference 150 seven zero.stage=2 beta=0.04
cell step-14b-lora 200 step "$gpus" --preset qwen2.5-14b --prompts "$prompts" --steps 2 tensor_parallel_size="$tp" zero.stage=2 lora.r=64
cell step-32b-zero3 400 step "$gpus" --preset qwen2.5-32b --prompts "$((prompts / 2))" --steps 1 tensor_parallel_size="$tp" zero.stage=3
for part in 1 2 4 8; do # 1.5B fits one GPU: the same work for each of them
  [ "$part" -gt "$gpus" ] ||
    cell "scaling-$part" 120 step "$part" --preset qwen2.5-1.5b --prompts $((8 * part)) --steps 3 zero.stage=2 tensor_parallel_size=1
done
cell engines-tp1 120 "$program" bench generate --device cuda --nproc "$gpus" --preset qwen2.5-7b --prompts 8 --group 8 --prompt-len 512 --completion-len 1024 --repeats 1
cell "engines-tp$gpus" 120 "$program" bench generate --device cuda --nproc "$gpus" --preset llama3.1-8b --tp "$gpus" --prompts 8 --group 8 --prompt-len 512 --completion-len 1024 --repeats 1
cell sleep-wake 120 "$program" bench sleep_wake --device cuda --nproc "$gpus" --gib 64 --offload-gib 4 --cycles 20
cell collectives 120 "$program" bench collectives --device cuda --nproc "$gpus"
cell killed 150 gpu_tests 'killed'
cell cycles 200 "$program" bench sleep_wake --device cuda --nproc "$gpus" --gib 8 --offload-gib 1 --cycles 300
for apart in $((gpus / 2)) $((gpus / 4)); do
  [ "$apart" -ge 1 ] || continue
  place=(mode=split split.rollout_gpus="$apart" tensor_parallel_size="$((apart < tp ? apart : tp))" zero.stage=2)
  cell "split-$((gpus - apart))-and-$apart" 250 step "$gpus" --preset qwen2.5-7b --prompts "$prompts" --steps 1 "${place[@]}"
  cell "ahead-$((gpus - apart))-and-$apart" 300 step "$gpus" --preset qwen2.5-7b --prompts "$prompts" --steps 2 "${place[@]}" split.async_steps=1
done

python3 - "$output" <<'PY'
import json, pathlib, sys

def lines(path):
    for line in path.read_text(errors="replace").splitlines():
        try:
            if isinstance(found := json.loads(line), dict):
                yield found
        except ValueError:
            pass

steps = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    for found in lines(path):
        kept = {key: value for key, value in found.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
        wanted = [key for key in ("step_s", "step_ms", "tokens_per_second", "wake_ms", "sleep_ms", "gone_s", "gpus_free_s") if key in kept]
        print(path.stem, *(f"{key} {kept[key]:.3f}" for key in wanted or list(kept)[:6]))
        if path.stem.startswith("scaling-") and "step_s" in kept:
            steps[int(path.stem[8:])] = kept["step_s"]
if steps:
    base = min(steps)
    for gpus, seconds in sorted(steps.items()):
        print(f"scaling: {gpus} GPUs, step {seconds:.3f} s, efficiency {steps[base] / seconds:.3f} of {base}")
PY
exit $failed
