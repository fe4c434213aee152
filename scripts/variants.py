#!/usr/bin/env python3
"""Trains a published model for a few steps in every way that there is, and shows the metrics side by side. Python's standard library only.

    scripts/variants.py PROGRAM runs/variants                          # every loss, LoRA, QLoRA, a split, tools, .. on a CPU: a quarter of an hour
    scripts/variants.py PROGRAM runs/variants --device cuda            # and what only GPUs do; a split needs two of them
    scripts/variants.py PROGRAM runs/variants --only qlora tools       # some of them

The model is SmolLM2-135M-Instruct (scripts/real_model.py; --model names another), the task word problems (scripts/make_word_problems.py). Each
run has its folder below OUT, with its log. The last lines are a table of the last step's metrics. Ends with 1 if a run failed or a metric is
not what its page (docs/metrics.md) says: "odd" then names it. --seconds bounds all runs; those that did not begin are named.
"""
import argparse, json, math, pathlib, re, shutil, subprocess, sys, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ("You add two numbers by writing exactly one line like this one: [add(a=2, b=3)]", "tools=[\"configs/calculator/tools.py:add\"]", "tool_call_parser=pythonic", "max_tool_calling_iterations=2", "max_completion_length=96")
LORA = ("lora.r=16", "lora.target_modules=all-linear", "learning_rate=2e-4")
# Name -> number of processes and keys beside COMMON.
VARIANTS = {
    **{loss: (1, f"loss_type={loss}") for loss in ("dapo", "grpo", "dr_grpo", "bnpo", "sapo")},
    "cispo": (1, "loss_type=cispo", "epsilon_high=5"),
    "luspo": (1, "loss_type=luspo", "importance_sampling_level=sequence"),
    "vespo": (1, "loss_type=vespo", "importance_sampling_mode=token_truncate"),
    "gspo": (1, "loss_type=grpo", "importance_sampling_level=sequence", "epsilon=3e-4", "epsilon_high=4e-4", "num_iterations=2"),
    "iterations": (1, "num_iterations=2"),
    "accumulation": (1, "gradient_accumulation_steps=2", "steps_per_generation=4"),
    "beta": (1, "beta=0.05"),
    "beta lora": (1, "beta=0.05", *LORA),
    "lora": (1, *LORA),
    "qlora": (1, *LORA, "quantization=nf4"),
    "entropy": (1, "top_entropy_quantile=0.2", "entropy_coef=0.001"),
    "partial": (1, "oversample=0.5", "partial_rollout=true"),
    "replaced": (1, "dynamic_sampling=replace"),
    "tools": (1, f"system_prompt={TOOLS[0]}", *TOOLS[1:]),
    "ngram": (1, "speculation=ngram"),
    "muon": (1, "optim=muon"),
    "8-bit": (1, "optim=adamw_8bit"),
    "split": (2, "mode=split", "split.rollout_gpus=1"),
    "ahead": (2, "mode=split", "split.rollout_gpus=1", "split.async_steps=1"),
}
ON_GPUS = {
    "fp8": (1, "rollout_quantization=fp8", "kv_cache_dtype=fp8", "mixed_precision=fp8"),
    "int8": (1, "rollout_quantization=int8", "kv_cache_dtype=int8"),
    "exact": (1, "exact=true"),
}
COMMON = ("reward_funcs=[\"words\",\"repetition_penalty\"]", "rewards.words.function=configs/words/reward.py:words", "reward.repetition_n_grams=1",
          "learning_rate=1e-5", "lr_scheduler_type=constant", "warmup_steps=0", "eval_steps=none", "save_steps=none", "report_to=[]",
          "log_completions=true", "gradient_checkpointing=none")
