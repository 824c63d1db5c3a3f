"""Exact arithmetic on untrusted text: + - * / and brackets over plain numbers.

Text goes in, a `Fraction` and the numbers used come out. Nothing is executed, nothing recurses,
and both length and time are bounded whatever the text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

MAX_CHARS = 512
"""Longer text is not an expression; also keeps every number below Python's 4300-digit limit."""

SIGNS = str.maketrans("−×÷", "-*/")
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
# `[0-9]`, not `\d`: the latter also takes the digits of every other script.
TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|[-+*/()]")
LEGAL_PAIRS = frozenset({"((", "(n", "n)", "no", "o(", "on", "))", ")o"})
"""Which kind of token may follow which: n a number, o an operator, brackets themselves."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A well-formed expression, evaluated."""

    numbers: tuple[Fraction, ...]
    """Every number written, from left to right."""
    value: Fraction | None
    """None when it divides by zero."""


def evaluate(text: str) -> Arithmetic | None:
    """Evaluate `text`, e.g. `(3 + 5) × 2`; None when it is anything else.

    Operators are binary: there is no sign in front of a number, and no power.
    """
    if len(text) > MAX_CHARS:
        return None
    text = text.translate(SIGNS)
    if TOKEN.sub("", text).strip():
        return None
    tokens = TOKEN.findall(text)
    if not _is_well_formed(tokens):
        return None
    numbers = tuple(Fraction(token) for token in tokens if _kind(token) == "n")
    try:
        return Arithmetic(numbers, _reduce(tokens))
    except ZeroDivisionError:
        return Arithmetic(numbers, None)


def _kind(token: str) -> str:
    if token in PRECEDENCE:
        return "o"
    return token if token in "()" else "n"


def _is_well_formed(tokens: list[str]) -> bool:
    kinds = ["(", *map(_kind, tokens), ")"]
    if not all(a + b in LEGAL_PAIRS for a, b in pairwise(kinds)):
        return False
    depths = list(accumulate({"(": 1, ")": -1}.get(token, 0) for token in tokens))
    return bool(depths) and min(depths) >= 0 and depths[-1] == 0


def _reduce(tokens: list[str]) -> Fraction:
    """Shunting-yard over well-formed tokens; the last bracket closes the outer one."""
    values: list[Fraction] = []
    operators = ["("]
    for token in [*tokens, ")"]:
        kind = _kind(token)
        if kind == "n":
            values.append(Fraction(token))
            continue
        if kind != "(":
            _apply_down_to(PRECEDENCE.get(token, 1), values, operators)
        if kind == ")":
            operators.pop()
        else:
            operators.append(token)
    return values[0]


def _apply_down_to(precedence: int, values: list[Fraction], operators: list[str]) -> None:
    """Apply pending operators that bind at least as tightly; an open bracket stops."""
    while PRECEDENCE.get(operators[-1], 0) >= precedence:
        right, left = values.pop(), values.pop()
        values.append(OPERATIONS[operators.pop()](left, right))
