"""Generated problems: a family, its parameters, tests, and the oracle's program.

The same problem may ask for a function or for a program that reads standard input.
"""

from __future__ import annotations

import functools
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from moored.envs.code.families import FAMILIES, Family
from moored.envs.code.problem import Case, Problem

NUM_SHOWN = 2
"""Examples in the statement; they are tests too."""
NUM_TESTS = 10
MIN_ANSWERS = 4
"""Different answers among the tests, so that no constant passes many of them."""
MAX_TRIES = 50
ENTRY = "solve"


@dataclass(frozen=True, slots=True)
class Draft:
    """What a problem asks for; its tests are drawn later."""

    family: Family
    values: dict[str, object]

    @property
    def key(self) -> str:
        """The same for a program and for a function: both forms belong to one split."""
        words = (f"{name}={value}" for name, value in self.values.items())
        return " ".join([self.family.name, *words])


def draw_draft(rng: random.Random, levels: tuple[int, int]) -> Draft:
    """A family of a level within `levels`, and its parameters."""
    family = rng.choice([f for f in FAMILIES if levels[0] <= f.level <= levels[1]])
    values = {name: rng.choice(choices) for name, choices in family.parameters.items()}
    return Draft(family, values)


def make_problem(draft: Draft, rng: random.Random) -> Problem:
    """Draw tests, and ask for a function or for a program."""
    tests = _draw_tests(rng, draft)
    what = draft.family.what.format(**draft.values)
    write = _function_problem if rng.random() < 0.5 else _stdin_problem
    return write(draft, what, tests)


@functools.lru_cache(maxsize=4096)
def function_of(family: Family, values: tuple[object, ...]) -> Callable[..., object]:
    """The family's own code as a function: ours, never a model's."""
    namespace: dict[str, Callable[..., object]] = {}
    exec(_function_code(family, dict(zip(family.parameters, values, strict=True))), namespace)
    return namespace[ENTRY]


def _draw_tests(rng: random.Random, draft: Draft) -> list[tuple[list, object]]:
    """Different arguments, and their answers; drawn again while the answers hardly differ."""
    family = draft.family
    solve = function_of(family, tuple(draft.values.values()))
    tests: list[tuple[list, object]] = []
    for _ in range(MAX_TRIES):
        drawn: dict[str, list] = {}
        while len(drawn) < NUM_TESTS:
            arguments = family.shape.draw(rng)
            drawn[repr(arguments)] = arguments
        tests = [(arguments, solve(*arguments)) for arguments in drawn.values()]
        if len({repr(answer) for _, answer in tests}) >= MIN_ANSWERS:
            break
    return tests


def _stdin_problem(draft: Draft, what: str, tests: list[tuple[list, object]]) -> Problem:
    shape = draft.family.shape
    cases = tuple(Case(shape.write(given) + "\n", _printed(answer)) for given, answer in tests)
    answer = tests[0][1]
    separated = " Separate the numbers by spaces." if isinstance(answer, list) else ""
    shown = "\n".join(f"Input: {case.given!s}Output: {case.expected}" for case in cases[:NUM_SHOWN])
    return Problem(
        statement=f"The input is one line: {shape.line}. Print {what}.{separated}\n{shown}",
        kind="stdin",
        cases=cases,
        key=draft.key,
        solution=_program(draft.family, draft.values, is_list=isinstance(answer, list)),
        asks=f"{shape.words}, print {what}",
        plan=draft.family.plan.format(**draft.values),
    )


def _function_problem(draft: Draft, what: str, tests: list[tuple[list, object]]) -> Problem:
    shape = draft.family.shape
    cases = tuple(Case(given, answer) for given, answer in tests)
    listed = " Return a list." if isinstance(tests[0][1], list) else ""
    shown = "\n".join(
        f"{ENTRY}({', '.join(map(repr, given))}) returns {answer!r}"
        for given, answer in tests[:NUM_SHOWN]
    )
    return Problem(
        statement=f"Write a function {ENTRY}({shape.argument}) that takes {shape.words} and "
        f"returns {what}.{listed}\n{shown}",
        kind="call",
        entry=ENTRY,
        cases=cases,
        key=draft.key,
        solution=_function_code(draft.family, draft.values),
        asks=f"{shape.words}, return {what}",
        plan=draft.family.plan.format(**draft.values),
    )


def _body(family: Family, values: dict[str, object]) -> str:
    code = family.code.format(**values)
    return code if "\n" in code else f"return {code}"


def _function_code(family: Family, values: dict[str, object]) -> str:
    body = textwrap.indent(_body(family, values), "    ")
    return f"def {ENTRY}({family.shape.argument}):\n{body}"


def _program(family: Family, values: dict[str, object], *, is_list: bool) -> str:
    star = "*" if is_list else ""
    if "\n" in family.code:
        call = f"print({star}{ENTRY}({family.shape.argument}))"
        return f"{_function_code(family, values)}\n\n{family.shape.read}\n{call}"
    return f"{family.shape.read}\nprint({star}{family.code.format(**values)})"


def _printed(answer: object) -> str:
    return " ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
