#!/bin/bash
# Two "nodes" on one machine: two network namespaces with a pair of virtual interfaces, a launcher in each, and faults in between.
# Usage, as root: scripts/nodes.sh PROGRAM OUT [CASE..]
# Cases: equal killed rank stopped cut gap slow port disk restart; all of them by default. OUT keeps every run and table.md.
# It ends with 0 when every case held and with 1 when one did not; without root or namespaces it says so and ends with 0.
set -u
program=$(realpath "${1:?usage: scripts/nodes.sh PROGRAM OUT [CASE..]}")
out=$(realpath -m "${2:?usage: scripts/nodes.sh PROGRAM OUT [CASE..]}")
shift 2
cases=${*:-equal killed rank stopped cut gap slow port disk restart}
cd "$(dirname "$0")/.." || exit 1
id=$$
net=("colo$id-0" "colo$id-1")
address=(10.213.0.1 10.213.0.2)
port=29511
export COLO_GRPO_TOKEN="a token of scripts/nodes.sh" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
export COLO_GRPO_LOG=error

if [ "$(id -u)" != 0 ] || ! ip netns add "${net[0]}" 2>/dev/null; then
  echo "skipped: two nodes on one machine need root, ip (iproute2) and network namespaces"
  exit 0
fi
cleanup() {
  jobs -p | xargs -r kill -KILL 2>/dev/null
  for n in "${net[@]}"; do ip netns del "$n" 2>/dev/null; done
  mountpoint -q "$out/disk/small" 2>/dev/null && umount "$out/disk/small"
}
trap cleanup EXIT
ip netns add "${net[1]}"
ip link add "v$id-0" type veth peer name "v$id-1"
for k in 0 1; do
  ip link set "v$id-$k" netns "${net[$k]}"
  ip -n "${net[$k]}" addr add "${address[$k]}/24" dev "v$id-$k"
  ip -n "${net[$k]}" link set "v$id-$k" up
  ip -n "${net[$k]}" link set lo up
done

rm -rf "$out"
mkdir -p "$out"
table="$out/table.md"
printf '| case | what was done | how it ended | time |\n|---|---|---|---|\n' > "$table"
failed=0

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }'; }
row() { printf '| %s | %s | %s | %s |\n' "$@" | tee -a "$table"; }
hold() { # hold NAME CONDITION..: the case's promise
  local name=$1
  shift
  "$@" && return 0
  echo "BROKEN: $name: $*" | tee -a "$table"
  failed=1
  return 1
}
small="--config configs/tiny-cpu.toml eval_steps=none eval_file=none max_train_samples=64 per_device_train_batch_size=4 num_generations=4 max_completion_length=6"

