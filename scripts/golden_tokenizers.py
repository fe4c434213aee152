#!/usr/bin/env python3
"""Golden tokens for `src/data/tokenizer`, made by transformers' AutoTokenizer.

    pip install transformers==5.24.0
    python scripts/golden_tokenizers.py      # writes tests/golden/tokenizers.json and tests/golden/tokenizer_classes.json

A small byte-level tokenizer stands in a folder with other files beside it, case by case: tokens that only one file knows, flags that two
files say differently, special tokens with names of their own. The test `data::tokenizer::tests::tokenizer_files_are_merged_as_by_auto_tokenizer`
reads the same folders.

The second file has the tokens of src/data/tokenizer/hard_texts.json by classes that transformers 5 builds anew, beside those that
tokenizer.json says.
"""

import json
import pathlib
import tempfile

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
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


def trained(pre_tokenizer, decoder, model, trainer, texts):
    """The file of a tokenizer that has learned to join digits and letters of the texts."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    tokenizer.train_from_iterator(texts, trainer)
    return json.loads(tokenizer.to_str())


def class_cases(texts):
    """Two tokenizers; name, edits of one of them, tokenizer_config.json and config.json of each folder."""
    special = ["<unk>", "<s>", "</s>"]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=letters, show_progress=False)
    base = trained(level, decoders.ByteLevel(), models.BPE(), trainer, texts * 4)
    fallback = special + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=fallback, show_progress=False)
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    pieces = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    spaces = trained(pre_tokenizers.Metaspace(prepend_scheme="always", split=True), pieces, model, trainer, texts * 4)

    def edits(pre_tokenizer=level, normalizer=None, **flags):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizer
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        pieces = json.loads(tokenizer.to_str())
        return {"base": 0, "pieces": {key: pieces[key] for key in ("pre_tokenizer", "normalizer")}, "flags": flags}

    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    words = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?LETTER+|\\p{N}NUMBERS| ?[^\\sMARKS\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

    def split(letter, marks, numbers=""):
        pattern = words.replace("LETTER", letter).replace("MARKS", marks).replace("NUMBERS", numbers)
        bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), bytes_alone])

    qwen2, qwen3_5 = split("\\p{L}", "\\p{L}"), split("[\\p{L}\\p{M}]", "\\p{L}\\p{M}")
    llama3 = split("\\p{L}", "\\p{L}", "{1,3}")
    replaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    prepended = {**edits(normalizer=replaced), "base": 1}
    prepended["pieces"]["pre_tokenizer"] = None
    gpt2, llama, qwen = "GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer"
    composed = normalizers.NFC()
    cases = [
        ("SmolLM2's", edits(digits), {"tokenizer_class": gpt2}, "llama"),
        ("GPT-2's", edits(), {"tokenizer_class": gpt2 + "Fast"}, "llama"),
        ("a prefix", edits(), {"tokenizer_class": gpt2, "add_prefix_space": True}, "llama"),
        ("NFC", edits(normalizer=composed), {"tokenizer_class": gpt2}, "llama"),
        ("ignored merges", edits(ignore_merges=True), {"tokenizer_class": gpt2}, "llama"),
        ("no class", edits(digits), {}, "llama"),
        ("the file's class", edits(digits), {"tokenizer_class": "PreTrainedTokenizerFast"}, "llama"),
        ("an unknown class", edits(digits), {"tokenizer_class": "SomeTokenizer"}, "llama"),
        ("SmolLM3", edits(llama3), {"tokenizer_class": "PreTrainedTokenizerFast"}, "smollm3"),
        *((f"GPT-2's class of {it}", edits(digits), {"tokenizer_class": gpt2}, it) for it in ("mistral", "olmo2", "granite")),
        *((f"its own class of {it}", edits(qwen2, composed), {"tokenizer_class": qwen}, it)
          for it in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next")),
        *((f"GPT-2's class of {it}", edits(digits), {"tokenizer_class": gpt2}, it) for it in ("qwen2", "qwen3", "qwen3_5")),
        ("no class of Qwen3", edits(llama3), {}, "qwen3"),
        ("no class of Qwen2", edits(qwen2, composed), {}, "qwen2"),
        ("no NFC of Qwen3", edits(qwen2), {"tokenizer_class": qwen + "Fast"}, "qwen3"),
        ("Qwen2's class of Qwen3.5", edits(qwen3_5, composed), {"tokenizer_class": qwen}, "qwen3_5"),
        ("Qwen2's class of Qwen3.5's text", edits(qwen3_5, composed), {"tokenizer_class": qwen}, "qwen3_5_text"),
        ("its own class of Qwen3.5's text", edits(qwen3_5, composed), {"tokenizer_class": "Qwen3_5Tokenizer"}, "qwen3_5_text"),
        ("Llama 3's", edits(llama3), {"tokenizer_class": llama + "Fast"}, "llama"),
        ("Llama 2's", prepended, {"tokenizer_class": llama + "Fast"}, "llama"),
        ("Llama 2's, as it was", prepended, {"tokenizer_class": llama, "legacy": True}, "llama"),
        ("Llama 2's, no prefix", prepended, {"tokenizer_class": llama, "add_prefix_space": False}, "llama"),
        ("Llama 2's of Mistral", prepended, {"tokenizer_class": llama}, "mistral"),
        ("Llama 2's, split", {"base": 1, "pieces": {}, "flags": {}}, {"tokenizer_class": llama, "legacy": False}, "llama"),
    ]
    cases = [(*case[:3], {"model_type": case[3]}) for case in cases]
    cases.append(("a class of config.json", edits(digits), {}, {"model_type": "llama", "tokenizer_class": gpt2}))
    return [base, spaces], cases


def write_classes(golden):
    texts = json.loads((golden.parent.parent / "src/data/tokenizer/hard_texts.json").read_text())
    bases, cases = class_cases(texts)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    made = []
    for name, change, config, model in cases:
        base, config = bases[change["base"]], {**config, **named}
        file = {**base, **change["pieces"], "model": {**base["model"], **change["flags"]}}
        with tempfile.TemporaryDirectory() as folder:
            for path, value in {"tokenizer.json": file, "tokenizer_config.json": config, "config.json": model}.items():
                pathlib.Path(folder, path).write_text(json.dumps(value))
            auto, plain = AutoTokenizer.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
        ids, own = ([it.encode(text, add_special_tokens=False) for text in texts] for it in (auto, plain))
        others = [index for index, (a, b) in enumerate(zip(ids, own)) if a != b]
        made.append({"name": name, **change, "config": config, "model": model, "ids": ids, "others": others})
    path = golden / "tokenizer_classes.json"
    golden = {"bases": bases, "cases": made}
    path.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{path}: {len(made)} folders, {len(texts)} texts each, {sum(bool(case['others']) for case in made)} with other tokens")


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
    write_classes(path.parent)


if __name__ == "__main__":
    main()