COLUMNS = {
    "reward": "reward", "loss": "loss", "norm": "grad_norm", "entropy": "entropy", "kl": "kl", "clipped": "clip_ratio/region_mean",
    "difference": "sampling/sampling_logp_difference/mean", "greatest": "sampling/sampling_logp_difference/max",
    "ratio": "sampling/importance_sampling_ratio/mean", "length": "completions/mean_length", "cut": "completions/clipped_ratio",
}
MORE = ("cispo_clip_ratio", "vespo/phi_seq_mean", "tools/call_frequency", "tools/failure_frequency", "tools/mean_turns", "partial_rollout/continued_token_share",
        "partial_rollout/staleness_mean", "dynamic_sampling/gen_batches", "staleness/mean", "speculation/acceptance", "policy_loss")


def demonstrated(options, own):
    """The model after five supervised steps on 40 calls: before them it never calls a tool, whatever it is told."""
    folder, file = options.out / "tools-sft", options.out / "task/calls.jsonl"
    rows = [json.loads(line) for line in (options.out / "task/train.jsonl").read_text().splitlines()[:40]]
    for row in rows:
        a, b = re.findall(r"[0-9]+", row["prompt"][0]["content"])
        row["prompt"].insert(0, {"role": "system", "content": TOOLS[0]})
        row["completion"] = f"[add(a={a}, b={b})]"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(folder, ignore_errors=True)
    keys = [f"train_file={file}", f"output_dir={folder}", "max_steps=5", "per_device_train_batch_size=10", "learning_rate=5e-5",
            "lr_scheduler_type=constant", "warmup_steps=0", "save_steps=none"]
    subprocess.run([options.program, "sft", *[key for key in own if key.startswith(("model_name", "device", "dtype"))], *keys], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return folder / "final"


def prepare(options):
    """The model and the rows, where they are not there yet."""
    task = options.out / "task"
    if not (task / "train.jsonl").exists():
        subprocess.run([sys.executable, ROOT / "scripts/make_word_problems.py", task, "--train", "2000"], check=True, stdout=subprocess.DEVNULL)
    if options.model is None:
        options.model = options.out / "model"
        subprocess.run([sys.executable, ROOT / "scripts/real_model.py", options.model, "--dtype", "bfloat16"], check=True)
    return task / "train.jsonl"


def num_gpus():
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())


def odd(name, lines, exact, dtype):
    """What is not as docs/metrics.md says, in words."""
    found = []

    def hold(is_right, what):
        if not is_right:
            found.append(what)

    for line in lines:
        at = f"step {line['step']}: "
        for metric in ("loss", "grad_norm", "entropy", "reward"):
            hold(isinstance(line.get(metric), float) and math.isfinite(line[metric]), f"{at}{metric} is {line.get(metric)}")
        hold(line["num_skipped_updates"] == 0, f"{at}updates were left out")
        hold(line["rewards/num_failed"] == 0, f"{at}rewards failed")
        hold(-1 <= line["reward"] <= 1, f"{at}reward {line['reward']}")
        hold(0 < line["entropy"] < 4, f"{at}entropy {line['entropy']}")
        hold(line["grad_norm"] > 0 or line["frac_reward_zero_std"] == 1, f"{at}no gradient")
        # What the two halves differ by, and the correction's mean weight, which is 1 but for that.
        mean, most = (line[f"sampling/sampling_logp_difference/{part}"] for part in ("mean", "max"))
        limit = 0 if exact else 0.4 if name in ("fp8", "int8") else 0.06 if dtype == "bfloat16" else 1e-4
        is_old = "ahead" in name or "partial" in name
        hold(mean <= (0.2 if is_old else limit), f"{at}sampler and trainer differ by {mean:.2g} in the mean")
        hold(not exact or most == 0, f"{at}exact differs by {most:.2g}")
        # Where both halves have the same bits nothing is corrected. 8-bit engines mask whole sequences, as docs/fp8.md says.
        ratio = line.get("sampling/importance_sampling_ratio/mean", 1.0 if exact else math.nan)
        hold(name in ("fp8", "int8") or abs(ratio - 1) < (0.3 if is_old else 0.07), f"{at}mean importance ratio {ratio:.3f}")
        hold(("kl" in line) == ("beta" in name), f"{at}kl is {line.get('kl')}")
    if "beta" in name:
        hold(abs(lines[0]["kl"]) < 1e-3, f"kl of the first step {lines[0]['kl']:.2g}: the policy is its reference")
        hold(0 < lines[-1]["kl"] < 1, f"kl of the last step {lines[-1]['kl']:.2g}")
    is_on_policy = name not in ("iterations", "gspo", "accumulation", "ahead", "partial")
    if is_on_policy:
        clipped = max(line.get("clip_ratio/region_mean") or 0 for line in lines)
        hold(clipped == 0, f"on-policy ratios are clipped: {clipped:.2g}")
    if name == "tools":
        hold(any(line["tools/call_frequency"] > 0 for line in lines), "no tool is called")
    return found


