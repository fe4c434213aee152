#!/usr/bin/env python3
"""Golden scores for `src/reward`, made by the functions whose names the rewards have.

    pip install math-verify==0.9.0
    pip download --no-deps trl==1.16.0                              # unpacked into a folder
    pip download --no-deps --no-binary :all: math-verify==0.9.0     # unpacked: its tests are the table `math`
    git clone https://github.com/huggingface/open-r1                # commit 1416fa0
    python scripts/golden_rewards.py OPEN_R1 TRL MATH_VERIFY        # the three folders; writes tests/golden/rewards.json

open-r1's and TRL's reward modules run as they stand, their package's other imports replaced by empty modules: neither torch nor
transformers is needed. Of math-verify the gold and predicted texts of its own tests (Apache 2.0, Copyright 2024 The HuggingFace
Team) are taken as data; their verdicts are those of math-verify 0.9.0 on this machine, and so are the verdicts of numbers in many
spellings by each reward, which hold the path without Python to them.
"""

import ast
import importlib.util
import itertools
import json
import logging
import math
import pathlib
import re
import sys
import types
import warnings

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

THINK = "<think>\nreason\n</think>\n<answer>\n{}\n</answer>"
TEXTS = [
    "",
    "plain words",
    THINK.format("42"),
    THINK.format("42") + "\nand more",
    THINK.format("42") + " and more",
    " " + THINK.format("42"),
    "<think>\n\n</think>\n<answer>\n\n</answer>",
    "<think>\n</think>\n<answer>\n</answer>",
    "<think>reason</think><answer>42</answer>",
    "<think>\na\n</think>\n<answer>\nb\n</answer>\n<answer>\nc\n</answer>",
    "<think>\na <think> b\n</think> c",
    "<think>one</think> two",
    "<think>one</think> two </think> three",
    "<think></think>",
    "<think>one",
    "x <think>one</think>",
    "\n<think>one</think>",
    "<think>\na\n</think>\n<answer>\n```python\nprint(1)\n```\n</answer>",
    "<think>\na\n</think>\n<answer>\nso\n```python\nprint(1)\n```\nthat is it\n</answer>\nmore",
    "<think>\na\n</think>\n<answer>\n```cpp\nint x;\n```\n</answer>",
    "<think>\na\n</think>\n<answer>\n```python\nprint(1)\n</answer>",
    "Step 1: look\nStep 2: think\nFirst, a. Next, b. Finally, c.",
    "1. one\n2. two\n- three\n* four",
    "Step \u0663: three\n-\n*",
    "Second, x",
    "a b c a b c a b c",
    "A a  a\ta\na",
    "one two three four five six",
    "\u00c9t\u00e9 \u00e9t\u00e9 \u00c9T\u00c9 \u00e9t\u00e9",
    "a\x1cb\x1dc\x1ea\x1fb c",
    "too short",
]
IDS = [[], [1], [1, 2], [1, 2, 3], [5] * 7, [1, 2, 3, 4] * 5, list(range(40)), [1, 2] * 20 + [3] * 11, [9] * 80, [9] * 100, [9] * 101]
ANSWERS = [
    ("$\\frac{1}{3}$", "so \\boxed{\\frac{1}{3}}"),
    ("$\\frac{1}{3}$", "so \\boxed{\\frac{1}{2}} or not"),
    ("$\\frac{1}{3}$", "so \\boxed{0.333333333}"),
    ("$\\frac{1}{3}$", "it is 1/3"),
    ("$\\frac{1}{3}$", "the answer is $1/3$"),
    ("$x+1$", "<think>maybe \\boxed{x}</think> \\boxed{1+x}"),
    ("$x+1$", "<think>maybe \\boxed{1+x}</think> none"),
    ("$x+1$", "<think>maybe \\boxed{1+x}"),
    ("$x+1$", "a</think> \\boxed{x} </think> b \\boxed{1+x}" + " and so on" * 12),
    ("42", "\\boxed{42}"),
    ("42", "</think>\\boxed{41}"),
    ("so \\boxed{42}", "the final answer is \\boxed{42}" + "." * 80),
    ("nothing to read", "</think>\\boxed{42}"),
    ("nothing to read", "no end of thought"),
    ("$12$ or $x$", "</think> $12$"),
    ("$50\\%$", "\\boxed{50\\%}"),
    ("$5$", "</think>\\boxed{5 \\text{ cm}}"),
]


