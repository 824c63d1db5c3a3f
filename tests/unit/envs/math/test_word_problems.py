import functools
import math
import random
import re
from fractions import Fraction

import pytest

from moored.envs.arithmetic import evaluate
from moored.envs.math.word_problems import FAMILIES, LEVELS
from moored.envs.math.word_problems.english import (
    Noun,
    Working,
    clock,
    count,
    listing,
    money,
    ordinal,
    show,
)

NUM_DRAWS = 100
CASES = [pytest.param(f, level, id=f"{f.__name__}-{level}") for f in FAMILIES for level in LEVELS]


@functools.cache
def draw(family, level):
    return [family(random.Random(seed), level) for seed in range(NUM_DRAWS)]


def numbers_in(text):
    return [int(n) for n in re.findall(r"(?<![\d./])\d+(?![\d/])", text)]


@pytest.mark.parametrize(("family", "level"), CASES)
def test_every_step_of_every_solution_holds(family, level):
    for problem in draw(family, level):
        *steps, last = problem.solution.splitlines()
        assert last == f"The answer is: {problem.answer}"
        equations = [step.rsplit(": ", 1)[1] for step in steps if " = " in step and ": " in step]
        assert equations
        for equation in equations:
            left, right = equation.removesuffix(".").split(" = ")
            result = evaluate(left)
            assert result is not None
            assert result.value == Fraction(right)


@pytest.mark.parametrize(("family", "level"), CASES)
def test_answers_are_sensible(family, level):
    for problem in draw(family, level):
        value = Fraction(problem.answer)
        assert 0 <= value < 10**6
        if "probability" in problem.question:
            assert value <= 1
        elif "dollars" in problem.question or "average" in problem.question:
            assert (value * 100).denominator == 1
        else:
            assert value.denominator == 1, problem


@pytest.mark.parametrize(("family", "level"), CASES)
def test_questions_are_clean_english(family, level):
    for problem in draw(family, level):
        text = problem.question
        assert text[0].isupper() or text[0].isdigit()
        assert text.endswith(("?", "terms."))
        assert not re.search(r"  | [.,?]|[{}]|\.\.|None|-\d", text), text
        # One thing is singular, several are plural.
        assert not re.search(r"(?<![\d./:$])\b1 (?!of|more\b)[a-z]+s\b(?! out)", text), text
        assert not re.search(r"\b[Aa] [aeio]\w+", text), text
        assert not re.search(
            r"(?<![\d/.])\b([2-9]|\d\d+) (hour|day|minute|week|year|liter)\b", text
        )


@pytest.mark.parametrize(("family", "level"), CASES)
def test_every_family_has_many_instances(family, level):
    questions = {problem.question for problem in draw(family, level)}
    assert len(questions) >= 50


# The next tests solve the question from its numbers alone, by another way than the generator's.


def family(name):
    return next(f for f in FAMILIES if f.__name__ == name)


def test_heads_and_legs_by_trying_every_count():
    for problem in draw(family("animals"), 2):
        heads, legs = numbers_in(problem.question)
        (four,) = [n for n in range(heads + 1) if 4 * n + 2 * (heads - n) == legs]
        assert problem.answer == str(four)


def test_coins_by_trying_every_count():
    for problem in draw(family("coins"), 3):
        total, value = numbers_in(problem.question)
        (quarters,) = [n for n in range(total + 1) if 25 * n + 10 * (total - n) == value]
        assert problem.answer == str(quarters)


def test_tickets_by_trying_every_count():
    for problem in draw(family("tickets"), 2):
        adult, child, visitors, income = numbers_in(problem.question)
        fits = [n for n in range(visitors + 1) if adult * n + child * (visitors - n) == income]
        assert [problem.answer] == [str(n) for n in fits]


def test_ages_by_trying_every_age():
    times = {"three": 3, "four": 4, "five": 5}
    for problem in draw(family("ages"), 3):
        (years,) = numbers_in(problem.question)
        factor = next(n for word, n in times.items() if f"{word} times" in problem.question)
        (age,) = [y for y in range(1, 100) if factor * y + years == 2 * (y + years)]
        assert problem.answer == str(age)


