#!/usr/bin/env python3
"""Draws what scripts/learning.py collected, and prints its table. Python's standard library only.

    scripts/learning_curves.py docs/learning/runs.jsonl docs      # docs/learning.svg, docs/learning-variants.svg; the table to the terminal

A run reaches a reward with the first step from which the mean of three steps is not below it. A figure of several seeds is the median, with the
least and the greatest. learning.svg has a line for each seed. learning-variants.svg has one for each setting of our program: the means of its
seeds' seconds and rewards at each step, on a band from the least reward to the greatest; every panel repeats the run without a setting.
"""
import collections, json, pathlib, statistics, sys

TITLES = {"words": "Word problems, SmolLM2-135M-Instruct", "countdown": "Countdown, 63M"}
NAMED = {"words": 0.8, "countdown": 0.45}  # the reward that the table names
COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#9c6b4e", "#6cc5b0", "#97bbf5")
# The panels of settings, and what the plot calls them.
THEMES = {
    "fewer bits": {"fp8": "FP8: rollouts, cache, training", "int8": "int8: rollouts and cache", "8-bit": "AdamW with 8 bits", "qlora": "QLoRA: NF4, rank 32, 3e-4"},
    "other updates": {"exact": "exact", "muon": "Muon, 3e-5", "muon-faster": "Muon, 1e-4"},
    "sampling": {"replaced": "groups replaced", "drafts": "draft tokens", "two": "two GPUs, colocated", "async": "two GPUs, one samples ahead"},
}
PLAIN = "#555"
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
    lines = ["| task | who | seeds | start until the first step, s | seconds to the named reward | steps to it | s a step | reward of the last 10 steps | held-out | nats | groups |",
             "|---|---|---|---|---|---|---|---|---|---|---|"]
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
            f"{spread([run['held_out'] for run in some if 'held_out' in run], 3)} | "
            f"{spread([statistics.mean(run['differences']) for run in some if 'differences' in run], 4)} | "
            f"{spread([sum(run['groups']) for run in some if 'groups' in run], 0)} |")
    lines += ["", *(f"Held-out reward of the start: {task} {value:.3f}." for task, value in starts.items())]
    cards = sorted({(who(run) if run["who"] != "colo-grpo" else run["who"], run["card"], ", ".join(f"{name} {version}" for name, version in run["versions"].items()))
                    for run in runs if "task" in run})
    return "\n".join([*lines, "", *(f"{name}: {card}; {versions}." for name, card, versions in cards)])


def axes(title, longest, highest, left, top):
    """The frame of a panel, and where a second and a reward are in it."""
    highest = max(highest, 0.02)  # of runs without a reward
    x = lambda second: left + LEFT + second / longest * (WIDTH - LEFT - 16)
    y = lambda reward: top + TOP + (1 - reward / highest) * (HEIGHT - TOP - BOTTOM)
    parts = [f'<text x="{left + LEFT}" y="{top + 18}" font-weight="bold">{title}</text>',
             f'<text x="{left + LEFT + (WIDTH - LEFT) / 2}" y="{top + HEIGHT - 8}" text-anchor="middle">seconds of training</text>']
    step = next(step for step in (0.02, 0.05, 0.1, 0.2, 0.5) if highest / step <= 8)
    for index in range(int(highest / step) + 1):
        parts.append(f'<path d="M{left + LEFT} {y(index * step):.1f}H{left + WIDTH - 16}" stroke="#ddd"/>'
                     f'<text x="{left + LEFT - 6}" y="{y(index * step) + 4:.1f}" text-anchor="end">{index * step:.2f}</text>')
    tick = next(tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if longest / tick <= 8)
    for second in range(0, int(longest) + 1, tick):
        parts.append(f'<text x="{x(second):.1f}" y="{top + HEIGHT - BOTTOM + 18}" text-anchor="middle">{second}</text>')
    return parts, x, y


