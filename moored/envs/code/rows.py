"""Problems from data sets: DeepCoder-Preview, HumanEval and MBPP rows, recognised by their columns.

`load_problems(source)` gives the problems of each split. A problem belongs to one split, however
often and in whatever wording of white space it occurs; a row that its data set tests with is never
trained on, nor is one whose tests run beside the program.

An assert such as `assert f(1, 2) == 3` becomes a call whose result is compared outside the sandbox.
Where a test is anything else (a loop, a tolerance), the test code itself runs in a sandbox, in a
process without the program: calls and results cross as plain data. A test that needs more of the
program than calls runs beside it: a program made to deceive it could, so it is not trained on.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moored.envs.base import SPLIT_SEEDS, Split, split_of_content
from moored.envs.code.problem import Case, Kind, Problem, parse_source
from moored.envs.record_files import HUB_PREFIX, Record, file_key, hub_records, read_records
from moored.errors import EnvError

logger = logging.getLogger(__name__)

STRICTEST: tuple[Split, ...] = ("test", "validation", "train")
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
MBPP_SPLITS: dict[Split, range] = {
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
"""Task ids of MBPP's own splits; its first ten are examples for prompts, and are trained on."""
MAKERS = (dict, float, int, len, list, set, sorted, str, sum, tuple)
MAKES_DATA = {"deepcopy", *(function.__name__ for function in MAKERS)}


def load_problems(source: str | Path, max_tests: int) -> Mapping[Split, tuple[Problem, ...]]:
    """The problems of a file or of `hub:owner/name[:config[:split]]`; a repeated call is free."""
    if str(source).startswith(HUB_PREFIX):
        return _load_hub(str(source).removeprefix(HUB_PREFIX), max_tests)
    key = file_key(source, hint=", or 'hub:owner/name:config' for a hub dataset")
    return _load_file(*key, max_tests)


@functools.lru_cache(maxsize=4)
def _load_file(
    path: Path, mtime_ns: int, size: int, max_tests: int
) -> Mapping[Split, tuple[Problem, ...]]:
    # Files of a hub data set are called train-00000-of-00003.parquet, test-….
    is_test = path.name.startswith("test")
    return _collect(read_records(path), str(path), max_tests, is_test=is_test)


@functools.lru_cache(maxsize=4)
def _load_hub(hub_id: str, max_tests: int) -> Mapping[Split, tuple[Problem, ...]]:
    name, config, split = [*hub_id.split(":", 2), "", ""][:3]
    records = hub_records(f"{name}:{config}", split or "train")
    # A part of a split, or several, is written `test[:100]` and `train+test`.
    return _collect(records, name, max_tests, is_test="test" in re.findall("[a-z]+", split))


def _collect(
    records: Iterable[Record], source: str, max_tests: int, *, is_test: bool
) -> Mapping[Split, tuple[Problem, ...]]:
    problems = [_with_few_tests(problem, max_tests) for problem in _read_all(records, source)]
    if is_test:
        problems = [replace(problem, split="test") for problem in problems]
    found = dict(assign_splits(problems))
    trained = tuple(problem for problem in found["train"] if problem.kind != "beside")
    if len(trained) < len(found["train"]):
        logger.warning(
            "%s: %d rows are not trained on, as their tests need objects of the program and so run "
            "beside it, where a program can deceive them",
            source,
            len(found["train"]) - len(trained),
        )
    return {**found, "train": trained}


def _read_all(records: Iterable[Record], source: str) -> list[Problem]:
    """Every problem; rows without tests or with ones that cannot be read are left out."""
    problems: list[Problem] = []
    unusable: list[str] = []
    for where, record in records:
        try:
            problem = _reader_of(where, record)(record)
        except (ValueError, TypeError, LookupError, SyntaxError, AttributeError) as error:
            if isinstance(error, EnvError):
                raise
            unusable.append(f"{where} ({type(error).__name__}: {error})")
            continue
        if problem is None:
            unusable.append(f"{where} (no tests)")
        else:
            problems.append(problem)
    if not problems:
        first = f"the first is {unusable[0]}" if unusable else "there are no rows"
        raise EnvError(f"'{source}': no row can be used, {first}; correct or replace the file")
    if unusable:
        logger.warning(
            "%s: left out %d of %d rows whose tests cannot be used, the first is %s",
            source,
            len(unusable),
            len(problems) + len(unusable),
            unusable[0],
        )
    return problems


