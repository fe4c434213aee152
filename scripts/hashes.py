#!/usr/bin/env python3
"""Checks that a refactoring changes nothing: hashes what tiny runs leave. Python's standard library only.

    scripts/hashes.py PROGRAM                    # one line a run: its name, hashes of weights, completions and metrics
    scripts/hashes.py PROGRAM OTHER              # only the runs that differ between two programs; ends with 1 if any does
    scripts/hashes.py --since COMMIT             # builds that commit and the working tree, and compares the two
    scripts/hashes.py PROGRAM --device cuda      # on GPUs, with full_determinism, in float32 and bfloat16
    scripts/hashes.py PROGRAM --only zero2,lora  # some runs; --list names all

Compare programs on one machine: another processor or GPU rounds differently. A program compared with itself must show no
difference. Ends with 2 if a run fails that is not compared. On GPUs, runs of more ranks than there are GPUs are left out; libraries
are found through COLO_GRPO_TORCH_CUDA (README.md).
"""
import argparse, hashlib, json, os, pathlib, shutil, struct, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALL = ("--config configs/tiny-cpu.toml tensor_parallel_size=1 per_device_train_batch_size=16 num_generations=8 max_steps=3 "
         "learning_rate=2e-4 temperature=1.5 eval_steps=none eval_file=none save_steps=none log_completions=true "
         "kv_cache_bytes=4194304")
SFT = "sft --config configs/sft.toml max_steps=3 per_device_train_batch_size=8 save_steps=none logging_steps=1"
SAMPLE = "--model configs/arithmetic/model --max_completion_length 12 --nproc"
QUESTION = ["--chat", "--prompt", "what is seventy plus eighty two ?", "--prompt", "what is eleven plus forty two ?"]
WORDS = {
    "CARRIED": "oversample=1 partial_rollout=true temperature=1.5 max_completion_length=24 max_num_seqs=24 max_steps=4",
    "SPLIT": "mode=split split.rollout_gpus=1 residency.optimizer=resident",
    # Random weights never answer right, but about half of their completions have one of these digits.
    "SHAPE": "per_device_train_batch_size=8 max_completion_length=8 reward.format_pattern=.*[0-4].*",
}

