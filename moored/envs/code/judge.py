"""Does a program pass? Finds it in an answer, runs it in the sandbox, compares what came out.

How outputs are compared:

- Lines of output must be equal, without white space at the ends of a line and of the whole. Where
  a line differs, its words are compared one by one: equal text, or numbers of equal value (`1.0`
  and `1.00`). A number that the data set writes with a decimal point may differ by the problem's
  `tolerance`: 0, except for PrimeIntellect and TACO rows.
- Values that a function returns are compared with `==`, floats with that tolerance. Unless the
  problem keeps types, a tuple equals a list. Where a PrimeIntellect or TACO row has a list of one
  value, that value and the list are both right.

Expected outputs never enter the sandbox of a program, except in test code that runs beside it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from moored.envs.code.problem import Case, Problem, parse_source
from moored.envs.code.sandbox import Job, Outcome, SandboxPool

MAX_PROGRAM_CHARS = 32_768
FENCE = re.compile(r"```[A-Za-z0-9]*[ \t]*\r?\n(.*?)```", re.DOTALL)
PRINTS = re.compile(r"print|write|stdout")
NOT_A_VALUE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading or comparing a message may raise: a program can write any in place of the guest."""


@dataclass(slots=True)
class _Set:
    """A set that a program returned. Python's own would take minutes to make from numbers of one
    hash, multiples of 2**61 - 1; compared with an expected one, it ends with the first that is not
    in there."""

    parts: list[object]


