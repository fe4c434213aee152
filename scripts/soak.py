#!/usr/bin/env python3
"""Measures over hours what docs/reliability.md promises, on a CPU. Python's standard library only.

    scripts/soak.py PROGRAM OUT                        # all parts at full size; goes on where an earlier call stopped
    scripts/soak.py PROGRAM OUT kills disk             # some parts
    scripts/soak.py PROGRAM OUT kills --size 10        # smaller; --minutes 30 bounds each part

kills    runs of four processes in ten modes are sent signals at random moments, resumed, and compared with an undisturbed run bit for bit
         (200 in all, or those of --modes)
stops    ranks are stopped instead and must be found within their limit (20)
disk     a small disk fills up at random moments, is emptied, and the run resumed (20)
memory   resident memory of each rank over the steps of a tiny run that saves every 100, with its slope and the slope's standard error;
         held to what a step's metrics take, which are kept (10,000)
eight    a run of eight processes, two engines of tp 4, at each ZeRO stage, disturbed and compared as in kills (3 a stage); stages must
         leave the same weights, too
matrix   every phase x every way to fail x two ranks; runs and saves killed again and again (tests that are not run otherwise)
sandbox  what model-written code tries, in each kind of sandbox that this machine allows

matrix and sandbox need the tests' program: the newest target/release/deps/it-*, or --tests. Each part writes OUT/PART.json; parts
that are complete are not measured again, unless OUT is another folder. Ends with 1 if anything broke a promise.
"""
import argparse, collections, json, os, pathlib, random, re, shutil, signal, statistics, subprocess, sys, threading, time

sys.dont_write_bytecode = True # of the other script beside this one
from hashes import ROOT, hash_of_files, hash_of_weights, make_shape, metrics_of

SIZES = {"kills": 200, "stops": 20, "disk": 20, "memory": 10_000, "eight": 3, "matrix": 1, "sandbox": 1}
NUM_RANKS = 4
# Seconds: a stopped rank's limit, and what a rank's end is held to (docs/benchmarks/reliability.md).
STOP_LIMIT_S, MATRIX_STOP_LIMIT_S, NOTICED_LIMIT_S, GONE_LIMIT_S = 8, 5, 1, 15
# A step's metrics are kept for checkpoints by the first rank: eight bytes each and some more a step.
KEPT_KB_A_STEP = 0.8
RUN = (f"--nproc {NUM_RANKS} --config configs/tiny-cpu.toml tensor_parallel_size=2 per_device_train_batch_size=8 num_generations=4 "
       "max_steps=12 save_steps=1 save_total_limit=2 eval_steps=none eval_file=none log_completions=true learning_rate=2e-4 "
       "temperature=1.5")
# Of the ways to run, those that are the same to the last bit each time. Engines sample ahead between two checkpoints only.
SPLIT = "tensor_parallel_size=1 residency.optimizer=auto mode=split"
MODES = {
    "colocated": "",
    "replicas": "tensor_parallel_size=1 zero.stage=0 residency.optimizer=resident",
    "zero3": "zero.stage=3 beta=0.04",
    "stages": "tensor_parallel_size=1 pipeline_parallel_size=2 zero.stage=3",
    "partial": "oversample=0.5 partial_rollout=true",
    "replace": "dynamic_sampling=replace",
    "lora": "lora.r=4 learning_rate=1e-3",
    "split": f"{SPLIT} split.rollout_gpus=2",
    "ahead": f"{SPLIT} split.rollout_gpus=2 split.async_steps=1 save_steps=5",
    "two-ahead": f"{SPLIT} split.rollout_gpus=1 split.async_steps=2 save_steps=6 per_device_train_batch_size=16 num_generations=4",
}
EIGHT = (f"{RUN.replace(f'--nproc {NUM_RANKS}', '--nproc 8').replace('tensor_parallel_size=2', 'tensor_parallel_size=4')} "
         "max_steps=6 residency.optimizer=swap")