def chat(text):
    return [{"role": "assistant", "content": text}]


def stub(name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    module.__path__ = []
    sys.modules[name] = module
    return module


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def open_r1(folder):
    nothing = dict.fromkeys(
        ["SubtaskResult", "add_includes", "get_morph_client_from_env", "get_piston_client_from_env", "patch_code",
         "score_submission", "score_subtask"])
    stub("open_r1"), stub("open_r1.utils")
    stub("open_r1.utils.code_providers", get_provider=None)
    stub("open_r1.utils.competitive_programming", **nothing)
    return load(folder / "src/open_r1/rewards.py", "open_r1.rewards")


def trl(folder):
    stub("trl"), stub("trl.rewards")
    stub("trl.import_utils", is_math_verify_available=lambda: True)
    names = ["accuracy_rewards", "format_rewards", "other_rewards"]
    return [load(folder / f"trl/rewards/{name}.py", f"trl.rewards.{name}") for name in names]


def functions(r1, accuracy, formats, other):
    """Scores of rewards that rest on text or tokens alone, and of those that rest on an answer, by the entry of reward_funcs."""
    completions = [chat(text) for text in TEXTS]
    of_text = {
        "format": r1.format_reward(completions),
        "tag_count": r1.tag_count_reward(completions),
        "reasoning_steps": r1.reasoning_steps_reward(completions),
        "repetition_penalty": r1.get_repetition_penalty_reward(3, -1.0)(completions),
        "code_format": r1.get_code_format_reward("python")(completions),
        "think_format_reward": formats.think_format_reward(completions),
    }
    languages = ["cpp" if "cpp" in text else "python" for text in TEXTS]
    of_text["code_format/language"] = r1.get_code_format_reward("python")(completions, language=languages)
    of_text["repetition_penalty/2"] = r1.get_repetition_penalty_reward(2, -0.5)(completions)
    of_ids = {
        "get_repetition_penalty_reward": other.get_repetition_penalty_reward()(IDS),
        "get_soft_overlong_punishment": other.get_soft_overlong_punishment(100, 30)(IDS),
        "soft_overlong_punishment": r1.get_soft_overlong_punishment(100, 30)(IDS),
        "get_soft_overlong_punishment/0": other.get_soft_overlong_punishment(100, 0)(IDS),
    }
    golds, texts = [gold for gold, _ in ANSWERS], [chat(text) for _, text in ANSWERS]
    ids = [[1] * len(text) for _, text in ANSWERS]
    cosine = r1.get_cosine_scaled_reward(0.0, -0.5, 0.5, 1.0, 100)
    of_answer = {
        "accuracy": r1.accuracy_reward(texts, golds),
        "cosine": cosine(texts, golds),
        "length": r1.len_reward(texts, golds),
        "accuracy_reward": accuracy.accuracy_reward(texts, golds),
        "reasoning_accuracy_reward": accuracy.reasoning_accuracy_reward(texts, golds),
        "get_cosine_scaled_reward": accuracy.get_cosine_scaled_reward(100)(texts, golds, ids),
    }
    return {"texts": TEXTS, "of_text": of_text, "ids": IDS, "of_ids": of_ids, "answers": ANSWERS, "of_answer": of_answer}


def tables(folder):
    """Gold and predicted texts of the library's own tests: the rows of every parametrize with two leading texts."""
    for path in sorted((folder / "tests").glob("test_*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            is_table = isinstance(call.func, ast.Attribute) and call.func.attr == "parametrize"
            names = call.args[0].value if is_table and isinstance(call.args[0], ast.Constant) else ""
            if names.replace(" ", "").startswith("gold,pred"):
                for row in call.args[1].elts:
                    gold, pred = (eval(compile(ast.Expression(cell), path.name, "eval"), {"math": math}) for cell in row.elts[:2])
                    yield [path.name, gold, pred]


def verdict(gold, pred):
    """As the library's own tests compare, boxed answers first; None where the gold text cannot be parsed."""
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    gold = parse(gold, extraction)
    return float(verify(gold, parse(pred, extraction))) if gold else None


NUMBERS = ["0", "5", "-5", "12", "1234", "1,234", "1,234,567", "1234567", "0,123", "123", "1,23", "0.5", "0.50", "-0.5", "12.5",
           "1,234.50", "1234.5", "3/4", "6/8", "-3/4", "0.75", "6/3", "\\frac{3}{4}", "-\\frac{3}{4}", "\\dfrac{6}{8}", "\\tfrac{3}{4}",
           "\\frac{1}{3}", "0.3333333333", "50%", "50\\%", "0.5\\%", "0.005", "12.5\\%", "1/8", "007", "7", "2.0", "2", "-0", "\\$5",
           "$5", "3.", "3", "1e3", "1000", "1 000", "100\\%", "1", "999999999999999", "0.1", "0.100000000000001"]
WRAPPED = ["{}", "${}$", "\\boxed{{{}}}", "\\({}\\)"]
FRAMES = ["so \\boxed{{{}}}", "so $\\boxed{{{}}}$.", "thus $x = \\boxed{{{}}}$ cm", "we get \\[ \\boxed{{{}}} \\]", "\\(\\boxed{{{}}}\\)%",
          "\\boxed{{{}}} percent", "Of 3 and 4 the answer: 7, so \\boxed{{{}}}.", "\\boxed{{{}}}. The final answer is $8$. I hope it is correct.",
          "\\boxed{{ {} }}", "$\\boxed{{{}}}$ and $\\boxed{{8}}$", "\\boxed{{{}}} or \\boxed{{8}}", "\\boxed{{{}}}\n\n and 9}} more",
          "$2 + \\boxed{{{}}}$", "$$a$$ and \\boxed{{{}}} and $$b$$", "<think>so \\boxed{{{}}}</think> done", "<think>so</think> \\boxed{{{}}}"]


def values(number):
    """What a number may be meant as; nearly all pairs without a common value are left out."""
    plain = number.replace(",", "").replace(" ", "").replace("$", "").rstrip("%\\")
    plain = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", plain)
    value = eval(re.sub(r"\b0+(?=[1-9])", "", plain).lstrip("\\"))
    return {value, value / 100, value * 100, float(number.replace(",", ".")) if re.fullmatch(r"\d,\d+", number) else value}


def spellings(rewards):
    """For each reward, the pairs of a gold and a completion that hold equal numbers by its namesake, as their places in the lists."""
    golds = [(number, frame.format(number)) for number in NUMBERS for frame in WRAPPED]
    completions = [(number, frame.format(number)) for number in NUMBERS for frame in FRAMES]
    pairs = [(i, j) for (i, (a, _)), (j, (b, _)) in itertools.product(enumerate(golds), enumerate(completions)) if values(a) & values(b)]
    equal = {}
    for name, reward in rewards.items():
        scores = reward([completions[j][1] for _, j in pairs], [golds[i][1] for i, _ in pairs])
        found = {}
        for (i, j), score in zip(pairs, scores):
            if score == 1.0:
                found.setdefault(i, []).append(j)
        equal[name] = list(found.items())
    return {"golds": [text for _, text in golds], "completions": [text for _, text in completions], "equal": equal}


def comparisons(r1, accuracy):
    """1 for each completion that is right by a reward; other scores for all others."""
    cosine = r1.get_cosine_scaled_reward(0.0, 0.0, 1.0, 1.0)
    latex = [LatexExtractionConfig()]

    def right(texts, golds):  # a gold text without LaTeX has no verdict there
        is_read = [bool(parse(gold, latex, extraction_mode="first_match")) for gold in golds]
        return [score if read else None for score, read in zip(cosine([chat(text) for text in texts], golds), is_read)]

    def chats(reward):
        return lambda texts, golds: reward([chat(text) for text in texts], golds)

    return {
        "math": lambda texts, golds: [verdict(gold, text) for gold, text in zip(golds, texts)],
        "accuracy": chats(r1.accuracy_reward),
        "cosine": right,
        "accuracy_reward": chats(accuracy.accuracy_reward),
        "reasoning_accuracy_reward": chats(accuracy.reasoning_accuracy_reward),
    }


def main(open_r1_folder, trl_folder, math_folder):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    r1, modules = open_r1(pathlib.Path(open_r1_folder)), trl(pathlib.Path(trl_folder))
    golden = functions(r1, *modules)
    golden["math"] = [[*row, verdict(*row[1:])] for row in tables(pathlib.Path(math_folder))]
    golden["spellings"] = spellings(comparisons(r1, modules[0]))
    path = pathlib.Path(__file__).parent.parent / "tests/golden/rewards.json"
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items())
    path.write_text("{\n" + lines + "\n}\n")
    print({key: len(value) for key, value in golden.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