# Name, ranks and settings of every run. "gpu" stands behind those that run on GPUs too, "gpu-alone" where a CPU cannot.
GRPO = """
one-rank            1  gradient_checkpointing=none gpu
zero0               2  zero.stage=0
zero1               2  zero.stage=1
zero2               2  zero.stage=2 gpu
zero3               2  zero.stage=3 gpu
hybrid-shards       4  zero.stage=3 zero.shard_group_size=2
tp2                 2  tensor_parallel_size=2 gpu
tp2-engines2        4  tensor_parallel_size=2 zero.stage=3
pp2                 2  pipeline_parallel_size=2 zero.stage=3
bfloat16            2  dtype=bfloat16 zero.stage=3
bfloat16-residual   2  dtype=bfloat16 residual_dtype=float32 zero.reduce_dtype=bfloat16 zero.grad_accum_dtype=bfloat16
accumulated         2  gradient_accumulation_steps=2 max_tokens_per_micro_batch=256 gpu
iterations2         2  num_iterations=2 steps_per_generation=2 max_steps=4 epsilon=0.05 epsilon_high=0.1
unshared-prompts    2  share_prompts=false
recompute-selective 1  gradient_checkpointing=selective
recompute-full      2  gradient_checkpointing=full zero.stage=3
fp8                 2  zero.stage=2 mixed_precision=fp8 rollout_quantization=fp8
int8                2  rollout_quantization=int8 kv_cache_dtype=int8 tensor_parallel_size=2
resident            2  residency.optimizer=resident
stream              2  residency.optimizer=stream gpu
reference-resident  2  beta=0.04 residency.reference=resident
reference-host      2  beta=0.04 residency.reference=host zero.stage=3 gpu
grpo                1  loss_type=grpo delta=1.5 num_iterations=2 scale_rewards=batch max_steps=4
gspo                2  loss_type=grpo importance_sampling_level=sequence num_iterations=2 epsilon=3e-4 epsilon_high=4e-4 max_steps=4
dr-grpo             1  loss_type=dr_grpo scale_rewards=none mask_truncated_completions=true max_completion_length=7
bnpo                1  loss_type=bnpo importance_sampling_mode=token_truncate
cispo               2  loss_type=cispo epsilon_high=0.1 num_iterations=2 importance_sampling_mode=sequence_truncate max_steps=4 gpu
sapo                2  loss_type=sapo num_iterations=2 off_policy_mask_threshold=0.001 advantage_estimator=rloo scale_rewards=batch max_steps=4
luspo               1  loss_type=luspo importance_sampling_level=sequence importance_sampling_clip_min=0.9 beta=0.04 kl_estimator=k2
vespo               2  loss_type=vespo importance_sampling_mode=token_truncate num_iterations=2 max_steps=4 gpu
gdpo                2  multi_objective_aggregation=normalize_then_sum max_steps=2
entropy             2  top_entropy_quantile=0.3 entropy_coef=0.01 use_adaptive_entropy=true entropy_target=9 num_iterations=2 max_steps=4 gpu
kl-in-reward        2  beta=0.05 use_kl_in_reward=true kl_estimator=k1 advantage_estimator=rloo scale_rewards=none
reference-sync      2  beta=0.05 sync_ref_model=true ref_model_sync_steps=1 residency.reference=host zero.stage=3
curriculum          2  max_train_samples=12 curriculum.solve_rate=[0.3,0.6] curriculum.every=2 max_steps=5
teacher-top         2  teacher_model_name_or_path=configs/arithmetic/model distillation_mode=topk_logits distillation_topk=8 distillation_weight=0.5
teacher             2  teacher_model_name_or_path=configs/arithmetic/model distillation_weight=0.5 residency.reference=host zero.stage=3
lora                2  lora.r=4
lora-dropout        2  lora.r=4 lora.dropout=0.1 lora.target_modules=["q_proj","v_proj","down_proj"] tensor_parallel_size=2
lora-dropout-one    1  lora.r=4 lora.dropout=0.1 gpu
nf4                 2  lora.r=4 quantization=nf4 gpu
split               2  SPLIT
split-async         3  SPLIT split.async_steps=1 zero.stage=3
split-two-ahead     3  SPLIT split.async_steps=2 save_steps=none
split-async-two     2  SPLIT split.async_steps=1 gpu
split-pp2           3  mode=split split.rollout_gpus=2 residency.optimizer=resident pipeline_parallel_size=2
carried             2  CARRIED
carried-kept        2  CARRIED carried_kv=keep gpu
replaced            2  dynamic_sampling=replace
replaced-ahead      3  SPLIT dynamic_sampling=replace split.async_steps=1
strict              1  strict=true max_num_seqs=8 gpu-alone
filtered            1  top_k=20 top_p=0.9 min_p=0.05 repetition_penalty=1.2 stop=["5"] temperature=1.3 gpu
preempted           1  kv_cache_bytes=262144 max_num_batched_tokens=64
evaluated           2  eval_file=configs/arithmetic/eval.jsonl eval_steps=2 eval_num_generations=2 tensor_parallel_size=2
adam                1  weight_decay=0.1 adam_beta2=0.95 lr_scheduler_type=cosine warmup_steps=1 max_grad_norm=0.1
saved               2  save_steps=2 save_async=false residency.optimizer=resident
shape-llama3        2  SHAPE tensor_parallel_size=2 gpu
shape-mistral       1  SHAPE
shape-qwen3         1  SHAPE gpu
shape-olmo2         2  SHAPE tensor_parallel_size=2 gpu
shape-smollm3_window 2 SHAPE tensor_parallel_size=2 gpu
shape-granite       2  SHAPE tensor_parallel_size=2 gpu
shape-qwen2_yarn    1  SHAPE
shape-qwen2_untied  1  SHAPE beta=0.04
shape-qwen3_moe     2  SHAPE router_aux_loss_coef=0.01 zero.stage=3 gpu
shape-qwen3_moe_mixed 2 SHAPE tensor_parallel_size=2 enable_expert_parallel=true gpu
shape-qwen3_5       2  SHAPE tensor_parallel_size=2 zero.stage=3
"""


class Run:
    """A run and its command line. `base` has the words before its own; without them the command is complete."""

    def __init__(self, name, ranks, settings, base=None):
        words = " ".join(WORDS.get(word, word) for word in settings.split()).split()
        self.on_gpu, self.on_cpu = words[-1].startswith("gpu"), words[-1] != "gpu-alone"
        self.name, self.ranks, self.base = name, ranks, base
        self.words = [word for word in words if word not in ("gpu", "gpu-alone")]

    def line(self, folder, options, dtype):
        """Words behind the program's name."""
        if self.words[0] == "plan":
            return self.words
        if not self.base:
            asked = QUESTION if self.words[0] == "generate" else []
            return self.words + asked + ["--seed", str(options.seed), "--device", options.device]
        line = self.base.split() + ["--nproc", str(self.ranks)] + self.words
        if self.name.startswith("shape-"):
            line.append(f"model_name_or_path={folder.parent / self.name}")
        line += [f"output_dir={folder}", f"seed={options.seed}", f"device={options.device}"]
        return line + ([f"dtype={dtype}", "full_determinism=true"] if options.device == "cuda" else [])


