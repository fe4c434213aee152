#!/usr/bin/env bash
# A model learns the Countdown game from nothing: traces and a byte-pair tokenizer are made, 63M random weights learn from the traces,
# most of which end wrong, then GRPO teaches them to search on until the equation is right. Minutes on one GPU.
#   scripts/countdown.sh [PROGRAM [OUT]]
# PROGRAM is target/release/colo-grpo unless another is named, OUT runs/countdown; an older one is removed. OUT gets task/ (rows and
# tokenizer), sft/ and grpo/ (metrics.jsonl, report.html, final/), completions of held-out problems before and after
# (before.jsonl, after.jsonl), a log of each stage, times.tsv, curve.svg and summary.md, which is printed.
# TASK="--traces 2000" are options of make_countdown.py, SFT="max_steps=50" and GRPO="max_steps=20" keys of the two runs, and MODEL
# another config.json: enough for a smaller trial.
# Libraries come from the installed PyTorch 2.11.0 where there is a GPU, unless COLO_GRPO_TORCH_CUDA names its torch/lib folder.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$(realpath -e "${1:-${CARGO_TARGET_DIR:-target}/release/colo-grpo}") out=${2:-runs/countdown}
python=${PYTHON:-python3}
read -ra task <<<"${TASK:-}"
read -ra sft <<<"${SFT:-}"
read -ra grpo <<<"${GRPO:-}"

if [ -z "${COLO_GRPO_TORCH_CUDA:-}" ] && nvidia-smi -L >/dev/null 2>&1; then
  COLO_GRPO_TORCH_CUDA=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0] + "/lib")')
  export COLO_GRPO_TORCH_CUDA
fi
if [ -n "${COLO_GRPO_TORCH_CUDA:-}" ]; then
  folders=$(find "$(dirname "$(dirname "$COLO_GRPO_TORCH_CUDA")")/nvidia" -type d -name lib 2>/dev/null | paste -sd:)
  export LD_LIBRARY_PATH="$COLO_GRPO_TORCH_CUDA${folders:+:$folders}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

rm -rf "$out"
mkdir -p "$out"

# stage NAME COMMAND..: runs it, keeps its log, notes its time.
stage() {
  local name=$1 start=$EPOCHREALTIME
  shift
  echo "$name .."
  "$@" >"$out/$name.log" 2>&1 || { local code=$?; tail -20 "$out/$name.log" >&2; exit $code; }
  "$python" -c 'import sys; print(sys.argv[1], round(float(sys.argv[3]) - float(sys.argv[2]), 1), sep="\t")' \
    "$name" "$start" "$EPOCHREALTIME" | tee -a "$out/times.tsv"
}

# sample NAME MODEL: two completions of each of the first 32 held-out problems.
sample() {
  "$program" generate --model "$2" --chat -n 2 --max_completion_length 768 "${prompts[@]}" >"$out/$1.jsonl"
}

stage task "$python" scripts/make_countdown.py "$out/task" ${task[@]+"${task[@]}"}
stage model "$program" init --config-json "${MODEL:-configs/countdown/config.json}" --tokenizer "$out/task/tokenizer" --output "$out/random"
stage sft "$program" sft --config configs/countdown/sft.toml model_name_or_path="$out/random" train_file="$out/task/sft.jsonl" \
  output_dir="$out/sft" ${sft[@]+"${sft[@]}"}
prompts=()
while IFS= read -r prompt; do prompts+=(--prompt "$prompt"); done < <(head -32 "$out/task/eval.jsonl" |
  "$python" -c 'import json, sys; [print(json.loads(row)["prompt"][0]["content"]) for row in sys.stdin]')
stage before sample before "$out/sft/final"
stage grpo "$program" --config configs/countdown/grpo.toml model_name_or_path="$out/sft/final" train_file="$out/task/train.jsonl" \
  eval_file="$out/task/eval.jsonl" output_dir="$out/grpo" ${grpo[@]+"${grpo[@]}"}
stage after sample after "$out/grpo/final"
"$python" scripts/countdown_curve.py "$out"