def _reader_of(
    where: str, record: Mapping[str, object]
) -> Callable[[Mapping[str, object]], Problem | None]:
    for columns, read in READERS:
        if all(name in record for name in columns):
            return read
    raise EnvError(
        f"{where} has the columns {', '.join(map(str, record)) or '(none)'}; a row needs "
        f"problem and tests (DeepCoder), prompt, entry_point, test and canonical_solution "
        f"(HumanEval), or text, code and test_list (MBPP)"
    )


def assign_splits(problems: Iterable[Problem]) -> Mapping[Split, tuple[Problem, ...]]:
    """Each problem's split: the strictest that one of its rows has, else by the hash of its key."""
    rows: dict[str, list[Problem]] = {}
    for problem in problems:
        rows.setdefault(" ".join(problem.key.split()), []).append(problem)
    found: dict[Split, list[Problem]] = {split: [] for split in SPLIT_SEEDS}
    for key, same in rows.items():
        named = {problem.split for problem in same}
        strictest: list[Split] = [split for split in STRICTEST if split in named]
        found[strictest[0] if strictest else split_of_content(key)] += same
    return {split: tuple(members) for split, members in found.items()}


def _with_few_tests(problem: Problem, max_tests: int) -> Problem:
    """Keep the tests with the longest input, as DeepCoder does, in their order."""
    if len(problem.cases) <= max_tests:
        return problem
    order = sorted(range(len(problem.cases)), key=lambda i: -len(repr(problem.cases[i].given)))
    kept = sorted(order[:max_tests])
    return replace(problem, cases=tuple(problem.cases[i] for i in kept))


def read_deepcoder(record: Mapping[str, object]) -> Problem | None:
    """The problem of a row of `problem`, `tests`, perhaps `solutions`; None without tests.

    The `tests` of the three parts differ. PrimeIntellect: a list of `{"type": "stdin_stdout" |
    "function_call", "input", "output", "fn_name"}`. TACO: `{"inputs", "outputs"}`, for functions
    with `fn_name`. LiveCodeBench v5: a list of `{"testtype": "stdin" | "functional", "input",
    "output", "metadata": {"func_name"}}`, where arguments and results of functions are JSON.
    """
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
    arguments = _json_lines(given) if isinstance(given, str) else given
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
    found = _parsed(solutions) if str(solutions)[:1] == "[" else solutions
    return str(found[0] if isinstance(found, list) else found)


def _parsed(value: object) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def read_humaneval(record: Mapping[str, object]) -> Problem:
    """All of HumanEval is a test set."""
    prompt, entry = str(record["prompt"]), str(record["entry_point"])
    test = str(record["test"])
    cases = _cases_of_check(test)
    run = f"{test}\ncheck({entry})\n"
    return Problem(
        statement=f"Complete this function; write all of it:\n{prompt.strip()}",
        kind="call" if cases else _assert_kind([run], prompt, {entry, "candidate"}),
        cases=tuple(cases or [Case(run)]),
        key=prompt,
        solution=prompt + str(record["canonical_solution"]),
        entry=entry,
        preamble=prompt,  # its imports and helpers; the function in it has no body
        keeps_types=True,
        split="test",
    )


def read_mbpp(record: Mapping[str, object]) -> Problem | None:
    """The sanitized version has `prompt` and `test_imports` for `text` and `test_setup_code`."""
    text = str(record.get("text") or record["prompt"]).strip()
    code = str(record["code"]).replace("\r\n", "\n")
    asserts = [str(test) for test in _as_list(record["test_list"])]
    entry = _function_under_test(asserts, code)
    if not asserts or not entry:
        return None
    cases = _cases_of_asserts([parse_source(test.strip()).body for test in asserts], entry)
    setup = str(record.get("test_setup_code") or "")  # may use what the program defines
    imports = "\n".join(map(str, _as_list(record.get("test_imports") or [])))
    runs = [f"{setup}\n{test}" for test in asserts]
    return Problem(
        statement=f"{text}\nA test of it: {asserts[0].strip()}",
        kind="call" if cases else _assert_kind(runs, imports, {entry}),
        cases=tuple(cases or map(Case, runs)),
        key=text,
        solution=code,
        entry=entry,
        preamble=imports,
        keeps_types=True,
        split=_mbpp_split(record.get("task_id")),
    )


