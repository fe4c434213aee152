#!/usr/bin/env bash
# Generation and training in bfloat16 and in FP8 on one GPU, a configuration at a time, and the tables of what was measured.
#   scripts/bench_fp8.sh PROGRAM OUTPUT [CELL ..]
# PROGRAM is target/release/colo-grpo. A cell leaves OUTPUT/CELL.json (or .log) and is not run again while that is there. Names of cells
# choose some; REPEATS (3) is the number of generations, or of steps of training, of which the median counts. Libraries are found as
# scripts/gpu_check.sh finds them. Ends with 1 if a cell failed.
set -uo pipefail
[ $# -ge 2 ] || { sed -n "2,6s/^# //p" "$0"; exit 2; }
cd "$(dirname "$0")/.."
program=$(realpath -e "$1") || exit 2
output=$2
shift 2
chosen=" $* " failed=0
mkdir -p "$output"
. scripts/gpu_libraries.sh

# cell NAME COMMAND..: what the program prints for a `bench` command.
cell() {
  local name=$1
  shift
  [[ $chosen = "  " || $chosen = *" $name "* ]] || return 0
  [ ! -s "$output/$name.json" ] || return 0
  if "$program" bench "$@" >"$output/$name.part" 2>"$output/$name.log"; then
    mv "$output/$name.part" "$output/$name.json"
  else
    echo "$name failed: $(tail -1 "$output/$name.log")" >&2
    failed=1
  fi
}

# generate NAME PRESET PROMPTS PROMPT_LEN COMPLETION_LEN KEY..: groups of 8.
generate() {
  local name=$1 model=$2 prompts=$3 prompt_len=$4 completion_len=$5
  shift 5
  cell "$name" generate --device cuda --preset "$model" --prompts "$prompts" --group 8 --prompt_len "$prompt_len" \
    --completion_len "$completion_len" --repeats "${REPEATS:-3}" "$@"
}

# train NAME PRESET LAYERS KEY..: 4 sequences of 4,096 tokens in one micro-batch, on some blocks of the model.
train() {
  local name=$1 model=$2 layers=$3
  shift 3
  cell "$name" train --device cuda --preset "$model" --layers "$layers" --sequences 4 --sequence_len 4096 \
    --max_tokens_per_micro_batch 16384 --steps "${REPEATS:-3}" --profile "$@"
}

weights=(--rollout_quantization fp8)
cache=(--kv_cache_dtype fp8)
whole=(--rollout_quantization int8)
generate 7b-256-bf16 qwen2.5-7b 32 512 1024
generate 7b-256-weights qwen2.5-7b 32 512 1024 "${weights[@]}"
generate 7b-256-both qwen2.5-7b 32 512 1024 "${weights[@]}" "${cache[@]}"
generate 7b-256-int8 qwen2.5-7b 32 512 1024 "${whole[@]}"
generate 7b-256-int8-both qwen2.5-7b 32 512 1024 "${whole[@]}" --kv_cache_dtype int8
generate 7b-256-strict qwen2.5-7b 32 512 1024 --strict
generate 7b-256-int8-strict qwen2.5-7b 32 512 1024 "${whole[@]}" --strict
generate 7b-8-bf16 qwen2.5-7b 1 512 256
generate 7b-8-weights qwen2.5-7b 1 512 256 "${weights[@]}"
generate 7b-8-int8 qwen2.5-7b 1 512 256 "${whole[@]}"
generate 7b-8-both qwen2.5-7b 1 512 256 "${weights[@]}" "${cache[@]}"
generate qwen3-8b-256-bf16 qwen3-8b 32 512 1024
generate qwen3-8b-256-both qwen3-8b 32 512 1024 "${weights[@]}" "${cache[@]}"
generate llama-8b-256-bf16 llama3.1-8b 32 512 1024
generate llama-8b-256-both llama3.1-8b 32 512 1024 "${weights[@]}" "${cache[@]}"
rounded=(--mixed_precision fp8)
train train-7b-bf16 qwen2.5-7b 8
train train-7b-fp8 qwen2.5-7b 8 "${rounded[@]}"
train train-7b-fp8-all qwen2.5-7b 8 --mixed_precision fp8_all
train train-7b-full-bf16 qwen2.5-7b 8 --gradient_checkpointing full
train train-7b-full-fp8 qwen2.5-7b 8 --gradient_checkpointing full "${rounded[@]}"
train train-7b-lora-bf16 qwen2.5-7b 8 --lora_r 64
train train-7b-lora-fp8 qwen2.5-7b 8 --lora_r 64 "${rounded[@]}"
train train-qwen3-8b-bf16 qwen3-8b 8
train train-qwen3-8b-fp8 qwen3-8b 8 "${rounded[@]}"
python3 - "$output" <<'PY'
import json, pathlib, sys
paths = sorted(pathlib.Path(sys.argv[1]).glob("*.json"))
cells = [(path.stem, json.loads(path.read_text().splitlines()[-1])) for path in paths]
print("| cell | tokens/s | ms a step at the most sequences | prefill tokens/s | joules a step |\n|---|---|---|---|---|")
for name, it in cells:
    if it["benchmark"] != "generate": continue
    most = max(it["step_ms"], key=int)
    joules = it.get("decode", [{}])[-1].get("sustained", {}).get("Step", {}).get("joules", "-")
    print(f"| {name} | {it['tokens_per_second']:,.0f} | {it['step_ms'][most]:.2f} | {it['prefill_tokens_per_second']:,.0f} | {joules} |")
print("\n| cell | blocks | ms a step | tokens/s | GB predicted | GB measured |\n|---|---|---|---|---|---|")
for name, it in cells:
    if it["benchmark"] != "train": continue
    predicted, measured = (it[key] / 1e9 for key in ["predicted_peak_bytes", "peak_allocated_bytes"])
    print(f"| {name} | {it['num_layers']} | {1e3 * it['step_s']:.1f} | {it['tokens_per_second']:,.0f} | {predicted:.2f} | {measured:.2f} |")
PY
exit $failed
