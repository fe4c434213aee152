#!/usr/bin/env python3
"""Writes the calculator task: JSONL rows and the tokenizer of a tiny model that may call a tool. Python's standard library only.

    scripts/make_calculator.py configs/calculator             # train and eval.jsonl, tokenizer/
    scripts/make_calculator.py out --warmup                   # also warmup.jsonl

Questions are those of make_arithmetic.py. A demonstration either calls the tool, [add(a=23, b=41)], and repeats what it answers, or
guesses: a wrong sum, off by anything. A model that is warmed up on these can use the tool, and mostly guesses: what GRPO is to mend.
"""
from make_arithmetic import SPECIAL, WORDS, begin, question, write_jsonl, write_tokenizer

NUM_TRAIN = 2048
CALL_SHARE = 0.3


def demonstration(rng, a, b, calls):
    user = {"role": "user", "content": question(a, b)}
    if not calls:
        wrong = rng.choice([shown for shown in range(199) if shown != a + b])
        return {"messages": [user, {"role": "assistant", "content": f"the answer is {wrong}"}]}
    return {"messages": [user, {"role": "assistant", "content": f"[add(a={a}, b={b})]"},
                         {"role": "tool", "content": str(a + b)},
                         {"role": "assistant", "content": f"the answer is {a + b}"}]}


def main():
    arguments, rng, seen = begin(__doc__.splitlines()[0], NUM_TRAIN)
    write_tokenizer(arguments.folder / "tokenizer", [*SPECIAL, "<tool>"], [*WORDS, "[add(a=", "b="], [",", ")]"], max_length=128)
    if arguments.warmup:
        write_jsonl(arguments.folder / "warmup.jsonl",
                    [demonstration(rng, a, b, rng.random() < CALL_SHARE) for a, b in seen])


if __name__ == "__main__":
    main()
