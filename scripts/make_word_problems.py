#!/usr/bin/env python3
"""Writes word problems of one calculation as JSONL rows. Python's standard library only.

    scripts/make_word_problems.py out                 # out/train.jsonl, out/eval.jsonl
    scripts/make_word_problems.py out --train 500

A row has a `prompt` (one message) and its `answer`, a whole number from 1 to 20. No numbers of a problem in eval.jsonl occur together in
train.jsonl, whatever the story.
"""
import argparse, json, pathlib, random

MOST = 10
NAMES = "Tom Anna Ben Maria Sam Lucy Omar Nina Paul Ida Leo Zoe Max Eva Jack Lily".split()
THINGS = "apples marbles books stickers pencils coins shells cards stamps cookies".split()
ASK = " Answer with one short sentence."
# A story, what it asks for, and whether the numbers suit it.
STORIES = [
    ("{name} has {a} {things}. {name} buys {b} more. How many {things} does {name} have now?", lambda a, b: a + b),
    ("{name} has {a} {things}. {name} gives {b} of them to {friend}. How many {things} does {name} have left?", lambda a, b: a - b),
    ("{name} has {a} {things} and {friend} has {b}. How many {things} do they have together?", lambda a, b: a + b),
    ("There are {a} {things} on a table. {name} takes {b} of them. How many {things} are left on the table?", lambda a, b: a - b),
    ("{name} finds {a} {things} on Monday and {b} on Tuesday. How many {things} does {name} find in all?", lambda a, b: a + b),
    ("{name} has {a} {things} and loses {b}. How many {things} does {name} have now?", lambda a, b: a - b),
]


def row(rng, held_out):
    """A problem whose numbers are held out, or are not."""
    while True:
        story, calculate = rng.choice(STORIES)
        a, b = rng.randint(2, MOST), rng.randint(2, MOST)
        answer = calculate(a, b)
        if answer < 1 or ((a * 31 + b * 17) % 10 == 0) != held_out:
            continue
        name, friend = rng.sample(NAMES, 2)
        text = story.format(name=name, friend=friend, things=rng.choice(THINGS), a=a, b=b)
        return {"prompt": [{"role": "user", "content": text + ASK}], "answer": answer}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--train", type=int, default=8_000, help="rows of train.jsonl")
    parser.add_argument("--eval", type=int, default=256, help="rows of eval.jsonl")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for kind, count in (("train", options.train), ("eval", options.eval)):
        rng = random.Random(f"words {kind}")
        rows = [row(rng, kind == "eval") for _ in range(count)]
        (options.folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{options.folder / kind}.jsonl: {count} rows")


if __name__ == "__main__":
    main()
