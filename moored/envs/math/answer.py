r"""Whether two short mathematical answers say the same thing.

`same_answer` reads both as exact numbers where it can (commas, currency, percent signs, units,
`\boxed{}`, `\frac{a}{b}`, mixed numbers) and compares them as text otherwise. It takes any text,
in time linear in its length.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 1000
"""Longer answers equal nothing; also keeps every number below Python's 4300-digit limit."""

SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "÷": "/", "⁄": "/", "°": r"^\circ"})
LEAD_IN = re.compile(r"answer\s+is\s*:?|answer\s*:|####", re.IGNORECASE)
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
LATEX = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\{,\}|\\[,!](?=[0-9]{3})", ","),
        (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", " degrees"),
        (r"\\(?:cdot|times)(?![a-zA-Z])", "*"),
        (r"\\([%$])", r"\1"),
        (r"\\[,;:!()\[\] ]|[$`]", " "),
    )
)
ASSIGNMENT = re.compile(r"\s*[a-zA-Z]\s*=(.*)", re.DOTALL)

# `[0-9]`, not `\d`: the latter also takes the digits of every other script.
INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
FRACTION = re.compile(rf"([0-9]?)\s*\\frac\s*\{{\s*(-?{DECIMAL})\s*\}}\s*\{{\s*({DECIMAL})\s*\}}")
NUMBER = re.compile(
    rf"([-+]?)\s*[€£¥₹]?\s*(?:({INTEGER})\s+(?={INTEGER}\s*/))?(-?{DECIMAL})(?:\s*/\s*({DECIMAL}))?"
)
UNIT_WORD = re.compile(r"(?:[a-z]{2,}|[ghlms])(?:\^?\{?[23]\}?|[²³])?")
NOT_UNITS = re.compile(
    r"pi|sqrt|log|ln|sin|cos|tan|mod|or|and|plus|minus|times|over|squared|cubed|factorial|choose|"
    r"dozens?|half|halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?|"
    r"(?:hundred|thousand|million|billion|trillion)(?:th)?s?"
)
"""Words after a number that change its value. Quarters may be coins, seconds may be time and first
may be a grade, so these are units."""


def same_answer(given: str, expected: str) -> bool:
    """True when the answers are equal numbers or, failing that, the same text.

    Units, currency signs and % are dropped, not converted: 50% equals 50, not 0.5.
    """
    given, expected = bare_answer(given), bare_answer(expected)
    numbers = read_number(given), read_number(expected)
    if numbers != (None, None):
        return numbers[0] == numbers[1]
    return given != "" and _text_form(given) == _text_form(expected)


def bare_answer(text: str) -> str:
    r"""The answer without "The answer is:", `\boxed{}`, `x =` and LaTeX dressing."""
    if len(text) > MAX_CHARS:
        return ""
    text = LEAD_IN.split(text.translate(SIGNS))[-1]
    text = _unbox(text)
    for pattern, replacement in LATEX:
        text = pattern.sub(replacement, text)
    if assignment := ASSIGNMENT.fullmatch(text):
        text = assignment[1]
    return " ".join(text.split()).strip("* ").removesuffix(".").rstrip()


def read_number(text: str) -> Fraction | None:
    """The exact value of a bare answer that is one number, with or without a unit; else None."""
    text = FRACTION.sub(r"\1 \2/\3", text.lower()).strip()
    match = NUMBER.match(text)
    if match is None or not _is_unit(text[match.end() :]):
        return None
    sign, whole, top, bottom = match.groups()
    if top.startswith("-") and (sign or whole):
        return None
    denominator = _fraction(bottom) if bottom else Fraction(1)
    if denominator == 0:
        return None
    value = (_fraction(whole) if whole else 0) + _fraction(top) / denominator
    return -value if sign == "-" else value


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _is_unit(text: str) -> bool:
    """True for what may follow a number: nothing, %, €, or words like `km/h` and `square feet`."""
    words = re.split(r"[\s/.-]+", text.strip().lstrip("%€£¥₹¢").strip())
    if words == [""]:
        return True
    # `5m` may be five times m; `5 m` is a length.
    if len(words[0]) == 1 and not text.startswith((" ", "/")):
        return False
    return all(
        UNIT_WORD.fullmatch(word) and not NOT_UNITS.fullmatch(word) for word in words if word
    )


def _unbox(text: str) -> str:
    """What the last box holds; the text itself when there is none or it never closes."""
    inside = BOX.split(text)[-1]
    if inside == text:
        return text
    depth = 1
    for position, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return inside[:position]
    return text


def _text_form(text: str) -> str:
    """Lower case, no white space, no thousands commas."""
    text = "".join(text.lower().split())
    return re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
