"""Word problems about things to count: shares, boxes, seats, chances, places in a line."""

from __future__ import annotations

import random
from fractions import Fraction
from math import gcd

from moored.envs.math.word_problems.english import (
    CHILD,
    COLORS,
    PRODUCTS,
    TREATS,
    Noun,
    count,
    listing,
    money,
    ordinal,
    person,
)
from moored.envs.math.word_problems.problem import Number, Problem, Working, plus


def sharing(rng: random.Random, level: int) -> Problem:
    """Share treats equally, after some are eaten or given away."""
    who, treat, work = person(rng), rng.choice(TREATS), Working()
    children, each = rng.randint(2, 5 + level), rng.randint(2, 6 * level)
    if level == 1:
        total = children * each
        story = f"{who.name} shares {total} {treat.many} equally among {children} children."
        ask = f"How many {treat.many} does each child get?"
        return work.problem(f"{story} {ask}", work("Each child gets", total, "/", children))
    if level == 2:
        lost = rng.randint(1, 12)
        total = children * each + lost
        story = f"{who.name} has {total} {treat.many}, loses {lost} of them and shares the rest "
        story += f"equally among {children} children."
        rest = work("The rest", total, "-", lost)
        ask = f"How many {treat.many} does each child get?"
        return work.problem(f"{story} {ask}", work("Each child gets", rest, "/", children))
    bottom, bags = rng.choice((3, 4, 5)), rng.randint(2, 5)
    unit = children * bags // gcd(children, bottom - 1)
    total = bottom * unit * rng.randint(1, 3)
    story = (
        f"{who.name} has {bags} bags of {total // bags} {treat.many}. {who.they.capitalize()} "
        f"gives 1/{bottom} of all of them to a neighbor and shares the rest equally among "
        f"{children} children."
    )
    total = work("In all", bags, "*", total // bags)
    given = work("For the neighbor", total, "/", bottom)
    rest = work("The rest", total, "-", given)
    ask = f"How many {treat.many} does each child get?"
    return work.problem(f"{story} {ask}", work("Each child gets", rest, "/", children))


def fractions(rng: random.Random, level: int) -> Problem:
    """Parts of a group, and parts of the parts."""
    work = Working()
    group = rng.choice(("visitors at a fair", "members of a club", "guests at a party"))
    bottom, second = rng.choice((3, 4, 5, 8)), rng.choice((2, 3, 5))
    top, unit = rng.randint(1, bottom - 1), rng.randint(2, 5 * level)
    total = bottom * second * unit * (2 if level == 3 else 1)
    story = f"{Fraction(top, bottom)} of the {total} {group} are girls or women."
    share = Fraction(top, bottom)
    women = work("Girls and women", total, "*", share.numerator, "/", share.denominator)
    if level == 1:
        others = work("The others", total, "-", women)
        return work.problem(f"{story} How many of them are boys or men?", others)
    story += f" 1/{second} of these play chess."
    players = work("Those of them who play chess", women, "/", second)
    if level == 2:
        return work.problem(f"{story} How many girls and women play chess?", players)
    men = work("Boys and men", total, "-", women)
    story += " Half of the boys and men play chess too."
    half = work("Boys and men who play chess", men, "/ 2")
    return work.problem(
        f"{story} How many of the people there play chess?", work("In all", players, "+", half)
    )


def animals(rng: random.Random, level: int) -> Problem:
    """Heads and legs on a farm."""
    work = Working()
    birds = rng.choice(("chickens", "ducks", "geese", "turkeys"))
    beasts = rng.choice(("cows", "sheep", "pigs", "goats"))
    two, four = rng.randint(3, 15 * level), rng.randint(3, 15 * level)
    if level == 1:
        ask = (
            f"A farmer has {two} {birds} and {four} {beasts}. How many legs do they have together?"
        )
        small = work(f"Legs of the {birds}", two, "* 2")
        large = work(f"Legs of the {beasts}", four, "* 4")
        return work.problem(ask, work("Legs together", small, "+", large))
    heads, legs = two + four, 2 * two + 4 * four
    spiders = rng.randint(2, 9) if level == 3 else 0
    if spiders:
        story = (
            f"In a barn {birds}, {beasts} and {spiders} spiders have {heads + spiders} heads and "
        )
        story += f"{legs + 8 * spiders} legs together. A spider has 8 legs."
        bugs = work("Legs of the spiders", spiders, "* 8")
        legs = work("Legs of the others", legs + 8 * spiders, "-", bugs)
        heads = work("Heads of the others", heads + spiders, "-", spiders)
    else:
        story = f"On a farm {birds} and {beasts} have {heads} heads and {legs} legs together."
    low = work(f"Legs if all were {birds}", heads, "* 2")
    extra = work("Legs above that", legs, "-", low)
    return work.problem(
        f"{story} How many {beasts} are there?", work(beasts.capitalize(), extra, "/ 2")
    )


def marbles(rng: random.Random, level: int) -> Problem:
    """Chances when drawing from a bag."""
    work = Working()
    colors = rng.sample(COLORS, 2 if level == 1 else 3)
    numbers = [rng.randint(2, 3 + 3 * level) for _ in colors]
    marble = Noun("marble", "marbles")
    held = listing([f"{n} {color}" for n, color in zip(numbers, colors, strict=True)])
    story = f"A bag holds {held} {marble.many}."
    total = work("Marbles in all", *plus(numbers))
    lowest = "Give a fraction in lowest terms."
    if level == 1:
        chance = Fraction(numbers[0], int(total))
        work.say(f"{numbers[0]} of {total} are {colors[0]}, which is {chance} in lowest terms.")
        ask = f"You draw one without looking. What is the probability that it is {colors[0]}?"
        return work.problem(f"{story} {ask} {lowest}", str(chance))
    if level == 2:
        others = work(f"Marbles that are not {colors[0]}", total, "-", numbers[0])
        chance = Fraction(int(others), int(total))
        work.say(f"{others} of {total} is {chance} in lowest terms.")
        ask = f"You draw one without looking. What is the probability that it is not {colors[0]}?"
        return work.problem(f"{story} {ask} {lowest}", str(chance))
    ways = work("Ways to draw any two, one after the other", total, "* (", total, "- 1)")
    hits = work(f"Ways to draw two {colors[0]} ones", numbers[0], "* (", numbers[0], "- 1)")
    chance = Fraction(int(hits), int(ways))
    work.say(f"{hits} of {ways} is {chance} in lowest terms.")
    ask = "You draw two without putting the first back. "
    ask += f"What is the probability that both are {colors[0]}?"
    return work.problem(f"{story} {ask} {lowest}", str(chance))


def seats(rng: random.Random, level: int) -> Problem:
    """Rows that grow by a fixed number."""
    work = Working()
    first, more, rows = rng.randint(5, 10 * level), rng.randint(2, 4), rng.randint(4, 6 * level)
    place = rng.choice(("theater", "stadium", "concert hall", "lecture hall"))
    story = (
        f"The first row of a {place} has {first} seats, and every row has {more} seats more than "
    )
    story += "the row in front of it."
    last = work(f"Seats in row {rows}", first, "+ (", rows, "- 1) *", more)
    if level == 1:
        return work.problem(f"{story} How many seats are in the {ordinal(rows)} row?", last)
    total = work("Seats in all", "(", first, "+", last, ") *", rows, "/ 2")
    if level == 2:
        return work.problem(
            f"{story} How many seats do the first {rows} rows have together?", total
        )
    price, empty = rng.randint(5, 20), rng.randint(1, 30)
    taken = work("Seats taken", total, "-", empty)
    ask = (
        f"There are {rows} rows, {count(empty, Noun('seat stays', 'seats stay'))} empty and every "
    )
    ask += f"ticket costs {money(price)}. How many dollars do the tickets bring in?"
    return work.problem(f"{story} {ask}", work("Dollars", taken, "*", price))


def outfits(rng: random.Random, level: int) -> Problem:
    """Count combinations, then pairs."""
    who, work = person(rng), Working()
    numbers = [rng.randint(2, 4 + 2 * level) for _ in range(3)]
    if level == 3:
        total, game = rng.randint(6, 30), rng.choice(("chess", "tennis", "judo", "badminton"))
        girls = rng.randint(3, total - 3)
        story = f"{total} children meet for a {game} day, {girls} of them girls. Everyone has one "
        story += "match against everyone else."
        everything = work("Matches in all", total, "* (", total, "- 1) / 2")
        boys = work("Boys", total, "-", girls)
        inside = work("Matches among girls", girls, "* (", girls, "- 1) / 2")
        outside = work("Matches among boys", boys, "* (", boys, "- 1) / 2")
        mixed = work("Matches of a girl and a boy", everything, "-", inside, "-", outside)
        return work.problem(f"{story} In how many matches does a girl meet a boy?", mixed)
    things = ("shirts", "pairs of trousers", "hats")[: level + 1]
    parts = [f"{n} {thing}" for n, thing in zip(numbers, things, strict=False)]
    story = f"{who.name} has {listing(parts)}."
    terms = numbers[: level + 1]
    ways = work("Outfits", " * ".join(map(str, terms)))
    ask = f"How many different outfits of one of each can {who.they} put together?"
    return work.problem(f"{story} {ask}", ways)


def packing(rng: random.Random, level: int) -> Problem:
    """Full boxes; a last box that is not full; boxes on trucks."""
    product, work = rng.choice(PRODUCTS), Working()
    size, boxes = rng.randint(4, 8 * level), rng.randint(3, 15 * level)
    if level == 1:
        ask = f"{size * boxes} {product.many} are packed into boxes of {size}. "
        ask += rng.choice(("How many boxes are filled?", "How many boxes does that make?"))
        return work.problem(ask, work("Boxes", size * boxes, "/", size))
    left = rng.randint(1, size - 1)
    total = size * boxes + left
    story = f"{total} {product.many} are packed into boxes that hold {size} each."
    needed = _round_up(work, total, size, "boxes")
    if level == 2:
        return work.problem(f"{story} How many boxes are needed for all of them?", needed)
    load = rng.randint(3, 12)
    ask = f"A truck takes {load} boxes at a time. How many trips does it need for all boxes?"
    return work.problem(f"{story} {ask}", _round_up(work, int(needed), load, "trips"))


def _round_up(work: Working, total: int, size: int, units: str) -> Number:
    """How many of `size` hold `total`, with one more for what is left over."""
    full = total // size
    held = work(f"In full {units}", full, "*", size)
    if held == total:
        return full
    work("Left over", total, "-", held)
    return work(f"{units.capitalize()}, with one more for those", full, "+ 1")


def passengers(rng: random.Random, level: int) -> Problem:
    """People get on and off, stop by stop."""
    work = Working()
    ride = rng.choice(("bus", "tram", "ferry", "subway car"))
    aboard: int = rng.randint(8, 20 * level)
    story = f"A {ride} starts with {aboard} passengers."
    for stop in range(1, level + 1):
        off, on = rng.randint(2, aboard - 2), rng.randint(2, 12 * level)
        story += f" At the {ordinal(stop)} stop {off} get off and {on} get on."
        aboard = int(work(f"After stop {stop}", aboard, "-", off, "+", on))
    if level == 3 and aboard % 2 == 0:
        story += f" At the {ordinal(4)} stop half of the passengers get off."
        aboard = int(work("After stop 4", aboard, "/ 2"))
    return work.problem(f"{story} How many passengers are on the {ride} then?", aboard)


def queue(rng: random.Random, level: int) -> Problem:
    """Places in a line, and how long it takes."""
    who, work = person(rng), Working()
    ahead, behind = rng.randint(3, 12 * level), rng.randint(2, 12 * level)
    story = f"In a line {count(ahead, CHILD)} stand in front of {who.name} and {behind} behind "
    story += f"{'her' if who.they == 'she' else 'him'}."
    if level == 1:
        line = work("In the line", ahead, "+", behind, "+ 1")
        return work.problem(
            f"{story} How many children stand in the line, {who.name} included?", line
        )
    desks, each = rng.randint(2, 3), rng.randint(2, 9)
    if level == 2:
        ask = f"Serving a child takes {each} minutes. After how many minutes is everybody served?"
        line = work("In the line", ahead, "+", behind, "+ 1")
        return work.problem(f"{story} {ask}", work("Minutes", line, "*", each))
    rounds = ahead // desks
    ask = f"{desks} desks serve one child each at the same time and take {each} minutes per child. "
    ask += f"After how many minutes is it {who.name}'s turn?"
    rounds, rest = divmod(ahead, desks)
    work("Children served before, in full rounds", rounds, "*", desks)
    if rest:
        work(f"Children served at the same time as {who.name}", ahead, "-", rounds * desks)
    return work.problem(f"{story} {ask}", work("Minutes", rounds, "*", each))
