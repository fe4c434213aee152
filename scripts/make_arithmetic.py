#!/usr/bin/env python3
"""Writes the arithmetic task of the demo: JSONL rows and the tokenizer of a tiny model. Python's standard library only.

    scripts/make_arithmetic.py configs/arithmetic            # train, eval and demonstrations.jsonl, tokenizer/
    scripts/make_arithmetic.py out --warmup                  # also warmup_right.jsonl and warmup_mixed.jsonl

Questions are in words ("what is twenty three plus forty one ?"), answers in digits ("the answer is 64"). Operand pairs
below 100 are split once: no pair of eval.jsonl stands in another file. The demonstrations of warmup_right.jsonl are all
right; those of warmup_mixed.jsonl are right with probability 0.4 and else off by a little (`"correct": false`). A model
warmed up on the first and then on the second knows the sums but is wrong more often than not: what GRPO is to mend.
"""
import argparse, json, pathlib, random

ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>"]
TEMPLATE = ("{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
            "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")
NUM_EVAL, NUM_TRAIN, NUM_DEMONSTRATIONS = 200, 4096, 512
WRONG_SHARE, OFFSETS = 0.6, [-20, -10, -3, -2, -1, 1, 2, 3, 10, 20]


def in_words(number):
    if number < 20:
        return ONES[number]
    return " ".join([TENS[number // 10 - 2]] + ([ONES[number % 10]] if number % 10 else []))


def question(a, b):
    return f"what is {in_words(a)} plus {in_words(b)} ?"


def write_jsonl(path, rows):
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    print(f"{path}: {len(rows)} rows")


def problem(a, b):
    return {"prompt": [{"role": "user", "content": question(a, b)}], "answer": str(a + b)}


def conversation(a, b):
    return {"messages": [{"role": "user", "content": question(a, b)},
                         {"role": "assistant", "content": f"the answer is {a + b}"}]}


def demonstration(a, b, shown):
    return {"prompt": [{"role": "user", "content": question(a, b)}], "completion": f"the answer is {shown}",
            "correct": shown == a + b}


def mixed_demonstration(rng, a, b):
    total = a + b
    if rng.random() >= WRONG_SHARE:
        return demonstration(a, b, total)
    return demonstration(a, b, total + rng.choice([offset for offset in OFFSETS if total + offset >= 0]))


WORDS = ["what", "is", "plus", "?", "the", "answer", ""]


def write_tokenizer(folder, special=SPECIAL, words=WORDS, signs=(), max_length=64):
    """A token a word of `words` and of numbers, a token a digit and a sign; `special` ones come first."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = special + ["▁" + word for word in words + ONES + TENS] + list("0123456789") + list(signs)
    vocab = {token: id for id, token in enumerate(pieces)}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for id, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [metaspace, {"type": "Digits", "individual_digits": True}]},
        "post_processor": None,
        "decoder": metaspace,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>",
                "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "model_max_length": max_length,
                "chat_template": TEMPLATE}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    print(f"{folder}: {len(vocab)} tokens")


def begin(description, num_train):
    """Reads the command line, and writes the held-out and the training problems. Returns the arguments, the dice, and the pairs of
    operands that are not held out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--warmup", action="store_true", help="also write the demonstrations of the warm-up")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(pairs)
    held_out, seen = pairs[:NUM_EVAL], pairs[NUM_EVAL:]
    write_jsonl(arguments.folder / "eval.jsonl", [problem(a, b) for a, b in held_out])
    write_jsonl(arguments.folder / "train.jsonl", [problem(a, b) for a, b in seen[:num_train]])
    return arguments, rng, seen


def main():
    arguments, rng, seen = begin(__doc__.splitlines()[0], NUM_TRAIN)
    rows = [conversation(a, b) for a, b in seen[:NUM_DEMONSTRATIONS]]
    write_jsonl(arguments.folder / "demonstrations.jsonl", rows)
    write_tokenizer(arguments.folder / "tokenizer")
    if arguments.warmup:
        write_jsonl(arguments.folder / "warmup_right.jsonl", [demonstration(a, b, a + b) for a, b in seen])
        write_jsonl(arguments.folder / "warmup_mixed.jsonl", [mixed_demonstration(rng, a, b) for a, b in seen])


if __name__ == "__main__":
    main()
