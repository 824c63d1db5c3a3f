"""A word problem and its working; names, nouns and the small rules of English that stories share.

`Working` evaluates the very text it shows, so a solution cannot say one thing and mean another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

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


class Person(NamedTuple):
    """A name and its pronouns: she asked her friend to meet her."""

    name: str
    they: str
    their: str


class Noun(NamedTuple):
    """Singular and plural."""

    one: str
    many: str


def _nouns(words: str) -> tuple[Noun, ...]:
    """Read `apple, box/boxes`: the plural ends in s unless it is given."""
    pairs = (word.strip().partition("/") for word in words.split(","))
    return tuple(Noun(one, many or f"{one}s") for one, _, many in pairs)


PEOPLE = tuple(
    Person(name, they, their)
    for they, their, names in (
        ("she", "her", "Ada Amara Beth Chloe Elena Fatima Grace Hana Ines Julia Keiko Lena Mia"),
        ("he", "his", "Adam Ben Carlos David Emil Felix Hugo Ivan Jamal Kenji Liam Marco Noah"),
    )
    for name in names.split()
)
WARES = _nouns(
    "pencil, notebook, ruler, mug, candle, postcard, scarf/scarves, brush/brushes, plant, basket, "
    "book, puzzle, toy car, key ring, sandwich/sandwiches, muffin, paint box/paint boxes, kite"
)
TREATS = _nouns(
    "cookie, sticker, marble, walnut, cherry/cherries, strawberry/strawberries, toffee, shell, "
    "trading card, plum, bead, peach/peaches"
)
PRODUCTS = _nouns("bottle, chair, toy, bolt, lamp, shirt, cup, bicycle bell, clock, brush/brushes")
TREASURES = _nouns("bicycle, guitar, tent, camera, skateboard, telescope, drum kit, violin, kayak")
CLOTHES = _nouns("coat, jacket, sweater, dress/dresses, hat, pair of boots/pairs of boots, bag")
VEHICLES = ("train", "bus", "truck", "car", "van", "coach")
COLORS = ("red", "blue", "green", "yellow", "white", "black")
TOWNS = ("Ashford", "Brookdale", "Clayton", "Dunmore", "Easton", "Fairview", "Greenhill", "Hartley")
HOUR, MINUTE, DAY, WEEK, YEAR, PERSON, CHILD = _nouns(
    "hour, minute, day, week, year, person/people, child/children"
)


def count(number: Number, noun: Noun) -> str:
    """`1 apple`, `3 apples`."""
    return f"{show(number)} {noun.one if number == 1 else noun.many}"


def listing(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def money(dollars: Number) -> str:
    """`$3`, `$3.50`."""
    if Fraction(dollars).denominator == 1:
        return f"${dollars}"
    return f"${float(dollars):.2f}"


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `11th`, `23rd`."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def clock(minutes: int) -> str:
    """Minutes after midnight as `9:05 a.m.`."""
    hour, minute = divmod(minutes, 60)
    return f"{(hour - 1) % 12 + 1}:{minute:02d} {'a.m.' if hour < 12 else 'p.m.'}"


def people(rng: random.Random, number: int) -> list[Person]:
    """Different persons."""
    return rng.sample(PEOPLE, number)


def person(rng: random.Random) -> Person:
    return rng.choice(PEOPLE)
