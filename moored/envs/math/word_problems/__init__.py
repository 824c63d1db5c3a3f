"""An endless supply of word problems: a family is a function `(rng, level) -> Problem`."""

from __future__ import annotations

import random
from collections.abc import Callable

from moored.envs.math.word_problems import money, rates, things
from moored.envs.math.word_problems.english import Problem

Family = Callable[[random.Random, int], Problem]

LEVELS = (1, 2, 3)
"""1: one or two steps, small numbers; 3: up to six steps, larger numbers, percent and fractions."""

FAMILIES: tuple[Family, ...] = (
    money.shopping,
    money.savings,
    money.discount,
    money.interest,
    money.coins,
    money.wages,
    money.profit,
    money.tickets,
    money.shares,
    money.dinner,
    money.tariff,
    rates.travel,
    rates.meeting,
    rates.machines,
    rates.workers,
    rates.tank,
    rates.reading,
    rates.recipe,
    rates.growth,
    rates.fuel,
    rates.timetable,
    things.ages,
    things.garden,
    things.average,
    things.consecutive,
    things.riddle,
    things.signals,
    things.ribbons,
    things.sharing,
    things.fractions,
    things.animals,
    things.marbles,
    things.seats,
    things.outfits,
    things.packing,
    things.passengers,
    things.queue,
)


def make_problem(rng: random.Random, levels: tuple[int, int] = (1, 3)) -> Problem:
    """Draw a level from the range, a family, and a problem."""
    level = rng.randint(*levels)
    return rng.choice(FAMILIES)(rng, level)
