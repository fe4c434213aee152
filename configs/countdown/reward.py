"""The reward of the Countdown game, with TRL's signature: 1 for a right equation in the right form, else 0.

An equation is read by the grammar below and never evaluated as Python.

    sum = product (("+" | "-") product)*      product = factor (("*" | "/") factor)*      factor = number | "(" sum ")"
"""
import re
from fractions import Fraction

FORM = re.compile(r"<think>[^<>]*</think>\s*<answer>([^<>]{1,200})</answer>\s*")
TOKEN = re.compile(r"[0-9]{1,9}|[-+*/()]")


class Equation:
    """Reads one expression from left to right; keeps the numbers that it uses. Raises ValueError or ZeroDivisionError."""

    def __init__(self, text):
        self.tokens = TOKEN.findall(text)
        self.numbers = []
        if "".join(self.tokens) != "".join(text.split()):
            raise ValueError("a character that no expression has")
        self.tokens.reverse()  # the next one is the last of the list
        self.value = self.sum()
        if self.tokens:
            raise ValueError("more behind the expression")

    def next_is(self, operators):
        return bool(self.tokens) and self.tokens[-1] in operators

    def sum(self):
        value = self.product()
        while self.next_is("+-"):
            value = value + self.product() if self.tokens.pop() == "+" else value - self.product()
        return value

    def product(self):
        value = self.factor()
        while self.next_is("*/"):
            value = value * self.factor() if self.tokens.pop() == "*" else value / self.factor()
        return value

    def factor(self):
        token = self.tokens.pop() if self.tokens else ""
        if token == "(":
            value = self.sum()
            if not self.next_is(")"):
                raise ValueError("a bracket is open")
            self.tokens.pop()
            return value
        if not token.isdigit():
            raise ValueError("a number is missing")
        self.numbers.append(int(token))
        return Fraction(int(token))


def solves(completion, numbers, target):
    """Whether the completion thinks, then answers with an equation that uses every number once and gives the target."""
    form = FORM.fullmatch(completion)
    if not form:
        return False
    try:
        equation = Equation(form[1])
    except (ValueError, ZeroDivisionError):
        return False
    return sorted(equation.numbers) == sorted(numbers) and equation.value == target


def countdown(completions, numbers, target, **columns):
    """1 for every completion that solves its problem."""
    texts = (completion[0]["content"] for completion in completions)
    return [float(solves(*problem)) for problem in zip(texts, numbers, target)]