def named(text, colour, index, left, top):
    """The name of a line, the lowest first, in the panel's corner."""
    return f'<text x="{left + WIDTH - 20}" y="{top + HEIGHT - BOTTOM - 10 - 15 * index}" text-anchor="end" fill="{colour}">{text}</text>'


def line(points, colour):
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def panel(task, groups, left, colours):
    """One task's curves: reward against seconds of training, a thin line for each seed."""
    longest = max(run["seconds"][-1] for some in groups.values() for run in some)
    highest = max(mean for some in groups.values() for run in some for _, mean in smoothed(run)) * 1.05
    parts, x, y = axes(TITLES[task], longest, highest, left, 0)
    for index, (name, some) in enumerate(groups.items()):
        parts += [line([f"{x(second):.1f},{y(mean):.1f}" for second, mean in smoothed(run)], colours[name]) for run in some]
        parts.append(named(name, colours[name], index, left, 0))
    return "".join(parts)


def settings_panel(task, theme, groups, left, top, longest, highest):
    """One task's settings of a theme: the mean of the seeds at each step, on a band from the least reward to the greatest."""
    parts, x, y = axes(f"{TITLES[task]}: {theme}", longest, highest, left, top)
    names = {"": "no setting", **THEMES[theme]}
    for index, name in enumerate(name for name in names if name in groups):
        runs = [smoothed(run) for run in groups[name]]
        colour = PLAIN if not name else COLOURS[list(names).index(name) - 1]
        steps = list(zip(*runs))
        seconds = [x(statistics.mean(second for second, _ in step)) for step in steps]
        bounds = [[y(choose(mean for _, mean in step)) for step in steps] for choose in (max, min)]
        if len(runs) > 1:
            around = [f"{at:.1f},{value:.1f}" for at, value in [*zip(seconds, bounds[0]), *reversed([*zip(seconds, bounds[1])])]]
            parts.append(f'<polygon points="{" ".join(around)}" fill="{colour}" fill-opacity="0.15"/>')
        parts.append(line([f"{at:.1f},{y(statistics.mean(mean for _, mean in step)):.1f}" for at, step in zip(seconds, steps)], colour))
        parts.append(named(f"{names[name]} ({len(runs)})", colour, index, left, top))
    return "".join(parts)


def settings_picture(runs):
    """A row of panels for each task, one for each theme, all with the task's axes."""
    tasks = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        if run.get("who") == "colo-grpo" and run["seconds"]:
            tasks[run["task"]][run["variant"]].append(run)
    panels = []
    for row, (task, groups) in enumerate(tasks.items()):
        of_task = [smoothed(run) for some in groups.values() for run in some]
        longest, highest = max(run[-1][0] for run in of_task), max(mean for run in of_task for _, mean in run) * 1.05
        for column, theme in enumerate(THEMES):
            panels.append(settings_panel(task, theme, groups, column * (WIDTH + GAP // 2), row * HEIGHT, longest, highest))
    return svg(len(THEMES), max(1, len(tasks)), panels)


def svg(columns, rows, panels):
    width, height = columns * (WIDTH + GAP // 2), rows * HEIGHT
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
            f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(panels)}</svg>\n')


def picture(runs, wanted):
    """The panels of the tasks that have runs that are wanted, side by side."""
    tasks = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        if "task" in run and run["seconds"] and wanted(run):
            tasks[run["task"]][who(run)].append(run)
    names = dict.fromkeys(name for groups in tasks.values() for name in groups)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    panels = [panel(task, groups, index * (WIDTH + GAP // 2), colours) for index, (task, groups) in enumerate(tasks.items())]
    return svg(max(1, len(panels)), 1, panels)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    runs = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
    folder = pathlib.Path(sys.argv[2])
    (folder / "learning.svg").write_text(picture(runs, lambda run: not run["variant"]))
    (folder / "learning-variants.svg").write_text(settings_picture(runs))
    print(table(runs))


if __name__ == "__main__":
    main()
