"""Word problems about money: prices, wages, shares, interest."""

from __future__ import annotations

import random
from fractions import Fraction

from moored.envs.math.word_problems.english import (
    CLOTHES,
    DAY,
    HOUR,
    TREASURES,
    WARES,
    WEEK,
    YEAR,
    Noun,
    Problem,
    Working,
    count,
    listing,
    money,
    people,
    person,
    plus,
)


def shopping(rng: random.Random, level: int) -> Problem:
    """Buy a few things; then get change; then a discount."""
    who, work = person(rng), Working()
    lines, costs = [], []
    for ware in rng.sample(WARES, level):
        number = rng.randint(2, 3 * level + 3)
        price = Fraction(rng.randint(2, 24), 2) if level == 3 else rng.randint(1, 9)
        lines.append(f"{count(number, ware)} at {money(price)} each")
        costs.append(work(f"Cost of the {ware.many}", number, "*", price))
    story = f"{who.name} {rng.choice(('buys', 'orders', 'picks out'))} {listing(lines)}."
    if level == 1:
        return work.problem(f"{story} How many dollars does {who.they} pay?", costs[0])
    total = work("Total", *plus(costs))
    if level == 2:
        paid = (int(total) // 20 + 1) * 20
        change = work("Change", paid, "-", total)
        ask = f"How many dollars of change does {who.they} get from {money(paid)}?"
        return work.problem(f"{story} {ask}", change)
    percent = rng.choice((10, 20, 30, 40, 50))
    discount = work("Discount", total, "*", percent, "/ 100")
    ask = f"The shop takes {percent}% off the total. How many dollars does {who.they} pay?"
    return work.problem(f"{story} {ask}", work("To pay", total, "-", discount))


def savings(rng: random.Random, level: int) -> Problem:
    """Save week by week for something dear."""
    who, thing, work = person(rng), rng.choice(TREASURES), Working()
    weeks, pay = rng.randint(3, 5 * level + 3), rng.randint(6, 12 * level)
    if level == 1:
        cost = weeks * pay
        story = (
            f"{who.name} saves {money(pay)} every week for a {thing.one} that costs {money(cost)}."
        )
        ask = f"After how many weeks can {who.they} buy it?"
        return work.problem(f"{story} {ask}", work("Weeks", cost, "/", pay))
    spent = rng.randint(1, pay - 3) if level == 3 else 0
    start = rng.randint(5, 40)
    start += -(start + weeks * (pay - spent)) % 3
    needed = start + weeks * (pay - spent)
    if level == 2:
        story = f"{who.name} has {money(start)} and saves {money(pay)} every week."
        ask = f"After how many weeks can {who.they} buy a {thing.one} for {money(needed)}?"
        missing = work("Still missing", needed, "-", start)
        return work.problem(f"{story} {ask}", work("Weeks", missing, "/", pay))
    cost = needed * 4 // 3
    story = (
        f"{who.name} wants a {thing.one} that costs {money(cost)}. {who.their.capitalize()} aunt "
        f"pays a quarter of the price. {who.name} already has {money(start)}, earns {money(pay)} "
        f"every week and spends {money(spent)} of it."
    )
    aunt = work("The aunt pays", cost, "/ 4")
    missing = work("Still missing", cost, "-", aunt, "-", start)
    saved = work("Saved every week", pay, "-", spent)
    ask = f"After how many weeks can {who.they} buy it?"
    return work.problem(f"{story} {ask}", work("Weeks", missing, "/", saved))


def discount(rng: random.Random, level: int) -> Problem:
    """A percentage off; then tax on top; then back to the old price."""
    who, thing, work = person(rng), rng.choice(CLOTHES), Working()
    price = 20 * rng.randint(1, 5 * level + 2)
    percent = rng.choice((10, 20, 25, 30, 40))
    if level == 3:
        paid_before = price * (100 - percent) // 100
        coupon = rng.randint(1, min(20, paid_before - 1))
        story = (
            f"In a sale everything is {percent}% off. With a coupon that takes another "
            f"{money(coupon)} off the reduced price, {who.name} pays "
            f"{money(paid_before - coupon)} for a {thing.one}."
        )
        before = work("Price before the coupon", paid_before - coupon, "+", coupon)
        left = work("Percent of the old price left", 100, "-", percent)
        old = work("Old price", before, "/", left, "*", 100)
        return work.problem(f"{story} How many dollars was the price before the sale?", old)
    story = f"A {thing.one} costs {money(price)}. In the sale it is {percent}% off."
    off = work("Discount", price, "*", percent, "/ 100")
    reduced = work("Sale price", price, "-", off)
    if level == 1:
        return work.problem(f"{story} How many dollars does it cost now?", reduced)
    tax_percent = rng.choice((5, 10))
    tax = work("Tax", reduced, "*", tax_percent, "/ 100")
    ask = f"A sales tax of {tax_percent}% is added to the sale price. "
    ask += f"How many dollars does {who.name} pay for it?"
    return work.problem(f"{story} {ask}", work("To pay", reduced, "+", tax))


def interest(rng: random.Random, level: int) -> Problem:
    """Money in the bank: one year, several years, compound interest."""
    who, work = person(rng), Working()
    if level == 3:
        start, rate = 1000 * rng.randint(1, 9), rng.choice((2, 4, 5, 10, 20))
        story = f"{who.name} puts {money(start)} into an account that pays {rate}% interest a year."
        ask = "The interest stays in the account and earns interest too. "
        ask += "How many dollars are in the account after 2 years?"
        first = work("Interest of the first year", start, "*", rate, "/ 100")
        middle = work("After one year", start, "+", first)
        second = work("Interest of the second year", middle, "*", rate, "/ 100")
        return work.problem(f"{story} {ask}", work("After two years", middle, "+", second))
    start, rate = 100 * rng.randint(1, 20 * level), rng.randint(2, 9)
    deal = rng.choice(("lends a friend {}", "puts {} into the bank")).format(money(start))
    years = 1 if level == 1 else rng.randint(2, 6)
    story = f"{who.name} {deal} at {rate}% simple interest a year."
    yearly = work("Interest of one year", start, "*", rate, "/ 100")
    if level == 1:
        return work.problem(f"{story} How many dollars of interest does one year bring?", yearly)
    total = work("Interest in all", yearly, "*", years)
    ask = f"How many dollars, interest included, does {who.they} get back after {years} years?"
    return work.problem(f"{story} {ask}", work("Back in all", start, "+", total))


def coins(rng: random.Random, level: int) -> Problem:
    """Coins in a pocket: their worth; what is left; how many of each."""
    who, work = person(rng), Working()
    purse = [(Noun("dime", "dimes"), 10), (Noun("quarter", "quarters"), 25)]
    if level < 3:
        purse = [(Noun("penny", "pennies"), 1), (Noun("nickel", "nickels"), 5), *purse]
    kinds = rng.sample(purse, 2 if level != 2 else 3)
    numbers = [rng.randint(2, 6 * level) for _ in kinds]
    if level == 3:
        total, value = (
            sum(numbers),
            sum(n * kind[1] for n, kind in zip(numbers, kinds, strict=True)),
        )
        story = f"{who.name} has {total} coins, all dimes and quarters, worth {value} cents."
        low = work("Cents if all were dimes", total, "* 10")
        extra = work("Cents above that", value, "-", low)
        ask = f"How many quarters does {who.they} have?"
        return work.problem(f"{story} {ask}", work("Quarters", extra, "/ (25 - 10)"))
    worth = []
    for number, (coin, cents) in zip(numbers, kinds, strict=True):
        worth.append(work(f"Cents in {coin.many}", number, "*", cents))
    held = listing([count(n, kind[0]) for n, kind in zip(numbers, kinds, strict=True)])
    total = work("Cents in all", *plus(worth))
    if level == 1:
        ask = f"{who.name} has {held}. How many cents are they worth?"
        return work.problem(ask, total)
    spent = rng.randint(1, int(total) - 1)
    ask = f"How many cents are left after {who.they} buys a snack for {spent} cents?"
    return work.problem(f"{who.name} has {held}. {ask}", work("Cents left", total, "-", spent))


def wages(rng: random.Random, level: int) -> Problem:
    """Pay by the hour; then overtime; then tax."""
    who, work = person(rng), Working()
    job = rng.choice(("in a bakery", "at a garden center", "in a library", "at a bike shop"))
    rate = 2 * rng.randint(4, 5 + 5 * level)
    if level == 1:
        hours, days = rng.randint(3, 8), rng.randint(2, 6)
        story = f"{who.name} works {job} for {money(rate)} an hour,"
        story += f" {count(hours, HOUR)} a day for {count(days, DAY)}."
        total = work("Hours", hours, "*", days)
        ask = f"How many dollars does {who.they} earn?"
        return work.problem(f"{story} {ask}", work("Pay", total, "*", rate))
    hours = 40 + rng.randint(1, 5 * level)
    story = (
        f"{who.name} works {job} for {money(rate)} an hour. Hours beyond 40 in a week are paid one "
        f"and a half times as much. This week {who.they} works {hours} hours."
    )
    normal = work("Pay for 40 hours", "40 *", rate)
    extra = work("Hours of overtime", hours, "- 40")
    bonus = work("Pay for overtime", extra, "*", rate, "* 1.5")
    pay = work("Pay in all", normal, "+", bonus)
    if level == 2:
        return work.problem(f"{story} How many dollars does {who.they} earn?", pay)
    percent = rng.choice((10, 15, 20, 25))
    tax = work("Tax", pay, "*", percent, "/ 100")
    ask = f"{percent}% of the pay goes to tax. How many dollars does {who.they} keep?"
    return work.problem(f"{story} {ask}", work("Kept", pay, "-", tax))


def profit(rng: random.Random, level: int) -> Problem:
    """Buy and sell; some break; profit in percent."""
    who, ware, work = person(rng), rng.choice(WARES), Working()
    number, cost = rng.randint(10, 20 * level), rng.choice((4, 5, 10, 20))
    price = cost + rng.randint((cost + 1) // 2, cost)
    if level == 3:
        story = (
            f"{who.name} buys a crate of {number} {ware.many} for {money(number * cost)} and sells "
            f"all of them for {money(price)} each."
        )
        income = work("Income", number, "*", price)
        gain = work("Profit", income, "-", number * cost)
        ask = "What percent of the purchase price is the profit?"
        return work.problem(f"{story} {ask}", work("Percent", gain, "/", number * cost, "* 100"))
    story = f"{who.name} buys {number} {ware.many} for {money(cost)} each."
    spent = work("Cost", number, "*", cost)
    sold, lost = number, ""
    if level == 2:
        gone = rng.randint(1, number * (price - cost) // price - 1)
        lost = f" {gone} of them {'is' if gone == 1 else 'are'} damaged and thrown away."
        sold = work("Sold", number, "-", gone)
    what = "the rest" if level == 2 else "all of them"
    story += f"{lost} {who.they.capitalize()} sells {what} for {money(price)} each."
    income = work("Income", sold, "*", price)
    ask = rng.choice(
        (f"How many dollars of profit does {who.they} make?", "What is the profit in dollars?")
    )
    return work.problem(f"{story} {ask}", work("Profit", income, "-", spent))


def tickets(rng: random.Random, level: int) -> Problem:
    """Two ticket prices: the income; or, from the income, how many of each."""
    work = Working()
    place = rng.choice(("zoo", "museum", "school play", "cinema", "circus"))
    adults, children = rng.sample(range(4, 25 * level), 2)
    child_price = rng.randint(2, 5)
    adult_price = child_price + rng.randint(2, 6)
    prices = f"At the {place} an adult pays {money(adult_price)} and a child {money(child_price)}."
    if level == 1:
        full = work("Adults pay", adults, "*", adult_price)
        half = work("Children pay", children, "*", child_price)
        ask = f"How many dollars do {adults} adults and {children} children pay together?"
        return work.problem(f"{prices} {ask}", work("Together", full, "+", half))
    visitors = adults + children
    income = adults * adult_price + children * child_price
    if level == 3:
        school = 10 * rng.randint(2, 9)
        prices += f" A school group pays {money(school)} in all."
        takings = income + school
        story = f"Besides one such group, {visitors} visitors come. They pay {money(takings)}, "
        story += "the group included."
        income = work("Income without the group", takings, "-", school)
    else:
        story = f"One day {visitors} visitors pay {money(income)} in all."
    low = work("Income if all were children", visitors, "*", child_price)
    extra = work("Income above that", income, "-", low)
    more = work("An adult pays more by", adult_price, "-", child_price)
    count_adults = work("Adults", extra, "/", more)
    return work.problem(f"{prices} {story} How many of the visitors are adults?", count_adults)


def shares(rng: random.Random, level: int) -> Problem:
    """Split money in a given ratio."""
    trio, work = people(rng, 3), Working()
    parts = rng.sample(range(1, 6 + level), 2 if level != 2 else 3)
    names = listing([who.name for who in trio[: len(parts)]])
    ratio = ":".join(map(str, parts))
    unit = rng.randint(2, 15 * level)
    if level == 3:
        high, low = (0, 1) if parts[0] > parts[1] else (1, 0)
        gap = unit * (parts[high] - parts[low])
        story = f"{names} share a prize in the ratio {ratio}."
        ask = f"{trio[high].name} gets {money(gap)} more than {trio[low].name}. "
        difference = work("Difference in parts", parts[high], "-", parts[low])
        part = work("Dollars in one part", gap, "/", difference)
        total = work("Parts in all", *plus(parts))
        ask += "How many dollars is the prize?"
        return work.problem(f"{story} {ask}", work("The prize", part, "*", total))
    chosen = rng.randrange(len(parts))
    story = f"{names} share {money(unit * sum(parts))} in the ratio {ratio}."
    total = work("Parts in all", *plus(parts))
    part = work("Dollars in one part", unit * sum(parts), "/", total)
    ask = f"How many dollars does {trio[chosen].name} get?"
    share = work(f"{trio[chosen].name} gets", part, "*", parts[chosen])
    return work.problem(f"{story} {ask}", share)


def dinner(rng: random.Random, level: int) -> Problem:
    """Friends split a bill, a tip, and a shared dessert."""
    who, work = person(rng), Working()
    friends, meal = rng.randint(2, 4 + level), rng.randint(8, 12 + 6 * level)
    place = rng.choice(("an Italian restaurant", "a cafe", "a diner", "a noodle bar"))
    story = f"{who.name} and {friends} friends eat at {place}."
    group = work("People", friends, "+ 1")
    bill = group * meal
    if level == 3:
        drink, dessert = rng.randint(2, 5), int(group) * rng.randint(1, 3)
        story += (
            f" Each has a meal for {money(meal)} and a drink for {money(drink)}, and they share a "
            f"dessert plate for {money(dessert)}."
        )
        own = work("Meal and drink", meal, "+", drink)
        bill = work("Bill", group, "*", own, "+", dessert)
    else:
        story += f" The bill is {money(bill)}."
    if level == 1:
        ask = "They split it equally. How many dollars does each of them pay?"
        return work.problem(f"{story} {ask}", work("Each pays", bill, "/", group))
    percent = rng.choice((10, 20))
    tip = work("Tip", bill, "*", percent, "/ 100")
    total = work("With the tip", bill, "+", tip)
    ask = f"They add a tip of {percent}% and split everything equally. "
    ask += "How many dollars does each of them pay?"
    return work.problem(f"{story} {ask}", work("Each pays", total, "/", group))


def tariff(rng: random.Random, level: int) -> Problem:
    """A fixed fee and a price per unit: the bill, the units, or where two offers meet."""
    who, work = person(rng), Working()
    place, unit = rng.choice(
        (
            ("A taxi", Noun("kilometer", "kilometers")),
            ("A boat rental", HOUR),
            ("A climbing hall", WEEK),
            ("A tool rental", DAY),
            ("A storage company", YEAR),
        )
    )
    fee, rate, used = (
        rng.randint(2, 10 * level),
        rng.randint(2, 4 + 3 * level),
        rng.randint(2, 8 * level),
    )
    offer = f"{place} charges {money(fee)} once and {money(rate)} for every {unit.one}."
    if level == 1:
        ask = f"How many dollars does {who.name} pay for {count(used, unit)}?"
        variable = work(f"For the {unit.many}", used, "*", rate)
        return work.problem(f"{offer} {ask}", work("In all", fee, "+", variable))
    if level == 2:
        bill = fee + used * rate
        variable = work(f"For the {unit.many}", bill, "-", fee)
        ask = f"{who.name} pays {money(bill)}. For how many {unit.many} is that?"
        return work.problem(f"{offer} {ask}", work(unit.many.capitalize(), variable, "/", rate))
    more = rng.randint(1, 5)
    other = f"Another one charges {money(fee + used * more)} once but only {money(rate)}"
    offer = f"{place} charges {money(fee)} once and {money(rate + more)} for every {unit.one}."
    gap = work("Difference of the fees", fee + used * more, "-", fee)
    step = work(f"Difference for every {unit.one}", rate + more, "-", rate)
    ask = f"For how many {unit.many} do both cost the same?"
    equal = work(unit.many.capitalize(), gap, "/", step)
    return work.problem(f"{offer} {other} for every {unit.one}. {ask}", equal)