def shown(value):
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path, help="a Hugging Face folder; SmolLM2-135M-Instruct is made where none is named")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU, bfloat16 on a GPU where it is left out")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, help="completions a step and process: 8 on a CPU, 256 on a GPU where it is left out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run begins after this many seconds")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="some of: " + ", ".join(VARIANTS | ON_GPUS))
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    batch, group, longest = (options.batch or 256, 8, 48) if on_gpu else (options.batch or 8, 4, 24)
    options.out.mkdir(parents=True, exist_ok=True)
    rows, begun = prepare(options), time.monotonic()
    variants = VARIANTS | (ON_GPUS if on_gpu else {})
    if unknown := set(options.only or ()) - set(variants):
        parser.error(f"no variant of {options.device}: {', '.join(sorted(unknown))}; those that there are: {', '.join(variants)}")
    wanted = {name: variant for name, variant in variants.items() if name in (options.only or variants)}
    table, left_out, is_good = [], [], True
    for name, (processes, *keys) in wanted.items():
        if on_gpu and processes > num_gpus():
            left_out.append(f"{name} (needs {processes} GPUs)")
            continue
        if time.monotonic() - begun > options.seconds:
            left_out.append(f"{name} (no time)")
            continue
        folder = options.out / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        start = time.monotonic()
        own = [f"model_name_or_path={options.model}", f"train_file={rows}", f"device={options.device}", f"dtype={dtype}", f"output_dir={folder}",
               f"max_steps={options.steps}", f"per_device_train_batch_size={batch}", f"num_generations={group}", f"max_completion_length={longest}", *COMMON, *keys]
        if name == "tools":
            own.append(f"model_name_or_path={demonstrated(options, own)}")
        ended = subprocess.run([options.program, *(("--nproc", str(processes)) if processes > 1 else ()), *own], cwd=ROOT, text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log").write_text(ended.stderr)
        seconds = time.monotonic() - start
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if ended.returncode == 0 else []
        lines = [line for line in lines if "loss" in line]
        end = ended.stderr.strip().splitlines()[-1:]
        what = odd(name, lines, name == "exact", dtype) if lines else [f"exit code {ended.returncode}: {''.join(end)}"]
        is_good = is_good and not what
        last = lines[-1] if lines else {}
        more = ", ".join(f"{metric} {shown(last[metric])}" for metric in MORE if last.get(metric) is not None)
        table.append([name, *(shown(last.get(metric)) for metric in COLUMNS.values()), shown(last.get("step_time")), f"{seconds:.0f}", more])
        print(f"{name}: {seconds:.0f} s{'; odd: ' + '; '.join(what) if what else ''}", flush=True)
    print("\n| variant | " + " | ".join(COLUMNS) + " | step s | run s | also |\n|" + "---|" * (len(COLUMNS) + 4))
    print("\n".join("| " + " | ".join(row) + " |" for row in table))
    if left_out:
        print(f"\nleft out: {', '.join(left_out)}")
    print(f"\n{len(table)} runs of {options.steps} steps in {time.monotonic() - begun:.0f} s: {'as their page says' if is_good else 'see what is odd'}")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