def test_consecutive_numbers_by_adding_them_up():
    for problem in draw(family("consecutive"), 2):
        number, total = numbers_in(problem.question)
        step = 1 if "whole" in problem.question else 2
        smallest = int(problem.answer)
        assert sum(smallest + step * i for i in range(number)) == total
        assert step == 1 or smallest % 2 == ("odd" in problem.question)


def test_signals_by_waiting():
    for problem in draw(family("signals"), 2):
        periods = numbers_in(problem.question)
        time_passed = next(t for t in range(1, 10**5) if all(t % p == 0 for p in periods))
        assert problem.answer == str(time_passed)


def test_ribbons_by_euclid():
    for problem in draw(family("ribbons"), 1):
        assert problem.answer == str(math.gcd(*numbers_in(problem.question)))


def test_riddles_by_playing_them():
    for problem in draw(family("riddle"), 3):
        times, added, divisor, taken, result = numbers_in(problem.question)
        assert Fraction(int(problem.answer) * times + added, divisor) - taken == result


def test_packing_by_filling_boxes():
    for problem in draw(family("packing"), 3):
        total, size, load = numbers_in(problem.question)
        boxes = len(range(0, total, size))
        assert problem.answer == str(len(range(0, boxes, load)))


def test_queues_by_serving_them():
    for problem in draw(family("queue"), 3):
        ahead, _, desks, minutes = numbers_in(problem.question)
        clock_minutes = 0
        while ahead >= desks:
            ahead, clock_minutes = ahead - desks, clock_minutes + minutes
        assert problem.answer == str(clock_minutes)


def test_marbles_by_counting_all_draws():
    for problem in draw(family("marbles"), 3)[:15]:
        counts = numbers_in(problem.question)
        bag = [color for color, number in enumerate(counts) for _ in range(number)]
        pairs = [(a, b) for i, a in enumerate(bag) for j, b in enumerate(bag) if i != j]
        assert problem.answer == str(Fraction(pairs.count((0, 0)), len(pairs)))


def test_matches_by_pairing_everyone():
    for problem in draw(family("outfits"), 3):
        total, girls = numbers_in(problem.question)
        assert problem.answer == str(sum(1 for g in range(girls) for b in range(total - girls)))


def test_meetings_by_driving():
    for problem in draw(family("meeting"), 2):
        apart, first, second = numbers_in(problem.question)
        hours = Fraction(apart, first + second)
        assert Fraction(problem.answer) == second * hours
        assert first * hours + second * hours == apart


def test_compound_interest_by_formula():
    for problem in draw(family("interest"), 3):
        start, rate = numbers_in(problem.question)[:2]
        assert Fraction(problem.answer) == start * (1 + Fraction(rate, 100)) ** 2


def test_workers_by_total_hours():
    for problem in draw(family("workers"), 3):
        crew, hours, days, other, other_hours = numbers_in(problem.question)
        assert int(problem.answer) * other * other_hours == crew * hours * days


def test_working_computes_what_it_writes():
    work = Working()
    assert work("Cost", "(", 2, "+", 3, ") *", Fraction(3, 2)) == Fraction(15, 2)
    assert work("Third", 1, "/ 3") == Fraction(1, 3)
    assert work("Nine", 3, "/", Fraction(1, 3)) == 9
    problem = work.problem("Why?", 9)
    assert problem.solution.splitlines() == [
        "Cost: (2 + 3) * 1.5 = 7.5.",
        "Third: 1 / 3 = 1/3.",
        "Nine: 3 / (1/3) = 9.",
        "The answer is: 9",
    ]


def test_small_words():
    assert [count(n, Noun("box", "boxes")) for n in (0, 1, 2)] == ["0 boxes", "1 box", "2 boxes"]
    assert [listing(list("abc")[:n]) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]
    assert [money(Fraction(n, 2)) for n in (1, 2, 7)] == ["$0.50", "$1", "$3.50"]
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 22)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "22nd",
    ]
    assert [clock(m) for m in (5, 545, 720, 815)] == [
        "12:05 a.m.",
        "9:05 a.m.",
        "12:00 p.m.",
        "1:35 p.m.",
    ]
    assert [show(x) for x in (12, Fraction(5, 2), Fraction(-1, 8), Fraction(2, 3))] == [
        "12",
        "2.5",
        "-0.125",
        "2/3",
    ]
