#!/usr/bin/env python3
"""Runs long episodes against a training run on a CPU, many at once, some of which go wrong, and checks that nothing else does.

    python3 -m venv envs && envs/bin/pip install verifiers==0.4.0
    scripts/agent_soak.py PROGRAM envs/bin/python                        # 200 episodes of 30 turns at once, in verifiers' own loop of turns
    scripts/agent_soak.py PROGRAM PYTHON --loop openai --episodes 20 --turns 5 --steps 10 --timeout 20    # small, seconds: the official client, in a loop

PYTHON has the package. The model is tiny and random. Of 20 episodes one gives up a request by its own limit and closes a stream after its first
piece, then goes on; one raises an exception; one sleeps until --timeout is over, which is how long such a step lasts at least. Held: exactly those that
raise or sleep are lost, no request is refused, every other episode has all of its turns, the run's memory is flat over its second half, and no process or
temporary file is left. An episode that the machine is too slow for is lost, too: --timeout is of the wall clock.
"""
import argparse, json, os, pathlib, subprocess, sys, tempfile, threading, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUP = 10
ROUND = ["raises"] + ["plays"] * 6 + ["sleeps"] + ["plays"] * 6 + ["gives up"] + ["plays"] * 5  # what the episodes of 20 rows do
HELD_OUT = 20  # rows before the training rows, where an environment makes them
# Both loops ask the same; a client that gives up does so twice.
GIVE_UP = '''
import contextlib, http.client, json, urllib.parse

BODY = {"model": "policy", "messages": [{"role": "user", "content": "what is two plus four ?"}]}

def ask(url, timeout, **more):
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.netloc, timeout=timeout)
    connection.request("POST", place.path + "/chat/completions", json.dumps({**BODY, **more}), {"Content-Type": "application/json"})
    return connection

def give_up(url):
    """Two requests that are not waited for."""
    connection = ask(url, 0.01)
    with contextlib.suppress(TimeoutError):
        connection.getresponse()
    connection.close()
    connection = ask(url, None, stream=True)
    connection.getresponse().read(1)
    connection.close()
'''
VERIFIERS = GIVE_UP + '''
import asyncio, os
import verifiers.v1 as vf

TURNS, KINDS = %d, %r


class Data(vf.TaskData):
    kind: str


class Task(vf.Task[Data]):
    pass


class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Env(vf.Env[EnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for turn in range(1, TURNS):
                if turn == 3 and task.data.kind == "raises":
                    raise RuntimeError("it was to raise")
                if turn == 3 and task.data.kind == "sleeps":
                    await asyncio.sleep(10000)
                if turn == 3 and task.data.kind == "gives up":
                    await asyncio.to_thread(give_up, os.environ["OPENAI_BASE_URL"])
                assert not segment.terminated, segment
                segment = await interaction.turn("what is two plus seven ?")
        interaction.trace.record_reward("turns", float(interaction.trace.num_turns))


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt="what is two plus two ?", kind=kind)) for kind in KINDS]


__all__ = ["Tasks", "Env"]
'''
OPENAI = GIVE_UP + '''
import time
import openai

TURNS = %d

def play(row, base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    messages = list(row["prompt"])
    for turn in range(TURNS):
        if turn == 3 and row["kind"] == "raises":
            raise RuntimeError("it was to raise")
        if turn == 3 and row["kind"] == "sleeps":
            time.sleep(10000)
        if turn == 3 and row["kind"] == "gives up":
            give_up(base_url)
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "what is two plus seven ?"}]
    return float(TURNS)
'''


