"""Word problems about things to count and about numbers: shares, seats, chances, ages, riddles."""

from __future__ import annotations

import random
from fractions import Fraction
from math import gcd, lcm

from moored.envs.math.word_problems.english import (
    CHILD,
    COLORS,
    PRODUCTS,
    TREATS,
    YEAR,
    Noun,
    Number,
    Problem,
    Working,
    count,
    listing,
    money,
    ordinal,
    people,
    person,
    plus,
)

PERIODS = (4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20)
"""Numbers with small common multiples."""


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
