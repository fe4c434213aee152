#!/usr/bin/env bash
# Generation in bfloat16 and in FP8 on one GPU, a configuration at a time, and the table of what was measured.
#   scripts/bench_fp8.sh PROGRAM OUTPUT [CELL ..]
# PROGRAM is target/release/colo-grpo. A cell leaves OUTPUT/CELL.json (or .log) and is not run again while that is there. Names of cells
# choose some; REPEATS (3) is the number of generations of which the median counts. Libraries are found as scripts/gpu_check.sh finds
# them. Ends with 1 if a cell failed.
set -uo pipefail
[ $# -ge 2 ] || { sed -n "2,6s/^# //p" "$0"; exit 2; }
cd "$(dirname "$0")/.."
program=$(realpath -e "$1") || exit 2
output=$2
shift 2
chosen=" $* " failed=0
mkdir -p "$output"
. scripts/gpu_libraries.sh

# cell NAME PRESET PROMPTS PROMPT_LEN COMPLETION_LEN KEY..: groups of 8.
cell() {
  local name=$1 model=$2 prompts=$3 prompt_len=$4 completion_len=$5
  shift 5
  [[ $chosen = "  " || $chosen = *" $name "* ]] || return 0
  [ ! -s "$output/$name.json" ] || return 0
  if "$program" bench generate --device cuda --preset "$model" --prompts "$prompts" --group 8 --prompt_len "$prompt_len" \
    --completion_len "$completion_len" --repeats "${REPEATS:-3}" "$@" >"$output/$name.part" 2>"$output/$name.log"; then
    mv "$output/$name.part" "$output/$name.json"
  else
    echo "$name failed: $(tail -1 "$output/$name.log")" >&2
    failed=1
  fi
}

weights=(--rollout_quantization fp8)
cache=(--kv_cache_dtype fp8)
cell 7b-256-bf16 qwen2.5-7b 32 512 1024
cell 7b-256-weights qwen2.5-7b 32 512 1024 "${weights[@]}"
cell 7b-256-both qwen2.5-7b 32 512 1024 "${weights[@]}" "${cache[@]}"
cell 7b-8-bf16 qwen2.5-7b 1 512 256
cell 7b-8-weights qwen2.5-7b 1 512 256 "${weights[@]}"
cell 7b-8-both qwen2.5-7b 1 512 256 "${weights[@]}" "${cache[@]}"
cell qwen3-8b-256-bf16 qwen3-8b 32 512 1024
cell qwen3-8b-256-both qwen3-8b 32 512 1024 "${weights[@]}" "${cache[@]}"
cell llama-8b-256-bf16 llama3.1-8b 32 512 1024
cell llama-8b-256-both llama3.1-8b 32 512 1024 "${weights[@]}" "${cache[@]}"
python3 - "$output" <<'PY'
import json, pathlib, sys
print("| cell | tokens/s | ms a step at the most sequences | prefill tokens/s | joules a step |\n|---|---|---|---|---|")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    it = json.loads(path.read_text().splitlines()[-1])
    most = max(it["step_ms"], key=int)
    joules = it.get("decode", [{}])[-1].get("sustained", {}).get("Step", {}).get("joules", "-")
    print(f"| {path.stem} | {it['tokens_per_second']:,.0f} | {it['step_ms'][most]:.2f} | {it['prefill_tokens_per_second']:,.0f} | {joules} |")
PY
exit $failed
