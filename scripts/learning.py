#!/usr/bin/env python3
"""Trains two tasks by colo-grpo and by TRL with vLLM: same start, rows, rate and batch, several seeds. Appends events to OUT/events.jsonl.

    learning.py OUT --tasks words countdown --who ours trl variants --seeds 1 2 3 --seconds 500
    learning.py OUT --collect docs/learning/runs.jsonl      folds the events into one line a run, and keeps the lines that are there

Each visible GPU takes one run after the other, in the order of the list; a run that is not expected to end in --seconds does not begin, and
TRL ends at the deadline with the steps that it has. A run that --collect's file already has from the same kind of card is not made again. Rows
are shuffled once a seed, and read in order by both. Afterwards both are judged by `colo-grpo eval` on held-out rows. KEY=VALUE changes the
tasks: `steps=2 prompts=2 max_completion_length=8 device=cpu` is a trial without a GPU. scripts/learning.sh finds the GPUs' libraries first.
"""
import argparse, json, os, pathlib, queue, random, shutil, subprocess, sys, threading, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TASKS = {
    "words": dict(
        config="configs/words/grpo.toml", reward="configs/words/reward.py:words", model="words/model", task="words/task", prompts=64, group=8,
        max_completion_length=128, context=320, learning_rate=3e-5, warmup_steps=0, steps=50, trl_micro_batch=128, estimates=(40, 115, 120)),
    "countdown": dict(
        config="configs/countdown/grpo.toml", reward="configs/countdown/reward.py:countdown", model="countdown/sft/final", task="countdown/task",
        prompts=64, group=8, max_completion_length=512, context=640, learning_rate=3e-5, warmup_steps=0, steps=30, trl_micro_batch=64,
        estimates=(45, 90, 180)),
}
# What each does to our run, and how many GPUs it needs.
VARIANTS = {
    "fp8": (1, "rollout_quantization=fp8", "kv_cache_dtype=fp8", "mixed_precision=fp8"),
    "8-bit": (1, "optim=adamw_8bit"),
    "exact": (1, "exact=true"),
    "muon": (1, "optim=muon"),
    "muon-faster": (1, "optim=muon", "learning_rate=1e-4"),
    "replaced": (1, "dynamic_sampling=replace"),
    "qlora": (1, "lora.r=32", "quantization=nf4", "learning_rate=3e-4"),
    "int8": (1, "rollout_quantization=int8", "kv_cache_dtype=int8"),
    "drafts": (1, "speculation=auto"),
    "two": (2,),
    "async": (2, "mode=split", "split.rollout_gpus=1", "split.async_steps=1"),
}
OUT_OF_ROWS = 3  # exit code of a run that replaces groups and finds no more of them: its steps count all the same