def _mbpp_split(task_id: object) -> Split | None:
    if not isinstance(task_id, int):
        return None
    for split, ids in MBPP_SPLITS.items():
        if task_id in ids:
            return split
    return "train"


def _cases_of_check(test: str) -> list[Case]:
    """The calls that HumanEval's `check(candidate)` makes; none where it does more than assert."""
    for node in parse_source(test).body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            return _cases_of_asserts([[line] for line in node.body], "candidate")
    return []


def _cases_of_asserts(bodies: Iterable[list[ast.stmt]], entry: str) -> list[Case]:
    cases = [_case_of_assert(line, entry) for body in bodies for line in body]
    return [case for case in cases if case] if all(cases) else []


def _case_of_assert(line: ast.stmt, entry: str) -> Case | None:
    """`assert entry(literals) == literal`; None for anything else."""
    match line:
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]),
                ops=[ast.Eq()],
                comparators=[expected],
            )
        ) if name == entry:
            try:
                return Case([ast.literal_eval(x) for x in arguments], ast.literal_eval(expected))
            except ValueError:
                return None
    return None


def _assert_kind(runs: Iterable[str], preamble: str, functions: set[str]) -> Kind:
    return "beside" if any(_needs_objects(run, preamble, functions) for run in runs) else "assert"


def _needs_objects(run: str, preamble: str, functions: set[str]) -> bool:
    """Whether a test needs more of a program than calls from plain data to plain data."""
    nodes = list(ast.walk(parse_source(run)))
    if any(isinstance(node, ast.Lambda | ast.ClassDef | ast.Try) for node in nodes):
        return True
    known = {*dir(builtins), *functions, *_bound([*nodes, *ast.walk(parse_source(preamble))])}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    data = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    loads = [name for name in names if not isinstance(name.ctx, ast.Store)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    tested = [call for call in calls if _name(call.func) in functions]
    fine = {id(call.func) for call in tested}
    fine |= {id(part) for call in calls if _name(call.func) == "check" for part in call.args}
    return (
        any(name.id not in known for name in loads)
        or any(name.id in functions and id(name) not in fine for name in loads)
        or any(call.keywords or not all(_is_data(x, data) for x in call.args) for call in tested)
        or any(_is_read_after(call, loads) for call in tested)
    )


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that code gives a value."""
    for node in nodes:
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.arg(arg=name)
            ):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.split(".")[0]


def _is_data(node: ast.AST, data: set[str]) -> bool:
    """Whether an argument is plain data, as far as its code shows."""
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    match node:
        case ast.Name(id=name):
            return name in data
        case ast.Lambda() | ast.GeneratorExp():
            return False
        case ast.Call(func=func, args=parts, keywords=keywords):
            if _name(func) not in MAKES_DATA or keywords:
                return False
    return all(_is_data(part, data) for part in parts)


def _is_read_after(call: ast.Call, loads: Iterable[ast.Name]) -> bool:
    """Whether a test looks at an argument again, which the function may have changed."""
    given = {part.id for part in call.args if isinstance(part, ast.Name)}
    return any(name.id in given and name.lineno > (call.end_lineno or 0) for name in loads)


def _name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _function_under_test(asserts: Iterable[str], code: str) -> str:
    """The function of the reference program that the tests call."""
    defined = {
        node.name
        for node in ast.walk(parse_source(code))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for test in asserts:
        for node in ast.walk(parse_source(test.strip())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                if name in defined and not hasattr(builtins, name):
                    return name
    return ""


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


READERS = (
    (("entry_point", "canonical_solution", "test", "prompt"), read_humaneval),
    (("code", "test_list"), read_mbpp),
    (("problem", "tests"), read_deepcoder),
)
"""Columns of a kind of row, and what reads it: a problem, or None where it has no tests."""
