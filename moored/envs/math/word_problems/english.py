"""Names, nouns and the small rules of English that the problem families share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from moored.envs.math.word_problems.problem import Number, show


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