LIMITS = " ".join(f"heartbeat.{name}_s={STOP_LIMIT_S}" for name in ("timeout", "load", "checkpoint", "write"))
TINY = ("--nproc 2 --config configs/tiny-cpu.toml tensor_parallel_size=2 per_device_train_batch_size=4 num_generations=4 "
        "max_completion_length=4 reward.format_pattern=.*[0-4].* eval_steps=none eval_file=none save_steps=100 save_total_limit=1")
MATRIX = ["survive::matrix::all_injected_faults_end_the_run_with_the_expected_code", "survive::kills::a_run_killed_repeatedly_equals_an_uninterrupted_one",
          "checkpoint::files::two_hundred_kills_leave_only_complete_checkpoints", "colocate::a_thousand_rollout_scopes_leak_no_memory"]


def environment(folder):
    """The runs' environment. Their temporary files go below `folder`, so that what is left of them is seen."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    return kept | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "COLO_GRPO_LOG": "warn,colo_grpo::launch=debug"}


def processes_of(text):
    """Ids of processes with `text` on their command line, but for this one and those that have ended and wait for their parent."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def rank_of(pid):
    try:
        words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)


def shared_memory():
    """Segments whose process has ended."""
    found = pathlib.Path("/dev/shm").glob("colo-grpo-*")
    return {path for path in found if not pathlib.Path("/proc", path.name.split("-")[2]).exists()}


