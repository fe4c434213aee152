#!/usr/bin/env python3
"""Writes the calculator task: JSONL rows and the tokenizer of a tiny model that may call a tool. Python's standard library only.

    scripts/make_calculator.py configs/calculator             # train and eval.jsonl, tokenizer/
    scripts/make_calculator.py out --warmup                   # also warmup.jsonl

Questions are those of make_arithmetic.py. A demonstration either calls the tool, [add(a=23, b=41)], and repeats what it answers, or
guesses: a wrong sum, off by anything. A model that is warmed up on these can use the tool, and mostly guesses: what GRPO is to mend.
"""
import argparse, json, pathlib, random

from make_arithmetic import ONES, TENS, problem, question, write_jsonl

SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<tool>"]
TEMPLATE = ("{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
            "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")
NUM_EVAL, NUM_TRAIN = 200, 2048
CALL_SHARE = 0.3


def demonstration(rng, a, b, calls):
    user = {"role": "user", "content": question(a, b)}
    if not calls:
        wrong = rng.choice([shown for shown in range(199) if shown != a + b])
        return {"messages": [user, {"role": "assistant", "content": f"the answer is {wrong}"}]}
    return {"messages": [user, {"role": "assistant", "content": f"[add(a={a}, b={b})]"},
                         {"role": "tool", "content": str(a + b)},
                         {"role": "assistant", "content": f"the answer is {a + b}"}]}


def write_tokenizer(folder):
    folder.mkdir(parents=True, exist_ok=True)
    words = ["what", "is", "plus", "?", "the", "answer", "", "[add(a=", "b="] + ONES + TENS
    pieces = SPECIAL + ["▁" + word for word in words] + list("0123456789") + [",", ")]"]
    vocab = {token: id for id, token in enumerate(pieces)}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for id, token in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [metaspace, {"type": "Digits", "individual_digits": True}]},
        "post_processor": None,
        "decoder": metaspace,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>",
                "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "model_max_length": 128,
                "chat_template": TEMPLATE}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    print(f"{folder}: {len(vocab)} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--warmup", action="store_true", help="also write the demonstrations of the warm-up")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(pairs)
    held_out, seen = pairs[:NUM_EVAL], pairs[NUM_EVAL:]
    write_jsonl(arguments.folder / "eval.jsonl", [problem(a, b) for a, b in held_out])
    write_jsonl(arguments.folder / "train.jsonl", [problem(a, b) for a, b in seen[:NUM_TRAIN]])
    write_tokenizer(arguments.folder / "tokenizer")
    if arguments.warmup:
        write_jsonl(arguments.folder / "warmup.jsonl",
                    [demonstration(rng, a, b, rng.random() < CALL_SHARE) for a, b in seen])


if __name__ == "__main__":
    main()
