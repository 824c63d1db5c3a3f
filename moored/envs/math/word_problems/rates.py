"""Word problems about rates: speed, work, flow, growth, time."""

from __future__ import annotations

import random
from math import gcd

from moored.envs.math.word_problems.english import (
    DAY,
    HOUR,
    MINUTE,
    PRODUCTS,
    TOWNS,
    VEHICLES,
    Noun,
    Problem,
    Working,
    clock,
    count,
    person,
)

DISHES = (
    ("bread", "flour"),
    ("pancakes", "flour"),
    ("curry", "rice"),
    ("shortbread", "butter"),
    ("soup", "lentils"),
    ("pizza", "cheese"),
)


def travel(rng: random.Random, level: int) -> Problem:
    """One leg; two legs; the average speed with a rest."""
    vehicle, work = rng.choice(VEHICLES), Working()
    speed, hours = 5 * rng.randint(6, 18 + level), rng.randint(2, 4 + level)
    if level == 1:
        ask = f"A {vehicle} travels at {speed} kilometers per hour for {count(hours, HOUR)}. "
        ask += rng.choice(("How many kilometers does it cover?", "How many kilometers is that?"))
        return work.problem(ask, work("Kilometers", speed, "*", hours))
    total_hours = rng.choice((4, 5, 10))
    rest = 1 if level == 3 else 0
    hours = rng.randint(1, total_hours - rest - 1)
    later, slower = total_hours - rest - hours, 5 * rng.randint(4, 14)
    story = (
        f"A {vehicle} travels for {count(hours, HOUR)} at {speed} kilometers per hour"
        f"{', stops for 1 hour' if rest else ''} and then travels for {count(later, HOUR)} at "
        f"{slower} kilometers per hour."
    )
    first = work("First part", hours, "*", speed)
    second = work("Second part", later, "*", slower)
    distance = work("Kilometers in all", first, "+", second)
    if level == 2:
        return work.problem(f"{story} How many kilometers does it travel in all?", distance)
    time = work("Hours in all", hours, "+ 1 +", later)
    ask = "What is its average speed in kilometers per hour over the whole trip, stop included?"
    return work.problem(f"{story} {ask}", work("Average speed", distance, "/", time))


def meeting(rng: random.Random, level: int) -> Problem:
    """Two vehicles drive towards each other."""
    work = Working()
    (start, end), (one, other) = rng.sample(TOWNS, 2), rng.sample(VEHICLES, 2)
    fast, slow, hours = 5 * rng.randint(8, 20), 5 * rng.randint(5, 12), rng.randint(2, 3 + level)
    ahead = rng.randint(1, 3) if level == 3 else 0
    distance = fast * (hours + ahead) + slow * hours
    when = f"{count(ahead, HOUR)} later" if ahead else "At the same time"
    story = (
        f"{start} and {end} are {distance} kilometers apart. A {one} leaves {start} for {end} at "
        f"{fast} kilometers per hour. {when} a {other} leaves {end} for {start} at {slow} "
        f"kilometers per hour."
    )
    gap = distance
    if ahead:
        head_start = work("Head start in kilometers", ahead, "*", fast)
        gap = work("Kilometers left between them", distance, "-", head_start)
    closing = work("Kilometers they close every hour", fast, "+", slow)
    time = work(f"Hours until they meet, from when the {other} leaves", gap, "/", closing)
    if level == 1:
        return work.problem(f"{story} After how many hours do they meet?", time)
    place = work(f"Kilometers from {end}", time, "*", slow)
    return work.problem(f"{story} How many kilometers from {end} do they meet?", place)


