#!/usr/bin/env python3
"""Draws what scripts/learning.py collected, and prints its table. Python's standard library only.

    scripts/learning_curves.py docs/learning/runs.jsonl docs      # docs/learning.svg, docs/learning-variants.svg; the table to the terminal

A run reaches a reward with the first step from which the mean of three steps is not below it. A figure of several seeds is the median, with the
least and the greatest.
"""
import collections, json, pathlib, statistics, sys

TITLES = {"words": "Word problems, SmolLM2-135M-Instruct", "countdown": "Countdown, 63M"}
NAMED = {"words": 0.8, "countdown": 0.45}  # the reward that the table names
COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#9c6b4e", "#6cc5b0", "#97bbf5")
WIDTH, HEIGHT, LEFT, TOP, GAP, BOTTOM = 470, 330, 52, 34, 70, 44


def who(run):
    return run["variant"] or run["who"]


def smoothed(run):
    """Mean rewards of up to three steps, with the seconds at the last of them."""
    rewards = run["rewards"]
    return [(second, statistics.mean(rewards[max(0, at - 2):at + 1])) for at, second in enumerate(run["seconds"])]


def reached(run, reward):
    return next((second for second, mean in smoothed(run)[2:] if mean >= reward), None)


def spread(values, digits):
    """The median, with the least and the greatest."""
    if not values:
        return "-"
    texts = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return texts[0] if len(values) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def table(runs):
    """Markdown: a row for each task and kind of run."""
    lines = ["| task | who | seeds | start until the first step, s | seconds to the named reward | steps to it | s a step | reward of the last 10 steps | held-out |",
             "|---|---|---|---|---|---|---|---|---|"]
    groups = collections.defaultdict(list)
    starts = {run["run"].removesuffix("-start"): run["held_out"] for run in runs if run["run"].endswith("-start")}
    for run in runs:
        if "task" in run and run["seconds"]:
            groups[run["task"], who(run)].append(run)
    for (task, name), some in groups.items():
        times = [reached(run, NAMED[task]) for run in some]
        steps = [1 + run["seconds"].index(time) for run, time in zip(some, times) if time is not None]
        whole = [run for run in some if len(run["rewards"]) == run["steps"]]
        times_text = spread([time for time in times if time is not None], 1)
        if None in times:
            times_text += f"; {times.count(None)} of {len(times)} not"
        lines.append(
            f"| {task}, {NAMED[task]} | {name} | {len(some)} | {spread([run['start_s'] for run in some], 1)} | {times_text} | {spread(steps, 0)} | "
            f"{spread([run['seconds'][-1] / len(run['seconds']) for run in some], 2)} | {spread([statistics.mean(run['rewards'][-10:]) for run in whole], 3)} | "
            f"{spread([run['held_out'] for run in some if 'held_out' in run], 3)} |")
    lines += ["", *(f"Held-out reward of the start: {task} {value:.3f}." for task, value in starts.items())]
    cards = sorted({(who(run) if run["who"] != "colo-grpo" else run["who"], run["card"], ", ".join(f"{name} {version}" for name, version in run["versions"].items()))
                    for run in runs if "task" in run})
    return "\n".join([*lines, "", *(f"{name}: {card}; {versions}." for name, card, versions in cards)])


def panel(task, groups, left, colours):
    """One task's curves: reward against seconds of training, a thin line for each seed."""
    longest = max(run["seconds"][-1] for some in groups.values() for run in some)
    highest = max(mean for some in groups.values() for run in some for _, mean in smoothed(run)) * 1.05
    x = lambda second: left + LEFT + second / longest * (WIDTH - LEFT - 16)
    y = lambda reward: TOP + (1 - reward / highest) * (HEIGHT - TOP - BOTTOM)
    parts = [f'<text x="{left + LEFT}" y="18" font-weight="bold">{TITLES[task]}</text>',
             f'<text x="{left + LEFT + (WIDTH - LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">seconds of training</text>']
    step = next(step for step in (0.02, 0.05, 0.1, 0.2, 0.5) if highest / step <= 8)
    for index in range(int(highest / step) + 1):
        parts.append(f'<path d="M{left + LEFT} {y(index * step):.1f}H{left + WIDTH - 16}" stroke="#ddd"/>'
                     f'<text x="{left + LEFT - 6}" y="{y(index * step) + 4:.1f}" text-anchor="end">{index * step:.2f}</text>')
    tick = next(tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if longest / tick <= 8)
    for second in range(0, int(longest) + 1, tick):
        parts.append(f'<text x="{x(second):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{second}</text>')
    for index, (name, some) in enumerate(groups.items()):
        for run in some:
            points = " ".join(f"{x(second):.1f},{y(mean):.1f}" for second, mean in smoothed(run))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>')
        parts.append(f'<text x="{left + WIDTH - 20}" y="{HEIGHT - BOTTOM - 10 - 15 * index}" text-anchor="end" fill="{colours[name]}">{name}</text>')
    return "".join(parts)


def picture(runs, wanted):
    """The panels of the tasks that have runs that are wanted, side by side."""
    tasks = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        if "task" in run and run["seconds"] and wanted(run):
            tasks[run["task"]][who(run)].append(run)
    names = dict.fromkeys(name for groups in tasks.values() for name in groups)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    panels = [panel(task, groups, index * (WIDTH + GAP // 2), colours) for index, (task, groups) in enumerate(tasks.items())]
    width = max(1, len(panels)) * (WIDTH + GAP // 2)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="12">'
            f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>{"".join(panels)}</svg>\n')


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    runs = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
    folder = pathlib.Path(sys.argv[2])
    (folder / "learning.svg").write_text(picture(runs, lambda run: not run["variant"]))
    (folder / "learning-variants.svg").write_text(picture(runs, lambda run: run["who"] == "colo-grpo"))
    print(table(runs))


if __name__ == "__main__":
    main()
