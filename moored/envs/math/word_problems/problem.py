"""A word problem, and the working that solves it.

`Working` evaluates the very text it shows, so a solution cannot say one thing and mean another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from moored.envs.arithmetic import evaluate

Number = int | Fraction


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its exact answer, and a worked solution."""

    question: str
    answer: str
    solution: str
    """One step per line; the last line is "The answer is: …", as in MetaMathQA rows."""


class Working:
    """Solution steps, each computed from what it says: `work("Cost", 3, "*", price)`."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __call__(self, label: str, *terms: Number | str) -> Number:
        """Write one step and return its value, an int where it is whole."""
        text = " ".join(t if isinstance(t, str) else _operand(t) for t in terms)
        text = text.replace("( ", "(").replace(" )", ")")
        result = evaluate(text)
        assert result is not None and result.value is not None, text
        self._lines.append(f"{label}: {text} = {show(result.value)}.")
        return int(result.value) if result.value.denominator == 1 else result.value

    def say(self, line: str) -> None:
        """Write a line that computes nothing."""
        self._lines.append(line)

    def problem(self, question: str, answer: Number | str) -> Problem:
        """Close the solution with its answer."""
        text = answer if isinstance(answer, str) else show(answer)
        solution = "\n".join([*self._lines, f"The answer is: {text}"])
        return Problem(question, text, solution)


def plus(numbers: Sequence[Number]) -> list[Number | str]:
    """Terms of a sum, for `Working`."""
    terms: list[Number | str] = [numbers[0]]
    for number in numbers[1:]:
        terms += ["+", number]
    return terms


def show(number: Number) -> str:
    """A whole number, a decimal of at most four places, or a fraction in lowest terms."""
    scaled = Fraction(number) * 10_000
    if scaled.denominator != 1:
        return str(Fraction(number))
    whole, places = divmod(abs(int(scaled)), 10_000)
    digits = f"{whole}.{places:04d}".rstrip("0").rstrip(".")
    return f"-{digits}" if scaled < 0 else digits


def _operand(number: Number) -> str:
    text = show(number)
    return f"({text})" if "/" in text else text