class Started:
    """A run of the program under this script's eyes: the lines of its standard error come with their moments."""

    def __init__(self, program, line, folder):
        self.output_dir = folder / "run"
        words = [program, *line.split(), f"output_dir={self.output_dir}"]
        if any(self.output_dir.glob("checkpoint-*")):
            words.append("resume_from_checkpoint=latest")
        nothing = subprocess.DEVNULL
        self.process = subprocess.Popen(words, cwd=ROOT, env=environment(folder), stdin=nothing, stdout=nothing,
                                        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
        self.lines, self.begin = [], time.monotonic()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line))

    def ranks(self):
        pids = [(rank_of(pid), pid) for pid in processes_of(f"output_dir={self.output_dir}") if pid != self.process.pid]
        return {rank: pid for rank, pid in pids if rank is not None}

    def end(self, limit_s):
        """The exit code, `None` of a run that had to be ended by force; and whether processes were left."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        deadline = time.monotonic() + GONE_LIMIT_S
        while (left := processes_of(f"output_dir={self.output_dir}")) and code is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.gone = time.monotonic()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        self.reader.join(5)
        return code, bool(left) and code is not None

    def text(self):
        return "".join(line for _, line in self.lines)


def result_of(folder):
    """What two runs are compared by."""
    metrics = json.dumps(metrics_of(folder / "run/metrics.jsonl"), sort_keys=True)
    return hash_of_weights(folder / "run/final"), hash_of_files(list(folder.glob("run/completions/*"))), metrics


def undisturbed(program, line, folder):
    """Hashes and seconds of a run that nothing happens to; made once."""
    kept = folder / "undisturbed.json"
    if not kept.exists():
        shutil.rmtree(folder / "undisturbed", ignore_errors=True)
        begin = time.monotonic()
        started = Started(program, line, folder / "undisturbed")
        if started.end(600)[0] != 0:
            raise SystemExit(f"the undisturbed run failed:\n{started.text()[-3000:]}")
        kept.write_text(json.dumps([result_of(folder / "undisturbed"), time.monotonic() - begin]))
    result, seconds = json.loads(kept.read_text())
    return tuple(result), seconds


class Campaign:
    """Runs that are disturbed, resumed and compared; events are kept in a file, so that another call goes on."""

    def __init__(self, options, folder, line, size, deadline):
        self.program, self.seed = options.program, options.seed
        self.folder, self.line, self.size, self.deadline = folder, line, size, deadline
        folder.mkdir(parents=True, exist_ok=True)
        self.kept = folder / "events.jsonl"
        self.events = [json.loads(line) for line in self.kept.read_text().splitlines()] if self.kept.exists() else []
        self.expected, self.seconds = undisturbed(self.program, line, folder)
        self.segments = set()

    def of(self, kind):
        return [event for event in self.events if event["kind"] == kind]

    def note(self, **event):
        self.events.append(event)
        with self.kept.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def fault(self, what, started):
        name = f"fault-{len(self.events)}.log"
        (self.folder / name).write_text(started.text())
        self.note(kind="fault", what=what, log=name)
        print(f"# {self.folder.name}: {what}, see {self.folder / name}", file=sys.stderr)

    def run(self, disturb, allowed):
        """Starts and disturbs until `size` runs were, then leaves the last one alone until it ends."""
        while len(self.of("hit")) < self.size and time.monotonic() < self.deadline:
            self.once(disturb, allowed)
        if self.events and self.events[-1]["kind"] != "life":
            self.once(lambda started, chance: None, allowed)
        return self

    def once(self, disturb, allowed):
        """One start. A run that reached its end is compared, and the next start begins another."""
        life = self.folder / "life"
        before = shared_memory()
        started = Started(self.program, self.line, life)
        event = disturb(started, random.Random(f"soak {self.seed} {self.folder.name} {len(self.events)}"))
        code, has_left = started.end(max(120, 4 * self.seconds))
        if event:
            at = event.pop("at")
            noticed = [moment for moment, line in started.lines if re.search(r" ended: | hangs", line) and moment >= at]
            times = {"after_s": at - started.begin, "noticed_s": noticed[0] - at if noticed else None, "gone_s": started.gone - at}
            self.note(kind="hit", **event, code=code, **times)
        if code not in (allowed(event) if event else [0]):
            self.fault(f"exit {code} after {event['what'] if event else 'nothing'}", started)
        if has_left:
            self.fault("processes were left", started)
        self.segments |= shared_memory() - before
        if "trying the checkpoint before it" in started.text():
            self.fault("a checkpoint was damaged", started)
        if code == 0:
            if result_of(life) != self.expected:
                self.fault("the end differs from the undisturbed one", started)
                shutil.copytree(life, self.folder / f"differs-{len(self.events)}")
            # What a start left, the next one is to remove.
            left = [str(path) for path in sorted((life / "tmp").iterdir()) + sorted(self.segments & shared_memory())]
            if left:
                self.fault(f"left behind: {', '.join(left[:5])}", started)
            for path in self.segments & shared_memory():
                path.unlink()
            self.note(kind="life")
            shutil.rmtree(life, ignore_errors=True)

    def rows(self):
        """The table's rows, and whether all went as promised."""
        hits, lives, faults = self.of("hit"), self.of("life"), self.of("fault")
        codes = collections.Counter(f"{hit['what']}: {hit['code']}" for hit in hits)
        rows = [("disturbed", f"{len(hits)} of {self.size}"),
                ("what, and the exit code", ", ".join(f"{key} x {count}" for key, count in sorted(codes.items()))),
                ("ends equal, bit for bit", len(lives) - sum("differs" in fault["what"] for fault in faults))]
        rows += [("fault", f"{fault['what']} ({fault['log']})") for fault in faults]
        return rows, bool(lives) and not faults and len(hits) >= self.size

    def times(self, noticed_limit_s, gone_limit_s):
        """The table's rows with the times until a rank's end was noticed and all processes were gone."""
        rows, good = self.rows()
        of_ranks = [hit["noticed_s"] for hit in self.of("hit") if hit["target"] == "rank" and hit["noticed_s"] is not None]
        gone = [hit["gone_s"] for hit in self.of("hit")]
        for what, seconds, limit_s in [("until noticed", of_ranks, noticed_limit_s), ("until all are gone", gone, gone_limit_s)]:
            if seconds:
                median, worst = statistics.median(seconds), max(seconds)
                rows.append((what, f"median {median:.3f} s, worst {worst:.3f} s of {len(seconds)} (limit {limit_s} s)"))
                good = good and worst <= limit_s
        return rows, good


