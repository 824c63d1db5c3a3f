"""Word problems about numbers: ages, averages, areas, riddles, multiples and divisors."""

from __future__ import annotations

import random
from math import gcd, lcm

from moored.envs.math.word_problems.english import (
    YEAR,
    count,
    listing,
    money,
    people,
    person,
)
from moored.envs.math.word_problems.problem import Problem, Working, plus

PERIODS = (4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20)
"""Numbers with small common multiples."""


def ages(rng: random.Random, level: int) -> Problem:
    """How old they are, were, and will be."""
    (old, young), work = people(rng, 2), Working()
    age, times, years = rng.randint(3, 5 + 3 * level), rng.randint(2, 4), rng.randint(2, 10)
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
    if level == 3:
        times = rng.randint(3, 5)
        years = age * (times - 2)
        story = f"{old.name} is {word[times]} as old as {young.name}. In {count(years, YEAR)}, "
        story += f"{old.name} will be twice as old as {young.name}."
        factor = times - 2
        work.say(
            f"If {young.name} is y years old now, then {times}y + {years} = 2y + {2 * years}, "
            f"so {factor if factor > 1 else ''}y = {years}."
        )
        ask = f"How old is {young.name} now?"
        return work.problem(f"{story} {ask}", work(f"{young.name}'s age", years, "/", factor))
    story = f"{young.name} is {age} years old. {old.name} is {word[times]} as old."
    older = work(f"{old.name}'s age", age, "*", times)
    if level == 1:
        together = work("Together", older, "+", age)
        return work.problem(f"{story} How many years old are they together?", together)
    later = work(f"{old.name}'s age in {years} years", older, "+", years)
    other = work(f"{young.name}'s age in {years} years", age, "+", years)
    ask = f"How many years old will they be together in {count(years, YEAR)}?"
    return work.problem(f"{story} {ask}", work("Together", later, "+", other))


def garden(rng: random.Random, level: int) -> Problem:
    """Around a rectangle; a fence with a gate; a path around a pool."""
    who, work = person(rng), Working()
    width, extra = rng.randint(3, 12 * level), rng.randint(1, 10)
    length = width + extra
    place = rng.choice(("garden", "field", "yard", "park"))
    if level == 3:
        edge, price = rng.randint(1, 3), rng.randint(2, 12)
        story = f"A pool {length} meters long and {width} meters wide has a path {edge} "
        story += f"meter{'' if edge == 1 else 's'} wide all around it."
        outer = work(
            "Area with the path", "(", length, "+ 2 *", edge, ") * (", width, "+ 2 *", edge, ")"
        )
        inner = work("Area of the pool", length, "*", width)
        path = work("Area of the path", outer, "-", inner)
        ask = f"Paving costs {money(price)} per square meter. How many dollars does the path cost?"
        return work.problem(f"{story} {ask}", work("Dollars", path, "*", price))
    story = f"A rectangular {place} is {length} meters long and {width} meters wide."
    around = work("Meters all around", "2 * (", length, "+", width, ")")
    if level == 1:
        ask = rng.choice(("How many meters is it all around?", "What is its perimeter in meters?"))
        return work.problem(f"{story} {ask}", around)
    gate, price = rng.randint(2, 4), rng.randint(2, 15)
    ask = f"{who.name} fences it in but leaves {gate} meters open for a gate. The fence costs "
    ask += f"{money(price)} per meter. How many dollars does it cost?"
    fence = work("Meters of fence", around, "-", gate)
    return work.problem(f"{story} {ask}", work("Dollars", fence, "*", price))


def average(rng: random.Random, level: int) -> Problem:
    """The mean; the score still needed; the mean of two groups."""
    who, work = person(rng), Working()
    if level == 3:
        size = rng.choice((10, 20, 25))
        girls = rng.randint(3, size - 3)
        first, second = rng.sample(range(60, 96), 2)
        story = f"In a class {girls} girls have an average score of {first} and "
        story += f"{size - girls} boys an average score of {second}."
        one = work("Points of the girls", girls, "*", first)
        two = work("Points of the boys", size - girls, "*", second)
        total = work("Points in all", one, "+", two)
        pupils = work("Pupils", girls, "+", size - girls)
        ask = "What is the average score of the whole class?"
        return work.problem(f"{story} {ask}", work("Average", total, "/", pupils))
    number = rng.randint(3, 4)
    scores = [rng.randint(60, 95) for _ in range(number - 1)]
    scores.append(60 + rng.randint(0, 30))
    scores[-1] += -sum(scores) % number
    kind = rng.choice(("tests", "games", "rounds"))
    if level == 1:
        story = f"{who.name} scores {listing([str(s) for s in scores])} points in {number} {kind}."
        total = work("Points in all", *plus(scores))
        ask = f"What is {who.their} average score?"
        return work.problem(f"{story} {ask}", work("Average", total, "/", number))
    goal = sum(scores) // number
    done = scores[:-1]
    story = f"{who.name} scores {listing([str(s) for s in done])} points in {len(done)} {kind}."
    ask = f"How many points does {who.they} need in the next one for an average of {goal} over all "
    ask += f"{number} {kind}?"
    needed = work("Points needed in all", goal, "*", number)
    so_far = work("Points so far", *plus(done))
    return work.problem(f"{story} {ask}", work("Points in the next one", needed, "-", so_far))


