#!/bin/bash
# Two "nodes" on one machine: two network namespaces with a pair of virtual interfaces, a launcher in each, and faults in between.
# Usage, as root: scripts/nodes.sh PROGRAM OUT [CASE..]
# Cases: equal modes resume tasks torchrun bench killed rank stopped cut gap slow clocks port disk own restart; all of them by default.
# OUT keeps every run and table.md. It ends with 0 when every case held and with 1 when one did not; without root or namespaces it says so and ends with 0.
set -u
program=$(realpath "${1:?usage: scripts/nodes.sh PROGRAM OUT [CASE..]}")
out=$(realpath -m "${2:?usage: scripts/nodes.sh PROGRAM OUT [CASE..]}")
shift 2
cases=${*:-equal modes resume tasks torchrun bench killed rank stopped cut gap slow clocks port disk own restart}
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
  for disk in "$out/disk/small" "$out/own/1"; do mountpoint -q "$disk" 2>/dev/null && umount "$disk"; done
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

# start CASE NODE MORE..: the launcher of a node, its messages in OUT/CASE/NODE.log, its process in pids[NODE]. A case may set
# rank0 (the address of node 0), folder (where the launcher works) and preload (a library that is loaded first).
declare -a pids
rank0=${address[0]} folder=. preload=
start() {
  local name=$1 node=$2
  shift 2
  mkdir -p "$out/$name"
  # shellcheck disable=SC2086
  (cd "$folder" && exec ip netns exec "${net[$node]}" env ${preload:+LD_PRELOAD=$preload} "$program" --nnodes 2 --node_rank "$node" \
    --master_addr "$rank0" --master_port $port --nproc 2 $small output_dir="$out/$name/run" "$@") > "$out/$name/$node.log" 2>&1 &
  pids[node]=$!
}
both() { # both CASE MORE..
  start "$1" 0 "${@:2}"
  start "$1" 1 "${@:2}"
}
# one CASE NPROC MORE..: a run on one node
one() {
  mkdir -p "$out/$1"
  # shellcheck disable=SC2086
  "$program" --nproc "$2" $small output_dir="$out/$1/run" "${@:3}" > "$out/$1/0.log" 2>&1
}
await() { # await CASE CODE0 CODE1: both nodes end with these
  local c0 c1
  wait "${pids[0]}"; c0=$?
  wait "${pids[1]}"; c1=$?
  hold "$1" [ "$c0 $c1" = "$2 $3" ]
}
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
  await equal 0 0
  local two
  two=$(since "$began")
  began=$(now)
  one one 4 zero.shard_group_size=2 max_steps=3
  hold equal [ "$(sha equal)" = "$(sha one)" ] &&
    row equal "3 steps of 2 x 2 processes, and of 4 on one node" "weights equal bit for bit" "$two s and $(since "$began") s; $(step_ms equal) and $(step_ms one) ms a step"
}
case_modes() { # ZeRO-3 over nodes and within them, engines and trainers apart, engines in stages
  local mode name keys
  for mode in "zero3 zero.stage=3 zero.shard_group_size=4" "hybrid3 zero.stage=3 zero.shard_group_size=2" \
    "stages3 zero.stage=3 zero.shard_group_size=4 tensor_parallel_size=1 pipeline_parallel_size=2" \
    "split mode=split split.rollout_gpus=2 zero.shard_group_size=2 residency.optimizer=resident" \
    "split-stages mode=split split.rollout_gpus=2 zero.shard_group_size=2 residency.optimizer=resident tensor_parallel_size=1 pipeline_parallel_size=2"; do
    name=${mode%% *} keys=${mode#* }
    # shellcheck disable=SC2086
    both "$name" $keys max_steps=2
    await "$name" 0 0
    # shellcheck disable=SC2086
    one "$name-one" 4 $keys max_steps=2
    hold "$name" [ "$(sha "$name")" = "$(sha "$name-one")" ] &&
      row modes "2 steps of 2 x 2 processes, and of 4 on one node: $keys" "weights equal bit for bit" \
        "$(step_ms "$name") and $(step_ms "$name-one") ms a step"
  done
}
case_resume() { # at another number of nodes
  local began from="resume_from_checkpoint=$out/resume/run/checkpoint-2"
  both resume max_steps=4 save_steps=2
  await resume 0 0
  began=$(now)
  one resume-4 4 zero.shard_group_size=2 max_steps=4 save_steps=2 "$from"
  hold resume [ "$(sha resume)" = "$(sha resume-4)" ] &&
    row resume "2 x 2 saved at step 2 of 4, resumed by 1 x 4" "weights at the end equal bit for bit" "$(since "$began") s"
  began=$(now)
  one resume-2 2 per_device_train_batch_size=8 max_steps=2 save_steps=2 "$from"
  hold resume cmp -s "$out/resume-2/run/final/model.safetensors" "$out/resume/run/checkpoint-2/model.safetensors" &&
    row resume "the same, resumed by 1 x 2 with nothing left to train" "weights are those of the checkpoint" "$(since "$began") s"
  one resume-one 4 zero.shard_group_size=2 max_steps=4 save_steps=2
  began=$(now)
  both resume-more max_steps=4 save_steps=2 "resume_from_checkpoint=$out/resume-one/run/checkpoint-2"
  await resume-more 0 0
  hold resume [ "$(sha resume)" = "$(sha resume-more)" ] &&
    row resume "1 x 4 saved at step 2 of 4, resumed by 2 x 2" "weights at the end equal bit for bit" "$(since "$began") s"
}
case_tasks() { # one task a rank, with the variables that srun sets, and with those of Kubernetes' operators
  local rank how began tasks
  for how in srun kubernetes; do
    began=$(now) tasks=()
    mkdir -p "$out/$how"
    for rank in 0 1 2 3; do
      local node=$((rank / 2)) place=$((rank % 2)) variables
      variables="SLURM_PROCID=$rank SLURM_NTASKS=4 SLURM_LOCALID=$place SLURM_NODEID=$node SLURM_JOB_ID=41234 \
        SLURM_STEP_NODELIST=${address[0]},${address[1]} SLURM_STEP_TASKS_PER_NODE=2(x2)"
      [ $how = kubernetes ] && variables="RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$place LOCAL_WORLD_SIZE=2 MASTER_ADDR=${address[0]} MASTER_PORT=$port"
      # shellcheck disable=SC2086
      ip netns exec "${net[$node]}" env $variables "$program" $small output_dir="$out/$how/run" max_steps=3 > "$out/$how/$rank.log" 2>&1 &
      tasks+=($!)
    done
    for rank in 0 1 2 3; do wait "${tasks[$rank]}" || hold $how false "rank $rank"; done
    hold $how [ "$(sha $how)" = "$(sha equal)" ] &&
      row tasks "3 steps of 2 x 2 tasks without a launcher, variables of $how" "weights those of our launchers" "$(since "$began") s"
  done
  began=$(now) tasks=()
  mkdir -p "$out/pods"
  for rank in 0 1; do # RANK and WORLD_SIZE count pods, as a PyTorchJob's do: the line of docs/nodes.md
    # shellcheck disable=SC2016,SC2086
    ip netns exec "${net[$rank]}" env RANK=$rank WORLD_SIZE=2 MASTER_ADDR="${address[0]}" MASTER_PORT=$port sh -c 'program=$1; shift
      exec env -u RANK -u WORLD_SIZE "$program" --nnodes $WORLD_SIZE --node_rank $RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT --nproc 2 "$@"' \
      sh "$program" $small output_dir="$out/pods/run" max_steps=3 > "$out/pods/$rank.log" 2>&1 &
    tasks+=($!)
  done
  for rank in 0 1; do wait "${tasks[$rank]}" || hold pods false "pod $rank"; done
  hold pods [ "$(sha pods)" = "$(sha equal)" ] &&
    row tasks "3 steps of two pods with a launcher each, variables of a PyTorchJob" "weights those of our launchers" "$(since "$began") s"
}
case_torchrun() {
  if ! command -v torchrun > /dev/null; then
    row torchrun "2 x 2 processes under torchrun" "skipped: no torchrun in PATH" "-"
    return
  fi
  local node began
  began=$(now)
  mkdir -p "$out/torchrun"
  for node in 0 1; do
    # shellcheck disable=SC2086
    ip netns exec "${net[$node]}" torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint "${address[0]}:29500" \
      --rdzv-conf "is_host=$((1 - node))" --rdzv-id "$id" --local-addr "${address[$node]}" --max-restarts 1 --no-python "$program" $small \
      output_dir="$out/torchrun/run" max_steps=3 save_steps=1 resume_from_checkpoint=latest fault=3:2:forward_backward:kill > "$out/torchrun/$node.log" 2>&1 &
    pids[node]=$!
  done
  await torchrun 0 0
  hold torchrun grep -q "exitcode.*-9" "$out/torchrun/1.log"
  hold torchrun [ "$(sha torchrun)" = "$(sha equal)" ] &&
    row torchrun "3 steps of 2 x 2 processes under torchrun --max-restarts 1; rank 3 killed in step 2" \
      "restarted on both nodes from the checkpoint; weights those of our launchers" "$(since "$began") s"
}
case_bench() { # what docs/nodes.md says to run first
  local node
  mkdir -p "$out/bench"
  for node in 0 1; do
    ip netns exec "${net[$node]}" "$program" bench collectives --nnodes 2 --node_rank $node --master_addr "${address[0]}" \
      --master_port $port --nproc 2 --device cpu --max_mib 4 > "$out/bench/$node.log" 2>&1 &
    pids[node]=$!
  done
  await bench 0 0
  local found
  found=$(python3 - "$out/bench/0.log" <<'P'
import json, sys
sums = [one for one in json.loads(open(sys.argv[1]).read().splitlines()[-1])["results"] if one["op"] == "all_reduce"]
print(f"all_reduce of {sums[-1]['bytes'] / 1e6:.1f} MB: {sums[-1]['us'] / 1000:.1f} ms")
P
  )
  hold bench [ -n "$found" ] && row bench "bench collectives --nnodes 2, 2 x 2 processes" "$found" "-"
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
  ends stopped 14 10 10 "no message from it for 6 s" "$began" "leader of node 1 stopped; node_timeout_s = 6"
}
case_cut() {
  both cut max_steps=100000 node_timeout_s=8
  trains cut || return
  local began
  began=$(now)
  link down
  ends cut 16 10 10 "no message from it for 8 s" "$began" "network cut for good; node_timeout_s = 8"
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
# slow_link: a link between two TUN devices, 10.213.1.1 and .2, whose packets a process (link_pid) holds back for 10 ms and of which it
# loses half a percent each way: not every kernel has netem.
slow_link() {
  python3 - "${net[@]}" > "$out/link.txt" 2>&1 <<'P' &
import ctypes, fcntl, heapq, os, random, select, struct, subprocess, sys, time
libc, tuns = ctypes.CDLL(None, use_errno=True), []
for index, name in enumerate(sys.argv[1:]):
    with open(f"/var/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), 0x40000000):
            sys.exit(f"setns: {os.strerror(ctypes.get_errno())}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"slow", 0x1001))  # TUNSETIFF: IFF_TUN | IFF_NO_PI
    subprocess.run(["ip", "addr", "add", f"10.213.1.{index + 1}/24", "dev", "slow"], check=True)
    subprocess.run(["ip", "link", "set", "slow", "up"], check=True)
    tuns.append(tun)
print("here", flush=True)
draw, queue, number = random.Random(7), [], 0
while True:
    wait = max(0, queue[0][0] - time.monotonic()) if queue else 1
    for tun in select.select(tuns, [], [], wait)[0]:
        packet, number = os.read(tun, 65536), number + 1
        if draw.random() >= 0.005:
            heapq.heappush(queue, (time.monotonic() + 0.01, number, tuns[1 - tuns.index(tun)], packet))
    while queue and queue[0][0] <= time.monotonic():
        _, _, to, packet = heapq.heappop(queue)
        try:
            os.write(to, packet)
        except BlockingIOError:
            pass  # a queue that is full loses packets
P
  link_pid=$!
  until [ -s "$out/link.txt" ]; do kill -0 $link_pid 2>/dev/null || return 1; sleep 0.05; done
  grep -q here "$out/link.txt"
}
case_slow() {
  if ! slow_link; then
    row slow "20 ms there and back, 1 % loss" "skipped: no TUN devices here: $(tail -1 "$out/link.txt")" "-"
    return
  fi
  rank0=10.213.1.1
  both slow max_steps=3
  rank0=${address[0]}
  await slow 0 0
  kill $link_pid
  [ -e "$out/equal/run/final" ] && hold slow [ "$(sha slow)" = "$(sha equal)" ]
  row slow "3 steps over a link with 20 ms there and back, 1 % loss" "0 and 0; weights as without" "$(step_ms slow) ms a step"
}
case_clocks() { # node 1's clock is an hour ahead
  cc -shared -fPIC -o "$out/ahead.so" -x c - -ldl <<'C' || return
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += 3600;
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
C
  local keys="max_steps=6 save_steps=1 max_restarts=2 fault=3:4:forward_backward:kill trace=true" apart
  # shellcheck disable=SC2086
  start clocks 0 $keys
  preload=$out/ahead.so
  # shellcheck disable=SC2086
  start clocks 1 $keys
  preload=
  await clocks 0 0
  one clocks-one 4 zero.shard_group_size=2 max_steps=6 save_steps=1
  hold clocks says clocks "restart 1 of 2 from the newest checkpoint"
  hold clocks [ "$(sha clocks)" = "$(sha clocks-one)" ]
  apart=$(python3 - "$out/clocks/run" <<'P'
import json, sys
times = [json.load(open(f"{sys.argv[1]}/ranks/{rank:05}.json"))["time"] for rank in (0, 3)]
events = json.load(open(f"{sys.argv[1]}/trace/trace.json"))
ends = [max(event["ts"] + event["dur"] for event in events if event["pid"] == rank and "ts" in event) for rank in (0, 3)]
print(f"{times[1] - times[0]:.0f} {abs(ends[1] - ends[0]) / 1e6:.1f}")
P
  )
  hold clocks awk -v apart="$apart" 'BEGIN { split(apart, s, " "); exit !(s[1] > 3500 && s[2] < 60) }'
  row clocks "node 1's clock an hour ahead; rank 3 killed in step 4 with max_restarts = 2" \
    "0 and 0; weights as without; the ranks' own times are ${apart% *} s apart, the ends of their time-lines ${apart#* } s" "-"
}
case_port() { # somebody else has the port
  ip netns exec "${net[0]}" python3 -c "
import socket, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('${address[0]}', $port)); s.listen(); print('here', flush=True); time.sleep(60)" > "$out/port.txt" &
  local squatter=$!
  until [ -s "$out/port.txt" ]; do
    kill -0 $squatter || { hold port false; return; }
    sleep 0.05
  done
  local began
  began=$(now)
  start port 0 max_steps=1
  wait "${pids[0]}"
  local c=$?
  kill $squatter
  hold port [ $c = 4 ] && hold port says port "master_port $port"
  row port "node 0's port is taken" "$c: $(grep -h '^error' "$out/port/0.log" | cut -c1-150)" "$(since "$began") s"
}
case_disk() { # the output folder is on a small disk
  mkdir -p "$out/disk/small"
  mount -t tmpfs -o size=2m none "$out/disk/small" || return
  local began
  began=$(now)
  start disk 0 max_steps=4 save_steps=1 output_dir="$out/disk/small/run"
  start disk 1 max_steps=4 save_steps=1 output_dir="$out/disk/small/run"
  ends disk 60 12 12 "No space left\|free" "$began" "the disk of the output folder is full"
}
sha_own() { sha256sum "$out/own/$1/run/$2/model.safetensors" | cut -d' ' -f1; }
case_own() { # folders of the nodes' own; then there is no room on node 1's disk
  local node began
  for node in 0 1; do
    mkdir -p "$out/own/$node"
    ln -s "$PWD/configs" "$out/own/$node/configs"
    folder=$out/own/$node
    start own "$node" output_dir=run save_on_each_node=true max_steps=4 save_steps=2
  done
  folder=.
  await own 0 0
  one own-one 4 zero.shard_group_size=2 max_steps=4 save_steps=2 "resume_from_checkpoint=$out/own/1/run/checkpoint-2"
  hold own [ "$(sha_own 0 final) $(sha_own 1 final)" = "$(sha own-one) $(sha own-one)" ] &&
    row own "save_on_each_node: 4 steps of 2 x 2; node 1's checkpoint-2 resumed by 1 x 4" "three models equal bit for bit" "-"
  mv "$out/own/0" "$out/own/first"
  mkdir -p "$out/own/0" "$out/own/1"
  mount -t tmpfs -o size=2m none "$out/own/1" || return
  began=$(now)
  for node in 0 1; do
    ln -sfn "$PWD/configs" "$out/own/$node/configs"
    folder=$out/own/$node
    start own "$node" output_dir=run save_on_each_node=true max_steps=4 save_steps=1
  done
  folder=.
  ends own 60 12 12 "No space left\|free" "$began" "save_on_each_node: no room on the disk of node 1"
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
