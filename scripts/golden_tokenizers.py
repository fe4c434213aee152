#!/usr/bin/env python3
"""Golden tokens for `src/data/tokenizer`, made by transformers' AutoTokenizer.

    pip install transformers==5.24.0
    python scripts/golden_tokenizers.py      # writes tests/golden/tokenizers.json

A small byte-level tokenizer stands in a folder with other files beside it, case by case: tokens that only one file knows, flags that two
files say differently, special tokens with names of their own. The test `data::tokenizer::tests::files_are_merged_as_by_auto_tokenizer`
reads the same folders.
"""

import json
import pathlib
import tempfile

from transformers import AutoTokenizer
from transformers.utils import logging

TEXTS = [
    "a <mark>b",
    "ab  <mark>  ba <image> <tool>",
    "x</s>y<|end|> z",
    "<pad><unk>ab<s>",
    "a<extra_0>b <extra_1>word<extra_1> word",
    "MARK <MARK> <mark>s",
]
TEMPLATE = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}|{{ tool_token }}|{{ messages[0].content }}"
)


def tokenizer_json():
    letters = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    letters += [chr(256 + index) for index in range(256 - len(letters))]
    vocab = {letter: index for index, letter in enumerate(letters)}
    merges = [["a", "b"], ["Ġ", "b"], ["m", "a"], ["ma", "r"], ["mar", "k"], ["Ġ", "Ġ"], ["<", "m"]]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    added = [("<s>", True), ("</s>", True), ("<unk>", True), ("<mark>", False), ("<image>", True)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [
        {"id": len(vocab) + index, "content": content, **flags, "special": special}
        for index, (content, special) in enumerate(added)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def cases():
    base = tokenizer_json()
    ids = {token["content"]: token["id"] for token in base["added_tokens"]}
    first = len(base["model"]["vocab"])
    new = first + len(ids)

    def decoder(*tokens):
        return {str(index): {"content": content, **more} for index, content, more in tokens}

    whole = decoder(*((index, content, {"special": content != "<mark>", "normalized": False}) for content, index in ids.items()))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = "tokenizer_config.json"
    special, added = "special_tokens_map.json", "added_tokens.json"
    flag = {"content": "<mark>", "single_word": False, "lstrip": True, "rstrip": True, "normalized": False}
    return {
        "tokenizer.json alone": {config: {}},
        "names alone": {config: named},
        "a token of added_tokens_decoder": {
            config: {**named, "added_tokens_decoder": {**whole, **decoder((new, "<tool>", {"special": False}))}}
        },
        "flags of added_tokens_decoder come first": {
            config: {**named, "added_tokens_decoder": {**whole, str(ids["<mark>"]): {**flag, "special": False}}}
        },
        "special where tokenizer.json says not": {
            config: {**named, "added_tokens_decoder": {**whole, str(ids["<mark>"]): {**flag, "special": True, "lstrip": False}}}
        },
        "a normalized token": {
            config: {**named, "added_tokens_decoder": {**whole, **decoder((new, "<MARK>", {"normalized": True}))}}
        },
        "whole words": {
            config: {**named, "added_tokens_decoder": {**whole, **decoder((new, "<extra_1>", {"single_word": True}))}}
        },
        "extra_special_tokens as a list": {config: {**named, "extra_special_tokens": ["<extra_0>", "<tool>"]}},
        "extra_special_tokens by name": {config: {**named, "extra_special_tokens": {"tool_token": "<tool>"}}},
        "additional_special_tokens": {config: {**named, "additional_special_tokens": ["<tool>", "<mark>"]}},
        "extra before additional": {
            config: {**named, "extra_special_tokens": ["<extra_0>"], "additional_special_tokens": ["<tool>"]}
        },
        "an empty list is none": {config: {**named, "extra_special_tokens": [], "additional_special_tokens": ["<tool>"]}},
        "a token named by its key": {config: {**named, "image_token": "<image>", "tool_token": "<tool>", "pad_token": "<pad>"}},
        "a named token as an object": {
            config: {**named, "pad_token": {"__type": "AddedToken", "content": "<pad>", "lstrip": True, "normalized": True}}
        },
        "an end that tokenizer.json does not call special": {config: {**named, "eos_token": "<mark>"}},
        "special_tokens_map alone": {config: {}, special: {**named, "pad_token": "<pad>"}},
        "special_tokens_map comes first": {config: {**named, "eos_token": "<image>"}, special: {"eos_token": "</s>"}},
        "special_tokens_map as objects": {
            config: {},
            special: {**named, "pad_token": {"content": "<pad>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}},
        },
        "special_tokens_map is passed over beside added_tokens_decoder": {
            config: {**named, "added_tokens_decoder": whole},
            special: {"eos_token": "<image>", "additional_special_tokens": ["<tool>"]},
        },
        "special_tokens_map adds to extra_special_tokens": {
            config: {**named, "extra_special_tokens": ["<extra_0>"]},
            special: {"extra_special_tokens": ["<extra_1>"]},
        },
        "additional tokens of special_tokens_map": {config: named, special: {"additional_special_tokens": ["<tool>"]}},
        "added_tokens.json": {config: named, added: {"<tool>": new, "<extra_0>": new + 1}},
        "added_tokens.json, special by name": {config: {**named, "pad_token": "<pad>"}, added: {"<tool>": new, "<pad>": new + 1}},
        "split_special_tokens": {config: {**named, "split_special_tokens": True}},
        "add_bos_token is passed over": {config: {**named, "add_bos_token": True, "add_eos_token": True}},
        "clean_up_tokenization_spaces": {config: {**named, "clean_up_tokenization_spaces": True}},
    }


def main():
    logging.set_verbosity_error()
    base, made = tokenizer_json(), []
    for name, files in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            write = lambda file, value: pathlib.Path(folder, file).write_text(json.dumps(value))
            write("tokenizer.json", base)
            write("config.json", {"model_type": "llama"})
            for file, value in files.items():
                write(file, {**value, "tokenizer_class": "TokenizersBackend"} if file == "tokenizer_config.json" else value)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
        made.append(
            {
                "name": name,
                "files": files,
                "ids": ids,
                "texts": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
                "eos": tokenizer.eos_token_id,
                "chat": tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=TEMPLATE, tokenize=False),
            }
        )
    path = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "tokenizers.json"
    golden = {"tokenizer.json": base, "template": TEMPLATE, "texts": TEXTS, "cases": made}
    path.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{path}: {len(made)} folders, {len(TEXTS)} texts each")


if __name__ == "__main__":
    main()