class Runs:
    def __init__(self, options, changes):
        self.options, self.out = options, options.out.resolve()
        self.events = (options.events or self.out / "events.jsonl").resolve()
        self.begun, self.lock = time.monotonic(), threading.Lock()
        self.device = changes.pop("device", "cuda")
        self.tasks = {name: {**TASKS[name], **changes} for name in options.tasks}

    def left(self):
        return self.options.seconds - (time.monotonic() - self.begun)

    def say(self, run, event, **values):
        with self.lock, self.events.open("a") as file:
            file.write(json.dumps({"run": run, "event": event, **values}) + "\n")

    def call(self, name, command, gpus=(), limit=None):
        """Ends with the exit code; the output goes to a log."""
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {})}
        with (self.out / f"{name}.log").open("w") as log:
            try:
                return subprocess.run([str(part) for part in command], stdout=log, stderr=log, cwd=ROOT, env=environment,
                                      timeout=limit and max(limit, 1)).returncode
            except subprocess.TimeoutExpired:
                return 124

    def prepare(self, name, task):
        """Models and rows, where they are not there yet."""
        program, python = self.options.program, sys.executable
        ranks = min(2, max(1, len(self.gpus())))
        steps = []
        if name == "words":
            steps = [(task["task"] + "/train.jsonl", [python, "scripts/make_word_problems.py", self.out / task["task"]]),
                     (task["model"] + "/model.safetensors", [python, "scripts/real_model.py", self.out / task["model"], "--dtype", "bfloat16"])]
        if name == "countdown":
            traces = task.get("traces", 100_000)
            steps = [(task["task"] + "/train.jsonl", [python, "scripts/make_countdown.py", self.out / task["task"], "--traces", traces]),
                     ("countdown/random/config.json", [program, "init", "--config-json", task.get("shape", "configs/countdown/config.json"),
                                                       "--tokenizer", self.out / task["task"] / "tokenizer", "--output", self.out / "countdown/random"]),
                     (task["model"] + "/config.json", [program, "sft", *(["--nproc", ranks] if ranks > 1 else []), "--config", "configs/countdown/sft.toml",
                                                       f"device={self.device}", f"per_device_train_batch_size={128 // ranks}",
                                                       f"model_name_or_path={self.out}/countdown/random", f"train_file={self.out}/{task['task']}/sft.jsonl",
                                                       f"output_dir={self.out}/countdown/sft", *task.get("sft", "").split()])]
        for index, (made, command) in enumerate(steps):
            if not (self.out / made).exists():
                (self.out / made).parent.parent.mkdir(parents=True, exist_ok=True)
                print(f"{name}: {made} ..", flush=True)
                if code := self.call(f"{name}-prepare-{index}", command, gpus=self.gpus()[:ranks]):
                    sys.exit(f"learning: {name}: {made}: exit code {code}: " + (self.out / f"{name}-prepare-{index}.log").read_text()[-2000:])
        rows = (self.out / task["task"] / "train.jsonl").read_text().splitlines()
        for seed in self.options.seeds:
            shuffled = rows[:]
            random.Random(f"rows {seed}").shuffle(shuffled)
            (self.out / task["task"] / f"train-{seed}.jsonl").write_text("\n".join(shuffled[:task["prompts"] * task["steps"] * 12]) + "\n")

    def gpus(self):
        if self.device == "cpu":
            return []
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        if shown:
            return shown.split(",")
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
        return [str(index) for index in range(len(found))]

    def card(self):
        if self.device == "cpu":
            return "CPU"
        return subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout.splitlines()[0]

    def ours(self, name, variant, seed, gpus):
        task, run = self.tasks[name], f"{name}-ours{'-' + variant if variant else ''}-{seed}"
        output, (ranks, *keys) = self.out / run, VARIANTS[variant] if variant else (1,)
        command = [self.options.program, *(["--nproc", ranks] if ranks > 1 else []), "--config", task["config"], f"device={self.device}",
                   f"model_name_or_path={self.out / task['model']}", f"train_file={self.out}/{task['task']}/train-{seed}.jsonl", "eval_file=none",
                   "eval_steps=none", f"output_dir={output}", "shuffle_dataset=false", f"seed={seed}", f"max_steps={task['steps']}",
                   f"per_device_train_batch_size={task['prompts'] * task['group'] // ranks}", f"num_generations={task['group']}",
                   f"max_completion_length={task['max_completion_length']}", f"max_model_length={task['context']}",
                   f"learning_rate={task['learning_rate']}", f"warmup_steps={task['warmup_steps']}", "report_to=[]", *keys]
        shutil.rmtree(output, ignore_errors=True)
        started = time.time()
        limit = self.left()
        code = self.call(run, command, gpus, limit)
        lines = [json.loads(line) for line in read(output / "metrics.jsonl") if "loss" in json.loads(line)]
        if lines:
            begun = lines[0]["time"] - lines[0]["step_time"]
            shown = " ".join(map(str, command)).replace(str(self.out), "OUT").replace(str(self.options.program), "colo-grpo")
            self.say(run, "start", task=name, who="colo-grpo", variant=variant, seed=seed, card=self.card(), versions=self.version(), steps=task["steps"],
                     start_s=round(begun - started, 2), command=shown)
            for line in lines:
                # With groups replaced, `reward` is that of the trained ones alone.
                self.say(run, "step", step=line["step"], seconds=round(line["time"] - begun, 3),
                         reward=round(line.get("dynamic_sampling/reward", line["reward"]), 5), length=line["completions/mean_length"],
                         learning_rate=line["learning_rate"], num_tokens=line["num_tokens"], groups=line.get("dynamic_sampling/generated_groups"),
                         drafts=line.get("speculation/draft_tokens"), accepted=line.get("speculation/accepted_tokens"), mean_difference=line.get("sampling/sampling_logp_difference/mean"),
                         difference=line.get("sampling/sampling_logp_difference/max"))
        if code == OUT_OF_ROWS and variant == "replaced" and lines:
            self.say(run, "end", late=False, out_of_rows=True)
            print(f"{run}: no more rows after {len(lines)} steps", flush=True)
            return
        if code:
            self.say(run, "failed", code=code, tail=(self.out / f"{run}.log").read_text()[-1500:])
            print(f"{run}: exit code {code}", flush=True)
            return
        self.say(run, "end", late=False)
        if self.judged(seed):
            self.judge(name, run, output / "final", gpus)

    def judged(self, seed):
        return self.options.judged is None or seed in self.options.judged

    def trl(self, name, seeds, gpus):
        task, run = self.tasks[name], f"{name}-trl"
        file = self.out / f"{run}-{'-'.join(map(str, seeds))}.json"
        told = {key: task[key] for key in ("prompts", "group", "max_completion_length", "context", "learning_rate", "warmup_steps", "steps", "trl_micro_batch")}
        rows = {seed: f"{self.out}/{task['task']}/train-{seed}.jsonl" for seed in seeds}
        file.write_text(json.dumps({**told, "task": name, "run": run, "seeds": seeds, "rows": rows, "model": str(self.out / task["model"]),
                                    "reward": task["reward"], "output": str(self.out / run),
                                    "command": f"scripts/learning_trl.py TASK.json EVENTS.jsonl with {json.dumps(told)}"}))
        seconds = max(self.left() - 20, 10)
        code = self.call(file.stem, [self.options.trl_python, "scripts/learning_trl.py", file, self.events, "--deadline", seconds], gpus, self.left())
        if code:
            self.say(f"{run}-{seeds[0]}", "failed", code=code, tail=(self.out / f"{file.stem}.log").read_text()[-1500:])
            print(f"{file.stem}: exit code {code}", flush=True)
        for seed in seeds:
            if (self.out / run / str(seed) / "config.json").exists():
                self.judge(name, f"{run}-{seed}", self.out / run / str(seed), gpus)

    def judge(self, name, run, model, gpus):
        """The held-out reward of a trained model, by our program for both."""
        task = self.tasks[name]
        command = [self.options.program, "eval", "--device", self.device, "--model", model, "--config", task["config"],
                   "eval_file=" + str(self.out / task["task"] / "eval.jsonl"), f"max_completion_length={task['max_completion_length']}", "-n", 2]
        if "max_eval_samples" in task:
            command.append(f"max_eval_samples={task['max_eval_samples']}")
        code = self.call(f"{run}-eval", command, gpus, max(self.left(), 20))
        found = [json.loads(line) for line in read(self.out / f"{run}-eval.log") if line.startswith("{")]
        if code or not found:
            print(f"{run}: the evaluation ended with {code}", flush=True)
            return
        self.say(run, "held_out", reward=found[-1]["avg@2"]["mean"], error=found[-1]["avg@2"]["standard_error"])

    def version(self):
        said = subprocess.run([self.options.program, "--version"], capture_output=True, text=True).stdout.split()
        commit = os.environ.get("COMMIT") or subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
        return {"colo-grpo": f"{said[-1]} {commit}".strip()}

    def jobs(self):
        """What is to be made, with the seconds that it is expected to take: TRL first, of ours every variant with the first seed, those of two GPUs last."""
        made = {(line["run"], line.get("card")) for line in map(json.loads, read(self.options.collect))} if self.options.collect else set()
        card, wanted = self.card(), []
        todo = lambda run: (run, card) not in made
        seeds = self.options.seeds
        for name, task in self.tasks.items():
            ours, start, train = task["estimates"]
            if "trl" in self.options.who:
                for some in [part for part in (seeds[:2], seeds[2:]) if part]:
                    if some := [seed for seed in some if todo(f"{name}-trl-{seed}")]:
                        wanted.append((start + train * len(some), 1, lambda gpus, name=name, some=some: self.trl(name, some, gpus)))
            if "start" in self.options.who:
                wanted.append((15, 1, lambda gpus, name=name, task=task: self.judge(name, f"{name}-start", self.out / task["model"], gpus)))
            variants = ([""] if "ours" in self.options.who else []) + (self.options.variants if "variants" in self.options.who else [])
            for seed in seeds:  # so that where time is short every variant has its first seeds
                for variant in variants:
                    if todo(f"{name}-ours{'-' + variant if variant else ''}-{seed}"):
                        wanted.append((ours if self.judged(seed) else ours * 0.6, VARIANTS[variant][0] if variant else 1,
                                       lambda gpus, name=name, variant=variant, seed=seed: self.ours(name, variant, seed, gpus)))
        return wanted

    def make(self):
        self.out.mkdir(parents=True, exist_ok=True)
        for name, task in self.tasks.items():
            self.prepare(name, task)
        gpus, jobs = self.gpus(), self.jobs()
        lanes, waiting = gpus or [None], queue.Queue()
        for job in jobs:
            if job[1] == 1:
                waiting.put(job)

        def lane(gpu):
            while True:
                try:
                    expected, _, work = waiting.get_nowait()
                except queue.Empty:
                    return
                # A TRL process of several seeds may end early; anything else must fit.
                if self.left() > min(expected, 200):
                    work([gpu] if gpu is not None else [])

        threads = [threading.Thread(target=lane, args=(gpu,)) for gpu in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for expected, needed, work in jobs:
            if needed == 2 and (len(gpus) >= 2 or self.device == "cpu") and self.left() > expected:
                work(gpus[:2])
        print(f"learning: {self.events}: {len(read(self.events))} events in {time.monotonic() - self.begun:.0f} s", flush=True)


def read(path):
    path = pathlib.Path(path)
    return path.read_text().splitlines() if path.is_file() else []


def collect(events, target):
    """One line a run: what it was, seconds and rewards of its steps, and its held-out reward."""
    runs = {line["run"]: line for line in map(json.loads, read(target))}
    for event in map(json.loads, read(events)):
        run, kind = event.pop("run"), event.pop("event")
        if kind == "start":
            runs[run] = {"run": run, **event, "seconds": [], "rewards": [], "lengths": []}
        elif kind == "step":
            for name, value in (("seconds", event["seconds"]), ("rewards", event["reward"]), ("lengths", round(event["length"] or 0, 1)),
                                ("groups", event.get("groups")), ("drafts", event.get("drafts")), ("accepted", event.get("accepted")),
                                ("differences", event.get("mean_difference") and round(event["mean_difference"], 5))):
                if value is not None:
                    runs[run].setdefault(name, []).append(value)
        elif kind == "held_out":
            runs.setdefault(run, {"run": run})["held_out"] = round(event["reward"], 4)
        elif kind == "end":
            runs[run].update({name: True for name in ("late", "out_of_rows") if event.get(name)})
        elif kind == "failed":  # no measurement: it is to be made again
            runs.pop(run, None)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(runs[run]) + "\n" for run in sorted(runs)))
    print(f"learning: {target}: {len(runs)} runs")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--who", nargs="*", choices=("start", "ours", "trl", "variants"), default=["start", "ours", "trl", "variants"])
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--judged", nargs="*", type=int, help="seeds whose models are evaluated on held-out rows: all unless some are named")
    parser.add_argument("--seconds", type=float, default=500, help="after which nothing begins")
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "target/release/colo-grpo")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter that has TRL, and vLLM")
    parser.add_argument("--events", type=pathlib.Path, help="the file of events, OUT/events.jsonl unless it is named")
    parser.add_argument("--collect", type=pathlib.Path, help="folds OUT's events into this file, or names the file whose runs are not made again")
    parser.add_argument("--make", action="store_true", help="with --collect: make what the file lacks, and then fold")
    # KEY=VALUE are taken out first: an option with several values would take those behind it, too.
    words = sys.argv[1:]
    changes = [word for word in words if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in words if word not in changes])
    changes = dict(change.split("=", 1) for change in changes)
    changes = {key: number(value) for key, value in changes.items()}
    options.program = options.program.resolve()
    if options.make or not options.collect:
        Runs(options, changes).make()
    if options.collect:
        collect(options.events or options.out / "events.jsonl", options.collect)


def number(text):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    main()