def signals(choices, seconds):
    """Sends one of the signals to the launcher or a rank at a random moment of a run."""

    def disturb(started, chance):
        target, name = chance.choice(choices)
        try:
            started.process.wait(chance.uniform(0, seconds))
            return None
        except subprocess.TimeoutExpired:
            pass
        pid = started.process.pid
        if target == "rank":
            ranks = started.ranks()
            if not ranks:
                return None
            pid = ranks[chance.choice(sorted(ranks))]
        at, has_begun = time.monotonic(), bool(started.ranks())
        try:
            os.kill(pid, getattr(signal, name))
        except ProcessLookupError:
            return None
        return {"what": f"{name[3:]} {target}", "target": target, "has_begun": has_begun, "at": at}

    return disturb


# Not SIGSEGV: Rust's handler lets one pass that no access to memory raised. The matrix has real ones.
KILLS = ([("rank", "SIGKILL"), ("rank", "SIGABRT")] * 3 + [("launcher", "SIGKILL")] * 2
         + [("launcher", "SIGTERM"), ("launcher", "SIGUSR1")])


def codes_after_kills(event):
    """A rank that is killed behind its last step leaves a complete run; the kernel's word holds until the program says one."""
    number = getattr(signal, f"SIG{event['what'].split()[0]}")
    if event["target"] == "rank":
        return [10, 0]
    return [-number, 0] if number == signal.SIGKILL else [75, 0] if event["has_begun"] else [75, 0, -number]


def kills(options, folder, size, deadline):
    """Every mode in a folder of its own."""
    rows, good = [], True
    for place, mode in enumerate(options.modes):
        own, rest = divmod(size, len(options.modes))
        own += place < rest
        if not own:
            continue
        campaign = Campaign(options, folder / mode, f"{RUN} {MODES[mode]}", own, deadline)
        campaign.run(signals(KILLS, campaign.seconds), codes_after_kills)
        of_mode, is_good = campaign.times(NOTICED_LIMIT_S, GONE_LIMIT_S)
        rows += [(f"{mode}: {what}", value) for what, value in of_mode]
        good = good and is_good
    return rows, good


def eight(options, folder, size, deadline):
    """Every ZeRO stage in a folder of its own; stages shard differently and compute the same."""
    rows, good, weights = [], True, {}
    for stage in range(4):
        campaign = Campaign(options, folder / f"zero{stage}", f"{EIGHT} zero.stage={stage}", size, deadline)
        campaign.run(signals(KILLS, campaign.seconds), codes_after_kills)
        of_stage, is_good = campaign.times(NOTICED_LIMIT_S, GONE_LIMIT_S)
        weights[stage] = campaign.expected[0]
        rows += [(f"ZeRO-{stage}: {what}", value) for what, value in of_stage]
        good = good and is_good
    rows.append(("weights of the stages", f"{len(set(weights.values()))} kind(s) of {len(weights)}"))
    return rows, good and len(set(weights.values())) == 1


def stops(options, folder, size, deadline):
    campaign = Campaign(options, folder, f"{RUN} {LIMITS} heartbeat.startup_s={2 * STOP_LIMIT_S}", size, deadline)
    campaign.run(signals([("rank", "SIGSTOP")], campaign.seconds), lambda event: [15, 0])
    # A rank may be stopped while it starts, which has twice the time.
    return campaign.times(2 * STOP_LIMIT_S + NOTICED_LIMIT_S, 2 * STOP_LIMIT_S + GONE_LIMIT_S)


