#!/usr/bin/env bash
# Runs the recipes of configs/environments with the packages themselves, at least 50 episodes of each hub, and compares rewards of reasoning-gym with
# those that the package gives for the same texts. Needs a built program, PyPI and half an hour of two cores.
#   scripts/environments.sh [HUB..]    # reasoning_gym openenv verifiers, unless some are named
# PROGRAM names the program (target/debug/colo-grpo), PYTHON a Python of 3.11 or newer, WORK a folder to keep. verifiers' game needs the words of nltk: where
# they are not in NLTK_DATA and cannot be downloaded, its part says so and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$(realpath "${PROGRAM:-target/debug/colo-grpo}")
work=${WORK:-$(mktemp -d)}
mkdir -p "$work"
hubs=("${@:-reasoning_gym openenv verifiers}")
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; [ -n "${WORK:-}" ] || rm -rf "$work"' EXIT
fail() { echo "environments: $*" >&2; exit 1; }

# A virtual environment with these packages.
venv() {
    local place="$work/$1"
    shift
    [ -x "$place/bin/python" ] || "${PYTHON:-python3}" -m venv "$place"
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || fail "pip does not install $*"
    echo "$place/bin/python"
}
smollm2() { [ -f "$work/smollm2/config.json" ] || python3 scripts/real_model.py "$work/smollm2" 2>/dev/null; echo "$work/smollm2"; }
# Episodes that got a reward, over all steps of a run, and whether any was lost.
episodes() {
    "$1" - "$work/$2/metrics.jsonl" "$3" <<'P'
import json, sys
lines = [line for line in map(json.loads, open(sys.argv[1])) if "loss" in line]
lost = sum(line.get("agent/num_failed", 0) + line.get("tools/num_failed", 0) + line.get("rewards/num_failed", 0) for line in lines)
rewards = ", ".join("%.3f" % line["reward"] for line in lines)
print(f"{int(sys.argv[2]) * len(lines)} episodes, {lost:.0f} lost; reward by step: {rewards}")
sys.exit(lost > 0)
P
}
rises() {
    grep -q "held-out mean reward" "$work/$1.log" || fail "$1 has not been evaluated"
    sed -n 's/^held-out mean reward: \(.*\) before, \(.*\) after/\1 \2/p' "$work/$1.log" | awk '{ exit !($2 > $1) }' || fail "the held-out reward of $1 does not rise"
    grep "held-out mean reward" "$work/$1.log"
}

check_reasoning_gym() {
    local python
    python=$(venv reasoning_gym_venv reasoning-gym==0.1.25)
    "$program" --nproc 2 --config configs/environments/reasoning_gym.toml reward.python="$python" output_dir="$work/reasoning_gym" \
        >"$work/reasoning_gym.log" 2>&1 || { cat "$work/reasoning_gym.log" >&2; fail "the run of reasoning_gym fails"; }
    rises reasoning_gym
    episodes "$python" reasoning_gym 128
    "$program" eval --model "$work/reasoning_gym/final" --config configs/environments/reasoning_gym.toml --output "$work/reasoning_gym.jsonl" \
        reward.python="$python" >"$work/reasoning_gym.eval" 2>&1 || { cat "$work/reasoning_gym.eval" >&2; fail "eval of reasoning_gym fails"; }
    "$python" - "$work/reasoning_gym.jsonl" <<'P'
import json, sys
import reasoning_gym
data = reasoning_gym.create_dataset("gcd", seed=42, size=2100, max_value=20)
questions = {data[index]["question"]: data[index] for index in range(100)}
rows = list(map(json.loads, open(sys.argv[1])))
count = 0
for row in rows:
    entry = next(entry for question, entry in questions.items() if question in str(row["prompt"]))
    for sample in row.get("completions", [row]):
        text, reward = sample["completion"].strip(), sample["reward"]
        assert abs(data.score_answer(text, entry) - reward) < 1e-6, (text, entry["answer"], reward)
        count += 1
print(f"{count} rewards are reasoning-gym's for the same texts")
assert count >= 100
P
}

check_openenv() {
    local python
    python=$(venv openenv_venv openenv==0.10.0)
    [ -d "$work/echo_env" ] || (cd "$work" && "${python%/*}/openenv" init echo_env >/dev/null 2>&1)
    cat >"$work/serve.py" <<P
import sys
sys.path.insert(0, "$work/echo_env")
import uvicorn
from models import EchoAction, EchoObservation
from openenv.core.env_server.http_server import create_app
from server.echo_env_environment import EchoEnvironment
uvicorn.run(create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo_env", max_concurrent_envs=64), host="127.0.0.1", port=8000, log_level="error")
P
    "$python" "$work/serve.py" >"$work/serve.log" 2>&1 &
    server=$!
    for _ in $(seq 200); do (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null && break; sleep 0.3; done
    python3 scripts/openenv_demonstrations.py "$work/openenv.jsonl"
    "$program" sft --config configs/environments/openenv_sft.toml model_name_or_path="$(smollm2)" train_file="$work/openenv.jsonl" \
        output_dir="$work/openenv_sft" >"$work/openenv_sft.log" 2>&1 || { cat "$work/openenv_sft.log" >&2; fail "the warm-up of openenv fails"; }
    "$program" --config configs/environments/openenv.toml model_name_or_path="$work/openenv_sft/final" environment=openenv:http://127.0.0.1:8000 reward.python="$python" output_dir="$work/openenv" \
        >"$work/openenv.log" 2>&1 || { cat "$work/openenv.log" >&2; fail "the run of openenv fails"; }
    kill "$server"
    server=
    rises openenv
    episodes "$python" openenv 16
}

check_verifiers() {
    local python
    python=$(venv verifiers_venv verifiers==0.4.0 textarena==0.7.4 nltk)
    "$program" --config configs/environments/verifiers.toml model_name_or_path="$(smollm2)" reward.python="$python" output_dir="$work/verifiers" \
        >"$work/verifiers.log" 2>&1 || { cat "$work/verifiers.log" >&2; fail "the run of verifiers fails"; }
    episodes "$python" verifiers 10
}

for hub in ${hubs[*]}; do
    printf '\n== %s (%ds)\n' "$hub" "$SECONDS"
    "check_$hub"
done
