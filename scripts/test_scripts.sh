#!/usr/bin/env bash
# Tests of the scripts, without PyTorch: they parse and say how they are used, setup.sh does its work once, the demo's task and model
# come out of the scripts that are said to make them, checks of the schedule say what they lack, the kernel of gated delta nets in decoding is right where a CPU carries it out, packages
# run from any folder, the official openai client is answered, and the Countdown recipe and GSM8K's, with a stand-in for model and rows,
# run to their end. PROGRAM names the program, target/release/colo-grpo unless it is set.
#   scripts/test_scripts.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PROGRAM="${PROGRAM:-${CARGO_TARGET_DIR:-target}/release/colo-grpo}"
program=$PROGRAM
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "test_scripts: $*" >&2; exit 1; }

for script in scripts/*.sh scripts/*.sbatch; do
    bash -n "$script"
    sed '1d; /^[^#]/,$d' "$script" | grep -q "$script" || fail "$script does not say how it is used"
done
for script in scripts/*.py; do
    "$python" - "$script" <<'PY' || fail "$script"
import ast, pathlib, sys
path = pathlib.Path(sys.argv[1])
tree = ast.parse(path.read_text(), str(path))
assert path.name in (ast.get_docstring(tree) or ""), "does not say how it is used"
PY
done

# A check of the schedule whose tool is missing fails with the tool's name; one that nobody knows is refused.
mkdir "$work/few" && ln -s "$(command -v bash)" "$(command -v dirname)" "$work/few"
! said=$(PATH="$work/few" scripts/scheduled.sh deny miri 2>&1) || fail "scheduled.sh passes over what it lacks"
[[ $said =~ "lacks cargo-deny" && $said =~ "lacks a nightly compiler" && $said =~ "not passed: deny miri" ]] || fail "scheduled.sh: $said"
code=0; said=$(scripts/scheduled.sh denny 2>&1) || code=$?
[[ $code = 2 && $said =~ "no check 'denny': deny docs fuzz kernels miri" ]] || fail "scheduled.sh: $said"

linked=$(readlink .libtorch)
said=$(scripts/setup.sh)
[ -z "$said" ] && [ "$(readlink .libtorch)" = "$linked" ] || fail "setup.sh did its work again: $said"

grep -q -- '--require-hashes --requirement "$root/scripts/libtorch.txt"' scripts/setup.sh || fail "setup.sh checks no hashes"
! grep -vE '^#|^[a-z-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}$' scripts/libtorch.txt || fail "libtorch.txt pins not every wheel"

"$python" scripts/make_arithmetic.py "$work/task" >/dev/null
for file in train.jsonl eval.jsonl demonstrations.jsonl tokenizer/tokenizer.json tokenizer/tokenizer_config.json; do
    cmp "$work/task/$file" "configs/arithmetic/$file" || fail "make_arithmetic.py makes another $file"
done
for file in tokenizer.json tokenizer_config.json; do
    cmp "configs/arithmetic/tokenizer/$file" "configs/arithmetic/model/$file" || fail "the model has another $file"
done

# A program equals itself; one that trains a little faster differs, and only where it trains.
printf '#!/bin/sh\n[ "$1" = generate ] || set -- "$@" learning_rate=2.001e-4\nexec "%s" "$@"\n' "$(realpath "$program")" >"$work/faster"
chmod +x "$work/faster"
runs=(--only one-rank,generate-greedy)
said=$("$python" scripts/hashes.py "$program" "$program" "${runs[@]}" 2>"$work/log") || { cat "$work/log" >&2; fail "hashes.py: $said"; }
[ -z "$said" ] || fail "hashes.py says that a program differs from itself: $said"
! said=$("$python" scripts/hashes.py "$program" "$work/faster" "${runs[@]}" 2>"$work/log") || fail "hashes.py sees no difference"
[[ $said =~ ^one-rank\ .*weights.*learning_rate && $said != *generate* ]] || fail "hashes.py: $said"

said=$("$python" scripts/emulate_delta.py decode) || fail "emulate_delta.py: $said"

# A run is killed once, goes on, and is compared; how soon all that was, and how many runs ended before they were killed, depends on
# the machine and is not asked here.
"$python" - <<'PY' || fail "soak.py fits another line"
import sys
sys.path.insert(0, "scripts")
from soak import fit
slope, error = fit([(x, 3 * x + (-1) ** x) for x in range(1001)])
assert abs(slope - 3) < 2 * error < 1e-3, (slope, error)
PY
said=$("$python" scripts/soak.py "$program" "$work/soak" kills --size 1 2>"$work/log") || true
[[ $said =~ disturbed\ +1\ of\ 1 && $said =~ bit\ for\ bit\ +[1-9] && $said != *fault* ]] || { cat "$work/log" >&2; fail "soak.py: $said"; }

printf '#!/bin/sh\n[ "$2" = compare ] || exit "$CODE"\n' >"$work/program"
chmod +x "$work/program"
compare() { CODE=$1 MODES=colocated TP=1 scripts/bench_colocated_vs_split.sh "$work/program" micro 1 "$work/bench" >/dev/null; }
{ compare 4 && compare 11; } || fail "bench_colocated_vs_split.sh does not leave out what has no room"
! compare 10 || fail "bench_colocated_vs_split.sh goes on after a crash"

scripts/make_demo_model.sh "$work/models/demo" 3 2 >/dev/null 2>"$work/log" || { cat "$work/log" >&2; fail "make_demo_model.sh"; }
"$program" eval --model "$work/models/demo" --data configs/arithmetic/eval.jsonl --max_completion_length 2 |
    grep -q '"problems":200' || fail "eval does not take the model of make_demo_model.sh"
# Countdown: rows do not depend on the number of processes, the reward agrees with how each trace was made, nothing held out is
# trained on, and all stages run in turn on a model too small to learn.
for processes in 1 3; do
    "$python" - "$work/countdown$processes" "$processes" <<'PY' >/dev/null || fail "make_countdown.py"
import multiprocessing, sys
sys.path.insert(0, "scripts")
folder, processes = sys.argv[1:]
pool = multiprocessing.Pool
multiprocessing.Pool = lambda: pool(int(processes))
import make_countdown
make_countdown.SHARD = 100
sys.argv = ["make_countdown.py", folder, "--traces", "450", "--train", "150", "--eval", "50"]
make_countdown.main()
PY
done
diff -r "$work/countdown1" "$work/countdown3" || fail "make_countdown.py makes other rows with other processes"
"$python" - "$work/countdown1" <<'PY' || fail "configs/countdown/reward.py"
import json, pathlib, sys
sys.path.insert(0, "configs/countdown")
from reward import countdown, solves
folder = pathlib.Path(sys.argv[1])
sft, train, held_out = ([json.loads(line) for line in (folder / name).open()] for name in ("sft.jsonl", "train.jsonl", "eval.jsonl"))
assert [len(rows) for rows in (sft, train, held_out)] == [450, 150, 50]
for row in sft:
    assert solves(row["completion"], row["numbers"], row["target"]) == row["correct"], row
assert 0.15 < sum(row["correct"] for row in sft) / len(sft) < 0.35
numbers = lambda rows: {tuple(sorted(row["numbers"])) for row in rows}
assert not numbers(held_out) & numbers(sft + train)

answer = lambda text: f"<think>\nwell\n</think>\n<answer>{text}</answer>"
right = ["(8-3)*4", "4*(8-3)", " ( 8 - 3 ) * 4 ", "4/(3/(8+7))"]
wrong = ["8*4-3", "(8-3)*2", "8-3*4", "(8-3)*4+0", "(8-3)*4*1", "(8-3)*4 4", "(8-3", "8-3)*4", "", "20", "(8-3)*4=20", "4**8", "8/(4-4)", "-3+8",
         "8 3", "٨-3", "__import__('os')", "(" * 99, "9" * 199]
assert all(solves(answer(text), [3, 4, 8], 20) for text in right[:3]) and solves(answer(right[3]), [4, 3, 8, 7], 20)
assert not any(solves(answer(text), [3, 4, 8], 20) for text in wrong)
text = answer(right[0])
assert not any(solves(other, [3, 4, 8], 20) for other in (right[0], text + text, text[7:], text + "!", text.replace("</think>", "")))
assert not solves(answer("(1 0-3)*4"), [3, 4, 10], 28) and solves(answer("(10-3)*4"), [3, 4, 10], 28)
assert countdown([[{"content": text}], [{"content": ""}]], [[3, 4, 8]] * 2, [20] * 2, prompts=[]) == [1.0, 0.0]
PY
"$python" - "$work/small.json" <<'PY'
import json, sys
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
json.dump({**json.load(open("configs/countdown/config.json")), **small, "torch_dtype": "float32"}, open(sys.argv[1], "w"))
PY
said=$(MODEL="$work/small.json" TASK="--traces 64 --train 32 --eval 32" \
    SFT="max_steps=2 per_device_train_batch_size=16 logging_steps=1 device=cpu" \
    GRPO="max_steps=2 per_device_train_batch_size=16 eval_steps=1 max_completion_length=16 device=cpu" \
    scripts/countdown.sh "$program" "$work/countdown" 2>&1 | tr -d "\000") || fail "countdown.sh: $said"
[[ $said =~ "held-out by step: 0: 0.000, 1: 0.000, 2: 0.000" ]] || fail "countdown.sh: $said"
"$python" -c 'import sys, xml.dom.minidom as xml; assert xml.parse(sys.argv[1]).getElementsByTagName("polyline")' \
    "$work/countdown/curve.svg" || fail "countdown_curve.py draws nothing"
"$python" - "$work/replacing" <<'PY'
import json, pathlib, sys
for name in ("none-1", "replace-1"):
    folder = pathlib.Path(sys.argv[1], name)
    (folder / "final").mkdir(parents=True)
    step = {"perf/generation_tokens_per_second": 10.0, "timing_s/generate": 2.0}
    lines = [{"eval_reward": 0.2}, step, step, {"eval_reward": 0.6}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
PY
[[ $(scripts/demo_curve.py replacing "$work/replacing") =~ "| 20 | 0.400 | 0.400 |" ]] || fail "demo_curve.py"
rm -r "$work/replacing"/*-1
[[ $(scripts/demo_curve.py replacing "$work/replacing") =~ "| 20 | 0.400 | 0.400 |" ]] || fail "demo_curve.py does not draw the points that it keeps"
mkdir "$work/learning"
"$python" scripts/learning_curves.py docs/learning/runs.jsonl "$work/learning" >/dev/null || fail "learning_curves.py"
for picture in learning learning-variants; do
    cmp "$work/learning/$picture.svg" "docs/$picture.svg" || fail "docs/$picture.svg is not drawn from docs/learning/runs.jsonl"
done
# The README's recipe with two names replaced: the stand-in's rows are GSM8K's in form, its tokenizer and template are read, the recipe's
# own rewards find the answer in a row's text, and what was trained is a model.
"$python" scripts/make_stand_in.py "$work/stand-in" --train 64 --test 8 >/dev/null || fail "make_stand_in.py"
"$python" - "$work/stand-in/gsm8k/main" <<'PY' || fail "make_stand_in.py does not write GSM8K's rows"
import json, pathlib, re, sys
for name, count in (("train", 64), ("test", 8)):
    rows = [json.loads(line) for line in (pathlib.Path(sys.argv[1]) / f"{name}.jsonl").open()]
    assert len(rows) == count and all(list(row) == ["question", "answer"] for row in rows)
    assert all(re.search(r"\n#### \d+$", row["answer"]) for row in rows)
    for row in rows:
        for sum, said in re.findall(r"<<(.*?)=(\d+)>>", row["answer"]):
            assert eval(sum, {}) == int(said), row
PY
recipe=(--config configs/recipes/gsm8k-1.5b-1gpu.toml device=cpu max_steps=2 model_name_or_path="$work/stand-in/model"
    dataset_name="$work/stand-in/gsm8k" per_device_train_batch_size=16 gradient_accumulation_steps=1 max_completion_length=64)
"$program" "${recipe[@]}" output_dir="$work/tried" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "the recipe on the stand-in"; }
grep -q "<|im_start|>system.*boxed.*<|im_start|>user.*<|im_start|>assistant" "$work/log" || fail "the recipe's first prompt is no chat"
"$python" - "$work/tried/metrics.jsonl" <<'PY' || { cat "$work/tried/metrics.jsonl" >&2; fail "the recipe's metrics"; }
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
steps = [line for line in lines if "loss" in line]
assert len(steps) == 2 and all("rewards/numeric_answer/mean" in line for line in steps)
assert all(line["rewards/num_failed"] == 0 for line in steps), "every sample is scored"
PY
# The server through the official client: streams, structures, tools and adapters, of the stand-in with two adapters of random weights.
"$python" - "$work/stand-in/model" "$work/adapters" <<'PY' || fail "adapters are not written"
import array, json, math, pathlib, random, struct, sys
model, folder = map(pathlib.Path, sys.argv[1:])
config = json.loads((model / "config.json").read_text())
hidden, rng = config["hidden_size"], random.Random("adapters")
for name, rank in (("one", 4), ("two", 2)):
    header, data = {}, b""
    for layer in range(config["num_hidden_layers"]):
        for part, shape in (("lora_A", [rank, hidden]), ("lora_B", [hidden, rank])):
            numbers = array.array("f", [rng.gauss(0, 0.3) for _ in range(math.prod(shape))]).tobytes()
            header[f"base_model.model.model.layers.{layer}.self_attn.q_proj.{part}.weight"] = {
                "dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(numbers)]}
            data += numbers
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / name).mkdir(parents=True)
    (folder / name / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": str(model)}
    (folder / name / "adapter_config.json").write_text(json.dumps(settings))
PY
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: --target "$work/openai" \
    --requirement scripts/openai.txt || fail "pip does not install the openai client"
"$program" serve --model "$work/stand-in/model" --served_model_name base --adapter one="$work/adapters/one" --adapter two="$work/adapters/two" \
    --tool_call_parser hermes --port 0 >/dev/null 2>"$work/served" &
server=$!
while ! address=$(grep -o "http://.*/v1" "$work/served"); do
    kill -0 "$server" 2>/dev/null || { cat "$work/served" >&2; fail "serve"; }
    sleep 0.2
