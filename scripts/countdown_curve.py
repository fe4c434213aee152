#!/usr/bin/env python3
"""Draws what scripts/countdown.sh trained and sums it up. Python's standard library only.

    scripts/countdown_curve.py runs/countdown      # writes curve.svg and summary.md there, and prints the summary
"""
import html, json, pathlib, re, sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "configs" / "countdown"))
from reward import solves

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP, BOTTOM = 860, 430, 48, 16, 34, 54, 36
SUCCESS, LENGTHS = (TOP, 230), (TOP + 230 + GAP, HEIGHT - TOP - 230 - GAP - BOTTOM)  # top and height of the two panels
BLUE, ORANGE, GREEN = "#4269d0", "#efb118", "#3ca951"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def points(metrics, name):
    """Step and value of every line that has the metric."""
    return [(line["step"], line[name]) for line in metrics if line.get(name) is not None]


def polyline(values, x, y, color, width, opacity=1):
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in values)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}"/>'


def axes(panel, ticks, y, last_step, x):
    top, height = panel
    lines = [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
             f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>' for tick in ticks]
    every = next((size for size in (1, 2, 5, 10, 20, 25, 50, 100) if last_step <= 10 * size), 200)
    lines += [f'<text x="{x(step):.1f}" y="{top + height + 16}" text-anchor="middle">{step}</text>'
              for step in range(0, last_step + 1, every)]
    return "".join(lines)


def legend(entries, y):
    parts, x = [], LEFT
    for label, color in entries:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{color}"/>'
                     f'<text x="{x + 15}" y="{y}">{html.escape(label)}</text>')
        x += 40 + 6.6 * len(label)
    return "".join(parts)


def picture(metrics):
    reward, held_out, lengths = (points(metrics, name) for name in ("reward", "eval_reward", "completions/mean_length"))
    last_step = max(step for step, _ in reward)
    x = lambda step: LEFT + step / last_step * (WIDTH - LEFT - RIGHT)
    longest = max(value for _, value in lengths)
    tick = next(size for size in (5, 10, 20, 50, 100, 200) if longest <= 4 * size or size == 200)

    def scale(panel, most):
        return lambda value: panel[0] + panel[1] * (1 - value / most)

    success, length = scale(SUCCESS, 1), scale(LENGTHS, max(longest, tick))
    body = [legend([("held-out problems solved", BLUE), ("training problems solved", ORANGE)], TOP - 14),
            legend([("mean length of completions, tokens", GREEN)], LENGTHS[0] - 10),
            axes(SUCCESS, [0, 0.2, 0.4, 0.6, 0.8, 1], success, last_step, x),
            axes(LENGTHS, range(0, int(longest) + 1, tick), length, last_step, x),
            polyline(reward, x, success, ORANGE, 1.2, 0.8), polyline(held_out, x, success, BLUE, 2),
            *(f'<circle cx="{x(step):.1f}" cy="{success(value):.1f}" r="3" fill="{BLUE}"/>' for step, value in held_out),
            polyline(lengths, x, length, GREEN, 1.5),
            f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">GRPO step</text>']
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n')


CALCULATION = re.compile(r"([0-9]{1,9})([-+*/])([0-9]{1,9})=([0-9]{1,9})")
TRY = re.compile(r"=([0-9]{1,9}), [0-9]+-[0-9]+=[0-9]+( yes)?\n")  # the value that a try gave, and whether it is taken for a hit
RESULT = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b if b else None}


