#!/usr/bin/env bash
# Makes configs/arithmetic/model, the checkpoint that the demo starts from: random weights, a supervised warm-up on right
# sums, then one on mostly wrong ones (see make_arithmetic.py). Takes a few minutes on 2 cores.
# PROGRAM names the program, target/release/colo-grpo unless it is set; CONFIG the shape, configs/arithmetic/config.json unless it is set; NPROC
# the number of processes (2), which divide batches of 128 rows; SFT="device=cuda" has more keys of both warm-ups.
#   scripts/make_demo_model.sh [OUTPUT] [STEPS_RIGHT] [STEPS_MIXED]
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-configs/arithmetic/model}
steps_right=${2:-1000}
steps_mixed=${3:-100}
program="${PROGRAM:-${CARGO_TARGET_DIR:-target}/release/colo-grpo}"
processes=${NPROC:-2}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$(dirname "$output")"

${PYTHON:-python3} scripts/make_arithmetic.py "$work" --warmup
"$program" init --config-json "${CONFIG:-configs/arithmetic/config.json}" --tokenizer "$work/tokenizer" --output "$work/random"
sft=(sft --nproc "$processes" --config configs/arithmetic/warmup.toml per_device_train_batch_size="$((128 / processes))" ${SFT:-})
"$program" "${sft[@]}" model_name_or_path="$work/random" \
    train_file="$work/warmup_right.jsonl" output_dir="$work/right" max_steps="$steps_right"
"$program" "${sft[@]}" model_name_or_path="$work/right/final" \
    train_file="$work/warmup_mixed.jsonl" output_dir="$work/mixed" max_steps="$steps_mixed" \
    learning_rate=3e-4 lr_scheduler_type=constant
output=${output%/}
rm -rf "$output.new"
cp -r "$work/mixed/final" "$output.new"
rm -rf "$output" # whole beside it by now
mv "$output.new" "$output"
echo "made $output"