def disk(options, folder, size, deadline):
    """The runs' folder becomes a small file system in a mount namespace of this script's own."""
    if os.environ.get("COLO_GRPO_SOAK_DISK") != "mounted":
        life = folder / "life"
        life.mkdir(parents=True, exist_ok=True)
        script = 'mount -t tmpfs -o size=192m none "$0" && exec "$@"'
        words = [sys.executable, __file__, options.program, str(folder.parent), "disk", "--size", str(size),
                 "--minutes", str(max(1, (deadline - time.monotonic()) / 60)), "--seed", options.seed, "--inside"]
        inside = ["unshare", "-rm", "sh", "-c", script, str(life), *words]
        if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
            return [("not measured", "this machine allows no mount namespace")], False
        subprocess.run(inside, env=os.environ | {"COLO_GRPO_SOAK_DISK": "mounted"})
        found = json.loads((folder / "rows.json").read_text())
        return [tuple(row) for row in found["rows"]], found["good"]
    campaign = Campaign(options, folder, RUN, size, deadline)
    filler = folder / "life/filler"

    def fill(started, chance):
        try:
            started.process.wait(chance.uniform(0, campaign.seconds))
            return None
        except subprocess.TimeoutExpired:
            at = time.monotonic()
        # Sometimes all of it, sometimes up to what a file or a checkpoint needs.
        spare = chance.choice([0, 0, 1 << 12, 1 << 20, 8 << 20])
        room = shutil.disk_usage(filler.parent).free - spare
        with filler.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(room, 1))
            except OSError:
                pass
        started.filled = True
        return {"what": f"full but {spare >> 10} KiB", "target": "disk", "at": at}

    def disturb(started, chance):
        event = fill(started, chance)
        try:
            started.process.wait(max(120, 4 * campaign.seconds))
        except subprocess.TimeoutExpired:
            pass
        filler.unlink(missing_ok=True)
        return event

    campaign.run(disturb, lambda event: [12, 0])
    rows, good = campaign.rows()
    (folder / "rows.json").write_text(json.dumps({"rows": rows, "good": good}))
    return rows, good


def fit(points):
    """Slope of a line through `points` by least squares, and its standard error."""
    n = len(points)
    mean_x, mean_y = (sum(values) / n for values in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, (rest / (n - 2) / spread) ** 0.5


def resident_kb(pid):
    try:
        return int(re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())[1])
    except (OSError, TypeError):
        return None


def memory(options, folder, size, deadline):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def call(words):
        return subprocess.run([options.program, *words], cwd=ROOT, env=environment(folder), capture_output=True, text=True)

    make_shape(call, "qwen3", folder / "model", 1)
    started = Started(options.program, f"{TINY} model_name_or_path={folder / 'model'} max_steps={size}", folder)
    metrics, step, next_step = folder / "run/metrics.jsonl", 0, 0
    samples = collections.defaultdict(list)
    try:
        while started.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            step = int(m[1]) if (m := last_step(metrics)) else 0
            if step >= next_step:
                next_step = step + max(1, size // 200)
                pids = started.ranks() | {"launcher": started.process.pid}
                for rank, pid in pids.items():
                    if (kb := resident_kb(pid)) is not None:
                        samples[rank].append((step, kb))
    finally:
        if is_cut := started.process.poll() is None:
            started.process.send_signal(signal.SIGTERM)
        code, has_left = started.end(120)
    (folder / "samples.json").write_text(json.dumps(samples))
    rows = [("steps", f"{step} of {size}, exit {code}")]
    good = code == 0 and not has_left
    for rank in sorted(samples, key=str):
        # Libraries fill their caches in the first fifth.
        points = [(at, kb) for at, kb in samples[rank] if at >= step / 5]
        if len(points) < 10:
            return rows + [("too few samples", len(points))], False
        slope, error = fit(points)
        grown, first = slope * step, statistics.mean(kb for _, kb in points[:5])
        good = good and slope - 2 * error < KEPT_KB_A_STEP
        name = rank if rank == "launcher" else f"rank {rank}"
        of = f"{grown:+.0f} kB over the run, of {first / 1024:.0f} MiB"
        rows.append((f"{name}: resident, kB a step", f"{slope:+.4f} +- {error:.4f}; {of}"))
    shutil.rmtree(folder / "run")
    return rows, good


def last_step(metrics):
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 8192))
            steps = re.findall(rb'^\{"step":(\d+),.*\}$', file.read(), re.MULTILINE)
    except OSError:
        return None
    return steps and re.match(rb"(\d+)", steps[-1])


