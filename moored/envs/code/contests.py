"""Rows of DeepCoder-Preview: `problem`, `tests`, and where there are any `solutions`.

The `tests` of the three parts differ. PrimeIntellect: a list of `{"type": "stdin_stdout" |
"function_call", "input", "output", "fn_name"}`. TACO: `{"inputs", "outputs"}`, for functions with
`fn_name`. LiveCodeBench v5: a list of `{"testtype": "stdin" | "functional", "input", "output",
"metadata": {"func_name"}}`, where arguments and results of functions are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moored.envs.code.problem import Case, Problem

TOLERANCE = 1e-5
"""PrimeIntellect's and TACO's judges compare floats by numpy.allclose."""
PREAMBLE = """\
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, nlargest, nsmallest
from itertools import accumulate, chain, combinations, groupby, pairwise, permutations, product
from math import ceil, comb, floor, gcd, inf, isqrt, lcm, log2, sqrt
from typing import *
"""
"""What LeetCode's and LiveCodeBench's judges import before a solution."""


def read_deepcoder(record: Mapping[str, object]) -> Problem | None:
    """The problem of a row; None without tests."""
    tests = _parsed(record["tests"])
    entry, cases, tolerance = _read_tests(tests, record)
    if not cases:
        return None
    text = str(record["problem"]).strip()
    starter = str(record.get("starter_code") or "").strip()
    ask = f"Write the function {entry}." if entry else "Read standard input, write standard output."
    return Problem(
        statement=f"{text}\n\n{ask}" + (f"\nStart from:\n{starter}" if starter else ""),
        kind="call" if entry else "stdin",
        cases=tuple(cases),
        key=text,
        solution=_first_solution(record),
        entry=entry,
        preamble=PREAMBLE if entry else "",
        tolerance=tolerance,
    )


def _read_tests(tests: Any, record: Mapping[str, object]) -> tuple[str, list[Case], float]:
    """Name of the function ("" for programs), cases, tolerance."""
    if isinstance(tests, dict):
        return _read_taco(tests)
    if not tests:
        return "", [], 0.0
    if "testtype" in tests[0]:
        return _read_livecodebench(tests, record)
    entry = str(tests[0].get("fn_name") or "")
    cases = [_call(test["input"], test["output"]) if entry else _text(test) for test in tests]
    return entry, cases, TOLERANCE


def _read_taco(tests: dict[str, Any]) -> tuple[str, list[Case], float]:
    pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    entry = str(tests.get("fn_name") or "")
    if entry:
        return entry, [_call(given, expected) for given, expected in pairs], TOLERANCE
    cases = [_text({"input": given, "output": expected}) for given, expected in pairs]
    return "", cases, TOLERANCE


def _read_livecodebench(
    tests: list[dict[str, Any]], record: Mapping[str, object]
) -> tuple[str, list[Case], float]:
    if tests[0]["testtype"] == "stdin":
        return "", [_text(test) for test in tests], 0.0
    metadata = _parsed(tests[0].get("metadata") or record.get("metadata") or {})
    cases = [Case(_json_lines(test["input"]), json.loads(test["output"])) for test in tests]
    return str(metadata["func_name"]), cases, 0.0


def _call(given: Any, expected: Any) -> Case:
    """Arguments as a list, or as JSON with one in each line.

    Most rows have the result in a list of its own, others have it bare: `[7]` is 7 or the list
    [7]. The judges of both data sets take either.
    """
    arguments = _json_lines(given) if _is_text(given) else given
    is_wrapped = isinstance(expected, list) and len(expected) == 1
    return Case(list(arguments), expected[0] if is_wrapped else expected, or_list=is_wrapped)


def _json_lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _text(test: Mapping[str, Any]) -> Case:
    """Some rows give input or output as a list of lines."""
    given, expected = (
        "\n".join(map(str, part)) if isinstance(part, list) else str(part)
        for part in (test["input"], test["output"])
    )
    return Case(given, expected)


def _first_solution(record: Mapping[str, object]) -> str:
    solutions = record.get("solutions")
    if not solutions:
        return ""
    found = _parsed(solutions) if _is_text(solutions) and str(solutions)[:1] == "[" else solutions
    return str(found[0] if isinstance(found, list) else found)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _parsed(value: object) -> Any:
    return json.loads(value) if isinstance(value, str) else value
