#!/usr/bin/env bash
# Steps with every GPU doing both halves against steps with GPUs for each half, equal batches and completion lengths.
#   scripts/bench_colocated_vs_split.sh PROGRAM PRESET GPUS [OUTPUT] [KEY=VALUE ..]
# PROGRAM is target/release/colo-grpo. Runs colocated at tp 1, 2 and 4, the split with every number of rollout GPUs at each tp that
# divides it, and the same sampling one batch ahead; medians of STEPS (5) steps after a warm-up, of PROMPTS x GROUP (32 x 8)
# completions of PROMPT_LEN + COMPLETION_LEN (512 + 1024) tokens, or of lengths drawn from SPREAD (tail:512..4096); for these also
# colocated with OVERSAMPLE (1) times as many groups more under way, carried from step to step, and computed again (partial) or kept
# in the KV cache (kept). MODES limits the runs ("colocated partial kept split async"), TP and SPLITS their degrees. Further
# arguments are configuration keys of all runs. OUTPUT (runs/colocated_vs_split) gets results.jsonl, a log and a time-line (Chrome
# trace) of each run, compare.json and compare.svg; the table is printed.
# CURVES="1 2 3" also trains the demo's model with these seeds in each mode on the CPU and draws the rewards (curves.svg).
set -euo pipefail
[ $# -ge 3 ] || { sed -n "2,12s/^# //p" "$0"; exit 2; }
cd "$(dirname "$0")/.."
program=$(realpath "$1") preset=$2 gpus=$3
output=${4:-runs/colocated_vs_split}
[ $# -ge 4 ] && shift 4 || shift 3
keys=("$@")
mkdir -p "$output"
: >"$output/results.jsonl"

# bench NAME KEY..: one run's line, log and time-line; one that the model or its memory refuses is named and left out.
bench() {
  local name=$1
  shift
  "$program" bench step --nproc "$gpus" --preset "$preset" --prompts "${PROMPTS:-32}" --group "${GROUP:-8}" \
    --prompt_len "${PROMPT_LEN:-512}" --completion_len "${COMPLETION_LEN:-1024}" ${SPREAD:+--completion_spread "$SPREAD"} \
    --steps "${STEPS:-5}" trace=true output_dir="$output/$name" device="${DEVICE:-cuda}" \
    max_num_seqs=$((${PROMPTS:-32} * ${GROUP:-8})) ${keys[@]+"${keys[@]}"} "$@" >"$output/$name.json" 2>"$output/$name.log" ||
    {
      local code=$?
      echo "$name: $(tail -1 "$output/$name.log")"
      case $code in 2 | 4 | 11) return 0 ;; *) exit $code ;; esac
    }
  cat "$output/$name.json" >>"$output/results.jsonl"
}

for mode in ${MODES:-colocated ${SPREAD:+partial kept} split async}; do
  case $mode in
    colocated) shares=$gpus keys_of_mode=() ;;
    partial) shares=$gpus keys_of_mode=(partial_rollout=true oversample="${OVERSAMPLE:-1}") ;;
    kept) shares=$gpus keys_of_mode=(partial_rollout=true oversample="${OVERSAMPLE:-1}" carried_kv=keep) ;;
    split) shares=${SPLITS:-$(seq 1 $((gpus - 1)))} keys_of_mode=(mode=split) ;;
    async) shares=${SPLITS:-$(seq 1 $((gpus - 1)))} keys_of_mode=(mode=split split.async_steps=1) ;;
    *) echo "MODES: $mode is none of colocated, partial, kept, split, async" && exit 2 ;;
  esac
  for k in $shares; do
    name=$mode place=()
    [[ $mode = split || $mode = async ]] && name=${mode}_$((gpus - k))_and_$k place=(split.rollout_gpus="$k")
    for tp in ${TP:-1 2 4}; do
      [ $((k % tp)) = 0 ] || continue
      bench "${name}_tp$tp" tensor_parallel_size="$tp" ${keys_of_mode[@]+"${keys_of_mode[@]}"} ${place[@]+"${place[@]}"}
    done
  done
done

curves=()
for seed in ${CURVES:-}; do
  for mode in colocated split async; do
    folder=$output/seed${seed}_$mode
    rm -rf "$folder"
    case $mode in
      colocated) place=(per_device_train_batch_size=64 tensor_parallel_size=2) ;;
      *) place=(mode=split split.rollout_gpus=2 per_device_train_batch_size=64 tensor_parallel_size=2) ;;
    esac
    [ $mode = async ] && place+=(split.async_steps=1)
    OMP_NUM_THREADS=1 "$program" --nproc 4 --config configs/tiny-cpu.toml residency.optimizer=resident eval_file=none eval_steps=none \
      save_steps=none output_dir="$folder" seed="$seed" "${place[@]}" >"$folder.log" 2>&1 || { tail -3 "$folder.log"; exit 1; }
    curves+=(--curve "$mode, seed $seed=$folder/metrics.jsonl")
  done
done
exec "$program" bench compare "$output/results.jsonl" --output "$output" ${curves[@]+"${curves[@]}"}
