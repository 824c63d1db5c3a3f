"""Rows of HumanEval and MBPP: a function to write, tested by asserts.

An assert such as `assert f(1, 2) == 3` becomes a call whose result is compared outside the sandbox.
Where a test is anything else (a loop, a tolerance), the test code itself runs in the sandbox, after
the program and beside it: a program made to deceive it could. Results of the program's own types
are refused there, so that `==` cannot be redefined.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping

from moored.envs.base import Split
from moored.envs.code.problem import Case, Problem
from moored.envs.code.syntax import parse_source

MBPP_SPLITS: dict[Split, range] = {
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
"""Task ids of MBPP's own splits; its first ten are examples for prompts, and are trained on."""


def read_humaneval(record: Mapping[str, object]) -> Problem:
    """All of HumanEval is a test set."""
    prompt, entry = str(record["prompt"]), str(record["entry_point"])
    test = str(record["test"])
    cases = _cases_of_check(test)
    return Problem(
        statement=f"Complete this function; write all of it:\n{prompt.strip()}",
        kind="call" if cases else "assert",
        cases=tuple(cases or [Case(f"{test}\ncheck({entry})\n")]),
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
    imports = map(str, _as_list(record.get("test_imports") or []))
    return Problem(
        statement=f"{text}\nA test of it: {asserts[0].strip()}",
        kind="call" if cases else "assert",
        cases=tuple(cases or [Case(f"{setup}\n{test}") for test in asserts]),
        key=text,
        solution=code,
        entry=entry,
        preamble="\n".join(imports),
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
