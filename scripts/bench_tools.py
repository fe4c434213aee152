#!/usr/bin/env python3
"""Times rollouts whose tool is slow: log-normal with a median of 0.3 s, and one call in a hundred never answers. Once all
tools are awaited before any next turn (full_determinism), for comparison; once other trajectories are decoded while it runs; and once a
step ends with its first complete groups, the others going on in the next one. Standard library only.

  bench_tools.py PROGRAM FOLDER [--trajectories N] [--steps N] [--timeout S]

Prints the share of the rollouts' time in which nothing was decoded, the time of a rollout, and the most memory that the program and the
processes of its tools held at once (proportional set size). The model is configs/calculator's; one process.
"""
import argparse
import json
import pathlib
import subprocess
import threading

TOOL = '''
import random, time


def add(a: int, b: int) -> int:
    """
    Adds two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    if random.random() < 0.01:
        time.sleep(1e6)
    time.sleep(0.3 * random.lognormvariate(0, 1))
    return a + b
'''


def descendants(pid):
    found, open_ = [], [pid]
    while open_:
        parent = open_.pop()
        found.append(parent)
        try:
            for task in pathlib.Path(f"/proc/{parent}/task").iterdir():
                open_ += map(int, (task / "children").read_text().split())
        except OSError:
            pass
    return found


def memory_bytes(pid):
    """Memory of a process and all that it started, pages that several share counted once; and how many there are."""
    total, count = 0, 0
    for each in descendants(pid):
        try:
            text = pathlib.Path(f"/proc/{each}/smaps_rollup").read_text()
        except OSError:
            continue
        total += 1024 * int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
        count += 1
    return total, count


def run(arguments, name, keys):
    folder = arguments.folder / name
    command = [
        arguments.program, "--config", "configs/calculator.toml", f"output_dir={folder}", f"max_steps={arguments.steps}",
        f"per_device_train_batch_size={arguments.trajectories}", f"tools=[\"{arguments.folder / 'slow.py'}:add\"]", "eval_file=none",
        "eval_steps=none", "save_steps=none", f"tool_timeout_s={arguments.timeout}", f"tool_workers={arguments.trajectories}",
        f"max_num_seqs={arguments.trajectories}", "learning_rate=1e-9", *keys]
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    most = [(0, 0)]

    def watch():
        while process.poll() is None:
            most[0] = max(most[0], memory_bytes(process.pid))
            stopped.wait(0.5)

    stopped = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    said = process.stderr.read()
    process.wait()
    stopped.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(said)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    mean = lambda metric: sum(line[metric] for line in lines) / len(lines)
    held, count = most[0]
    print(f"{name:12} idle {mean('tools/idle_share'):.2f}  rollout {mean('timing_s/generate'):7.2f} s  calls "
          f"{mean('tools/call_frequency'):.2f} a completion  hung {sum(line['tools/num_timeouts'] for line in lines):3.0f}  most "
          f"memory {held / 1e6:.0f} MB in {count} processes", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=5.0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    arguments.folder = arguments.folder.resolve()
    (arguments.folder / "slow.py").write_text(TOOL)
    run(arguments, "whole_turns", ["full_determinism=true"])
    run(arguments, "while", [])
    run(arguments, "carried", ["oversample=1.0", "partial_rollout=true"])


if __name__ == "__main__":
    main()