def tests(options, folder, names, deadline, ignored):
    """Runs tests one by one; a row each, with the last lines that they print."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, good = [], bool(names)
    for name in names:
        log = folder / f"{name.replace('::', '.')}.log"
        words = [options.tests, "--exact", name, "--nocapture", "--test-threads=1"] + ["--ignored"] * ignored
        with log.open("w") as file:
            limit_s = max(60, deadline - time.monotonic())
            code = subprocess.run(["timeout", str(int(limit_s)), *words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                  env=environment(folder) | {"COLO_GRPO_PROGRAM": options.program}).returncode
        text = log.read_text()
        is_run = "1 passed" in text
        told = re.findall(r"^(?:ended or failed|stopped|killed up to|resident after|\d+ kills|skipped).*$", text, re.MULTILINE)
        what = name.rsplit("::", 1)[-1].replace("_", " ")
        rows.append((what, "; ".join(["ok" if is_run else f"FAILED, see {log}", *told])))
        good = good and is_run and code == 0
    return rows, good


def matrix(options, folder, size, deadline):
    rows, good = tests(options, folder, MATRIX, deadline, True)
    told = re.findall(r"(ended or failed|stopped): noticed .*?worst ([\d.]+)\), .*?worst ([\d.]+)\)", str(rows))
    for kind, noticed_s, gone_s in told:
        limit_s = NOTICED_LIMIT_S if kind == "ended or failed" else MATRIX_STOP_LIMIT_S + 2
        good = good and float(noticed_s) <= limit_s and float(gone_s) <= GONE_LIMIT_S
    return rows, good and len(told) == 2


def sandbox(options, folder, size, deadline):
    rooms = ["rewards::sandbox::", "rewards::readable::", "python_tool::"]
    listed = subprocess.run([options.tests, "--list", *rooms], capture_output=True, text=True, check=True).stdout
    return tests(options, folder, re.findall(r"^(.*::.*): test$", listed, re.MULTILINE), deadline, False)


def newest_tests():
    release = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/deps"
    found = [path for path in release.glob("it-*") if path.is_file() and os.access(path, os.X_OK) and not path.suffix]
    return str(max(found, key=lambda path: path.stat().st_mtime)) if found else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("parts", nargs="*", metavar="part", help=" ".join(SIZES))
    parser.add_argument("--size", type=int, help="kills, stops, times that the disk fills up, or steps; each part's own without")
    parser.add_argument("--minutes", type=float, default=90, help="longest time of a part")
    parser.add_argument("--modes", type=lambda names: names.split(","), default=list(MODES), help=f"of {','.join(MODES)}")
    parser.add_argument("--seed", default="0", help="other moments; campaigns of several machines add up as one")
    parser.add_argument("--tests", default=newest_tests(), help="the tests' program")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(SIZES):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"no mode is called {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    options.program, out = str(pathlib.Path(options.program).resolve(strict=True)), options.out.resolve()
    parts = options.parts or list(SIZES)
    if not options.tests and {"matrix", "sandbox"} & set(parts):
        parser.error("no tests' program: build it with cargo test --release --no-run, or name it with --tests")
    for part in parts:
        size, kept = options.size or SIZES[part], out / f"{part}.json"
        done = json.loads(kept.read_text()) if kept.exists() else {}
        if not options.inside and done.get("good") and done["size"] >= size:
            continue
        begin = time.monotonic()
        rows, good = globals()[part](options, out / part, size, begin + 60 * options.minutes)
        if not options.inside:
            kept.write_text(json.dumps({"size": size, "good": good, "rows": rows, "minutes": (time.monotonic() - begin) / 60}))
    if options.inside:
        return 0
    good = True
    for part in parts:
        found = json.loads((out / f"{part}.json").read_text())
        good = good and found["good"]
        print(f"{part} ({found['size']}): {'ok' if found['good'] else 'NOT AS PROMISED'}, {found['minutes']:.0f} min")
        for what, figure in found["rows"]:
            print(f"  {what:46}{figure}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
