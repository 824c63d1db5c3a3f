"""Families of generated problems: what to compute, from what, and the Python that does it.

A family has parameters (`{a}`, `{b}`, …) and so stands for many problems. Its code computes the
expected outputs, and is the oracle's program.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

Values = dict[str, object]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a problem is given."""

    argument: str
    """Its name, several with commas."""
    words: str
    """In words, for a function."""
    line: str
    """In words, for a line of standard input."""
    read: str
    """Code that reads it."""
    draw: Callable[[random.Random], list]
    """Arguments of one test."""
    write: Callable[[list], str]
    """The same as a line of input."""


def draw_text(alphabet: str, low: int = 1, high: int = 20) -> Callable[[random.Random], list]:
    """A draw of one text."""
    return lambda rng: ["".join(rng.choices(alphabet, k=rng.randint(low, high)))]


def _draw_ints(low: int, high: int, max_count: int = 12) -> Callable[[random.Random], list]:
    return lambda rng: [[rng.randint(low, high) for _ in range(rng.randint(2, max_count))]]


def _draw_words(rng: random.Random) -> list:
    words = [draw_text("abc", 1, 6)(rng)[0] for _ in range(rng.randint(2, 8))]
    return [words + rng.choices(words, k=2)]


def _join(arguments: list) -> str:
    return " ".join(map(str, arguments[0]))


