"""Which answers a symbolic comparison would choke on, judged by the text alone.

`looks_costly` refuses what no final answer needs: power towers, large exponents, factorials of
large numbers, deep brackets, and prose. It runs in time linear in the text.
"""

from __future__ import annotations

import math
import re
from itertools import accumulate

MAX_POWER = 1000
"""Largest exponent; also largest product of exponents that may stand on top of each other."""
MAX_DEPTH = 12
"""Most brackets inside each other."""

POWER = re.compile(r"\^|\*\*")
EXPONENT = re.compile(r"\s*(?:(?P<open>[{(])|[-+]?(?:[0-9.]+|\\?[a-zA-Z]+|.))", re.DOTALL)
NUMBER = re.compile(r"[0-9]+")
# After anything except a number of up to two digits: (10^3)!, 1000!, 9!!.
FACTORIAL = re.compile(r"(?:[0-9]{3}|[^\s0-9])\s*!")
# Words are not mathematics; \sqrt and its like are.
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4}")
OPENING, CLOSING = "({[", ")}]"


def looks_costly(text: str) -> bool:
    """True when comparing this answer may take long, or is useless."""
    steps = accumulate((char in OPENING) - (char in CLOSING) for char in text)
    if max(steps, default=0) > MAX_DEPTH:
        return True
    return bool(FACTORIAL.search(text) or WORD.search(text)) or _has_large_power(text)


def _has_large_power(text: str) -> bool:
    """True for towers such as `9^{9^9}`, and for `((9^99)^99)^99`."""
    plain, stacked = [1], [1]
    for power in POWER.finditer(text):
        exponent = _exponent_after(text, power.end())
        following = text[power.end() + len(exponent) :].lstrip()
        if POWER.search(exponent) or POWER.match(following):
            return True
        sizes = [int(digits) for digits in NUMBER.findall(exponent)]
        is_on_bracket = text[: power.start()].rstrip().endswith(tuple(CLOSING))
        (stacked if is_on_bracket else plain).append(max(sizes, default=1))
    return math.prod(stacked) * max(plain) > MAX_POWER


def _exponent_after(text: str, start: int) -> str:
    """The exponent that begins at `start`: a bracket and all in it, or one number or name."""
    match = EXPONENT.match(text, start)
    if match is None:
        return ""
    if match["open"] is None:
        return match[0]
    depth = 0
    for position in range(match.end() - 1, len(text)):
        depth += (text[position] in OPENING) - (text[position] in CLOSING)
        if depth == 0:
            return text[start : position + 1]
    return text[start:]
