#!/usr/bin/env python3
"""Held-out reward of the demo against tokens sampled, in several variants with three seeds each. Python's standard library only.

    scripts/demo_curve.py replacing target/release/colo-grpo runs/replacing [key=value ..]   # its runs, one after the other
    scripts/demo_curve.py replacing runs/replacing                                           # draws what is there again

Comparisons: replacing (groups without a signal replaced, and not), fp8 (weights and cache of the engine in FP8, and not),
fp8-training (the trainer's products in FP8, and not; the engine's too in both), fp8-all (weights' gradients in FP8, too, and not), hybrid (gated
delta nets: weights, cache and states in float32; in FP8 with states of bfloat16; in int8 with such states; in FP8 with a trainer in FP8). Writes
curve.svg, points.jsonl and summary.md to the folder and prints the summary; a folder that has points.jsonl alone is drawn, too. Runs that are
complete are not made again. `max_steps` and other keys of the demo may follow. JOBS (1) is how many runs are made at once, and NPROC (2) the number
of processes of a run; with 1 add tensor_parallel_size=1 per_device_train_batch_size=256. CONFIG
(configs/tiny-cpu.toml) is the demo: that of experts, configs/tiny-moe.toml, and of gated delta nets, configs/tiny-hybrid.toml, start from models that
docs/experts.md and docs/qwen3_5.md make.
"""
import concurrent.futures, html, json, os, pathlib, statistics, subprocess, sys