done
said=$(PYTHONPATH="$work/openai" "$python" scripts/serve_openai.py "$address" 2>&1) || { kill "$server"; cat "$work/served" >&2; fail "serve_openai.py: $said"; }
[[ $said = *"the adapter two has"* && $said = *"a call is found"* ]] || { kill "$server"; fail "serve_openai.py leaves checks out: $said"; }
kill "$server" && wait "$server" || fail "serve does not end with 0: $(cat "$work/served")"
# A harness with the same client plays the episodes of a run.
PYTHONPATH="$work/openai" "$program" --config configs/calculator.toml tools=[] agent=scripts/agent_openai.py:play reward.python="$python" max_steps=1 \
    eval_steps=none eval_file=none save_steps=none max_train_samples=64 output_dir="$work/agent" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "a run with an agent"; }
"$python" - "$work/agent/metrics.jsonl" <<'PY' || fail "the agent's episodes: $(cat "$work/agent/metrics.jsonl")"
import json, sys
line = json.loads(open(sys.argv[1]).readline())
assert line["agent/num_failed"] == line["agent/num_refused"] == 0 and line["agent/mean_requests"] > 1, line
assert line["agent/mean_trajectories"] == 1 and line["sampling/sampling_logp_difference/max"] < 1e-4, line
PY
# Episodes of several turns at once, some of which give up, raise or sleep; scripts/agent_soak.py has the large form.
said=$(PYTHONPATH="$work/openai" "$python" scripts/agent_soak.py "$program" "$python" --loop openai --episodes 20 --turns 5 --steps 10 --timeout 20 --growth 0.3 2>&1) ||
    fail "agent_soak.py: $said"
