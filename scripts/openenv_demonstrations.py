#!/usr/bin/env python3
"""Demonstrations of calls, for a small model that has never made any: each writes one short message to OpenEnv's echo environment.

    scripts/openenv_demonstrations.py rows.jsonl
    colo-grpo sft --config configs/environments/openenv_sft.toml train_file=rows.jsonl
"""
import json, pathlib, sys

WORDS = "hi yes no ok hey sun red sea up go one two cat dog tea day sky ice map key".split()
SYSTEM = "You act by writing exactly one line like this one: [step(message=\"hi\")]"
SHOWN = json.dumps({"echoed_message": "Echo Env environment ready!", "message_length": 0})


def main():
    rows = []
    for word in WORDS:
        prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SHOWN}]
        rows.append({"prompt": prompt, "completion": f'[step(message="{word}")]'})
    pathlib.Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
