#!/usr/bin/env python3
"""Golden verdicts on numbers in many spellings for `numeric_answer`, made by the readers of TRL and verl.

    pip install math-verify==0.9.0
    pip download --no-deps verl==0.5.0                  # unpacked into a folder
    python scripts/golden_answers.py VERL               # the folder; writes tests/golden/answers.json

Each case is a reference, a completion, the verdict of math-verify as TRL's `accuracy_reward` calls it, that of verl (1 where `math` or
`math_dapo` accepts) and what is right: all spellings of FORMS are their number, and none of WRONG is any.
"""
import importlib.util
import json
import logging
import pathlib
import sys
import warnings

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

FORMS = {
 "5":["5","5.","5.0","05","+5","\\,5","{5}","(5)","5\\text{ cm}","5 \\text{ cm}","5\\text{ cm}^2","5 \\text{ cm}^{2}","5\\mbox{ inches}","5\\mathrm{ km}","5 cm","5 dollars","5 degrees","5^\\circ","5^{\\circ}","\\$5","5\\$","\\text{5}","\\textbf{5}","\\mathbf{5}","x=5","x = 5","x=5\\text{ cm}","\\left(5\\right)","10/2","\\frac{10}{2}","5\\%","5 \\%","5%","5 points","5 units","5\\ \\text{hours}","5 hours","\\text{5 cm}","f(2)=5","n=5","x_1=5","5\\!","\\displaystyle 5","5 square units","5\\text{ square units}","$5$"],
 "-5":["-5","\u22125","\u20135","- 5","-5.0","x=-5","-\\frac{10}{2}","\\frac{-10}{2}","-5\\text{ cm}","-5^\\circ","-\\$5"],
 "\\frac{1}{2}":["\\frac12","\\frac{1}{2}","\\dfrac{1}{2}","\\tfrac12","\\dfrac12","\\frac1{2}","\\frac{1}2","1/2","0.5",".5","\\frac{ 1 }{ 2 }","\\frac {1}{2}","\\frac{1}{2}\\text{ cm}","x=\\frac12","\\frac{-1}{-2}","\\frac{0.5}{1}","\\frac{\\frac{1}{1}}{2}","\\cfrac{1}{2}","\\left(\\frac12\\right)","\\text{ }\\frac12","2/4","\\frac{2}{4}"],
 "-\\frac{1}{2}":["\\frac{-1}{2}","-\\frac{1}{2}","-\\frac12","\\frac{1}{-2}","-1/2","-0.5","-.5","\u2212\\frac{1}{2}","\u20131/2","-\\dfrac{1}{2}","x=-\\frac12"],
 "\\frac{1}{6}":["\\frac{\\frac{1}{2}}{3}","\\frac{1}{\\frac{6}{1}}","\\frac{\\frac12}{3}","\\frac16","1/6","\\frac{2}{12}"],
 "\\frac{3}{2}":["1\\frac{1}{2}","1\\frac12","1 \\frac{1}{2}","1 1/2","1\\dfrac{1}{2}","1.5","3/2","\\frac32","\\frac{3}{2}","x=\\frac{3}{2}","1\\ \\frac{1}{2}"],
 "-\\frac{3}{2}":["-1\\frac{1}{2}","-1\\frac12","-1 1/2","-1.5","-\\frac32","\\frac{-3}{2}"],
 "1234":["1,234","1{,}234","1\\,234","1,\\!234","1234","1234.0","1,234.00","\\$1,234","1,234\\text{ dollars}","1,234 dollars","1.234e3","x=1,234"],
 "1234567":["1,234,567","1\\,234\\,567","1{,}234{,}567","1,\\!234,\\!567","1234567"],
 "0":["0","-0","0.0","\\frac{0}{3}","0\\text{ cm}","x=0"],
 "90":["90^\\circ","90^{\\circ}","90\\degree","90°","90 degrees","90\\text{ degrees}","90\\text{ deg}","\\angle A=90"],
}
WRONG = ["6","\\frac{1}{3}","x","\\frac{1}{0}","2\\frac{1}{2}","5,67","\\text{five}","","\\pi","\\sqrt{2}"]
FRAMES = ["so \\boxed{%s}","\\boxed {%s}.","$\\boxed{%s}$","\\fbox{%s}","\\boxed{3} then \\boxed{%s}"]
EXTRA = [
    ("5", "$\\boxed 5$", True), ("5", "it is $\\boxed 5$ then", True), ("3", "\\boxed{4} or \\boxed{3}", True), ("7", "\\boxed{\\boxed{7}}", True),
    ("3", "\\boxed{3} then \\boxed{\\frac{\\frac{1}{2}}{3}}", False), ("3", "\\boxed{3} then \\boxed{\\frac{1}{2}", False),
    ("3", "\\boxed{3} or \\boxed{x}", False), ("7", "\\boxed{\\text{so }7}", False),
]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem + "_of_verl", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_trl(gold, text):
    marked = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False,
                                   normalization_config=NormalizationConfig(units=True))
    return float(verify(parse(gold), parse(text, extraction_config=[marked], extraction_mode="first_match")))


def of_verl(math, dapo, gold, text):
    boxed = dapo.last_boxed_only_string(text)
    try:
        by_dapo = boxed is not None and dapo.normalize_final_answer(dapo.remove_boxed(boxed)) == dapo.normalize_final_answer(gold)
    except Exception:  # an assertion that the text is a box
        by_dapo = False
    return max(float(math.compute_score(text, gold)), float(by_dapo))


def main(folder):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    math, dapo = (load(pathlib.Path(folder) / f"verl/utils/reward_score/{name}.py") for name in ("math", "math_dapo"))
    cases = {}
    for gold, forms in FORMS.items():
        for place, form in enumerate(forms):
            for frame in FRAMES if place < 3 else FRAMES[:3:2]:
                cases[gold, frame % form] = True
        cases.update({(gold, FRAMES[0] % wrong): False for wrong in WRONG})
    cases.update({(gold, text): right for gold, text, right in EXTRA})
    rows = [[gold, text, of_trl(gold, text), of_verl(math, dapo, gold, text), right] for (gold, text), right in cases.items()]
    path = pathlib.Path(__file__).parent.parent / "tests/golden/answers.json"
    made_by = "scripts/golden_answers.py, math-verify 0.9.0, verl 0.5.0"
    path.write_text(json.dumps({"made_by": made_by, "cases": rows}).replace("], [", "],\n["))
    counts = {name: sum(row[at] == 1 for row in rows) for at, name in ((2, "TRL"), (3, "verl"), (4, "right"))}
    print(len(rows), counts, "accepted by either:", sum(max(row[2:4]) == 1 for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