[[ $said =~ "at most".*"nothing is left" ]] || fail "agent_soak.py: $said"
# The watcher's page in a browser, where there is one.
"$program" --config configs/calculator.toml max_steps=1 eval_steps=none eval_file=none save_steps=none max_train_samples=64 log_completions=true \
    output_dir="$work/watched/turns" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "a run with tools to watch"; }
for run in a b; do
    "$program" --config configs/tiny-cpu.toml tensor_parallel_size=1 per_device_train_batch_size=8 num_generations=4 max_steps=2 eval_steps=none \
        eval_file=none max_train_samples=256 log_completions=true output_dir="$work/watched/$run" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "a run to watch"; }
done
said=$("$python" scripts/watch_browser.py "$program" "$work/watched" 2>&1) && in_browser=yes || in_browser=$?
[ "$in_browser" = yes ] || [ "$in_browser" = 4 ] || fail "watch_browser.py: $said"
[ "$in_browser" = yes ] || echo "$said"
# Packages, from a folder that is not their own, without any variable: the wheel unpacked as pip does, beside PyTorch's libraries and beside
# another's; and the archive's tree. Both run on the libraries that they came with, not on those of the build.
CHIPS= PACKAGE_LEVEL=1 scripts/package.sh "$work/package" "wheel tree" >/dev/null || fail "package.sh"
"$python" - "$work/package" "$work/site" "$(dirname "$(dirname "$(realpath .libtorch/lib/libtorch_cpu.so)")")" <<'PY'
import pathlib, stat, sys, zipfile
package, site, torch = map(pathlib.Path, sys.argv[1:])
(wheel,) = package.glob("colo_grpo-*-py3-none-manylinux_2_*_x86_64.whl")
with zipfile.ZipFile(wheel) as archive:
    assert archive.testzip() is None
    names = archive.namelist()
    (record,) = (name for name in names if name.endswith("/RECORD"))
    assert sorted(line.split(",")[0] for line in archive.read(record).decode().splitlines()) == sorted(names)
    assert "Requires-Dist: torch==2.11.*" in archive.read(record.replace("RECORD", "METADATA")).decode()
    for home in ("beside", "apart"):
        archive.extractall(site / home)
        for entry in archive.infolist():  # pip's rule: only what is said to be a regular file may become a program
            mode = entry.external_attr >> 16
            if stat.S_ISREG(mode) and mode & 0o111:
                (site / home / entry.filename).chmod(0o755)