def all_runs():
    runs = []
    for line in GRPO.strip().splitlines():
        name, ranks, settings = line.split(None, 2)
        runs.append(Run(name, int(ranks), settings, SMALL))
    return runs + [
        Run("python-rewards", 2, "max_steps=2 save_steps=none log_completions=true", "--config configs/rewards.toml"),
        Run("sft", 2, "gradient_checkpointing=selective", SFT),
        Run("sft-lora", 1, "lora.r=4 gradient_accumulation_steps=2", SFT),
        Run("generate-greedy", 1, f"generate {SAMPLE} 1 --temperature 0"),
        Run("generate-sampled", 2, f"generate {SAMPLE} 2 --tp 2 -n 4 --top_k 10 --top_p 0.9 --min_p 0.02"),
        Run("generate-bfloat16", 1, f"generate {SAMPLE} 1 -n 4 --dtype bfloat16"),
        Run("eval", 2, f"eval {SAMPLE} 2 --data configs/arithmetic/eval.jsonl -n 2 --answer_pattern ([0-9]+)"),
        Run("plan", 8, "plan --nproc 8 --preset qwen2.5-7b --gpu_memory_gib 139 --config configs/tiny-cpu.toml device=cuda "
            "tensor_parallel_size=4 beta=0.04 max_completion_length=1024 gradient_checkpointing=auto"),
    ]


def hash_of_weights(folder):
    """Of every tensor in the safetensors files below `folder`, in the order of paths and names; shards count as one file."""
    tensors = []
    for path in folder.rglob("*.safetensors"):
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        for name, tensor in json.loads(data[8:8 + size]).items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in tensor["data_offsets"])
                place = str(path.relative_to(folder).parent) + ("" if path.name.startswith("model") else path.name)
                tensors.append((place, name, tensor["dtype"], tensor["shape"], data[start:end]))
    hashed = hashlib.sha256()
    for *what, data in sorted(tensors):
        hashed.update(json.dumps(what).encode() + data)
    return hashed.hexdigest() if tensors else "-"


def hash_of_files(paths):
    hashed = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in sorted(paths)))
    return hashed.hexdigest() if paths else "-"


def metrics_of(path):
    """Lines of metrics.jsonl without what a clock or the machine decides."""
    times = ("time", "step_time", "timing_s/", "perf/", "transition/", "pipeline/idle_share")
    lines = path.read_text().splitlines() if path.exists() else []
    return [{name: value for name, value in json.loads(line).items() if not name.startswith(times)} for line in lines]


class Left:
    """What a run left: hashes, and its metrics to say what differs."""

    def __init__(self, folder, code, stdout):
        self.code, self.stdout, self.metrics = code, stdout, metrics_of(folder / "metrics.jsonl")
        text = json.dumps(self.metrics, sort_keys=True) if self.metrics else stdout
        self.hashes = {
            "weights": hash_of_weights(folder),
            "completions": hash_of_files(list(folder.glob("completions/*"))),
            "metrics": hashlib.sha256(text.encode()).hexdigest(),
        }

    def row(self):
        return "  ".join(value[:16].ljust(16) for value in self.hashes.values()) if self.code == 0 else f"exit {self.code}"

    def difference(self, other):
        """Empty where nothing differs."""
        if (self.code, other.code) != (0, 0):
            return f"exit {self.code}, then {other.code}"
        kinds = [kind for kind in self.hashes if self.hashes[kind] != other.hashes[kind]]
        where = ""
        for step, (a, b) in enumerate(zip(self.metrics, other.metrics), 1):
            names = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
            if names:
                where = f": line {step}, {names[0]}: {a.get(names[0])}, then {b.get(names[0])}; {len(names)} keys differ there"
                break
        return ", ".join(kinds) + where


