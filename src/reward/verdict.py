"""Whether an answer is right, as the package math-verify decides: texts are parsed as mathematics, never evaluated as a program.

Each function is a built-in reward's and has its name; open-r1's and TRL's rewards read texts with different settings. The package's
own time limits are off, since they make a slow comparison a wrong answer: the process is killed at its deadline instead.
"""

import functools
import logging
import resource
import warnings

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.parser import get_extraction_regexes

MEMORY_BYTES = 4 << 30  # a tower of powers would take all there is
resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")


def marked(**normalization):
    """LaTeX that is boxed, or follows the word answer."""
    normalization = NormalizationConfig(units=True, **normalization)
    return (LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=normalization),)


ANYTHING = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
DEFAULT = (LatexExtractionConfig(), ExprExtractionConfig())
LATEX = (LatexExtractionConfig(),)
ACCURACY = marked()
COSINE = marked(boxed=True)


def read(text, extraction, mode):
    try:
        return parse(text, extraction_config=extraction, extraction_mode=mode, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return []


@functools.lru_cache(maxsize=256)
def reference(text, *ways):
    """The reference answer, by the first way of reading it that finds something."""
    for extraction, mode in ways:
        if found := read(text, extraction, mode):
            return found
    raise ValueError(f"math-verify cannot parse the reference answer {text!r:.200}")


def are_equal(gold, answer):
    """Whether one reading of the answer is one of the reference. What cannot be compared is not equal."""
    for pair in ((a, b) for a in gold for b in answer):
        try:
            if verify(*pair, timeout_seconds=None, raise_on_error=True):
                return 1.0
        except MemoryError:
            raise
        except Exception:
            pass
    return 0.0


def math(solution_str, ground_truth):
    gold = reference(ground_truth, (ANYTHING, "any_match"))
    return are_equal(gold, read(solution_str, ANYTHING, "any_match"))


def accuracy(solution_str, ground_truth):
    gold = reference(ground_truth, (DEFAULT, "first_match"))
    return are_equal(gold, read(solution_str, ACCURACY, "first_match"))


def cosine(solution_str, ground_truth):
    gold = reference(ground_truth, (LATEX, "first_match"), (DEFAULT, "first_match"))
    return are_equal(gold, read(solution_str, COSINE, "first_match"))


length = cosine


def accuracy_reward(solution_str, ground_truth):
    gold = reference(ground_truth, (DEFAULT, "any_match"))
    return are_equal(gold, read(solution_str, ACCURACY, "first_match"))


get_cosine_scaled_reward = accuracy_reward


def reasoning_accuracy_reward(solution_str, ground_truth):
    reference(ground_truth, (DEFAULT, "any_match"))
    ending = next((ending for ending in REASONING_DELIMITERS if ending in solution_str), None)
    return 0.0 if ending is None else accuracy_reward(solution_str.split(ending)[-1], ground_truth)


def readable(solution_str):
    """Whether there is something to compare with in a reference answer, which is known without parsing it."""
    expressions = (expression for ways, _ in get_extraction_regexes(ANYTHING) for expression, _ in ways)
    return float(any(expression.search(solution_str) for expression in expressions))