def consecutive(rng: random.Random, level: int) -> Problem:
    """Neighbors with a given sum."""
    work = Working()
    kind, step = rng.choice((("whole", 1), ("even", 2), ("odd", 2)))
    number = 3 if level == 1 else rng.choice((5, 7))
    first = rng.randint(2, 60 * level) * step + (kind == "odd")
    total = sum(range(first, first + step * number, step))
    story = rng.choice(
        (
            f"The sum of {number} consecutive {kind} numbers is {total}.",
            f"{number} consecutive {kind} numbers add up to {total}.",
        )
    )
    middle = work("The middle number is the average", total, "/", number)
    reach = step * (number // 2)
    if level == 2:
        smallest = work("The smallest", middle, "-", reach)
        return work.problem(f"{story} What is the smallest of them?", smallest)
    largest = work("The largest", middle, "+", reach)
    if level == 1:
        return work.problem(f"{story} What is the largest of them?", largest)
    smallest = work("The smallest", middle, "-", reach)
    ask = "What is the product of the smallest and the largest of them?"
    return work.problem(f"{story} {ask}", work("Product", smallest, "*", largest))


def riddle(rng: random.Random, level: int) -> Problem:
    """Think of a number and undo the steps."""
    who, work = person(rng), Working()
    divisor = rng.randint(2, 9) if level == 3 else 1
    secret, times, added = (
        rng.randint(2, 15 * level),
        rng.randint(2, 4 + 2 * level),
        rng.randint(1, 30),
    )
    added += -(secret * times + added) % divisor
    result = secret * times + added
    story = f"{who.name} thinks of a number, multiplies it by {times} and adds {added}."
    ask = f"What number did {who.they} think of?"
    if level == 3:
        taken = rng.randint(1, max(1, result // divisor - 1))
        story += f" {who.they.capitalize()} divides that by {divisor} and subtracts {taken}."
        ask = f"The result is {result // divisor - taken}. {ask}"
        before = work("Before subtracting", result // divisor - taken, "+", taken)
        work("Before dividing", before, "*", divisor)
    elif level == 2:
        taken = rng.randint(1, result - 1)
        story += f" Then {who.they} subtracts {taken}."
        ask = f"The result is {result - taken}. {ask}"
        work("Before subtracting", result - taken, "+", taken)
    else:
        ask = f"The result is {result}. {ask}"
    product = work("Before adding", result, "-", added)
    return work.problem(f"{story} {ask}", work("The number", product, "/", times))


def signals(rng: random.Random, level: int) -> Problem:
    """Things that repeat meet again at the least common multiple."""
    work = Working()
    periods = sorted(rng.sample(range(2, 13) if level == 1 else PERIODS, 2 if level == 1 else 3))
    thing, verb, unit = rng.choice(
        (("light", "flash", "seconds"), ("bell", "sound", "minutes"), ("bus", "start", "minutes"))
    )
    ending = "es" if verb == "flash" else "s"
    parts = [f"one {thing} {verb}{ending} every {periods[0]} {unit}"]
    parts += [f"another every {period}" for period in periods[1:]]
    story = f"{listing(parts).capitalize()} {unit}."
    common = lcm(*periods)
    for period in periods:
        work(f"Rounds of {period} {unit} in {common}", common, "/", period)
    work.say(f"No smaller number of {unit} is a multiple of all of them.")
    if level < 3:
        ask = f"Now they {verb} together. After how many {unit} do they {verb} together again?"
        return work.problem(f"{story} {ask}", common)
    again = rng.randint(2, 6)
    ask = f"They {verb} together now. After how many {unit} have they done so {again} more times?"
    return work.problem(f"{story} {ask}", work(unit.capitalize(), common, "*", again))


def ribbons(rng: random.Random, level: int) -> Problem:
    """Cut into the longest equal pieces: the greatest common divisor."""
    who, work = person(rng), Working()
    piece = rng.randint(3, 6 * level)
    multiples = rng.sample(range(2, 12), 2 if level == 1 else 3)
    shared = gcd(*multiples)
    lengths = [piece * multiple // shared for multiple in multiples]
    thing = rng.choice(("ribbons", "ropes", "boards", "pipes"))
    story = (
        f"{who.name} has {thing} of {listing([str(n) for n in lengths])} centimeters and cuts them "
    )
    story += "into equal pieces, as long as possible, with nothing left over."
    parts = [work(f"Pieces from {n} centimeters", n, "/", piece) for n in lengths]
    work.say(f"{piece} is the greatest number of centimeters that divides them all.")
    if level == 1:
        return work.problem(f"{story} How many centimeters long is each piece?", piece)
    total = work("Pieces in all", *plus(parts))
    if level == 2:
        return work.problem(f"{story} How many pieces are there?", total)
    price = rng.randint(2, 9)
    ask = f"{who.they.capitalize()} sells every piece for {money(price)}. How many dollars is that?"
    return work.problem(f"{story} {ask}", work("Dollars", total, "*", price))