def judged(folder, name):
    """Problem, completion, its length in tokens and whether it is right, of every sampled line."""
    problems = rows(folder / "task" / "eval.jsonl")
    for index, line in enumerate(rows(folder / f"{name}.jsonl")):
        problem = problems[index // 2]  # two completions each
        text = line["completion"]
        yield problem, text, line["num_tokens"], solves(text, problem["numbers"], problem["target"])


def habits(folder, name):
    """A table's row: how the sampled completions end, how many of their calculations are right, and how many hits are seen as such."""
    lines = list(judged(folder, name))
    wrong = [text for _, text, _, right in lines if not right]
    gave_up = sum("I give up." in text for text in wrong)
    claimed = sum(" yes\n" in text for text in wrong)
    sums = [(int(a), operator, int(b), int(c)) for _, text, _, _ in lines for a, operator, b, c in CALCULATION.findall(text)]
    correct = [RESULT[operator](a, b) == c for a, operator, b, c in sums]
    verdicts = [(int(value) == problem["target"], bool(verdict)) for problem, text, _, _ in lines
                for value, verdict in TRY.findall(text)]
    share = lambda part, whole: f"{part / max(whole, 1):.3f} of {whole}"
    return (f"| {name} | {share(len(lines) - len(wrong), len(lines))} | {gave_up} | {claimed} | {len(wrong) - gave_up - claimed} | "
            f"{share(sum(correct), len(sums))} | {share(verdicts.count((True, True)), sum(hit for hit, _ in verdicts))} |")


def changed_problem(folder):
    """A held-out problem and a completion from before GRPO and one from after it: the first a wrong and the second a right one, if any."""
    pairs = []
    for (problem, before, _, was_right), (_, after, size, is_right) in zip(judged(folder, "before"), judged(folder, "after")):
        pairs.append((is_right and not was_right, "give up" in before, -abs(size - 120), problem, before, after))
    return max(pairs, key=lambda pair: pair[:3])[3:]


def summary(folder, metrics, sft):
    held_out, steps = points(metrics, "eval_reward"), [line for line in metrics if "step_time" in line]
    values = lambda name: [line[name] for line in steps if line.get(name) is not None]
    mean = lambda numbers: sum(numbers) / max(len(numbers), 1)
    first, last = (lambda name: values(name)[0]), (lambda name: values(name)[-1])
    above = next((step for step, value in held_out if value > 0.8), "none")
    times = [line.split("\t") for line in (folder / "times.tsv").read_text().splitlines()]
    problem, before, after = changed_problem(folder)
    return "\n".join([
        "| stage | seconds |", "|---|---|", *(f"| {name} | {seconds} |" for name, seconds in times), "",
        f"SFT: {sft[-1]['step']} steps of {mean([line['step_time'] for line in sft]):.3f} s, {sft[-1]['num_tokens']:,.0f} tokens, "
        f"loss {sft[0]['loss']:.3f} to {sft[-1]['loss']:.3f}",
        f"GRPO: {steps[-1]['step']} steps of {mean(values('step_time')):.2f} s, {mean(values('timing_s/generate')):.2f} of which "
        f"generation ({mean(values('perf/generation_tokens_per_second')):,.0f} tokens/s)",
        f"held-out problems solved: {held_out[0][1]:.3f} before, {held_out[-1][1]:.3f} after; above 0.8 first at step {above}",
        "held-out by step: " + ", ".join(f"{step}: {value:.3f}" for step, value in held_out),
        f"mean length: {first('completions/mean_length'):.0f} to {last('completions/mean_length'):.0f} tokens; "
        f"cut off: {first('completions/clipped_ratio'):.3f} to {last('completions/clipped_ratio'):.3f}; "
        f"entropy: {first('entropy'):.3f} to {last('entropy'):.3f}", "",
        "| sampled | right | gave up | wrong claim | else wrong | calculations right | hits seen |", "|---|---|---|---|---|---|---|",
        habits(folder, "before"), habits(folder, "after"), "",
        problem["prompt"][0]["content"], "", "Before:", "```text", before, "```", "After:", "```text", after, "```", ""])


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    metrics, sft = rows(folder / "grpo" / "metrics.jsonl"), rows(folder / "sft" / "metrics.jsonl")
    (folder / "curve.svg").write_text(picture(metrics))
    text = summary(folder, metrics, sft)
    (folder / "summary.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