def make_shape(call, name, model, seed):
    """Makes a model of a shape of tests/golden with random weights and the demo's tokenizer. `call` runs the program."""
    shape = json.loads((ROOT / "tests/golden" / name / "config.json").read_text())
    shape |= {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = model.with_suffix(".json")
    config.write_text(json.dumps(shape))
    made = call(["init", "--config_json", str(config), "--tokenizer", "configs/arithmetic/tokenizer", "--output", str(model),
                 "--seed", str(seed)])
    if made.returncode != 0:
        raise SystemExit(f"init of {name}: {made.stderr[-2000:]}")


def perform(run, program, work, options, dtype):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="run-", dir=work)) / "out"
    ours = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLO_GRPO_LOG"}
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {"OMP_NUM_THREADS": "1"}

    def call(line):
        limited = ["timeout", "300", program, *line]
        return subprocess.run(limited, cwd=ROOT, env=environment, capture_output=True, text=True)

    if run.name.startswith("shape-"):
        model = folder.parent / run.name
        make_shape(call, run.name[6:], model, options.seed)
    line = run.line(folder, options, dtype)
    ended = call(line)
    left = Left(folder, ended.returncode, ended.stdout.replace(str(folder.parent), ""))
    if left.code != 0:
        sys.stderr.write(f"{program} {' '.join(line)}\n{ended.stderr[-2000:]}\n")
    elif left.metrics and not any(line.get("grad_norm") for line in left.metrics):
        raise SystemExit(f"{run.name}: no step had a gradient, so this run shows nothing")
    if not options.keep:
        shutil.rmtree(folder.parent)
    return left


def build(commit):
    """Programs of `commit` and of the working tree. Libraries that both use are compiled once."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
    kept = target / "hashes"
    source = kept / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    files = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x"], cwd=source, check=True, input=files)
    environment = {"LIBTORCH": str(ROOT / ".libtorch")} | os.environ | {"CARGO_TARGET_DIR": str(target)}
    programs = []
    for folder, name in [(source, "before"), (ROOT, "after")]:
        subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=folder, env=environment, check=True)
        programs.append(str(shutil.copy(target / "release/colo-grpo", kept / name)))
    return programs


def chosen(options):
    runs = all_runs()
    if options.only:
        unknown = set(options.only.split(",")) - {run.name for run in runs}
        if unknown:
            raise SystemExit(f"no run is called {', '.join(sorted(unknown))}; --list names all")
        runs = [run for run in runs if run.name in options.only.split(",")]
    if options.device == "cpu":
        return [(run, run.name, None) for run in runs if run.on_cpu]
    gpus = len(subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout.splitlines())
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = len(visible.split(","))
    runs = [run for run in runs if run.on_gpu]
    for run in runs:
        # Runs that need no second rank take what there is.
        if run.ranks > gpus and not any(word.startswith(("tensor", "mode")) for word in run.words):
            run.ranks = gpus
    left_out = [run.name for run in runs if run.ranks > gpus]
    if left_out:
        print(f"{gpus} GPU: left out {', '.join(left_out)}", file=sys.stderr)
    kept = [run for run in runs if run.ranks <= gpus]
    return [(run, f"{run.name}-{dtype}", dtype) for dtype in ("float32", "bfloat16") for run in kept]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="one to hash, two to compare")
    parser.add_argument("--since", metavar="COMMIT", help="compare this commit with the working tree")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", metavar="NAMES", help="runs, separated by commas")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders")
    parser.add_argument("--list", action="store_true", help="name the runs")
    options = parser.parse_args()
    if options.list:
        return print("\n".join(run.name for run in all_runs()))
    if not (1 <= len(options.programs) <= 2 and not options.since or options.since and not options.programs):
        parser.error("give one program, two, or --since COMMIT")
    programs = build(options.since) if options.since else [str(pathlib.Path(path).resolve()) for path in options.programs]
    work, begin, num_bad, runs = tempfile.mkdtemp(prefix="colo-grpo-hashes-"), time.monotonic(), 0, chosen(options)
    try:
        for run, name, dtype in runs:
            start = time.monotonic()
            lefts = [perform(run, program, work, options, dtype) for program in programs]
            if len(lefts) == 1:
                num_bad += lefts[0].code != 0
                print(f"{name:28}{lefts[0].row()}", flush=True)
            elif difference := lefts[0].difference(lefts[1]):
                num_bad += 1
                print(f"{name:28}{difference}", flush=True)
            print(f"# {name}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    finally:
        if options.keep:
            print(f"# kept {work}", file=sys.stderr)
        else:
            shutil.rmtree(work)
    what = "failed" if len(programs) == 1 else "differ"
    print(f"# {len(runs)} runs, {num_bad} {what}, {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return (2 if len(programs) == 1 else 1) if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
