#!/usr/bin/env bash
# Makes configs/calculator/model, the checkpoint that the demo of tools starts from: random weights and a supervised warm-up on
# demonstrations, of which three in ten call the tool and the others guess (see make_calculator.py). Takes two minutes on 2 cores.
# PROGRAM names the program, target/release/colo-grpo unless it is set.
#   scripts/make_calculator_model.sh [OUTPUT] [STEPS]
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-configs/calculator/model}
steps=${2:-1200}
program="${PROGRAM:-${CARGO_TARGET_DIR:-target}/release/colo-grpo}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

${PYTHON:-python3} scripts/make_calculator.py "$work" --warmup
"$program" init --config-json configs/calculator/config.json --tokenizer "$work/tokenizer" --output "$work/random"
"$program" sft --config configs/arithmetic/warmup.toml model_name_or_path="$work/random" train_file="$work/warmup.jsonl" \
    output_dir="$work/sft" max_steps="$steps" learning_rate=2e-3
rm -rf "$output"
cp -r "$work/sft/final" "$output"
echo "made $output"
