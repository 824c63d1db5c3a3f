"""Rows of HumanEval and MBPP: a function to write, tested by asserts.

An assert such as `assert f(1, 2) == 3` becomes a call whose result is compared outside the sandbox.
Where a test is anything else (a loop, a tolerance), the test code itself runs in a sandbox, in a
process without the program: calls and results cross as plain data. A test that needs more of the
program than calls runs beside it: a program made to deceive it could, so it is not trained on.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping

from moored.envs.base import Split
from moored.envs.code.problem import Case, Kind, Problem
from moored.envs.code.syntax import parse_source

MBPP_SPLITS: dict[Split, range] = {
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
"""Task ids of MBPP's own splits; its first ten are examples for prompts, and are trained on."""
MAKES_DATA = {
    "deepcopy",
    "dict",
    "float",
    "int",
    "len",
    "list",
    "set",
    "sorted",
    "str",
    "sum",
    "tuple",
}


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
    data = {node.id for node in nodes if isinstance(node, ast.Name) and _is_stored(node)}
    loads = [node for node in nodes if isinstance(node, ast.Name) and not _is_stored(node)]
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


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


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
