#!/usr/bin/env python3
"""Runs long episodes of verifiers against a training run: 200 at once, of 30 turns each, some of which go wrong.

    python3 -m venv envs && envs/bin/pip install verifiers==0.4.0
    scripts/agent_soak.py PROGRAM envs/bin/python [STEPS]    # the built program; five steps of 200 episodes unless STEPS says otherwise

The model is tiny and random, on a CPU. The loop of turns is verifiers' own: its interaction with a harness, over its interception server. Of 20
episodes one gives up a request and asks again, one raises an exception, and one sleeps until its time is over. Checks that exactly those that
raise or sleep are lost, that no request is refused, that every other episode has all of its turns, that memory stays flat, and that neither
processes nor temporary files are left.
"""
import json, os, pathlib, signal, subprocess, sys, tempfile, threading, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
AT_ONCE, TURNS = 200, 30
TASKSET = '''
import asyncio
import contextlib
import os

import httpx
import verifiers.v1 as vf

TURNS = %d


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
                    body = {"model": "policy", "messages": [{"role": "user", "content": "what is two plus four ?"}]}
                    with contextlib.suppress(httpx.HTTPError):
                        async with httpx.AsyncClient(timeout=0.01, trust_env=False) as client:
                            await client.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body)
                assert not segment.terminated, segment
                segment = await interaction.turn("what is two plus seven ?")
        interaction.trace.record_reward("turns", float(interaction.trace.num_turns))


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        kinds = ["raises", "sleeps", "gives up"] + ["plays"] * 17
        return [Task(Data(prompt="what is two plus two ?", kind=kinds[index %% 20])) for index in range(10000)]


__all__ = ["Tasks", "Env"]
'''


def resident(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


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


def main():
    program, python, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 5
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        (folder / "soak_taskset.py").write_text(TASKSET % TURNS)
        shape = json.loads((ROOT / "configs/arithmetic/config.json").read_text())
        shape.update(max_position_embeddings=2048)
        (folder / "config.json").write_text(json.dumps(shape))
        model = folder / "model"
        subprocess.run([program, "init", "--config_json", folder / "config.json", "--tokenizer", ROOT / "configs/arithmetic/model", "--output", model],
                       check=True, stdout=subprocess.DEVNULL)
        temporary = folder / "tmp"
        temporary.mkdir()
        keys = [
            f"model_name_or_path={model}", "environment=verifiers:soak-taskset", "environment_args.player.sampling.max_tokens=8",
            f"reward.python={python}", "reward_funcs=[]", f"output_dir={folder / 'run'}", "device=cpu", "dtype=float32",
            f"per_device_train_batch_size={AT_ONCE}", "num_generations=10", f"max_steps={steps}", "max_train_samples=2000", "max_eval_samples=1",
            "max_prompt_length=64", "max_completion_length=1500", "max_model_length=2048", f"agent_workers={AT_ONCE}", "agent_timeout_s=240",
            "learning_rate=1e-6", "save_steps=none", "shuffle_dataset=true", "kv_cache_bytes=500000000",
        ]
        marker = f"COLO_GRPO_SOAK={os.getpid()}"
        environment = {**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "COLO_GRPO_SOAK": str(os.getpid()),
                       "HOME": str(folder)}
        begun = time.monotonic()
        run = subprocess.Popen([program, *keys], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        samples = []
        def watch():
            while run.poll() is None:
                samples.append((time.monotonic() - begun, resident(run.pid), len(marked(marker))))
                time.sleep(2)
        watcher = threading.Thread(target=watch)
        watcher.start()
        said = run.communicate()[1]
        watcher.join()
        if run.returncode != 0:
            sys.exit(f"the run ended with {run.returncode}\n{said[-3000:]}")
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "loss" in line]
        assert len(lines) == steps, len(lines)
        for line in lines:
            print(f"step {line['step']}: {line['step_time']:.0f} s, requests an episode {line['agent/mean_requests']:.1f}, lost "
                  f"{line['agent/num_failed']:.0f}, of them late {line['agent/num_timeouts']:.0f}, refused {line['agent/num_refused']:.0f}, "
                  f"turns rewarded {line['rewards/soak-taskset/mean']:.2f}")
            assert line["agent/num_refused"] == 0, "no request is to be refused"
            assert line["rewards/soak-taskset/mean"] == TURNS, "every other episode has all of its turns"
            assert line["agent/num_failed"] <= AT_ONCE * 0.4
        left = marked(marker)
        assert not left, f"processes are left: {left}"
        files = [path for path in temporary.rglob("*") if path.is_file()]
        assert not files, f"files are left: {files[:10]}"
        own = [size for _, size, _ in samples if size]
        half = own[len(own) // 2 :]
        growth = (max(half[-5:]) - max(half[:5])) / max(half[:5])
        print(f"{steps} steps of {AT_ONCE} episodes in {time.monotonic() - begun:.0f} s; at most {max(count for *_, count in samples)} processes; the run's memory "
              f"{max(own):.0f} MiB at most, over the second half {100 * growth:+.2f} %")
        assert growth < 0.05, "memory is to stay flat"


if __name__ == "__main__":
    main()
