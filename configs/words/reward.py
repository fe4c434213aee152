"""The reward of the word problems, with TRL's signature: 1 where the last number of a completion is the answer, else 0."""
import re

NUMBER = re.compile(r"-?[0-9]+")


def solved(text, answer):
    """Whether the last number is the answer."""
    numbers = NUMBER.findall(text)
    return bool(numbers) and numbers[-1] == str(answer)


def words(completions, answer, **columns):
    """1 for every completion that gives its problem's answer."""
    return [float(solved(completion[0]["content"], right)) for completion, right in zip(completions, answer)]
