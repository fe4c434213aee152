#!/usr/bin/env python3
"""Writes prompts whose answers are prose: stories, letters and explanations. Their text repeats little, which is the hard case for draft tokens.

    make_writing_rows.py ROWS.jsonl [--rows 400] [--seed 0]

Each line has a `prompt`, a list with one user message, as `colo-grpo bench speculation` and `scripts/compare_vllm_ngram.py` read it.
"""
import argparse, itertools, json, pathlib, random

KINDS = ["Write a short story about {}.", "Write a letter to a friend about {}.", "Explain to a ten-year-old child {}.",
         "Write a diary entry of somebody who thinks about {}.", "Describe in three paragraphs {}."]
PLACES = ["a lighthouse in winter", "a market in a small town", "a train through the mountains", "a garden behind a school", "an old library",
          "a bakery before sunrise", "a harbour after a storm", "a village without a road", "a workshop full of clocks", "a museum at night"]
EVENTS = ["a lost key is found", "two neighbours meet for the first time", "the power fails for a day", "a letter arrives ten years late",
          "somebody learns to swim", "a bridge is being built", "a choir practises for a concert", "the first snow falls"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows_file", type=pathlib.Path)
    parser.add_argument("--rows", type=int, default=400, help="at most 400")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prompts = [kind.format(f"{place}, where {event}") for kind, place, event in itertools.product(KINDS, PLACES, EVENTS)]
    if not 1 <= options.rows <= len(prompts):
        parser.error(f"--rows: expected 1 to {len(prompts)}, got {options.rows}")
    random.Random(options.seed).shuffle(prompts)
    options.rows_file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": [{"role": "user", "content": prompt}]}) for prompt in prompts[:options.rows]]
    options.rows_file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