# start CASE NODE MORE..: the launcher of a node, its messages in OUT/CASE/NODE.log, its process in pids[NODE]
declare -a pids
start() {
  local name=$1 node=$2
  shift 2
  mkdir -p "$out/$name"
  # shellcheck disable=SC2086
  ip netns exec "${net[$node]}" "$program" --nnodes 2 --node_rank "$node" --master_addr "${address[0]}" --master_port $port \
    --nproc 2 $small output_dir="$out/$name/run" "$@" > "$out/$name/$node.log" 2>&1 &
  pids[node]=$!
}
both() { # both CASE MORE..
  start "$1" 0 "${@:2}"
  start "$1" 1 "${@:2}"
}
code() { wait "${pids[$1]}"; echo $?; } 2>/dev/null
trains() { # waits until a run has made a step
  until [ -s "$out/$1/run/metrics.jsonl" ]; do
    kill -0 "${pids[0]}" 2>/dev/null || { echo "BROKEN: $1 did not start"; cat "$out/$1"/*.log; failed=1; return 1; }
    sleep 0.05
  done
}
workers() { pgrep -P "${pids[$1]}"; }
sha() { sha256sum "$out/$1/run/final/model.safetensors" | cut -d' ' -f1; }
step_ms() { # median step time of a run, ms
  python3 - "$out/$1/run/metrics.jsonl" <<'P'
import json, statistics, sys
steps = [json.loads(line) for line in open(sys.argv[1])]
print(round(1000 * statistics.median(s["step_time"] for s in steps[1:])))
P
}
says() { grep -hq -- "$2" "$out/$1"/*.log; }
link() { ip -n "${net[1]}" link set "v$id-1" "$1"; }
# ends CASE SECONDS CODE0 CODE1 TEXT: both nodes ended with their codes in time, and said why
ends() {
  local began=$6 name=$1 c0 c1 took
  wait "${pids[0]}"; c0=$?
  wait "${pids[1]}"; c1=$?
  took=$(since "$began")
  hold "$name" [ "$c0 $c1" = "$3 $4" ]
  hold "$name" awk -v t="$took" -v m="$2" 'BEGIN { exit !(t <= m) }'
  hold "$name" says "$name" "$5"
  row "$name" "$7" "$c0 and $c1: $(grep -h '^error' "$out/$name/0.log" | head -1 | cut -c1-150)" "$took s"
}

case_equal() {
  local began
  began=$(now)
  both equal max_steps=3
  wait "${pids[0]}" "${pids[1]}"
  local two
  two=$(since "$began")
  mkdir -p "$out/one"
  began=$(now)
  # shellcheck disable=SC2086
  "$program" --nproc 4 $small zero.shard_group_size=2 max_steps=3 output_dir="$out/one/run" > "$out/one/0.log" 2>&1
  hold equal [ "$(sha equal)" = "$(sha one)" ] &&
    row equal "3 steps of 2 x 2 processes, and of 4 on one node" "weights equal bit for bit" "$two s and $(since "$began") s; $(step_ms equal) and $(step_ms one) ms a step"
}
case_killed() { # a whole node
  both killed max_steps=100000
  trains killed || return
  local began
  began=$(now)
  kill -KILL "${pids[1]}"
  wait "${pids[0]}"
  local c=$? took
  took=$(since "$began")
  hold killed [ $c = 10 ] && hold killed says killed "on node 1" && hold killed awk -v t="$took" 'BEGIN { exit !(t <= 2) }'
  row killed "all processes of node 1 killed" "$c: $(grep -h '^error' "$out/killed/0.log" | cut -c1-150)" "$took s"
}
case_rank() { # one rank
  both rank max_steps=100000
  trains rank || return
  local began
  began=$(now)
  kill -KILL "$(workers 1 | tail -1)"
  ends rank 2 10 10 "rank 3" "$began" "the last rank of node 1 killed"
}
case_stopped() { # the leader of node 1 stands still
  both stopped max_steps=100000 node_timeout_s=6 heartbeat.timeout_s=60
  trains stopped || return
  local began leader
  began=$(now)
  leader=$(workers 1 | head -1)
  kill -STOP "$leader"
  ends stopped 14 10 10 "nothing heard of it for 6 s" "$began" "leader of node 1 stopped; node_timeout_s = 6"
}
case_cut() {
  both cut max_steps=100000 node_timeout_s=8
  trains cut || return
  local began
  began=$(now)
  link down
  ends cut 16 10 10 "nothing heard of it for 8 s" "$began" "network cut for good; node_timeout_s = 8"
  link up
}
case_gap() {
  both gap max_steps=40
  trains gap || return
  local began
  began=$(now)
  link down
  sleep 5
  link up
  wait "${pids[0]}"; local c0=$?
  wait "${pids[1]}"; local c1=$?
  hold gap [ "$c0 $c1" = "0 0" ]
  row gap "network cut for 5 s" "$c0 and $c1: the run went on to its end" "the rest of the run took $(since "$began") s"
}
case_slow() {
  if ! ip netns exec "${net[0]}" tc qdisc add dev "v$id-0" root netem delay 10ms loss 0.5% 2>/dev/null; then
    row slow "20 ms there and back, 1 % loss" "skipped: this kernel has no netem" "-"
    return
  fi
  ip netns exec "${net[1]}" tc qdisc add dev "v$id-1" root netem delay 10ms loss 0.5%
  both slow max_steps=3
  wait "${pids[0]}"; local c0=$?
  wait "${pids[1]}"; local c1=$?
  for k in 0 1; do ip netns exec "${net[$k]}" tc qdisc del dev "v$id-$k" root; done
  hold slow [ "$c0 $c1" = "0 0" ]
  [ -e "$out/equal/run/final" ] && hold slow [ "$(sha slow)" = "$(sha equal)" ]
  row slow "20 ms there and back, 1 % loss" "$c0 and $c1; weights as without" "$(step_ms slow) ms a step"
}
case_port() { # somebody else has the port
  ip netns exec "${net[0]}" python3 -c "
import socket, time
s = socket.socket(); s.bind(('${address[0]}', $port)); s.listen(); print('here', flush=True); time.sleep(60)" > "$out/port.txt" &
  local squatter=$!
  until [ -s "$out/port.txt" ]; do sleep 0.05; done
  local began
  began=$(now)
  start port 0 max_steps=1
  wait "${pids[0]}"
  local c=$?
  kill $squatter
  hold port [ $c = 4 ] && hold port says port "master_port $port"
  row port "node 0's port is taken" "$c: $(grep -h '^error' "$out/port/0.log" | cut -c1-150)" "$(since "$began") s"
}
case_disk() { # node 1 has no room for its temporary files; the output folder is on a small disk
  mkdir -p "$out/disk/small"
  mount -t tmpfs -o size=2m none "$out/disk/small" || return
  local began
  began=$(now)
  start disk 0 max_steps=4 save_steps=1 output_dir="$out/disk/small/run"
  start disk 1 max_steps=4 save_steps=1 output_dir="$out/disk/small/run"
  ends disk 60 12 12 "No space left\|free" "$began" "the disk of the output folder is full"
}
case_restart() {
  both restart max_steps=6 save_steps=1 max_restarts=2 fault=3:4:forward_backward:kill
  wait "${pids[0]}"; local c0=$?
  wait "${pids[1]}"; local c1=$?
  hold restart [ "$c0 $c1" = "0 0" ] && hold restart says restart "restart 1 of 2 from the newest checkpoint"
  row restart "rank 3 killed in step 4 with max_restarts = 2" "$c0 and $c1: $(grep -h '^restart' "$out/restart/0.log" | head -1)" "-"
}
for name in $cases; do "case_$name"; done
echo
cat "$table"
exit $failed
