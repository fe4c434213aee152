#!/usr/bin/env python3
"""Draws the rewards of a run, held-out and trained on, over its steps. Python's standard library only.

    scripts/environment_curve.py runs/reasoning_gym_smollm2 curve.svg
"""
import pathlib, sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from countdown_curve import picture, rows


def main():
    folder, output = map(pathlib.Path, sys.argv[1:])
    labels = [("held-out problems solved", "held-out reward"), ("training problems solved", "reward of what is trained on")]
    text = picture(rows(folder / "metrics.jsonl"))
    for theirs, ours in labels:
        text = text.replace(theirs, ours)
    output.write_text(text)


if __name__ == "__main__":
    main()