def machines(rng: random.Random, level: int) -> Problem:
    """Machines at a steady pace; other machines for other hours; a breakdown."""
    product, work = rng.choice(PRODUCTS), Working()
    number, rate, hours = (
        rng.randint(2, 4 + 2 * level),
        rng.randint(5, 20 * level),
        rng.randint(2, 8),
    )
    if level == 1:
        story = f"A factory has {number} machines. Each makes {count(rate, product)} an hour."
        every_hour = work("Made every hour", number, "*", rate)
        ask = f"How many {product.many} do they make in {count(hours, HOUR)}?"
        return work.problem(f"{story} {ask}", work("Made in all", every_hour, "*", hours))
    made = number * rate * hours
    if level == 2:
        others, other_hours = rng.randint(2, 9), rng.randint(2, 9)
        story = f"{number} equal machines make {made} {product.many} in {count(hours, HOUR)}."
        every_hour = work("All machines make every hour", made, "/", hours)
        each = work("One machine makes every hour", every_hour, "/", number)
        ask = f"How many do {others} such machines make in {count(other_hours, HOUR)}?"
        return work.problem(f"{story} {ask}", work("Made", each, "*", others, "*", other_hours))
    broken, more = rng.randint(1, number - 1), rng.randint(2, 6)
    order = made + (number - broken) * rate * more
    story = (
        f"A factory must make {order} {product.many}. It has {number} machines that each make "
        f"{rate} an hour. After {count(hours, HOUR)}, {broken} of the machines "
        f"{'breaks' if broken == 1 else 'break'} down."
    )
    done = work("Made before the breakdown", number, "*", rate, "*", hours)
    left = work("Left to make", order, "-", done)
    pace = work("Made every hour after it", "(", number, "-", broken, ") *", rate)
    ask = "How many more hours do the others need to finish?"
    return work.problem(f"{story} {ask}", work("Hours", left, "/", pace))


def workers(rng: random.Random, level: int) -> Problem:
    """More hands need fewer days."""
    work = Working()
    job = rng.choice(("build a wall", "paint a school", "pave a road", "harvest a field"))
    crew, unit = rng.randint(2, 4 + level), rng.randint(1, 3)
    if level == 1:
        other = rng.choice([n for n in range(2, 9) if n != crew])
        days = other * unit
        total = work("Days for one worker", crew, "*", days)
        ask = f"It takes {crew} workers {count(days, DAY)} to {job}. At the same pace, "
        ask += f"how many days does it take {other} workers?"
        return work.problem(ask, work("Days", total, "/", other))
    if level == 2:
        joining, start = rng.randint(1, 4), rng.randint(1, 5)
        days = start + (crew + joining) * unit
        story = f"{crew} workers would {job} in {days} days."
        ask = f"After {count(start, DAY)}, {count(joining, Noun('more joins', 'more join'))} them. "
        ask += "How many more days does the job take, if all work at the same pace?"
        remaining = work("Days left for the first crew", days, "-", start)
        total = work("Days for one worker", remaining, "*", crew)
        size = work("Workers now", crew, "+", joining)
        return work.problem(f"{story} {ask}", work("Days", total, "/", size))
    hours, other, other_hours = rng.randint(5, 8), rng.randint(2, 8), rng.randint(6, 10)
    days = other * other_hours // gcd(crew * hours, other * other_hours)
    story = f"{crew} workers, working {hours} hours a day, {job} in {count(days, DAY)}."
    ask = f"How many days do {other} workers need at the same pace, {other_hours} hours a day?"
    total = work("Hours of work", crew, "*", hours, "*", days)
    daily = work("Hours of work a day", other, "*", other_hours)
    return work.problem(f"{story} {ask}", work("Days", total, "/", daily))


def tank(rng: random.Random, level: int) -> Problem:
    """Fill a tank: a tap; a tap and a leak; two taps, a leak and a start."""
    work = Working()
    name = rng.choice(("tank", "barrel", "tub", "trough", "basin"))
    inflow, minutes = rng.randint(5, 20 * level), rng.randint(4, 15 * level)
    if level == 1:
        story = (
            f"A {name} holds {inflow * minutes} liters. A tap delivers {inflow} liters a minute."
        )
        ask = rng.choice(
            (
                f"How many minutes does it take to fill the empty {name}?",
                f"After how many minutes is the empty {name} full?",
            )
        )
        return work.problem(f"{story} {ask}", work("Minutes", inflow * minutes, "/", inflow))
    second = rng.randint(3, 30) if level == 3 else 0
    leak = rng.randint(1, inflow - 2)
    start = 10 * rng.randint(1, 20) if level == 3 else 0
    net = inflow + second - leak
    volume = start + net * minutes
    taps = f"A tap delivers {inflow} liters a minute"
    if level == 3:
        story = f"A {name} holds {volume} liters and already has {start} liters in it. "
        story += f"{taps} and a second tap {second} liters, but "
        missing = work("Liters missing", volume, "-", start)
        pace = work("Net liters a minute", inflow, "+", second, "-", leak)
    else:
        story = f"An empty {name} holds {volume} liters. {taps}, but "
        missing = volume
        pace = work("Net liters a minute", inflow, "-", leak)
    ask = f"{count(leak, Noun('liter a minute leaks', 'liters a minute leak'))} out. "
    ask += "After how many minutes is it full?"
    return work.problem(f"{story}{ask}", work("Minutes", missing, "/", pace))