SEEDS = (1, 2, 3)
COLORS = ("#efb118", "#4269d0", "#3ca951", "#ff725c")
BFLOAT16_STATES = "mamba_ssm_cache_dtype=bfloat16"
# Folders of the variants, with their keys.
COMPARISONS = {
    "replacing": {"none": ["dynamic_sampling=none"], "replace": ["dynamic_sampling=replace"]},
    "fp8-training": {"float32": ["mixed_precision=none", "rollout_quantization=fp8"], "fp8": ["mixed_precision=fp8", "rollout_quantization=fp8"]},
    "fp8-all": {"fp8": ["mixed_precision=fp8", "rollout_quantization=fp8"], "fp8_all": ["mixed_precision=fp8_all", "rollout_quantization=fp8"]},
    "fp8": {"float32": ["rollout_quantization=none", "kv_cache_dtype=auto"], "fp8": ["rollout_quantization=fp8", "kv_cache_dtype=fp8"]},
    "hybrid": {"float32": ["rollout_quantization=none", "kv_cache_dtype=auto"],
               "fp8": ["rollout_quantization=fp8", "kv_cache_dtype=fp8", BFLOAT16_STATES],
               "int8": ["rollout_quantization=int8", "kv_cache_dtype=int8", BFLOAT16_STATES],
               "fp8-trained": ["rollout_quantization=fp8", "kv_cache_dtype=fp8", BFLOAT16_STATES, "mixed_precision=fp8"]},
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 360, 48, 16, 40, 44


def train(program, root, variant, seed, keys):  # keys: the variant's and others
    folder = root / f"{variant}-{seed}"
    if (folder / "final").is_dir():
        return
    subprocess.run([program, "--nproc", os.environ.get("NPROC", "2"), "--config", os.environ.get("CONFIG", "configs/tiny-cpu.toml"), f"seed={seed}",
                    "logging_steps=1", "save_steps=none", *keys, f"output_dir={folder}"], check=True)


def curve(folder):
    """(tokens sampled so far, held-out reward) at each evaluation. Tokens are the rate of sampling times its seconds, of every step."""
    tokens, points = 0.0, []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "eval_reward" in line:
            points.append((round(tokens), round(line["eval_reward"], 5)))
        elif "perf/generation_tokens_per_second" in line:
            tokens += line["perf/generation_tokens_per_second"] * line["timing_s/generate"]
    return points


def distances(folder):
    """The mean difference between the log-probabilities of sampler and trainer at the first step and the last, in nats."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [line["sampling/sampling_logp_difference/mean"] for line in lines if "sampling/sampling_logp_difference/mean" in line]
    return [float(f"{value:.3g}") for value in (found[0], found[-1])] if found else []


def reward_at(points, tokens):
    """The reward after so many tokens, between the evaluations around; none beyond the last."""
    for (left, low), (right, high) in zip(points, points[1:]):
        if left <= tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left) if right > left else high
    return None


def label(variants, variant):
    """Of two variants their keys; of more their names."""
    return " ".join(variants[variant]) if len(variants) < 3 else variant


def summary(curves, variants):
    shortest = min(points[-1][0] for of_seed in curves.values() for points in of_seed.values())
    lines = ["| tokens sampled | " + " | ".join(label(variants, variant) for variant in curves) + " |",
             "|---|" + "---|" * len(curves)]
    for share in (0.25, 0.5, 0.75, 1.0):
        cells = []
        for of_seed in curves.values():
            rewards = [reward_at(points, shortest * share) for points in of_seed.values()]
            spread = f" ({min(rewards):.3f} to {max(rewards):.3f})" if len(rewards) > 1 else ""
            cells.append(f"{statistics.mean(rewards):.3f}{spread}")
        lines.append(f"| {shortest * share:,.0f} | " + " | ".join(cells) + " |")
    return "Held-out reward, mean over seeds (least to greatest):\n\n" + "\n".join(lines) + "\n"


def apart(found):
    """What sampler and trainer differ by, a line for each variant that says so."""
    lines = []
    for variant, of_seed in found.items():
        if all(of_seed.values()):
            first, last = zip(*of_seed.values())
            lines.append(f"- {variant}: {min(first):.2g} to {max(first):.2g} nats at the first step, {min(last):.2g} to {max(last):.2g} at the last")
    return "\nMean difference of sampler and trainer:\n\n" + "\n".join(lines) + "\n" if lines else ""


def picture(curves, variants):
    last = max(points[-1][0] for of_seed in curves.values() for points in of_seed.values())
    x = lambda tokens: LEFT + tokens / last * (WIDTH - LEFT - RIGHT)
    y = lambda reward: TOP + (1 - reward) * (HEIGHT - TOP - BOTTOM)
    body = []
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        body.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
                    f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for part in range(5):
        body.append(f'<text x="{x(last * part / 4):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{last * part / 4:,.0f}</text>')
    for at, (variant, of_seed) in enumerate(curves.items()):
        color = COLORS[at]
        left = LEFT + (340 if len(curves) < 3 else 180) * at
        body.append(f'<rect x="{left}" y="{TOP - 24}" width="11" height="11" fill="{color}"/>'
                    f'<text x="{left + 16}" y="{TOP - 14}">{html.escape(label(variants, variant))}</text>')
        for points in of_seed.values():
            path = " ".join(f"{x(tokens):.1f},{y(reward):.1f}" for tokens, reward in points)
            body.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6" stroke-opacity="0.8"/>')
    body.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">tokens sampled</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n')


def main():
    arguments = sys.argv[1:]
    if len(arguments) < 2 or arguments[0] not in COMPARISONS:
        sys.exit(__doc__)
    variants = COMPARISONS[arguments[0]]
    if len(arguments) > 2:
        program, root, keys = arguments[1], pathlib.Path(arguments[2]), arguments[3:]
        with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", "1"))) as pool:
            list(pool.map(lambda job: train(program, root, *job), [(variant, seed, own + keys) for seed in SEEDS for variant, own in variants.items()]))
    else:
        root = pathlib.Path(arguments[1])
    curves, differences = {variant: {} for variant in variants}, {variant: {} for variant in variants}
    kept = root / "points.jsonl"
    for line in map(json.loads, kept.read_text().splitlines() if kept.is_file() else []):
        curves[line["variant"]][line["seed"]], differences[line["variant"]][line["seed"]] = line["points"], line["nats"]
    for variant in variants:
        for seed in SEEDS:
            folder = root / f"{variant}-{seed}"
            if (folder / "final").is_dir():
                curves[variant][seed], differences[variant][seed] = curve(folder), distances(folder)
    if not all(curves.values()):
        sys.exit(f"{root}: no complete run of each of {', '.join(variants)}; name the program before the folder to make them")
    text = summary(curves, variants) + apart(differences)
    kept.write_text("".join(json.dumps({"variant": variant, "seed": seed, "points": points, "nats": differences[variant][seed]}) + "\n"
                            for variant, of_seed in curves.items() for seed, points in of_seed.items()))
    (root / "curve.svg").write_text(picture(curves, variants))
    (root / "summary.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