@dataclass(slots=True)
class _Dict:
    """A dictionary that a program returned, as pairs, so that no key is hashed."""

    pairs: list[tuple[object, object]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many tests a program passed, and what happened in the first that it did not."""

    num_passed: int
    num_tests: int
    failure: str = ""
    is_program: bool = True
    """False when the answer is not Python."""
    is_late: bool = False
    """A test ran out of time."""

    @property
    def is_right(self) -> bool:
        return self.num_passed == self.num_tests

    @property
    def share(self) -> float:
        return self.num_passed / self.num_tests


def find_program(answer: str) -> str | None:
    """The program in an answer, the last fenced block or all of it; None when it is not Python."""
    blocks = FENCE.findall(answer) if len(answer) <= 2 * MAX_PROGRAM_CHARS else []
    source = (blocks[-1] if blocks else answer).strip()
    if not source or len(source) > MAX_PROGRAM_CHARS:
        return None
    try:
        parse_source(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return source


def judge(answer: str, problem: Problem, pool: SandboxPool, *, wall_s: float) -> Verdict:
    """Run the program in `answer` on all tests of the problem."""
    num_tests = len(problem.cases)
    source = find_program(answer)
    if source is None:
        return Verdict(0, num_tests, "The answer is not a Python program.", is_program=False)
    if problem.entry and problem.entry not in source:
        return Verdict(0, num_tests, f"The program has no function {problem.entry}.")
    if not problem.entry and not PRINTS.search(source):
        return Verdict(0, num_tests, "The program prints nothing.")
    job = Job(
        kind=problem.kind,
        source=source,
        tests=tuple(case.given for case in problem.cases),
        entry=problem.entry,
        preamble=problem.preamble,
        wall_s=wall_s,
    )
    outcomes = pool.run(job)
    passed = [
        passes(outcome, case, problem)
        for outcome, case in zip(outcomes, problem.cases, strict=True)
    ]
    return Verdict(
        sum(passed),
        num_tests,
        _describe_failure(outcomes, passed),
        is_late=any(outcome.status == "timed out" for outcome in outcomes),
    )


def passes(outcome: Outcome, case: Case, problem: Problem) -> bool:
    """Whether what came out of one test is right."""
    if outcome.status != "done":
        return False
    if problem.kind in ("assert", "beside"):
        return True
    if problem.kind == "stdin":
        output = outcome.content.decode("utf-8", "replace")
        return same_output(output, str(case.expected), problem.tolerance)
    try:
        value = json.loads(outcome.content, object_pairs_hook=_read_object)
        return _is_wanted(value, case, problem)
    except NOT_A_VALUE:
        return False


def _is_wanted(value: object, case: Case, problem: Problem) -> bool:
    wanted = [case.expected, [case.expected]] if case.or_list else [case.expected]
    if not problem.keeps_types:
        value, wanted = _without_tuples(value), _without_tuples(wanted)
    return any(same_value(value, expected, problem.tolerance) for expected in wanted)


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare line by line, and a line that differs word by word."""
    lines, wanted = _lines(output), _lines(expected)
    return len(lines) == len(wanted) and all(
        line == other or _same_words(line.split(), other.split(), tolerance)
        for line, other in zip(lines, wanted, strict=True)
    )


def same_value(value: object, expected: object, tolerance: float = 0.0) -> bool:
    """Compare what a function returned; numbers deep inside lists are compared like others."""
    if isinstance(expected, float) and isinstance(value, int | float):
        return value == expected or _is_close(value, expected, tolerance)
    if isinstance(expected, list | tuple) and type(value) is type(expected):
        assert isinstance(value, list | tuple)
        return len(value) == len(expected) and all(
            same_value(x, y, tolerance) for x, y in zip(value, expected, strict=True)
        )
    if isinstance(value, _Set) and isinstance(expected, set | frozenset):
        return _same_set(value.parts, expected)
    if isinstance(value, _Dict) and isinstance(expected, dict):
        return _same_dict(value.pairs, expected)
    return value == expected


def _same_set(parts: list[object], expected: set | frozenset) -> bool:
    found = set()
    for part in parts:
        if part not in expected:
            return False
        found.add(part)
    return len(found) == len(expected)


def _same_dict(pairs: list[tuple[object, object]], expected: dict) -> bool:
    found = {}
    for key, part in pairs:
        if key not in expected:
            return False
        found[key] = part
    return len(found) == len(expected) and all(
        same_value(part, expected[key]) for key, part in found.items()
    )


def _describe_failure(outcomes: list[Outcome], passed: list[bool]) -> str:
    if all(passed):
        return ""
    number = passed.index(False)
    outcome = outcomes[number]
    name = outcome.content.decode("ascii", "replace")
    what = {
        "done": "gave a wrong result",
        "failed": f"raised {name if name.isidentifier() else 'an exception'}",
        "timed out": "ran out of time",
        "flooded": "wrote too much",
        "lost": "ended the process",
        "not run": "was not run",
    }
    return f"Test {number + 1} {what[outcome.status]}."


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_words(words: list[str], wanted: list[str], tolerance: float) -> bool:
    return len(words) == len(wanted) and all(
        word == other or _same_number(word, other, tolerance)
        for word, other in zip(words, wanted, strict=True)
    )


def _same_number(word: str, wanted: str, tolerance: float) -> bool:
    if len(word) > 400 or len(wanted) > 400:
        return False
    try:
        number, other = Decimal(word), Decimal(wanted)
    except InvalidOperation:
        return False
    if not number.is_finite() or not other.is_finite():
        return False
    if number.adjusted() > 300 or other.adjusted() > 300:
        return False
    if number == other:
        return True
    is_decimal = "." in wanted or "e" in wanted.lower()
    return is_decimal and _is_close(float(number), float(other), tolerance)


def _is_close(value: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
    except OverflowError:
        return False


def _read_object(entries: list[tuple[str, Any]]) -> object:
    """An object in the JSON of the guest, see `guest.to_json`."""
    [(kind, content)] = entries
    if kind == "bytes":
        return bytes.fromhex(content)
    makers = {
        "tuple": tuple,
        "set": _Set,
        "dict": lambda pairs: _Dict([(key, part) for key, part in pairs]),
        "complex": lambda parts: complex(*parts),
    }
    return makers[kind](content)


def _without_tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_tuples(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_tuples(part) for key, part in value.items()}
    if isinstance(value, _Dict):
        return _Dict([(key, _without_tuples(part)) for key, part in value.pairs])
    return value