def reading(rng: random.Random, level: int) -> Problem:
    """Pages per day; a part read already; more pages every day."""
    who, work = person(rng), Working()
    pages, days = rng.randint(8, 20 * level), rng.randint(3, 6 + 2 * level)
    if level == 1:
        story = f"{who.name} reads {pages} pages a day of a book with {pages * days} pages."
        ask = f"How many days does {who.they} need for the book?"
        return work.problem(f"{story} {ask}", work("Days", pages * days, "/", pages))
    if level == 2:
        bottom = rng.choice((3, 4, 5))
        left = pages * (bottom - 1) * rng.randint(1, 4)
        total = left * bottom // (bottom - 1)
        story = f"{who.name} has read 1/{bottom} of a book with {total} pages."
        ask = f"How many days does {who.they} need for the rest at {pages} pages a day?"
        done = work("Pages read", total, "/", bottom)
        rest = work("Pages left", total, "-", done)
        return work.problem(f"{story} {ask}", work("Days", rest, "/", pages))
    more = rng.randint(2, 6)
    last = pages + (days - 1) * more
    read = (pages + last) * days // 2
    total = read + rng.randint(5, 200)
    story = (
        f"On the first day {who.name} reads {pages} pages of a book with {total} pages. Every day "
        f"after that {who.they} reads {more} pages more than on the day before."
    )
    last = work(f"Pages on day {days}", pages, "+", days - 1, "*", more)
    read = work(f"Pages in {days} days", "(", pages, "+", last, ") *", days, "/ 2")
    ask = f"How many pages are left after {days} days?"
    return work.problem(f"{story} {ask}", work("Pages left", total, "-", read))