for home, version in (("beside", "2.11.0"), ("elsewhere", "2.11.0+cu130"), ("other", "2.12.0")):
    (site / home / "torch").mkdir(parents=True)
    (site / home / "torch/__init__.py").write_text("raise ImportError('it is found, not imported')")
    (site / home / "torch/lib").symlink_to(torch / "lib")
    (site / home / f"torch-{version}.dist-info").mkdir()
    (site / home / f"torch-{version}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
PY
packaged() { (cd / && env -i HOME=/nonexistent PYTHONPATH="$1" "$(command -v "$python")" -m colo_grpo --version 2>&1) || true; }
version=$("$program" --version)
[ "$(packaged "$work/site/beside")" = "$version" ] || fail "the wheel beside PyTorch: $(packaged "$work/site/beside")"
[ "$(packaged "$work/site/apart:$work/site/elsewhere")" = "$version" ] || fail "the wheel apart from PyTorch"
[[ $(packaged "$work/site/apart:$work/site/other") = *"PyTorch 2.12.0 is installed, expected 2.11."* ]] || fail "the wheel takes another PyTorch"
! grep -q "$(dirname "$(realpath .libtorch/lib/libtorch_cpu.so)")" "$work/site/beside/colo_grpo/colo-grpo" || fail "the wheel knows the build's folder"
tree=$(echo "$work"/package/colo-grpo-*-linux-x86_64)
mv "$tree" "$work/moved"
[ "$(cd / && env -i "$work/moved/bin/colo-grpo" --version)" = "$version" ] || fail "the archive does not run"
[[ $(ldd "$work/moved/bin/colo-grpo") = *"$work/moved/bin/../torch/lib/libtorch_cpu.so"* ]] || fail "the archive takes other libraries than its own"

# The archive in a root that has nothing but the C and C++ libraries, where this user may make one: a step is trained there.
root=$work/root
mkdir -p "$root/tmp" "$root/lib64" "$root/proc" "$root/dev"
mv "$work/moved" "$root/moved"
for library in $(ldd "$root/moved/bin/colo-grpo" | grep -oE '(^|[[:space:]])/(usr/)?lib[^ ]*' | sort -u); do
    mkdir -p "$root$(dirname "$library")" && cp -L "$library" "$root$library"
done
touch "$root/dev/null" "$root/dev/urandom"
inside() {
    unshare --map-root-user --mount --fork sh -c 'mount --bind /dev/null "$0/dev/null" && mount --bind /dev/urandom "$0/dev/urandom" &&
        mount --rbind /proc "$0/proc" && cd "$0/moved" && exec env -i HOME=/tmp PATH="$PATH" chroot "$0" /moved/bin/colo-grpo "$@"' "$root" "$@"
}
if unshare --map-root-user --mount true 2>/dev/null; then
    [ "$(inside --version)" = "$version" ] || fail "the archive does not run in an empty root: $(inside --version 2>&1)"
    inside --config /moved/configs/tiny-cpu.toml train_file=/moved/configs/arithmetic/train.jsonl model_name_or_path=/moved/configs/arithmetic/model \
        tensor_parallel_size=1 per_device_train_batch_size=8 num_generations=4 max_steps=1 eval_steps=none eval_file=none output_dir=/tmp/run \
        >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "the archive does not train in an empty root"; }
    [ -s "$root/tmp/run/final/model.safetensors" ] || fail "the archive leaves no model in an empty root"