INT = Shape(
    "n", "an integer n", "an integer n", "n = int(input())",
    lambda rng: [rng.choice((rng.randint(1, 9), rng.randint(10, 200)))], lambda x: str(x[0]),
)  # fmt: skip
PAIR = Shape(
    "a, b", "two integers a and b", "two integers a and b, separated by a space",
    "a, b = map(int, input().split())",
    lambda rng: [rng.randint(-50, 50), rng.randint(-50, 50)], lambda x: f"{x[0]} {x[1]}",
)  # fmt: skip
INTS = Shape(
    "numbers", "a list of integers", "integers separated by spaces",
    "numbers = list(map(int, input().split()))", _draw_ints(-50, 50), _join,
)  # fmt: skip
SMALL_INTS = Shape(
    "numbers", "a list of positive integers", "positive integers separated by spaces",
    "numbers = list(map(int, input().split()))", _draw_ints(1, 20), _join,
)  # fmt: skip
TEXT = Shape(
    "text", "a text of lower-case letters", "a text of lower-case letters", "text = input()",
    draw_text("abcde"), lambda x: x[0],
)  # fmt: skip
BRACKETS = Shape(
    "text", "a text of round brackets", "a text of round brackets", "text = input()",
    draw_text("()", 2, 16), lambda x: x[0],
)  # fmt: skip
WORDS = Shape(
    "words", "a list of words", "words separated by spaces", "words = input().split()",
    _draw_words, _join,
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Problems that differ in their parameters."""

    name: str
    level: int
    shape: Shape
    what: str
    """What to compute, completing "print …" and "return …"."""
    code: str
    """An expression, or the body of a function."""
    plan: str
    """How the code does it, in a few words."""
    parameters: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Each parameter's possible values."""


def _range(low: int, high: int) -> tuple[object, ...]:
    return tuple(range(low, high + 1))


LETTERS = tuple("abcde")
MARKS = tuple("-+*/_.")

FAMILIES = (
    Family("linear", 1, PAIR, "{a} times a plus {b} times b", "{a} * a + {b} * b",
           "multiply a by {a} and b by {b}, then add",
           {"a": _range(2, 20), "b": _range(2, 20)}),
    Family("square", 1, INT, "{a} times the square of n, minus {b}", "{a} * n * n - {b}",
           "square n, times {a}, take {b} away",
           {"a": _range(2, 12), "b": _range(1, 20)}),
    Family("scaled_sum", 1, INTS, "{a} times the sum of the numbers, plus {b}",
           "{a} * sum(numbers) + {b}",
           "sum the numbers, times {a}, plus {b}",
           {"a": _range(2, 12), "b": _range(1, 20)}),
    Family("spread", 1, INTS, "the largest number minus {a} times the smallest",
           "max(numbers) - {a} * min(numbers)",
           "take {a} times the min from the max",
           {"a": _range(2, 30)}),
    Family("repeat", 1, TEXT, "the text {a} times, with '{m}' between the copies",
           "'{m}'.join([text] * {a})",
           "a list of {a} copies, joined by '{m}'",
           {"a": _range(2, 9), "m": MARKS}),
    Family("count_letter", 1, TEXT, "{a} times the number of letters '{c}' in the text",
           "{a} * text.count('{c}')",
           "count '{c}' in the text, times {a}",
           {"a": _range(2, 9), "c": LETTERS}),
    Family("power", 1, INT, "the remainder of n to the power of {a} divided by {b}",
           "n ** {a} % {b}",
           "n ** {a}, then % {b}",
           {"a": _range(2, 3), "b": _range(41, 80)}),
    Family("every_other", 1, TEXT, "every character whose index, counted from 0, leaves the "
           "remainder {b} when divided by {a}", "text[{b}::{a}]",
           "a slice from {b} in steps of {a}",
           {"a": _range(3, 6), "b": _range(0, 2)}),
    Family("multiples", 2, INTS, "the sum of the numbers that are divisible by {a}, plus {b}",
           "sum(x for x in numbers if x % {a} == 0) + {b}",
           "keep each x with x % {a} == 0, sum them, plus {b}",
           {"a": _range(2, 7), "b": _range(1, 9)}),
    Family("between", 2, INTS, "how many of the numbers are greater than {a} and less than {b}",
           "sum({a} < x < {b} for x in numbers)",
           "count each x with {a} < x < {b}",
           {"a": _range(-40, -5), "b": _range(5, 40)}),
    Family("smallest", 2, INTS, "the {a} smallest numbers in ascending order, or all if there are "
           "fewer, each plus {b}", "[x + {b} for x in sorted(numbers)[:{a}]]",
           "sort, keep the first {a}, add {b} to each",
           {"a": _range(2, 6), "b": _range(1, 20)}),
    Family("rotate", 2, INTS, "the numbers, each moved {a} places to the left; those that leave at "
           "the front come back at the end",
           "numbers[{a} % len(numbers):] + numbers[:{a} % len(numbers)]",
           "cut after {a} % len(numbers), put the front at the end",
           {"a": _range(1, 30)}),
    Family("caesar", 2, TEXT, "the text with each letter replaced by the one {a} places later in "
           "the alphabet; after z comes a",
           "''.join(chr((ord(c) - 97 + {a}) % 26 + 97) for c in text)",
           "shift each letter by {a} modulo 26, join",
           {"a": _range(1, 25)}),
    Family("digits", 2, INT, "the sum of the digits of n written in base {a}, plus {b}",
           "total = {b}\nwhile n:\n    total += n % {a}\n    n //= {a}\nreturn total",
           "start at {b}; add n % {a} and divide n by {a} until it is 0",
           {"a": _range(2, 16), "b": _range(0, 5)}),
    Family("long_words", 2, WORDS, "the words of at least {a} letters in their order, joined by "
           "'{m}'", "'{m}'.join(w for w in words if len(w) >= {a})",
           "keep words with len >= {a}, join by '{m}'",
           {"a": _range(2, 5), "m": MARKS}),
    Family("window", 2, INTS, "the largest sum of {a} neighbouring numbers, or {b} if there are "
           "fewer than {a} numbers",
           "max((sum(numbers[i:i + {a}]) for i in range(len(numbers) - {a} + 1)), default={b})",
           "sum each {a} neighbours, take the max, {b} if there is none",
           {"a": _range(2, 4), "b": _range(0, 9)}),
    Family("differences", 2, INTS, "each number minus the one {a} places before it (none for the "
           "first {a} numbers), times {b}",
           "[{b} * (y - x) for x, y in zip(numbers, numbers[{a}:])]",
           "zip the numbers with those {a} places on, subtract, times {b}",
           {"a": _range(1, 3), "b": _range(2, 9)}),
    Family("runs", 2, TEXT, "how many times at least {a} equal letters stand in a row, times {b} "
           "(a longer row counts once)",
           "import itertools\nruns = [len(list(g)) for _, g in itertools.groupby(text)]\n"
           "return {b} * sum(length >= {a} for length in runs)",
           "group equal letters, count groups with length >= {a}, times {b}",
           {"a": _range(1, 2), "b": _range(2, 20)}),
    Family("first_seen", 2, SMALL_INTS, "the numbers without repetitions, in the order of their "
           "first occurrence, each times {a}", "[{a} * x for x in dict.fromkeys(numbers)]",
           "dict.fromkeys keeps the first of each, times {a}",
           {"a": _range(2, 30)}),
    Family("pairs", 3, SMALL_INTS, "how many pairs of positions hold numbers whose sum is at least "
           "{a}", "sum(x + y >= {a} for i, x in enumerate(numbers) for y in numbers[:i])",
           "add each number to those before it, count sums >= {a}",
           {"a": _range(8, 36)}),
    Family("primes", 3, INT, "how many primes up to n leave the remainder {b} when divided by {a}",
           "def is_prime(p):\n    return p > 1 and all(p % d for d in range(2, p))\n"
           "return sum(is_prime(p) and p % {a} == {b} for p in range(n + 1))",
           "try each p up to n, count primes with p % {a} == {b}",
           {"a": (3, 5, 7, 9, 11), "b": _range(1, 2)}),
    Family("coins", 3, INT, "in how many ways n can be paid with coins of 1, {a} and {b}; the "
           "order of the coins does not count",
           "ways = [1] + [0] * n\nfor coin in (1, {a}, {b}):\n    for i in range(coin, n + 1):\n"
           "        ways[i] += ways[i - coin]\nreturn ways[n]",
           "a table of ways from 0 to n, filled for 1, then {a}, then {b}",
           {"a": _range(2, 6), "b": _range(7, 15)}),
    Family("recurrence", 3, INT, "f(n) modulo 1000, where f(0) = {a}, f(1) = {b} and f(n) = f(n-1) "
           "+ {c} * f(n-2)",
           "x, y = {a}, {b}\nfor _ in range(n):\n    x, y = y, (y + {c} * x) % 1000\nreturn x",
           "keep two values, first {a} and {b}; n times take y + {c} * x modulo 1000",
           {"a": _range(0, 5), "b": _range(1, 5), "c": _range(1, 6)}),
    Family("depth", 3, BRACKETS, "how often the depth is {a} after a bracket, times {b}; the depth "
           "starts at 0, '(' adds 1 to it and ')' takes 1 away",
           "depth = count = 0\nfor c in text:\n    depth += 1 if c == '(' else -1\n"
           "    count += depth == {a}\nreturn {b} * count",
           "follow the depth along the brackets, count where it is {a}, times {b}",
           {"a": _range(-2, 2), "b": _range(2, 9)}),
    Family("steady", 3, SMALL_INTS, "the length of the longest stretch of numbers in which "
           "neighbours differ by at most {a}",
           "best = length = 1\nfor x, y in zip(numbers, numbers[1:]):\n"
           "    length = length + 1 if abs(x - y) <= {a} else 1\n    best = max(best, length)\n"
           "return best",
           "grow a length while neighbours differ by at most {a}, else begin at 1; keep the best",
           {"a": _range(2, 14)}),
    Family("anagrams", 3, WORDS, "how many pairs of positions hold words of at least {a} letters "
           "that consist of the same letters, times {b}",
           "keys = [sorted(w) for w in words if len(w) >= {a}]\n"
           "return {b} * sum(x == y for i, x in enumerate(keys) for y in keys[:i])",
           "sort the letters of words with len >= {a}, count equal pairs, times {b}",
           {"a": _range(1, 3), "b": _range(2, 9)}),
    Family("circle", 3, INT, "the number of the last person left when n people, numbered from 1, "
           "stand in a circle and every {a}th is sent away, beginning to count at person 1",
           "last = 0\nfor size in range(1, n + 1):\n    last = (last + {a}) % size\n"
           "return last + 1",
           "for circles of 1 to n: last = (last + {a}) % size; then plus 1",
           {"a": _range(4, 20)}),
    Family("subset", 3, SMALL_INTS, "the largest sum of some of the numbers, each used at most "
           "once, that is not greater than {a}",
           "sums = {{0}}\nfor x in numbers:\n    sums |= {{s + x for s in sums if s + x <= {a}}}\n"
           "return max(sums)",
           "a set of the sums up to {a}, grown by each number; take the max",
           {"a": _range(10, 60)}),
)  # fmt: skip
LEVELS = tuple(sorted({family.level for family in FAMILIES}))
