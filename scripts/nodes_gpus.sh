#!/usr/bin/env bash
# The GPUs of one host as two nodes against the same GPUs as one: equal metrics, the cost of a step, and the estimate of it.
#   scripts/nodes_gpus.sh PROGRAM OUT
# Each half of the GPUs has a launcher and an NCCL_HOSTID of its own, so that NCCL takes sockets between the halves alone. PRESET (qwen2.5-1.5b) is
# the model of the timed steps, GPUS (4) the number of GPUs, an even one. DEVICE=cpu runs the same on processors, where nothing is measured.
# OUT keeps what each run printed. Ends with 1 where a run failed or metrics differ.
set -euo pipefail
[ $# = 2 ] || { sed -n "2,6s/^# //p" "$0"; exit 2; }
program=$(realpath -e "$1")
cd "$(dirname "$0")/.."
mkdir -p "$2"
out=$(realpath "$2") gpus=${GPUS:-4} preset=${PRESET:-qwen2.5-1.5b} device=${DEVICE:-cuda} half=$((${GPUS:-4} / 2))
export COLO_GRPO_TOKEN="a token of scripts/nodes_gpus.sh" COLO_GRPO_LOG=error
[ "$device" = cpu ] || . scripts/gpu_libraries.sh

one() { # one NAME ARGS..: a node with all GPUs
  CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((gpus - 1))) "$program" "${@:2}" --nproc "$gpus" >"$out/$1.json" 2>"$out/$1.log"
}
node() { # node RANK FIRST COUNT PORT NAME ARGS..: some GPUs as node RANK of two
  NCCL_HOSTID=node$1 CUDA_VISIBLE_DEVICES=$(seq -s, "$2" $(($2 + $3 - 1))) "$program" "${@:6}" --nnodes 2 --node_rank "$1" \
    --master_addr 127.0.0.1 --master_port "$4" --nproc "$3" >"$out/$5.json" 2>"$out/$5.log"
}
two() { # two NAME ARGS..: two nodes with half of the GPUs each
  node 1 "$half" "$half" 29511 "$1-node1" "${@:2}" &
  local other=$!
  node 0 0 "$half" 29511 "$@"
  wait "$other"
}

echo "== the demo's model, four steps, float32: metrics of one node and of two"
tiny=(--config configs/tiny-cpu.toml device="$device" eval_steps=none eval_file=none save_steps=none max_steps=4 tensor_parallel_size=1
  per_device_train_batch_size=64 zero.shard_group_size="$half")
rm -rf "$out/run-one" "$out/run-two"
one demo-one "${tiny[@]}" output_dir="$out/run-one"
two demo-two "${tiny[@]}" output_dir="$out/run-two"
python3 - "$out" <<'PY'
import json, sys
steps = [list(map(json.loads, open(f"{sys.argv[1]}/run-{which}/metrics.jsonl"))) for which in ("one", "two")]
if len(steps[0]) != 4 or len(steps[1]) != 4:
    sys.exit(f"{len(steps[0])} and {len(steps[1])} steps, 4 expected")
for one, two in zip(*steps):
    for key in ("loss", "grad_norm", "reward", "entropy", "completions/mean_length"):
        if abs(one[key] - two[key]) > 1e-5 * abs(one[key]):
            sys.exit(f"step {one['step']}: {key} {one[key]} on one node, {two[key]} on two")
worst = max(abs(one[key] - two[key]) for one, two in zip(*steps) for key in ("loss", "grad_norm", "reward", "entropy"))
print(f"loss, grad_norm, reward and entropy of 4 steps: largest difference {worst}")
PY

echo "== what the network takes out of a node: all_reduce of 256 MiB, a pair of GPUs over the sockets for each GPU of a node, all at once"
pids=()
for ((pair = 0; pair < half; pair++)); do
  for rank in 1 0; do
    node $rank $((rank * half + pair)) 1 $((29521 + pair)) "pair$pair-node$rank" bench collectives --device "$device" --max_mib "${MAX_MIB:-256}" &
    pids+=($!)
  done
done
for pid in "${pids[@]}"; do wait "$pid"; done
rate=$(python3 - "$out" "$half" <<'PY'
import json, sys
def rate(pair):
    rows = json.load(open(f"{sys.argv[1]}/pair{pair}-node0.json"))["results"]
    rows = [row for row in rows if row["op"] == "all_reduce" and not row["in_graph"]]
    return max(rows, key=lambda row: row["bytes"])["bus_gb_s"]
print(f"{sum(map(rate, range(int(sys.argv[2])))):.2f}")
PY
)
echo "$rate GB/s"

echo "== steps of $preset"
step=(bench step --preset "$preset" --prompts "${PROMPTS:-32}" --group 8 --prompt_len "${PROMPT_LEN:-512}" --completion_len "${COMPLETION_LEN:-256}" --steps 3
  device="$device" zero.shard_group_size="$half")
one step-one "${step[@]}"
two step-two "${step[@]}"
case $preset in
  qwen2.5-1.5b | qwen2.5-7b) python3 scripts/nodes_estimate.py --check "$out/step-one.json" "$out/step-two.json" "$rate" ;;
  *) python3 -c 'import json, sys; print(*(json.load(open(path))["step_s"] for path in sys.argv[1:]), "s a step on one node and on two")' \
    "$out/step-one.json" "$out/step-two.json" ;;
esac