def resident_mib(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return None


def marked(marker):
    """Processes that have the marker in their environment."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if marker.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                pass
    return found


def make_model(program, folder):
    """A random model of the demo's shape with a longer context."""
    shape = json.loads((ROOT / "configs/arithmetic/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 2048}))
    command = [program, "init", "--config_json", folder / "config.json", "--tokenizer", ROOT / "configs/arithmetic/model", "--output", folder / "model"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def keys_of(options, folder):
    """The run's keys, and the name of its reward."""
    rows = options.episodes // GROUP * options.steps
    kinds = [ROUND[row % len(ROUND)] for row in range(rows)]
    if options.loop == "verifiers":
        (folder / "soak_taskset.py").write_text(VERIFIERS % (options.turns, ["plays"] * HELD_OUT + kinds))
        own = ["environment=verifiers:soak-taskset", "environment_args.player.sampling.max_tokens=8", f"max_eval_samples={HELD_OUT}",
               f"max_train_samples={rows}"]
        name = "soak-taskset"
    else:
        (folder / "soak_harness.py").write_text(OPENAI % options.turns)
        prompt = [{"role": "user", "content": "what is two plus two ?"}]
        lines = [json.dumps({"prompt": prompt, "kind": kind}) for kind in kinds]
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
        own, name = [f"agent={folder}/soak_harness.py:play", f"train_file={folder}/rows.jsonl"], "play"
    return name, [
        *own, f"model_name_or_path={folder / 'model'}", f"output_dir={folder / 'run'}", f"reward.python={options.python}", "reward_funcs=[]",
        "device=cpu", "dtype=float32", f"per_device_train_batch_size={options.episodes}", f"num_generations={GROUP}", f"max_steps={options.steps}",
        "max_prompt_length=64", f"max_completion_length={50 * options.turns}", "max_model_length=2048", f"agent_workers={options.episodes}",
        f"agent_timeout_s={options.timeout}", "learning_rate=1e-6", "save_steps=none", "shuffle_dataset=false", "kv_cache_bytes=500000000",
    ]


def check(options, lines, name):
    """Prints a line for each step; what was lost is what was to be lost."""
    totals = [0, 0, 0]
    for line in lines:
        lost, late, refused = (int(line[f"agent/{what}"]) for what in ("num_failed", "num_timeouts", "num_refused"))
        print(f"step {line['step']}: {line['step_time']:.0f} s, {line['agent/mean_requests']:.1f} requests an episode, {lost} lost, {late} of them late, "
              f"{refused} requests refused, an episode took {line['agent/mean_episode_s']:.0f} s, {line[f'rewards/{name}/mean'] or 0:.2f} turns rewarded", flush=True)
        totals = [total + count for total, count in zip(totals, (lost, late, refused))]
        assert line[f"rewards/{name}/mean"] == options.turns, "every other episode has all of its turns"
        assert line["sampling/sampling_logp_difference/max"] < 1e-3, "tokens trained on are those that were sampled"
    each = options.episodes * options.steps // len(ROUND)
    assert totals == [2 * each, each, 0], f"{totals}: {2 * each} episodes are to be lost, {each} of them late, and no request refused"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("python")
    parser.add_argument("--loop", choices=("verifiers", "openai"), default="verifiers", help="whose loop of turns plays the episodes")
    parser.add_argument("--episodes", type=int, default=200, help="of a step, all at once; a multiple of 20")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="agent_timeout_s")
    parser.add_argument("--growth", type=float, default=0.05, help="share of memory that the second half may add")
    options = parser.parse_args()
    if options.episodes % GROUP or options.episodes // GROUP * options.steps % len(ROUND):
        parser.error("--episodes is a multiple of 10, and --episodes x --steps one of 200: whole rounds of rows")
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        make_model(options.program, folder)
        name, keys = keys_of(options, folder)
        temporary = folder / "tmp"
        temporary.mkdir()
        marker = f"COLO_GRPO_SOAK={os.getpid()}"
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": ":".join(paths), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "HOME": str(folder),
                       "COLO_GRPO_SOAK": str(os.getpid())}
        begun = time.monotonic()
        with open(folder / "log", "w") as log:
            run = subprocess.Popen([options.program, *keys], env=environment, stdout=subprocess.DEVNULL, stderr=log)
        samples = []

        def watch():
            while run.poll() is None:
                samples.append((resident_mib(run.pid), len(marked(marker))))
                time.sleep(1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        run.wait()
        watcher.join()
        if run.returncode != 0:
            sys.exit(f"the run ended with {run.returncode}\n{(folder / 'log').read_text()[-3000:]}")
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "loss" in line]
        assert len(lines) == options.steps, lines
        try:
            check(options, lines, name)
        except AssertionError:
            sys.stderr.write((folder / "log").read_text()[-4000:])
            raise
        assert not (left := marked(marker)), f"processes are left: {left}"
        files = [path for path in temporary.rglob("*") if path.is_file()]
        assert not files, f"files are left: {files[:10]}"
        own = [size for size, _ in samples if size]
        half = own[len(own) // 2:]
        growth = max(half[len(half) // 2:]) / max(half[:len(half) // 2 or 1]) - 1
        print(f"{options.steps} steps of {options.episodes} episodes of {options.turns} turns in {time.monotonic() - begun:.0f} s; at most "
              f"{max(count for _, count in samples)} processes; the run's memory {max(own):.0f} MiB at most, {100 * growth:+.2f} % over its second half; "
              "nothing is left")
        assert growth < options.growth, "memory is to stay flat"


if __name__ == "__main__":
    main()