def recipe(rng: random.Random, level: int) -> Problem:
    """Scale a recipe; then buy for it."""
    who, work = person(rng), Working()
    dish, stuff = rng.choice(DISHES)
    eaters, each, guests = (
        rng.randint(2, 6),
        10 * rng.randint(2, 4 + 3 * level),
        rng.randint(7, 6 + 6 * level),
    )
    story = f"A recipe for {dish} for {eaters} people needs {eaters * each} grams of {stuff}."
    one = work("Grams for one person", eaters * each, "/", eaters)
    needed = work(f"Grams for {guests} people", one, "*", guests)
    if level == 1:
        ask = f"How many grams of {stuff} does {who.name} need for {guests} people?"
        return work.problem(f"{story} {ask}", needed)
    if level == 2:
        bag = (int(needed) // 500 + 1) * 500
        ask = f"{who.name} has {bag} grams and cooks for {guests} people. How many grams are left?"
        return work.problem(f"{story} {ask}", work("Grams left over", bag, "-", needed))
    price = rng.randint(2, 9)
    ask = f"A kilogram of {stuff} costs ${price}. How many dollars' worth of {stuff} does "
    ask += f"{who.name} need for {guests} people?"
    kilograms = work("Kilograms", needed, "/ 1000")
    return work.problem(f"{story} {ask}", work("Dollars", kilograms, "*", price))


def growth(rng: random.Random, level: int) -> Problem:
    """Doubling; tripling with losses; percent per year."""
    work = Working()
    if level == 3:
        town, now = rng.choice(TOWNS), 1000 * rng.randint(2, 60)
        up, down = rng.choice((10, 20, 50)), rng.choice((10, 20))
        story = f"{town} has {now} inhabitants. The number grows by {up}% a year for 2 years and "
        story += f"then falls by {down}% in the third year."
        first = work("After year 1", now, "* (100 +", up, ") / 100")
        second = work("After year 2", first, "* (100 +", up, ") / 100")
        third = work("After year 3", second, "* (100 -", down, ") / 100")
        return work.problem(f"{story} How many inhabitants does {town} have then?", third)
    thing = rng.choice(("bacteria in a dish", "fish in a lake", "water lilies on a pond"))
    period = rng.choice(("day", "week", "month"))
    now, steps = rng.randint(3, 20 * level), rng.randint(2, 4)
    factor, verb = (2, "doubles") if level == 1 else (3, "triples")
    lost = rng.randint(1, 2 * now) if level == 2 else 0
    story = f"There are {now} {thing}. Every {period} their number {verb}"
    story += f" and then {lost} of them {'dies' if lost == 1 else 'die'}." if lost else "."
    ask = f"How many are there after {steps} {period}s?"
    number, loss = now, ("-", lost) if lost else ()
    for index in range(1, steps + 1):
        number = work(f"After {period} {index}", number, "*", factor, *loss)
    return work.problem(f"{story} {ask}", number)


def fuel(rng: random.Random, level: int) -> Problem:
    """What a trip uses, costs, and leaves in the tank."""
    who, work = person(rng), Working()
    use, trip = 2 * rng.randint(2, 5), 50 * rng.randint(2, 3 + 3 * level)
    story = f"{who.name}'s car uses {use} liters of fuel for 100 kilometers."
    used = work("Liters for the trip", trip, "/ 100 *", use)
    if level == 1:
        ask = f"How many liters does {who.they} need for a trip of {trip} kilometers?"
        return work.problem(f"{story} {ask}", used)
    if level == 2:
        price = rng.randint(1, 3)
        ask = (
            f"Fuel costs ${price} a liter. How many dollars does a trip of {trip} kilometers cost?"
        )
        return work.problem(f"{story} {ask}", work("Dollars", used, "*", price))
    fill = int(used) + use * rng.randint(1, 10) // 2
    story += (
        f" {who.they.capitalize()} fills the tank up to {fill} liters and drives {trip} kilometers."
    )
    left = work("Liters left", fill, "-", used)
    ask = f"How many kilometers further can {who.they} drive?"
    return work.problem(f"{story} {ask}", work("Kilometers", left, "/", use, "* 100"))


def timetable(rng: random.Random, level: int) -> Problem:
    """Hours and minutes: one film; lessons and breaks; waiting for the bus."""
    who, work = person(rng), Working()
    if level == 1:
        hours, minutes = rng.randint(1, 3), rng.randint(1, 59)
        show_name = rng.choice(("A film", "A concert", "A hike", "A train ride"))
        ask = f"{show_name} lasts {count(hours, HOUR)} and {count(minutes, MINUTE)}. "
        ask += "How many minutes is that?"
        whole = work("Minutes in the full hours", hours, "* 60")
        return work.problem(ask, work("Minutes", whole, "+", minutes))
    lessons, length, pause = rng.randint(3, 6), 5 * rng.randint(7, 10), 5 * rng.randint(1, 4)
    day = f"{who.name} has {lessons} lessons of {length} minutes, with a break of {pause} minutes "
    day += "between one lesson and the next."
    taught = work("Minutes of lessons", lessons, "*", length)
    breaks = work("Minutes of breaks", "(", lessons, "- 1) *", pause)
    total = int(work("Minutes in all", taught, "+", breaks))
    if level == 2:
        ask = "How many minutes pass from the start of the first lesson to the end of the last?"
        return work.problem(f"{day} {ask}", total)
    start = 5 * rng.randint(90, 110)
    bus = start + total + rng.randint(3, 55)
    story = f"School starts at {clock(start)} {day} The bus home leaves at {clock(bus)}"
    ask = f"How many minutes does {who.they} wait for it after the last lesson?"
    opening = work(f"Minutes from midnight to {clock(start)}", start // 60, "* 60 +", start % 60)
    leaving = work(f"Minutes from midnight to {clock(bus)}", bus // 60, "* 60 +", bus % 60)
    ending = work("Last lesson ends at minute", opening, "+", total)
    return work.problem(f"{story} {ask}", work("Minutes to wait", leaving, "-", ending))