else
    echo "test_scripts: this user may make no root of its own: the archive is not tried in an empty one"
fi
# The container's recipe, as far as it goes without its images: instructions that Docker knows, files that are there, and the step behind
# the wheel's installation.
"$python" - "$work/image" <<'PY' || fail "Dockerfile"
import os, pathlib, re, subprocess, sys
lines = [line for line in pathlib.Path("Dockerfile").read_text().splitlines() if not line.startswith("#")]
steps = [step.split(None, 1) for step in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines() if step.strip()]
assert {name for name, _ in steps} <= {"FROM", "RUN", "COPY", "WORKDIR", "ENTRYPOINT"}, steps
assert all(":" in image for name, image in steps if name == "FROM"), "images have versions"
runs = [step for name, step in steps if name == "RUN"]
for script in re.findall(r"scripts/\w+\.sh", " ".join(runs)):
    assert os.access(script, os.X_OK), script
(link,) = (step for step in runs if step.startswith("site="))
site = pathlib.Path(sys.argv[1])
for name in ("torch/__init__.py", "nvidia/nccl/lib/libnccl.so.2", "torch/lib/libtorch_cpu.so"):
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    (site / name).touch()
subprocess.run(["sh", "-c", link.replace("python -c", f"'{sys.executable}' -c")], check=True, env={**os.environ, "PYTHONPATH": str(site)})
assert (site / "torch/lib/libnccl.so").resolve() == (site / "nvidia/nccl/lib/libnccl.so.2").resolve()
PY

"$program" generate --model "$work/tried/final" --chat --prompt "What is 2 + 3?" --max_completion_length 4 2>/dev/null |
    grep -q '"num_tokens"' || fail "what the recipe leaves is no model"
echo "scripts: ok"
